"""Which Samples were handed to the trainer: the table behind the view `samples`.

With the branch policy `reject` a trace becomes one Sample, so the group record's first index and the order of rollouts tell
its number, and its lengths are those of the trace. With `siblings` the step is converted again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rolltape.replay.sql.scores import Scores
from rolltape.replay.sql.source import Chosen
from rolltape.schema.commits import Commit

_SCHEMA = pa.schema(
    [
        ("_of", pa.string()),
        ("_step", pa.int64()),
        ("_attempt", pa.int32()),
        ("_trace", pa.string()),
        *(
            (n, pa.int64())
            for n in ("_place", "_index", "_branch", "_sibling", "_tokens", "_response_length", "_trained_tokens")
        ),
    ]
)
_DROPPED = ("error", "failed_check", "empty", "incomplete_group")
"""Dispositions of traces of a group that became no Sample: they take no number."""


def handed(parts: Sequence[Chosen]) -> pa.Table:
    """One row a Sample of the parts' batches, in order. Raises what `batches` raises where a step is converted again."""
    parts = [part for part in parts if part.commit.step.batch]
    records = [record for part, fates in zip(parts, _dispositions(parts), strict=True) for record in _part(part, fates)]
    return pa.Table.from_pylist(records, _SCHEMA)


def _part(part: Chosen, fates: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    commit = part.commit
    place = {index: i for i, index in enumerate(commit.step.batch or ())}
    siblings = commit.step.options.get("branch_policy") == "siblings"
    for record in _converted(part) if siblings else _numbered(part, fates):
        if record["_index"] in place:
            yield {
                "_of": part.label,
                "_step": commit.step.step,
                "_attempt": commit.step.attempt,
                "_place": place[record["_index"]],
                **record,
            }


def _numbered(part: Chosen, fates: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """Samples of a step whose traces have one branch each."""
    for group in part.commit.groups:
        index = group.first_sample_index
        for trace in group.trace_ids:
            fate = fates.get(trace, "failed_check")
            if index is None or fate in _DROPPED:
                continue
            if fate == "emitted":
                yield {"_trace": trace, "_index": index, "_branch": 0, "_sibling": 0}
            index += 1


def _dispositions(parts: Sequence[Chosen]) -> Iterator[dict[str, str | None]]:
    """Of each part what became of its traces."""
    if not parts:
        return
    table = Scores(parts, ("trace_id", "disposition")).table()
    fates = zip(*(table.column(name).to_pylist() for name in ("trace_id", "disposition")), strict=True)
    for part in parts:
        yield dict(itertools.islice(fates, part.commit.file.rows))


def _converted(part: Chosen) -> Iterator[dict[str, Any]]:
    """Samples of a step whose traces may have several branches."""
    seen: dict[str, int] = {}
    for sample in _samples(part.run, part.commit):
        trace = sample.routing_key or ""
        yield {
            "_trace": trace,
            "_index": sample.index,
            "_branch": sample.metadata["verifiers"]["branch_index"],
            "_sibling": seen.setdefault(trace, 0),
            "_tokens": len(sample.tokens),
            "_response_length": sample.response_length,
            "_trained_tokens": sum(sample.loss_mask or ()),
        }
        seen[trace] += 1


def _samples(run: Any, commit: Commit) -> list[Any]:
    from rolltape.replay.convert import convert, flatten
    from rolltape.replay.options import ConvertOptions

    tables = list(run.part_batches(commit))
    conversion = convert(
        pa.concat_tables(tables, promote_options="default"),
        commit.groups,
        ConvertOptions.from_dict(commit.step.options),
    )
    return [sample for group in conversion.groups for sample in flatten(group)]
