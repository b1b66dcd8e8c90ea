"""From a table that somebody gives to the columns of an annotation: what it is about, whether it fits, how it is stored."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.parquet as pq

from rolltape.replay.annotations import KEYS, Column, Level
from rolltape.replay.printing.words import counted
from rolltape.schema.errors import BadInput

if TYPE_CHECKING:
    from rolltape.replay.run import Run

_COUNTS = ("trace_id", "num_tokens", "num_sampled", "num_nodes", "num_turns", "num_branches")
_OVER = {"tokens": "tokens", "sampled": "tokens", "nodes": "nodes", "turns": "nodes", "response": "tokens"}
"""What a list may be over when it is given, and what it is stored over."""
_TAKEN = ("run", "run_id")


# -- what is given


def arrow_table(given: Any) -> pa.Table:
    """A file, Arrow table, data frame, columns by name or list of rows as an Arrow table. Raises BadInput for others."""
    if isinstance(given, (str, Path)):
        return _file(Path(given))
    if isinstance(given, pa.Table):
        return given
    try:
        if isinstance(given, Mapping):
            return pa.table(dict(given))
        if isinstance(given, Sequence):
            names = list(dict.fromkeys(name for row in given for name in row))  # a key may first come in a later row
            return pa.table({name: [row.get(name) for row in given] for name in names})
        return pa.table(given)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(
            f"{type(given).__name__} is no table ({error}); expected a file, an Arrow table, a data frame, columns by name, "
            "or a list of rows."
        ) from error


def _file(path: Path) -> pa.Table:
    readers = {".parquet": pq.read_table, ".csv": _csv, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise BadInput(f"{path} ends in {path.suffix or 'nothing'}; expected {', '.join(readers)}.")
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        return readers[path.suffix](path)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path}: no readable table ({error}).") from error


_NO_VALUE = ["", "NULL", "null", "NA", "N/A", "n/a", "#NA", "#N/A"]
"""What stands in a CSV for null where a column holds numbers. Not NaN, which is a number that somebody got."""


def _csv(path: Path) -> pa.Table:
    """Trace ids stay text: one of digits only would lose its zeros as a number."""
    options = pcsv.ConvertOptions(column_types={"trace_id": pa.string()}, null_values=_NO_VALUE)
    table = pcsv.read_csv(path, convert_options=options)
    binary = [f.name for f in table.schema if pa.types.is_binary(f.type)]
    if binary:
        raise BadInput(f"{path}: the column {binary[0]!r} is no text in UTF-8; save the file in that encoding.")
    return table


def _jsonl(path: Path) -> pa.Table:
    """Read in one piece, so that a column whose first lists are empty still has its type."""
    if not path.stat().st_size:
        return pa.table({})
    if path.stat().st_size >= 1 << 31:
        raise BadInput(f"{path}: more than 2 GiB of JSON; give a Parquet file.")
    whole = pjson.ReadOptions(block_size=path.stat().st_size + 1)
    return pjson.read_json(path, read_options=whole)


# -- whether it fits


@dataclass(frozen=True)
class Checked:
    """A table that fits its run."""

    run: Run
    table: pa.Table
    """Keys first, then the columns; lists as they were given."""
    level: Level
    columns: tuple[Column, ...]
    schema: pa.Schema
    """As it is stored."""

    @classmethod
    def of(cls, run: Run, given: pa.Table) -> Checked:
        """Check `given` against the traces of `run`, of all splits and attempts. Raises BadInput for what does not fit."""
        table, level = _keyed(given)
        counts = _counts_of(run, table.column("trace_id"))
        _check_keys(table, level, counts)
        schema = pa.schema([(f.name, _stored(f.type)) for f in table.schema])
        types = _types(schema)
        _check_values(table, level)
        names = [name for name in table.column_names if name not in KEYS[level]]
        columns = tuple(Column(name, types[name], *_over(run, table, name, level, counts)) for name in names)
        return cls(run, table, level, columns, schema)

    @property
    def traces(self) -> int:
        """Traces it says something of."""
        return int(pc.count_distinct(self.table.column("trace_id")).as_py())

    def tables(self) -> Iterator[pa.Table]:
        """What is stored, in pieces: lists over all tokens or nodes of their traces."""
        spread = [c for c in self.columns if c.given not in (None, c.over)]
        if not spread:
            yield self.table.cast(self.schema)
            return
        yield from _spread_out(self, spread)


def _keyed(given: pa.Table) -> tuple[pa.Table, Level]:
    """The table with its key first, in the right types, and the level it is about."""
    names = given.column_names
    folded = [n.lower() for n in names]
    twice = sorted({n for n in folded if folded.count(n) > 1})
    if twice:
        raise BadInput(f"the column {twice[0]!r} comes twice; SQL does not tell capitals apart. Rename one.")
    if "trace_id" not in names:
        raise BadInput(
            f"there is no column trace_id, which says what a row is about; found are {_few(names) or 'none'}."
        )
    if "node" in names and "position" in names:
        raise BadInput(
            "node and position are both there; the position of a token counts over its whole trace: take one away."
        )
    taken = [n for n in names if n.lower() in _TAKEN]
    if taken:
        raise BadInput(f"the column {taken[0]!r} would be mistaken for the run's; leave it out, or rename it.")
    level: Level = "node" if "node" in names else "token" if "position" in names else "trace"
    values = [n for n in names if n not in KEYS[level]]
    if not values:
        raise BadInput(f"there is no column beside {' and '.join(KEYS[level])}; nothing would be added.")
    table = given.select([*KEYS[level], *values])
    for i, field in enumerate(table.schema):
        if pa.types.is_list_view(field.type) or pa.types.is_large_list_view(field.type):
            raise BadInput(f"the column {field.name!r} is a {field.type}; give plain lists.")
        type_ = pa.string() if i == 0 else pa.int64() if field.name in KEYS[level] else _plain(field.type)
        if type_ != field.type:
            table = table.set_column(i, field.name, _cast(table.column(i), type_, field.name))
    return table, level


def _plain(type_: pa.DataType) -> pa.DataType:
    """A type that Parquet and DuckDB read back: without dictionaries, views and lists of a fixed size."""
    if pa.types.is_dictionary(type_):
        return _plain(type_.value_type)
    if pa.types.is_string_view(type_):
        return pa.string()
    if _is_list(type_):
        return pa.large_list(_plain(type_.value_type))
    return pa.string() if pa.types.is_null(type_) else type_


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def _stored(type_: pa.DataType) -> pa.DataType:
    return pa.list_(type_.value_type) if _is_list(type_) else type_


def _cast(column: pa.ChunkedArray, type_: pa.DataType, name: str) -> pa.ChunkedArray:
    try:
        return column.cast(type_)
    except pa.ArrowException as error:
        raise BadInput(f"the column {name!r} of {column.type} is no {type_} ({error}).") from error


def _counts_of(run: Run, traces: pa.ChunkedArray) -> pa.Table:
    """The counts of the trace of each row of the table. Raises BadInput where the run does not know one."""
    from rolltape.replay.sql.connection import ask

    nulls = traces.null_count
    if nulls:
        raise BadInput(f"{counted(nulls, 'row')} without a trace_id; expected one on each.")
    known = ask(run, f"SELECT {', '.join(_COUNTS)} FROM traces", split=None, all_attempts=True).table()
    places = pc.index_in(traces.combine_chunks(), value_set=known.column("trace_id").combine_chunks())
    if places.null_count:
        unknown: list[str] = pc.unique(traces.filter(places.is_null())).to_pylist()
        there = "traces are" if len(unknown) > 1 else "trace is"
        raise BadInput(
            f"{len(unknown)} {there} not in the run: {_few(unknown)}; expected ids of traces that were committed."
        )
    return known.take(places)


def _check_keys(table: pa.Table, level: Level, counts: pa.Table) -> None:
    """Refuse keys that come twice, and nodes and tokens that are not there. Raises BadInput."""
    for name, count in (("node", "num_nodes"), ("position", "num_tokens")):
        if name in KEYS[level]:
            found = table.column(name)
            bad = pc.fill_null(pc.or_(pc.less(found, 0), pc.greater_equal(found, counts.column(count))), True)
            if pc.any(bad).as_py():
                row = pc.index(bad, True).as_py()
                raise BadInput(
                    f"trace {table.column('trace_id')[row].as_py()}: there is no {name} {found[row].as_py()}; it has "
                    f"{counts.column(count)[row].as_py()} {count.removeprefix('num_')}, counted from 0."
                )
    keys = list(KEYS[level])
    repeated = table.group_by(keys).aggregate([([], "count_all")])
    twice = repeated.filter(pc.greater(repeated.column("count_all"), 1))
    if twice.num_rows:
        first = ", ".join(f"{key} {twice.column(key)[0].as_py()}" for key in keys)
        what = "key comes" if twice.num_rows == 1 else "keys come"
        raise BadInput(f"{twice.num_rows} {what} more than once, such as {first}; expected one row each.")


def _types(schema: pa.Schema) -> dict[str, str]:
    """DuckDB's names of the types. Raises BadInput for one that it cannot read, or that Parquet does not hold."""
    import duckdb

    with duckdb.connect() as connection:
        try:
            found = connection.from_arrow(schema.empty_table()).types
        except duckdb.Error as error:
            raise BadInput(f"a column is of a type that SQL does not read ({error}).") from error
    try:
        pq.write_table(schema.empty_table(), pa.BufferOutputStream())
    except pa.ArrowException as error:
        raise BadInput(f"a column is of a type that Parquet does not hold ({error}).") from error
    return {name: str(kind) for name, kind in zip(schema.names, found, strict=True)}


