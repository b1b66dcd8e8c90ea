"""Recording without switching: Miles' own Verifiers adapter, as it is, with every trace on tape.

In a module that the training command names as its rollout function:

    from verifiers_rollout import VerifiersRolloutFn as Theirs
    from rolltape.record import attach

    VerifiersRolloutFn = attach(Theirs)        # the run's folder is in ROLLTAPE_RUN

Nothing of the adapter changes: it runs the same episodes and returns the same samples. What it drops (failed tries, groups
that were filtered or left over, cancelled rollouts) is recorded with the reason. A folder that holds the run of the same
model and taskset is continued: the step that Miles asks for supersedes what an earlier attempt recorded from there on.

Recording that fails is logged and stops nobody, unless `strict` is given. A folder that cannot be recorded into, such as one
of another run, is refused at the first call, before any episode.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from rolltape.record.recorder import Recorder
from rolltape.record.tape import Tape
from rolltape.schema.errors import BadInput, RolltapeError
from rolltape.schema.paths import folder_of
from rolltape.schema.storage import place as place_of

logger = logging.getLogger(__name__)

RUN_VARIABLE = "ROLLTAPE_RUN"

_recorders: dict[tuple[str, str], Recorder] = {}
"""Of this process, by folder and writer: Miles makes one adapter for training and one for evaluation."""

_tape: ContextVar[Tape | None] = ContextVar("rolltape_tape", default=None)
"""The tape of the call that runs: training and evaluation may run at once."""


def attach(adapter: Any, run: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """`adapter` with recording: a subclass of a rollout function class, or the changed instance of one.

    `adapter` has Verifiers' Environment as `env` and Miles' arguments as `args`, as Miles' `VerifiersRolloutFn` has. `run`:
    the run's folder, else the environment variable ROLLTAPE_RUN. `options` go to `Recorder.open`.

    Raises BadInput where neither names a folder: of an instance at once, of a class when an instance is made.
    """
    if not isinstance(adapter, type):
        attachment = _Attachment(adapter, run, options)
        adapter.__class__ = _recording(type(adapter), run, options)
        adapter._rolltape = attachment
        return adapter
    return _recording(adapter, run, options)


def _recording(base: Any, run: Any, options: Mapping[str, Any]) -> type:
    """A subclass of `base` whose calls are recorded."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        self._rolltape = _Attachment(self, run, options)

    async def called(self: Any, input: Any) -> Any:
        return await self._rolltape.call(partial(base.__call__, self), input)

    def called_now(self: Any, input: Any) -> Any:
        return self._rolltape.call_now(partial(base.__call__, self), input)

    call = called if inspect.iscoroutinefunction(base.__call__) else called_now
    names = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(base.__name__, (base,), {"__init__": __init__, "__call__": call, **names})


