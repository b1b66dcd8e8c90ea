"""Rows of a run to look at: all of the newest attempt, or some of each step, spread evenly over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.replay.housekeeping.pruned import TOKENS
from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import Damaged

Places = npt.NDArray[np.int64]


class Picked:
    """The rows of `run`, of at most `limit` traces a step. Rows lie sorted by group, so the first ones would be one task's."""

    def __init__(self, run: Run, limit: int | None) -> None:
        self.run, self.limit = run, limit
        self.damaged = 0
        """Parts that could not be read; `verify` says why."""
        self.pruned = 0
        """Traces whose tokens were pruned: there is nothing to look at."""
        self.steps: dict[tuple[str, int], list[Commit]] = {}
        for split in run.splits():
            for commit in run.commits(split):
                if TOKENS.isdisjoint(run.held(commit).pruned):
                    self.steps.setdefault((commit.part.split, commit.part.step), []).append(commit)
                else:
                    self.pruned += commit.file.rows

    @property
    def recorded(self) -> int:
        """Rows there are, with tokens."""
        return sum(commit.file.rows for commits in self.steps.values() for commit in commits)

    @property
    def total(self) -> int:
        """Rows to look at."""
        return sum(len(self._places(commits)) for commits in self.steps.values())

    def _places(self, commits: Sequence[Commit]) -> Places:
        """Places of the rows among those of all parts of a step."""
        rows = sum(commit.file.rows for commit in commits)
        if self.limit is None or self.limit >= rows:
            return np.arange(rows)
        return np.arange(self.limit) * rows // self.limit

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The picked rows of each row group that has some, in order. A part that cannot be read is counted."""
        for commits in self.steps.values():
            places, start = self._places(commits), 0
            for commit in commits:
                end = start + commit.file.rows
                try:
                    yield from self._part(commit, places[(places >= start) & (places < end)] - start, columns)
                except Damaged:
                    self.damaged += 1
                start = end

    def _part(self, commit: Commit, places: Places, columns: Sequence[str]) -> Iterator[pa.Table]:
        start = 0
        for table in self.run.part_batches(commit, columns):
            mine = places[(places >= start) & (places < start + table.num_rows)] - start
            start += table.num_rows
            if len(mine):
                yield table if len(mine) == table.num_rows else _rows(table, mine.tolist())


def _rows(table: pa.Table, places: Sequence[int]) -> pa.Table:
    """Some rows of a table, by slices: taking them would join text beyond 32-bit offsets."""
    return pa.concat_tables([table.slice(place, 1) for place in places])


def left_out(picked: Picked) -> dict[str, int]:
    """Notes on what of a run was not looked at."""
    notes = {
        "files left out, for they cannot be read": picked.damaged,
        "traces left out, for their tokens were pruned": picked.pruned,
    }
    if picked.total < picked.recorded:
        notes[f"traces of {picked.recorded} looked at, up to {picked.limit} of each step (--limit)"] = picked.total
    return {note: count for note, count in notes.items() if count}
