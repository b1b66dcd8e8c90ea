"""What became of re-scored traces: the outcomes of the new run say what happened in the new scoring."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from record_build import Record, checked, trace
from rescore_build import OK, SOMETIMES, probes, record_run

from rolltape.record.recorder import Recorder
from rolltape.record.rescoring.rescore import rescore
from rolltape.replay.cli import main
from rolltape.replay.run import open_run
from rolltape.replay.stats import stats
from rolltape.schema import Context, Group, Outcome, Step

RACE = "    @vf.group_reward\n    async def race(self, traces):\n        return [1.0 for _ in traces]\n"
RAISED = "TaskError: task ProbeTask scoring: ok: KeyError: 'plums'"
GROUP_RAISED = "the group reward failed: task ProbeTask group scoring: RuntimeError: no watch"


def raised(id: str) -> Record:
    """A trace that ended, and whose reward raised when it was recorded."""
    errors = [{"type": "TaskError", "message": RAISED.removeprefix("TaskError: "), "traceback": None}]
    none = {"start": 0.0, "end": 0.0}
    timing = {"start": 0.0, "setup": none, "generation": none, "finalize": none, "scoring": none | {"start": 5.0}}
    return trace(id, errors=errors, rewards={}, timing=timing)


def one_step(
    path: Path,
    split: str,
    groups: Sequence[Sequence[Record]],
    fates: Mapping[str, tuple[str, str | None]],
    recorded: Sequence[int] = (0,),
) -> Path:
    """A run of one step; only the groups of the indices `recorded` have a group record."""
    recorder = Recorder.open(path, model="m")
    place: dict[str, Any] = {"split": split, "eval_name": None if split == "train" else "own"}
    for index, group in enumerate(groups):
        for i, record in enumerate(group):
            recorder.started(split, 0, eval_name=place["eval_name"])
            recorder.add(record, Context(group_index=index, rollout_index=i, **place))
    made = [
        Group.from_records(group, expected_size=len(group), group_index=index, **place)
        for index, group in enumerate(groups)
        if index in recorded
    ]
    outcomes = [Outcome(trace_id=t, disposition=d, reason=r) for t, (d, r) in fates.items()]
    recorder.commit_now(split, 0, groups=made, outcomes=outcomes, record=Step(**place), eval_name=place["eval_name"])
    recorder.close()
    return path


def fates_of(run: Path) -> dict[str, tuple[str, str | None]]:
    """Disposition and reason by trace."""
    found = open_run(run)
    tables = [t for c in found.all_commits for t in found.part_batches(c, ["trace_id", "disposition", "reason"])]
    return {r["trace_id"]: (r["disposition"], r["reason"]) for t in tables for r in t.to_pylist()}


def test_a_trace_of_an_evaluation_whose_reward_raised_is_sound_once_it_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = {"a": ("error", RAISED), "c": ("eval", None)}
    run = one_step(tmp_path / "run", "eval", [[raised("a"), trace("c")]], fates)
    rescore(run, probes(tmp_path, monkeypatch, OK), tmp_path / "new")
    assert fates_of(tmp_path / "new") == {"a": ("eval", None), "c": ("eval", None)}
    [step] = open_run(tmp_path / "new").steps("eval-own")
    assert step.counts == {"started": 2, "eval": 2, "lost": 0}
    assert stats(open_run(tmp_path / "new"), "eval-own").total.errors == 0
    checked(tmp_path / "new")


def test_a_trace_of_an_evaluation_whose_reward_raises_now_has_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = {"a": ("eval", None), "b": ("eval", None)}
    run = one_step(tmp_path / "run", "eval", [[trace("a"), trace("b")]], fates)
    rescore(run, probes(tmp_path, monkeypatch, SOMETIMES), tmp_path / "new")
    now = fates_of(tmp_path / "new")
    assert now["a"] == ("eval", None)
    assert now["b"] == ("error", "TaskError: task ProbeTask scoring: sometimes: ValueError: no verdict")


def test_a_group_of_an_evaluation_that_cannot_be_compared_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = {"a": ("eval", None), "b": ("eval", None), "c": ("eval", None)}
    run = one_step(tmp_path / "run", "eval", [[trace("a"), trace("b")], [trace("c")]], fates, recorded=(0, 1))
    failing = RACE.replace("return", "assert len(traces) > 1, 'Bearer abcdefghijklmnop1234567890'\n        return")
    rescore(run, probes(tmp_path, monkeypatch, SOMETIMES + failing), tmp_path / "new")
    now = fates_of(tmp_path / "new")
    assert now["a"] == ("incomplete_group", "trace b of group 0 could not be scored")
    assert now["c"] == ("incomplete_group", "the group reward failed: race: AssertionError: Bearer ***")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_group_that_was_not_scored_live_keeps_no_reason_of_then(
    split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = {"a": ("emitted" if split == "train" else "eval", None), "c": ("incomplete_group", GROUP_RAISED)}
    fates |= {"d": ("error", RAISED), "e": ("retried", RAISED)}
    groups = [[trace("a")], [trace("c"), raised("d"), raised("e")]]
    run = one_step(tmp_path / "run", split, groups, fates)
    rescore(run, probes(tmp_path, monkeypatch, OK + RACE), tmp_path / "new")
    assert fates_of(tmp_path / "new") == {
        "a": fates["a"],
        "c": ("incomplete_group", "the trace is in no group record"),
        "d": ("incomplete_group", "the trace is in no group record"),
        "e": ("retried", RAISED),
    }
    checked(tmp_path / "new")


# -- totals that are not there


def two_groups(path: Path) -> Path:
    """A run of a group that was scored, and one that was not, with a try that was run again."""
    fates = {"a": ("emitted", None), "c": ("incomplete_group", GROUP_RAISED), "e": ("retried", RAISED)}
    return one_step(path, "train", [[trace("a")], [trace("c"), raised("e")]], fates)


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """Exit code of `rolltape rescore`, and all that it printed."""
    monkeypatch.setattr(sys, "argv", ["rolltape", "rescore", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


def test_a_total_that_is_missing_is_told_with_its_reason_and_exits_1_and_stops_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = two_groups(tmp_path / "run"), probes(tmp_path, monkeypatch, OK + RACE)
    given = [str(run), "--config", str(config), "--out"]
    code, told = command(monkeypatch, capsys, *given, str(tmp_path / "new"))
    reason = "without race: the trace is in no group record"
    assert code == 1
    assert f"no total reward: 1 trace that should have one, {reason}\n" in told
    assert "no total reward: 1 trace, without race: the trace is not the last try of its rollout\n" in told
    code, told = command(monkeypatch, capsys, *given, str(tmp_path / "new"), "--resume", "--json")
    assert (code, json.loads(told)["skipped"]) == (
        1,
        [
            {"reason": reason, "traces": 1, "missing": 1},
            {"reason": "without race: the trace is not the last try of its rollout", "traces": 1, "missing": 0},
        ],
    )
    code, told = command(monkeypatch, capsys, *given, str(tmp_path / "strict"), "--strict")
    assert code == 2
    assert f"1 of 3 traces of step 0 (train) could not be scored; trace c has no total reward, {reason}." in told
    assert open_run(tmp_path / "strict").all_commits == []


def test_a_total_that_lacks_what_needs_the_runtime_is_told_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = OK + "    @vf.reward\n    async def tests(self, trace, runtime):\n        return 1.0\n"
    run = one_step(tmp_path / "run", "train", [[trace("a"), trace("c")]], dict.fromkeys("ac", ("emitted", None)))
    config = probes(tmp_path, monkeypatch, body)
    given = [str(run), "--config", str(config), "--out", str(tmp_path / "new"), "--strict"]
    code, told = command(monkeypatch, capsys, *given)
    assert code == 0
    assert "no total reward: 2 traces, without tests: it needs the runtime\n" in told


def test_missing_totals_are_counted_alike_whatever_their_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("c")]], [[trace("d"), trace("e")]]], expected_size=2)
    result = rescore(run, probes(tmp_path, monkeypatch, OK + RACE), tmp_path / "new")
    assert result.changes is not None
    assert result.changes.skipped == [{"reason": "without race: its group is not whole", "traces": 2, "missing": 2}]
