"""One training step: groups in the order of their tasks, sampled until a batch is full, handed over, recorded.

    task ─► rollouts, recorded ─► converted ─► Miles' reward ─► dynamic filter ─► batch ─► Miles' hooks ─► outcomes ─► commit

A group that fails costs itself and is replaced by the next task's. Failures in a row are counted, and a run that cannot
succeed ends with the last error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from verifiers.v1.utils.aio import run_shielded

from rolltape.record.episode import GroupRun, StepPlace, Stop, Try
from rolltape.record.miles.hooks import changes_of, flat
from rolltape.record.miles.parts import (
    Parts,
    RolloutsStopped,
    TraceFacts,
    fate_of,
    outcomes_of,
    recording_metrics,
)
from rolltape.record.recorder import Recorder
from rolltape.record.step import Counters, Fate
from rolltape.replay.checks.groups import signal
from rolltape.replay.convert import Conversion, convert, flatten
from rolltape.replay.digest import digest
from rolltape.replay.miles import Conversations, base_types, count_metrics, nested, to_miles
from rolltape.replay.outcomes import finish
from rolltape.replay.sample import Sample
from rolltape.schema.errors import BadInput, CheckFailed
from rolltape.schema.records import Step

logger = logging.getLogger(__name__)

PARTLY = 16
"""A group with sound rollouts that is lost all the same counts as this part of a failure: it may be bad luck."""

STILL_RUNNING = "its group still ran when the step had enough"


@dataclass
class Taken:
    """A task's group in this step."""

    run: GroupRun
    task: Any
    seed: int
    first_sample: int | None
    """Index of its first sample, reserved when it starts; None where it is known only when it is converted."""
    conversion: Conversion | None = None
    samples: list[Any] | None = None
    """Its Miles Samples, where it can be trained."""
    lost: str | None = STILL_RUNNING
    """Why it was not handed over, where its conversion does not say so; None where it is, or a filter spoke."""
    filtered: str | None = None
    """What the dynamic filter said against it."""

    @property
    def index(self) -> int:
        return self.run.index


