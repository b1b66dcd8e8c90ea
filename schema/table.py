"""Rows to Arrow tables of the one fixed schema."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.schema import jsontext
from rolltape.schema.encoding import Row, row_of
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import ROW, TRACE, Field, Record
from rolltape.schema.records import Context, Outcome

_TOKEN_BUILDERS: dict[str, Callable[[Sequence[Row]], pa.Array]] = {
    "token_ids": lambda rows: _numpy(_join([r.ids for r in rows], np.int32), pa.int32()),
    "sampled": lambda rows: _numpy(_join([r.sampled for r in rows], np.bool_), pa.bool_()),
    "is_content": lambda rows: _content(_join([r.content for r in rows], np.int8)),
    "logprobs": lambda rows: _logprobs(rows),
}


def encode(traces: Iterable[Any], contexts: Iterable[Context] | None = None) -> pa.Table:
    """Traces as one Arrow table of the trace record (schema version 1), a row a trace, in the order given.

    `traces`: Verifiers Trace objects or their JSON records, of any release. `contexts`: one for each, or none.
    The whole table is one chunk; bound its size by the traces you hand in.
    Raises BadInput where something is no trace, or the two differ in length.
    """
    if isinstance(traces, Mapping) or hasattr(traces, "model_dump") or not isinstance(traces, Iterable):
        raise BadInput(
            f"traces is a single {type(traces).__qualname__}: expected a list of traces; give one in a list."
        )
    with uncollected():
        if contexts is None:
            return rows_to_table([row_of(t) for t in traces])
        return rows_to_table([row_of(t, c) for t, c in _paired(traces, contexts)])


def _paired(traces: Iterable[Any], contexts: Iterable[Context]) -> Iterator[tuple[Any, Context]]:
    """Each trace with its context. Raises BadInput where there is not one for each."""
    if not isinstance(contexts, Iterable):
        raise BadInput(
            f"contexts is a single {type(contexts).__qualname__}: expected one Context for each trace; give a list of them, "
            "[context] for one trace, or leave contexts out."
        )
    for number, (trace, context) in enumerate(zip_longest(traces, contexts, fillvalue=_END)):
        if trace is _END or context is _END:
            more, fewer = ("contexts", "traces") if trace is _END else ("traces", "contexts")
            raise BadInput(
                f"there are more {more} than {fewer} ({number}): expected one Context for each trace; give as many, or leave "
                "contexts out."
            )
        if not isinstance(context, Context):
            raise BadInput(
                f"contexts[{number}] is a {type(context).__qualname__}: expected a rolltape.schema.Context; give one for each "
                "trace, or leave contexts out."
            )
        yield trace, context


_END = object()
"""Stands where the shorter of two has ended."""


def needs(table: pa.Table, names: Iterable[str], taker: str) -> None:
    """Raise BadInput where `table`, which `taker` was given, is no Table or lacks columns of these `names`."""
    if not isinstance(table, pa.Table):
        raise BadInput(
            f"{taker} was given a {type(table).__qualname__}: expected a pyarrow Table of traces; make one of records with "
            "encode, or read one with read_parquet or Run.table."
        )
    found = set(table.column_names)
    if missing := [name for name in names if name not in found]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        makers = (
            "encode, read_parquet or Run.table" if TRACE.by_name.keys() >= set(missing) else "read_parquet or Run.table"
        )
        raise BadInput(
            f"{taker} was given a table without the column{'s' * (len(missing) > 1)} {', '.join(missing[:3])}{more}: expected "
            f"rows of traces; take them from {makers}, with these columns."
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from walking over and over what is being made and will stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def rows_to_table(rows: Sequence[Row]) -> pa.Table:
    """Rows as one Arrow table of the trace record."""
    offsets = {
        "token": _offsets([len(r.ids) for r in rows]),
        "node": _offsets([len(r.nodes["node_parent"]) for r in rows]),
    }
    return pa.Table.from_arrays([_column(f, rows, offsets) for f in TRACE.fields], schema=TRACE.arrow)


def chunked(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    """`rows` in lists of roughly at most `most` bytes of memory, or of one row."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        if chunk and size + row.nbytes > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row.nbytes
    if chunk:
        yield chunk


