"""Settling what a writer that died left behind.

A writer can die between any two of: frames of the journal, the Parquet file, its commit, the emptied journal. What is left
is settled by one rule: whatever the journal or an uncommitted Parquet file holds whole is committed, once; the rest is named
and counted.

    journal, no commit             its steps are committed: with the outcomes where the commit had begun, else `interrupted`
    journal and a commit           what the commit holds already is dropped; what came later becomes a part of its own
    Parquet file without a commit  taken into its step with the journal; without one moved to `discarded/`, never deleted
    damaged journal                what reads back is kept; the file is kept beside as `.damaged`
    commit that cannot be read     named; the journal is kept until it can be
    journal of a living writer     left alone
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.record.writing.folder import one_at_a_time
from rolltape.record.writing.journal import Fault, Record, claim, read_at, read_journal
from rolltape.record.writing.parts import chunks, write_part
from rolltape.replay.checks.groups import other_sums
from rolltape.replay.outcomes import read_outcomes
from rolltape.replay.printing.words import counted
from rolltape.replay.run import Run, open_run
from rolltape.schema.commits import Commit
from rolltape.schema.decoding import decode
from rolltape.schema.encoding import Row, row_of
from rolltape.schema.errors import RolltapeError, Unreachable
from rolltape.schema.fields import TRACE
from rolltape.schema.parquet import read_batches
from rolltape.schema.paths import Part, RunPaths, folder_of, part_of
from rolltape.schema.records import Context, Group, Outcome, Step, Turn
from rolltape.schema.storage import AnyPath, StorePath, place

StepKey = tuple[str, int, str | None]
Place = tuple[int, int, int, str]
_JOURNAL = re.compile(r"(\d+)\.([A-Za-z0-9_\-]+)\.journal")
_TEMPORARY = re.compile(r"\..+\.(\d+)\.[0-9a-f]{8}\.tmp")


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
    """What could not be read or settled, by file and byte."""
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


def recover(path: str | AnyPath, state: str | Path | None = None) -> Recovered:
    """Settle the leftovers of dead writers in the run at `path`. Safe to call again, also after it was killed itself.

    Of a run in an object store: the leftovers of this machine's writers, whose journals are looked for below `state`. What
    cannot be read, or not be written now, is named in `faults` and stays where it is. Raises RunNotFound where there is no
    run.
    """
    paths = open_run(place(path, state)).paths
    with one_at_a_time(paths):
        return settle(paths)


def settle(paths: RunPaths) -> Recovered:
    """`recover` for who holds the run already (see `one_at_a_time`)."""
    result = Recovered()
    kept: set[tuple[int, str]] = set()
    for file in sorted(paths.journals.glob("*.journal")):
        found = _JOURNAL.fullmatch(file.name)
        if found is None:
            continue
        writer = int(found[1]), found[2]
        try:
            if not _settled(paths, file, *writer, result):
                kept.add(writer)
        except (OSError, RolltapeError) as error:
            result.faults.append(
                f"{file}: cannot be settled now ({error}); it is kept. Recover again when that is mended."
            )
            kept.add(writer)
    if not result.alive:
        try:
            _orphans(paths, kept, result)
            _temporary(paths, result)
        except OSError as error:
            result.faults.append(f"{paths.root}: cannot be tidied ({error}).")
    return result


def _settled(paths: RunPaths, file: Path, attempt: int, writer: str, result: Recovered) -> bool:
    """Settle one journal; False where it stays, because its writer lives or a part it belongs to cannot be read."""
    lock = claim(file)
    if lock is None:
        if file.exists():
            result.alive.append(str(file))
        return not file.exists()
    try:
        return _settle(paths, file, lock, attempt, writer, result)
    finally:
        os.close(lock)


@dataclass
class _StepLeft:
    """What a journal says of one step. Rows are named by their place in the file, the last one of a trace counts."""

    offsets: dict[str, tuple[Place, int]] = field(default_factory=dict)
    rewards: dict[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Of these rows."""
    started: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    step: Step | None = None

    def outdated(self) -> set[str]:
        """Traces whose last rows are not there: what their group adds up to is not what its record says."""
        found: set[str] = set()
        for group in self.groups.values():
            rewards = {t: self.rewards[t] for t in group.trace_ids if t in self.rewards}
            if len(rewards) == len(group.trace_ids) and any(other_sums(group, list(rewards.values()))):
                lacking = {t for t, given in rewards.items() if group.rewards.keys() - given.keys()}
                found |= lacking or rewards.keys()
        return found


