"""SQL over runs: which rows a query sees, where they come from, and what it may not do."""

from __future__ import annotations

import gc
import math
import os
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_build import Record, put_attempt, put_part, put_run, put_step, turn
from sql_build import BY_NAME, ask, steps_of, without_scores

from rolltape.replay import open_run
from rolltape.replay.housekeeping.compact import compact
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.sql import VIEWS, Selection, connect, sql
from rolltape.replay.sql.connection import ask as asking
from rolltape.schema import ROW, BadInput, Damaged, Step, encode
from rolltape.schema.commits import Commit
from rolltape.schema.parquet import Written, put_once
from rolltape.schema.paths import Part, RunPaths

NAN, INF = math.nan, math.inf


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- the views


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_columns_it_declares(name: str, demo_run: Path) -> None:
    described = connect(open_run(demo_run)).execute(f"DESCRIBE {name}").fetchall()
    assert [(column, kind) for column, kind, *_ in described] == [(c.name, c.type) for c in VIEWS[name].columns]
    assert all(c.meaning for c in VIEWS[name].columns)


def test_every_column_of_a_row_is_in_the_view_of_traces() -> None:
    assert {f.name for f in ROW.fields} <= {c.name for c in VIEWS["traces"].columns}


@pytest.mark.parametrize("name", VIEWS)
def test_every_column_of_every_view_reads(name: str, demo_run: Path) -> None:
    found = open_run(demo_run).sql(f"SELECT * FROM {name}").to_arrow_table()
    assert found.num_rows > 0 or name == "errors"


def test_an_answer_outlives_the_run_it_was_asked_of(demo_run: Path) -> None:
    answer = open_run(demo_run).sql("SELECT count(*) FROM nodes")
    gc.collect()
    assert answer.fetchall() == open_run(demo_run).sql("SELECT sum(num_nodes) FROM traces").fetchall()


def test_parameters_are_values_whatever_is_in_them(tmp_path: Path) -> None:
    put_step(put_run(tmp_path), 0, [turn("a", rewards={"it's; DROP": 0.5})])
    run = open_run(tmp_path)
    assert run.sql("SELECT value FROM rewards WHERE name = ?", ["it's; DROP"]).fetchall() == [(0.5,)]
    assert run.sql("SELECT value FROM rewards WHERE name = $n", {"n": "other"}).fetchall() == []


@pytest.mark.parametrize(
    "condition",
    [
        "> 0.55",
        "< 0.55",
        "= 0.5",
        ">= 'inf'::DOUBLE",
        "IS NULL",
        "= 'nan'::DOUBLE",
        "<> 0.5",
        "BETWEEN 0 AND 'nan'::DOUBLE",
    ],
)
def test_filters_in_the_face_of_nan_say_what_they_say_in_memory(tmp_path: Path, condition: str) -> None:
    values = [0.5, NAN, 0.1, 0.6, None, NAN, -1.0, INF, 0.55, -INF, 0.56, None, -0.0]
    put_run(tmp_path / "run")
    for step in range(2):
        records = [turn(f"{step}-{i}", reward=v) for i, v in enumerate(values)]
        put_step(tmp_path / "run", step, records, first=100 * step)
    run = open_run(tmp_path / "run")
    with duckdb.connect() as memory:
        memory.execute("CREATE TABLE t(trace_id VARCHAR, reward DOUBLE)")
        memory.executemany(
            "INSERT INTO t VALUES (?, ?)", [(f"{s}-{i}", v) for s in (0, 1) for i, v in enumerate(values)]
        )
        expected = memory.execute(f"SELECT trace_id FROM t WHERE reward {condition} ORDER BY 1").fetchall()
    query = f"SELECT trace_id FROM traces WHERE reward {condition} ORDER BY 1"
    assert run.sql(query).fetchall() == expected
    assert connect(run).execute(query).fetchall() == expected
    assert expected


# -- which rows


def stepped_back(root: Path) -> Path:
    """Attempt 0 records steps 0 to 3; attempt 1 starts again at step 2 and has recorded that one."""
    steps_of(put_run(root), 4)
    put_attempt(root, 1, start_step=2)
    put_step(root, 2, [turn("new2")], attempt=1, first=50)
    return root


