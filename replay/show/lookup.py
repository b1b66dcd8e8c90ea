"""Finding one trace of a run by the beginning of its id, and reading it without reading the others.

Commits name the last try of each rollout, so most traces are found without opening a Parquet file. Of the file only the
column of trace ids is read, and then the one row group that holds the trace: rows are sorted by group, and their ids are
random, so neither statistics nor a sorted search would save more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged
from rolltape.schema.records import Group

_SHOWN = 8
"""Candidates that are named where a prefix fits several traces."""
SHORT = 8
"""Characters of an id that are shown at least."""


@dataclass(frozen=True)
class Place:
    """Where a trace is."""

    trace_id: str
    commit: Commit
    superseded: bool
    """Whether a newer attempt recorded the step again."""

    @property
    def group(self) -> Group | None:
        """The group that the trace is in; None for a try that was run again."""
        return next((g for g in self.commit.groups if self.trace_id in g.trace_ids), None)


def find(
    run: Run,
    prefix: str,
    *,
    splits: Sequence[str] = (),
    steps: Iterable[int] | None = None,
    attempt: int | None = None,
) -> Place:
    """The trace whose id begins with `prefix`, among the newest attempts first.

    Raises BadInput where there is none, or several: then candidates are named.
    """
    if not prefix:
        raise BadInput("an empty trace id: give its first characters, as `rolltape show RUN` lists them.")
    wanted = None if steps is None else set(steps)
    commits = [
        c
        for c in run.all_commits
        if (not splits or c.part.split in splits)
        and (wanted is None or c.part.step in wanted)
        and attempt in (None, c.part.attempt)
    ]
    newest = run.newest({c.part for c in run.all_commits} | {p for p, _ in run.broken})
    for superseded in (False, True):
        places = [
            Place(trace, commit, superseded)
            for commit in commits
            if (commit.part not in newest) == superseded
            for trace in trace_ids(run, commit)
            if trace.startswith(prefix)
        ]
        if len({p.trace_id for p in places}) > 1:
            raise BadInput(_ambiguous(run, prefix, places))
        if places:
            return places[-1]
    root = run.paths.root
    raise BadInput(
        f"{root}: no trace id begins with {prefix!r}; `rolltape show {root} --step N` lists those of a step."
    )


def _ambiguous(run: Run, prefix: str, places: Sequence[Place]) -> str:
    steps = {p.trace_id: p.commit.part.step for p in places}
    ids = sorted(steps)
    length = distinct(ids)
    named = ", ".join(f"{trace[:length]} (step {steps[trace]})" for trace in ids[:_SHOWN])
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{run.paths.root}: {len(ids)} trace ids begin with {prefix!r}: {named}{more}; give more characters."


def distinct(ids: Sequence[str]) -> int:
    """How many characters from the beginning tell `ids` apart, at least 8."""
    length = SHORT
    while len({i[:length] for i in ids}) < len(set(ids)):
        length += 2
    return length


def trace_ids(run: Run, commit: Commit) -> list[str]:
    """Ids of all traces of a part, tries that were run again included."""
    named = [trace for group in commit.groups for trace in group.trace_ids]
    lost = commit.step.counts.get("lost", 0)
    if len(named) == commit.file.rows and not lost:
        return named
    return [str(t) for table in run.part_batches(commit, ["trace_id"]) for t in table.column(0).to_pylist()]


def read_row(run: Run, place: Place, columns: Sequence[str] | None = None) -> pa.Table:
    """The row of a trace, with every column or with `columns`. Of other row groups only trace ids are read.

    Raises Damaged where the file is not the one that was committed, or does not hold the trace.
    """
    for i, column in enumerate(run.part_batches(place.commit, ["trace_id"])):
        ids = column.column(0).to_pylist()  # pyarrow.compute would import pandas, for a second, where it is installed
        if place.trace_id in ids:
            [table] = run.part_batches(place.commit, columns, [i])
            return table.slice(ids.index(place.trace_id), 1)
    raise Damaged(
        f"{run.paths.parquet(place.commit.part)}: trace {place.trace_id} is not in it, though its commit names it; "
        "`rolltape verify` says more."
    )