def _settle(paths: RunPaths, file: Path, descriptor: int, attempt: int, writer: str, result: Recovered) -> bool:
    left: dict[StepKey, _StepLeft] = {}
    whole = done = True
    for item in read_journal(file):
        if isinstance(item, Fault):
            result.faults.append(f"{file}: {item}")
            whole = False
        else:
            _take(item, left)
    run = Run(paths, {})
    for key, step in sorted(left.items(), key=lambda kv: (kv[0][1], kv[0][0], kv[0][2] or "")):
        part = Part(folder_of(key[0], key[2]), key[1], attempt, writer)
        done = _commit_step(run, part, key, step, descriptor, result) and done
    if not done:
        return False
    if whole:
        file.unlink()
    else:
        file.replace(file.with_name(f"{file.name}.{time.time_ns()}.damaged"))
    result.removed.append(str(file))
    return True


def _take(record: Record, left: dict[StepKey, _StepLeft]) -> None:
    d = record.data
    if record.kind not in ("started", "trace", "group", "outcome", "step"):
        return
    step = left.setdefault((d["split"], d["step"], d["eval_name"]), _StepLeft())
    if record.kind == "started":
        step.started += d["n"]
    elif record.kind == "trace" and record.row is not None:
        step.offsets[record.row.values["trace_id"]] = (record.row.order, record.offset)
        step.rewards[record.row.values["trace_id"]] = record.row.values["rewards"] or {}
    elif record.kind == "group":
        group = Group.from_dict(d["group"])
        step.groups[group.group_index] = group
    elif record.kind == "outcome":
        step.outcomes.update((o.trace_id, o) for o in _outcomes(d["outcomes"], record.arrays))
    else:
        step.step = Step.from_dict(d["record"])