def test_the_newest_attempt_is_asked_unless_told_otherwise(tmp_path: Path) -> None:
    root = stepped_back(tmp_path)
    query = "SELECT trace_id, attempt, superseded FROM traces ORDER BY step, attempt"
    assert ask(root, query) == [("t0", 0, False), ("t1", 0, False), ("new2", 1, False)]
    assert ask(root, query, all_attempts=True) == [
        ("t0", 0, False),
        ("t1", 0, False),
        ("t2", 0, True),
        ("new2", 1, False),
        ("t3", 0, True),
    ]
    assert ask(root, query, attempt=0) == [("t0", 0, False), ("t1", 0, False), ("t2", 0, True), ("t3", 0, True)]
    for view in ("steps", "groups", "samples", "rewards"):
        assert ask(root, f"SELECT count(*), count(*) FILTER (superseded) FROM {view}", all_attempts=True) == [(5, 2)]
    with pytest.raises(BadInput, match="attempt 7 recorded nothing"):
        ask(root, query, attempt=7)
    with pytest.raises(BadInput, match="choose one of the two"):
        ask(root, query, attempt=0, all_attempts=True)


def test_evaluations_are_asked_by_name_or_all_together(tmp_path: Path) -> None:
    put_step(put_run(tmp_path), 0, [turn("a")])
    put_step(tmp_path, 0, [turn("e")], split="eval")
    query = "SELECT split, trace_id FROM traces ORDER BY 1"
    assert ask(tmp_path, query) == [("train", "a")]
    assert ask(tmp_path, query, split="eval") == [("eval", "e")]
    assert (
        ask(tmp_path, query, split=None)
        == ask(tmp_path, query, split=["train", "eval"])
        == [("eval", "e"), ("train", "a")]
    )
    with pytest.raises(BadInput, match="split 'test' was not recorded; recorded are train, eval"):
        ask(tmp_path, query, split="test")


def test_several_runs_are_told_apart_by_as_much_of_their_path_as_it_takes(tmp_path: Path) -> None:
    roots = [tmp_path / "a" / "first", tmp_path / "b" / "first"]
    for i, root in enumerate(roots):
        steps_of(put_run(root, run=f"id{i}"), 1 + i)
    runs = [open_run(root) for root in roots]
    query = "SELECT run, run_id, count(*), sum(reward) FROM traces GROUP BY ALL ORDER BY ALL"
    assert sql(runs, query).fetchall() == [("a/first", "id0", 1, 0.0), ("b/first", "id1", 2, 1.0)]
    assert sql(runs[1], query).fetchall() == [("first", "id1", 2, 1.0)]
    for view in ("steps", "groups", "samples", "nodes", "rewards"):
        assert sql(runs, f"SELECT count(DISTINCT run) FROM {view}").fetchall() == [(2,)]
    with pytest.raises(BadInput, match="given twice"):
        sql([runs[0], open_run(roots[0])], query)
    with pytest.raises(BadInput, match="no run was given"):
        sql([], query)


def test_copies_of_a_run_are_joined_each_with_itself(tmp_path: Path) -> None:
    """A run that was copied, or scored again, has the trace ids of the other."""
    for name, reward in (("a", 0.0), ("b", 1.0)):
        put_step(put_run(tmp_path / name), 0, [turn("t", reward=reward)])
    runs = [open_run(tmp_path / name) for name in "ab"]
    query = "SELECT run, reward, value FROM traces JOIN rewards USING (run, trace_id) ORDER BY 1"
    assert sql(runs, query).fetchall() == [("a", 0.0, 0.0), ("b", 1.0, 1.0)]
    assert sql(runs, "SELECT run, reward FROM samples ORDER BY 1").fetchall() == [("a", 0.0), ("b", 1.0)]


def test_only_the_files_of_the_steps_asked_for_are_opened(twenty: Path, opened: list[str]) -> None:
    root = without_scores(twenty)
    for step in range(20):
        if step != 7:
            path = RunPaths(root).parquet(Part("train", step, 0, "main"))
            path.write_bytes(b"x" * path.stat().st_size)  # as long as it was, and no Parquet
    assert ask(root, "SELECT trace_id, len(token_ids) FROM traces WHERE step = 7") == [("t7", 6)]
    assert ask(root, "SELECT sum(reward) FROM traces WHERE step > 6 AND step < 8") == [(7.0,)]
    assert ask(root, "SELECT sum(tokens) FROM nodes WHERE step = 7") == [(6,)]
    assert opened == []
    with pytest.raises(Damaged, match="does not read back"):
        ask(root, "SELECT sum(reward) FROM traces")


def test_a_damaged_commit_refuses_the_query(tmp_path: Path) -> None:
    root = steps_of(put_run(tmp_path), 3)
    RunPaths(root).commit(Part("train", 1, 0, "main")).write_bytes(b"{")
    with pytest.raises(Damaged, match=r"00000001\.0\.main\.json"):
        ask(root, "SELECT count(*) FROM steps")


