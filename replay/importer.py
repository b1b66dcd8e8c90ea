"""Bringing traces that somebody already has: Verifiers' traces.jsonl into a run.

Lines are read one by one with `for line in file`, never `splitlines`: a prompt may hold U+2028. Groups are the traces of
one task, as the files of Verifiers keep no other.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolltape.schema.commits import Commit
from rolltape.schema.encoding import Row, row_of
from rolltape.schema.errors import BadInput, RolltapeError, RunConflict
from rolltape.schema.fields import ROW, SCHEMA_VERSION
from rolltape.schema.parquet import ROW_GROUP_BYTES, put_once, write_parquet
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.records import Context, Group, Step
from rolltape.schema.sealed import seal
from rolltape.schema.storage import AnyPath, place
from rolltape.schema.table import rows_to_table, with_outcomes


@dataclass
class Imported:
    """What an import did."""

    run: str
    lines: int = 0
    traces: int = 0
    groups: int = 0
    tokens: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """(line number, why) of lines that hold no trace."""
    repeated: list[tuple[int, str]] = field(default_factory=list)
    """(line number, trace id) of traces that had come before."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(self.__dict__)


def import_file(source: str | Path, run: str | AnyPath, progress: Callable[[int], None] | None = None) -> Imported:
    """Import a traces.jsonl of Verifiers 0.2.0 as step 0 of a new run; each task's traces are one group.

    A line that is no trace is skipped and named, a trace id that came before is left out and named. Raises BadInput where
    the file cannot be read or holds no trace at all, RunConflict where `run` is not empty.
    """
    source, paths = Path(source), RunPaths(place(run))
    if paths.root.exists() and (not paths.root.is_dir() or any(paths.root.iterdir())):
        raise RunConflict(f"{paths.root} is not empty; choose a new folder for the imported run.")
    result = Imported(uuid.uuid4().hex)
    groups: dict[Any, list[Row]] = {}
    seen: set[str] = set()
    for number, record in _records(source, result):
        _take(number, record, result, groups, seen)
        if progress is not None:
            progress(number)
    if not result.traces:
        why = f"; line {result.skipped[0][0]}: {result.skipped[0][1]}" if result.skipped else ""
        raise BadInput(f"{source}: {result.lines} lines and no Verifiers trace among them{why}.")
    _write(paths, source, result, list(groups.values()))
    return result


def _records(source: Path, result: Imported) -> Iterator[tuple[int, Any]]:
    """(line number, record) of each line that is JSON."""
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, 1):
                result.lines = number
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    result.skipped.append((number, f"no JSON ({error})"))
    except FileNotFoundError:
        raise BadInput(f"{source}: no such file; expected Verifiers' traces.jsonl.") from None
    except OSError as error:
        raise BadInput(f"{source}: cannot be read ({error.strerror}); expected Verifiers' traces.jsonl.") from error


def _take(number: int, record: Any, result: Imported, groups: dict[Any, list[Row]], seen: set[str]) -> None:
    if not isinstance(record, dict):
        result.skipped.append((number, f"a JSON {type(record).__name__}; expected an object"))
        return
    trace, task = record.get("id"), record.get("task")
    if "traces" in record or not isinstance(task, dict):
        what = "an Episode line of Verifiers 0.3.0 or later" if "traces" in record else "no task"
        result.skipped.append((number, f"{what}; expected a trace of Verifiers 0.2"))
        return
    if not isinstance(trace, str):
        result.skipped.append((number, f"trace id {trace!r}; expected text"))
        return
    if trace in seen:
        result.repeated.append((number, trace))
        return
    data = task.get("data")
    data = data if isinstance(data, dict) else {}
    key = (str(task.get("type")), json.dumps(data if data.get("idx") is None else data["idx"], sort_keys=True))
    members = groups.get(key, [])
    group = members[0].values["group_index"] if members else len(groups)
    context = Context(run=result.run, writer="import", group_index=group, rollout_index=len(members))
    try:
        members.append(row_of(record, context))
    except (RolltapeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        result.skipped.append((number, f"cannot be taken apart ({error})"))
        return
    seen.add(trace)
    groups[key] = members
    result.traces += 1
    result.tokens += members[-1].values["num_tokens"]


def _write(paths: RunPaths, source: Path, result: Imported, groups: list[list[Row]]) -> None:
    result.groups = len(groups)
    now = time.time()
    info = {
        "run": result.run,
        "schema": ".".join(map(str, SCHEMA_VERSION)),
        "model": None,
        "tokenizer": None,
        "taskset": None,
        "created_at": now,
    }
    attempt = {"attempt": 0, "start_step": 0, "started_at": now, "settings": {"imported": source.name}, "versions": {}}
    part = Part("train", 0, 0, "import")
    file = write_parquet(paths.parquet(part), (with_outcomes(rows_to_table(c), []) for c in _chunks(groups)))
    records = [_group(i, rows) for i, rows in enumerate(groups)]
    step = Step(writer="import", started_at=now, ended_at=time.time())
    sums = {"tokens": result.tokens}
    commit = Commit(
        part=part, file=file, groups=records, step=step, sums=sums, fingerprint=ROW.fingerprint, written_at=now
    )
    put_once(paths.commit(part), commit.to_bytes())
    put_once(paths.attempt(0), seal(attempt))
    put_once(paths.run, seal(info))  # last: before it there is no run


def _group(index: int, rows: list[Row]) -> Group:
    records = [
        {
            "id": r.values["trace_id"],
            "task": {"data": {"idx": r.values["task_idx"]}, "key": r.values["task_key"]},
            "rewards": r.values["rewards"],
        }
        for r in rows
    ]
    return Group.from_records(records, expected_size=len(rows), group_index=index)


def _chunks(groups: list[list[Row]]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in (r for rows in groups for r in rows):
        if chunk and size + row.nbytes > ROW_GROUP_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row.nbytes
    yield chunk