def outcome_record(outcomes: Sequence[Outcome]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Outcomes as JSON values and arrays for the journal: a step can have millions of recomputed log-probs."""
    said = [
        {
            **outcome.__dict__,
            "remove_sample": None if outcome.remove_sample is None else list(outcome.remove_sample),
            "logprobs": outcome.logprobs is not None,
        }
        for outcome in outcomes
    ]
    return said, [o.logprobs for o in outcomes if o.logprobs is not None]


def _outcomes(said: list[dict[str, Any]], arrays: list[Any]) -> Iterator[Outcome]:
    """The inverse of `outcome_record`."""
    given = iter(arrays)
    for data in said:
        logprobs = np.array(next(given), np.float32) if data["logprobs"] else None
        remove = data["remove_sample"]
        yield Outcome(**{**data, "remove_sample": None if remove is None else tuple(remove), "logprobs": logprobs})


def _commit_step(run: Run, part: Part, key: StepKey, left: _StepLeft, descriptor: int, result: Recovered) -> bool:
    """Commit what is left of one step, unless that was done; False where that cannot be told."""
    paths = run.paths
    try:
        commits = _committed(run, part)
        known = {t for c in commits for rows in run.part_batches(c, ["trace_id"]) for t in rows.column(0).to_pylist()}
    except (RolltapeError, OSError) as error:
        result.faults.append(f"{error} The journal of {part.stem} is kept until the part can be read.")
        return False
    parts = [c.part for c in commits] + [d.part for d in run.contents.dropped if _belongs(d.part, part)]
    if parts:
        result.known += len(known & left.offsets.keys())
        left.offsets = {t: o for t, o in left.offsets.items() if t not in known}
        if not left.offsets:
            return True
        part = _late(part, parts)
        left.started, left.step, left.groups = len(left.offsets), None, {}
    rows: list[tuple[Place, int | Row]] = list(left.offsets.values())
    rows += _uncommitted_rows(paths, part, left, result)
    rows.sort(key=lambda row: row[0])
    outdated = left.outdated()
    if outdated:
        result.faults.append(
            f"{part.stem}: {counted(len(outdated), 'trace')} as {'it was' if len(outdated) == 1 else 'they were'} before the "
            "group rewards, for the later rows were not written; that is noted on them, and their reward left out."
        )
    base = left.step or Step(split=key[0], eval_name=key[2], step=key[1])
    started = max(left.started, base.counts.get("started", 0), len(rows))
    commit = write_part(
        paths,
        part,
        chunks(_as_known(row, outdated) for row in _stream(rows, descriptor, result)),
        outcomes=[_of(left, place[3]) for place, _ in rows],
        groups=list(left.groups.values()),
        step=replace(base, attempt=part.attempt, writer=part.writer, counts={**base.counts, "started": started}),
        versions={},
        sums={"recovered": True},
    )
    lost = commit.step.counts["lost"]
    result.committed.append({"part": part.stem, "split": part.split, "traces": commit.file.rows, "lost": lost})
    return True


def _committed(run: Run, part: Part) -> list[Commit]:
    """The part, and those that earlier recoveries made of what came late for it, where they are committed.

    Raises the error of a commit that cannot be read and may be one of them.
    """
    for other, error in run.broken:
        first, last = other.step, other.last_step
        if last is None and _belongs(other, part):
            raise error
        same = (other.split, other.attempt) == (part.split, part.attempt)
        if last is not None and same and first <= part.step <= last:
            raise error
    return [c for c in run.all_commits if _belongs(c.part, part)]


def _belongs(other: Part, part: Part) -> bool:
    late = re.escape(part.writer) + r"(-late\d+)?"
    return replace(other, writer=part.writer) == part and re.fullmatch(late, other.writer) is not None


def _late(part: Part, parts: Sequence[Part]) -> Part:
    """The part for what is not in `parts`. Its name is the same when a recovery that was killed begins again."""
    names = {p.writer for p in parts}
    number = next(n for n in range(1, len(parts) + 2) if f"{part.writer}-late{n}" not in names)
    return replace(part, writer=f"{part.writer}-late{number}")


def _of(left: _StepLeft, trace: str) -> Outcome:
    why = "the process ended before the step did"
    return left.outcomes.get(trace) or Outcome(trace_id=trace, disposition="interrupted", reason=why)


def _stream(rows: Sequence[tuple[Place, int | Row]], descriptor: int, result: Recovered) -> Iterator[Row]:
    for _, held in rows:
        if isinstance(held, Row):
            yield held
            continue
        try:
            row = read_at(descriptor, held).row
        except (RolltapeError, OSError) as error:
            result.faults.append(str(error))
            continue
        if row is not None:
            yield row


def _as_known(row: Row, outdated: Set[str]) -> Row:
    """`row`; without a total where its rewards are not all that were given."""
    if row.values["trace_id"] in outdated:
        row.values["reward"] = None
        row.values["problems"] = [*(row.values["problems"] or ()), _OUTDATED]
    return row


_OUTDATED = "rewards: as they were before the group rewards; the row with all of them could not be written"


def _uncommitted_rows(paths: RunPaths, part: Part, left: _StepLeft, result: Recovered) -> list[tuple[Place, int | Row]]:
    """Rows of the part's Parquet file, where there is one without a commit, that the journal does not hold."""
    path = paths.parquet(part)
    rows: list[tuple[Place, int | Row]] = []
    if not path.exists():
        return rows
    try:
        for table in read_batches(path):
            missing = [t not in left.offsets for t in table.column("trace_id").to_pylist()]
            table = table.filter(missing)
            rows.extend((row.order, row) for row in _rows_again(table))
            left.outcomes = {**{o.trace_id: o for o in read_outcomes(table)}, **left.outcomes}
    except Unreachable:
        raise
    except (RolltapeError, OSError) as error:
        result.faults.append(f"{error} What of it the journal does not hold is lost.")
    return rows


def _rows_again(table: Any) -> Iterator[Row]:
    """Rows of a table, taken apart again."""
    context = [f.name for f in TRACE.fields if f.name in Context.__dataclass_fields__]
    turn = [n for n in Turn.__dataclass_fields__ if f"turn_{n}" in TRACE.by_name]
    light = table.select([*context, *(f"turn_{n}" for n in turn)]).to_pylist()
    for record, row in zip(decode(table.select(TRACE.arrow.names)), light, strict=True):
        columns = [row[f"turn_{n}"] or () for n in turn]
        turns = [Turn(**dict(zip(turn, values, strict=True))) for values in zip(*columns, strict=True)]
        values = {n: row[n] for n in context}
        for name in ("sampling", "renderer"):
            values[name] = None if values[name] is None else json.loads(values[name])
        yield row_of(record, Context(**values, turns=turns))


def _orphans(paths: RunPaths, kept: set[tuple[int, str]], result: Recovered) -> None:
    """Move Parquet files that neither a commit nor a journal explains out of the way.

    Those in an object store stay: another machine's writer, of which nothing is known here, may be about to commit them.
    """
    if isinstance(paths.root, StorePath):
        return
    for path in sorted((paths.root / "traces").glob("*/*.parquet")):
        part = part_of(path)
        if part is not None and (paths.commit(part).exists() or (part.attempt, part.writer) in kept):
            continue
        if part is not None and part.last_step is not None:  # `compact` or `prune` is at work, or begins again
            continue
        target = paths.root / "discarded" / path.parent.name / path.name
        if target.exists():
            target = target.with_name(f"{path.name}.{time.time_ns()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        result.discarded.append(str(target))


def _temporary(paths: RunPaths, result: Recovered) -> None:
    """Remove temporary files of writers that died: their bytes never became data."""
    root = paths.root.state if isinstance(paths.root, StorePath) else paths.root
    for path in sorted(root.rglob(".*.tmp")):
        found = _TEMPORARY.fullmatch(path.name)
        if found is not None and not _runs(int(found[1])):
            path.unlink(missing_ok=True)
            result.removed.append(str(path))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
