"""Opening and reading a recorded run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_build import put_attempt, put_run, put_step, turn

from rolltape.replay import open_run
from rolltape.replay.stats import stats
from rolltape.schema import ROW, Context, Step, encode, read_parquet, with_outcomes, write_parquet
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged, RolltapeError, RunNotFound, UnsupportedVersion
from rolltape.schema.parquet import Written, file_metadata, put_once
from rolltape.schema.paths import Part, RunPaths


def trace_ids(table: pa.Table) -> list[str]:
    return list(table.column("trace_id").to_pylist())


# -- opening


def test_a_folder_that_does_not_exist_is_said_to_be_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"does not exist; expected the folder of a recorded run\."):
        open_run(tmp_path / "nothing")


def test_a_folder_without_a_run_json_is_said_to_be_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"holds no run\.json"):
        open_run(tmp_path)


def test_a_file_is_said_to_be_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(RunNotFound, match="is a file"):
        open_run(tmp_path / "file")


def test_a_missing_run_is_a_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_run(tmp_path)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"3", b'"run"', b'\xff\xfe{"run": 1}', b'{"schema": "1.0"}', b'{"schema": "1.0", "run": 3}'],
)
def test_a_damaged_run_json_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(RolltapeError, match=r"run\.json: "):
        open_run(tmp_path)


@pytest.mark.parametrize("version", ["2.0", "10.3", 2, 2.5])
def test_a_newer_major_schema_is_refused_with_what_to_do(tmp_path: Path, version: Any) -> None:
    put_run(tmp_path, schema=version)
    with pytest.raises(UnsupportedVersion, match=r"was found, this rolltape knows 1\.0; install a newer rolltape"):
        open_run(tmp_path)


@pytest.mark.parametrize("version", [None, "", "one", {}])
def test_a_schema_version_that_is_none_is_refused(tmp_path: Path, version: Any) -> None:
    put_run(tmp_path, schema=version)
    with pytest.raises(UnsupportedVersion, match="is not a version"):
        open_run(tmp_path)


def test_a_newer_minor_schema_is_read(tmp_path: Path) -> None:
    assert open_run(put_run(tmp_path, schema="1.7")).run_id == "r1"


def test_a_run_json_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(Damaged, match=r"run\.json: cannot be read"):
        open_run(tmp_path)


def test_a_run_without_steps_has_the_right_columns_and_no_rows(tmp_path: Path) -> None:
    run = open_run(put_run(tmp_path))
    assert run.table().schema.equals(ROW.arrow)
    assert run.table().num_rows == 0
    assert run.table(columns=["trace_id", "reward"]).column_names == ["trace_id", "reward"]
    assert (run.groups(), run.steps(), run.splits(), run.all_commits) == ([], [], [], [])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"split": "trian"}, "no split 'trian' was recorded; recorded are 'train', 'eval-aime'."),
        ({"split": "eval"}, "no split 'eval' was recorded; recorded are 'train', 'eval-aime'."),
        ({"columns": "reward"}, "columns is the single text 'reward': expected a list of names; write ['reward']."),
        ({"columns": ["reward", "nope"]}, "there is no column 'nope'; there are "),
        ({"steps": "0"}, "steps: '0' is a str; expected the number of a step"),
        ({"steps": 7}, "step 7 of 'train' was not recorded; recorded are 1 step from 0 to 0."),
    ],
)
def test_what_a_run_has_not_is_refused_and_no_empty_table(tmp_path: Path, asked: dict[str, Any], says: str) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    put_step(tmp_path, 0, [turn(id="b")], split="eval-aime", fates={"b": "eval"})
    with pytest.raises(BadInput) as caught:
        open_run(tmp_path).table(**asked)
    assert says in str(caught.value)


# -- order and attempts


def test_steps_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    put_run(tmp_path)
    for step in (10, 2, 100_000_000, 99_999_999):
        put_step(tmp_path, step, [turn(id=f"s{step}")])
    run = open_run(tmp_path)
    assert trace_ids(run.table()) == ["s2", "s10", "s99999999", "s100000000"]
    assert [s.step for s in run.steps()] == [2, 10, 99_999_999, 100_000_000]
    assert trace_ids(run.table(steps=[10, 2])) == ["s2", "s10"]


def stepped_back(root: Path) -> None:
    """Attempt 0 records steps 0 to 3; attempt 1 starts again at step 2 and has recorded that one."""
    put_run(root)
    for step in range(4):
        put_step(root, step, [turn(id=f"old{step}")])
    put_attempt(root, 1, start_step=2)
    put_step(root, 2, [turn(id="new2")], attempt=1)


def test_the_newest_attempt_of_a_step_is_read_and_what_it_took_back_is_not(tmp_path: Path) -> None:
    stepped_back(tmp_path)
    run = open_run(tmp_path)
    assert trace_ids(run.table()) == ["old0", "old1", "new2"]
    assert [c.part.attempt for c in run.commits()] == [0, 0, 1]
    assert [g.trace_ids for g in run.groups()] == [("old0",), ("old1",), ("new2",)]


def test_an_older_attempt_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    stepped_back(tmp_path)
    run = open_run(tmp_path)
    assert trace_ids(run.table(attempt=0)) == ["old0", "old1", "old2", "old3"]
    assert trace_ids(run.table(attempt=1)) == ["new2"]
    assert [run.superseded(c.part) for c in run.all_commits] == [False, False, True, False, True]


def test_what_each_attempt_was_run_with_can_be_read(tmp_path: Path) -> None:
    stepped_back(tmp_path)
    attempts = open_run(tmp_path).attempts
    assert {n: (a.start_step, a.settings["seed"]) for n, a in attempts.items()} == {0: (0, 0), 1: (2, 1)}


def test_two_writers_of_one_step_are_both_read_in_order_of_their_names(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="b0")], writer="b")
    put_step(tmp_path, 0, [turn(id="a0")], writer="a")
    put_step(tmp_path, 1, [turn(id="a1")], writer="a")
    run = open_run(tmp_path)
    assert trace_ids(run.table()) == ["a0", "b0", "a1"]
    assert [c.part.writer for c in run.commits(steps=0)] == ["a", "b"]


def test_evaluations_are_splits_of_their_own(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="t")])
    put_step(tmp_path, 0, [turn(id="e")], split="eval-math", fates={"e": "eval"})
    put_step(tmp_path, 0, [turn(id="f")], split="eval", fates={"f": "eval"})
    run = open_run(tmp_path)
    assert run.splits() == ["train", "eval", "eval-math"]
    assert [trace_ids(run.table(s)) for s in run.splits()] == [["t"], ["f"], ["e"]]


@pytest.mark.parametrize("steps", [7, [0, 7], range(0, 9, 7)])
def test_a_step_that_was_not_recorded_is_named(tmp_path: Path, steps: Any) -> None:
    put_run(tmp_path)
    for step in (0, 3):
        put_step(tmp_path, step, [turn(id=f"s{step}")])
    with pytest.raises(BadInput, match=r"step 7 of 'train' was not recorded; recorded are 2 steps from 0 to 3\."):
        open_run(tmp_path).table(steps=steps)


def test_a_split_that_was_not_recorded_is_refused_and_the_recorded_ones_are_named(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="e")], split="eval-math", fates={"e": "eval"})
    run = open_run(tmp_path)
    assert run.table("train").num_rows == 0
    for ask in (run.table, run.groups, run.steps, run.commits, lambda s: list(run.batches(s)), lambda s: stats(run, s)):
        with pytest.raises(BadInput, match=r"no split 'eval' was recorded; recorded are 'eval-math'\."):
            ask("eval")


def test_an_empty_run_has_no_rows_of_training_and_no_other_split(tmp_path: Path) -> None:
    run = open_run(put_run(tmp_path))
    assert run.table("train").num_rows == 0
    with pytest.raises(BadInput, match=r"no split 'eval' was recorded; recorded are no splits\."):
        run.table("eval")
    with pytest.raises(BadInput, match=r"step 0 of 'train' was not recorded; recorded are none\."):
        run.table(steps=0)


@pytest.mark.parametrize("steps", ["0", ["0"], 0.0, [0, None], True])
def test_a_step_that_is_no_number_is_refused_by_its_type(tmp_path: Path, steps: Any) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    run = open_run(tmp_path)
    for ask in (run.table, run.groups, run.steps, lambda steps: stats(run, "train", steps)):
        with pytest.raises(BadInput, match=r"steps: .* is a (str|float|NoneType|bool); expected the number of a step"):
            ask(steps=steps)
    assert run.table(steps=np.int64(0)).num_rows == run.table(steps=np.arange(1)).num_rows == 1


def test_an_attempt_that_was_not_recorded_is_refused_and_the_recorded_ones_are_named(tmp_path: Path) -> None:
    stepped_back(tmp_path)
    run = open_run(tmp_path)
    with pytest.raises(BadInput, match=r"there is no attempt 7; recorded are 0, 1\."):
        run.table(attempt=7)


# -- what is data


def test_a_file_without_its_commit_is_never_read(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    put_step(tmp_path, 1, [turn(id="b")])
    RunPaths(tmp_path).commit(Part("train", 1, 0, "main")).unlink()
    assert trace_ids(open_run(tmp_path).table()) == ["a"]


def test_files_of_other_names_are_passed_over(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    for name in ("notes.json", ".00000001.0.main.json.77.tmp", "1.0.main.json", "00000001.0.main.json.bak"):
        (tmp_path / "commits" / "train" / name).write_text("{")
    (tmp_path / "traces" / "train" / ".00000001.0.main.parquet.77.tmp").write_text("PAR1")
    run = open_run(tmp_path)
    assert trace_ids(run.table()) == ["a"]
    assert run.broken == []


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"checksum": "0"}', b"\xff\xff"])
def test_a_damaged_commit_is_named_where_its_step_is_read_and_nowhere_else(tmp_path: Path, text: bytes) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    put_step(tmp_path, 1, [turn(id="b")])
    file = RunPaths(tmp_path).commit(Part("train", 1, 0, "main"))
    file.write_bytes(text)
    run = open_run(tmp_path)
    assert trace_ids(run.table(steps=0)) == ["a"]
    with pytest.raises(RolltapeError, match=r"00000001\.0\.main\.json"):
        run.table()
    assert [p.step for p, _ in run.broken] == [1]


def test_one_changed_digit_of_a_commit_is_found(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    file = RunPaths(tmp_path).commit(Part("train", 0, 0, "main"))
    file.write_bytes(file.read_bytes().replace(b'"rows":1', b'"rows":2'))
    with pytest.raises(Damaged, match="checksum does not fit"):
        open_run(tmp_path).table()


@pytest.mark.parametrize(
    "to", ["train/00000005.0.main.json", "train/00000000.0.other.json", "eval/00000000.0.main.json"]
)
def test_a_commit_under_another_name_is_found(tmp_path: Path, to: str) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    (tmp_path / "commits" / "eval").mkdir()
    (tmp_path / "commits" / "train" / "00000000.0.main.json").rename(tmp_path / "commits" / to)
    run = open_run(tmp_path)
    assert [str(e).split(": ", 1)[1] for _, e in run.broken] == [
        f"its content says it is {Part('train', 0, 0, 'main')}; it was renamed or copied."
    ]


def test_a_commit_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    file = RunPaths(tmp_path).commit(Part("train", 0, 0, "main"))
    file.write_bytes(file.read_bytes().replace(b'"schema":"1.0"', b'"schema":"2.0"'))
    with pytest.raises(UnsupportedVersion, match=r"schema version 2\.0 was found"):
        open_run(tmp_path).table()


def test_a_missing_and_a_cut_parquet_file_are_named(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    file = RunPaths(tmp_path).parquet(Part("train", 0, 0, "main"))
    data = file.read_bytes()
    for cut in (data[:-1], b"", data[: len(data) // 2]):
        file.write_bytes(cut)
        with pytest.raises(
            Damaged, match=rf"00000000\.0\.main\.parquet: {len(cut)} bytes, but {len(data)} were committed"
        ):
            open_run(tmp_path).table()
    file.unlink()
    with pytest.raises(Damaged, match="it is missing; restore it from a copy"):
        open_run(tmp_path).table()


def test_flipped_bits_never_read_as_data(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id=f"t{i}") for i in range(8)])
    file = RunPaths(tmp_path).parquet(Part("train", 0, 0, "main"))
    data, whole = file.read_bytes(), open_run(tmp_path).table()
    errors = []
    for at in range(4, len(data), len(data) // 50):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            assert open_run(tmp_path).table().equals(whole)
        except RolltapeError as error:
            errors.append(str(error))
    assert len(errors) > 10
    assert all("00000000.0.main.parquet" in error for error in errors)


# -- columns and versions


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a", reward=0.5)])
    assert open_run(tmp_path).table(columns=["trace_id", "reward"]).to_pylist() == [{"trace_id": "a", "reward": 0.5}]


@pytest.mark.parametrize("there", [True, False])
def test_a_column_that_is_not_there_is_refused_and_the_columns_are_named(tmp_path: Path, there: bool) -> None:
    put_run(tmp_path)
    if there:
        put_step(tmp_path, 0, [turn(id="a")])
    run = open_run(tmp_path)
    with pytest.raises(BadInput, match=r"there is no column 'nope'; there are .*trace_id.*reward.*"):
        run.table(columns=["reward", "nope"])
    with pytest.raises(
        BadInput, match=r"columns is the single text 'reward': expected a list of names; write \['reward'\]\."
    ):
        run.table(columns="reward")
    with pytest.raises(BadInput, match="single text"):
        list(run.batches(columns="reward"))


def test_a_single_text_as_columns_of_a_file_is_refused_and_unknown_ones_are_passed_over(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", [with_outcomes(encode([turn(id="a")]), [])])
    with pytest.raises(BadInput, match="single text 'reward'"):
        read_parquet(tmp_path / "t.parquet", "reward")
    assert read_parquet(tmp_path / "t.parquet", ["trace_id", "nope"]).column_names == ["trace_id"]


def test_files_of_a_later_minor_version_read_together_with_earlier_ones(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")])
    table = with_outcomes(encode([turn(id="b")]), []).append_column("a_later_column", pa.array([5]))
    part = Part("train", 1, 0, "main")
    pq.write_table(
        table.replace_schema_metadata(file_metadata() | {"rolltape.schema": "1.1"}), RunPaths(tmp_path).parquet(part)
    )
    commit_as_it_lies(tmp_path, part)
    read = open_run(tmp_path).table()
    assert trace_ids(read) == ["a", "b"]
    assert read.column("a_later_column").to_pylist() == [None, 5]
    only = open_run(tmp_path).table(columns=["a_later_column", "trace_id"])
    assert only.select(["trace_id", "a_later_column"]).to_pylist() == [
        {"trace_id": "a", "a_later_column": None},
        {"trace_id": "b", "a_later_column": 5},
    ]


def commit_as_it_lies(root: Path, part: Part) -> None:
    """Commit a Parquet file that is there already."""
    path = RunPaths(root).parquet(part)
    data = path.read_bytes()
    file = Written(pq.read_metadata(path).num_rows, len(data), hashlib.sha256(data).hexdigest())
    commit = Commit(part=part, file=file, groups=[], step=Step(step=part.step), fingerprint="later")
    put_once(RunPaths(root).commit(part), commit.to_bytes())


def test_rows_come_a_row_group_at_a_time(tmp_path: Path) -> None:
    put_run(tmp_path)
    part = Part("train", 0, 0, "main")
    tables = [encode([turn(id=f"{i}{j}") for j in range(2)], [Context()] * 2) for i in range(3)]
    write_parquet(RunPaths(tmp_path).parquet(part), tables)
    commit_as_it_lies(tmp_path, part)
    batches = list(open_run(tmp_path).batches(columns=["trace_id"]))
    assert [trace_ids(b) for b in batches] == [["00", "01"], ["10", "11"], ["20", "21"]]


def test_a_damaged_attempt_file_hides_no_step_that_it_did_not_take_back(tmp_path: Path) -> None:
    stepped_back(tmp_path)
    for text in ("", "{", "[]", json.dumps({"attempt": "x"}), json.dumps({"attempt": 1, "start_step": None})):
        RunPaths(tmp_path).attempt(1).write_text(text)
        assert trace_ids(open_run(tmp_path).table(steps=[0, 1, 2])) == ["old0", "old1", "new2"]
