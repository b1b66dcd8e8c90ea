"""Whether annotations are as they were written, and fit the traces they are about: their newest version, which is the one that
is read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rolltape.replay.annotations import KEYS, Annotation, located, newest_records, read_record
from rolltape.replay.checks.findings import Finding
from rolltape.replay.printing.words import counted
from rolltape.replay.run import Run
from rolltape.schema.errors import Damaged, RolltapeError, Unreachable
from rolltape.schema.fields import ROW
from rolltape.schema.storage import AnyPath

_COUNTS = ("trace_id", "num_tokens", "num_nodes")
_LENGTHS = {"tokens": "num_tokens", "nodes": "num_nodes"}
_INDICES = {"node": "num_nodes", "position": "num_tokens"}


def check_annotations(run: Run) -> tuple[int, list[Finding]]:
    """How many annotations `run` has, and what is wrong with them. Of a run without one no row is read. Raises Unreachable."""
    records = newest_records(run)
    known = _Known.of(run) if records else None
    return len(records), [f for name, path in records.items() if known for f in _check(run, name, path, known)]


@dataclass(frozen=True)
class _Known:
    """The traces of a run, superseded ones included."""

    counts: pa.Table
    """With the columns _COUNTS."""
    whole: bool
    """Whether these are all that there ever were: no part is damaged and none was pruned."""

    @classmethod
    def of(cls, run: Run) -> _Known:
        tables, whole = [], not run.broken and not run.contents.dropped
        for commit in run.all_commits:
            try:
                tables += [table.select(_COUNTS) for table in run.part_batches(commit, _COUNTS)]
            except Unreachable:
                raise
            except (RolltapeError, OSError):  # that is a finding of its own
                whole = False
        none = pa.schema([ROW.arrow.field(name).remove_metadata() for name in _COUNTS]).empty_table()
        return cls(pa.concat_tables(tables) if tables else none, whole)


def _check(run: Run, name: str, path: AnyPath, known: _Known) -> Iterator[Finding]:
    """The findings of one annotation."""
    try:
        annotation = read_record(path, name)
        path = located(run, annotation)
        table = _read(path, annotation)
    except Unreachable:
        raise
    except (RolltapeError, OSError) as error:
        yield _finding(path, str(error))
        return
    if (wanted := [*KEYS[annotation.level], *(c.name for c in annotation.columns)]) != table.column_names:
        yield _finding(path, f"the columns {table.column_names}, but its record says {wanted}; annotate again")
        return
    ids = pc.index_in(table.column("trace_id").combine_chunks(), known.counts.column("trace_id").combine_chunks())
    if ids.null_count and known.whole:
        first = table.column("trace_id").filter(ids.is_null())[0].as_py()
        yield _finding(
            path,
            f"{counted(ids.null_count, 'row')} about traces that are not in the run, such as {first}; annotate again",
        )
    table, counts = table.filter(ids.is_valid()), known.counts.take(ids.drop_null())
    yield from _keys(path, annotation, table, counts)
    yield from _lists(path, annotation, table, counts)


def _read(path: AnyPath, annotation: Annotation) -> pa.Table:
    """The file, byte by byte the one that was written. Raises Damaged."""
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != annotation.written.sha256:
        raise Damaged(
            f"{path}: its sha256 is {found[:12]}…, but {annotation.written.sha256[:12]}… was written; annotate again."
        )
    try:
        return pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{path}: no readable table ({error}); annotate again.") from error


def _keys(path: AnyPath, annotation: Annotation, table: pa.Table, counts: pa.Table) -> Iterator[Finding]:
    """Keys that come twice, and nodes and tokens that are not there."""
    keys = list(KEYS[annotation.level])
    repeated = table.num_rows - table.group_by(keys).aggregate([]).num_rows
    if repeated:
        yield _finding(path, f"{counted(repeated, 'row')} whose {', '.join(keys)} came before; expected one row each")
    for name in set(keys) & set(_INDICES):
        bad = pc.or_(
            pc.less(table.column(name), 0), pc.greater_equal(table.column(name), counts.column(_INDICES[name]))
        )
        if wrong := pc.sum(pc.fill_null(bad, True)).as_py():
            trace = table.column("trace_id").filter(pc.fill_null(bad, True))[0].as_py()
            yield _finding(path, f"{counted(wrong, 'row')} about a {name} that its trace does not have", trace)


def _lists(path: AnyPath, annotation: Annotation, table: pa.Table, counts: pa.Table) -> Iterator[Finding]:
    """Lists that are not as long as their traces."""
    for column in annotation.columns:
        if column.over is None:
            continue
        found = pc.list_value_length(table.column(column.name))
        bad = pc.fill_null(pc.not_equal(found, counts.column(_LENGTHS[column.over])), False)
        if wrong := pc.sum(bad).as_py():
            trace, length = table.column("trace_id").filter(bad)[0].as_py(), found.filter(bad)[0].as_py()
            expected = counts.column(_LENGTHS[column.over]).filter(bad)[0].as_py()
            yield _finding(
                path,
                f"{counted(wrong, 'list')} of {column.name!r} not over all {column.over} of their traces; the first has "
                f"{length} items, expected {expected}",
                trace,
            )


def _finding(path: AnyPath, message: str, trace: str | None = None) -> Finding:
    return Finding(code="annotation", message=message, file=str(path), trace_id=trace)
