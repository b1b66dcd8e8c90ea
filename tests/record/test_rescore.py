"""Re-scoring: recorded group rewards come out again, and what cannot be scored is named and never 0."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from record_build import Record, checked, dispositions, recorded, records_of, trace
from rescore_build import DEMO, demo_config, golf, golf_run, record_run, taskset

from rolltape.record.recorder import Recorder
from rolltape.record.rescore import Rescored, RescoreOptions, rescore
from rolltape.record.rescore_cli import print_rescored
from rolltape.replay.cli import main
from rolltape.replay.run import open_run
from rolltape.replay.stats import stats
from rolltape.replay.verify import verify
from rolltape.schema import Context, Group, Outcome, Step
from rolltape.schema.errors import BadInput, CheckFailed, RunConflict

PROBE = """
import asyncio

import verifiers.v1 as vf


class ProbeTask(vf.Task[vf.TaskData]):
"""
OK = """
    @vf.reward(weight=2.0)
    async def ok(self, trace):
        return 1.0
"""
ROLLTAPE = [sys.executable, "-m", "rolltape.replay.cli"]


def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, settings: str = "") -> Path:
    """A config whose task class scores plain task rows by the methods in `body`."""
    return taskset(tmp_path, monkeypatch, PROBE + body, "ProbeTask", settings)


def names(result: Rescored, kind: str = "reward") -> dict[str, dict[str, Any]]:
    assert result.changes is not None
    return {row["name"]: row for row in result.changes.names if row["kind"] == kind}


def rewards(run: Path) -> dict[str, dict[str, float | None]]:
    table = open_run(run).table(columns=["trace_id", "rewards"])
    rows = table.to_pylist(maps_as_pydicts="strict")
    return {row["trace_id"]: row["rewards"] for row in rows}


def totals(run: Path) -> dict[str, float | None]:
    return {row["trace_id"]: row["reward"] for row in open_run(run).table(columns=["trace_id", "reward"]).to_pylist()}


def group_sums(run: Path) -> list[dict[str, float | None]]:
    return [{name: s.sum for name, s in group.rewards.items()} for group in open_run(run).groups()]


# -- group rewards


def test_recorded_code_golf_gets_its_recorded_group_rewards_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = golf_run(tmp_path / "run")
    result = rescore(run, taskset(tmp_path, monkeypatch, golf(), "CodeGolfTask"), tmp_path / "new")
    assert result.failures == []
    assert rewards(tmp_path / "new") == rewards(run)
    assert [(s["fastest"], s["most_concise"]) for s in group_sums(tmp_path / "new")] == [
        (0.5, 1),
        (0.5, 0.5),
        (0.5, 0.5),
    ]
    assert result.changes is not None
    assert result.changes.counts == {
        "traces": 12,
        "scored": 12,
        "failed": 0,
        "skipped": 0,
        "untouched": 0,
        "changed": 0,
        "groups": 3,
    }
    checked(tmp_path / "new")


def test_a_changed_weight_gives_the_changed_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = golf_run(tmp_path / "run")
    result = rescore(run, taskset(tmp_path, monkeypatch, golf(fastest=2.0), "CodeGolfTask"), tmp_path / "new")
    assert [s["fastest"] for s in group_sums(tmp_path / "new")] == [2.0, 2.0, 2.0]
    assert [s["most_concise"] for s in group_sums(tmp_path / "new")] == [1.0, 0.5, 0.5]
    assert result.changes is not None
    assert [(g["name"], g["old"], g["new"]) for g in result.changes.groups] == [("fastest", 0.5, 2.0)] * 3
    assert result.changes.counts["changed"] == 3
    fastest = names(result)["fastest"]
    assert (fastest["old_mean"], fastest["new_mean"], fastest["changed"]) == (0.125, 0.5, 3)
    assert fastest["weights"] == [2.0]
    checked(tmp_path / "new")


def test_what_is_re_scored_converts_to_samples_with_the_new_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = golf_run(tmp_path / "run")
    rescore(run, taskset(tmp_path, monkeypatch, golf(fastest=2.0), "CodeGolfTask"), tmp_path / "new")
    [step] = open_run(tmp_path / "new").steps()
    assert step.batch == tuple(range(12))
    assert step.counts == {"started": 12, "emitted": 12, "lost": 0}
    verified = checked(tmp_path / "new")
    assert verified.digests == 1


def test_a_group_that_is_not_whole_gets_no_group_reward_rather_than_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [r for _, r in recorded("0.2.0/group_rewards")][:3]
    run = record_run(tmp_path / "run", [[records]], expected_size=4, group_reward_names=("fastest", "most_concise"))
    result = rescore(run, taskset(tmp_path, monkeypatch, golf(), "CodeGolfTask"), tmp_path / "new")
    for found in rewards(tmp_path / "new").values():
        assert (found["correct"], found["fastest"], found["most_concise"]) == (1.0, None, None)
    assert set(totals(tmp_path / "new").values()) == {None}
    assert names(result)["fastest"]["statuses"] == {"skipped": 3}
    assert result.notes == {"groups without group rewards, for they are not whole": 1}
    rows = duckdb.sql(f"select reason from '{tmp_path}/new/rescored/*/*.parquet' where name = 'fastest'").fetchall()
    assert set(rows) == {("3 of 4 rollouts of group 0 are there",)}


def test_a_group_reward_that_raises_is_named_and_null_for_the_whole_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = OK + "    @vf.group_reward\n    async def race(self, traces):\n        return [1.0]\n"
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert rewards(tmp_path / "new")["a"] == rewards(tmp_path / "new")["b"] == {"ok": 2.0, "race": None}
    assert rewards(tmp_path / "new")["c"] == {"ok": 2.0, "race": 1.0}
    assert [(f["trace_id"], f["signal"]) for f in result.failures] == [("a", "race"), ("b", "race")]
    assert "1 scores for 2 rollouts" in result.failures[0]["error"]


def test_a_whole_group_with_a_trace_that_cannot_be_scored_has_no_group_reward_for_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = SOMETIMES + "    @vf.group_reward\n    async def even(self, traces):\n        return [1.0 for _ in traces]\n"
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert result.notes == {"groups without group rewards, for a trace of each could not be scored": 1}
    assert names(result)["even"]["statuses"] == {"scored": 1, "skipped": 2}
    assert names(result, "total")["reward"]["statuses"] == {"failed": 1, "scored": 1, "skipped": 1}
    assert result.changes is not None
    counts = result.changes.counts
    assert [counts[name] for name in ("traces", "scored", "failed", "skipped", "untouched")] == [3, 1, 1, 1, 0]
    [(reason,)] = duckdb.sql(
        f"select reason from '{tmp_path}/new/rescored/*/*.parquet' where kind = 'total' and status = 'skipped'"
    ).fetchall()
    assert reason == "without even"


def test_the_numbers_of_a_row_add_up_to_its_traces_and_means_say_of_how_many_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"type": "TaskError", "message": "no", "traceback": None}
    groups = [[trace("a"), trace("b", metrics={"passed": 3.0})], [trace("failed", errors=[error])]]
    run = record_run(tmp_path / "run", [groups])
    result = rescore(run, probes(tmp_path, monkeypatch, SOMETIMES), tmp_path / "new")
    passed = names(result, "metric")["passed"]
    assert (passed["traces"], passed["changed"], passed["statuses"]) == (1, 0, {"kept": 1})
    assert (passed["old_mean"], passed["old_n"], passed["new_mean"], passed["new_n"]) == (3.0, 1, None, 0)
    assert result.changes is not None
    for row in result.changes.names:
        assert sum(row["statuses"].values()) == row["traces"]
    [total] = [row for row in result.changes.names if row["kind"] == "total"]
    assert (total["traces"], total["old_n"], total["new_n"]) == (3, 2, 1)


def test_a_group_reward_that_raises_takes_no_trace_out_of_the_means_of_other_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = OK + "    @vf.group_reward\n    async def race(self, traces):\n        return [1.0]\n"
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    now = stats(open_run(tmp_path / "new")).total
    assert (names(result)["ok"]["new_n"], now.rewards["ok"].count) == (3, 3)
    assert (names(result)["race"]["new_n"], now.rewards["race"].count) == (1, 1)


# -- what cannot be scored offline


RUNTIME = """
    @vf.metric
    async def seconds(self, trace, runtime):
        return 1.0

    @vf.reward(weight=3.0)
    async def runs(self, trace, runtime):
        return 1.0

    @vf.reward(weight=2.0)
    async def ok(self, trace):
        return 0.5
