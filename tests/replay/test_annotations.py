"""Annotations: what fits a run and what does not, how it is stored, how it is asked for."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from replay_build import Record, group, put_attempt, put_run, put_step, reply, said, trace, turn

from rolltape.replay import open_run
from rolltape.replay.annotations import annotations_of
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.run import Run
from rolltape.replay.sql import sql
from rolltape.replay.verification.verify import verify
from rolltape.schema import BadInput, Damaged
from rolltape.schema.errors import RunConflict

MODULE = sys.modules[annotations_of.__module__]
Cli = Callable[..., tuple[int, str, str]]
NAN = math.nan


def two_turns(id: str) -> Record:
    """Nodes of 2, 1 + 2, 2 and 1 + 1 tokens: 9 stored, 3 of them sampled, 7 from the first sampled one on minus the header."""
    return trace(
        said(None, [1, 2]),
        reply(0, [3], [4, 5], [-0.5, -1.0]),
        said(1, [6, 7], "17", role="tool"),
        reply(2, [8], [9], [-2.0]),
        id=id,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps: trace `a` of two turns and `b` of one, then `c`, and one of an evaluation. Not to be written to."""
    root = put_run(tmp_path_factory.mktemp("recorded") / "run")
    put_step(root, 0, [two_turns("a"), turn("b", idx=1)])
    put_step(root, 1, [two_turns("c")], groups=[group([two_turns("c")], 2)], first=5)
    put_step(root, 0, [turn("e")], groups=[group([turn("e")], 3)], split="eval")
    return root


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Run:
    """That run, for oneself."""
    return open_run(shutil.copytree(recorded, tmp_path / "run"))


def asked(run: Run, query: str, **selection: Any) -> list[tuple[Any, ...]]:
    return run.sql(query, **selection).fetchall()


# -- by trace, node, token


def test_values_of_traces_are_joined_and_those_without_one_stay_without(run: Run) -> None:
    made = run.annotate("labels", {"trace_id": ["c", "a"], "label": ["good", None], "weight": [0.5, NAN]})
    assert (made.name, made.version, made.level, made.traces, made.written.rows) == ("labels", 0, "trace", 2, 2)
    query = "SELECT trace_id, label, weight FROM traces LEFT JOIN annotation_labels USING (run, trace_id) ORDER BY 1"
    assert repr(asked(run, query)) == repr([("a", None, NAN), ("b", None, None), ("c", "good", 0.5)])
    assert asked(run, "SELECT run, trace_id FROM annotation_labels ORDER BY 2") == [("run", "a"), ("run", "c")]


def test_values_of_nodes(run: Run) -> None:
    run.annotate("judged", [{"trace_id": "a", "node": 3, "ok": True}, {"trace_id": "a", "node": 1, "ok": False}])
    query = "SELECT node, role, ok FROM nodes JOIN annotation_judged USING (run, trace_id, node) ORDER BY node"
    assert asked(run, query) == [(1, "assistant", False), (3, "assistant", True)]


def test_values_of_tokens(run: Run) -> None:
    run.annotate("trainer", {"trace_id": ["a", "a", "b"], "position": [8, 3, 3], "logprob": [-2.5, -0.25, -0.75]})
    query = """
        SELECT trace_id, position, token_id, t.logprob, x.logprob
        FROM tokens t JOIN annotation_trainer x USING (run, trace_id, position) ORDER BY 1, 2
    """
    assert asked(run, query) == [("a", 3, 4, -0.5, -0.25), ("a", 8, 9, -2.0, -2.5), ("b", 3, 4, -0.25, -0.75)]


STORED = [None, None, None, 1.0, 2.0, None, None, None, 3.0]
"""Of trace `a`: what was sampled stands at places 3, 4 and 8."""


