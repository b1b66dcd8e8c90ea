"""Small columns, kept on this machine once they were read: rewards, counts, names, outcomes of every committed trace.

A run of 500 steps is 500 files of 92 columns, and opening them takes a hundred times as long as reading the few columns that
most questions are about. So these are kept, each column in a file of its own, below `$ROLLTAPE_CACHE`, else
`$XDG_CACHE_HOME/rolltape`, else `~/.cache/rolltape`. What is kept of a part goes by the sha256 in its commit, so it is never
out of date; parts that came later are read and added. A cache that cannot be read or written costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.replay.run import Run
from rolltape.replay.sql import source
from rolltape.replay.sql.source import Chosen
from rolltape.schema.errors import Damaged, Unreachable
from rolltape.schema.fields import ROW, SCHEMA_VERSION, TEXT
from rolltape.schema.storage import READERS, is_silence

CACHE_VARIABLE = "ROLLTAPE_CACHE"
WORTH = 16
"""Parts from which on keeping what was read is worth it: fewer are read again as fast."""
SMALL = frozenset(
    f.name
    for f in ROW.fields
    if f.shape in ("name", "sample")
    or f.name in ("error_types", "reason", "handed_reward")
    or (f.shape == "scalar" and f.type not in (TEXT, pa.large_binary()))
)
"""Columns that may be kept: they take a few bytes a trace."""

_PARTS = b"rolltape.parts"


class Kept:
    """The columns `names` (of SMALL) of the rows of `parts`."""

    def __init__(self, parts: Sequence[Chosen], names: Iterable[str]) -> None:
        self.names = sorted(names)
        self._runs = [_RunColumns(list(of), self.names) for _, of in itertools.groupby(parts, lambda p: p.label)]

    @property
    def lacking(self) -> int:
        """Parts that have to be read from the run."""
        return sum(len(run.lacking) for run in self._runs)

    def table(self) -> pa.Table:
        """The columns, with what is known of each part, rows in order. Raises Damaged where a file does not read back."""
        return pa.concat_tables([run.table() for run in self._runs]).combine_chunks()


class _RunColumns:
    """The same for one run."""

    def __init__(self, parts: list[Chosen], names: list[str]) -> None:
        self.parts, self.names = parts, names
        self.folder = _folder(parts[0].run)
        self.kept = {name: _load(self.folder / f"{name}.parquet") for name in names}
        self.lacking = [p for p in parts if any(_sha(p) not in column.rows for column in self.kept.values())]

    def table(self) -> pa.Table:
        """The columns, with what is known of each part."""
        if self.lacking:
            self._read()
        table, parts = source.known(self.parts), [_sha(p) for p in self.parts]
        for name in self.names:
            table = table.append_column(name, self.kept[name].select(parts))
        return table

    def _read(self) -> None:
        remote = not isinstance(self.parts[0].run.paths.root, Path)
        with ThreadPoolExecutor(READERS if remote else os.cpu_count()) as pool:
            tables = list(pool.map(lambda part: _read(part, self.names), self.lacking))
        rows = {_sha(p): p.commit.file.rows for p in self.lacking}
        there = {c.file.sha256 for c in self.parts[0].run.all_commits}
        for name, column in self.kept.items():
            old = [sha for sha in column.rows if sha in there and sha not in rows]
            chunks = [*column.select(old).chunks, *(c for table in tables for c in table.column(name).chunks)]
            merged = pa.chunked_array(chunks, _type(name)).combine_chunks()
            self.kept[name] = _Column({sha: column.rows[sha] for sha in old} | rows, pa.chunked_array([merged]))
            if len(self.lacking) >= WORTH:
                _keep(self.folder / f"{name}.parquet", self.kept[name])


@dataclass(frozen=True)
class _Column:
    """A column of some parts, one after the other."""

    rows: dict[str, int]
    """Rows of each part, by sha256."""
    values: pa.ChunkedArray

    def select(self, parts: list[str]) -> pa.ChunkedArray:
        """The values of `parts`, in that order."""
        if parts == list(self.rows):
            return self.values
        begins = dict(zip(self.rows, itertools.accumulate(self.rows.values(), initial=0), strict=False))
        pieces = [self.values.slice(begins[sha], self.rows[sha]) for sha in parts]
        return pa.chunked_array([c for piece in pieces for c in piece.chunks], self.values.type)


def _sha(part: Chosen) -> str:
    return part.commit.file.sha256


def _type(name: str) -> pa.DataType:
    return ROW.by_name[name].arrow_type


def _read(part: Chosen, names: Sequence[str]) -> pa.Table:
    """Columns of a part, in less time than `Run.part_batches` takes: the file's other columns are not looked at."""
    held = part.run.held(part.commit)
    files, path = source.located(held.path)
    try:
        with files.open_input_file(path) as file:
            found = pq.ParquetFile(file, metadata=part.run.footer(held), page_checksum_verification=True)
            groups = range(found.num_row_groups) if held.row_groups is None else held.row_groups
            table = found.read_row_groups(list(groups), columns=list(names), use_threads=False)
        return source.with_columns(table, names, part.commit.file.rows)
    except (OSError, pa.ArrowException) as error:
        if is_silence(error):
            raise Unreachable(f"{path}: could not be fetched ({error}).") from error
        raise Damaged(f"{path}: does not read back ({error}); restore the file from a copy.") from error


# -- files


def _folder(run: Run) -> Path:
    """Where the columns of a run are kept: one folder for each place a run lies at, and each run that lay there."""
    base = os.environ.get(CACHE_VARIABLE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rolltape")
    where = str(run.paths.root.absolute())
    name = re.sub(r"[^A-Za-z0-9]+", "-", where).strip("-")[-60:]
    digest = hashlib.sha256(f"{where} {run.run_id} {SCHEMA_VERSION[0]}".encode()).hexdigest()[:12]
    return Path(os.path.expanduser(base)) / f"{name}-{digest}"


def _load(path: Path) -> _Column:
    """The column that a file holds; an empty one where there is no such file, or it does not read back."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        with pq.ParquetFile(path, page_checksum_verification=True, memory_map=False) as file:
            rows = dict(json.loads(file.metadata.metadata[_PARTS]))
            values = file.read().column(path.stem)
        if values.type == _type(path.stem) and len(values) == sum(rows.values()):
            return _Column(rows, values)
    return _Column({}, pa.chunked_array([], _type(path.stem)))


def _keep(path: Path, column: _Column) -> None:
    """Write a column, whole or not at all. A disk that refuses it is let be."""
    table = pa.table({path.stem: column.values}).replace_schema_metadata({_PARTS: json.dumps(column.rows).encode()})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            pq.write_table(table, temporary, compression="zstd", write_statistics=False, write_page_checksum=True)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
