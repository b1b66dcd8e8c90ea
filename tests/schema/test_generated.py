"""Records that nobody would write by hand: `decode(encode(x))` is `x`, whatever `x` holds."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from schema_records import text_of
from schema_strategies import ANY_RECORD, BROKEN_RECORDS, GENERATED, JSON, LISTS, RECORDS, nodes_of, places

from rolltape.schema import TRACE, decode, encode
from rolltape.schema.layouts import V0_2_0
from rolltape.schema.parquet import read_parquet, write_parquet


def through_parquet(tables: list[pa.Table]) -> pa.Table:
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "a.parquet", tables)
        return read_parquet(Path(folder) / "a.parquet")


@settings(GENERATED, max_examples=200)
@given(ANY_RECORD)
def test_any_record_comes_back_as_it_was(record: dict[str, Any]) -> None:
    before = text_of(record)
    table = encode([record])
    assert table.schema == TRACE.arrow
    assert text_of(decode(table)[0]) == before
    assert text_of(record) == before, "the record that was handed in has changed"
    assert table["problems"].to_pylist() == [None]


@settings(GENERATED, max_examples=50)
@given(st.lists(ANY_RECORD, max_size=4), st.lists(ANY_RECORD, max_size=2))
def test_any_records_come_back_from_parquet(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    table = through_parquet([encode(first), encode(second)])
    assert [text_of(r) for r in decode(table)] == [text_of(r) for r in first + second]


@settings(GENERATED, max_examples=100)
@given(JSON)
def test_any_value_anywhere_comes_back_as_it_was(value: Any) -> None:
    """One value in every place of a record at once: the top, the task, a node, a message, a list."""
    records = [
        {"id": "t", key: value}
        for key in (
            "task",
            "nodes",
            "rewards",
            "metrics",
            "info",
            "errors",
            "timing",
            "is_completed",
            "future",
            "reward",
        )
    ]
    records += [
        {"id": "t", "task": {"type": value, "data": value}},
        {"id": "t", "task": {"type": "T", "data": {"idx": value}}},
    ]
    records += [{"id": "t", "rewards": {"a": value}}, {"id": "t", "errors": [{"type": value, "message": value}]}]
    node_keys = (
        "parent",
        "message",
        "sampled",
        "timestamp",
        "token_ids",
        "mask",
        "logprobs",
        "usage",
        "future",
        "message.role",
    )
    records += [{"id": "t", "nodes": [{key: value}]} for key in node_keys]
    message_keys = ("role", "content", "reasoning_content", "tool_calls", "provider_state", "name", "future")
    records += [{"id": "t", "nodes": [{"message": {key: value}}]} for key in message_keys]
    assert [text_of(r) for r in decode(encode(records))] == [text_of(r) for r in records]


# -- the strategies do make what they are there for


def values(record: Any) -> Iterator[Any]:
    return (inside[key] for inside, key in places(record))


def has(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda record: any(map(test, values(record)))


def is_text(pattern: str) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, str) and re.search(pattern, x) is not None


def listed(record: dict[str, Any], *keys: str) -> list[Any]:
    return [x for n in nodes_of(record) for key in keys if isinstance(n.get(key), list) for x in n[key]]


WELL_FORMED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "lone surrogate": has(is_text("[\ud800-\udfff](?![\udc00-\udfff])")),
    "split surrogate pair": has(is_text("[\ud800-\udbff][\udc00-\udfff]")),
    "surrogate in a reward's name": lambda r: any(map(is_text("[\ud800-\udfff]"), r["rewards"])),
    "U+2028": has(is_text("\u2028")),
    "NUL": has(is_text("\0")),
    "NaN reward": lambda r: any(x != x for x in r["rewards"].values()),
    "infinite log-prob": lambda r: any(map(math.isinf, listed(r, "logprobs"))),
    "log-prob that is no float32": lambda r: any(x in (1e300, 5e-324) for x in listed(r, "logprobs")),
    "negative zero": has(lambda x: isinstance(x, float) and x == 0 and math.copysign(1, x) < 0),
    "integer over 64 bits": has(lambda x: type(x) is int and abs(x) > 2**64),
    "no nodes": lambda r: not r["nodes"],
    "image part": has(lambda x: isinstance(x, dict) and "image_url" in x),
}
BROKEN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "nodes that are no list": lambda r: "nodes" in r and not isinstance(r["nodes"], list),
    "node that is no object": lambda r: isinstance(r.get("nodes"), list) and len(nodes_of(r)) < len(r["nodes"]),
    "no nodes key": lambda r: "nodes" not in r,
    "null message or list": lambda r: any(
        key in n and n[key] is None for n in nodes_of(r) for key in ("message", *LISTS)
    ),
    "no mask": lambda r: any("mask" not in n for n in nodes_of(r)),
    "mask of another length": lambda r: any(
        isinstance(n.get("mask"), list)
        and isinstance(n.get("token_ids"), list)
        and len(n["mask"]) != len(n["token_ids"])
        for n in nodes_of(r)
    ),
    "int over 31 bits in a list": lambda r: any(type(x) is int and x >= 2**31 for x in listed(r, *LISTS)),
    "null in a list": lambda r: any(x is None for x in listed(r, *LISTS)),
    "bool or float as a token id": lambda r: any(type(x) in (bool, float) for x in listed(r, "token_ids")),
    "int in a mask": lambda r: any(type(x) is int for x in listed(r, "mask", "is_content")),
    "int as a log-prob": lambda r: any(type(x) in (int, bool) for x in listed(r, "logprobs")),
    "null or int as a timestamp": lambda r: any(type(n.get("timestamp", 0.0)) is not float for n in nodes_of(r)),
    "scores": lambda r: isinstance(r.get("rewards"), dict) and any(isinstance(x, dict) for x in r["rewards"].values()),
    "unknown key": lambda r: (
        not r.keys() <= set(V0_2_0.top) or any(not n.keys() <= set(V0_2_0.node) for n in nodes_of(r))
    ),
    "other order": lambda r: next(iter(r)) != "id" and len(r) == 12,
}


def test_what_is_hard_to_keep_is_really_generated() -> None:
    missing = {*WELL_FORMED, *BROKEN}

    @settings(GENERATED, max_examples=100, phases=[Phase.generate])
    @given(RECORDS, BROKEN_RECORDS)
    def look(record: dict[str, Any], broken: dict[str, Any]) -> None:
        for what in list(missing):
            if WELL_FORMED[what](record) if what in WELL_FORMED else BROKEN[what](broken):
                missing.remove(what)

    for number in range(30):
        seed(number)(look)()
        if not missing:
            break
    assert missing == set()
