"""Merging small files: files of consecutive steps and writers become one of about 100 MB, without a row changed.

Only what is current is merged: parts that a newer attempt took back stay as they are, for `prune` to drop. Parts of different
attempts or splits never share a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rolltape.replay.housekeeping.rewrite import Task, Unit, alone, rewrite, units
from rolltape.replay.run import Run, open_run
from rolltape.schema.errors import BadInput, Damaged, Unreachable
from rolltape.schema.fields import ROW

TARGET = 100 * 10**6
"""Bytes of a merged file, about."""
MOST_PARTS = 128
"""Parts in one file: each has row groups of its own, whose 92 columns take 7 kB and 0.1 ms of the file's footer."""


@dataclass(frozen=True)
class Merged:
    """Files that became one, or are to."""

    split: str
    attempt: int
    first_step: int
    last_step: int
    files: int
    """Before."""
    rows: int
    bytes_before: int
    bytes_after: int | None = None
    into: str | None = None
    """The new file; None where it was not made."""


@dataclass
class Compacted:
    """What a compaction did, or would do."""

    merged: list[Merged] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Why files were left as they are, a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"merged": [dict(m.__dict__) for m in self.merged], "skipped": list(self.skipped)}


def plan(run: Run, target: int = TARGET) -> list[list[Unit]]:
    """Files that are to become one each, in order. Raises BadInput for a target below 1 byte."""
    if target < 1:
        raise BadInput(f"a target of {target} bytes: expected 1 or more.")
    newest = run.newest({c.part for c in run.all_commits})
    result: list[list[Unit]] = []
    current: list[Unit] = []
    for unit in units(run):
        if not all(c.part in newest and c.fingerprint == ROW.fingerprint for c in unit.commits):
            continue
        if current and (unit.first.split, unit.first.attempt) != (current[0].first.split, current[0].first.attempt):
            result, current = [*result, current], []
        if _large(unit, target):
            continue
        if current and sum(len(u.commits) for u in [*current, unit]) > MOST_PARTS:
            result, current = [*result, current], []
        current.append(unit)
        if sum(u.file.bytes for u in current) >= target:
            result, current = [*result, current], []
    return [batch for batch in [*result, current] if len(batch) > 1]


def _large(unit: Unit, target: int) -> bool:
    """Whether a file is left as it is: it would be written again and again for a little more."""
    return unit.file.bytes * 2 > target or len(unit.commits) * 2 > MOST_PARTS


def compact(
    run: Run, target: int = TARGET, *, dry_run: bool = False, told: Callable[[int, int], None] | None = None
) -> Compacted:
    """Merge small files of `run` into files of about `target` bytes. Safe to be killed, and to be called again.

    The files that were merged stay, and no longer count, until `prune` removes them. What cannot be read is left as it is
    and named. `told` is called with files made and files to make. Raises RunConflict where another process does the same,
    OSError where nothing can be written.
    """
    result = Compacted()
    if dry_run:
        result.merged = [_merged(batch) for batch in plan(run, target)]
        return result
    with alone(run):
        run = open_run(run.paths.root)
        batches = plan(run, target)
        for number, batch in enumerate(batches):
            if told is not None:
                told(number, len(batches))
            _merge(run, batch, result)
    return result


def _merge(run: Run, batch: list[Unit], result: Compacted) -> None:
    try:
        made = rewrite(run, Task(units=batch))
    except Unreachable:
        raise
    except Damaged as error:
        result.skipped.append(str(error))
        return
    assert made.file is not None
    result.merged.append(_merged(batch, made.file.bytes, str(run.paths.parquet(made.part))))


def _merged(batch: list[Unit], after: int | None = None, into: str | None = None) -> Merged:
    steps = [c.part.step for unit in batch for c in unit.commits]
    rows = sum(c.file.rows for unit in batch for c in unit.commits)
    first = batch[0].first
    before = sum(unit.file.bytes for unit in batch)
    return Merged(first.split, first.attempt, min(steps), max(steps), len(batch), rows, before, after, into)
