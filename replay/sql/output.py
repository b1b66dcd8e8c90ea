"""Answers as tables, CSV, JSON and Parquet, a batch in memory at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from rich.console import Console, Group, RenderableType
from rich.text import Text

from rolltape.replay.printing.console import json_text, printable, table
from rolltape.replay.sql.answer import Answer, Said

Format = Literal["table", "csv", "json", "parquet"]
BATCH = 2048
_LONGEST = 200
"""Characters of a cell of a table; one more is shown as an ellipsis."""
_NULL = Text("NULL", style="dim")


def batches(answer: Answer) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The answer: columns of one name numbered, whole numbers as whole numbers. Raises BadInput where it cannot be had.

    DuckDB counts in 128 bits, which Arrow has no type for and takes for decimals: such columns become int64.
    """
    relation = answer.relation
    reader = answer.fetched(lambda: relation.to_arrow_reader(BATCH))
    names = _distinct(reader.schema.names)
    huge = [str(t) == "HUGEINT" for t in relation.types]
    types = [pa.int64() if h else t for h, t in zip(huge, reader.schema.types, strict=True)]
    schema = pa.schema(list(zip(names, types, strict=True)))

    def read() -> Iterator[pa.RecordBatch]:
        while (batch := answer.fetched(lambda: next(reader, None))) is not None:
            with Said("cannot be read", OSError):
                arrays = [a.cast(t) if a.type != t else a for a, t in zip(batch.columns, types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return schema, read()


def _distinct(names: list[str]) -> list[str]:
    """`names` with a number behind those that came before."""
    result: list[str] = []
    for name in names:
        number = 1
        new = name
        while new in result:
            new, number = f"{name}_{number}", number + 1
        result.append(new)
    return result


# -- files


def write(answer: Answer, format: Format, sink: BinaryIO) -> int:
    """Write an answer as csv, json or parquet; returns its rows.

    csv: null is nothing, empty text is `""`; lists and maps are JSON. json: a list of objects, a line each; NaN and infinity
    are text. Raises BadInput where the query fails on the way.
    """
    schema, found = batches(answer)
    first = next(found, None)  # before anything is written: most queries that fail do so at once
    found = found if first is None else itertools.chain([first], found)
    writers: dict[str, Callable[..., int]] = {"csv": _write_csv, "json": _write_json, "parquet": _write_parquet}
    with Said(f"cannot be written as {format}"):
        return writers[format](schema, found, sink)


def _write_csv(schema: pa.Schema, found: Iterator[pa.RecordBatch], sink: BinaryIO) -> int:
    nested = [pa.types.is_nested(t) for t in schema.types]
    flat = pa.schema([pa.field(f.name, pa.string()) if n else f for f, n in zip(schema, nested, strict=True)])
    rows = 0
    with pcsv.CSVWriter(sink, flat) as file:
        for batch in found:
            columns = [_texts(a) if n else a for a, n in zip(batch.columns, nested, strict=True)]
            file.write_batch(pa.RecordBatch.from_arrays(columns, schema=flat))
            rows += batch.num_rows
    return rows


def _texts(values: pa.Array) -> pa.Array:
    """Lists, maps and structs as JSON."""
    return pa.array([None if v is None else json_text(v, indent=None) for v in _python(values)], pa.string())


def _python(values: pa.Array) -> list[Any]:
    items: list[Any] = values.to_pylist(maps_as_pydicts="lossy")
    return items


def _write_json(schema: pa.Schema, found: Iterator[pa.RecordBatch], sink: BinaryIO) -> int:
    rows = 0
    sink.write(b"[")
    for batch in found:
        columns = [_python(a) for a in batch.columns]
        for values in zip(*columns, strict=True):
            text = json_text(dict(zip(schema.names, values, strict=True)), indent=None)
            sink.write(f"{',' if rows else ''}\n{text}".encode())
            rows += 1
    sink.write(b"\n]\n" if rows else b"]\n")
    return rows


def _write_parquet(schema: pa.Schema, found: Iterator[pa.RecordBatch], sink: BinaryIO) -> int:
    rows = 0
    with pq.ParquetWriter(sink, schema, compression="zstd") as file:
        for batch in found:
            file.write_batch(batch)
            rows += batch.num_rows
    return rows


# -- tables


def shown(answer: Answer, most: int, console: Console) -> RenderableType:
    """An answer as a table of at most `most` rows (0: all), or, where its columns do not fit side by side, row by row."""
    schema, found = batches(answer)
    rows: list[tuple[Any, ...]] = []
    count = 0
    for batch in found:
        keep = batch if not most else batch.slice(0, max(0, most - len(rows)))
        with Said("cannot be shown"):
            rows += zip(*(_python(a) for a in keep.columns), strict=True)
        count += batch.num_rows
    if schema.names == ["explain_key", "explain_value"]:
        return Group(*(Text(str(text)) for _, text in rows))
    cells = [[_cell(value) for value in row] for row in rows]
    right = [f.name for f in schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    if not _fits(schema.names, cells, console.width):
        body: RenderableType = _row_by_row(schema.names, cells)
    else:
        body = table("", schema.names, cells, right)
    said = f"{count:,} row{'s' * (count != 1)}"
    if count > len(rows):
        said = f"the first {len(rows):,} of {said}; --rows 0 shows all"
    return Group(body, Text(said, style="dim"))


def _fits(names: list[str], cells: list[list[Text]], width: int) -> bool:
    widest = [max([len(name), *(min(len(row[i]), 24) for row in cells)]) + 3 for i, name in enumerate(names)]
    return sum(widest) <= width or len(names) <= 4


def _row_by_row(names: list[str], cells: list[list[Text]]) -> RenderableType:
    return Group(
        *(table(f"row {i}", ("column", "value"), list(zip(names, row, strict=True))) for i, row in enumerate(cells))
    )


def _cell(value: Any) -> Text:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return Text(str(value).lower())
    if isinstance(value, float):
        return Text(f"{value:.6g}")
    text = json_text(value, indent=None) if isinstance(value, (list, dict)) else str(value)
    text = printable(text[: _LONGEST + 1], one_line=True)
    return Text(text if len(text) <= _LONGEST else text[:_LONGEST] + "…")
