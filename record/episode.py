"""Runs the rollouts of one task, try by try, and records every try.

Verifiers' own `Episode.run` reports the last try of each rollout, and only if nothing raises; here the rollouts of its
episode are run one by one, so that failed, retried and cancelled tries become rows as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.v1.clients import ModelContext
from verifiers.v1.decorators import discover_decorated
from verifiers.v1.retries import should_retry
from verifiers.v1.utils.aio import run_shielded
from verifiers.v1.utils.memory import trim_memory_periodically

from rolltape.record.options import LiveOptions
from rolltape.record.progress import Progress, TraceNews
from rolltape.record.recorder import NotDurable
from rolltape.record.transport import SGLangTransport, is_unsupported
from rolltape.schema.records import Context, Group

logger = logging.getLogger(__name__)

Member = tuple[Any, Context]
"""The last trace of a rollout and the context it was recorded in."""

MOST_RETRIES = 100
"""A bound on the retries an environment may ask for: an environment that always fails must end."""


class TraceRecorder(Protocol):
    """The part of `rolltape.record.recorder.Recorder` that episodes need."""

    run_id: str
    attempt: int
    writer: str

    def started(self, split: str, step: int, n: int = 1, eval_name: str | None = None) -> None: ...

    async def trace(self, trace: Any, context: Context) -> bool: ...


@dataclass(frozen=True)
class StepPlace:
    """Which step a group belongs to."""

    split: str
    step: int
    eval_name: str | None = None


@dataclass
class Try:
    """One try of a rollout, without its trace."""

    trace_id: str
    rollout_index: int
    error: str | None
    """Type and message of its last error."""
    branches: int
    tokens: int
    """Sampled, counted once per node."""
    reward: float | None
    retried: bool = False
    cancelled: bool = False
    recorded: bool = True


@dataclass
class GroupRun:
    """What came of one task: its tries, and the group record once its rollouts have ended."""

    index: int
    tries: list[Try] = field(default_factory=list)
    group: Group | None = None
    failure: str | None = None
    """Why the group as a whole is worth nothing: its group reward raised, or every rollout ended in an error."""
    scored: bool = False
    """Whether every rollout has ended and the group rewards are there; where they raised, they are not."""


@dataclass
class Stop:
    """Why a run ends early; set once, and looked at by everything that would start something new."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str | None = None
    """"interrupted", "terminated", "unsupported", "failing", "recording" or "strict"."""
    message: str | None = None

    def set(self, reason: str, message: str | None = None) -> None:
        """End the run; the first reason stays."""
        if self.reason is None:
            self.reason, self.message = reason, message
        self.event.set()