"""


def with_runtime(tmp_path: Path) -> Path:
    scores = {"rewards": {"runs": 3.0, "ok": 2.0}, "metrics": {"seconds": 7.0, "left_by_finalize": 4.0}}
    return record_run(tmp_path / "run", [[[trace("a", **scores), trace("b", **scores)]]])


def test_a_reward_that_needs_the_runtime_is_named_and_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = rescore(with_runtime(tmp_path), probes(tmp_path, monkeypatch, RUNTIME), tmp_path / "new")
    unscorable = [(s["name"], s["unscorable"]) for s in result.signals if s["unscorable"]]
    assert unscorable == [("seconds", "it needs the runtime"), ("runs", "it needs the runtime")]
    assert rewards(tmp_path / "new")["a"] == {"runs": None, "ok": 1.0}
    assert totals(tmp_path / "new")["a"] is None
    assert names(result, "metric")["seconds"]["statuses"] == {"skipped": 2}
    assert names(result, "metric")["left_by_finalize"]["statuses"] == {"kept": 2}


def test_it_is_kept_from_the_recording_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RescoreOptions(keep=True)
    result = rescore(with_runtime(tmp_path), probes(tmp_path, monkeypatch, RUNTIME), tmp_path / "new", options)
    assert rewards(tmp_path / "new")["a"] == {"runs": 3.0, "ok": 1.0}
    assert totals(tmp_path / "new") == {"a": 4.0, "b": 4.0}
    assert names(result)["runs"]["statuses"] == {"kept": 2}
    assert records_of(tmp_path / "new")["a"]["metrics"] == {"seconds": 7.0, "left_by_finalize": 4.0}
    checked(tmp_path / "new")


def test_scores_by_name_of_a_reward_that_needs_the_runtime_are_kept_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = OK + "    @vf.reward\n    async def tests(self, trace, runtime):\n        return {}\n"
    run = record_run(tmp_path / "run", [[[trace("a", rewards={"ok": 2.0, "unit": 1.0, "lint": 0.5})]]])
    config = probes(tmp_path, monkeypatch, body)
    rescore(run, config, tmp_path / "kept", RescoreOptions(keep=True))
    assert rewards(tmp_path / "kept")["a"] == {"ok": 2.0, "unit": 1.0, "lint": 0.5}
    rescore(run, config, tmp_path / "skipped")
    assert rewards(tmp_path / "skipped")["a"] == {"ok": 2.0, "unit": None, "lint": None}


def test_group_rewards_see_recorded_scores_that_cannot_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
    @vf.metric
    async def seconds(self, trace, runtime):
        return 0.0

    @vf.group_reward(weight=0.5)
    async def fastest(self, traces):
        best = min(t.metrics["seconds"] for t in traces)
        return [float(t.metrics["seconds"] == best) for t in traces]
"""
    group = [trace("a", metrics={"seconds": 2.0}), trace("b", metrics={"seconds": 1.0})]
    rescore(record_run(tmp_path / "run", [[group]]), probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert rewards(tmp_path / "new") == {"a": {"fastest": 0.0}, "b": {"fastest": 0.5}}


def test_a_reward_that_reads_state_which_no_recording_holds_is_unscorable_not_scored_on_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import verifiers.v1 as vf


class Kept(vf.State):
    hits: int = 0
    cache: int = 0


class ProbeTask(vf.Task[vf.TaskData, Kept]):
    @vf.reward
    async def hits(self, trace):
        return trace.state.hits

    @vf.reward
    async def ok(self, trace):
        trace.state.cache = 2
        return trace.state.cache
"""
    run = record_run(tmp_path / "run", [[[trace("a", rewards={"hits": 5.0})]]])
    rescore(run, taskset(tmp_path, monkeypatch, source, "ProbeTask"), tmp_path / "new")
    assert rewards(tmp_path / "new")["a"] == {"hits": None, "ok": 2.0}
    [(reason,)] = duckdb.sql(f"select reason from '{tmp_path}/new/rescored/*/*.parquet' where name = 'hits'").fetchall()
    assert reason == "it reads trace.state.hits, which no recording holds"


def test_a_name_that_the_taskset_no_longer_scores_is_gone_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record_run(tmp_path / "run", [[[trace("a", rewards={"ok": 2.0, "style": 0.25})]]])
    result = rescore(run, probes(tmp_path, monkeypatch, OK), tmp_path / "new")
    assert rewards(tmp_path / "new")["a"] == {"ok": 2.0}
    style = names(result)["style"]
    assert (style["old_mean"], style["new_mean"], style["statuses"], style["changed"]) == (0.25, None, {"gone": 1}, 1)


# -- what goes wrong


SOMETIMES = """
    @vf.metric
    async def length(self, trace):
        return len(trace.last_reply)

    @vf.reward(weight=0.5)
    async def sometimes(self, trace):
        if trace.id == "b":
            raise ValueError("no verdict")
        return 1.0

    @vf.reward(weight=2.0)
    async def ok(self, trace):
        return 1.0
"""


def test_a_trace_that_cannot_be_scored_is_named_and_null_and_has_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, SOMETIMES), tmp_path / "new")
    assert result.failures == [
        {"step": 0, "split": "train", "trace_id": "b", "signal": "sometimes", "error": "ValueError: no verdict"}
    ]
    assert rewards(tmp_path / "new")["b"] == {"ok": 2.0, "sometimes": None}
    assert totals(tmp_path / "new") == {"a": 2.5, "b": None, "c": 2.5}
    assert dispositions(tmp_path / "new") == {"a": "incomplete_group", "b": "error", "c": "emitted"}
    [error] = records_of(tmp_path / "new")["b"]["errors"]
    assert (error["type"], error["message"]) == (
        "TaskError",
        "task ProbeTask scoring: sometimes: ValueError: no verdict",
    )
    assert "ValueError" in error["traceback"]
    checked(tmp_path / "new")


@pytest.mark.parametrize(
    ("kind", "answer", "error"),
    [
        ("reward", "return 10**400", "OverflowError: int too large"),
        ("reward", "raise asyncio.CancelledError", "CancelledError: "),
        ("reward", "raise SystemExit(3)", "SystemExit: 3"),
        ("reward", "return None", "TypeError: float() argument must be"),
        ("reward", "return 'good'", "ValueError: could not convert string to float: 'good'"),
        ("reward", "return {1: 2.0}", "TypeError: a score's name is 1; expected text"),
        ("reward", "return {'\\ud800': 1.0}", "UnicodeEncodeError"),
        ("reward", "return {'a': 1.0, 'b': None}", "TypeError"),
        ("group_reward", "raise asyncio.CancelledError", "CancelledError: "),
    ],
)
def test_whatever_a_signal_does_is_its_own_failure_and_costs_no_other_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, answer: str, error: str
) -> None:
    given = "traces" if kind == "group_reward" else "trace"
    last = f"{given}[-1]" if kind == "group_reward" else given
    body = (
        f"{OK}\n    @vf.{kind}\n    async def odd(self, {given}):\n        if {last}.id == 'b':\n            {answer}\n"
    )
    body += f"        return {'[0.5]' if kind == 'group_reward' else '0.5'}\n"
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    [failure] = result.failures
    assert (failure["trace_id"], failure["signal"]) == ("b", "odd")
    assert error in failure["error"]
    assert rewards(tmp_path / "new") == {"a": {"ok": 2.0, "odd": 0.5}, "b": {"ok": 2.0, "odd": None}}


@pytest.mark.parametrize("kind", ["reward", "group_reward"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_score_that_is_no_number_is_recorded_as_such_and_its_trace_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: str, kind: str
) -> None:
    body = f"""{OK}
    @vf.{kind}
    async def odd(self, {"traces" if kind == "group_reward" else "trace"}):
        {"[trace] = traces" if kind == "group_reward" else ""}
        score = float('{number}' if trace.id == 'b' else 1)
        return {"[score]" if kind == "group_reward" else "score"}
"""
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert result.failures == []
    assert str(rewards(tmp_path / "new")["b"]["odd"]) == number
    assert dispositions(tmp_path / "new") == {"a": "emitted", "b": "failed_check"}
    odd = names(result)["odd"]
    assert (odd["changed"], odd["new_mean"], odd["no_number"]) == (2, 1.0, 1)
    print_rescored("run", "new", result)
    said = capsys.readouterr().out
    assert "1 trace with a total reward that is NaN or infinite: in no mean, and not to be trained" in said
    assert [cells[-1] for cells in _cells(said) if cells[0] == "odd"] == ["2 scored (of them 1 NaN or infinite)"]
    checked(tmp_path / "new")


def test_a_trace_whose_scoring_failed_live_can_be_scored_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [r for _, r in recorded("0.2.0/errors")]
    failed = next(r for r in records if r["errors"] and "scoring blew up" in r["errors"][0]["message"])
    unfinished = next(r for r in records if r["errors"] and "finalize blew up" in r["errors"][0]["message"])
    run = record_run(tmp_path / "run", [[[failed], [unfinished]]])
    source = f"{PROBE.replace('vf.TaskData', 'ProbeData')}{OK}"
    data = "class ProbeData(vf.TaskData):\n    kind: str = ''\n\n\nclass ProbeTask"
    config = taskset(tmp_path, monkeypatch, source.replace("class ProbeTask", data), "ProbeTask")
    result = rescore(run, config, tmp_path / "new")
    assert totals(tmp_path / "new") == {failed["id"]: 2.0, unfinished["id"]: None}
    assert records_of(tmp_path / "new")[failed["id"]]["errors"] == []
    assert records_of(tmp_path / "new")[unfinished["id"]] == unfinished
    assert dispositions(tmp_path / "new") == {failed["id"]: "emitted", unfinished["id"]: "error"}
    assert result.notes["traces not scored: the rollout ended in an error"] == 1


def test_a_step_in_which_nothing_can_be_scored_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "    @vf.reward\n    async def ok(self, trace):\n        raise ConnectionError('the judge is down')\n"
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")]]])
    with pytest.raises(CheckFailed, match=r"2 of 2 traces of step 0 .* the judge is down.*--resume"):
        rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert open_run(tmp_path / "new").all_commits == []


def test_strict_stops_at_the_first_trace_that_cannot_be_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("c")]], [[trace("b"), trace("d")]]])
    config = probes(tmp_path, monkeypatch, SOMETIMES)
    with pytest.raises(CheckFailed, match="1 of 2 traces of step 1"):
        rescore(run, config, tmp_path / "new", RescoreOptions(strict=True))
    assert [c.part.step for c in open_run(tmp_path / "new").all_commits] == [0]


def test_a_scoring_timeout_of_the_config_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = OK + "    @vf.reward\n    async def slow(self, trace):\n        await asyncio.sleep(60)\n"
    config = probes(tmp_path, monkeypatch, body, "[timeout]\nscoring = 0.05\n")
    with pytest.raises(CheckFailed, match=r"slow: not done within 0.05 s"):
        rescore(record_run(tmp_path / "run", [[[trace("a")]]]), config, tmp_path / "new")


def test_task_rows_of_another_taskset_are_refused_before_anything_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]]])
    with pytest.raises(BadInput, match=r"trace a \(step 0 of 'train'\) .*no GolfData.*expected: Field required"):
        rescore(run, taskset(tmp_path, monkeypatch, golf(), "CodeGolfTask"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_task_class_of_another_name_is_told_and_with_strict_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = golf_run(tmp_path / "run")
    config = taskset(tmp_path, monkeypatch, golf(task="StricterGolf"), "StricterGolf")
    result = rescore(run, config, tmp_path / "new")
    [note] = [n for n in result.notes if "StricterGolf" in n]
    assert result.notes[note] == 12
    with pytest.raises(BadInput, match=r"'CodeGolfTask'.*'StricterGolf'"):
        rescore(run, config, tmp_path / "strict", RescoreOptions(strict=True))


def test_a_task_that_scores_in_a_way_of_its_own_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        OK
        + """
    async def score(self, trace, runtime=None):
        await super().score(trace, runtime)
        if trace.id == "b":
            raise ValueError("no verdict")
        trace.record_reward("bonus", 0.5, 2.0)

    @vf.group_reward
    async def size(self, traces):
        return [1.0 for _ in traces]

    async def score_group(self, traces):
        for trace in traces:
            trace.record_reward("size", len(traces))
"""
    )
    run = record_run(tmp_path / "run", [[[trace("a"), trace("c")], [trace("b")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert rewards(tmp_path / "new") == {
        "a": {"ok": 2.0, "bonus": 1.0, "size": 2.0},
        "c": {"ok": 2.0, "bonus": 1.0, "size": 2.0},
        "b": {"ok": None, "size": None},
    }
    assert {f["trace_id"] for f in result.failures} == {"b"}
    checked(tmp_path / "new")


def test_a_reward_that_a_hook_made_of_the_old_one_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder.open(tmp_path / "run", model="m")
    recorder.started("train", 0)
    recorder.add(trace("a", tokens=3), Context(group_index=0))
    outcome = Outcome(trace_id="a", disposition="emitted", handed_reward=-1.0, remove_sample=(True,))
    group = Group.from_records([trace("a")], expected_size=1, group_index=0)
    recorder.commit_now("train", 0, groups=[group], outcomes=[outcome], record=Step())
    recorder.close()
    result = rescore(tmp_path / "run", probes(tmp_path, monkeypatch, OK), tmp_path / "new")
    [row] = open_run(tmp_path / "new").table(columns=["handed_reward", "remove_sample", "disposition"]).to_pylist()
    assert row == {"handed_reward": None, "remove_sample": [True], "disposition": "emitted"}
    assert result.notes["rewards left out that a hook of the trainer had made of the old ones"] == 1
    checked(tmp_path / "new")


# -- judges


def test_a_judge_of_the_config_is_a_reward_with_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = probes(tmp_path, monkeypatch, OK)
    judge = """
import verifiers.v1 as vf


class LengthJudge(vf.Judge):
    async def score(self, task, trace):
        trace.record_judge(vf.JudgeResponse(text="long", usage=vf.Usage(prompt_tokens=3, completion_tokens=1)))
        return float(len(trace.last_reply))


__all__ = ["LengthJudge"]
"""
    (tmp_path / "packages" / "probe_judge.py").write_text(judge)
    plugged = "[[taskset.task.judges]]\nid = 'probe_judge'\nname = 'length'\nweight = 0.1\n"
    config.write_text(config.read_text() + plugged)
    run = record_run(tmp_path / "run", [[[trace("a", info={"note": 1, "judge": [{"text": "old"}]})]]])
    result = rescore(run, config, tmp_path / "new")
    assert rewards(tmp_path / "new")["a"] == {"ok": 2.0, "length": pytest.approx(0.1 * len("an answer"))}
    assert names(result)["length"]["weights"] == [0.1]
    record = records_of(tmp_path / "new")["a"]
    assert record["info"]["note"] == 1
    assert [call["text"] for call in record["info"]["judge"]] == ["long"]
    assert record["extra_usage"][0]["prompt_tokens"] == 3


# -- tries that do not count, evaluations, other releases, resuming, the demo


def test_a_try_that_was_run_again_is_scored_for_itself_and_no_member_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = OK + "    @vf.group_reward\n    async def size(self, traces):\n        return [len(traces)] * len(traces)\n"
    recorder = Recorder.open(tmp_path / "run", model="m")
    again, cut = trace("again"), trace("cut", is_completed=False, rewards={})
    for i, record in enumerate((trace("a"), trace("b"), again, cut)):
        recorder.started("train", 0)
        recorder.add(record, Context(group_index=0, rollout_index=min(i, 1), try_number=int(i == 1)))
    group = Group.from_records([trace("a"), trace("b")], expected_size=2, group_index=0)
    fates = {"a": "emitted", "b": "emitted", "again": "retried", "cut": "cancelled"}
    outcomes = [Outcome(trace_id=t, disposition=d) for t, d in fates.items()]
    recorder.commit_now("train", 0, groups=[group], outcomes=outcomes, record=Step())
    recorder.close()
    result = rescore(tmp_path / "run", probes(tmp_path, monkeypatch, body), tmp_path / "new")
    found = rewards(tmp_path / "new")
    assert found["a"] == found["b"] == {"ok": 2.0, "size": 2.0}
    assert (found["again"], found["cut"]) == ({"ok": 2.0, "size": None}, {})
    assert dispositions(tmp_path / "new") == fates
    assert group_sums(tmp_path / "new") == [{"ok": 4.0, "size": 4.0}]
    assert result.notes["traces not scored: the rollout was cut short"] == 1
    checked(tmp_path / "new")


def test_an_evaluation_is_scored_and_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.open(tmp_path / "run", model="m")
    recorder.started("eval", 0, eval_name="held-out")
    recorder.add(trace("a", rewards={"ok": 0.0}), Context(split="eval", eval_name="held-out", group_index=0))
    group = Group.from_records([trace("a")], expected_size=1, group_index=0, split="eval", eval_name="held-out")
    outcomes = [Outcome(trace_id="a", disposition="eval")]
    step = Step(split="eval", eval_name="held-out")
    recorder.commit_now("eval", 0, groups=[group], outcomes=outcomes, record=step, eval_name="held-out")
    recorder.close()
    config = probes(tmp_path, monkeypatch, OK)
    rescore(tmp_path / "run", config, tmp_path / "new", RescoreOptions(split="eval-held-out"))
    [commit] = open_run(tmp_path / "new").all_commits
    assert (commit.part.split, commit.step.eval_name, commit.groups[0].rewards["ok"].sum) == (
        "eval-held-out",
        "held-out",
        2,
    )
    assert dispositions(tmp_path / "new") == {"a": "eval"}
    checked(tmp_path / "new")


def test_a_new_run_can_lie_in_an_object_store(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = golf_run(tmp_path / "run"), taskset(tmp_path, monkeypatch, golf(fastest=2.0), "CodeGolfTask")
    result = rescore(run, config, f"{bucket}/new")
    assert result.changes is not None
    assert result.changes.counts["changed"] == 3
    assert [g.rewards["fastest"].sum for g in open_run(f"{bucket}/new").groups()] == [2.0, 2.0, 2.0]
    more = rescore(f"{bucket}/new", config, f"{bucket}/again")
    assert more.changes is not None
    assert more.changes.counts["changed"] == 0


@pytest.mark.parametrize("release", ["0.2.1", "0.3.0", "0.4.0"])
def test_traces_of_later_releases_are_scored_and_keep_their_own_shape(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [r for place, r in recorded(release) if "written_by" not in place and "single_turn" in place]
    run = record_run(tmp_path / "run", [[[copy.deepcopy(r)] for r in records]])
    body = """
    @vf.metric
    async def reply_chars(self, trace):
        return len(trace.last_reply)

    @vf.reward(weight=4.0)
    async def ok(self, trace):
        assert trace.num_turns and trace.nodes[-1].finish_reason, "the trace says why its last turn ended"
        return 1.0
"""
    data = "class ProbeData(vf.TaskData):\n    kind: str\n\n\nclass ProbeTask"
    source = (PROBE.replace("vf.TaskData", "ProbeData") + body).replace("class ProbeTask", data)
    result = rescore(run, taskset(tmp_path, monkeypatch, source, "ProbeTask"), tmp_path / "new")
    assert result.failures == []
    for record in records:
        again = records_of(tmp_path / "new")[record["id"]]
        pair = isinstance(record["rewards"]["ok"], dict)
        assert again["rewards"] == {"ok": {"score": 1.0, "weight": 4.0} if pair else 4.0}
        assert again["metrics"]["reply_chars"] == record["metrics"]["reply_chars"]
        changed = {key for key in record if again[key] != record[key]}
        assert changed <= {"rewards", "timing"}
        assert list(again) == list(record)
    assert verify(open_run(tmp_path / "new")).errors == []


def test_the_demo_re_scored_by_its_own_taskset_is_the_batch_that_was_trained(tmp_path: Path) -> None:
    result = rescore(DEMO, demo_config(tmp_path), tmp_path / "new")
    then, now = open_run(DEMO), open_run(tmp_path / "new")
    for old, new in zip(then.steps(), now.steps(), strict=True):
        assert (old.batch, old.digest_converted, old.digest_handed) == (
            new.batch,
            new.digest_converted,
            new.digest_handed,
        )
    assert [g.rewards for g in then.groups()] == [g.rewards for g in now.groups()]
    assert result.changes is not None
    assert result.changes.counts["changed"] == 0
    assert result.changes.counts["untouched"] == 4
    columns = set(then.table().column_names) - {"run", "scores", "weights", "scoring_start", "scoring_end"}
    old_rows, new_rows = then.table(columns=sorted(columns)), now.table(columns=sorted(columns))
    assert old_rows.combine_chunks().equals(new_rows.combine_chunks())
    checked(tmp_path / "new")


def test_sql_joins_both_runs_and_the_scores_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = golf_run(tmp_path / "run")
    rescore(run, taskset(tmp_path, monkeypatch, golf(fastest=2.0), "CodeGolfTask"), tmp_path / "new")
    rows = duckdb.sql(
        f"""select o.reward, n.reward, b.old, b.new from '{run}/traces/*/*.parquet' o
        join '{tmp_path}/new/traces/*/*.parquet' n using (trace_id)
        join '{tmp_path}/new/rescored/*/*.parquet' b using (trace_id) where b.kind = 'total'"""
    ).fetchall()
    assert len(rows) == 12
    assert all((old, new) == (then, now) for old, new, then, now in rows)
    assert math.fsum(new - old for old, new, *_ in rows) == 4.5


def test_a_re_scoring_that_was_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward(weight=2.0)
    async def ok(self, trace):
        import pathlib
        with pathlib.Path(__file__).with_suffix(".log").open("a") as log:
            log.write(trace.id + "\\n")
        if trace.id.startswith("2") and not pathlib.Path(__file__).with_suffix(".go").exists():
            await asyncio.sleep(60)
        return 0.5
"""
    steps = [[[trace(f"{step}-{i}")] for i in range(3)] for step in range(4)]
    run, config = record_run(tmp_path / "run", steps), probes(tmp_path, monkeypatch, body)
    log = tmp_path / "packages" / f"{config.stem}.log"
    command = [*ROLLTAPE, "rescore", str(run), "--config", str(config), "--out", str(tmp_path / "new")]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (log.exists() and "2-0" in log.read_text()):
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert [c.part.step for c in open_run(tmp_path / "new").all_commits] == [0, 1]

    with pytest.raises(RunConflict, match="--resume"):
        rescore(run, config, tmp_path / "new")
    log.write_text("")
    log.with_suffix(".go").touch()
    result = rescore(run, config, tmp_path / "new", RescoreOptions(resume=True))
    assert sorted(set(log.read_text().split())) == [f"{step}-{i}" for step in (2, 3) for i in range(3)]
    assert (result.steps, result.resumed) == (2, 2)
    assert result.changes is not None
    assert result.changes.counts["traces"] == 12
    assert set(totals(tmp_path / "new").values()) == {1.0}
    checked(tmp_path / "new")


def test_another_config_or_another_run_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]]])
    config = probes(tmp_path, monkeypatch, OK)
    rescore(run, config, tmp_path / "new")
    with pytest.raises(RunConflict, match="something else"):
        rescore(run, probes(tmp_path, monkeypatch, OK), tmp_path / "new", RescoreOptions(resume=True))
    other = record_run(tmp_path / "other", [[[trace("b")]]])
    for out in (tmp_path / "new", other):
        with pytest.raises((RunConflict, BadInput), match=r"no re-scoring of|is the run itself"):
            rescore(other, config, out, RescoreOptions(resume=True))


