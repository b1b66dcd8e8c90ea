"""What a re-scoring shows: means and changes, told apart by split, and in an order that helps."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest
from record_build import Record, trace
from rescore_build import OK, cells, probes, record_run

from rolltape.record.recorder import Recorder
from rolltape.record.rescoring.cli import print_rescored
from rolltape.record.rescoring.rescore import Rescored, rescore
from rolltape.schema import Context, Group, Outcome, Step


def evaluate(path: Path, record: Record, name: str = "own") -> Path:
    """Add an evaluation of one trace to the run at `path`."""
    recorder = Recorder.open(path, model="m", taskset="probes", resume=True, start_step=1)
    recorder.started("eval", 0, eval_name=name)
    recorder.add(record, Context(split="eval", eval_name=name, group_index=0))
    group = Group.from_records([record], expected_size=1, group_index=0, split="eval", eval_name=name)
    outcomes = [Outcome(trace_id=record["id"], disposition="eval")]
    step = Step(split="eval", eval_name=name)
    recorder.commit_now("eval", 0, groups=[group], outcomes=outcomes, record=step, eval_name=name)
    recorder.close()
    return path


def shown(capsys: pytest.CaptureFixture[str], result: Rescored) -> str:
    print_rescored("run", "new", result)
    return capsys.readouterr().out


def test_means_and_changes_of_training_and_of_evaluations_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]]])
    evaluate(run, trace("c", rewards={"ok": 0.0}))
    result = rescore(run, probes(tmp_path, monkeypatch, OK), tmp_path / "new")
    assert result.changes is not None
    assert [(n["split"], n["name"], n["old_mean"], n["statuses"]) for n in result.changes.names] == [
        ("train", "reward", 1.0, {"scored": 1}),
        ("train", "ok", 1.0, {"scored": 1}),
        ("eval-own", "reward", 0.0, {"scored": 1}),
        ("eval-own", "ok", 0.0, {"scored": 1}),
    ]
    told = cells(shown(capsys, result))
    assert [row[:4] for row in told if "total reward" in row] == [
        ["train", "total reward", "", "1"],
        ["eval-own", "total reward", "", "0"],
    ]
    assert [row for row in told if row[-1] in ("1", "2") and "ok" in row] == [
        ["eval-own", "0", "0", "", "ok", "0", "2", "2"],
        ["train", "0", "0", "", "ok", "1", "2", "1"],
    ]
    assert [row[0] for row in told if row[4:5] in (["a"], ["c"])] == ["eval-own", "train"]


def test_one_split_needs_no_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]]])
    told = shown(capsys, rescore(run, probes(tmp_path, monkeypatch, OK), tmp_path / "new"))
    assert [row[:4] for row in cells(told) if "ok" in row] == [["ok", "2", "1", "1"], ["0", "0", "", "ok"]]
    assert "split" not in told


ODD = """
    @vf.reward
    async def ok(self, trace):
        if trace.id == "null":
            raise ValueError("no verdict")
        return {"nan": float("nan"), "inf": float("inf"), "small": 1.5}.get(trace.id, 9.0)
"""


def odd_run(path: Path) -> Path:
    """A run of groups of one, each changed in another way by `ODD`."""
    return record_run(path, [[[trace(name)] for name in ("nan", "null", "inf", "small", "large")]])


def test_changes_that_are_no_number_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = rescore(odd_run(tmp_path / "run"), probes(tmp_path, monkeypatch, ODD), tmp_path / "new")
    assert result.changes is not None
    ids = [t["trace_id"] for t in result.changes.traces]
    assert (ids[:3], set(ids[3:])) == (["large", "small", "null"], {"nan", "inf"})
    sums = [g["new"] for g in result.changes.groups]
    assert (sums[:3], sorted(map(str, sums[3:]))) == ([9.0, 1.5, None], ["inf", "nan"])


def test_the_query_in_the_readme_gives_the_means_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = evaluate(odd_run(tmp_path / "run"), trace("late", rewards={"ok": float("nan")}))
    result = rescore(run, probes(tmp_path, monkeypatch, ODD), tmp_path / "new")
    assert result.changes is not None
    text = (Path(__file__).parents[2] / "record" / "README.md").read_text(encoding="utf-8")
    [query] = re.findall(r"^select split, kind[^;]*;", text, re.MULTILINE)
    found = duckdb.sql(query.replace("runs/stricter", str(tmp_path / "new"))).fetchall()
    told = [
        (n["split"], n["kind"], n["name"], n["old_mean"], n["new_mean"], n["changed"]) for n in result.changes.names
    ]
    assert sorted(found) == sorted(told)