@dataclass
class EpisodeRunner:
    """Everything the groups of a run share."""

    environment: Any
    """Verifiers' Environment, serving."""
    context: ModelContext
    transport: SGLangTransport
    recorder: TraceRecorder
    options: LiveOptions
    progress: Progress
    stop: Stop
    semaphore: asyncio.Semaphore
    versions: dict[str, str] = field(default_factory=dict)
    renderer: dict[str, Any] = field(default_factory=dict)
    recording_failures: int = 0
    turns: Counter[bool] = field(default_factory=Counter)
    """Turns, by whether the engine named its weight version."""

    async def run_group(self, task: Any, run: GroupRun, place: StepPlace, seed: int) -> None:
        """Run, score and record the rollouts of `task`; `run` holds what came of it, also when this is cancelled."""
        names = tuple(reward.__name__ for reward in discover_decorated(task, "group_reward"))
        members: list[Member | None] = [None] * self.options.rollouts
        episode = self.environment.episode(task, self.context, n=self.options.rollouts)
        rollouts = [
            asyncio.ensure_future(self._run_rollout(rollout, number, run, place, seed + number, members))
            for number, rollout in enumerate(episode.rollouts)
        ]
        try:
            await asyncio.gather(*rollouts)
            if None not in members:
                await self._score(task, run, [member for member in members if member is not None], names)
        finally:
            for rollout in rollouts:
                rollout.cancel()
            await asyncio.gather(*rollouts, return_exceptions=True)
            ended = [member for member in members if member is not None]
            run.group = self._group(run, ended, place, names)
        if run.failure is None and ended and all(trace.has_error for trace, _ in ended):
            run.failure = f"all {len(ended)} rollouts failed; the last error is {_error(ended[-1][0])}"

    async def _run_rollout(
        self,
        rollout: Any,
        number: int,
        run: GroupRun,
        place: StepPlace,
        seed: int,
        members: list[Member | None],
    ) -> None:
        """All tries of one rollout; its last trace goes to `members`."""
        rollout.ctx = self._seeded(rollout.ctx, seed)
        policy = self.environment.config.retries.rollout
        asked = self.options.rollout_retries
        most = min(policy.max_retries if asked is None else asked, MOST_RETRIES)
        for attempt in range(most + 1):
            async with self.semaphore:
                if self.stop.event.is_set():
                    return
                trace = await self._one_try(rollout, place, run, number, attempt)
            again = not self._is_final(trace) and attempt < most and should_retry(trace, policy)
            context = self._context(trace, run, place, number, attempt)
            self.transport.forget(trace.id)
            if not again:
                members[number] = (trace, context)
            await run_shielded(self._keep(trace, context, run, number, retried=again))
            if not again:
                break
        await trim_memory_periodically()

    async def _one_try(self, rollout: Any, place: StepPlace, run: GroupRun, number: int, attempt: int) -> Any:
        """The trace of one try. A cancelled one is recorded too, before the cancellation goes on."""
        before = rollout.trace
        self.recorder.started(place.split, place.step, eval_name=place.eval_name)
        try:
            return await rollout.run()
        except asyncio.CancelledError:
            if (trace := rollout.trace) is not None and trace is not before:
                context = self._context(trace, run, place, number, attempt)
                self.transport.forget(trace.id)
                await run_shielded(self._keep(trace, context, run, number, cancelled=True))
            raise
        except Exception as error:
            # Verifiers records what goes wrong inside a rollout; this is what escapes it.
            if (trace := rollout.trace) is None or trace is before:
                self.stop.set("failing", f"A rollout could not be started: {type(error).__name__}: {error}")
                raise asyncio.CancelledError from error
            trace.capture_error(error)
            return trace

    def _is_final(self, trace: Any) -> bool:
        """Whether the error is one that no retry changes; it ends the run."""
        if trace.has_error and is_unsupported(trace.error.message):
            self.stop.set("unsupported", trace.error.message)
            return True
        return False

    async def _score(self, task: Any, run: GroupRun, ended: list[Member], names: tuple[str, ...]) -> None:
        """Group rewards, where the task has them; a reward that raises costs the group, not its traces."""
        if not names:
            run.scored, run.failure = True, None
            return
        try:
            await task.score_group([trace for trace, _ in ended])
        except Exception as error:
            run.failure = f"the group reward failed: {error}"
            logger.warning("group %d: %s", run.index, run.failure)
        else:
            run.scored, run.failure = True, None
        await run_shielded(self._keep_again(run, ended))

    async def _keep_again(self, run: GroupRun, ended: list[Member]) -> None:
        """Record traces once more, with their group rewards."""
        for trace, context in ended:
            await self._keep(trace, context, run, context.rollout_index or 0, again=True)

    def _group(self, run: GroupRun, ended: list[Member], place: StepPlace, names: tuple[str, ...]) -> Group | None:
        """The group record of the last tries that were recorded; None where there are none."""
        kept = {entry.trace_id for entry in run.tries if entry.recorded}
        traces = [trace for trace, _ in ended if trace.id in kept]
        if not traces:
            return None
        return Group.from_records(
            traces,
            split=place.split,
            eval_name=place.eval_name,
            step=place.step,
            group_index=run.index,
            expected_size=self.options.rollouts,
            group_reward_names=names,
        )

    async def _keep(
        self,
        trace: Any,
        context: Context,
        run: GroupRun,
        number: int,
        *,
        retried: bool = False,
        cancelled: bool = False,
        again: bool = False,
    ) -> None:
        """Record a trace. That this fails is counted and shown and ends the run only where `strict` is set."""
        entry = _try(trace, number, retried=retried, cancelled=cancelled)
        durable = False
        try:
            durable = await self.recorder.trace(trace, context)
        except NotDurable as error:
            self._failed(f"Trace {trace.id}: {error}")
        except Exception as error:
            entry.recorded = False
            self.recording_failures += 1
            self._failed(f"Trace {trace.id} could not be recorded: {type(error).__name__}: {error}")
        if again:
            run.tries = [old for old in run.tries if old.trace_id != trace.id]
        else:
            self.turns.update(turn.weight_version is not None for turn in context.turns)
            self.progress.trace(
                TraceNews(
                    entry.tokens,
                    entry.reward,
                    entry.error,
                    retried=retried,
                    truncated=trace.is_truncated,
                    durable=durable or not self.options.journal,
                )
            )
        run.tries.append(entry)

    def _failed(self, message: str) -> None:
        logger.warning(message)
        self.progress.note(message)
        if self.options.strict:
            self.stop.set("strict", message)

    def _context(self, trace: Any, run: GroupRun, place: StepPlace, number: int, attempt: int) -> Context:
        return Context(
            run=self.recorder.run_id,
            split=place.split,
            eval_name=place.eval_name,
            step=place.step,
            attempt=self.recorder.attempt,
            writer=self.recorder.writer,
            group_index=run.index,
            rollout_index=number,
            try_number=attempt,
            model=self.options.model,
            tokenizer=self.options.tokenizer or self.options.model,
            sampling=self.options.sampling(),
            renderer=self.renderer,
            verifiers_version=self.versions.get("verifiers"),
            turns=tuple(self.transport.turns(trace.id)),
        )

    def _seeded(self, context: ModelContext, seed: int) -> ModelContext:
        if not self.options.deterministic:
            return context
        sampling = context.sampling.model_copy(update={"sampling_seed": seed % (1 << 31)})
        return ModelContext(model=context.model, client=context.client, sampling=sampling)


def _try(trace: Any, number: int, *, retried: bool, cancelled: bool) -> Try:
    return Try(
        trace_id=trace.id,
        rollout_index=number,
        error=_error(trace) if trace.has_error else None,
        branches=trace.num_branches,
        tokens=sum(sum(node.mask) for node in trace.nodes),
        reward=trace.reward if trace.rewards else None,
        retried=retried,
        cancelled=cancelled,
    )


def _error(trace: Any) -> str:
    error = trace.error
    return f"{error.type}: {error.message}"
