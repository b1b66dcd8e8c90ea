"""Values that JSON does not know: recorded in a stable form, and what is lost is named. Never an exception, never a hang."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from schema_records import record, text_of
from verifiers.v1.trace import WireTrace

from rolltape.schema import decode, encode
from rolltape.schema.encoding import row_of
from rolltape.schema.parquet import read_parquet, write_parquet
from rolltape.schema.snapshots import record_of
from rolltape.schema.table import rows_to_table


class Colour(enum.Enum):
    RED = "red"


class Word(enum.StrEnum):
    YES = "yes"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    y: Any


class Silent:
    """Says nothing of itself but an address, which is no stable form."""


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Url:
    def __str__(self) -> str:
        return "https://example.org/"


class Lazy(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("gone")


def cycle() -> dict[str, Any]:
    value: dict[str, Any] = {"n": 1}
    value["me"] = value
    return value


def nest(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


ZONE = datetime.timezone(datetime.timedelta(hours=2))
STABLE: dict[str, tuple[Any, Any]] = {
    "set": ({"b", "a"}, ["a", "b"]),
    "frozenset": (frozenset({2}), [2]),
    "tuple": ((1, (2,)), [1, [2]]),
    "Decimal": (decimal.Decimal("0.10"), "0.10"),
    "datetime with a zone": (datetime.datetime(2026, 1, 2, 3, tzinfo=ZONE), "2026-01-02T03:00:00+02:00"),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "time": (datetime.time(1, 2), "01:02:00"),
    "timedelta": (datetime.timedelta(seconds=1.5), 1.5),
    "bytes that are no text": (b"\xff", {"base64": "/w=="}),
    "bytes that are text": (b"ab", {"base64": "YWI="}),
    "bytearray": (bytearray(b"ab"), {"base64": "YWI="}),
    "Path": (pathlib.PurePosixPath("/a/b"), "/a/b"),
    "UUID": (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    "exception": (ValueError("no"), "ValueError: no"),
    "enum": (Colour.RED, "red"),
    "enum of text": (Word.YES, "yes"),
    "enum of numbers": (Level.HIGH, 3),
    "dataclass": (Point(1, {2}), {"x": 1, "y": [2]}),
    "2**70": (2**70, 2**70),
    "numpy.float32": (np.float32(0.5), 0.5),
    "numpy.float64": (np.float64(0.1), 0.1),
    "numpy.int64": (np.int64(-7), -7),
    "numpy.bool": (np.bool_(True), True),
    "numpy.str": (np.str_("x"), "x"),
    "numpy array": (np.array([[1.5, math.nan]]), [[1.5, math.nan]]),
    "numpy array of no dimension": (np.array(3), 3),
    "numpy array of objects": (np.array([None, "a", 1], dtype=object), [None, "a", 1]),
    "NaN": (math.nan, math.nan),
    "infinity": ([math.inf, -math.inf], [math.inf, -math.inf]),
    "lone surrogate": ({"\udc00": "\ud800"}, {"\udc00": "\ud800"}),
    "split pair": ("\ud83d\ude00", "\ud83d\ude00"),
}
LOST: dict[str, tuple[Any, Any, str]] = {
    "object": (Silent(), None, "info.x: a Silent cannot be written as JSON and was left out"),
    "function": (len, None, "info.x: a builtin_function_or_method cannot be written as JSON and was left out"),
    "generator": ((i for i in range(3)), None, "info.x: a generator cannot be written as JSON and was left out"),
    "class": (int, None, "info.x: a type cannot be written as JSON and was left out"),
    "object in a list": ([1, Silent()], [1, None], "info.x[1]: a Silent cannot be written as JSON and was left out"),
    "URL": (Url(), "https://example.org/", "info.x: a Url was kept as its text"),
    "hostile object": ({Hostile()}, None, "info.x: a set could not be read (RuntimeError)"),
    "hostile mapping": ({"a": Lazy(b={1})}, {"a": None}, "info.x.a: a Lazy could not be read (OSError)"),
    "self-referencing dict": (cycle(), {"n": 1, "me": None}, "info.x.me: refers to itself and was left out"),
    "key 1": ({1: "a"}, {"1": "a"}, "info.x: 1 keys that are no text were kept as text, the first of them 1"),
    "key (1, 2)": (
        {(1, 2): "a"},
        {"1,2": "a"},
        "info.x: 1 keys that are no text were kept as text, the first of them (1, 2)",
    ),
    "keys 1 and '1'": ({1: "a", "1": "b"}, {"1": "b"}, "info.x: several keys read '1'; the last one was kept"),
    "integer of 5,001 digits": (
        10**5000,
        hex(10**5000),
        "info.x: an integer of 16610 bits was kept as hexadecimal text",
    ),
    "object below a surrogate": (
        {"\ud800": Silent()},
        {"\ud800": None},
        "info.x.\ufffd: a Silent cannot be written as JSON and was left out",
    ),
}


def traces(info: Any) -> list[Any]:
    """A Trace object and a dict record with that value in info."""
    trace = WireTrace.model_validate(record())
    trace.info["x"] = info
    return [trace, record(info={"x": info})]


def kept(given: Any, folder: Path) -> tuple[Any, list[str]]:
    """(what is read back, its problems)."""
    write_parquet(folder / "a.parquet", [encode([given])])
    table = read_parquet(folder / "a.parquet")
    return decode(table)[0], table["problems"].to_pylist()[0] or []


@pytest.mark.parametrize("name", STABLE)
def test_known_types_take_a_stable_form(name: str, tmp_path: Path) -> None:
    value, expected = STABLE[name]
    for given in traces(value):
        found, problems = kept(given, tmp_path)
        assert text_of(found) == text_of(record(info={"x": expected}))
        assert problems == []


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_is_named_with_its_path(name: str, tmp_path: Path) -> None:
    value, expected, problem = LOST[name]
    for given in traces(value):
        found, problems = kept(given, tmp_path)
        assert text_of(found) == text_of(record(info={"x": expected}))
        assert problem in problems


@pytest.mark.parametrize("value", [MagicMock(), nest(3_000), {"a": nest(150), "b": {1}}], ids=["mock", "list", "dict"])
def test_what_goes_on_without_end_is_cut_and_named(value: Any, tmp_path: Path) -> None:
    for given in traces(value):
        found, problems = kept(given, tmp_path)
        assert found["nodes"] == record()["nodes"]
        assert "lies more than 100 levels deep and was left out" in problems[0]


ANYTHING = {
    "set": {1},
    "cycle": cycle(),
    "bytes": b"\xff",
    "object": Silent(),
    "key 1": {1: 2},
    "key (1, 2)": {(1, 2): 3},
    "depth": nest(3_000),
    "digits": 10**5000,
    "hostile": Hostile(),
}
PLACES = ("top", "task", "task row", "node", "message", "tool calls", "token ids", "rewards", "usage", "role")


@pytest.mark.parametrize("what", ANYTHING)
@pytest.mark.parametrize("place", PLACES)
def test_a_record_with_any_object_anywhere_is_recorded(place: str, what: str, tmp_path: Path) -> None:
    given, value = record(), ANYTHING[what]
    answer = given["nodes"][1]
    if place == "top":
        given["future"] = value
    elif place == "task":
        given["task"] = value
    elif place == "task row":
        given["task"]["data"]["answer"] = value
    elif place == "node":
        answer["future"] = value
    elif place == "message":
        answer["message"]["provider_state"] = value
    elif place == "tool calls":
        answer["message"]["tool_calls"] = [value]
    elif place == "token ids":
        answer["token_ids"] = [value]
    elif place == "rewards":
        given["rewards"]["a"] = value
    elif place == "role":
        answer["message"]["role"] = value
    else:
        answer["usage"] = value
    found, problems = kept(given, tmp_path)
    assert found["id"] == "t0"
    assert found["nodes"][0] == record()["nodes"][0]
    assert list(found) == list(given)
    json.dumps(found, default=lambda b: b.hex())
    assert problems or what in ("set", "bytes")


class EqualToAll:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [EqualToAll(), np.array([1, 2])], ids=["equal", "array"])
@pytest.mark.parametrize("place", ["provider_state", "tool_calls", "content", "usage"])
def test_an_object_that_compares_in_its_own_way_is_kept_or_named_and_nothing_else_touched(
    place: str, value: Any, tmp_path: Path
) -> None:
    given = record(future=b"raw")
    node = given["nodes"][1]
    (node if place == "usage" else node["message"])[place] = value
    found, problems = kept(given, tmp_path)
    node = found["nodes"][1]
    expected = [1, 2] if isinstance(value, np.ndarray) else None
    assert (node if place == "usage" else node["message"])[place] == expected
    assert bool(problems) == (expected is None)
    assert found["future"] == b"raw"


@pytest.mark.parametrize("key", [1, None, True, 1.5, (1, 2)], ids=str)
def test_keys_that_are_no_text_at_the_top_of_records_nodes_and_messages_are_named(key: Any, tmp_path: Path) -> None:
    for where in (0, 1, 2):
        given = record()
        [given, given["nodes"][0], given["nodes"][0]["message"]][where][key] = "x"
        found, problems = kept(given, tmp_path)
        inside = [found, found["nodes"][0], found["nodes"][0]["message"]][where]
        assert inside["1,2" if key == (1, 2) else str(key)] == "x"
        assert "1 keys that are no text were kept as text" in problems[0]


def test_numpy_lists_and_numbers_in_a_record_are_numbers(tmp_path: Path) -> None:
    """Token lists of a foreign writer: what the values say is kept, though no array comes back."""
    given = record(rewards={"a": np.float32(0.5)}, metrics={"b": np.int64(3), "c": np.bool_(True)})
    given["nodes"][1] |= {
        "token_ids": np.array([7, 8, 9]),
        "mask": np.array([False, True, True]),
        "timestamp": np.float64(2),
    }
    found, problems = kept(given, tmp_path)
    assert found["nodes"][1]["token_ids"] == [7, 8, 9]
    assert found["nodes"][1]["mask"] == [False, True, True]
    assert text_of([found["rewards"], found["metrics"]]) == '[{"a": 0.5}, {"b": 3, "c": true}]'
    (row,) = encode([given]).to_pylist(maps_as_pydicts="strict")
    assert (row["reward"], row["rewards"], row["metrics"]) == (0.5, {"a": 0.5}, {"b": 3.0, "c": 1.0})
    assert problems == []


def test_numpy_rewards_of_a_trace_object_are_numbers() -> None:
    trace = WireTrace.model_validate(record())
    trace.rewards["a"] = np.float32(0.5)
    trace.metrics["b"] = np.int64(3)
    (row,) = encode([trace]).to_pylist(maps_as_pydicts="strict")
    assert (row["rewards"], row["metrics"]) == ({"ok": 1.0, "a": 0.5}, {"chars": 2.0, "b": 3.0})


def test_bytes_beside_a_lost_object_stay_bytes(tmp_path: Path) -> None:
    """Raw arrays of one node are no reason to lose another's, nor an object a reason to turn bytes into text."""
    given = record()
    given["nodes"][0]["routed_experts"] = {"__nd__": True, "data": b"\x00\xff", "shape": [2], "dtype": "uint8"}
    given["nodes"][1]["future"] = Silent()
    found, problems = kept(given, tmp_path)
    assert found["nodes"][0]["routed_experts"]["data"] == b"\x00\xff"
    assert found["nodes"][1]["future"] is None
    assert problems == ["nodes[1].future: a Silent cannot be written as JSON and was left out"]