@pytest.mark.parametrize("query", ["SELECT count(*) FROM nodes", "SELECT sum(num_tokens) FROM traces"])
def test_a_file_that_is_missing_is_named(tmp_path: Path, query: str) -> None:
    root = steps_of(put_run(tmp_path / "run"), 3)
    RunPaths(root).parquet(Part("train", 1, 0, "main")).unlink()
    with pytest.raises(Damaged, match=r"00000001\.0\.main\.parquet"):
        ask(root, query)


def test_flipped_bits_are_found_and_not_averaged(tmp_path: Path) -> None:
    root = without_scores(steps_of(put_run(tmp_path / "run"), 2))
    path = RunPaths(root).parquet(Part("train", 1, 0, "main"))
    for name in ("num_tokens", "logprobs.list.element"):
        group = pq.read_metadata(path).row_group(0)
        [chunk] = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == name]
        data = bytearray(path.read_bytes())
        data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
        path.write_bytes(data)
    with pytest.raises(Damaged, match="page integrity"):
        ask(root, "SELECT avg(num_tokens) FROM traces")
    with pytest.raises(duckdb.Error, match="page integrity"):
        ask(root, "SELECT avg(logprob) FROM tokens")


# -- other versions of the schema


def put_version(root: Path, step: int, record: Record, *, without: str | None = None, added: str | None = None) -> None:
    """A step whose file lacks a column of ours, or has one more."""
    part = Part("train", step, 0, "main")
    put_part(root, part, encode([record]), [], [], Step(step=step))
    path = RunPaths(root).parquet(part)
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    if without:
        table = table.drop_columns([without])
    if added:
        table = table.append_column(added, pa.array(["new"]))
    pq.write_table(table.replace_schema_metadata(metadata), path)
    commit_path = RunPaths(root).commit(part)
    old = Commit.read(commit_path)
    commit_path.unlink()
    file = Written(old.file.rows, path.stat().st_size, f"{step:064d}")
    new = Commit(part=part, file=file, groups=[], step=old.step, fingerprint=f"other-{without}-{added}", written_at=1.0)
    put_once(commit_path, new.to_bytes())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_files_of_earlier_and_later_minor_versions_are_read_together(tmp_path: Path, order: tuple[int, ...]) -> None:
    root = put_run(tmp_path / "run")
    makers = [
        lambda step: put_step(root, step, [turn("ours", stop="ended")]),
        lambda step: put_version(root, step, turn("earlier", stop="ended"), without="stop_condition"),
        lambda step: put_version(root, step, turn("later", stop="ended"), added="mood"),
    ]
    for step, which in enumerate(order):
        makers[which](step)
    query = "SELECT trace_id, stop_condition FROM traces ORDER BY 1"
    assert ask(root, query) == [("earlier", None), ("later", "ended"), ("ours", "ended")]
    assert connect(open_run(root)).execute(query).fetchall() == ask(root, query)
    assert ask(root, "SELECT trace_id, mood, len(token_ids) FROM traces ORDER BY 1") == [
        ("earlier", None, 6),
        ("later", "new", 6),
        ("ours", None, 6),
    ]
    assert open_run(root).sql("FROM traces").columns[-1] == "mood"


# -- files that were merged or pruned


def test_answers_stay_what_they_were_when_files_are_merged(twenty: Path) -> None:
    queries = (
        BY_NAME,
        "SELECT step, trace_id, len(token_ids) FROM traces WHERE step = 7",
        "SELECT sum(tokens), count(*) FROM nodes WHERE step BETWEEN 3 AND 12",
        "SELECT count(*), avg(logprob) FROM tokens",
        "SELECT count(*) FROM samples",
    )
    before = [ask(twenty, query) for query in queries]
    compact(open_run(twenty))
    prune(open_run(twenty), Wish(replaced=True))
    assert len(list(twenty.glob("traces/train/*.parquet"))) < 20
    assert [ask(twenty, query) for query in queries] == before


def test_what_was_pruned_is_null_and_said(twenty: Path) -> None:
    prune(open_run(twenty), Wish(tokens=True, before=5))
    answer = asking(open_run(twenty), "SELECT count(*), count(token_id) FROM tokens")
    assert answer.relation.fetchall() == [(120, 90)]
    [note] = answer.notes
    assert "of 5 parts were pruned, and are null" in note


# -- read-only