@pytest.mark.parametrize(
    ("given", "over", "values", "stored"),
    [
        (
            "sampled",
            "tokens",
            {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 3.0]},
            {"a": STORED, "b": [None] * 3 + [1.0, 2.0, 3.0]},
        ),
        ("tokens", "tokens", {"a": STORED}, {"a": STORED}),
        (
            "response",
            "tokens",
            {"c": [1.0, 2.0, None, NAN, 5.0, 6.0], "b": [7.0, 8.0, 9.0], "a": None},
            {"a": None, "b": [None] * 3 + [7.0, 8.0, 9.0], "c": [None] * 3 + [1.0, 2.0, None, NAN, 5.0, 6.0]},
        ),
        ("nodes", "nodes", {"a": ["w", "x", "y", "z"], "b": ["u", "v"]}, {"a": ["w", "x", "y", "z"], "b": ["u", "v"]}),
        ("turns", "nodes", {"b": [7], "a": [5, 6]}, {"a": [None, 5, None, 6], "b": [None, 7]}),
    ],
)
def test_lists_stand_beside_the_lists_of_their_traces(
    run: Run, given: str, over: str, values: dict[str, Any], stored: dict[str, Any]
) -> None:
    made = run.annotate(
        "x", {"trace_id": list(values), "list": list(values.values()), "plain": list(range(len(values)))}
    )
    assert [(c.name, c.over, c.given) for c in made.columns] == [("list", over, given), ("plain", None, None)]
    found = dict(asked(run, "SELECT trace_id, list FROM annotation_x"))
    assert repr(dict(sorted(found.items()))) == repr(dict(sorted(stored.items())))
    assert dict(asked(run, "SELECT trace_id, plain FROM annotation_x")) == {t: i for i, t in enumerate(values)}


def test_lists_of_many_traces_in_any_order_are_put_where_they_belong(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    root = put_run(tmp_path)
    given: dict[str, list[float]] = {}
    for step in range(4):
        records = []
        for i in range(6):
            id, n = f"{step}{i}", int(rng.integers(1, 30))
            given[id] = rng.normal(size=n).tolist()
            records.append(trace(said(None, [1] * (i + 1)), reply(0, [3], range(n)), said(1, [7] * i), id=id, idx=i))
        put_step(root, step, records, first=100 * step)
    run = open_run(root)
    ids = rng.permutation(sorted(given)).tolist()[:20]
    run.annotate("lp", {"trace_id": ids, "lp": [given[i] for i in ids]})
    pairs = asked(run, "SELECT trace_id, lp, sampled FROM traces JOIN annotation_lp USING (run, trace_id)")
    assert sorted(p[0] for p in pairs) == sorted(ids)
    for id, values, sampled in pairs:
        assert [v is not None for v in values] == sampled
        assert [v for v in values if v is not None] == given[id]


# -- the example: the trainer's log-probs against those of the engine

BY_LISTS = """
SELECT step, avg(abs(d)) AS mean_abs, avg(exp(d) - 1 - d) AS k3, count(*) AS tokens
FROM (SELECT step, CAST(unnest(a.logprobs) AS DOUBLE) - CAST(unnest(t.logprobs) AS DOUBLE) AS d
      FROM traces t JOIN annotation_trainer a USING (run, trace_id))
WHERE d IS NOT NULL GROUP BY step ORDER BY step
"""
BY_TOKENS = """
SELECT step, avg(abs(d)) AS mean_abs, avg(exp(d) - 1 - d) AS k3, count(*) AS tokens
FROM (SELECT step, a.logprob - CAST(t.logprob AS DOUBLE) AS d
      FROM tokens t JOIN annotation_by_token a USING (run, trace_id, position))
WHERE d IS NOT NULL GROUP BY step ORDER BY step
"""


def test_the_mismatch_of_trainer_and_engine_is_what_numpy_says(demo_run: Path, tmp_path: Path) -> None:
    """Mean absolute difference, and the estimate of the divergence that is never negative: exp(d) - 1 - d."""
    run = open_run(shutil.copytree(demo_run, tmp_path / "demo"))
    rng = np.random.default_rng(0)
    expected: dict[int, list[float]] = {}
    ids, responses, long = [], [], []
    for row in run.table(columns=["trace_id", "step", "sampled", "logprobs"]).to_pylist():
        theirs = [0.0 if x is None else x + rng.normal() / 10 for x in row["logprobs"]]
        ids.append(row["trace_id"])
        responses.append(theirs[row["sampled"].index(True) :])
        long += [(row["trace_id"], i, x) for i, x in enumerate(theirs)]
        expected.setdefault(row["step"], []).extend(
            b - a for a, b in zip(row["logprobs"], theirs, strict=True) if a is not None
        )
    run.annotate("trainer", {"trace_id": ids, "logprobs": responses})
    columns = dict(zip(("trace_id", "position", "logprob"), map(list, zip(*long, strict=True)), strict=True))
    run.annotate("by_token", columns)
    for query in (BY_LISTS, BY_TOKENS):
        found = asked(run, query)
        assert [row[0] for row in found] == sorted(expected)
        for step, mean_abs, k3, tokens in found:
            d = np.array(expected[step])
            assert tokens == len(d)
            assert mean_abs == pytest.approx(np.abs(d).mean(), rel=1e-12)
            assert k3 == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-9)