class TrainStep:
    """Runs one step. `run` gives Miles' output, after the step is recorded."""

    def __init__(self, parts: Parts, recorder: Recorder, step: int, counters: Counters) -> None:
        self.parts, self.recorder, self.counters = parts, recorder, counters
        self.place = StepPlace("train", step)
        self.stop = Stop()
        self.runner = parts.runner(recorder, self.stop, evaluation=False)
        self.options = parts.options.conversion()
        self.taken: list[Taken] = []
        self.kept: list[Taken] = []
        self.converted: list[Taken] = []
        self.drops: Counter[str] = Counter()
        self.facts = TraceFacts()
        self.flat_groups = 0
        self.failed = 0.0
        self.last_error = "no rollout ended"
        self._numbering = asyncio.Lock()
        self._started_at = time.time()

    async def run(self) -> Any:
        """Sample, hand over, record. Raises RolloutsStopped where no batch can be had; what ended is recorded first."""
        try:
            await self._collect()
            data = [taken.samples for taken in _in_order(self.kept)]
            everything = [taken.samples for taken in _in_order(self.converted)]
            url = self.runner.transport.engine_url
            await self.parts.hooks.finish(data, everything, self.parts.data_source, url)
            changes = self._changes(data)
        except BaseException as error:
            for taken in self.kept:
                taken.lost = f"the step ended with {type(error).__name__}: {error}"
            self.kept = []
            await run_shielded(self._record([], {}))
            raise
        record = await self._record(data, changes)
        return base_types().RolloutFnTrainOutput(samples=data, metrics=self._metrics(record))

    # -- sampling

    async def _collect(self) -> None:
        """Run groups until the batch is full."""
        wanted = self.parts.options.args.rollout_batch_size
        running: dict[asyncio.Task[None], Taken] = {}
        stopped = asyncio.create_task(self._stopped())
        try:
            while len(self.kept) < wanted:
                if len(self.kept) + len(running) < wanted:
                    running.update(self._start() for _ in range(self.parts.options.over_sampling))
                done, _ = await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done - {stopped}, key=lambda task: running[task].index):
                    self._judge(task, running.pop(task), wanted)
                if self.stop.event.is_set():
                    raise RolloutsStopped(self.stop.message or "rollouts were stopped")
        finally:
            stopped.cancel()
            await self._cancel(running)

    async def _stopped(self) -> None:
        await self.stop.event.wait()

    def _start(self) -> tuple[asyncio.Task[None], Taken]:
        """Start the next task's group."""
        counters, rollouts = self.counters, self.runner.options.rollouts
        place, counters.cursor = counters.cursor, counters.cursor + 1
        first = None
        if self.options.branch_policy == "reject":
            first, counters.next_sample_index = counters.next_sample_index, counters.next_sample_index + rollouts
        task = self.parts.tasks[place % len(self.parts.tasks)]
        seed = self.runner.options.seed + place * rollouts
        taken = Taken(GroupRun(counters.next_group_index), task, seed, first)
        counters.next_group_index += 1
        self.taken.append(taken)
        return asyncio.create_task(self._group(taken)), taken

    async def _group(self, taken: Taken) -> None:
        """Run, convert and score one group."""
        await self.runner.run_group(taken.task, taken.run, self.place, taken.seed)
        await self._convert(taken)
        if taken.samples is not None:
            try:
                await self.parts.hooks.reward(taken.samples)
            except Exception as error:
                taken.samples, taken.lost = None, f"Miles' reward failed: {type(error).__name__}: {error}"
                raise

    def _judge(self, task: asyncio.Task[None], taken: Taken, wanted: int) -> None:
        """Keep an ended group, or say why not."""
        if taken.lost == STILL_RUNNING:
            taken.lost = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CheckFailed):
            self.stop.set("strict", str(error))
        if error is not None:
            taken.lost = taken.lost or f"its group could not be run: {type(error).__name__}: {error}"
            logger.error("group %d: %s", taken.index, taken.lost, exc_info=error)
            return self._fail("episode_error", taken.lost, wholly=True)
        if taken.samples is None:
            return self._fail(*self._why_lost(taken))
        if self.parts.hooks.all_samples is not None:
            self.converted.append(taken)
        try:
            self.flat_groups += self._is_flat(taken.samples)
            keep, reason = self.parts.hooks.keep(list(flat(taken.samples)))
        except Exception as failure:
            taken.lost = f"its rewards could not be judged: {type(failure).__name__}: {failure}"
            logger.error("group %d: %s", taken.index, taken.lost, exc_info=failure)
            return self._fail("filter_error", taken.lost, wholly=True)
        self.failed = 0.0
        if not keep:
            taken.filtered = reason or "the dynamic filter did not keep it"
            if reason:
                self.drops[reason] += 1
        elif len(self.kept) < wanted:
            self.kept.append(taken)
        else:
            taken.lost = "the batch was full"
        return None

    def _is_flat(self, samples: list[Any]) -> bool:
        """Whether all rewards of a group are equal: it teaches nothing."""
        rewards = [sample.get_reward_value(self.parts.options.args) for sample in flat(samples)]
        return all(isinstance(reward, (int, float)) for reward in rewards) and signal(rewards) == "flat"

    def _why_lost(self, taken: Taken) -> tuple[str, str, bool]:
        """(name of the metric, sentence, whether nothing of the group was sound) of a group that gives no samples."""
        finals = [entry for entry in taken.run.tries if not entry.retried]
        errors = [entry.error for entry in finals if entry.error is not None]
        if taken.run.failure is not None:
            return "trace_error" if errors else "episode_error", taken.run.failure, True
        if errors:
            return "trace_error", errors[-1], len(errors) == len(finals)
        dropped = taken.conversion.dropped if taken.conversion else {}
        kinds = {kind for kind, _ in dropped.values()}
        reasons = [reason for kind, reason in dropped.values() if kind != "incomplete_group"]
        told = reasons[-1] if reasons else "its traces were not recorded"
        wholly = "incomplete_group" not in kinds
        return "empty_trace" if "empty" in kinds else "failed_check", told, wholly

    def _fail(self, reason: str, sentence: str, wholly: bool) -> None:
        """Count a lost group; too many in a row end the step."""
        self.drops[reason] += 1
        self.failed += 1.0 if wholly else 1.0 / PARTLY
        self.last_error = sentence
        most = self.runner.options.max_failed_groups
        if self.failed >= most:
            self.stop.set(
                "failing",
                f"No group of the last ones could be trained (max_failed_groups = {most}); the last error is: {sentence}",
            )

    async def _cancel(self, running: Iterable[asyncio.Task[None]]) -> None:
        """End what still runs, on the engines too."""
        pending = [task for task in running if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if pending:
            for url, problem in (await self.runner.transport.abort_all()).items():
                if problem is not None:
                    logger.warning("requests on %s could not be aborted: %s", url, problem)

    # -- conversion

    async def _convert(self, taken: Taken) -> None:
        """Make the samples of a group that has ended; nothing where its rewards are not all there."""
        if taken.run.group is None or not taken.run.scored or taken.conversion is not None:
            return
        if taken.first_sample is not None:
            await asyncio.to_thread(self._converted, taken, taken.first_sample)
            return
        async with self._numbering:
            await asyncio.to_thread(self._converted, taken, self.counters.next_sample_index)
            made = sum(len(flatten(group)) for group in taken.conversion.groups) if taken.conversion else 0
            self.counters.next_sample_index += made

    async def _convert_late(self, taken: Taken) -> None:
        """Convert what was not yet, when the step ends: by then nothing that is wrong with it may stop the recording."""
        self.options = replace(self.options, strict=False)
        try:
            await self._convert(taken)
        except Exception as error:
            taken.lost = taken.lost or f"it could not be converted: {type(error).__name__}: {error}"
            logger.exception("group %d could not be converted", taken.index)

    def _converted(self, taken: Taken, first: int) -> None:
        """Convert one group as a replay does, from its rows."""
        assert taken.run.group is not None
        group = replace(taken.run.group, first_sample_index=first)
        table = self.recorder.rows("train", self.place.step, traces=set(group.trace_ids))
        taken.conversion = convert(table, [group], self.options)
        self.facts.add(table)
        if not taken.conversion.groups:
            return
        told = Conversations(table) if self.parts.options.messages else None

        def made(sample: Sample) -> Any:
            result = to_miles(sample)
            if told is not None:
                told.tell(result)
            return result

        taken.samples = nested(taken.conversion.groups[0], made)

    # -- handing over

    def _changes(self, data: list[Any]) -> dict[str, dict[str, Any]]:
        """What hooks changed of each trace that is handed over. `data` holds the batch, in its order."""
        converted: dict[str, list[Sample]] = {}
        for taken in self.kept:
            for sample in _samples(taken):
                converted.setdefault(sample.routing_key or "", []).append(sample)
        handed: dict[str, list[Any]] = {}
        for sample in flat(data):
            handed.setdefault(sample.routing_key, []).append(sample)
        changes: dict[str, dict[str, Any]] = {}
        unrecorded: set[str] = set()
        for trace, samples in handed.items():
            before = {sample.index: sample for sample in converted.get(trace, ())}
            if set(before) != {sample.index for sample in samples}:
                raise BadInput(f"a hook put samples of trace {trace} into the batch that are not those of its group.")
            samples = sorted(samples, key=lambda sample: sample.index)
            found = changes_of([before[sample.index] for sample in samples], samples)
            changes[trace] = dict(found.outcome)
            unrecorded.update(found.unrecorded)
        if unrecorded:
            logger.warning(
                "hooks changed %s of samples, which a recording does not hold: a replay hands them over as converted",
                ", ".join(sorted(unrecorded)),
            )
        return changes

    async def _record(self, data: list[Any], changes: dict[str, dict[str, Any]]) -> Step:
        """Commit the step."""
        for taken in self.taken:
            await self._convert_late(taken)
        fates = self._fates(changes)
        batch = tuple(sample.index for sample in flat(data))
        record = Step(
            split="train",
            step=self.place.step,
            attempt=self.recorder.attempt,
            writer=self.recorder.writer,
            cursor=self.counters.cursor,
            next_group_index=self.counters.next_group_index,
            next_sample_index=self.counters.next_sample_index,
            options=replace(self.options, strict=False).to_dict(),
            batch=batch,
            started_at=self._started_at,
        )
        outcomes = outcomes_of(fates, changes)
        done = [taken for taken in self.taken if taken.conversion is not None]
        record = await asyncio.to_thread(_digested, record, done, outcomes)
        committed = await self.recorder.commit(
            "train",
            self.place.step,
            groups=[record for taken in done for record in taken.conversion.records],  # type: ignore[union-attr]
            outcomes=outcomes,
            record=replace(record, ended_at=time.time()),
        )
        return committed.step

    def _fates(self, changes: dict[str, dict[str, Any]]) -> dict[str, Fate]:
        """What became of each recorded try. A trace is emitted where `changes` has it."""
        fates: dict[str, Fate] = {}
        for taken in self.taken:
            for entry in taken.run.tries:
                if entry.recorded:
                    fates[entry.trace_id] = self._fate(taken, entry, changes)
        return fates

    def _fate(self, taken: Taken, entry: Try, changes: dict[str, dict[str, Any]]) -> Fate:
        fate = fate_of(taken.run, entry, self.place, taken=taken.lost)
        dropped = taken.conversion.dropped if taken.conversion is not None else {}
        if fate[0] in ("emitted", "leftover") and entry.trace_id in dropped:
            return dropped[entry.trace_id]
        if fate[0] != "emitted" or entry.trace_id in changes:
            return fate
        if taken.filtered is not None:
            return "filtered", taken.filtered
        return "filtered", "a hook took it out of the batch"

    # -- metrics

    def _metrics(self, record: Step) -> dict[str, Any]:
        """What Miles logs of the step."""
        return {
            **{f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.drops.items()},
            **self.facts.metrics(),
            **count_metrics(record),
            **recording_metrics(self.recorder),
            "rolltape/flat_groups": float(self.flat_groups),
        }


def _samples(taken: Taken) -> list[Sample]:
    """The converted Samples of a group."""
    return [s for group in (taken.conversion.groups if taken.conversion else ()) for s in flatten(group)]


def _in_order(groups: Iterable[Taken]) -> list[Taken]:
    """Groups in the order of their tasks, whichever ended first."""
    return sorted(groups, key=lambda taken: taken.index)


def _digested(record: Step, done: Iterable[Taken], outcomes: Any) -> Step:
    """`record` with the digests of what was converted and of what was handed over."""
    groups = [group for taken in done if taken.conversion for group in taken.conversion.groups]
    record = replace(record, digest_converted=digest(groups))
    try:
        handed = finish(groups, outcomes, record)
    except BadInput as error:
        logger.warning("the batch as handed over cannot be told from its record: %s", error)
        return replace(record, batch=None)
    order = tuple(sample.index for group in handed for sample in flatten(group))
    if order != record.batch:
        logger.warning(
            "hooks mixed the groups of the batch, which a recording does not hold; a replay keeps groups together"
        )
    return replace(record, digest_handed=digest(handed))