def _check_values(table: pa.Table, level: Level) -> None:
    """Refuse values of a type that is read which are themselves not, such as a map with a key twice. Raises BadInput."""
    import duckdb

    with duckdb.connect() as connection:
        for name in table.column_names:
            if name not in KEYS[level] and not _is_number(table.schema.field(name).type):
                values = pa.table({"value": table.column(name)})
                try:
                    connection.from_arrow(values).aggregate("max(hash(value))").fetchall()
                except duckdb.Error as error:
                    raise BadInput(f"the column {name!r} holds what SQL does not read ({error}).") from error


def _is_number(type_: pa.DataType) -> bool:
    of = type_.value_type if _is_list(type_) else type_
    return bool(pa.types.is_primitive(of) and not pa.types.is_temporal(of))


def _over(run: Run, table: pa.Table, name: str, level: Level, counts: pa.Table) -> tuple[Any, str | None]:
    """What the lists of a column are over, as stored and as given; nothing where it holds none. Raises BadInput."""
    column = table.column(name)
    if not _is_list(column.type):
        return None, None
    if level != "trace":
        raise BadInput(f"the column {name!r} holds lists; a row about a {level} holds one value each.")
    lengths = pc.list_value_length(column)
    there = lengths.is_valid()
    lengths, counts, ids = lengths.filter(there), counts.filter(there), table.column("trace_id").filter(there)
    wanted = {over: counts.column(f"num_{over}") for over in ("tokens", "sampled", "nodes", "turns")}
    fitting = [over for over, n in wanted.items() if _all_equal(lengths, n)]
    if not fitting:
        wanted["response"] = _responses(run, ids)
        fitting = ["response"] if _all_equal(lengths, wanted["response"]) else []
    if not fitting:
        raise BadInput(_misfit(name, ids, lengths, wanted))
    given = fitting[0]
    return _OVER[given], given


