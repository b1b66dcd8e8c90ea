"""Known ways to lose something between a record and its file: empty values, and types guessed from rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from schema_records import record

from rolltape.schema import decode, encode, read_parquet, write_parquet

EMPTY: dict[str, Any] = {"info": {}, "rewards": {}, "metrics": {}, "errors": [], "extra_usage": []}
FULL: dict[str, Any] = {
    "info": {"a": {"b": 1}},
    "rewards": {"x": 1.0},
    "metrics": {"m": 2.0},
    "errors": [{"type": "ToolError", "message": "gone", "traceback": None}],
    "extra_usage": [{"prompt_tokens": 1, "completion_tokens": 2}],
}


def given(id: str, values: dict[str, Any], arguments: str, calls: bool = True) -> dict[str, Any]:
    """A record with these values, an empty mapping in its task, and a tool call."""
    made = record(id=id, **values)
    made["task"]["data"] |= {"metadata": {"a": {}} if values is EMPTY else {"a": {"b": [1]}}}
    call = {"id": "1", "name": "look", "arguments": arguments}
    made["nodes"][1]["message"]["tool_calls"] = [call] if calls else []
    return made


@pytest.mark.parametrize(
    "records",
    [
        [given("a", EMPTY, "{}"), given("b", EMPTY, "{}", calls=False)],
        [given("a", FULL, '{"q": {}}'), given("b", EMPTY, "{}")],
        [given("a", EMPTY, "{}", calls=False), given("b", FULL, '{"q": {}}')],
    ],
    ids=["all rows", "the last row", "the first row"],
)
def test_empty_mappings_and_lists_come_back_empty_and_not_null(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    write_parquet(tmp_path / "t.parquet", [encode(records)])
    assert decode(read_parquet(tmp_path / "t.parquet")) == records


@pytest.mark.parametrize("key", ["info", "rewards", "metrics", "errors"])
def test_null_is_not_empty(tmp_path: Path, key: str) -> None:
    records = [record(id="a", **{key: None}), record(id="b", **{key: EMPTY[key]})]
    write_parquet(tmp_path / "t.parquet", [encode(records)])
    assert decode(read_parquet(tmp_path / "t.parquet")) == records


@pytest.mark.parametrize("order", [(EMPTY, FULL), (FULL, EMPTY)], ids=["empty first", "full first"])
def test_batches_with_and_without_values_go_into_one_file_and_have_one_schema(
    tmp_path: Path, order: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    batches = [
        [given(f"{i}{j}", values, "{}", calls=values is FULL) for j in range(2)] for i, values in enumerate(order)
    ]
    tables = [encode(batch) for batch in batches]
    assert tables[0].schema.equals(tables[1].schema, check_metadata=True)
    write_parquet(tmp_path / "both.parquet", tables)
    assert decode(read_parquet(tmp_path / "both.parquet")) == batches[0] + batches[1]
    for i, table in enumerate(tables):
        write_parquet(tmp_path / f"{i}.parquet", [table])
    first, second = (read_parquet(tmp_path / f"{i}.parquet").schema for i in (0, 1))
    assert first.equals(second, check_metadata=True)
