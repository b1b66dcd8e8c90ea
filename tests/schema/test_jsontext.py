"""JSON texts are the same, whoever writes them."""

from __future__ import annotations

import json
import math
from typing import Any

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
