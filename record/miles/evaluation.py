"""One evaluation: every task with its overrides; a rollout that fails has reward None and costs only itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifiers.v1.utils.aio import run_shielded

from rolltape.record.episode import GroupRun, StepPlace, Stop
from rolltape.record.miles.options import eval_args
from rolltape.record.miles.parts import (
    Parts,
    RolloutsStopped,
    TraceFacts,
    fate_of,
    outcomes_of,
    recording_metrics,
)
from rolltape.record.recorder import Recorder
from rolltape.replay.batches import Evaluated, evaluated
from rolltape.replay.miles import Conversations, count_metrics, evaluation_output, to_miles
from rolltape.schema.records import Step

logger = logging.getLogger(__name__)


@dataclass
class _Scored:
    """A rollout with what Miles gets of it."""

    rollout: Evaluated
    samples: list[Any]


class EvalStep:
    """Runs one evaluation. `run` gives Miles' output, after the evaluation is recorded."""

    def __init__(self, parts: Parts, recorder: Recorder, step: int, name: str) -> None:
        self.parts, self.recorder = parts, recorder
        self.place = StepPlace("eval", step, name)
        self.stop = Stop()
        self.runner = parts.runner(recorder, self.stop, evaluation=True)
        self.runs = [GroupRun(index) for index in range(len(parts.tasks))]
        self.facts = TraceFacts()
        self._started_at = time.time()

    async def run(self) -> Any:
        """Raises RolloutsStopped where no rollout at all gives a sample; what ended is recorded first."""
        try:
            await self._all_groups()
            scored = await self._score(await asyncio.to_thread(self._evaluated))
        except BaseException:
            await run_shielded(self._record({}))
            raise
        handed = {s.rollout.trace_id: {"handed_reward": s.rollout.reward} for s in scored if self._scores(s)}
        record = await self._record(handed)
        samples = [sample for one in scored for sample in one.samples]
        if not samples:
            raise RolloutsStopped(
                f"No rollout of the evaluation gave a sample; the last error is: {self._last_error()}"
            )
        metrics = {**self.facts.metrics(), **count_metrics(record), **recording_metrics(self.recorder)}
        return evaluation_output(self.parts.taskset, [one.rollout for one in scored], samples, metrics)

    async def _all_groups(self) -> None:
        """Run every task's group; one that fails costs itself."""
        seed, rollouts = self.runner.options.seed, self.runner.options.rollouts
        tasks = [
            asyncio.create_task(self.runner.run_group(task, run, self.place, seed + run.index * rollouts))
            for task, run in zip(self.parts.tasks, self.runs, strict=True)
        ]
        stopped = asyncio.create_task(self.stop.event.wait())
        ended = asyncio.create_task(_ended(tasks))
        try:
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self.stop.event.is_set():
                raise RolloutsStopped(self.stop.message or "the evaluation was stopped")
            for run, task in zip(self.runs, tasks, strict=True):
                error = None if task.cancelled() else task.exception()
                if error is not None:
                    run.failure = f"{type(error).__name__}: {error}"
                    logger.error("group %d of the evaluation could not be run", run.index, exc_info=error)
        finally:
            stopped.cancel()
            await self._cancel(tasks)
            await ended

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.runner.transport.abort_all()

    def _evaluated(self) -> list[tuple[Evaluated, list[Any]]]:
        """Every rollout in the order of the tasks, with its Miles Samples; rewards where Verifiers gave them."""
        args, options = eval_args(self.parts.options.args), self.parts.options.conversion(evaluation=True)
        groups = [run.group for run in self.runs if run.group is not None]
        table = self.recorder.rows("eval", self.place.step, self.place.eval_name)
        key = None if self.parts.options.miles_rewards else args.reward_key
        known = {rollout.trace_id: rollout for rollout in evaluated(table, groups, options, key)}
        finals = [trace in known for trace in table.column("trace_id").to_pylist()]
        self.facts.add(table.filter(finals))
        told = Conversations(table) if self.parts.options.messages else None
        result = []
        for rollout in (rollout for run in self.runs for rollout in self._of(run, known)):
            samples = [to_miles(sample) for sample in rollout.samples]
            for sample in samples:
                if told is not None:
                    told.tell(sample)
            result.append((rollout, samples))
        return result

    def _of(self, run: GroupRun, known: dict[str, Evaluated]) -> list[Evaluated]:
        """A group's rollouts; those that left nothing, or were not scored, have reward None."""
        traces = run.group.trace_ids if run.group is not None else ()
        found = [known[trace] if run.scored else replace(known[trace], reward=None) for trace in traces]
        missing = self.runner.options.rollouts - len(found)
        return found + [Evaluated("", None, failed=True, truncated=False, samples=[])] * missing

    async def _score(self, rollouts: list[tuple[Evaluated, list[Any]]]) -> list[_Scored]:
        """Rewards by Miles' reward model, where there is one; a model that fails costs the rollout its reward."""
        return list(await asyncio.gather(*(self._scored(rollout, samples) for rollout, samples in rollouts)))

    async def _scored(self, rollout: Evaluated, samples: list[Any]) -> _Scored:
        if not self.parts.options.miles_rewards or rollout.failed:
            return _Scored(rollout, samples)
        if not samples:
            return _Scored(replace(rollout, reward=None), samples)
        reward: float | None = None
        try:
            reward = await self.parts.hooks.eval_reward(samples[-1], eval_args(self.parts.options.args))
        except Exception:
            logger.exception("Miles' reward model failed on trace %s", rollout.trace_id)
        for sample in samples:
            sample.reward = samples[-1].reward
        return _Scored(replace(rollout, reward=reward), samples)

    def _scores(self, one: _Scored) -> bool:
        """Whether a rollout's reward came from Miles."""
        return self.parts.options.miles_rewards and one.rollout.reward is not None

    def _last_error(self) -> str:
        errors = [entry.error for run in self.runs for entry in run.tries if entry.error is not None]
        failures = [run.failure for run in self.runs if run.failure is not None]
        return next(iter([*errors[-1:], *failures[-1:]]), "none was told")

    async def _record(self, handed: dict[str, dict[str, Any]]) -> Step:
        fates = {
            entry.trace_id: fate_of(run, entry, self.place)
            for run in self.runs
            for entry in run.tries
            if entry.recorded
        }
        record = Step(
            split="eval",
            eval_name=self.place.eval_name,
            step=self.place.step,
            options=self.parts.options.conversion(evaluation=True).to_dict(),
            started_at=self._started_at,
            ended_at=time.time(),
        )
        committed = await self.recorder.commit(
            "eval",
            self.place.step,
            eval_name=self.place.eval_name,
            groups=[run.group for run in self.runs if run.group is not None and run.scored],
            outcomes=outcomes_of(fates, handed),
            record=record,
        )
        return committed.step


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> bool:
    """Wait for all of them, however they end."""
    await asyncio.gather(*tasks, return_exceptions=True)
    return True
