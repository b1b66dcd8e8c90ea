"""Scores of many parts as one table: rewards, counts, names, outcomes of every committed trace.

Commits repeat them (see `rolltape.schema.scores`), so most questions open no Parquet file. Those of a commit without them, as
earlier ones are, are read from its file. What a `Run` was asked once it keeps in memory, column by column.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.replay.sql import source
from rolltape.replay.sql.source import PLAIN, Chosen
from rolltape.schema.errors import Damaged, Unreachable
from rolltape.schema.storage import READERS, is_silence


class Scores:
    """The columns `names` (of SCORES) of the rows of `parts`. Raises Damaged where a file is not as long as it was."""

    def __init__(self, parts: Sequence[Chosen], names: Iterable[str]) -> None:
        self.names = sorted(names)
        self._runs = [_RunScores(list(of), self.names) for _, of in itertools.groupby(parts, lambda p: p.label)]

    @property
    def lacking(self) -> int:
        """Parts whose files have to be read."""
        return sum(len(run.lacking) for run in self._runs)

    def table(self) -> pa.Table:
        """The columns, with what is known of each part, rows in order. Raises Damaged where a file does not read back."""
        return pa.concat_tables([run.table() for run in self._runs]).combine_chunks()


class _RunScores:
    """The same for one run."""

    def __init__(self, parts: list[Chosen], names: list[str]) -> None:
        self.parts, self.names = parts, names
        self.known: dict[str, ScoreColumn] = parts[0].run.scores
        said = dict(_said_by_commits(self._unknown(), names))
        if said:
            source.found([p for p in parts if _sha(p) in said])
            self._add(said)
        self.lacking = self._unknown()

    def table(self) -> pa.Table:
        """The columns, with what is known of each part."""
        if self.lacking:
            self._read()
        table, parts = source.known(self.parts), [_sha(p) for p in self.parts]
        for name in self.names:
            table = table.append_column(name, self.known[name].select(parts))
        return table

    def _unknown(self) -> list[Chosen]:
        columns = [self.known[name].rows if name in self.known else {} for name in self.names]
        return [p for p in self.parts if not all(_sha(p) in rows for rows in columns)]

    def _read(self) -> None:
        remote = not isinstance(self.parts[0].run.paths.root, Path)
        with ThreadPoolExecutor(READERS if remote else os.cpu_count()) as pool:
            tables = pool.map(lambda part: _read(part, self.names), self.lacking)
            self._add({_sha(part): columns for part, columns in zip(self.lacking, tables, strict=True)})

    def _add(self, found: Mapping[str, Sequence[pa.Array]]) -> None:
        """Keep the columns of these parts."""
        for i, name in enumerate(self.names):
            old = self.known.get(name) or ScoreColumn({}, pa.chunked_array([], PLAIN.field(name).type))
            new = {sha: columns[i] for sha, columns in found.items() if sha not in old.rows}
            joined = pa.chunked_array([*old.values.chunks, *new.values()], old.values.type).combine_chunks()
            rows = {**old.rows, **{sha: len(values) for sha, values in new.items()}}
            self.known[name] = ScoreColumn(rows, pa.chunked_array([joined], old.values.type))


@dataclass(frozen=True)
class ScoreColumn:
    """A column of some parts, one after the other."""

    rows: Mapping[str, int]
    """Rows of each part, by the sha256 of the file it was recorded in."""
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


def _said_by_commits(parts: Iterable[Chosen], names: Sequence[str]) -> Iterator[tuple[str, list[pa.Array]]]:
    """The columns of the parts whose commits hold all of them, by the sha256 of the part."""
    for part in parts:
        if part.commit.file.scores is not None:
            with suppress(KeyError, ValueError):  # of another version: the file has them
                yield _sha(part), [part.commit.score(name) for name in names]


def _read(part: Chosen, names: Sequence[str]) -> list[pa.Array]:
    """Columns of a part, in less time than `Run.part_batches` takes: the file's other columns are not looked at."""
    held = part.run.held(part.commit)
    files, path = source.located(held.path)
    try:
        with files.open_input_file(path) as file:
            found = pq.ParquetFile(file, metadata=part.run.footer(held), page_checksum_verification=True)
            groups = range(found.num_row_groups) if held.row_groups is None else held.row_groups
            table = found.read_row_groups(list(groups), columns=list(names), use_threads=False)
        columns = source.with_columns(table, names, part.commit.file.rows).columns
        return [pa.concat_arrays(c.chunks) if c.num_chunks else pa.array([], c.type) for c in columns]
    except (OSError, pa.ArrowException) as error:
        if is_silence(error):
            raise Unreachable(f"{path}: could not be fetched ({error}).") from error
        raise Damaged(f"{path}: does not read back ({error}); restore the file from a copy.") from error
