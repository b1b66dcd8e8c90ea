"""Where a writer goes on: its step, its place in the taskset, and the numbers it gives out next.

Steps are shared: each writer records its own part of a step, and readers take the parts of a step together. So that groups
and samples of one step never share a number, each writer numbers in a lane of its own, told by its name.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput

LANE = 1_000_000_000
"""Groups, and samples, that one writer can number."""
LANES = 10_000


@dataclass
class Counters:
    """What goes on from step to step: the place in the taskset and the next free numbers."""

    cursor: int = 0
    next_group_index: int = 0
    next_sample_index: int = 0

    @classmethod
    def of_writer(cls, writer: str) -> Counters:
        """The counters of a writer that begins."""
        first = first_index(writer)
        return cls(0, first, first)


def first_index(writer: str) -> int:
    """The first group and sample index of a writer: 0 for `main`, else the begin of the lane that its name gives."""
    return 0 if writer == "main" else (1 + zlib.crc32(writer.encode()) % (LANES - 1)) * LANE


def after_everything(run: Run) -> int:
    """The first step behind everything that was recorded, of whichever split: an attempt from there supersedes nothing."""
    steps = [commit.part.step for commit in run.all_commits] + [part.step for part, _ in run.broken]
    return 1 + max(steps, default=-1)


def continued(run: Run, split: str, writer: str) -> tuple[int, Counters]:
    """The next step of a split, and the counters of `writer` there.

    It goes on in the taskset after its own last whole step, or, where it has none, after everybody's. A step that was cut
    short by a crash counts as recorded, and its tasks are run again. Raises BadInput where another writer of the run has
    the same lane.
    """
    commits = [commit for commit in run.all_commits if commit.part.split == split]
    _check_lane(writer, (commit.part.writer for commit in run.all_commits))
    steps = [commit.part.step for commit in commits] + [part.step for part, _ in run.broken if part.split == split]
    counters = Counters.of_writer(writer)
    lane = range(counters.next_group_index, counters.next_group_index + LANE)
    for commit in commits:
        counters.next_group_index = _after(counters.next_group_index, _groups(run, commit), lane)
        counters.next_sample_index = _after(counters.next_sample_index, [commit.step.next_sample_index], lane)
    whole = [commit for commit in commits if commit.step.cursor is not None]
    mine = [commit for commit in whole if commit.part.writer == writer]
    last = max(mine or whole, key=lambda commit: (commit.part.step, commit.part.attempt), default=None)
    counters.cursor = 0 if last is None else last.step.cursor or 0
    return 1 + max(steps, default=-1), counters


def _after(index: int, candidates: Iterable[int | None], lane: range) -> int:
    """The largest of `index` and those of `candidates` that lie in the lane, or at its end."""
    return max([index, *(c for c in candidates if c is not None and lane.start < c <= lane.stop)])


def _groups(run: Run, commit: Commit) -> list[int | None]:
    """Group indices that are free after a part: the next one it says, or, of a part cut short, one after its rows'."""
    if commit.step.next_group_index is not None:
        return [commit.step.next_group_index]
    found = [column for table in run.part_batches(commit, ["group_index"]) for column in table.column(0).to_pylist()]
    return [None if index is None else index + 1 for index in found]


def _check_lane(writer: str, writers: Iterable[str]) -> None:
    for other in {re.sub(r"-late\d+$", "", name) for name in writers} - {writer}:
        if first_index(other) == first_index(writer):
            raise BadInput(
                f"Writers {other!r} and {writer!r} would number their groups alike; choose another --writer."
            )
