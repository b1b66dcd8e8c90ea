"""JSON texts are the same, whoever writes them."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.schema import jsontext

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=3), part, max_size=3),
    max_leaves=8,
)


def both(value: Any) -> list[Any]:
    """What is written with pydantic's writer and without."""
    assert jsontext.pydantic_json is not None
    results: list[Any] = []
    for writer in (jsontext.pydantic_json, None):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(jsontext, "pydantic_json", writer)
            try:
                results.append(jsontext.to_json(value))
            except Exception as error:
                results.append(type(error))
    return results


@given(VALUES)
def test_generated_values(value: Any) -> None:
    first, second = both(value)
    assert first == second


def cycle() -> list[Any]:
    result: list[Any] = []
    result.append({"a": result})
    return result


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        *(2**63 - 1, 2**63, -(2**63) - 1, 10**4299, 10**4300, -(10**5000), 1e-7, 1e16, 5e-324, math.nan, -math.inf),
        *("".join(map(chr, range(0x300))), "\ud800", "\u2028\u2029\ufeff\uffff\U0010ffff", {"\udfff": 1}, {"": ""}),
        *({1: 2}, {None: 1}, {True: 1}, {1.5: 1}, (1, 2), [(1,)], {"a": (1, [])}, {"a": {2: 3}}, [[], {}, [{}]]),
        *(
            b"x",
            {"a": b"x"},
            {1, 2},
            object,
            [print],
            deep(100),
            deep(300),
            deep(999),
            deep(1001),
            deep(100_000),
            cycle(),
        ),
        *([True, 1, 0, False], {"a": [1, "b", None, {"c": [2**64, True]}]}, [[0]] * 2000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_written_in_different_ways(value: Any) -> None:
    first, second = both(value)
    assert first == second
    if isinstance(first, tuple) and first[1]:
        assert json.loads(first[0]) == json.loads(json.dumps(value))


class Number(IntEnum):
    ONE = 1


def outcome(write: Any, value: Any) -> Any:
    try:
        return write(value)
    except Exception as error:
        return type(error)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_what_was_written_before_is_written_alike(values: list[Any]) -> None:
    for value in (*values, *values):
        assert jsontext.to_json_again(value) == jsontext.to_json(value)


@pytest.mark.parametrize("place", [lambda x: x, lambda x: [x], lambda x: {"a": x}, lambda x: {"a": [0, {"b": x}]}])
def test_what_is_equal_and_of_another_type_is_not_taken_for_what_was_written_before(place: Any) -> None:
    values = [
        *(1, True, 1.0, Number.ONE, np.int64(1), np.float64(1), np.array([1]), np.array([1.0]), -0.0, 0.0, 0, False),
        *(b"1", bytearray(b"1"), memoryview(b"1"), (1,), [1], {"b": 1}, OrderedDict(b=1), {1: 1}, {"1": 1}, {True: 1}),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {1}, frozenset((1,)), 1j, ..., math.nan, None, "None", "\ud800", cycle()),
        *(deep(1500), deep(2500), "long" * 20_000, ["long" * 20_000, 1], ["long" * 20_000, True]),
    ]
    for value in map(place, (*values, *values)):
        found, expected = outcome(jsontext.to_json_again, value), outcome(jsontext.to_json, value)
        assert (type(found), found) == (type(expected), expected)
