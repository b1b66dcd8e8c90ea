"""Recording without switching: Miles' own Verifiers adapter, as it is, with every trace on tape.

In a module that the training command names as its rollout function:

    from verifiers_rollout import VerifiersRolloutFn as Theirs
    from rolltape.record import attach

    VerifiersRolloutFn = attach(Theirs)        # the run's folder is in ROLLTAPE_RUN

Nothing of the adapter changes: it runs the same episodes and returns the same samples. What it drops (failed tries, groups
that were filtered or left over, cancelled rollouts) is recorded with the reason. A folder that holds the run of the same
model and taskset is continued: the step that Miles asks for supersedes what an earlier attempt recorded from there on.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rolltape.record.recorder import Recorder
from rolltape.record.tape import Tape
from rolltape.schema.errors import BadInput

RUN_VARIABLE = "ROLLTAPE_RUN"


def attach(adapter: Any, run: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """`adapter` with recording: a subclass of a rollout function class, or the changed instance of one.

    `adapter` has Verifiers' Environment as `env` and Miles' arguments as `args`, as Miles' `VerifiersRolloutFn` has. `run`:
    the run's folder, else the environment variable ROLLTAPE_RUN. `options` go to `Recorder.open`.

    Raises BadInput where neither names a folder.
    """
    if not isinstance(adapter, type):
        adapter.__class__ = _recording(type(adapter), run, options)
        adapter._rolltape = _Attachment(adapter, run, options)
        return adapter
    return _recording(adapter, run, options)


def _recording(base: type, run: Any, options: Mapping[str, Any]) -> type:
    """A subclass of `base` whose calls are recorded."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]
        self._rolltape = _Attachment(self, run, options)

    async def __call__(self: Any, input: Any) -> Any:
        return await self._rolltape.call(base.__call__.__get__(self), input)

    namespace = {"__init__": __init__, "__call__": __call__, "__doc__": base.__doc__, "__module__": base.__module__}
    recording: type = type(base.__name__, (base,), namespace)
    return recording


class _Attachment:
    """What recording adds to one adapter."""

    def __init__(self, adapter: Any, run: Any, options: Mapping[str, Any]) -> None:
        self.folder = str(run or os.environ.get(RUN_VARIABLE) or "")
        if not self.folder:
            raise BadInput(
                f"no folder to record into: set {RUN_VARIABLE}, forward it to the rollout actor, or pass run=… to attach()."
            )
        self.adapter, self.options = adapter, dict(options)
        self.recorder: Recorder | None = None
        self.tape: Tape | None = None
        self.next_group = 0
        self._episode = adapter.env.episode
        adapter.env.episode = self._recorded_episode

    def _recorded_episode(self, *args: Any, **kwargs: Any) -> Any:
        episode = self._episode(*args, **kwargs)
        return episode if self.tape is None else self.tape.episode(episode)

    async def call(self, call: Any, input: Any) -> Any:
        """One call of the rollout function, as one step."""
        recorder = self._open(input.rollout_id)
        evaluation = bool(getattr(input, "evaluation", False))
        self.tape = Tape(
            recorder,
            step=input.rollout_id,
            split="eval" if evaluation else "train",
            eval_name=self._taskset() if evaluation else None,
            first_group=self.next_group,
            context={"tokenizer": self._tokenizer()},
        )
        output = None
        try:
            output = call(input)
            if inspect.isawaitable(output):
                output = await output
            return output
        finally:
            self.next_group = self.tape.next_group
            emitted = None if evaluation else _handed(getattr(output, "samples", None) or ())
            await self.tape.end(emitted, cursor=getattr(self.adapter, "_next_train_task_idx", None))
            self.tape = None

    def _open(self, step: int) -> Recorder:
        if self.recorder is None:
            args = self.adapter.args
            self.recorder = Recorder.open(
                self.folder,
                model=getattr(args, "hf_checkpoint", None),
                tokenizer=self._tokenizer(),
                taskset=self._taskset(),
                settings={
                    k: v for k, v in vars(args).items() if isinstance(v, (str, int, float, bool, list, type(None)))
                },
                **{"resume": True, "start_step": step, **self.options},
            )
        return self.recorder

    def _tokenizer(self) -> str | None:
        args = self.adapter.args
        return getattr(args, "sglang_tokenizer_path", None) or getattr(args, "hf_checkpoint", None)

    def _taskset(self) -> str | None:
        config = getattr(self.adapter.env, "config", None)
        return getattr(config, "env_id", None)


def _handed(samples: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """What the trainer got, by trace id: nothing but `remove_sample` can be told from the samples alone."""
    found: dict[str, list[bool]] = {}
    for sample in _flat(samples):
        found.setdefault(sample.routing_key, []).append(bool(getattr(sample, "remove_sample", False)))
    return {trace: {"remove_sample": tuple(flags) if any(flags) else None} for trace, flags in found.items()}


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    for item in samples:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item
