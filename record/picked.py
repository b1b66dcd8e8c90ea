"""Rows of a run to look at: all of the newest attempt, or some of each step, spread evenly over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from rolltape.replay.run import Run
from rolltape.schema.commits import Commit


class Picked:
    """The rows of `run`, of at most `limit` traces a step. Rows lie sorted by group, so the first ones would be one task's."""

    def __init__(self, run: Run, limit: int | None) -> None:
        self.run, self.limit = run, limit
        self.steps: dict[tuple[str, int], list[Commit]] = {}
        for split in run.splits():
            for commit in run.commits(split):
                self.steps.setdefault((commit.part.split, commit.part.step), []).append(commit)

    @property
    def recorded(self) -> int:
        """Rows there are."""
        return sum(commit.file.rows for commits in self.steps.values() for commit in commits)

    @property
    def total(self) -> int:
        """Rows there are to look at."""
        return sum(len(self._places(commits)) for commits in self.steps.values())

    def _places(self, commits: Sequence[Commit]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Places of the rows among those of all parts of a step."""
        rows = sum(commit.file.rows for commit in commits)
        if self.limit is None or self.limit >= rows:
            return np.arange(rows)
        return np.arange(self.limit) * rows // self.limit

    def tables(self, columns: Sequence[str]) -> Iterator[tuple[Commit, pa.Table]]:
        """(part, rows of one row group that were picked), in order. Row groups without any are read all the same."""
        for commits in self.steps.values():
            places, start = self._places(commits), 0
            for commit in commits:
                for table in self.run.part_batches(commit, columns):
                    end = start + table.num_rows
                    mine = places[(places >= start) & (places < end)] - start
                    start = end
                    if len(mine):
                        yield commit, table if len(mine) == table.num_rows else _rows(table, mine.tolist())


def _rows(table: pa.Table, places: Sequence[int]) -> pa.Table:
    """Some rows of a table, by slices: taking them would join text beyond 32-bit offsets."""
    return pa.concat_tables([table.slice(place, 1) for place in places])
