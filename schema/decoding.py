"""From rows back to the records they were made of, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.schema.encoding import TIMINGS
from rolltape.schema.errors import BadInput, MissingExtra, install
from rolltape.schema.fields import TRACE
from rolltape.schema.jsontext import from_json, unpack_extra
from rolltape.schema.layouts import LAYOUTS, V0_2_0, Layout
from rolltape.schema.packing import restore_decimals
from rolltape.schema.releases import version_of
from rolltape.schema.table import needs

_JSON = ("runtime", "info", "extra_usage", "agent", "tools", "calls")
_USAGE = {
    "prompt_tokens": "node_prompt_tokens",
    "completion_tokens": "node_completion_tokens",
    "cached_input_tokens": "node_cached_tokens",
    "reasoning_tokens": "node_reasoning_tokens",
    "cost": "node_cost",
}
_TOKENS = ("token_ids", "sampled", "is_content", "logprobs")


def decode(table: pa.Table) -> list[dict[str, Any]]:
    """The records that `table` was encoded from: equal to them bit for bit, key order included (NaN equal to NaN).

    `table` holds the columns of the trace record. Raw arrays (routed experts, image data) come back as Verifiers' wire
    form, a dict with dtype, shape and bytes. Raises BadInput where columns are missing, or were pruned.
    """
    needs(table, TRACE.by_name, "decode")
    _refuse_pruned(table)
    heavy = {name: _flat(table.column(name)) for name in _TOKENS}
    light = table.drop_columns(list(_TOKENS)).to_pylist(maps_as_pydicts="strict")
    starts = heavy["token_ids"][1]
    return [
        _record(row, {name: heavy[name][0][starts[i] : starts[i + 1]] for name in _TOKENS})
        for i, row in enumerate(light)
    ]


def _refuse_pruned(table: pa.Table) -> None:
    for name in ("token_ids", "node_role"):
        column = table.column(name)
        if column.null_count:
            trace = table.column("trace_id").to_pylist()[column.is_null().to_pylist().index(True)]
            raise BadInput(
                f"trace {trace}: its column {name} is null, so it was pruned, and the record cannot be made of it again; leave "
                "pruned steps out."
            )


def to_trace(record: dict[str, Any]) -> Any:
    """A decoded record as a Verifiers Trace (`WireTrace`), where Verifiers is installed.

    Raises MissingExtra where it is not, BadInput where the installed release does not take the record, as one of another
    release may be.
    """
    if not isinstance(record, dict):
        raise BadInput(
            f"to_trace was given a {type(record).__qualname__}: expected one record; decode gives a list of them."
        )
    try:
        from verifiers.v1.trace import WireTrace
    except ImportError as error:
        raise MissingExtra(f"a Verifiers Trace needs Verifiers, which is not installed: {install('live')}.") from error
    try:
        return WireTrace.model_validate(record)
    except ValueError as error:  # pydantic's, of as many lines as there are fields that differ
        raise BadInput(_not_taken(record, error)) from error


def _not_taken(record: dict[str, Any], error: ValueError) -> str:
    """Why the installed Verifiers makes no Trace of a record: it is of another release, or is none."""
    from verifiers import __version__ as installed

    first = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
    where = f"{'.'.join(map(str, first['loc'])) or 'the record'}: {first['msg']}"
    written = version_of(record)
    head = f"record {record.get('id')} is no Trace of the installed Verifiers {installed} ({where})"
    if written == installed:
        return f"{head}, though it says that this release wrote it; was it changed since?"
    if written is None:
        return (
            f"{head}, and names no release, as none before 0.2.1 does: expected a record of a trace that decode gave."
        )
    return (
        f"{head}, for Verifiers {written} wrote it; install verifiers=={written} to make a Trace of it, or use the record as "
        "it is."
    )


def _flat(column: pa.ChunkedArray) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """(values of a list column as one array, start of each row). Null log-probs are NaN twice: see `_known`."""
    sizes = column.combine_chunks()
    lists = sizes if isinstance(sizes, pa.ListArray) else pa.concat_arrays(sizes.chunks)
    starts = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values
    if values.null_count:
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        filled = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
        plain = filled.to_numpy(zero_copy_only=False)
        result = np.empty(len(plain), [("value", plain.dtype), ("valid", np.bool_)])
        result["value"], result["valid"] = plain, valid
        return result, starts
    return values.to_numpy(zero_copy_only=False), starts


def _record(row: dict[str, Any], tokens: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    layout = LAYOUTS.get(row["layout"], V0_2_0)
    extra = unpack_extra(row["extra"]) if row["extra"] is not None else {}
    top = extra.get("top", {})
    record: dict[str, Any] = {}
    for key in extra.get("keys", layout.top):
        if key in top:
            record[key] = top[key]
        elif key == "nodes":
            record[key] = _Nodes(row, tokens, extra, layout).nodes()
        else:
            record[key] = _top(row, key, extra)
    return record


def _top(row: dict[str, Any], key: str, extra: dict[str, Any]) -> Any:
    if key == "id":
        return row["trace_id"]
    if key == "task":
        return {"type": row["task_type"], "data": from_json(row["task"]), **extra.get("task", {})}
    if key in _JSON:
        return None if row[key] is None else from_json(row[key])
    if key == "errors":
        columns = (row["error_types"], row["error_messages"], row["error_tracebacks"])
        return [dict(zip(("type", "message", "traceback"), e, strict=True)) for e in zip(*columns, strict=True)]
    if key == "timing":
        spans = {name: {"start": row[f"{name}_start"], "end": row[f"{name}_end"]} for name in TIMINGS}
        return {"start": row["started_at"], **spans}
    return row[key]


class _Nodes:
    """The nodes of one row."""

    def __init__(
        self, row: dict[str, Any], tokens: dict[str, npt.NDArray[Any]], extra: dict[str, Any], layout: Layout
    ) -> None:
        self.row, self.tokens, self.layout = row, tokens, layout
        self.kept: dict[str, dict[str, Any]] = extra.get("nodes", {})
        self.kept_messages: dict[str, dict[str, Any]] = extra.get("messages", {})
        self.keys = extra.get("node_keys")
        self.exact = np.frombuffer(extra["logprobs64"], "<f8") if "logprobs64" in extra else None
        self.start = 0
        self.used = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [self._node(i, n) for i, n in enumerate(self.row["node_tokens"])]

    def _node(self, i: int, n: int) -> dict[str, Any]:
        lists = self._lists(n)
        kept = self.kept.get(str(i), {})
        if self.keys is None:
            keys, message_keys = self.layout.node, self.layout.message_keys(self.row["node_role"][i])
        else:
            keys, message_keys = self.keys["kinds"][self.keys["index"][i]]
        node: dict[str, Any] = {}
        for key in keys:
            if key in kept:
                node[key] = kept[key]
            elif key in lists:
                node[key] = lists[key]
            elif key == "message":
                node[key] = None if message_keys is None else self._message(i, message_keys)
            elif key == "usage":
                node[key] = self._usage(i)
            else:
                node[key] = self.row[f"node_{key}"][i]
        return node

    def _message(self, i: int, keys: tuple[str, ...]) -> dict[str, Any]:
        row, kept = self.row, self.kept_messages.get(str(i), {})
        message: dict[str, Any] = {}
        for key in keys:
            if key in kept:
                message[key] = kept[key]
            elif key == "content":
                parts = row["node_parts"][i]
                message[key] = row["node_content"][i] if parts is None else from_json(parts)
            elif key == "tool_calls":
                calls = row["node_tool_calls"][i]
                message[key] = None if calls is None else from_json(calls)
            elif key == "provider_state":
                message[key] = None
            else:
                message[key] = row["node_reasoning" if key == "reasoning_content" else f"node_{key}"][i]
        return message

    def _usage(self, i: int) -> dict[str, Any] | None:
        usage = {key: self.row[column][i] for key, column in _USAGE.items()}
        return None if usage["prompt_tokens"] is None else usage

    def _lists(self, n: int) -> dict[str, list[Any]]:
        part = slice(self.start, self.start + n)
        self.start += n
        body, body_known = _values(self.tokens["is_content"][part])
        numbers, known = _values(self.tokens["logprobs"][part])
        mask = self.tokens["sampled"][part]
        return {
            "token_ids": self.tokens["token_ids"][part].tolist(),
            "mask": mask.tolist(),
            "is_content": body.tolist() if body_known is None or body_known.all() else [],
            "logprobs": self._logprobs(numbers if known is None else numbers[known]),
        }

    def _logprobs(self, values: npt.NDArray[Any]) -> list[float]:
        self.used += len(values)
        decimals: int | None = self.row["logprob_decimals"]
        if self.exact is not None:
            values = self.exact[self.used - len(values) : self.used]
        elif decimals is not None:
            values = restore_decimals(values, decimals)
        result: list[float] = values.tolist()
        return result


def _values(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """(values, which of them are no null; None where none is null)."""
    return (array["value"], array["valid"]) if array.dtype.names else (array, None)