def test_nan_in_a_csv_is_a_number_and_an_empty_field_none(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("trace_id,v,all_nan\na,NaN,nan\nb,,nan\nc,-inf,nan\n")
    run.annotate("x", file)
    found = asked(run, "SELECT v, all_nan FROM annotation_x ORDER BY trace_id")
    assert repr(found) == repr([(NAN, NAN), (None, NAN), (-math.inf, NAN)])


# -- what does not fit


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([2**70], "dict is no table"),
        (pa.array([{}], pa.struct([])), "of a type that Parquet does not hold"),
        (pa.array([None], pa.month_day_nano_interval()), "of a type that Parquet does not hold"),
        (pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())), "'v' holds what SQL does not read"),
        (pa.array([[1.0] * 3], pa.list_view(pa.float64())), "'v' is a list_view"),
    ],
)
def test_what_could_not_be_stored_and_asked_for_is_refused_before_anything_is_written(
    run: Run, values: Any, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        run.annotate("x", {"trace_id": ["a"], "v": values})
    assert not run.paths.annotations.exists()


def test_a_csv_in_another_encoding_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes("trace_id,v\na,gr\u00fcn\n".encode("latin-1"))
    with pytest.raises(BadInput, match="'v' is no text in UTF-8"):
        run.annotate("x", file)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"trace_id": ["a", "x", "y"], "v": [1, 2, 3]}, "2 traces are not in the run: x, y; expected ids"),
        ({"trace_id": ["a", "a"], "v": [1, 2]}, "1 key comes more than once, such as trace_id a"),
        ({"trace_id": ["a", None], "v": [1, 2]}, "1 row without a trace_id"),
        ({"trace_id": ["a"], "node": [4], "v": [1]}, "trace a: there is no node 4; it has 4 nodes, counted from 0"),
        ({"trace_id": ["a"], "node": [-1], "v": [1]}, "no node -1"),
        ({"trace_id": ["a"], "node": [None], "v": [1]}, "no node None"),
        ({"trace_id": ["a"], "node": [0.5], "v": [1]}, "the column 'node' of double is no int64"),
        ({"trace_id": ["a", "a"], "node": [1, 1], "v": [1, 2]}, "such as trace_id a, node 1"),
        ({"trace_id": ["b"], "position": [6], "v": [1]}, "trace b: there is no position 6; it has 6 tokens"),
        ({"trace_id": ["a"], "node": [0], "position": [0], "v": [1]}, "take one away"),
        (
            {"trace_id": ["a"], "v": [[1.0]]},
            "trace a: a list of 1; the trace has 9 stored tokens, 3 sampled tokens, 4 nodes",
        ),
        ({"trace_id": ["a", "b"], "v": [[1.0] * 3, [1.0] * 2]}, "trace b: a list of 2"),
        ({"trace_id": ["a"], "node": [0], "v": [[1.0]]}, "a row about a node holds one value each"),
        ({"trace_id": ["a"]}, "no column beside trace_id"),
        ({"v": [1]}, "no column trace_id"),
        ({}, "no column trace_id"),
        ({"trace_id": ["a"], "run": ["r"]}, "mistaken for the run's"),
        ({"trace_id": ["a"], "v": [1], "V": [2]}, "'v' comes twice"),
        ({"trace_id": ["a"], "v": [1, 2]}, "is no table"),
        (7, "int is no table"),
        ("labels.txt", "ends in .txt; expected .parquet, .csv, .jsonl"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence_and_nothing_is_written(
    recorded: Path, table: Any, said: str
) -> None:
    run = open_run(recorded)
    with pytest.raises(BadInput) as refused:
        run.annotate("x", table)
    assert said in str(refused.value)
    assert not run.paths.annotations.exists()


@pytest.mark.parametrize("name", ["", "X", "a-b", "a.b", "1a", "../a", "a b", "x" * 64])
def test_names_are_parts_of_the_names_of_views(recorded: Path, name: str) -> None:
    with pytest.raises(BadInput, match="expected 1 to 63 small letters"):
        open_run(recorded).annotate(name, {"trace_id": ["a"], "v": [1]})


def test_a_trace_that_is_in_a_journal_only_is_not_known(run: Run) -> None:
    with pytest.raises(BadInput, match="1 trace is not in the run: z; expected ids of traces that were committed"):
        run.annotate("x", {"trace_id": ["z"], "v": [1]})


def test_evaluations_and_superseded_traces_are_known(run: Run) -> None:
    put_attempt(run.paths.root, 1, start_step=1)  # type: ignore[arg-type]
    run = open_run(run.paths.root)
    run.annotate("x", {"trace_id": ["c", "e"], "v": [1, 2]})
    query = "SELECT trace_id, v FROM traces JOIN annotation_x USING (run, trace_id) ORDER BY 1"
    assert asked(run, query) == []
    assert asked(run, query, split=None, all_attempts=True) == [("c", 1), ("e", 2)]


def test_lists_over_what_was_pruned_are_refused(run: Run) -> None:
    prune(run, Wish(tokens=True, before=1))
    run = open_run(run.paths.root)
    with pytest.raises(
        BadInput, match="step 0: what of it was sampled was pruned, so a list over sampled tokens has no place"
    ):
        run.annotate("x", {"trace_id": ["a"], "v": [[1.0, 2.0, 3.0]]})
    assert annotations_of(run) == {}
    run.annotate("x", {"trace_id": ["a", "c"], "v": [[1.0] * 9, [2.0] * 9]})
    assert asked(run, "SELECT count(*), sum(len(v)) FROM annotation_x") == [(2, 18)]


# -- what may be given


class Frame:
    """What data frames of any library have."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def test_tables_of_any_kind_are_taken(run: Run, tmp_path: Path) -> None:
    table = pa.table({"trace_id": pa.array(["a", "b"]).dictionary_encode(), "v": pa.array([1, 2], pa.int8())})
    kinds: list[Any] = [
        table,
        Frame(table),
        table.to_pydict(),
        table.to_pylist(),
        run.sql("SELECT trace_id, 1 AS v FROM traces"),
    ]
    pq.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text('{"trace_id": "a", "v": 1}\n{"trace_id": "b", "w": [], "v": 2}\n')
    pcsv.write_csv(pa.table(table.to_pydict()), tmp_path / "t.csv")
    kinds += [tmp_path / "t.parquet", str(tmp_path / "t.csv")]
    for i, kind in enumerate(kinds):
        run.annotate(f"x{i}", kind)
        assert asked(run, f"SELECT DISTINCT v FROM annotation_x{i} WHERE trace_id = 'a'") == [(1,)]
    with pytest.raises(FileNotFoundError):
        run.annotate("y", tmp_path / "nothing.csv")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(BadInput, match=r"bad\.jsonl: no readable table"):
        run.annotate("y", tmp_path / "bad.jsonl")


def test_columns_that_first_come_in_a_later_row_are_there(run: Run) -> None:
    run.annotate("x", [{"trace_id": "a"}, {"trace_id": "b", "late": 1.5}])
    assert asked(run, "SELECT trace_id, late FROM annotation_x ORDER BY 1") == [("a", None), ("b", 1.5)]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_trace_ids_of_digits_stay_what_they_are(tmp_path: Path, ending: str) -> None:
    ids = ["00012", "1e5", "20260101", "123e4567e89b12d3a456426614174000"]
    root = put_step(put_run(tmp_path / "run"), 0, [turn(id, idx=i) for i, id in enumerate(ids)]) and tmp_path / "run"
    table, file = pa.table({"trace_id": ids, "v": range(4)}), tmp_path / f"t.{ending}"
    if ending == "csv":
        pcsv.write_csv(table, file)
    elif ending == "parquet":
        pq.write_table(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    run = open_run(root)
    run.annotate("x", file)
    assert dict(asked(run, "SELECT trace_id, v FROM annotation_x")) == dict(zip(ids, range(4), strict=True))


# -- how it is kept


def test_the_recording_is_not_touched(run: Run) -> None:
    def files() -> dict[Path, bytes]:
        found = run.paths.root.rglob("*")  # type: ignore[union-attr]
        return {p: p.read_bytes() for p in found if p.is_file() and "annotations" not in p.parts}

    before = files()
    run.annotate("x", {"trace_id": ["a"], "v": [1]})
    assert files() == before
    assert not verify(open_run(run.paths.root)).errors


def test_a_second_annotation_of_a_name_is_refused_or_takes_the_place_of_the_first(run: Run) -> None:
    run.annotate("x", {"trace_id": ["a"], "v": [1]})
    with pytest.raises(RunConflict, match="an annotation 'x' already; choose another name, or set --overwrite"):
        run.annotate("x", {"trace_id": ["b"], "v": [2]})
    made = run.annotate("x", {"trace_id": ["b"], "w": [2]}, overwrite=True)
    assert made.version == 1
    assert run.sql("FROM annotation_x").columns == ["run", "trace_id", "w"]
    assert asked(run, "FROM annotation_x") == [("run", "b", 2)]
    assert list(annotations_of(run)) == ["x"]


def test_of_two_who_write_one_version_one_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write = MODULE._write

    def meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(MODULE, "_write", write)
        open_run(run.paths.root).annotate("x", {"trace_id": ["a"], "v": [1]})
        return write(*args)

    monkeypatch.setattr(MODULE, "_write", meanwhile)
    with pytest.raises(RunConflict, match="somebody else wrote version 0 at the same time"):
        run.annotate("x", {"trace_id": ["b"], "v": [2]})
    assert asked(run, "FROM annotation_x") == [("run", "a", 1)]
    assert len(list(run.paths.annotations.glob("x/*.parquet"))) == 1


def test_a_file_without_its_record_is_no_annotation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "put_once", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        run.annotate("x", {"trace_id": ["a"], "v": [1]})
    monkeypatch.undo()
    assert annotations_of(run) == {}
    run.annotate("x", {"trace_id": ["a"], "v": [2]})
    assert asked(run, "FROM annotation_x") == [("run", "a", 2)]


@pytest.mark.parametrize("damage", ["record", "cut", "missing", "renamed"])
def test_a_damaged_annotation_is_named_and_other_queries_go_on(run: Run, damage: str) -> None:
    run.annotate("x", {"trace_id": ["a"], "v": [1]})
    folder = run.paths.annotations / "x"
    [file] = folder.glob("*.parquet")
    if damage == "record":
        (folder / "0.json").write_bytes((folder / "0.json").read_bytes().replace(b'"rows": 1', b'"rows": 2'))
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])  # type: ignore[union-attr]
    elif damage == "missing":
        file.unlink()
    else:
        folder.rename(run.paths.annotations / "y")  # type: ignore[union-attr, arg-type]
    with pytest.raises(Damaged, match="annotations"):
        asked(run, "FROM annotation_x")
    assert asked(run, "SELECT count(*) FROM traces") == [(3,)]


def test_annotations_of_several_runs_are_one_view(run: Run, tmp_path: Path) -> None:
    other = open_run(put_step(put_run(tmp_path / "other"), 0, [turn("a")]) and tmp_path / "other")
    run.annotate("x", {"trace_id": ["a"], "v": [1]})
    other.annotate("x", {"trace_id": ["a"], "v": [2.5], "more": ["m"]})
    other.annotate("y", {"trace_id": ["a"], "v": [3]})
    assert sql([run, other], "SELECT run, v, more FROM annotation_x ORDER BY run").fetchall() == [
        ("other", 2.5, "m"),
        ("run", 1.0, None),
    ]
    query = "SELECT run, a.v, t.num_tokens FROM traces t JOIN annotation_x a USING (run, trace_id) ORDER BY run"
    assert sql([run, other], query).fetchall() == [("other", 2.5, 6), ("run", 1.0, 9)]
    assert sql([run, other], "SELECT run FROM annotation_y").fetchall() == [("other",)]


# -- the command


def test_annotate_and_list(run: Run, rolltape: Cli, tmp_path: Path) -> None:
    root = run.paths.root
    pq.write_table(pa.table({"trace_id": ["a"], "lp": [[1.0, 2.0, 3.0]], "v": [1]}), tmp_path / "t.parquet")
    assert rolltape("annotate", root, "--list") == (0, "no annotations\n", "")
    code, out, _ = rolltape("annotate", root, "trainer", tmp_path / "t.parquet")
    assert (code, out.splitlines()[0]) == (0, "annotation_trainer: 1 row about 1 trace, by trace_id")
    assert "lp DOUBLE[], a list over sampled tokens" in out
    code, out, _ = rolltape("annotate", root, "--list")
    assert code == 0
    assert "annotation_trainer" in out
    assert "lp, v" in out
    [told] = json.loads(rolltape("annotate", root, "--list", "--json")[1])["annotations"]
    assert (told["name"], told["level"], told["columns"][0]["given"]) == ("trainer", "trace", "sampled")
    code, _, err = rolltape("annotate", root, "trainer", tmp_path / "t.parquet")
    assert (code, "already" in err) == (2, True)
    code, out, _ = rolltape("annotate", root, "trainer", tmp_path / "t.parquet", "--overwrite", "--json")
    assert (code, json.loads(out)["version"]) == (0, 1)
    code, out, _ = rolltape("sql", root, "annotation_trainer", "--schema", "--json")
    assert [(c["name"], c["type"]) for c in json.loads(out)["views"][0]["columns"]] == [
        ("run", "VARCHAR"),
        ("trace_id", "VARCHAR"),
        ("lp", "DOUBLE[]"),
        ("v", "BIGINT"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{run}",), "a name and a file are needed"),
        (("{run}", "x"), "a name and a file are needed"),
        (("{run}", "x", "--list"), "--list takes a run alone"),
        (("{run}", "x", "nothing.csv"), "nothing.csv: No such file or directory"),
        (("{run}", "Bad", "nothing.csv"), "small letters"),
        (("{run}x", "--list"), "does not exist"),
    ],
)
def test_bad_usage_is_refused_with_a_sentence(run: Run, rolltape: Cli, words: tuple[str, ...], said: str) -> None:
    code, out, err = rolltape("annotate", *(w.format(run=run.paths.root) for w in words))
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
