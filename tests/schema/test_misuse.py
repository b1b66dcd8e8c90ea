"""What the functions of the package say where they are given something else than they take."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from schema_records import record, recorded

from rolltape.schema import (
    BadInput,
    Context,
    Outcome,
    decode,
    encode,
    read_parquet,
    to_trace,
    with_outcomes,
    write_parquet,
)

FOREIGN = pa.table({"trace_id": ["t0"], "x": [1]})


def test_a_single_table_is_written_as_a_list_of_it_is(tmp_path: Path) -> None:
    table = encode([record()])
    assert write_parquet(tmp_path / "one.parquet", table) == write_parquet(tmp_path / "list.parquet", [table])
    assert decode(read_parquet(tmp_path / "one.parquet")) == [record()]


@pytest.mark.parametrize("outcomes", [False, True])
def test_columns_in_another_order_are_written_under_their_own_names(tmp_path: Path, outcomes: bool) -> None:
    table = encode([record()])
    table = with_outcomes(table, [Outcome(trace_id="t0", disposition="eval")]) if outcomes else table
    write_parquet(tmp_path / "a.parquet", table.select(table.column_names[::-1]))
    assert decode(read_parquet(tmp_path / "a.parquet")) == [record()]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda _: FOREIGN, r"write_parquet was given a table without the columns run, split, eval_name and \d+ more"),
        (
            lambda t: t.drop_columns(["reward"]),
            "write_parquet was given a table without the column reward: expected rows",
        ),
        (
            lambda t: t.append_column("mine", [[1]]),
            "write_parquet was given a table with the column mine, which no row has",
        ),
        (
            lambda t: t.set_column(t.column_names.index("reward"), "reward", [["?"]]),
            "columns have other types than rows",
        ),
        (lambda t: t.to_pylist()[0], "write_parquet was given a dict: expected a pyarrow Table of traces"),
    ],
)
def test_a_table_of_other_columns_is_refused_and_leaves_no_file(tmp_path: Path, change: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        write_parquet(tmp_path / "a.parquet", [change(encode([record()]))])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("take", [decode, lambda table: with_outcomes(table, [])])
def test_a_foreign_table_is_refused_with_the_columns_it_lacks(take: Any) -> None:
    with pytest.raises(
        BadInput, match=r"was given a table without the columns run, split, eval_name and \d+ more: expec"
    ):
        take(FOREIGN)
    with pytest.raises(BadInput, match="was given a list: expected a pyarrow Table"):
        take([record()])


@pytest.mark.parametrize(
    ("contexts", "sentence"),
    [
        (Context(), r"contexts is a single Context: expected one Context for each trace; give a list"),
        ([], r"there are more traces than contexts \(0\)"),
        ([Context()] * 3, r"there are more contexts than traces \(2\)"),
        (repeat(Context()), r"there are more contexts than traces \(2\)"),
        ([Context(), {"step": 1}], r"contexts\[1\] is a dict"),
    ],
)
def test_contexts_that_are_not_one_for_each_trace_are_refused(contexts: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        encode([record(), record(id="t1")], contexts)


def test_one_trace_in_place_of_a_list_is_refused() -> None:
    pytest.importorskip("verifiers")
    for given, kind in ((record(), "dict"), (to_trace(record()), "Trace"), (None, "NoneType")):
        with pytest.raises(BadInput, match=f"traces is a single .*{kind}.*: expected a list of traces"):
            encode(given)  # type: ignore[arg-type]


def test_a_record_of_another_release_is_refused_with_both_releases() -> None:
    verifiers = pytest.importorskip("verifiers")
    with pytest.raises(BadInput) as refused:
        to_trace(recorded("0.4.0/single_turn.jsonl")[0])
    said = str(refused.value)
    assert f"no Trace of the installed Verifiers {verifiers.__version__} (" in said
    assert "Verifiers 0.4.0 wrote it; install verifiers==0.4.0" in said
    assert "\n" not in said


def test_what_is_no_record_of_a_trace_is_refused() -> None:
    pytest.importorskip("verifiers")
    with pytest.raises(
        BadInput, match=r"record t0 is no Trace .*\(nodes: .*, and names no release, as none before 0.2.1"
    ):
        to_trace(record(nodes=5))
    with pytest.raises(BadInput, match="to_trace was given a list: expected one record"):
        to_trace([record()])  # type: ignore[arg-type]
