"""From rows that lie anywhere to the steps of a run, each a Parquet file of whole groups.

A step is as many groups, in the order in which they first came, as fit into STEP_BYTES: conversion and checks hold one step
in memory, and steps are written beside each other. Trainers' steps are larger or smaller; an import does not know them.
Sizes are those of the text, whose rows take no more: less than half where most of it is tokens.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.replay.imports.lines import read_rows
from rolltape.schema.commits import Commit
from rolltape.schema.fields import ROW, TRACE
from rolltape.schema.parquet import write_parquet
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.records import Group, Step

STEP_BYTES = 128 << 20
"""Text of a step: about 3.5 million tokens. A group that is larger is a step of its own."""
TRACE_BYTES = 8 << 10
"""What a trace counts for at least: as Python's objects, in records and Samples, small ones take a multiple of their text."""
PIECE_BYTES = 32 << 20
"""Text of the rows that are put together at a time, and are a row group of the file."""


@dataclass(slots=True)
class Members:
    """A group on its way into the run."""

    index: int
    """Its group_index."""
    key: bytes
    trained: bool = True
    """Whether it is a group for the converter; traces of an agent that is not trained are rows without a group record."""
    rollouts: int = 0
    """Size it should have, where that is known."""
    bytes: int = 0
    """Of its text; of its rows where the run had them before."""
    tokens: int = 0
    prompt: int | None = None
    """Checksum of the prompt of its first trace."""
    mixed: bool = False
    """Whether others were asked something else."""
    places: array[int] = field(default_factory=lambda: array("q"))
    """File and row of each trace, as `file << 32 | row`, in the order in which they came."""

    def add(self, file: int, row: int, size: int, tokens: int, rollouts: int) -> None:
        """Add a trace of `size` bytes; `rollouts` are those its group should have."""
        self.places.append(file << 32 | row)
        self.bytes += size
        self.tokens += tokens
        self.rollouts = max(self.rollouts, rollouts)

    def asks(self, prompt: int) -> None:
        """Note the checksum of a trace's prompt."""
        self.prompt = prompt if self.prompt is None else self.prompt
        self.mixed |= prompt != self.prompt

    def extend(self, other: Members) -> None:
        """Add the traces of another part of the same group."""
        self.places.extend(other.places)
        self.bytes += other.bytes
        self.tokens += other.tokens
        self.rollouts = max(self.rollouts, other.rollouts)


@dataclass(frozen=True)
class Plan:
    """One step to write."""

    run: str
    paths: RunPaths
    part: Part
    groups: Sequence[Members]
    files: Mapping[int, Path]
    """The files that rows of the step lie in, by number."""


def into_steps(groups: Sequence[Members]) -> Iterator[list[Members]]:
    """Groups in order, cut into steps."""
    step: list[Members] = []
    size = 0
    for group in groups:
        counted = max(group.bytes, len(group.places) * TRACE_BYTES)
        if step and size + counted > STEP_BYTES:
            yield step
            step, size = [], 0
        step.append(group)
        size += counted
    if step:
        yield step


def write_step(plan: Plan) -> Commit:
    """Write the Parquet file of a step. Returns the commit, which is not put yet."""
    began = time.time()
    records: list[Group] = []
    file = write_parquet(plan.paths.parquet(plan.part), _tables(plan, records))
    return Commit(
        part=plan.part,
        file=file,
        groups=records,
        step=Step(
            split=plan.part.split,
            step=plan.part.step,
            attempt=plan.part.attempt,
            writer=plan.part.writer,
            started_at=began,
            ended_at=time.time(),
        ),
        sums={
            "tokens": sum(g.tokens for g in plan.groups),
            "group_keys": {str(g.index): g.key.hex() for g in plan.groups},
        },
        fingerprint=ROW.fingerprint,
        written_at=time.time(),
    )


def _tables(plan: Plan, records: list[Group]) -> Iterator[pa.Table]:
    """The rows of a step, group by group, about PIECE_BYTES at a time; afterwards their group records are in `records`."""
    sizes = [len(group.places) for group in plan.groups]
    places = np.concatenate([group.places for group in plan.groups])
    index = np.repeat([group.index for group in plan.groups], sizes).astype(np.int64)
    rollout = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    taken = np.cumsum(np.repeat([group.bytes / size for group, size in zip(plan.groups, sizes, strict=True)], sizes))
    begins = np.flatnonzero(np.diff(taken // PIECE_BYTES)) + 1
    rows: deque[dict[str, Any]] = deque()
    groups = deque(plan.groups)
    for piece in np.split(np.arange(len(places)), begins):
        table = _placed(_gather(places[piece], plan.files), plan, index[piece], rollout[piece])
        rows.extend(table.select(list(_SUMMED)).to_pylist(maps_as_pydicts="strict"))
        while groups and len(groups[0].places) <= len(rows):
            group = groups.popleft()
            members = [rows.popleft() for _ in group.places]
            if group.trained:
                records.append(_record(group, members, plan.part))
        yield table


_SUMMED = ("trace_id", "task_idx", "task_key", "rewards")
"""What group records are made of."""


def _gather(places: npt.NDArray[np.int64], files: Mapping[int, Path]) -> pa.Table:
    """The rows at `places`, in that order. Each file is opened once."""
    order = np.argsort(places)
    sorted_places = places[order]
    begins = np.flatnonzero(np.diff(sorted_places >> 32, prepend=-1))
    parts = [_rows(files[int(p[0] >> 32)], p & 0xFFFFFFFF) for p in np.split(sorted_places, begins[1:])]
    table = pa.Table.from_batches(parts)
    return table if (order[1:] > order[:-1]).all() else table.take(pa.array(np.argsort(order)))


def _rows(file: Path, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    batch, first, n = read_rows(file), int(rows[0]), len(rows)
    return batch.slice(first, n) if int(rows[-1]) - first + 1 == n else batch.take(pa.array(rows))


def _placed(table: pa.Table, plan: Plan, index: npt.NDArray[np.int64], rollout: npt.NDArray[np.int32]) -> pa.Table:
    """`table` with the columns that say where in the run its rows are."""
    part, n = plan.part, table.num_rows
    columns = {
        "run": pa.repeat(pa.scalar(plan.run), n),
        "split": pa.repeat(pa.scalar(part.split), n),
        "step": np.full(n, part.step, np.int64),
        "attempt": np.full(n, part.attempt, np.int32),
        "writer": pa.repeat(pa.scalar(part.writer), n),
        "group_index": index,
        "rollout_index": rollout,
    }
    for name, values in columns.items():
        i = table.schema.get_field_index(name)
        table = table.set_column(i, TRACE.by_name[name].arrow.remove_metadata(), pa.array(values))
    return table


def _record(group: Members, rows: Sequence[dict[str, Any]], part: Part) -> Group:
    records = [
        {
            "id": row["trace_id"],
            "task": {"data": {"idx": row["task_idx"]}, "key": row["task_key"]},
            "rewards": row["rewards"],
        }
        for row in rows
    ]
    size = max(len(rows), group.rollouts)
    return Group.from_records(records, expected_size=size, group_index=group.index, split=part.split, step=part.step)
