"""Scores: what commits repeat of the rows is what the files hold, and is read without opening one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from replay_build import put_attempt, put_run, put_step, turn
from sql_build import BY_NAME, ask, steps_of, without_scores

from rolltape.replay import open_run
from rolltape.replay.housekeeping.compact import compact
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.housekeeping.rewrite import same_rows
from rolltape.replay.sql import connect
from rolltape.replay.verification.verify import verify
from rolltape.schema.commits import Commit, sealed
from rolltape.schema.parquet import read_parquet, write_parquet
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.scores import MOST, PACKED, SCORES, pack_scores, unpack_scores


def test_questions_about_scores_open_no_file(twenty: Path, opened: list[str]) -> None:
    for path in twenty.glob("traces/*/*.parquet"):
        path.write_bytes(b"x" * path.stat().st_size)  # as long as it was, and no Parquet
    assert ask(twenty, BY_NAME) == [(step, "ok", float(step)) for step in range(20)]
    assert ask(twenty, "SELECT count(*) FROM rewards WHERE step = 3") == [(1,)]
    assert ask(twenty, "SELECT count(*), min(trace_id), max(attempt), max(writer) FROM traces") == [
        (20, "t0", 0, "main")
    ]
    assert ask(twenty, "SELECT count(*), sum(trained_tokens) FROM samples") == [(20, 60)]
    assert opened == []


def test_scores_of_earlier_commits_are_read_from_files_once(twenty: Path, opened: list[str]) -> None:
    run = open_run(without_scores(twenty))
    expected = [(step, "ok", float(step)) for step in range(20)]
    assert run.sql(BY_NAME).fetchall() == expected
    assert len(opened) == 20
    assert run.sql(BY_NAME).fetchall() == expected
    assert len(opened) == 20


def test_commits_with_scores_and_without_are_read_together(twenty: Path, opened: list[str]) -> None:
    steps_of(without_scores(twenty), 5, start=20)
    assert ask(twenty, BY_NAME) == [(step, "ok", float(step)) for step in range(25)]
    assert len(opened) == 20


def test_scores_follow_the_attempts(twenty: Path) -> None:
    put_attempt(twenty, 1, start_step=18)
    put_step(twenty, 18, [turn("again", reward=0.5)], attempt=1, first=90)
    run = open_run(twenty)
    assert run.sql(BY_NAME).fetchall()[-2:] == [(17, "ok", 17.0), (18, "ok", 0.5)]
    assert run.sql("SELECT sum(value) FROM rewards", all_attempts=True).fetchall() == [(190.5,)]
    assert run.sql("SELECT count(*) FROM rewards WHERE superseded", all_attempts=True).fetchall() == [(2,)]
    assert run.sql("SELECT sum(value) FROM rewards").fetchall() == [(sum(range(18)) + 0.5,)]


def test_scores_outlive_files_that_are_merged_while_a_run_is_open(twenty: Path) -> None:
    run = open_run(twenty)
    assert len(run.commits()) == 20
    compact(open_run(twenty))
    prune(open_run(twenty), Wish(replaced=True))
    assert run.sql(BY_NAME).fetchall() == [(step, "ok", float(step)) for step in range(20)]
    assert run.sql("SELECT count(*) FROM tokens").fetchall() == [(120,)]


@pytest.mark.parametrize("where", ["demo", "verifiers-0.2.0", "verifiers-0.4.0"])
def test_scores_are_the_columns_of_the_file_bit_for_bit(where: str, demo_run: Path, tmp_path: Path) -> None:
    run = open_run(demo_run.parent / where)
    for commit in run.all_commits:
        rows = pa.concat_tables(run.part_batches(commit))
        file = write_parquet(tmp_path / "x.parquet", [rows.slice(0, 5), rows.slice(5)])
        again = Commit.from_dict(replace(commit, file=file).to_dict())
        names = sorted(SCORES)
        said = pa.table([again.score(name) for name in names], names=names)
        assert same_rows(said, read_parquet(tmp_path / "x.parquet", names).select(names))


def test_odd_numbers_and_nulls_keep_their_bits(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"a.b c": math.nan, "A": -0.0, "inf": math.inf, "none": None}
    root = put_run(tmp_path)
    put_step(root, 0, [turn("a", rewards=odd), turn("b", rewards={})])
    query = "SELECT trace_id, name, value FROM rewards ORDER BY ALL"
    said = ask(root, query)
    assert repr(said) == repr(ask(without_scores(root), query))
    assert len(said) == 4


def test_what_does_not_fit_into_a_commit_is_read_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setattr("rolltape.schema.scores.MOST", 100)
    root = steps_of(put_run(tmp_path), 2)
    assert open_run(root).all_commits[0].file.scores is None
    assert ask(root, BY_NAME) == [(0, "ok", 0.0), (1, "ok", 1.0)]
    assert len(opened) == 2
    assert MOST > 1 << 20


def test_a_text_that_holds_no_scores_is_an_error(kept_run: Path) -> None:
    rows = open_run(kept_run).table(steps=3)
    packed = pack_scores([rows])
    assert packed is not None
    assert set(packed) == set(PACKED)
    assert unpack_scores(packed, "reward", 1).to_pylist() == [3.0]
    for name, rows_, text in (
        ("reward", 2, packed["reward"]),
        ("reward", 1, "AAAA"),
        ("reward", 1, packed["run"][:40]),
    ):
        with pytest.raises(ValueError, match="reward"):
            unpack_scores({name: text}, name, rows_)
    with pytest.raises(KeyError):
        unpack_scores({}, "reward", 1)


@pytest.mark.parametrize("scores", [[], "text", {"reward": None, "rewards": None}, dict.fromkeys(PACKED, 5), {}])
def test_scores_of_another_shape_are_not_taken_for_nulls(twenty: Path, scores: Any, opened: list[str]) -> None:
    for path in twenty.glob("commits/*/*.json"):
        commit = Commit.read(path)
        path.write_bytes(sealed({**commit.to_dict(), "scores": scores}))
    assert ask(twenty, BY_NAME) == [(step, "ok", float(step)) for step in range(20)]
    assert len(opened) == 20


def test_verify_compares_scores_with_rows(twenty: Path) -> None:
    assert "scores" not in {f.code for f in verify(open_run(twenty)).findings}
    path = RunPaths(twenty).commit(Part("train", 3, 0, "main"))
    other = Commit.read(RunPaths(twenty).commit(Part("train", 4, 0, "main")))
    commit = Commit.read(path)
    path.write_bytes(replace(commit, file=replace(commit.file, scores=other.file.scores)).to_bytes())
    [finding] = [f for f in verify(open_run(twenty)).errors if f.code == "scores"]
    assert finding.step == 3
    assert "trace_id" in finding.message


@pytest.mark.parametrize(
    "query",
    [
        "SELECT traces FROM traces ORDER BY trace_id LIMIT 1",
        "FROM traces SELECT COLUMNS('token_ids|reward') ORDER BY trace_id",
        "SELECT a.reward, b.logprobs FROM traces a NATURAL JOIN traces b ORDER BY a.trace_id",
        "WITH t AS MATERIALIZED (FROM traces) SELECT trace_id, len(node_content) FROM t ORDER BY 1",
        "SELECT count(DISTINCT token_ids) FROM traces",
        "SELECT step FROM traces WHERE list_sum(token_ids) > 0 ORDER BY step",
        "SELECT trace_id FROM traces ORDER BY len(task), trace_id LIMIT 3",
        "PIVOT (SELECT step, role, content FROM nodes) ON role USING count(content) GROUP BY step ORDER BY step",
        "SELECT * FROM query_table('traces') ORDER BY trace_id LIMIT 1",
        "SELECT * FROM query('SELECT count(*) FROM gro' || 'ups')",
        "SELECT column_name, min, max, count FROM (SUMMARIZE rewards)",
        "SELECT count(*) FROM (FROM steps POSITIONAL JOIN groups)",
    ],
)
def test_a_column_is_never_null_because_it_was_not_thought_to_be_needed(kept_run: Path, query: str) -> None:
    run = open_run(kept_run)
    assert repr(run.sql(query).fetchall()) == repr(connect(run).execute(query).fetchall())
