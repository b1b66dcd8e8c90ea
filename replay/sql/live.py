"""Rows that have ended and are not committed yet: read from the journals of a run, of a writer at work or of one that died.

The journals are read before the commits: a step that is committed in between is then found twice, and counted once, where the
other way round it would be found nowhere. A last frame that is still being written is no fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from rolltape.replay.run import Run, open_run
from rolltape.replay.sql.source import KNOWN, Selection
from rolltape.schema.encoding import Row
from rolltape.schema.frames import Record
from rolltape.schema.journals import Fault, scan
from rolltape.schema.paths import Part, folder_of
from rolltape.schema.table import chunked, rows_to_table, with_outcomes

CHUNK_BYTES = 64 << 20
"""Rows that are made into one table, roughly."""


@dataclass
class Journaled:
    """What the journals of a run hold."""

    run: Run
    """The run as it was just after."""
    rows: list[tuple[Part, Row]] = field(default_factory=list)
    """Each trace once, with the part it will be committed in."""
    faults: list[str] = field(default_factory=list)
    """What of the journals could not be read."""


def journaled(run: Run) -> Journaled:
    """The rows that the journals of `run` hold and none of its commits does, and the run with the commits there are now."""
    rows: dict[tuple[Part, str], Row] = {}
    faults: list[str] = []
    for path in sorted(run.paths.journals.glob("*.journal")):
        try:
            data = path.read_bytes()  # not mapped: its writer may cut it any time
        except FileNotFoundError:
            continue
        for record in scan(memoryview(data)):
            if isinstance(record, Record) and record.row is not None:
                rows[_part(record.row), record.row.values["trace_id"]] = record.row
            elif isinstance(record, Fault) and record.kind != "torn tail":
                faults.append(f"{path}: {record} was left out.")
    found = Journaled(open_run(run.paths.root), faults=faults)
    committed = _committed(found.run, {(p.split, p.step, p.attempt) for p, _ in rows})
    found.rows = [(part, row) for (part, trace), row in rows.items() if trace not in committed]
    return found


def _part(row: Row) -> Part:
    values = row.values
    split = folder_of(values["split"], values["eval_name"])
    return Part(split, values["step"], values["attempt"], values["writer"])


def _committed(run: Run, steps: set[tuple[str, int, int]]) -> set[str]:
    """Traces of these steps that are committed."""
    parts = [c for c in run.all_commits if (c.part.split, c.part.step, c.part.attempt) in steps]
    tables = (table for commit in parts for table in run.part_batches(commit, ["trace_id"]))
    return {trace for table in tables for trace in table.column(0).to_pylist()}


def rows_of(found: Journaled, label: str, splits: Iterable[str], selection: Selection) -> list[pa.Table]:
    """The rows of `found` that a query sees, as rows of Parquet files are; their outcome is null."""
    wanted: dict[bool, list[Row]] = {}
    for part, row in found.rows:
        superseded = selection.superseded(found.run, part) if part.split in splits else None
        if superseded is not None:
            wanted.setdefault(superseded, []).append(row)
    tables = []
    for superseded, rows in wanted.items():
        for chunk in chunked(rows, CHUNK_BYTES):
            table = with_outcomes(rows_to_table(chunk), [])
            for name, value in zip(KNOWN.names, (label, found.run.run_id, superseded, True), strict=True):
                table = table.append_column(KNOWN.field(name), pa.repeat(value, len(chunk)))
            tables.append(table)
    return tables