def with_outcomes(table: pa.Table, outcomes: Iterable[Outcome]) -> pa.Table:
    """`table` with the outcome columns appended: null for a trace that has none.

    Raises BadInput where `table` lacks columns of the trace record.
    """
    needs(table, TRACE.by_name, "with_outcomes")
    by_id = {o.trace_id: o for o in outcomes}
    found = [by_id.get(t) for t in table.column("trace_id").to_pylist()]
    columns = {
        "disposition": [o and o.disposition for o in found],
        "reason": [None if o is None or o.reason is None else jsontext.clean_text(o.reason)[0] for o in found],
        "handed_reward": [None if o is None or o.handed_reward is None else _json(o.handed_reward) for o in found],
        "remove_sample": [None if o is None or o.remove_sample is None else list(o.remove_sample) for o in found],
        "recomputed_logprobs": [None if o is None else o.logprobs for o in found],
    }
    arrays = [pa.array(columns[name], ROW.by_name[name].arrow_type) for name in columns]
    return pa.Table.from_arrays([*table.select(list(TRACE.by_name)).columns, *arrays], schema=ROW.arrow)


def _json(reward: Any) -> str:
    """A reward as JSON: a number or a mapping of them. What JSON has no number for is its name as text (see `reward_of`)."""
    return jsontext.to_json(_named(jsontext.as_json(reward, "reward", [])))[0]


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _named(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, number in _NAMES.items() if number == value or name == "NaN")
    return value


_NAMES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def reward_of(text: str) -> Any:
    """The reward that the column `handed_reward` says."""
    return _numbered(json.loads(text))


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _numbered(v) for k, v in value.items()}
    return _NAMES.get(value, value) if isinstance(value, str) else value


def empty(record: Record) -> pa.Table:
    """A table of no rows with the record's columns."""
    return record.arrow.empty_table()


def _column(field: Field, rows: Sequence[Row], offsets: Mapping[str, pa.Array]) -> pa.Array:
    name = field.name
    if name == "extra":
        return pa.array([_extra(r) for r in rows], field.type)
    if field.shape == "token":
        values = _TOKEN_BUILDERS[name](rows)
        return pa.ListArray.from_arrays(offsets["token"], values)
    if field.shape == "node":
        return pa.ListArray.from_arrays(offsets["node"], _flat([r.nodes[name] for r in rows], field.type))
    values = [r.values[name] for r in rows]
    if field.shape == "scalar":
        return pa.array(values, field.type)
    return _nested(values, field)


def _nested(values: list[Any], field: Field) -> pa.Array:
    """A list or MAP column with nulls, from lists or dicts."""
    sizes = [0 if v is None else len(v) for v in values]
    missing = [v is None for v in values]
    offsets = _offsets(sizes)
    mask = pa.array(missing) if any(missing) else None
    present = [v for v in values if v is not None]
    if field.shape == "name":
        keys = pa.array(list(chain.from_iterable(present)), pa.string())
        items = pa.array(list(chain.from_iterable(v.values() for v in present)), field.type)
        return pa.MapArray.from_arrays(offsets, keys, items, mask=mask)
    return pa.ListArray.from_arrays(offsets, _flat(present, field.type), mask=mask)


def _flat(lists: list[list[Any]], type_: pa.DataType) -> pa.Array:
    return pa.array(list(chain.from_iterable(lists)), type_)


def _offsets(sizes: list[int]) -> pa.Array:
    return _numpy(np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int32), pa.int32())


def _join(parts: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _content(values: npt.NDArray[np.int8]) -> pa.Array:
    known = values >= 0
    return _numpy(values > 0, pa.bool_(), None if known.all() else known)


def _logprobs(rows: Sequence[Row]) -> pa.Array:
    known = _join([r.known for r in rows], np.bool_)
    values = np.zeros(len(known), np.float32)
    values[known] = _join([r.logprobs for r in rows], np.float32)
    return _numpy(values, pa.float32(), None if known.all() else known)


def _numpy(values: npt.NDArray[Any], type_: pa.DataType, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An Arrow array over the bytes of numpy values, null where `valid` is false."""
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(type_, len(values), [bits, pa.py_buffer(data)])


def _extra(row: Row) -> bytes | None:
    if not row.extra:
        return None
    try:
        return jsontext.pack_extra(row.extra)
    except (TypeError, ValueError):
        return jsontext.pack_extra(jsontext.plain(row.extra, "trace", []))
