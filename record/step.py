"""Closes a step: rows and groups become Samples by the converter that replays use, and every trace gets its outcome."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rolltape.record.episode import GroupRun, StepPlace, Try
from rolltape.record.options import LiveOptions
from rolltape.record.progress import StepNews
from rolltape.record.recorder import Committed, Recorder, RecorderStatus
from rolltape.record.writing.resume import Counters
from rolltape.replay.checks.groups import signal
from rolltape.replay.convert import convert, flatten
from rolltape.replay.digest import digest
from rolltape.replay.options import ConvertOptions
from rolltape.replay.outcomes import finish
from rolltape.schema.errors import CheckFailed
from rolltape.schema.records import Group, Outcome, Step
from rolltape.schema.table import uncollected

__all__ = ["Counters", "Fate", "StepClosed", "close_step", "outcomes_of"]

Fate = tuple[str, str | None]
"""What became of a trace (a disposition), and why."""


@dataclass(frozen=True)
class StepClosed:
    """A recorded step and what of it a person should read."""

    news: StepNews
    forked: int = 0
    """Traces with more than one branch that were dropped for it."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Why traces were dropped, and how often."""
    failed: str | None = None
    """The check that failed, where `strict` is set."""


async def close_step(
    recorder: Recorder,
    place: StepPlace,
    runs: Sequence[GroupRun],
    *,
    options: LiveOptions,
    counters: Counters,
    started_at: float,
) -> StepClosed:
    """Convert and commit a step; advances the sample counter in `counters`.

    The groups given to the converter are those that are committed, so that a replay converts the same ones. A group
    whose group reward raised has no group record: its rewards are not all there, and nothing may be trained on it.
    """
    groups = [run.group for run in runs if run.group is not None and run.scored]
    record = Step(
        split=place.split,
        eval_name=place.eval_name,
        step=place.step,
        attempt=recorder.attempt,
        writer=recorder.writer,
        cursor=counters.cursor,
        next_group_index=counters.next_group_index,
        next_sample_index=counters.next_sample_index,
        options=options.conversion(),
        started_at=started_at,
    )
    fates = _fates(runs, place.split)
    made = None
    if place.split == "train":
        with uncollected():
            made = await asyncio.to_thread(_convert, recorder, groups, fates, record, options)
        record, groups, fates = made.record, made.groups, made.fates
        counters.next_sample_index = record.next_sample_index or 0
    outcomes = outcomes_of(fates)
    record = replace(record, ended_at=time.time())
    committed = await recorder.commit(
        place.split, place.step, groups=groups, outcomes=outcomes, record=record, eval_name=place.eval_name
    )
    reasons = Counter(recorder.secrets.text(fate[1]) for fate in fates.values() if fate[1])
    news = _news(runs, committed, recorder.status)
    return StepClosed(news, made.forked if made else 0, reasons, made.failed if made else None)


def _fates(runs: Sequence[GroupRun], split: str) -> dict[str, Fate]:
    """What is known of each recorded try before conversion."""
    return {entry.trace_id: _fate(run, entry, split) for run in runs for entry in run.tries if entry.recorded}


def _fate(run: GroupRun, entry: Try, split: str) -> Fate:
    if entry.retried:
        return "retried", entry.error
    if entry.cancelled:
        return "cancelled", "the run was stopped"
    if entry.error is not None:
        return "error", entry.error
    if not run.scored:
        return "incomplete_group", run.failure or "the run was stopped before its group had ended"
    return ("eval", None) if split == "eval" else ("emitted", None)


@dataclass(frozen=True)
class _Made:
    """What conversion added to a step."""

    record: Step
    groups: list[Group]
    """With the first of their sample indices."""
    fates: dict[str, Fate]
    forked: int
    failed: str | None = None


def _convert(
    recorder: Recorder, groups: Sequence[Group], fates: Mapping[str, Fate], record: Step, options: LiveOptions
) -> _Made:
    """Convert, hand over, and take both digests. A step that fails a check under `strict` is kept, to be looked at."""
    table = recorder.rows(record.split, record.step, record.eval_name)
    how, failed = ConvertOptions(**options.conversion()), None
    start = record.next_sample_index or 0
    try:
        conversion = convert(table, groups, how, start=start)
    except CheckFailed as error:
        how, failed = replace(how, strict=False), str(error)
        conversion = convert(table, groups, how, start=start)
    settled = {
        trace: conversion.dropped.get(trace, fate) if fate[0] == "emitted" else fate for trace, fate in fates.items()
    }
    record = replace(
        record,
        options=how.to_dict(),
        next_sample_index=max(
            ((sample.index or 0) + 1 for group in conversion.groups for sample in flatten(group)), default=start
        ),
        digest_converted=digest(conversion.groups),
    )
    handed = finish(conversion.groups, outcomes_of(settled), record)
    batch = tuple(sample.index or 0 for group in handed for sample in flatten(group))
    record = replace(record, batch=batch, digest_handed=digest(handed))
    forked = {finding.trace_id for finding in conversion.findings if finding.code == "branches"}
    for groups_of_samples in (handed, conversion.groups):
        while (
            groups_of_samples
        ):  # at once, letting go of a thousand would hold the interpreter, and the event loop, for 0.1 s
            groups_of_samples.pop()
    return _Made(record, conversion.records, settled, len(forked), failed)


def outcomes_of(fates: Mapping[str, Fate]) -> list[Outcome]:
    """The outcome records of what became of each trace."""
    return [Outcome(trace_id=trace, disposition=fate[0], reason=fate[1]) for trace, fate in fates.items()]


def _news(runs: Sequence[GroupRun], committed: Committed, status: RecorderStatus) -> StepNews:
    record = committed.step
    tries = [entry for run in runs for entry in run.tries]
    given = [entry.reward for entry in tries if entry.reward is not None and entry.error is None]
    rewards = [reward for reward in given if math.isfinite(reward)]
    kinds = Counter(signal([e.reward for e in run.tries if e.error is None]) for run in runs if run.scored)
    return StepNews(
        split=record.split,
        step=record.step,
        traces=len(tries),
        emitted=record.counts.get("emitted", 0),
        samples=len(record.batch or ()),
        tokens=sum(entry.tokens for entry in tries),
        reward=sum(rewards) / len(rewards) if rewards else None,
        seconds=(record.ended_at or 0.0) - (record.started_at or 0.0),
        counts={name: count for name, count in record.counts.items() if count},
        recording=replace(status, error=committed.error or status.error),
        comparable=kinds["flat"] + kinds["varied"],
        flat=kinds["flat"],
    )
