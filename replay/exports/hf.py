"""Conversations for Hugging Face `datasets`: one Parquet file, a row a branch of a trace.

`datasets` takes its features from the Arrow schema, which is the same for every run and never inferred from rows:

- `messages` is a list of structs of text. Content that is a list of parts stands in `content` as the text of its text parts
  and whole in `content_parts` as JSON; null and "" stay different.
- Tool calls carry their arguments as the JSON text the model wrote, so that no call gains the arguments of another and no
  type changes; `tools` and `task` are JSON text too.
- `rewards` and `metrics` are lists of named numbers, as `datasets` has no maps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.replay.branches import leaves, path_to
from rolltape.replay.exports.exported import Exported, ExportedFile, Told
from rolltape.replay.run import Run
from rolltape.replay.view import View
from rolltape.replay.whole import check_targets, whole_file
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput

ROW_GROUP_BYTES = 64 << 20
TEXT = pa.large_string()
Record = dict[str, Any]

CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", TEXT)])),
    ]
)
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", TEXT),
        ("content_parts", TEXT),
        ("reasoning_content", TEXT),
        ("tool_calls", pa.list_(CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
        ("sampled", pa.bool_()),
    ]
)
"""A message as chat templates take it. `sampled`: whether the model under test wrote it."""
REWARD = pa.struct([("name", pa.string()), ("value", pa.float64()), ("score", pa.float64()), ("weight", pa.float64())])
METRIC = pa.struct([("name", pa.string()), ("value", pa.float64())])

_AS_THEY_ARE = (
    *("run", "split", "step", "group_index", "rollout_index", "try_number", "model", "disposition", "stop_condition"),
    *("is_truncated", "error_types", "num_turns", "num_tokens", "num_sampled"),
    *("task_type", "task_idx", "task_key", "task_name", "task_label", "task", "tools"),
)
"""Columns of the row that are taken over."""
_NODES = ("node_parent", "node_role", "node_content", "node_parts", "node_reasoning", "node_tool_calls")
_COLUMNS = [
    *("trace_id", "verifiers_version", "reward", "rewards", "scores", "weights", "metrics", *_AS_THEY_ARE, *_NODES),
    *("node_tool_call_id", "node_name", "node_sampled", "node_tokens"),
]
_TYPES: dict[str, pa.DataType] = {
    **{name: pa.int64() for name in ("step", "group_index", "task_idx", "num_tokens", "num_sampled")},
    **{name: pa.int32() for name in ("rollout_index", "try_number", "num_turns")},
    **dict.fromkeys(("task_label", "task", "tools"), TEXT),
    "is_truncated": pa.bool_(),
    "error_types": pa.list_(pa.string()),
}
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("branch", pa.int32()),
        ("branches", pa.int32()),
        ("messages", pa.list_(MESSAGE)),
        ("reward", pa.float64()),
        ("rewards", pa.list_(REWARD)),
        ("metrics", pa.list_(METRIC)),
        *((name, _TYPES.get(name, pa.string())) for name in _AS_THEY_ARE),
        ("verifiers_version", pa.string()),
    ]
)
"""Columns of the file. `id` is the trace's; `branch` counts its leaves from 0 and is null where it has no message."""

BRANCHES = "several branches: a row each, with the same id, reward and task"
NO_GRAPH = "parents that are no earlier messages: the messages stand in the order they were recorded"
NO_MESSAGE = "no message: a row with an empty conversation"


def write_hf(
    run: Run, commits: Sequence[Commit], path: Path, *, overwrite: bool = False, told: Told = lambda *_: None
) -> Exported:
    """Write the conversations of `commits` to one Parquet file. Raises BadInput and RunConflict for a path that does not do."""
    if path.suffix != ".parquet":
        raise BadInput(f"{path}: conversations go to a file that ends in .parquet.")
    check_targets(run, [path], overwrite)
    result, done, rows = Exported(), 0, 0
    total = sum(c.file.rows for c in commits)
    with (
        whole_file(path) as part,
        pq.ParquetWriter(part, SCHEMA, compression="zstd", write_page_index=True) as file,
    ):
        for table, traces in _gathered(_conversations(run, commits, result)):
            file.write_table(table, row_group_size=max(1, table.num_rows))
            rows, done = rows + table.num_rows, done + traces
            told(done, total)
    result.files = [ExportedFile(path, done, rows)]
    return result


def _conversations(run: Run, commits: Sequence[Commit], result: Exported) -> Iterator[tuple[pa.Table, int]]:
    """(rows of the file, traces they come from), a row group of the run at a time."""
    for commit in commits:
        for table in run.part_batches(commit, _COLUMNS):
            for batch in table.to_batches():
                yield conversations(batch, result), batch.num_rows