def test_problems_named_by_a_snapshot_go_into_its_row() -> None:
    """A recorder takes the record of a live trace first and its row later, in another thread."""
    trace = WireTrace.model_validate(record())
    trace.info["x"] = Silent()
    problems: list[str] = []
    snapshot = record_of(trace, problems)
    trace.info["x"] = "changed later"
    table = rows_to_table([row_of(snapshot, problems=problems)])
    assert table["problems"].to_pylist() == [["info.x: a Silent cannot be written as JSON and was left out"]]
    assert decode(table)[0]["info"] == {"x": None}
    assert len(problems) == 1


def test_a_snapshot_does_not_see_later_changes_to_info() -> None:
    trace = WireTrace.model_validate(record())
    trace.info["list"] = [1]
    snapshot = record_of(trace)
    trace.info["list"].append(2)
    trace.rewards["late"] = 1.0
    assert snapshot["info"] == {"list": [1]}
    assert snapshot["rewards"] == {"ok": 1.0}


def test_one_bad_trace_does_not_touch_the_others(tmp_path: Path) -> None:
    bad = record(id="bad", info=cycle())
    write_parquet(tmp_path / "a.parquet", [encode([record(id="a"), bad, record(id="b")])])
    found = decode(read_parquet(tmp_path / "a.parquet"))
    assert [r["id"] for r in found] == ["a", "bad", "b"]
    assert found[0] == record(id="a")
    assert found[2] == record(id="b")
