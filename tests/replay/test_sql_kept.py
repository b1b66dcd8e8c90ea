"""Small columns that are kept: read once, never out of date, never taken for what they are not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_build import put_attempt, put_run, put_step, turn
from sql_build import BY_NAME, ask, steps_of

from rolltape.replay import open_run
from rolltape.replay.sql import connect, kept


def test_small_columns_are_read_once(twenty: Path, cache: Path, opened: list[str]) -> None:
    root = twenty
    first = ask(root, BY_NAME)
    assert len(opened) == 20
    assert ask(root, BY_NAME) == first == [(step, "ok", float(step)) for step in range(20)]
    assert ask(root, "SELECT count(*) FROM rewards WHERE step = 3") == [(1,)]
    assert len(opened) == 20
    assert sorted(p.stem for p in cache.glob("*/*.parquet")) == ["rewards", "step"]


@pytest.mark.usefixtures("cache")
def test_steps_that_came_later_are_added_to_what_is_kept(twenty: Path, opened: list[str]) -> None:
    root = twenty
    ask(root, BY_NAME)
    opened.clear()
    steps_of(root, 2, start=20)
    assert ask(root, BY_NAME)[-1] == (21, "ok", 21.0)
    assert sorted(opened) == ["00000020.0.main", "00000021.0.main"]
    steps_of(root, 18, start=22)
    assert [row[0] for row in ask(root, BY_NAME)] == list(range(40))
    opened.clear()
    assert [row[0] for row in ask(root, BY_NAME)] == list(range(40))
    assert opened == []


@pytest.mark.usefixtures("cache")
def test_what_is_kept_follows_the_attempts(twenty: Path) -> None:
    root = twenty
    ask(root, BY_NAME)
    put_attempt(root, 1, start_step=18)
    put_step(root, 18, [turn("again", reward=0.5)], attempt=1, first=90)
    assert ask(root, BY_NAME)[-2:] == [(17, "ok", 17.0), (18, "ok", 0.5)]
    assert ask(root, "SELECT sum(value) FROM rewards", all_attempts=True) == [(190.5,)]
    assert ask(root, "SELECT count(*) FROM rewards WHERE superseded", all_attempts=True) == [(2,)]


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_cache_that_is_damaged_is_read_anew(twenty: Path, cache: Path, damage: str, opened: list[str]) -> None:
    root = twenty
    expected = ask(root, BY_NAME)
    [file] = cache.glob("*/rewards.parquet")
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 0xFF
    if damage == "other":
        pq.write_table(pa.table({"rewards": [1]}), file)
    else:
        file.write_bytes(data if damage == "flipped" else data[:-20])
    opened.clear()
    assert ask(root, BY_NAME) == expected
    assert opened
    opened.clear()
    assert ask(root, BY_NAME) == expected
    assert opened == []


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, kept_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(kept.CACHE_VARIABLE, str(tmp_path / "file"))
    assert len(ask(kept_run, BY_NAME)) == len(ask(kept_run, BY_NAME)) == 20


@pytest.mark.usefixtures("cache")
def test_another_run_in_the_same_place_is_another_one(tmp_path: Path, twenty: Path) -> None:
    root = twenty
    ask(root, BY_NAME)
    root.rename(tmp_path / "before")
    put_run(root, run="r2")
    for step in range(20):
        put_step(root, step, [turn(f"t{step}", reward=-1.0)], first=step)
    assert {row[2] for row in ask(root, BY_NAME)} == {-1.0}


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
@pytest.mark.usefixtures("cache")
def test_a_column_is_never_null_because_it_was_not_thought_to_be_needed(kept_run: Path, query: str) -> None:
    run = open_run(kept_run)
    assert repr(run.sql(query).fetchall()) == repr(connect(run).execute(query).fetchall())