REFUSED = [
    "COPY (SELECT 1) TO '{file}' (FORMAT parquet, USE_TMP_FILE false)",
    "WITH x AS (COPY (SELECT 1) TO '{file}' (FORMAT csv, USE_TMP_FILE false)) SELECT 1",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)",
    "COPY (SELECT 1) TO '{folder}/new.csv'",
    "EXPORT DATABASE '{folder}/new'",
    "ATTACH '{folder}/new.db'",
    "CREATE TABLE t AS SELECT 1",
    "CREATE OR REPLACE TEMP VIEW traces AS SELECT 1",
    "INSERT INTO traces VALUES (1)",
    "WITH x AS (INSERT INTO traces VALUES (1) RETURNING *) SELECT * FROM x",
    "DELETE FROM internal.rows",
    "CREATE VIEW internal.rows AS SELECT 1",
    "DROP VIEW traces",
    "SET enable_external_access = true",
    "PRAGMA enable_profiling",
    "INSTALL httpfs",
    "LOAD '{folder}/evil.so'",
    "CALL enable_logging()",
    "USE memory",
    "BEGIN",
    "SELECT * FROM read_parquet('{file}')",
    "SELECT * FROM '{file}'",
    "SELECT * FROM read_text('/etc/hostname')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM read_csv('https://example.invalid/x.csv')",
    "SELECT * FROM a_python_variable",
    "SELECT 1; SELECT 2",
    "",
    "-- nothing",
    "SELEC 1",
]


def test_a_query_reads_the_views_and_nothing_else_and_writes_nothing(
    tmp_path: Path, kept_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_python_variable = pa.table({"x": [1]})
    file = RunPaths(kept_run).parquet(Part("train", 0, 0, "main"))
    monkeypatch.chdir(tmp_path)
    before = contents(kept_run)
    run = open_run(kept_run)
    for query in REFUSED:
        with pytest.raises((BadInput, duckdb.Error)):
            pytest.fail(f"{query}: {run.sql(query.format(file=file, folder=kept_run)).fetchall()}")
    assert contents(kept_run) == before
    assert list(tmp_path.iterdir()) == []
    assert a_python_variable.num_rows == 1


@pytest.mark.parametrize("ask_", ["ask", "connect"])
def test_planning_a_query_opens_no_file(ask_: str, tmp_path: Path) -> None:
    put_step(put_run(tmp_path / "run"), 0, [turn("a")])
    run = open_run(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe.csv")  # whoever opens it waits for ever
    query = f"SELECT * FROM read_csv('{tmp_path / 'pipe.csv'}')"
    with pytest.raises((BadInput, duckdb.PermissionException)):
        run.sql(query) if ask_ == "ask" else connect(run).execute(query)


def test_refusals_are_sentences_that_say_what_is_expected(tmp_path: Path) -> None:
    root = steps_of(put_run(tmp_path), 1)
    with pytest.raises(BadInput, match=r"COPY is refused: a recorded run is only read\. Expected a query"):
        ask(root, "COPY traces TO 'x.csv'")
    with pytest.raises(BadInput, match="wants what it may not have"):
        ask(root, "SELECT * FROM read_text('/etc/hostname')")
    with pytest.raises(BadInput, match=r"(?s)rewrd.*rolltape sql --schema"):
        ask(root, "SELECT rewrd FROM traces")
    with pytest.raises(BadInput, match="0 statements were found; expected one query"):
        ask(root, "")
    with pytest.raises(BadInput, match=r"the query is no UTF-8 text \(surrogates not allowed at character 8\)"):
        ask(root, "SELECT '\udcff'")


def test_several_threads_ask_at_once(kept_run: Path) -> None:
    run = open_run(kept_run)
    answers: list[Any] = []

    def work() -> None:
        answers.append((run.sql(BY_NAME).fetchall(), run.sql("SELECT sum(len(content)) FROM nodes").fetchall()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert all(answer == answers[0] for answer in answers)


def test_paths_of_any_characters_are_read(tmp_path: Path) -> None:
    root = steps_of(put_run(tmp_path / "it's [1] *? a=1 ü"), 3)
    assert ask(root, "SELECT run, sum(reward), sum(len(token_ids)) FROM traces GROUP BY run") == [(root.name, 3.0, 18)]


def test_selections_are_of_this_or_that(tmp_path: Path) -> None:
    put_run(tmp_path)
    with pytest.raises(TypeError):
        ask(tmp_path, "FROM traces", splits="train")
    assert Selection().split == "train"


def test_an_unlocked_connection_joins_tables_of_ones_own(tmp_path: Path) -> None:
    root = steps_of(put_run(tmp_path), 2)
    connection = connect(open_run(root), locked=False)
    connection.register("mine", pa.table({"trace_id": ["t1"], "label": ["good"]}))
    assert connection.execute("SELECT reward, label FROM traces JOIN mine USING (trace_id)").fetchall() == [
        (1.0, "good")
    ]
