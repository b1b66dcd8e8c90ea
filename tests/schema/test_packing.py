"""Lists as arrays: exactly what a list holds, or None."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rolltape.schema import packing
from rolltape.schema.packing import pack_bools, pack_floats, pack_ints


@pytest.fixture(params=["msgpack", "marshal"], autouse=True)
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "marshal":
        monkeypatch.setattr(packing, "_msgpack", None)
    else:
        assert packing._msgpack is not None


class Number(float):
    pass


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 65_535, 65_536, 70_000])
def test_lists_of_every_length_come_back_bit_for_bit(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size)
    lists = [[], values.tolist(), [], [-0.0, math.inf, -math.inf, 5e-324], values.tolist()]
    packed = pack_floats(lists)
    assert packed is not None
    assert packed.dtype == np.float64
    assert packed.tobytes() == np.array([x for part in lists for x in part]).tobytes()


def test_nothing_is_an_empty_array() -> None:
    for lists in ([], [[]], [[], []]):
        for pack, dtype in ((pack_floats, np.float64), (pack_ints, np.int32), (pack_bools, np.bool_)):
            packed = pack(lists)
            assert packed is not None
            assert (packed.dtype, packed.shape) == (dtype, (0,))


def test_not_a_number_stays_one() -> None:
    packed = pack_floats([[math.nan, 1.0]])
    assert packed is not None
    assert np.isnan(packed).tolist() == [True, False]


@pytest.mark.parametrize(
    "odd",
    [
        1,
        True,
        None,
        2**31,
        2**70,
        -(2**70),
        "12345678",
        b"1234567",
        [0.5],
        [],
        {},
        (0.5,),
        1j,
        np.float64(1),
        Number(1),
    ],
    ids=repr,
)
def test_one_value_that_is_no_plain_float_makes_the_lists_none_of_floats(odd: Any) -> None:
    for lists in ([[odd]], [[0.5, odd]], [[odd, 0.5]], [[0.5], [odd]], [[0.5] * 20, [0.5] * 7 + [odd]], [[odd] * 9]):
        assert pack_floats(lists) is None
