"""Recording any Verifiers 0.2 Episode, whoever runs it.

    recorder = Recorder.open("runs/taped", model="Qwen/Qwen3-0.6B", taskset="reverse-text-v1")
    tape = Tape(recorder, step=0, environment=environment)
    async with environment.serving():
        traces = await tape.episode(environment.episode(task, context, n=4)).run()
    await tape.end()

Every try of every rollout is journaled when it returns, also failed, retried and cancelled ones, which Verifiers'
`on_complete` never sees; the last tries are recorded again once their group rewards are in. `end` writes the step.

What becomes of a trace is told by what the trainer took, not by a conversion: the trainer may convert as it likes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rolltape.record.recorder import Committed, Recorder
from rolltape.schema.errors import BadInput, RolltapeError
from rolltape.schema.records import Context, Group, Outcome, Step, Turn

logger = logging.getLogger(__name__)

Turns = Callable[[str], Iterable[Turn]]

LONGEST_WAIT = 10.0
"""Seconds that the end of a step waits for episodes that are being cancelled; tries that go on count as lost."""


@dataclass(frozen=True)
class _Try:
    """One recorded try, without its tokens."""

    context: Context
    summary: Mapping[str, Any]
    """What a group record takes of a trace: id, task index, rewards."""
    error: str | None
    """Type and message of its last error."""
    empty: bool
    cancelled: bool = False

    @property
    def trace_id(self) -> str:
        return str(self.summary["id"])


@dataclass
class _Episode:
    """The tries of one episode."""

    index: int
    size: int
    group_rewards: tuple[str, ...]
    tries: dict[str, _Try] = field(default_factory=dict)
    scored: bool = False
    failure: str | None = None

    def final(self) -> list[_Try]:
        """The last try of each rollout, in the order of rollouts."""
        last: dict[int | None, _Try] = {}
        for each in sorted(self.tries.values(), key=lambda t: (t.context.rollout_index or 0, t.context.try_number)):
            last[each.context.rollout_index] = each
        return list(last.values())


class Tape:
    """Records the episodes of one step."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        step: int,
        split: str = "train",
        eval_name: str | None = None,
        first_group: int | None = None,
        context: Mapping[str, Any] | None = None,
        turns: Turns | None = None,
        environment: Any = None,
    ) -> None:
        """`environment`: Verifiers' Environment that makes the episodes; secrets of its configuration are masked in traces.

        `context`: fields of `Context` that are the same for all traces (model, tokenizer, sampling, renderer).

        `turns`: gives what the engine said of a trace's turns, by trace id.

        `first_group`: number the groups from there on, instead of on from the last step's.
        """
        self.recorder, self.step, self.split, self.eval_name = recorder, step, split, eval_name
        self._next_group = first_group
        self.ended = False
        self._context, self._turns = dict(context or {}), turns
        self._episodes: list[_Episode] = []
        self._open: set[asyncio.Future[None]] = set()
        self._started_at = time.time()
        self._seen: tuple[Any, Any, Any] = (None, None, None)
        """Harness, task's configuration and client of the last episode."""
        if environment is not None:
            recorder.know(environment.config)
        self._group_indices(0)

    def _group_indices(self, n: int) -> int:
        """The first of `n` indices that groups get now."""
        if self._next_group is None:
            return self.recorder.next_group(self.split, self.eval_name, n)
        self._next_group += n
        return self._next_group - n

    # -- while episodes run

    def episode(self, episode: Any) -> Any:
        """`episode` itself, changed so that its run is recorded. Its group gets the next index.

        Raises BadInput where the step has ended.
        """
        from verifiers.v1.decorators import discover_decorated

        if self.ended:
            raise BadInput(f"step {self.step} of {self.split!r} has ended; make a Tape for the next one.")
        names = tuple(f.__name__ for f in discover_decorated(episode.task, "group_reward"))
        kept = _Episode(self._group_indices(1), len(episode.rollouts), names)
        self._episodes.append(kept)
        self._learn(episode.rollouts[0])
        for number, rollout in enumerate(episode.rollouts):
            rollout.run = self._recorded(rollout, rollout.run, kept, number)
        episode.run = self._closed(episode.run, episode.rollouts, kept)
        return episode

    def _learn(self, rollout: Any) -> None:
        """Have secrets masked that an episode itself shows: of its harness, its task and its client."""
        client, seen = rollout.ctx.client, (rollout.harness, getattr(rollout.task, "config", None), rollout.ctx.client)
        if any(a is not b for a, b in zip(seen, self._seen, strict=True)):
            self._seen = seen
            keys = [{"api_key": getattr(c, "api_key", None)} for c in (client, getattr(client, "openai", None))]
            self.recorder.know(getattr(rollout.harness, "config", None), seen[1], *keys)

    def _recorded(
        self, rollout: Any, run: Callable[[], Awaitable[Any]], kept: _Episode, number: int
    ) -> Callable[[], Awaitable[Any]]:
        """`run` of one rollout, each call recorded as one try."""
        tries = 0

        async def recorded() -> Any:
            nonlocal tries
            context = self._placed(rollout, kept, number, tries)
            tries += 1
            before = rollout.trace
            self.recorder.started(self.split, self.step, eval_name=self.eval_name)
            with self._running():
                try:
                    trace = await run()
                    await self._shielded(self._keep(trace, context, kept))
                    return trace
                except BaseException as error:
                    trace = rollout.trace
                    if trace is not None and trace is not before and trace.id not in kept.tries:
                        await self._shielded(self._keep(trace, context, kept, escaped=error))
                    raise

        return recorded

    def _closed(
        self, run: Callable[..., Awaitable[list[Any]]], rollouts: list[Any], kept: _Episode
    ) -> Callable[..., Awaitable[list[Any]]]:
        """`run` of the episode: records the last tries again with their group rewards."""

        async def closed(*args: Any, **kwargs: Any) -> list[Any]:
            with self._running():
                try:
                    traces = await run(*args, **kwargs)
                except asyncio.CancelledError:
                    kept.failure = "its group was cancelled"
                    raise
                except Exception as error:
                    kept.failure = f"the group was not scored: {type(error).__name__}: {error}"
                    await self._shielded(self._again(kept, [rollout.trace for rollout in rollouts]))
                    raise
                kept.scored = True
                await self._shielded(self._again(kept, traces))
                return traces

        return closed

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Let the end of the step wait for what runs inside."""
        ended = asyncio.get_running_loop().create_future()
        self._open.add(ended)
        try:
            yield
        finally:
            self._open.discard(ended)
            if not ended.done():
                ended.set_result(None)

    async def _again(self, kept: _Episode, traces: list[Any]) -> None:
        """Record traces once more: group rewards, and errors of earlier tries, came after their end."""
        for trace in traces:
            known = None if trace is None else kept.tries.get(trace.id)
            if known is not None and (kept.group_rewards or trace.errors):
                await self._keep(trace, known.context, kept)

    @staticmethod
    async def _shielded(work: Awaitable[None]) -> None:
        from verifiers.v1.utils.aio import run_shielded

        await run_shielded(work)

    async def _keep(
        self, trace: Any, context: Context, kept: _Episode, *, escaped: BaseException | None = None
    ) -> None:
        """Record a try. That this fails stops nobody, unless the recorder is strict."""
        if self.ended:
            logger.warning("trace %s ended after its step; it is not recorded", trace.id)
            return
        if self._turns is not None:
            context = replace(context, turns=tuple(self._turns(trace.id)))
        try:
            await self.recorder.trace(trace, context)
        except RolltapeError:
            if self.recorder.strict:
                raise
            logger.exception("trace %s could not be recorded", trace.id)
            return
        cancelled = isinstance(escaped, asyncio.CancelledError)
        error = _told(trace)
        if error is None and escaped is not None and not cancelled:
            error = f"{type(escaped).__name__}: {escaped}"
        kept.tries[trace.id] = _Try(context, _summary(trace), error, not trace.nodes, cancelled)

    def _placed(self, rollout: Any, kept: _Episode, number: int, place: int) -> Context:
        return Context(
            split=self.split,
            eval_name=self.eval_name,
            step=self.step,
            group_index=kept.index,
            rollout_index=number,
            try_number=place,
            **{"sampling": _sampling(rollout.ctx), "model": rollout.ctx.model, **self._context},
        )

    # -- the end of a step

    def rewards(self, trace_id: str) -> Mapping[str, float] | None:
        """The rewards of a recorded trace by name; None where it is unknown."""
        for kept in self._episodes:
            if trace_id in kept.tries:
                rewards: Mapping[str, float] = kept.tries[trace_id].summary["rewards"]
                return rewards
        return None

    def groups(self) -> list[Group]:
        """The group record of each episode that was scored."""
        return [
            Group.from_records(
                [each.summary for each in final],
                split=self.split,
                eval_name=self.eval_name,
                step=self.step,
                group_index=kept.index,
                expected_size=kept.size,
                group_reward_names=kept.group_rewards,
            )
            for kept in self._episodes
            if kept.scored and (final := kept.final())
        ]

    def outcomes(self, emitted: Mapping[str, Any] | None = None) -> list[Outcome]:
        """What became of every recorded try. `emitted`: what the trainer took, by trace id; None where none takes any.

        Raises BadInput for a trace that this step has not recorded: of another step, or by another's name.
        """
        strangers = [name for name in emitted or () if not any(name in kept.tries for kept in self._episodes)]
        if strangers:
            raise BadInput(
                f"{len(strangers)} of {len(emitted or ())} emitted traces are none that step {self.step} recorded, the first "
                f"{strangers[0]!r}; `emitted` takes the ids of traces that its episodes gave."
            )
        return [self._outcome(kept, each, emitted) for kept in self._episodes for each in kept.tries.values()]

    def _outcome(self, kept: _Episode, each: _Try, emitted: Mapping[str, Any] | None) -> Outcome:
        if emitted is not None and each.trace_id in emitted:
            return Outcome(trace_id=each.trace_id, disposition="emitted", **emitted[each.trace_id])
        disposition, reason = self._fate(kept, each, emitted)
        return Outcome(trace_id=each.trace_id, disposition=disposition, reason=reason)

    def _fate(self, kept: _Episode, each: _Try, emitted: Mapping[str, Any] | None) -> tuple[str, str | None]:
        """Disposition and reason of a try that no trainer took."""
        final = kept.final()
        if each.cancelled:
            return "cancelled", "it was cancelled while it ran"
        if each not in final:
            return "retried", each.error
        if each.error is not None:
            return "error", each.error
        if not kept.scored:
            return "incomplete_group", kept.failure or "its group did not end"
        if self.split == "eval":
            return "eval", None
        if emitted is None:
            return "leftover", "recorded without a trainer"
        if any(other.error is not None for other in final):
            return "incomplete_group", "a rollout of its group failed"
        if each.empty:
            return "empty", "nothing was sampled"
        taken = any(other.trace_id in emitted for other in final)
        return "filtered", f"the trainer {'took its group without it' if taken else 'did not take its group'}"

    def _record(self, record: Mapping[str, Any]) -> Step:
        self.ended = True
        return Step(
            **{
                "next_group_index": self._group_indices(0),
                "started_at": self._started_at,
                "ended_at": time.time(),
                **record,
            }
        )

    async def end(self, emitted: Mapping[str, Any] | None = None, **record: Any) -> Committed:
        """Write the step. `emitted` as in `outcomes`; `record`: further fields of the step record.

        Episodes that are being cancelled are waited for. Raises as `Recorder.commit` does.
        """
        loop = asyncio.get_running_loop()
        mine = {each for each in self._open if each.get_loop() is loop}
        if mine:
            await asyncio.wait(mine, timeout=LONGEST_WAIT)
        outcomes = self.outcomes(emitted)
        return await self.recorder.commit(
            self.split,
            self.step,
            eval_name=self.eval_name,
            groups=self.groups(),
            outcomes=outcomes,
            record=self._record(record),
        )

    def end_now(self, emitted: Mapping[str, Any] | None = None, **record: Any) -> Committed:
        """`end` for callers without an event loop."""
        outcomes = self.outcomes(emitted)
        return self.recorder.commit_now(
            self.split,
            self.step,
            eval_name=self.eval_name,
            groups=self.groups(),
            outcomes=outcomes,
            record=self._record(record),
        )


def _summary(trace: Any) -> dict[str, Any]:
    return {"id": trace.id, "task": {"data": {"idx": trace.task.data.idx}}, "rewards": dict(trace.rewards)}


def _told(trace: Any) -> str | None:
    return f"{trace.error.type}: {trace.error.message}" if trace.errors else None


def _sampling(context: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = json.loads(context.sampling.model_dump_json(exclude_none=True))
    return dumped


__all__ = ["Tape"]
