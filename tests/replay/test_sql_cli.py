"""`rolltape sql`: where queries come from, how answers look, what is refused."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from replay_build import put_attempt, put_run, put_step, turn

from rolltape.replay import cli, open_run
from rolltape.replay.sql import VIEWS

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rolltape(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    """Call `rolltape sql`; exit code, standard output and standard error. `stdin` is what is piped in."""

    def run(*words: Any, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rolltape", "sql", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        printed = capfdbinary.readouterr()
        return code, printed.out.decode(), printed.err.decode()

    return run


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of values that formats get wrong."""
    root = put_run(tmp_path_factory.mktemp("odd") / "run")
    values = {"nan": math.nan, "inf": -math.inf, "null": None, "zero": 0.0}
    records = [
        turn(id, reward=value, metrics={'a "b", c': 1.5}, stop="", prompt="ü\x1b[31m\u2028,\n")
        for id, value in values.items()
    ]
    put_step(root, 0, records)
    return root


# -- where the query comes from


def test_a_query_is_the_last_word_a_file_or_what_is_piped_in(rolltape: Cli, demo_run: Path, tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("-- how many?\nSELECT count(*) AS n\nFROM traces;\n")
    expected = (0, '[\n{"n": 48}\n]\n', "")
    assert rolltape(demo_run, "SELECT count(*) AS n FROM traces", "--json") == expected
    assert rolltape(demo_run, "-f", tmp_path / "q.sql", "--format", "json") == expected
    assert rolltape(demo_run, "--json", stdin="SELECT count(*) AS n FROM traces") == expected


def test_several_runs_come_before_the_query(rolltape: Cli, demo_run: Path, odd: Path) -> None:
    query = "SELECT run, count(*) AS n FROM traces GROUP BY run ORDER BY run"
    code, out, _ = rolltape(demo_run, odd, query, "--json")
    assert (code, json.loads(out)) == (0, [{"run": "demo", "n": 48}, {"run": "run", "n": 4}])


def test_a_folder_with_a_blank_in_its_name_is_a_run(rolltape: Cli, demo_run: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_run, tmp_path / "select it")
    code, out, _ = rolltape(tmp_path / "select it", "--json", stdin="SELECT count(*) AS n FROM traces")
    assert (code, json.loads(out)) == (0, [{"n": 48}])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{run}",), "no query was given"),
        (("SELECT count(*) FROM traces",), "no run was given"),
        (("{run}x", "SELECT 1"), "does not exist"),
        (("{run}/commits", "SELECT 1"), r"holds no run.json"),
        (("{run}", "SELECT nothing FROM traces"), "rolltape sql --schema"),
        (("{run}", "COPY traces TO 'x'"), "a recorded run is only read"),
        (("{run}", "SELECT 1/'x'"), "Could not convert"),
        (("{run}", "SELECT CAST(task_name AS INTEGER) FROM traces"), "Could not convert"),
        (("{run}", "SELECT 1", "--format", "parquet"), "name a file with --out"),
        (("{run}", "SELECT 1", "--json", "--format", "csv"), "contradict"),
        (("{run}", "SELECT 1", "--out", "x.txt"), "ends in .txt"),
        (("{run}", "SELECT 1", "--out", "x.csv", "--format", "table"), "a table is printed"),
        (("{run}", "SELECT 1", "--out", "{run}/x.csv"), "lies inside the run"),
        (("{run}", "SELECT 1", "--split", "test"), "split 'test' was not recorded"),
        (("{run}", "SELECT 1", "--split", "train", "--eval"), "--eval reads every split"),
        (("{run}", "SELECT 1", "--attempt", "3"), "attempt 3 recorded nothing"),
        (("{run}", "SELECT 1", "-f", "nowhere.sql"), "nowhere.sql"),
        (("nowhere", "--schema"), "no view is called 'nowhere'"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_a_sentence(
    words: tuple[str, ...], said: str, rolltape: Cli, demo_run: Path
) -> None:
    code, out, err = rolltape(*(w.format(run=demo_run) for w in words))
    assert (code, bool(out)) == (2, "--json" in words)
    assert said in err
    assert "Traceback" not in err


# -- how answers look


@pytest.mark.parametrize(
    ("value", "form"),
    [("INTERVAL 1 DAY", "csv"), ("INTERVAL 1 DAY", "parquet"), ("MAP {[1]: 2}", "json"), ("DATE 'infinity'", "table")],
)
def test_a_value_that_a_form_has_no_place_for_is_refused(
    rolltape: Cli, demo_run: Path, tmp_path: Path, value: str, form: str
) -> None:
    to = [] if form == "table" else ["--out", str(tmp_path / f"answer.{form}")]
    code, _, said = rolltape(demo_run, f"SELECT {value} AS x", *to)
    assert code == 2
    assert "CAST" in said
    assert list(tmp_path.iterdir()) == []
    assert rolltape(demo_run, f"SELECT CAST({value} AS VARCHAR) AS x", *to)[0] == 0


def test_csv_tells_null_from_empty_text_and_zero(rolltape: Cli, odd: Path) -> None:
    query = "SELECT trace_id, reward, stop_condition, eval_name, metrics, error_types FROM traces ORDER BY trace_id"
    code, out, _ = rolltape(odd, query, "--format", "csv")
    assert code == 0
    assert out.splitlines()[1:] == [
        '"inf",-inf,"",,"{""a \\""b\\"", c"": 1.5}","[]"',
        '"nan",nan,"",,"{""a \\""b\\"", c"": 1.5}","[]"',
        '"null",,"",,"{""a \\""b\\"", c"": 1.5}","[]"',
        '"zero",0,"",,"{""a \\""b\\"", c"": 1.5}","[]"',
    ]
    assert json.loads(next(csv.DictReader(io.StringIO(out)))["metrics"]) == {'a "b", c': 1.5}


def test_json_is_what_every_reader_takes(rolltape: Cli, odd: Path) -> None:
    query = """
        SELECT trace_id, reward, reward, metrics, sum(num_tokens) OVER () AS total, task_prompt
        FROM traces ORDER BY trace_id
    """
    _, out, _ = rolltape(odd, query, "--json")
    rows = json.loads(out, parse_constant=pytest.fail)
    assert [row["reward"] for row in rows] == ["-inf", "nan", None, 0.0]
    assert [row["reward_1"] for row in rows] == ["-inf", "nan", None, 0.0]
    assert rows[0]["metrics"] == {'a "b", c': 1.5}
    assert rows[0]["total"] == 24
    assert rows[0]["task_prompt"] == "ü\x1b[31m\u2028,\n"
    assert "\x1b" not in out
    assert rolltape(odd, "SELECT 1 AS x WHERE false", "--json")[1] == "[]\n"


def test_files_hold_what_is_printed_and_appear_whole(rolltape: Cli, demo_run: Path, tmp_path: Path) -> None:
    query = "SELECT trace_id, reward, rewards, error_types, token_ids, sum(num_tokens) OVER () AS total FROM traces ORDER BY 1"
    for name in ("a.csv", "b.json"):
        code, out, err = rolltape(demo_run, query, "--out", tmp_path / "new" / name)
        assert (code, out, err) == (0, "", f"{tmp_path / 'new' / name}: 48 rows\n")
        assert (tmp_path / "new" / name).read_text() == rolltape(demo_run, query, "--format", name[2:])[1]
    assert rolltape(demo_run, query, "--out", tmp_path / "c.parquet")[0] == 0
    table = pq.read_table(tmp_path / "c.parquet")
    assert table.to_pylist() == open_run(demo_run).sql(query).to_arrow_table().to_pylist()
    assert str(table.schema.field("total").type) == "int64"
    code, _, err = rolltape(demo_run, query, "--out", tmp_path / "c.parquet")
    assert (code, "exists; choose another name, or set --overwrite" in err) == (2, True)
    assert rolltape(demo_run, "SELECT 1", "--out", tmp_path / "c.parquet", "--overwrite")[0] == 0
    assert pq.read_table(tmp_path / "c.parquet").num_rows == 1
    failing = "SELECT CAST(task_name AS INTEGER) FROM traces"
    assert rolltape(demo_run, failing, "--out", tmp_path / "c.parquet", "--overwrite")[0] == 2
    assert pq.read_table(tmp_path / "c.parquet").num_rows == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.parquet", "new"]


def test_a_table_shows_null_and_the_first_rows(rolltape: Cli, odd: Path, demo_run: Path) -> None:
    _, out, _ = rolltape(odd, "SELECT trace_id, reward FROM traces ORDER BY 1")
    assert [line.split("│")[-1].strip() for line in out.splitlines()[2:]] == ["-inf", "nan", "NULL", "0", "4 rows"]
    _, out, _ = rolltape(demo_run, "SELECT trace_id FROM traces", "--rows", 3)
    assert out.splitlines()[-1] == "the first 3 of 48 rows; --rows 0 shows all"
    assert len(out.splitlines()) == 6
    assert len(rolltape(demo_run, "SELECT trace_id FROM traces", "--rows", 0)[1].splitlines()) == 51
    assert "\x1b" not in rolltape(odd, "SELECT task_prompt FROM traces")[1]


def test_a_row_that_is_too_wide_is_shown_column_by_column(rolltape: Cli, demo_run: Path) -> None:
    _, out, _ = rolltape(demo_run, "FROM traces LIMIT 2")
    assert [line.rstrip() for line in out.splitlines() if line.startswith("row ")] == ["row 0", "row 1"]
    assert max(map(len, out.splitlines())) <= 160
    assert all(name in out for name in ("node_finish_reason", "recomputed_logprobs"))


def test_what_is_left_out_is_said_on_standard_error(rolltape: Cli, tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn("a")])
    put_step(tmp_path, 1, [turn("b")], first=5)
    put_attempt(tmp_path, 1, start_step=1)
    put_step(tmp_path, 0, [turn("e")], split="eval")
    query = "SELECT count(*) AS n, count(*) FILTER (superseded) AS old FROM traces"
    code, out, err = rolltape(tmp_path, query, "--json")
    assert (code, json.loads(out)) == (0, [{"n": 1, "old": 0}])
    assert f"{tmp_path.name}: the splits eval are left out; --eval reads them too, --split chooses.\n" in err
    assert f"{tmp_path.name}: 1 part that a newer attempt took back: left out; --all-attempts reads such too.\n" in err
    code, out, err = rolltape(tmp_path, query, "--json", "--all-attempts", "--eval")
    assert (code, json.loads(out), err) == (0, [{"n": 3, "old": 1}], "")
    assert json.loads(rolltape(tmp_path, query, "--json", "--attempt", 0, "--split", "train")[1]) == [
        {"n": 2, "old": 1}
    ]


# -- what there is


def test_the_schema_tells_every_view_column_and_example(rolltape: Cli) -> None:
    code, out, _ = rolltape("--schema", "--json")
    told = json.loads(out)["views"]
    assert (code, [view["name"] for view in told]) == (0, list(VIEWS))
    for view in told:
        assert view == VIEWS[view["name"]].to_dict()
    for view in VIEWS.values():
        code, out, _ = rolltape("--schema", view.name)
        assert code == 0
        assert all(example.question in out for example in view.examples)


def test_the_schema_is_a_line_a_view_until_one_is_named(rolltape: Cli) -> None:
    code, out, _ = rolltape("--schema")
    begins = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert (code, [word for word in begins if word in VIEWS]) == (0, list(VIEWS))
    assert len(begins) < 3 * len(VIEWS)
    assert "rolltape sql --schema NAME" in out


def test_lists_of_tables_hold_the_views_and_nothing_else(rolltape: Cli, demo_run: Path) -> None:
    for query in ("SHOW TABLES ", "SELECT view_name FROM duckdb_views() WHERE NOT internal AND schema_name = 'main'"):
        code, out, _ = rolltape(demo_run, query, "--json")
        assert (code, sorted(next(iter(row.values())) for row in json.loads(out))) == (0, sorted(VIEWS)), query
    code, out, _ = rolltape(demo_run, "SELECT count(*) AS n FROM query('FROM ' || 'steps')", "--json")
    assert (code, json.loads(out)) == (0, [{"n": 3}])


def test_a_query_may_begin_with_a_comment(rolltape: Cli, demo_run: Path) -> None:
    for query in ("-- how many?\nSELECT count(*) AS n FROM traces", "--how=many\nSELECT count(*) AS n FROM traces"):
        code, out, _ = rolltape(demo_run, query, "--json")
        assert (code, json.loads(out)) == (0, [{"n": 48}])
    code, _, err = rolltape(demo_run, "-- how many? SELECT count(*) FROM traces")
    assert (code, "goes to the end of its line" in err) == (2, True)
    for word in ("--fromat", "--spilt=train", "-x"):
        code, _, err = rolltape(demo_run, "SELECT 1", word)
        assert (code, f"{word} is no option of `rolltape sql`" in err) == (2, True)


def test_a_view_is_told_apart_from_a_folder_of_its_name(
    rolltape: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "samples").mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, _ = rolltape("--schema", "samples")
    assert (code, out.startswith("samples\n")) == (0, True)


def test_the_schema_of_one_view(rolltape: Cli, demo_run: Path) -> None:
    for words in (("--schema", "errors"), (demo_run, "errors", "--schema")):
        code, out, _ = rolltape(*words)
        assert code == 0
        assert out.startswith("errors\n")
        assert "traceback" in out
        assert "weight_version" not in out


def test_a_statement_of_one_word_is_refused_for_what_it_is(
    rolltape: Cli, demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("begin", "BEGIN;", "commit", "checkpoint", "vacuum", "analyze"):
        code, _, err = rolltape(demo_run, word)
        assert (code, "is refused: a recorded run is only read" in err) == (2, True), word
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo_run, "begin")
    assert rolltape("begin", "--json", stdin="SELECT count(*) AS n FROM traces")[:2] == (0, '[\n{"n": 48}\n]\n')


# -- the prompt


def test_without_a_query_a_terminal_gets_a_prompt(demo_run: Path) -> None:
    """Questions over several lines, an error in between, views, the end."""
    lines = [
        "SELECT count(*) AS n",
        "FROM traces;",
        "SELECT nonsense;",
        ".schema errors",
        ".help",
        "help",
        "SELECT 41 + 1 AS x;",
        "exit;",
    ]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rolltape.replay.cli", "sql", str(demo_run)]
    asked = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    os.close(theirs)
    os.write(ours, ("\n".join(lines) + "\n").encode())
    out, _ = asked.communicate(timeout=60)
    os.close(ours)
    assert asked.returncode == 0
    assert "48" in out
    assert "42" in out
    assert "nonsense" in out
    assert "One error of a trace" in out


# -- Ctrl-C

LONG = {
    "a cross join": "SELECT sum(a.num_tokens) FROM traces a, traces b, traces c, traces d, traces e, traces f",
    "a recursion": "WITH RECURSIVE x AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM x) SELECT max(a) FROM x",
    "no end of rows": "SELECT a.range FROM range(100000000000) a, range(100000) b WHERE a.range + b.range < 0",
    "a pivot": "PIVOT (SELECT range % 3 AS k FROM range(100000000000)) ON k USING count(*)",
}


def asked(*words: object, stdin: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rolltape.replay.cli", "sql", *map(str, words)]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def is_at_work(process: subprocess.Popen[str]) -> bool:
    """Wait until DuckDB is loaded, and a second more; whether the process still runs then."""
    for _ in range(600):
        if "duckdb" in Path(f"/proc/{process.pid}/maps").read_text():
            break
        time.sleep(0.1)
    time.sleep(1)
    return process.poll() is None


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(("name", "form"), [*((name, "table") for name in LONG), ("a cross join", "csv")])
def test_ctrl_c_ends_a_query(demo_run: Path, name: str, form: str) -> None:
    process = asked(demo_run, LONG[name], "--format", form)
    assert is_at_work(process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, "Traceback" in out) == (130, False)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_ctrl_c_ends_a_question_of_the_prompt_and_not_the_prompt(demo_run: Path) -> None:
    ours, theirs = pty.openpty()
    process = asked(demo_run, stdin=theirs)
    os.close(theirs)
    for query in LONG.values():
        os.write(ours, f"{query};\n".encode())
        assert is_at_work(process)
        process.send_signal(signal.SIGINT)
    os.write(ours, b"SELECT 41 + 1 AS x;\nexit\n")
    out, _ = process.communicate(timeout=20)
    os.close(ours)
    assert (process.returncode, out.count("stopped"), "42" in out) == (0, len(LONG), True)
