"""Settling what a writer that died left behind.

A writer can die between any two of: frames of the journal, the Parquet file, its commit, the emptied journal. What is left
is settled by one rule: whatever the journal or an uncommitted Parquet file holds whole is committed, once; the rest is named
and counted.

    journal, no commit             its steps are committed: with the outcomes where the commit had begun, else `interrupted`
    journal and a commit           what the commit holds already is dropped; what came later becomes a part of its own
    Parquet file without a commit  taken into its step with the journal; without one moved to `discarded/`, never deleted
    damaged journal                what reads back is kept; the file is kept beside as `.damaged`
    journal of a living writer     left alone
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolltape.record.journal import Fault, Record, read_at, read_journal
from rolltape.record.parts import write_part
from rolltape.schema.commits import Commit
from rolltape.schema.decoding import decode
from rolltape.schema.encoding import Row, row_of
from rolltape.schema.errors import BadInput, RolltapeError, RunNotFound
from rolltape.schema.fields import TRACE
from rolltape.schema.parquet import read_batches
from rolltape.schema.paths import Part, RunPaths, folder_of, part_of
from rolltape.schema.records import Context, Group, Outcome, Step, Turn

StepKey = tuple[str, int, str | None]
_JOURNAL = re.compile(r"(\d+)\.([A-Za-z0-9_\-]+)\.journal")


@dataclass
class Recovered:
    """What was found and what became of it."""

    alive: list[str] = field(default_factory=list)
    """Journals whose writer lives; left alone."""
    committed: list[dict[str, Any]] = field(default_factory=list)
    """Parts that were committed now: part, traces, lost."""
    known: int = 0
    """Journaled traces that a commit held already."""
    faults: list[str] = field(default_factory=list)
    """What could not be read, by file and byte."""
    discarded: list[str] = field(default_factory=list)
    """Files moved to `discarded/`."""
    removed: list[str] = field(default_factory=list)
    """Journals that are settled and temporary files that nobody finishes."""

    @property
    def anything(self) -> bool:
        """Whether there was anything to settle."""
        return bool(self.committed or self.faults or self.discarded or self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(self.__dict__)


def recover(path: str | Path) -> Recovered:
    """Settle the leftovers of dead writers in the run at `path`. Safe to call again, also after it was killed itself.

    Raises RunNotFound where there is no run.
    """
    paths = RunPaths(Path(path))
    if not paths.run.exists():
        raise RunNotFound(f"{paths.root} holds no run.json, so there is no run to recover.")
    result = Recovered()
    for file in sorted(paths.journals.glob("*.journal")):
        if _JOURNAL.fullmatch(file.name) is None:
            continue
        lock = _claim(file)
        if lock is None:
            result.alive.append(str(file))
            continue
        try:
            _settle(paths, file, result)
        finally:
            os.close(lock)
    if not result.alive:
        _orphans(paths, result)
        _temporary(paths, result)
    return result


def _claim(file: Path) -> int | None:
    """A descriptor that holds the journal's lock; None where its writer, or another recovery, holds it."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@dataclass
class _StepLeft:
    """What a journal says of one step. Rows are named by their place in the file, the last one of a trace counts."""

    offsets: dict[str, tuple[tuple[int, int, int, str], int]] = field(default_factory=dict)
    started: int = 0
    groups: list[Group] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    step: Step | None = None
    bytes: int = 0


def _settle(paths: RunPaths, file: Path, result: Recovered) -> None:
    found = _JOURNAL.fullmatch(file.name)
    assert found is not None
    attempt, writer = int(found[1]), found[2]
    left: dict[StepKey, _StepLeft] = {}
    damaged = False
    for item in read_journal(file):
        if isinstance(item, Fault):
            result.faults.append(f"{file}: {item}")
            damaged = damaged or item.kind != "torn tail"
        else:
            _take(item, left)
    with file.open("rb") as handle:
        for key, step in sorted(left.items(), key=lambda kv: (kv[0][1], kv[0][0], kv[0][2] or "")):
            part = Part(folder_of(key[0], key[2]), key[1], attempt, writer)
            _commit_step(paths, part, key, step, handle.fileno(), result)
    if damaged:
        file.replace(file.with_name(f"{file.name}.{time.time_ns()}.damaged"))
    else:
        file.unlink()
    result.removed.append(str(file))


def _take(record: Record, left: dict[StepKey, _StepLeft]) -> None:
    d = record.data
    if record.kind not in ("started", "trace", "group", "outcome", "step"):
        return
    step = left.setdefault((d["split"], d["step"], d["eval_name"]), _StepLeft())
    if record.kind == "started":
        step.started += d["n"]
    elif record.kind == "trace" and record.row is not None:
        row = record.row
        step.offsets[row.values["trace_id"]] = (row.order, record.offset)
        step.bytes += row.nbytes
    elif record.kind == "group":
        group = Group.from_dict(d["group"])
        step.groups = [*(g for g in step.groups if g.group_index != group.group_index), group]
    elif record.kind == "outcome":
        step.outcomes.update((o["trace_id"], _outcome(o)) for o in d["outcomes"])
    else:
        step.step = Step.from_dict(d["record"])


def _outcome(data: dict[str, Any]) -> Outcome:
    import numpy as np

    logprobs, remove = data.get("logprobs"), data.get("remove_sample")
    return Outcome(
        trace_id=data["trace_id"],
        disposition=data["disposition"],
        reason=data.get("reason"),
        handed_reward=data.get("handed_reward"),
        remove_sample=None if remove is None else tuple(remove),
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
    )