def test_only_the_steps_and_the_split_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]], [[trace("b")]]])
    config = probes(tmp_path, monkeypatch, OK)
    rescore(run, config, tmp_path / "new", RescoreOptions(steps=(1,), split="train"))
    assert totals(tmp_path / "new") == {"b": 2.0}
    with pytest.raises(BadInput, match="no step 7 to re-score; recorded: steps 0–1"):
        rescore(run, config, tmp_path / "seven", RescoreOptions(steps=(7,)))
    with pytest.raises(BadInput, match="no committed step of split 'eval'"):
        rescore(run, config, tmp_path / "eval", RescoreOptions(split="eval"))


def test_no_more_traces_at_once_than_asked_for_and_groups_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
    now, most = 0, 0

    @vf.reward
    async def ok(self, trace):
        cls = type(self)
        cls.now += 1
        cls.most = max(cls.most, cls.now)
        await asyncio.sleep(0.01)
        cls.now -= 1
        return float(cls.most)

    @vf.group_reward
    async def pair(self, traces):
        return [float(len(traces))] * len(traces)
"""
    groups: list[list[Record]] = [[trace(f"{g}-{i}") for i in range(2)] for g in range(6)]
    run = record_run(tmp_path / "run", [groups])
    rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new", RescoreOptions(concurrency=4))
    found = rewards(tmp_path / "new").values()
    assert max(r["ok"] or 0 for r in found) == 4
    assert {r["pair"] for r in found} == {2.0}


def test_secrets_that_scoring_puts_on_a_trace_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward
    async def ok(self, trace):
        trace.info["api_key"] = "sk-proj-abcdefghijklmnopqrstuvwx123456"
        return 1.0
"""
    body += """
    @vf.reward
    async def judged(self, trace):
        if trace.id == "a":
            raise ValueError("401 for Bearer abcdefghijklmnop1234567890")
        return 1.0
"""
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    record = records_of(tmp_path / "new")["a"]
    assert record["info"] == {"api_key": "***"}
    for told in (result.failures[0]["error"], record["errors"][0]["message"]):
        assert told.endswith("ValueError: 401 for Bearer ***")


