"""Re-scoring: recorded group rewards come out again, and what cannot be scored is named and never 0."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from record_build import checked, dispositions, recorded, records_of, trace
from rescore_build import (
    OK,
    PROBE,
    SOMETIMES,
    cells,
    golf,
    golf_run,
    group_sums,
    names,
    probes,
    record_run,
    rewards,
    taskset,
    totals,
)

from rolltape.record.recorder import Recorder
from rolltape.record.rescoring.cli import print_rescored
from rolltape.record.rescoring.rescore import RescoreOptions, rescore
from rolltape.replay.run import open_run
from rolltape.replay.stats import stats
from rolltape.schema import Context, Group, Outcome, Step
from rolltape.schema.errors import BadInput, CheckFailed

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
    assert reason == "without even: a trace of its group could not be scored"


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
    assert [row[-1] for row in cells(said) if row[0] == "odd"] == ["2 scored (of them 1 NaN or infinite)"]
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