def _commit_step(
    paths: RunPaths, part: Part, key: StepKey, left: _StepLeft, descriptor: int, result: Recovered
) -> None:
    """Commit what is left of one step, unless that was done."""
    if paths.commit(part).exists():
        known = _committed_traces(paths, part, result)
        if known is None:
            return
        result.known += len(known & left.offsets.keys())
        left.offsets = {t: o for t, o in left.offsets.items() if t not in known}
        if not left.offsets:
            return
        part = replace(part, writer=f"{part.writer}-late{time.time_ns()}")
        left.started, left.step, left.groups = len(left.offsets), None, []
    rows: list[tuple[tuple[int, int, int, str], int | Row]] = list(left.offsets.values())
    rows += _uncommitted_rows(paths, part, left, result)
    counts = Counter(_of(left, r).disposition for r in _ids(rows))
    started = max(left.started, len(rows))
    base = left.step or Step(split=key[0], eval_name=key[2], step=key[1])
    place = {"split": key[0], "eval_name": key[2], "step": key[1], "attempt": part.attempt, "writer": part.writer}
    step = Step.from_dict(
        {
            **base.to_dict(),
            **place,
            "counts": {"started": started, **sorted_counts(counts), "lost": started - len(rows)},
        }
    )
    write_part(
        paths,
        part,
        _stream(sorted(rows, key=lambda r: r[0]), descriptor),
        outcomes=[_of(left, t) for t in _ids(rows)],
        groups=left.groups,
        step=step,
        versions={},
        sums={"recovered": True},
    )
    result.committed.append({"part": part.stem, "split": part.split, "traces": len(rows), "lost": started - len(rows)})


def sorted_counts(counts: Counter[str]) -> dict[str, int]:
    """Counts by name."""
    return dict(sorted(counts.items()))


def _ids(rows: list[tuple[tuple[int, int, int, str], int | Row]]) -> list[str]:
    return [order[3] for order, _ in rows]


def _of(left: _StepLeft, trace: str) -> Outcome:
    why = "the process ended before the step did"
    return left.outcomes.get(trace) or Outcome(trace_id=trace, disposition="interrupted", reason=why)


def _stream(rows: list[tuple[tuple[int, int, int, str], int | Row]], descriptor: int) -> Iterator[Row]:
    for _, place in rows:
        yield place if isinstance(place, Row) else _row_at(descriptor, place)


def _row_at(descriptor: int, offset: int) -> Row:
    row = read_at(descriptor, offset).row
    assert row is not None
    return row


def _committed_traces(paths: RunPaths, part: Part, result: Recovered) -> set[str] | None:
    """Traces of a committed part; None where its commit or file cannot be read."""
    try:
        Commit.read(paths.commit(part))
        return {t for table in read_batches(paths.parquet(part), ["trace_id"]) for t in table.column(0).to_pylist()}
    except (RolltapeError, OSError) as error:
        result.faults.append(f"{error} Its journal is kept until the part can be read.")
        raise BadInput(f"{paths.commit(part)}: cannot be read, so its journal cannot be settled ({error})") from error


def _uncommitted_rows(
    paths: RunPaths, part: Part, left: _StepLeft, result: Recovered
) -> list[tuple[tuple[int, int, int, str], int | Row]]:
    """Rows of the part's Parquet file, where there is one without a commit, that the journal does not hold."""
    path = paths.parquet(part)
    if not path.exists():
        return []
    rows: list[tuple[tuple[int, int, int, str], int | Row]] = []
    try:
        for table in read_batches(path):
            missing = [t not in left.offsets for t in table.column("trace_id").to_pylist()]
            rows.extend((row.order, row) for row in _rows_again(table.filter(missing)))
    except (RolltapeError, OSError) as error:
        result.faults.append(f"{error} What of it the journal does not hold is lost.")
    return rows


def _rows_again(table: Any) -> Iterator[Row]:
    """Rows of a table, taken apart again."""
    context = [f.name for f in TRACE.fields if f.name in Context.__dataclass_fields__]
    turn = [n for n in Turn.__dataclass_fields__ if f"turn_{n}" in TRACE.by_name]
    light = table.select([*context, *(f"turn_{n}" for n in turn)]).to_pylist()
    for record, row in zip(decode(table.select(TRACE.arrow.names)), light, strict=True):
        import json

        columns = [row[f"turn_{n}"] or () for n in turn]
        turns = [Turn(**dict(zip(turn, values, strict=True))) for values in zip(*columns, strict=True)]
        values = {n: row[n] for n in context}
        for name in ("sampling", "renderer"):
            values[name] = None if values[name] is None else json.loads(values[name])
        yield row_of(record, Context(**values, turns=turns))


def _orphans(paths: RunPaths, result: Recovered) -> None:
    """Move Parquet files that neither a commit nor a journal explains out of the way."""
    for path in sorted((paths.root / "traces").glob("*/*.parquet")):
        part = part_of(path)
        if part is not None and paths.commit(part).exists():
            continue
        target = paths.root / "discarded" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        result.discarded.append(str(target))


def _temporary(paths: RunPaths, result: Recovered) -> None:
    """Remove temporary files of writers that died: their bytes never became data."""
    for path in sorted(paths.root.rglob(".*.tmp")):
        pid = path.name.rsplit(".", 2)[-2]
        if pid.isdigit() and not _runs(int(pid)):
            path.unlink(missing_ok=True)
            result.removed.append(str(path))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