class _Attachment:
    """What recording adds to one adapter."""

    def __init__(self, adapter: Any, run: Any, options: Mapping[str, Any]) -> None:
        self.folder = str(run or os.environ.get(RUN_VARIABLE) or "")
        if not self.folder:
            raise BadInput(
                f"no folder to record into: set {RUN_VARIABLE}, forward it to the rollout actor, or pass run=… to attach()."
            )
        self.adapter, self.options = adapter, dict(options)
        self._last_step: dict[str, int] = {}
        self._episode = adapter.env.episode
        adapter.env.episode = self._recorded_episode

    def _recorded_episode(self, *args: Any, **kwargs: Any) -> Any:
        episode, tape = self._episode(*args, **kwargs), _tape.get()
        return episode if tape is None else tape.episode(episode)

    # -- one call of the rollout function, as one step

    async def call(self, call: Callable[[Any], Any], input: Any) -> Any:
        """A call that is awaited."""
        tape = self._begin(input)
        token = _tape.set(tape)
        output = None
        try:
            output = await call(input)
            return output
        finally:
            _tape.reset(token)
            with _Guarded(tape.recorder.strict):
                await tape.end(self._emitted(tape, output), **self._end(tape))

    def call_now(self, call: Callable[[Any], Any], input: Any) -> Any:
        """A call that is not; where it gives an awaitable all the same, its end is that of the awaitable."""
        tape = self._begin(input)
        token = _tape.set(tape)
        output, later = None, False
        try:
            output = call(input)
            later = inspect.isawaitable(output)
        finally:
            _tape.reset(token)
            if not later:
                with _Guarded(tape.recorder.strict):
                    tape.end_now(self._emitted(tape, output), **self._end(tape))
        return self._later(tape, output) if later else output

    async def _later(self, tape: Tape, awaitable: Any) -> Any:
        token = _tape.set(tape)
        output = None
        try:
            output = await awaitable
            return output
        finally:
            _tape.reset(token)
            with _Guarded(tape.recorder.strict):
                await tape.end(self._emitted(tape, output), **self._end(tape))

    def _begin(self, input: Any) -> Tape:
        evaluation = bool(getattr(input, "evaluation", False))
        name = self._taskset() if evaluation else None
        split = "eval" if evaluation else "train"
        recorder = self._recorder(input.rollout_id)
        folder, step = folder_of(split, name), input.rollout_id
        if evaluation:  # Miles evaluates one rollout id twice where it evaluates after every step
            step = max(step, self._last_step.get(folder, -1) + 1)
        self._last_step[folder] = step
        return Tape(
            recorder,
            step=step,
            split=split,
            eval_name=name,
            context={"tokenizer": self._tokenizer()},
            environment=self.adapter.env if hasattr(self.adapter.env, "config") else None,
        )

    def _end(self, tape: Tape) -> dict[str, Any]:
        """Further fields of the step record."""
        return {"cursor": getattr(self.adapter, "_next_train_task_idx", None) if tape.split == "train" else None}

    def _emitted(self, tape: Tape, output: Any) -> dict[str, dict[str, Any]] | None:
        """What the trainer got, by trace id; None of an evaluation."""
        if tape.split == "eval":
            return None
        recomputed = bool(getattr(self.adapter.args, "recompute_logprobs_via_prefill", False))
        return _handed(getattr(output, "samples", None) or (), tape, recomputed=recomputed)

    # -- the run

    def _recorder(self, step: int) -> Recorder:
        place = str(place_of(self.folder).resolve()), self.options.get("writer", "main")
        if place not in _recorders:
            args = self.adapter.args
            plain = (str, int, float, bool, list, type(None))
            _recorders[place] = Recorder.open(
                self.folder,
                model=getattr(args, "hf_checkpoint", None),
                tokenizer=self._tokenizer(),
                taskset=self._taskset(),
                settings={k: v for k, v in vars(args).items() if isinstance(v, plain)},
                **{"resume": True, "start_step": step, **self.options},
            )
            atexit.register(close, self.folder, place[1])
        return _recorders[place]

    def _tokenizer(self) -> str | None:
        args = self.adapter.args
        return getattr(args, "sglang_tokenizer_path", None) or getattr(args, "hf_checkpoint", None)

    def _taskset(self) -> str | None:
        config = getattr(self.adapter.env, "config", None)
        return getattr(config, "env_id", None)


def close(run: str | os.PathLike[str], writer: str = "main") -> None:
    """End the recording that `attach` began in this process; it also ends with the process."""
    recorder = _recorders.pop((str(place_of(os.fspath(run)).resolve()), writer), None)
    if recorder is not None:
        recorder.close()


class _Guarded:
    """Logs that a step could not be recorded, and lets it pass unless `strict` is set."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if self.strict or not isinstance(error, (RolltapeError, OSError)):
            return False
        logger.error("a step could not be recorded: %s", error)
        return True


def _handed(samples: Iterable[Any], tape: Tape, *, recomputed: bool) -> dict[str, dict[str, Any]]:
    """What the trainer got, by trace id: what its samples say that the trace does not."""
    found: dict[str, list[Any]] = {}
    for sample in _flat(samples):
        found.setdefault(sample.routing_key, []).append(sample)
    known = {trace: rewards for trace in found if (rewards := tape.rewards(trace)) is not None}
    if strangers := [trace for trace in found if trace not in known]:
        logger.warning(
            "step %d: %d traces of other steps were handed over, %s first", tape.step, len(strangers), strangers[0]
        )
    return {trace: _changes(found[trace], rewards, recomputed) for trace, rewards in known.items()}


def _changes(samples: list[Any], rewards: Mapping[str, float], recomputed: bool) -> dict[str, Any]:
    removed = tuple(bool(getattr(sample, "remove_sample", False)) for sample in samples)
    changes: dict[str, Any] = {"remove_sample": removed if any(removed) else None}
    reward = getattr(samples[0], "reward", None)
    if reward is not None and not _same(reward, rewards):
        changes["handed_reward"] = dict(reward) if isinstance(reward, Mapping) else reward
    if recomputed:
        logprobs = [value for sample in samples for value in getattr(sample, "rollout_log_probs", None) or ()]
        changes["logprobs"] = np.asarray(logprobs, np.float32)
    return changes


def _same(reward: Any, rewards: Mapping[str, float]) -> bool:
    """Whether a sample's reward is the trace's: the sum of its rewards, or all of them with the sum."""
    total = float(sum(rewards.values()))
    if isinstance(reward, Mapping):
        expected = {**rewards, "reward": total}
        return reward.keys() == expected.keys() and all(_equal(reward[name], value) for name, value in expected.items())
    return _equal(reward, total)


def _equal(a: Any, b: float) -> bool:
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    for item in samples:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item
