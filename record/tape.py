"""Recording any Verifiers 0.2 Episode, whoever runs it.

    recorder = Recorder.open("runs/mine", model="Qwen/Qwen3-0.6B", taskset="reverse-text-v1")
    tape = Tape(recorder, step=0)
    async with environment.serving():
        traces = await tape.episode(environment.episode(task, context, n=4)).run()
    await tape.end()

Every try of every rollout is journaled when it returns, also failed, retried and cancelled ones, which Verifiers'
`on_complete` never sees; the last tries are recorded again once their group rewards are in. `end` writes the step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltape.record.recorder import Committed, Recorder
from rolltape.schema.records import Context, Group, Outcome, Step, Turn

Turns = Callable[[str], Iterable[Turn]]


@dataclass
class _Recorded:
    """One try that is recorded."""

    trace: Any
    context: Context
    cancelled: bool = False
    last: bool = False


@dataclass
class _Episode:
    """The tries of one episode."""

    index: int
    size: int
    group_rewards: tuple[str, ...]
    tries: dict[str, _Recorded] = field(default_factory=dict)
    scored: bool = False
    failure: str | None = None


class Tape:
    """Records the episodes of one step."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        step: int,
        split: str = "train",
        eval_name: str | None = None,
        first_group: int = 0,
        context: Mapping[str, Any] | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`context`: fields of `Context` that are the same for all traces (model, tokenizer, sampling, renderer).

        `turns`: gives what the engine said of a trace's turns, by trace id.
        """
        self.recorder, self.step, self.split, self.eval_name = recorder, step, split, eval_name
        self.next_group = first_group
        self._context, self._turns = dict(context or {}), turns
        self._episodes: list[_Episode] = []
        self._started_at = time.time()

    def episode(self, episode: Any) -> Any:
        """`episode` itself, changed so that its run is recorded. Its group gets the next index of the step."""
        from verifiers.v1.decorators import discover_decorated

        names = tuple(f.__name__ for f in discover_decorated(episode.task, "group_reward"))
        kept = _Episode(self.next_group, len(episode.rollouts), names)
        self.next_group += 1
        self._episodes.append(kept)
        for number, rollout in enumerate(episode.rollouts):
            rollout.run = self._recorded(rollout, rollout.run, kept, number)
        episode.run = self._closed(episode.run, kept)
        return episode

    def _recorded(
        self, rollout: Any, run: Callable[[], Awaitable[Any]], kept: _Episode, number: int
    ) -> Callable[[], Awaitable[Any]]:
        """`run` of one rollout, each call recorded as one try."""
        tries = 0

        async def recorded() -> Any:
            nonlocal tries
            place = tries
            tries += 1
            before = rollout.trace
            self.recorder.started(self.split, self.step, eval_name=self.eval_name)
            try:
                trace = await run()
            except BaseException:
                if rollout.trace is not None and rollout.trace is not before:
                    await self._shielded(rollout.trace, rollout, kept, number, place, cancelled=True)
                raise
            await self._shielded(trace, rollout, kept, number, place)
            return trace

        return recorded

    def _closed(self, run: Callable[..., Awaitable[list[Any]]], kept: _Episode) -> Callable[..., Awaitable[list[Any]]]:
        """`run` of the episode: records the last tries again with their group rewards."""

        async def closed(*args: Any, **kwargs: Any) -> list[Any]:
            try:
                traces = await run(*args, **kwargs)
            except Exception as error:
                kept.failure = f"the group was not scored: {type(error).__name__}: {error}"
                raise
            kept.scored = True
            for trace in traces:
                found = kept.tries.get(trace.id)
                if found is not None:
                    found.last = True
                    if kept.group_rewards or trace.errors:  # group rewards, and errors of earlier tries, came later
                        await self.recorder.trace(trace, found.context)
            return traces

        return closed

    async def _shielded(
        self, trace: Any, rollout: Any, kept: _Episode, number: int, place: int, *, cancelled: bool = False
    ) -> None:
        from verifiers.v1.utils.aio import run_shielded

        await run_shielded(self._keep(trace, rollout, kept, number, place, cancelled))

    async def _keep(self, trace: Any, rollout: Any, kept: _Episode, number: int, place: int, cancelled: bool) -> None:
        context = Context(
            split=self.split,
            eval_name=self.eval_name,
            step=self.step,
            group_index=kept.index,
            rollout_index=number,
            try_number=place,
            turns=tuple(self._turns(trace.id)) if self._turns else (),
            **{"sampling": _sampling(rollout.ctx), "model": rollout.ctx.model, **self._context},
        )
        await self.recorder.trace(trace, context)
        kept.tries[trace.id] = _Recorded(trace, context, cancelled)

    # -- the end of a step

    def groups(self) -> list[Group]:
        """The group record of each episode that was scored."""
        return [
            Group.from_records(
                [r.trace for r in sorted(last, key=lambda r: r.context.rollout_index or 0)],
                split=self.split,
                eval_name=self.eval_name,
                step=self.step,
                group_index=kept.index,
                expected_size=kept.size,
                group_reward_names=kept.group_rewards,
            )
            for kept in self._episodes
            if kept.scored and (last := [r for r in kept.tries.values() if r.last])
        ]

    def outcomes(self, emitted: Mapping[str, Any] | None = None) -> list[Outcome]:
        """What became of every recorded try. `emitted`: what the trainer took, by trace id; None where none takes any."""
        return [self._outcome(kept, r, emitted) for kept in self._episodes for r in kept.tries.values()]

    def _outcome(self, kept: _Episode, r: _Recorded, emitted: Mapping[str, Any] | None) -> Outcome:
        trace = r.trace
        if r.cancelled:
            return Outcome(trace_id=trace.id, disposition="cancelled", reason="it was cancelled while it ran")
        if kept.scored and not r.last:
            return Outcome(trace_id=trace.id, disposition="retried", reason=_error(trace))
        if emitted is not None and trace.id in emitted:
            return Outcome(trace_id=trace.id, disposition="emitted", **emitted[trace.id])
        if trace.errors:
            return Outcome(trace_id=trace.id, disposition="error", reason=_error(trace))
        if not kept.scored:
            why = kept.failure or "its group did not end"
            return Outcome(trace_id=trace.id, disposition="incomplete_group", reason=why)
        if self.split == "eval":
            return Outcome(trace_id=trace.id, disposition="eval")
        if emitted is None:
            return Outcome(trace_id=trace.id, disposition="leftover", reason="recorded without a trainer")
        if any(m.last and m.trace.errors for m in kept.tries.values()):
            return Outcome(trace_id=trace.id, disposition="incomplete_group", reason="a rollout of its group failed")
        return Outcome(trace_id=trace.id, disposition="filtered", reason="the trainer did not take its group")

    async def end(self, emitted: Mapping[str, Any] | None = None, **record: Any) -> Committed:
        """Write the step. `emitted` as in `outcomes`; `record`: further fields of the step record."""
        return await self.recorder.commit(
            self.split,
            self.step,
            eval_name=self.eval_name,
            groups=self.groups(),
            outcomes=self.outcomes(emitted),
            record=Step(next_group_index=self.next_group, started_at=self._started_at, ended_at=time.time(), **record),
        )


def _error(trace: Any) -> str | None:
    return f"{trace.error.type}: {trace.error.message}" if trace.errors else None


def _sampling(context: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = json.loads(context.sampling.model_dump_json(exclude_none=True))
    return dumped


__all__ = ["Tape"]
