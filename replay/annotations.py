"""Later columns of recorded traces: trainer log-probs, advantages, human labels. The recording itself is never touched.

    <run>/annotations/<name>/<version>.<digits>.parquet    the columns, by trace, by node or by token
    <run>/annotations/<name>/<version>.json                what they are, sealed; put once, after its file

A file without its record is no annotation. Another version replaces the one before, which stays where it is: nothing is
rewritten, so an object store will do, and of two who write one version one is told so.

    level    key                  a column holds
    trace    trace_id             a value, or a list with one item a token or a node
    node     trace_id, node       a value
    token    trace_id, position   a value

Lists over sampled tokens, over the response (from the first sampled token on) or over turns are stored over all tokens or
nodes, null between, so that they stand beside the lists of the view `traces`.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.schema.errors import BadInput, Damaged, RunConflict
from rolltape.schema.fields import SCHEMA_VERSION, check_version
from rolltape.schema.parquet import HashingFile, Written, put_once
from rolltape.schema.sealed import seal, unseal
from rolltape.schema.storage import AnyPath, StorePath, listed, size_of

if TYPE_CHECKING:
    from rolltape.replay.run import Run

Level = Literal["trace", "node", "token"]
KEYS: dict[Level, tuple[str, ...]] = {
    "trace": ("trace_id",),
    "node": ("trace_id", "node"),
    "token": ("trace_id", "position"),
}
"""Key columns of each level."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_RECORD = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class Column:
    """A column of an annotation."""

    name: str
    type: str
    """DuckDB's name of its type."""
    over: Literal["tokens", "nodes"] | None = None
    """What a list has one item for each of; None where it is no list."""
    given: str | None = None
    """What the list was over when it was given: tokens, sampled, response, nodes or turns."""


@dataclass(frozen=True)
class Annotation:
    """One version of an annotation."""

    name: str
    version: int
    level: Level
    columns: tuple[Column, ...]
    """Without the key."""
    file: str
    written: Written
    traces: int
    """Traces it says something of."""
    created_at: float

    def to_dict(self) -> dict[str, Any]:
        """The annotation as plain JSON values."""
        return {
            "name": self.name,
            "version": self.version,
            "level": self.level,
            "columns": [dict(c.__dict__) for c in self.columns],
            "file": self.file,
            "rows": self.written.rows,
            "bytes": self.written.bytes,
            "sha256": self.written.sha256,
            "traces": self.traces,
            "created_at": self.created_at,
        }


def annotate(run: Run, name: str, table: Any, *, overwrite: bool = False) -> Annotation:
    """Add columns to traces of `run`, under a name of their own.

    `table`: a file (.parquet, .csv, .jsonl), an Arrow table, a data frame, columns by name, or a list of rows. Its column
    `trace_id`, alone or with `node` or `position` (of a token in its trace, from 0), says what a row is about; every other
    column is added. Traces may be missing.

    Raises BadInput for an unknown trace, a key that comes twice, a node, token or length of a list that does not fit; nothing
    is written then. Raises RunConflict where there is such an annotation and `overwrite` is not set.
    """
    from rolltape.replay.annotating import Checked, arrow_table

    check_annotation_name(name)
    there = _records(run, name)
    if there and not overwrite:
        raise RunConflict(
            f"{run.paths.root}: there is an annotation {name!r} already; choose another name, or set --overwrite."
        )
    checked = Checked.of(run, arrow_table(table))
    version = max(there, default=-1) + 1
    folder = run.paths.annotations / name
    file = f"{version}.{uuid.uuid4().hex[:8]}.parquet"
    written = _write(folder / file, checked.schema, checked.tables())
    made = Annotation(name, version, checked.level, checked.columns, file, written, checked.traces, time.time())
    if not put_once(folder / f"{version}.json", seal(_body(run, made))):
        (folder / file).unlink(missing_ok=True)
        raise RunConflict(
            f"{folder}: somebody else wrote version {version} at the same time; look at it, and try again."
        )
    return made


def check_annotation_name(name: str) -> str:
    """`name` where it can be part of a view's name. Raises BadInput."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"annotation {name!r}: expected 1 to 63 small letters, digits or '_', beginning with a letter; it is queried as "
            "annotation_<name>."
        )
    return name


def annotations_of(run: Run) -> dict[str, Annotation]:
    """The annotations of `run` by name, the newest version of each. Raises Damaged where its record cannot be read."""
    return {name: read_record(path, name) for name, path in newest_records(run).items()}


def newest_records(run: Run) -> dict[str, AnyPath]:
    """The record of the newest version of each annotation of `run`, by name."""
    found: dict[str, dict[int, AnyPath]] = {}
    for path in listed(run.paths.annotations, "*/*.json"):
        if match := _RECORD.fullmatch(path.name):
            found.setdefault(path.parent.name, {})[int(match[1])] = path
    return {name: records[max(records)] for name, records in sorted(found.items()) if _NAME.fullmatch(name)}


def located(run: Run, annotation: Annotation) -> AnyPath:
    """The file of an annotation. Raises Damaged where it is missing or not as long as it was written."""
    path = run.paths.annotations / annotation.name / annotation.file
    try:
        found = size_of(path)
    except FileNotFoundError:
        raise Damaged(f"{path}: the annotation's record names this file, but it is missing; annotate again.") from None
    if found != annotation.written.bytes:
        raise Damaged(f"{path}: {found} bytes, but {annotation.written.bytes} were written; annotate again.")
    return path


def _records(run: Run, name: str) -> dict[int, AnyPath]:
    """The records of an annotation, by version."""
    paths = listed(run.paths.annotations / name, "*.json")
    return {int(match[1]): path for path in paths if (match := _RECORD.fullmatch(path.name))}


def _body(run: Run, made: Annotation) -> dict[str, Any]:
    return {"schema": ".".join(map(str, SCHEMA_VERSION)), "run": run.run_id, **made.to_dict()}


def read_record(path: AnyPath, name: str) -> Annotation:
    """The annotation `name` as its record at `path` says. Raises Damaged where that is no such record."""
    body = unseal(path.read_bytes(), path)
    check_version(str(body.get("schema")), str(path))
    try:
        if body["name"] != name:
            raise Damaged(f"{path}: its content says it is the annotation {body['name']!r}; it was renamed or copied.")
        return Annotation(
            name,
            body["version"],
            body["level"],
            tuple(Column(**c) for c in body["columns"]),
            body["file"],
            Written(body["rows"], body["bytes"], body["sha256"]),
            body["traces"],
            body["created_at"],
        )
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path}: no record of an annotation ({error} is missing or wrong); annotate again.") from error


def _write(path: AnyPath, schema: pa.Schema, tables: Iterable[pa.Table]) -> Written:
    """Write a file, whole or not at all."""
    if isinstance(path, StorePath):
        with path.staged() as here:
            written = _write(here, schema, tables)
            path.upload(here)
        return written
    sink = HashingFile(path)
    rows = 0
    try:
        with pq.ParquetWriter(
            sink, schema, compression="zstd", write_statistics=["trace_id"], write_page_checksum=True
        ) as file:
            for table in tables:
                file.write_table(table)
                rows += table.num_rows
        return Written(rows, sink.bytes, sink.publish())
    except BaseException:
        sink.discard()
        raise
