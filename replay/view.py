"""Numpy views over the rows of one record batch: no copies where Arrow allows it, no Python per token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]

COLUMNS = (
    *("step", "group_index", "trace_id", "task_idx", "task_key", "task_prompt", "task_prompt_is_json", "task_label"),
    *("task_label_is_json", "reward", "rewards", "scores", "weights", "metrics", "is_truncated", "stop_condition"),
    *("error_types", "error_messages", "sampling", "problems", "generation_start", "generation_end", "scoring_start"),
    *("turn_weight_version", "turn_cached_tokens", "turn_latency", "turn_finish_reason"),
    *("token_ids", "sampled", "is_content", "logprobs"),
    *("node_parent", "node_role", "node_content", "node_parts", "node_tokens", "node_sampled", "node_finish_reason"),
    *("node_timestamp", "node_prompt_tokens", "node_completion_tokens", "node_cached_tokens", "node_raw"),
    *("num_tokens", "num_branches", "logprob_decimals"),
)
"""Columns that checks and conversion read; `read_parquet(path, COLUMNS)` saves the rest."""


def views(table: pa.Table) -> Iterator[View]:
    """A view per record batch of `table`, so that no column is ever joined beyond 32-bit offsets."""
    for batch in table.to_batches():
        if batch.num_rows:
            yield View(batch)


class View:
    """The rows of a record batch. `n` rows, `N` nodes, `T` tokens."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.n = batch.num_rows
        self._places = {name: i for i, name in enumerate(batch.schema.names)}
        self._lists: dict[str, list[Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def column(self, name: str) -> pa.Array:
        """A column as Arrow array."""
        return self.batch.column(self._places[name])

    def pylist(self, name: str) -> list[Any]:
        """A column as Python values, MAP columns as dicts; made once, and not to be changed."""
        if name not in self._lists:
            column = self.column(name)
            self._lists[name] = _dicts(column) if pa.types.is_map(column.type) else column.to_pylist()
        return self._lists[name]

    @cached_property
    def trace_ids(self) -> list[str]:
        """[n] trace ids."""
        return self.pylist("trace_id")

    # -- tokens

    @cached_property
    def token_starts(self) -> Ints:
        """[n + 1] first token of each row, and the end of the last."""
        return _offsets(self.column("token_ids"))

    @cached_property
    def ids(self) -> npt.NDArray[np.int32]:
        """[T] token ids."""
        return _numbers(_values(self.column("token_ids")), np.dtype(np.int32))

    @cached_property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """[T] whether the model sampled the token."""
        return _bits(_values(self.column("sampled")))

    @cached_property
    def stored_logprobs(self) -> npt.NDArray[np.float32]:
        """[T] log-probs without a copy; what stands where there is none (see `known`) is undefined."""
        return _numbers(_values(self.column("logprobs")), np.dtype(np.float32))

    @cached_property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """[T] log-probs; 0 where there is none (see `known`)."""
        return self.stored_logprobs if self.known is None else np.where(self.known, self.stored_logprobs, np.float32(0))

    @cached_property
    def known(self) -> npt.NDArray[np.bool_] | None:
        """[T] whether there is a log-prob; None where every token has one."""
        return _valid(_values(self.column("logprobs")))

    # -- nodes

    @cached_property
    def node_starts(self) -> Ints:
        """[n + 1] first node of each row, and the end of the last."""
        return _offsets(self.column("node_tokens"))

    @cached_property
    def node_tokens(self) -> Ints:
        """[N] tokens of each node."""
        return _numbers(_values(self.column("node_tokens")), np.dtype(np.int32)).astype(np.int64)

    @cached_property
    def node_token_starts(self) -> Ints:
        """[N + 1] first token of each node, counted over the whole batch."""
        return np.concatenate(([0], np.cumsum(self.node_tokens)))

    @cached_property
    def node_row(self) -> Ints:
        """[N] row of each node."""
        return np.repeat(np.arange(self.n), np.diff(self.node_starts))

    @cached_property
    def node_index(self) -> Ints:
        """[N] index of each node in its trace."""
        return np.arange(len(self.node_row)) - self.node_starts[self.node_row]

    @cached_property
    def parents(self) -> Ints:
        """[N] parent of each node in its trace; -1 for a root, -2 where the index is negative."""
        values = _values(self.column("node_parent"))
        numbers = _numbers(values, np.dtype(np.int32)).astype(np.int64)
        numbers = np.where(numbers < 0, -2, numbers)
        valid = _valid(values)
        return numbers if valid is None else np.where(valid, numbers, -1)

    @cached_property
    def node_sampled(self) -> npt.NDArray[np.bool_]:
        """[N] whether a model call produced the node."""
        return _bits(_values(self.column("node_sampled")))

    @cached_property
    def node_sampled_tokens(self) -> Ints:
        """[N] sampled tokens of each node."""
        starts, flags = self.node_token_starts, self.sampled
        if len(flags) < starts[-1]:  # the counts of nodes are not those of the row, which a check tells
            flags = np.pad(flags, (0, int(starts[-1]) - len(flags)))
        filled, counts = np.flatnonzero(self.node_tokens > 0), np.zeros(len(self.node_tokens), np.int64)
        if len(filled):
            counts[filled] = np.add.reduceat(flags[: starts[-1]].view(np.uint8), starts[filled], dtype=np.int32)
        return counts

    def node_numbers(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """([N] values of a numeric node column, [N] which are no null)."""
        values = _values(self.column(name))
        valid = _valid(values)
        dtype = np.dtype(values.type.to_pandas_dtype())
        return _numbers(values, dtype), np.ones(len(values), np.bool_) if valid is None else valid

    @cached_property
    def roles(self) -> pa.Array:
        """[N] role of each node."""
        return _values(self.column("node_role"))

    def is_text(self, name: str, text: str) -> npt.NDArray[np.bool_]:
        """[N] whether a text column of the nodes says `text`."""
        return _bits(pc.fill_null(pc.equal(_values(self.column(name)), text), False))

    @cached_property
    def linear(self) -> npt.NDArray[np.bool_]:
        """[n] whether a trace is one chain in node order: each node's parent is the one before it."""
        broken = self.parents != self.node_index - 1
        clean: npt.NDArray[np.bool_] = np.bincount(self.node_row[broken], minlength=self.n) == 0
        return clean

    @cached_property
    def contents(self) -> pa.Array:
        """[N] text of each node."""
        return _values(self.column("node_content"))


def _dicts(maps: pa.MapArray) -> list[dict[str, Any] | None]:
    """A MAP column as dicts; ten times faster than `to_pylist`."""
    keys, items = maps.keys.to_pylist(), maps.items.to_pylist()
    ends = maps.offsets.to_pylist()
    dicts = [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in pairwise(ends)]
    return [d if valid else None for d, valid in zip(dicts, maps.is_valid().to_pylist(), strict=True)]


def _offsets(lists: pa.ListArray) -> Ints:
    """Offsets of a list array, counted from its first value."""
    offsets: Ints = lists.offsets.to_numpy().astype(np.int64)
    return offsets - int(offsets[0])


def _values(lists: pa.ListArray) -> pa.Array:
    """Values of a list array between its first and last offset; rows that are null hold none."""
    return lists.flatten()


def _numbers(values: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Values of a primitive array without a copy; what stands at a null is undefined."""
    buffer = values.buffers()[1]
    if buffer is None or not len(values):
        return np.zeros(len(values), dtype)
    return np.frombuffer(buffer, dtype, len(values), values.offset * dtype.itemsize)


def _bits(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Values of a boolean array; what stands at a null is undefined."""
    return _unpacked(values, 1)


def _unpacked(values: pa.Array, buffer: int) -> npt.NDArray[np.bool_]:
    """The bits of an array's values (buffer 1) or validity (buffer 0); several times faster than `to_numpy`."""
    end = values.offset + len(values)
    packed = np.frombuffer(values.buffers()[buffer] or b"", np.uint8)
    return np.unpackbits(packed, count=end, bitorder="little")[values.offset :].view(np.bool_)


def _valid(values: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Which values are no null; None where none is."""
    if not values.null_count:
        return None
    return _unpacked(values, 0)
