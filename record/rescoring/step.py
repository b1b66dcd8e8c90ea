"""A re-scored part: its rows with new scores, its groups' sums, and the batch that its conversion gives now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from rolltape.record.rescoring.rows import CHANGED, NO_GROUP, SETTLED, New
from rolltape.record.writing.parts import counted
from rolltape.replay.convert import Conversion, SampleGroup, convert, flatten
from rolltape.replay.digest import digest
from rolltape.replay.options import ConvertOptions
from rolltape.replay.outcomes import finish
from rolltape.schema.fields import TRACE
from rolltape.schema.records import Group, Outcome, Step, sum_rewards


def with_scores(table: pa.Table, new: Mapping[str, New], run: str, attempt: int) -> pa.Table:
    """Rows of the recorded run as rows of the new one, without their outcomes."""
    traces = table.column("trace_id").to_pylist()
    table = table.select(TRACE.arrow.names)
    columns: dict[str, list[Any]] = {"run": [run] * len(traces), "attempt": [attempt] * len(traces)}
    for name in CHANGED:
        old = table.column(name).to_pylist(maps_as_pydicts="strict" if TRACE.by_name[name].shape == "name" else None)
        found = [new[trace].columns for trace in traces]
        columns[name] = [then if now is None else now[name] for then, now in zip(old, found, strict=True)]
    for name, values in columns.items():
        field = TRACE.by_name[name]
        if field.shape == "name":
            values = [None if value is None else list(value.items()) for value in values]
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(values, field.arrow_type))
    return table


def regrouped(group: Group, new: Mapping[str, New], names: tuple[str, ...]) -> Group:
    """The group record with the sums of the new scores and the names of its group rewards. Samples are numbered anew."""
    rewards = sum_rewards([new[t].rewards for t in group.trace_ids if t in new])
    return replace(group, rewards=rewards, group_reward_names=names, first_sample_index=None)


@dataclass(frozen=True)
class Settled:
    """What a part is committed with."""

    groups: list[Group]
    outcomes: list[Outcome]
    step: Step


def settle(
    tables: Sequence[pa.Table],
    groups: Sequence[Group],
    outcomes: Sequence[Outcome],
    step: Step,
    start: int,
    new: Mapping[str, New],
) -> Settled:
    """Convert a part again and say what became of each trace.

    `groups`: without sample indices; `outcomes`, `step`: as recorded; `new`: what re-scoring gave, by trace id. Samples
    are numbered from `start`. A reward that a hook of the trainer had changed is left out, for it was made of the old
    score; removals and recomputed log-probs stay.
    """
    table = pa.concat_tables(tables) if tables else TRACE.arrow.empty_table()
    traces = table.column("trace_id").to_pylist()
    errors = dict(zip(traces, _errors(table), strict=True))
    before = {o.trace_id: replace(o, handed_reward=None) for o in outcomes}
    counts = {"started": step.counts["started"]} if "started" in step.counts else {}
    order = step.batch
    step = replace(step, counts=counts, batch=None, digest_converted=None, digest_handed=None)
    if step.split != "train":
        now = [_evaluated(t, before.get(t), errors[t], new[t]) for t in traces]
        return Settled(list(groups), now, counted(step, now, traces))
    options = replace(ConvertOptions.from_dict(step.options), strict=False)
    conversion = convert(table, groups, options, start=start)
    grouped = {t for record in conversion.records for t in record.trace_ids}
    now = [
        _converted(t, before.get(t), conversion) if t in grouped else _alone(t, before.get(t), errors[t], new[t])
        for t in traces
    ]
    indices = _indices(finish(conversion.groups, now))
    same = order is not None and sorted(order) == sorted(indices)
    step = replace(step, options=options.to_dict(), batch=order if same else indices)
    handed = finish(conversion.groups, now, step)
    step = replace(
        step,
        next_sample_index=max([start, *(index + 1 for index in _indices(conversion.groups))]),
        digest_converted=digest(conversion.groups),
        digest_handed=digest(handed),
    )
    return Settled(conversion.records, now, counted(step, now, traces))


def _indices(groups: Sequence[SampleGroup]) -> tuple[int, ...]:
    return tuple(sample.index or 0 for group in groups for sample in flatten(group))


def _errors(table: pa.Table) -> list[str | None]:
    """The last error of each row, as the reason of an outcome."""
    types, messages = (table.column(f"error_{name}").to_pylist() for name in ("types", "messages"))
    return [f"{t[-1]}: {m[-1]}" if t and m else None for t, m in zip(types, messages, strict=True)]


def _evaluated(trace: str, before: Outcome | None, error: str | None, new: New) -> Outcome:
    """What became of a trace of an evaluation."""
    if before is not None and before.disposition in SETTLED:
        return before
    if error is not None:
        return Outcome(trace_id=trace, disposition="error", reason=error)
    if not new.attempted and before is not None:
        return before
    if new.incomplete is not None:
        return Outcome(trace_id=trace, disposition="incomplete_group", reason=new.incomplete)
    return Outcome(trace_id=trace, disposition="eval")


def _converted(trace: str, before: Outcome | None, conversion: Conversion) -> Outcome:
    """What became of a trace of a group record."""
    if before is not None and before.disposition in SETTLED:
        return before
    if trace in conversion.dropped:
        disposition, reason = conversion.dropped[trace]
        return Outcome(trace_id=trace, disposition=disposition, reason=reason)
    return replace(before or Outcome(trace_id=trace, disposition=""), disposition="emitted", reason=None)


def _alone(trace: str, before: Outcome | None, error: str | None, new: New) -> Outcome:
    """What became of a trace of a training step that is in no group record, so it cannot be converted."""
    if before is not None and before.disposition not in ("emitted", "error", "incomplete_group"):
        return before
    if error is not None:
        return Outcome(trace_id=trace, disposition="error", reason=error)
    if before is None or before.disposition == "emitted":
        return Outcome(trace_id=trace, disposition="leftover", reason=NO_GROUP)
    return Outcome(trace_id=trace, disposition="incomplete_group", reason=NO_GROUP) if new.attempted else before