def _cells(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]


def test_the_command_prints_tables_or_json_and_exits_1_where_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c")]]])
    config = probes(tmp_path, monkeypatch, SOMETIMES)

    def command(source: Path, out: str, *more: str) -> tuple[int, str, str]:
        arguments = ["rolltape", "rescore", str(source), "--config", str(config), "--out", str(tmp_path / out), *more]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    code, shown, _ = command(run, "one")
    assert code == 1
    assert "not scored: trace b (step 0), sometimes: ValueError: no verdict" in shown
    [head] = [line for line in shown.splitlines() if line.startswith("name")]
    columns = ["name", "weight", "old mean", "n old", "new mean", "n new", "traces", "changed", "new scores"]
    assert [cell.strip() for cell in head.split("┃")] == columns
    rows = {cells[0]: cells[3:] for cells in _cells(shown) if len(cells) == len(columns)}
    assert rows["total reward"] == ["3", "2.5", "2", "3", "3", "1 failed, 2 scored"]
    assert rows["ok"] == ["3", "2", "2", "3", "3", "3 scored"]
    assert rows["sometimes"] == ["0", "0.5", "2", "3", "2", "1 failed, 2 scored"]
    code, told, _ = command(run, "two", "--json")
    said = json.loads(told)
    assert (code, said["counts"]["failed"]) == (1, 1)
    assert [n["name"] for n in said["names"] if n["kind"] == "reward"] == ["ok", "sometimes"]
    code, _, refused = command(tmp_path / "nowhere", "three")
    assert code == 2
    assert "does not exist" in refused
