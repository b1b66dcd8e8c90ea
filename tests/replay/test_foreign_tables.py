"""What checks and conversion say to a table that holds no traces."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from replay_build import recorded

from rolltape.replay import check, convert, read_outcomes
from rolltape.replay.convert import convert_alone
from rolltape.schema import BadInput, encode


@pytest.mark.parametrize("take", [check, lambda table: convert(table, []), convert_alone, read_outcomes])
def test_a_foreign_table_is_refused_with_the_columns_it_lacks(take: Any) -> None:
    with pytest.raises(
        BadInput, match=r"was given a table without the columns \w+, \w+, \w+ and \d+ more: expected rows"
    ):
        take(pa.table({"x": [1]}))
    with pytest.raises(BadInput, match="was given a list: expected a pyarrow Table"):
        take([])


def test_the_column_that_is_missing_is_named() -> None:
    table = encode(recorded("single_turn")).drop_columns(["logprobs"])
    with pytest.raises(BadInput, match="check was given a table without the column logprobs: expected"):
        check(table)


def test_outcomes_are_not_sought_in_what_encode_gave() -> None:
    with pytest.raises(
        BadInput, match=r"without the columns disposition, reason, .*take them from read_parquet or Run.table"
    ):
        read_outcomes(encode(recorded("single_turn")))