def _all_equal(a: Any, b: Any) -> bool:
    return bool(pc.all(pc.fill_null(pc.equal(a, b), False), min_count=0).as_py())


def _responses(run: Run, ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """Tokens of each trace from the first sampled one on; null where it has several branches, or nothing sampled."""
    from rolltape.replay.sql.connection import ask

    length = "CASE WHEN num_branches = 1 THEN num_tokens - list_position(sampled, true) + 1 END"
    query = f"SELECT trace_id, {length} AS response FROM traces"
    found = ask(run, query, split=None, all_attempts=True).table()
    places = pc.index_in(ids.combine_chunks(), value_set=found.column("trace_id").combine_chunks())
    return found.column("response").take(places).cast(pa.int64())


def _misfit(name: str, ids: Any, lengths: Any, wanted: Mapping[str, Any]) -> str:
    """The sentence about the first list that does not fit what most others are over."""
    matches = {over: pc.fill_null(pc.equal(lengths, n), False) for over, n in wanted.items()}
    best = max(matches, key=lambda over: pc.sum(matches[over]).as_py())
    row = pc.index(matches[best], False).as_py()
    has = ", ".join(f"{n[row].as_py()} {_WORDS[over]}" for over, n in wanted.items() if n[row].as_py() is not None)
    return (
        f"the column {name!r}, trace {ids[row].as_py()}: a list of {lengths[row].as_py()}; the trace has {has}. Lists are over "
        "one of these, the same for all traces of the column; other lists are given as JSON text."
    )


_WORDS = {
    "tokens": "stored tokens",
    "sampled": "sampled tokens",
    "nodes": "nodes",
    "turns": "turns",
    "response": "tokens from the first sampled one on",
}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


# -- how it is stored


def _spread_out(checked: Checked, columns: Sequence[Column]) -> Iterator[pa.Table]:
    """The table in the order of the run's rows, the lists of `columns` over all tokens or nodes of their traces."""
    table, run = checked.table, checked.run
    given = table.column("trace_id").combine_chunks()
    flags = {"tokens": "sampled", "nodes": "node_sampled"}
    needed = ["trace_id", *{flags[c.over or "tokens"] for c in columns}]
    left = np.ones(len(given), bool)
    for commit in run.all_commits:
        for rows in run.part_batches(commit, needed):
            places = pc.index_in(rows.column("trace_id").combine_chunks(), value_set=given)
            known = pc.fill_null(pc.take(pa.array(left), places), False)
            if not pc.any(known).as_py():
                continue
            rows, chosen = rows.filter(known), places.filter(known)
            left[chosen.to_numpy()] = False
            piece = table.take(chosen)
            for column in columns:
                sampled = rows.column(flags[column.over or "tokens"]).combine_chunks()
                if sampled.null_count:
                    raise BadInput(
                        f"the column {column.name!r}, step {commit.part.step}: what of it was sampled was pruned, so a list "
                        f"over {_WORDS[column.given or 'tokens']} has no place; give one over all {column.over}."
                    )
                lists = piece.column(column.name).combine_chunks()
                place = piece.schema.get_field_index(column.name)
                piece = piece.set_column(place, column.name, _spread(lists, sampled, column.given == "response"))
            yield piece.cast(checked.schema)


def _spread(lists: pa.Array, sampled: pa.Array, response: bool) -> pa.Array:
    """Lists over the places where `sampled` is true (or, `response`, from the first one on) as lists over all places."""
    offsets = sampled.offsets.to_numpy() - sampled.offsets[0].as_py()
    flags = sampled.flatten().to_numpy(zero_copy_only=False).astype(bool)
    rows = np.repeat(np.arange(len(lists)), np.diff(offsets))
    if response:
        flags = _from_first(flags, offsets, rows)
    missing = lists.is_null().to_numpy(zero_copy_only=False)
    flags &= ~missing[rows]
    places = pa.array(np.cumsum(flags) - 1, mask=~flags)
    return pa.ListArray.from_arrays(offsets.astype(np.int32), lists.flatten().take(places), mask=pa.array(missing))


def _from_first(
    flags: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Of each row every place from the first flag on."""
    before = np.concatenate(([0], np.cumsum(flags)))
    return before[1:] - before[offsets[:-1]][rows] > 0