def _gathered(tables: Iterable[tuple[pa.Table, int]]) -> Iterator[tuple[pa.Table, int]]:
    """Small tables joined to about ROW_GROUP_BYTES, so that a file has few row groups."""
    waiting: list[pa.Table] = []
    size = traces = 0
    for table, count in tables:
        if waiting and size + table.nbytes > ROW_GROUP_BYTES:
            yield pa.concat_tables(waiting), traces
            waiting, size, traces = [], 0, 0
        waiting.append(table)
        size, traces = size + table.nbytes, traces + count
    if waiting:
        yield pa.concat_tables(waiting), traces


def conversations(batch: pa.RecordBatch, result: Exported) -> pa.Table:
    """The rows of the file that the traces of `batch` make."""
    view = View(batch)
    paths = list(_paths(view, result))
    rows = np.array([row for row, _, _ in paths], np.int64)
    branch = np.array([-1 if index is None else index for _, index, _ in paths], np.int32)
    branches = np.bincount(rows[branch >= 0], minlength=view.n)
    result.note(BRANCHES, int((branches > 1).sum()))
    result.note(NO_MESSAGE, int((branches == 0).sum()))
    columns: dict[str, pa.Array] = {
        "id": batch.column("trace_id"),
        "rewards": pa.array(_named(view, ("rewards", "scores", "weights")), pa.list_(REWARD)),
        "metrics": pa.array(_named(view, ("metrics",)), pa.list_(METRIC)),
        "tools": pa.array([_functions(text) for text in view.pylist("tools")], TEXT),
        **{name: batch.column(name) for name in ("reward", *_AS_THEY_ARE, "verifiers_version") if name != "tools"},
    }
    columns = {name: column.take(pa.array(rows)) for name, column in columns.items()}
    columns["branch"] = pa.array(branch, mask=branch < 0)
    columns["branches"] = pa.array(branches[rows])
    columns["messages"] = _messages(view, [nodes for _, _, nodes in paths])
    return pa.table([columns[f.name].cast(f.type) for f in SCHEMA], schema=SCHEMA)


def _paths(view: View, result: Exported) -> Iterator[tuple[int, int | None, range | list[int]]]:
    """(row, branch, nodes counted over the whole batch) of each conversation. A trace without nodes has one, without branch."""
    starts, parents = view.node_starts.tolist(), view.parents
    sound = np.bincount(view.node_row[(parents < -1) | (parents >= view.node_index)], minlength=view.n) == 0
    for row, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            yield row, None, []
        elif view.linear[row] or not sound[row]:
            result.note(NO_GRAPH, not sound[row])
            yield row, 0, range(start, end)
        else:
            own = parents[start:end].tolist()
            for index, leaf in enumerate(leaves(own)):
                yield row, index, [start + node for node in path_to(leaf, own)]


def _messages(view: View, paths: Sequence[Sequence[int]]) -> pa.ListArray:
    """The messages of each path, as a list of MESSAGE."""
    nodes = pa.array(np.fromiter(chain.from_iterable(paths), np.int64))
    text = {name: view.column(f"node_{name}").flatten() for name in ("role", "content", "parts", "reasoning")}
    calls = [None if found is None else _calls(found) for found in view.column("node_tool_calls").flatten().to_pylist()]
    columns = [
        text["role"],
        text["content"],
        text["parts"],
        text["reasoning"],
        pa.array(calls, pa.list_(CALL)),
        view.column("node_tool_call_id").flatten(),
        view.column("node_name").flatten(),
        view.column("node_sampled").flatten(),
    ]
    fields = list(MESSAGE)
    taken = [c.take(nodes).cast(f.type) for c, f in zip(columns, fields, strict=True)]
    ends = np.cumsum([0, *map(len, paths)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.StructArray.from_arrays(taken, fields=fields))


def _calls(text: str) -> list[Record] | None:
    """Tool calls in the shape that chat templates know; arguments as the text the model wrote."""
    found = json.loads(text)
    if not isinstance(found, list):
        return None
    return [
        {
            "id": _text(call.get("id")),
            "type": _text(call.get("type")) or "function",
            "function": {"name": _text(call.get("name")), "arguments": _text(call.get("arguments"))},
        }
        for call in found
        if isinstance(call, dict)
    ]


def _functions(text: str | None) -> str | None:
    """Tool schemas as JSON text in the shape that chat templates know."""
    found = None if text is None else json.loads(text)
    if not isinstance(found, list):
        return text
    known = [t if not isinstance(t, dict) or "function" in t else {"type": "function", "function": t} for t in found]
    return json.dumps(known, ensure_ascii=False)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _named(view: View, names: Sequence[str]) -> list[list[Record] | None]:
    """The named numbers of each row: `value` from the first of `names`, the others under their own name."""
    first, *others = (view.pylist(name) for name in names)
    result: list[list[Record] | None] = []
    for i, values in enumerate(first):
        beside = {name.removesuffix("s"): column[i] or {} for name, column in zip(names[1:], others, strict=True)}
        result.append(
            None
            if values is None
            else [
                {"name": k, "value": v, **{name: found.get(k) for name, found in beside.items()}}
                for k, v in values.items()
            ]
        )
    return result
