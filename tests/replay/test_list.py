"""`rolltape list`: the runs below a folder, from their commits alone."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from replay_build import TRACES, group, put_attempt, put_part, put_run, put_step, reply, said, trace, turn

from rolltape.replay.imports.importer import import_files
from rolltape.replay.listing.runs import list_runs
from rolltape.schema import Context, Outcome, Step, encode
from rolltape.schema.commits import Commit
from rolltape.schema.errors import RunNotFound
from rolltape.schema.paths import Part, RunPaths

Run = Callable[..., tuple[int, str, str]]


def two_rewards(id: str, a: float | None, b: float | None, **changes: Any) -> dict[str, Any]:
    rewards = {"a": a, "b": b}
    return turn(id=id, **{"rewards": rewards, **changes})


def test_a_run_is_summed_up_from_its_commits_and_no_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = put_run(tmp_path / "runs" / "first", model="Qwen/Qwen3-0.6B", taskset="reverse-text-v1", created_at=1000.0)
    put_step(root, 0, [two_rewards("t0", 1.0, 0.5), two_rewards("t1", 0.0, 0.25)])
    put_step(root, 1, [two_rewards("t2", 1.0, 0.5, idx=1), two_rewards("t3", 1.0, 0.5, idx=1)])
    put_step(root, 1, [turn(id="e0")], split="eval")
    monkeypatch.setattr(pq, "ParquetFile", lambda *_, **__: pytest.fail("a Parquet file was opened"))
    [run] = list_runs(tmp_path).runs
    assert (run.name, run.state, run.why) == ("runs/first", "settled", None)
    assert (run.model, run.taskset, run.run) == ("Qwen/Qwen3-0.6B", "reverse-text-v1", "r1")
    assert (run.steps, run.evaluations, run.traces) == (2, 1, 5)
    assert run.ends == ((1.0 + 0.5 + 0.25) / 2, 1.5)
    assert run.bytes == sum(p.stat().st_size for p in root.rglob("*.parquet"))
    assert (run.started_at, run.committed_at) == (1000.0, 2.0)


def test_only_the_newest_attempt_counts_but_all_of_it_takes_space(tmp_path: Path) -> None:
    put_run(tmp_path)
    for step in range(3):
        put_step(tmp_path, step, [turn(id=f"old{step}", reward=0.0)])
    put_attempt(tmp_path, 1, start_step=1)
    put_step(tmp_path, 1, [turn(id="new", reward=1.0)], attempt=1)
    [run] = list_runs(tmp_path).runs
    assert (run.name, run.steps, run.traces, run.ends) == (tmp_path.name, 2, 2, (0.0, 1.0))
    assert run.bytes == sum(p.stat().st_size for p in tmp_path.rglob("*.parquet"))


def test_what_was_not_scored_does_not_count_as_zero(tmp_path: Path) -> None:
    put_run(tmp_path)
    sound = [two_rewards("t0", 1.0, 1.0), two_rewards("t1", 1.0, 0.0)]
    partly = [two_rewards("t2", 1.0, 1.0, idx=1), two_rewards("t3", 1.0, None, idx=1)]
    put_step(tmp_path, 0, sound + partly)
    put_step(tmp_path, 1, [two_rewards("t4", None, None)])
    [run] = list_runs(tmp_path).runs
    mean = (2.0 + 1.0 + 2.0) / 3
    assert run.ends == (mean, mean)


def test_tokens_are_those_the_commits_count(tmp_path: Path) -> None:
    done = import_files(TRACES / "0.2.0" / "group_rewards.jsonl", tmp_path / "run")
    put_run(tmp_path / "other")
    put_step(tmp_path / "other", 0, [turn()])
    tokens = {r.name: r.tokens for r in list_runs(tmp_path).runs}
    assert tokens == {"run": done.tokens, "other": None}


def test_the_newest_run_comes_first_and_each_folder_once(tmp_path: Path) -> None:
    put_run(tmp_path / "old", created_at=1.0)
    put_run(tmp_path / "new", created_at=2.0)
    put_run(tmp_path / ".hidden" / "run", created_at=3.0)
    put_run(tmp_path / "old" / "below", created_at=3.0)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "zlatest").symlink_to(tmp_path / "new")
    assert [r.name for r in list_runs(tmp_path).runs] == ["new", "old"]


def test_names_are_those_below_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_run(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    for folder, name in ((".", "runs/first"), ("runs", "first"), ("runs/", "first"), ("runs/first", "first")):
        assert [r.name for r in list_runs(folder).runs] == [name]
    monkeypatch.chdir(tmp_path / "runs" / "first")
    assert [r.name for r in list_runs(".").runs] == ["first"]


# -- states


def test_a_journal_that_somebody_holds_is_being_written_and_one_that_nobody_holds_needs_recover(tmp_path: Path) -> None:
    journal = RunPaths(put_run(tmp_path)).journal(0, "main")
    journal.parent.mkdir()
    journal.write_bytes(b"x")
    with journal.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert list_runs(tmp_path).runs[0].state == "being written"
    [run] = list_runs(tmp_path).runs
    assert run.state == "needs recover"
    assert run.why is not None
    assert f"rolltape recover {tmp_path}" in run.why
    journal.write_bytes(b"")
    assert list_runs(tmp_path).runs[0].state == "settled"


Settings = dict[str, Any]


def started(root: Path, number: int, settings: Settings, start_step: int = 0) -> None:
    """An attempt with the settings of whoever recorded."""
    body = {"attempt": number, "start_step": start_step, "settings": settings, "versions": {}, "started_at": 1.0}
    RunPaths(root).attempt(number).write_text(json.dumps(body))


def put_steps(root: Path, steps: range, attempt: int = 0, split: str = "train") -> None:
    for step in steps:
        put_step(root, step, [turn(id=f"{split}{attempt}-{step}")], attempt=attempt, split=split, first=100 * step)


def test_a_step_that_was_recorded_again_is_not_still_to_come(tmp_path: Path) -> None:
    started(put_run(tmp_path), 0, {"steps": 2})
    put_steps(tmp_path, range(2))
    started(tmp_path, 1, {}, start_step=1)  # of somebody who says no number
    put_steps(tmp_path, range(1, 3), attempt=1)
    [run] = list_runs(tmp_path).runs
    assert (run.steps, run.steps_asked, run.state) == (3, 3, "complete")


@pytest.mark.parametrize(
    ("settings", "asked", "state"),
    [
        ({"steps": 3, "eval": False}, 3, "unfinished"),
        ({"steps": 2, "eval": False}, 2, "complete"),
        ({"num_rollout": 5}, 5, "unfinished"),
        ({"miles": {"num_rollout": 2}, "rolltape": {}}, 2, "complete"),
        ({"miles": {"num_rollout": None}, "steps": True}, None, "settled"),
        ({"imported": []}, None, "settled"),
    ],
)
def test_a_run_is_complete_where_it_has_the_steps_that_were_asked_for(
    tmp_path: Path, settings: Settings, asked: int | None, state: str
) -> None:
    started(put_run(tmp_path), 0, settings)
    put_steps(tmp_path, range(2))
    [run] = list_runs(tmp_path).runs
    assert (run.steps, run.steps_asked, run.state) == (2, asked, state)


def test_steps_that_a_run_was_continued_for_count_from_where_it_went_on(tmp_path: Path, rolltape: Run) -> None:
    started(put_run(tmp_path / "live"), 0, {"steps": 40})
    put_steps(tmp_path / "live", range(8))
    assert "8 of 40" in rolltape("list", tmp_path)[1]
    started(tmp_path / "live", 1, {"steps": 3}, start_step=8)
    put_steps(tmp_path / "live", range(8, 9), attempt=1)
    started(tmp_path / "live", 2, {"steps": 2, "eval": True}, start_step=9)
    put_steps(tmp_path / "live", range(1), attempt=2, split="eval-x")
    [run] = list_runs(tmp_path).runs
    assert (run.steps, run.steps_asked, run.evaluations, run.evaluations_asked) == (9, 11, 1, 2)
    assert run.state == "unfinished"
    started(put_run(tmp_path / "miles"), 0, {"miles": {"num_rollout": 6}})
    put_steps(tmp_path / "miles", range(4))
    started(tmp_path / "miles", 1, {"miles": {"num_rollout": 6}}, start_step=2)  # a checkpoint of step 1
    put_steps(tmp_path / "miles", range(2, 3), attempt=1)
    [run] = [r for r in list_runs(tmp_path).runs if r.name == "miles"]
    assert (run.steps, run.steps_asked, run.state) == (3, 6, "unfinished")


@pytest.mark.parametrize(
    ("counts", "asked", "why"),
    [
        ({"emitted": 2}, 2, None),
        ({"emitted": 1, "error": 1}, 2, None),
        ({"emitted": 1, "cancelled": 1}, 2, "step 1 was cut short: 1 of 2 task groups ended."),
        ({"emitted": 1, "error": 1}, 40, "step 1 was cut short: 1 of 40 task groups ended."),
        ({"interrupted": 2}, None, "step 1 was cut short."),  # as recover leaves it
    ],
)
def test_a_run_whose_last_step_was_cut_short_is_unfinished(
    tmp_path: Path, rolltape: Run, counts: dict[str, int], asked: int | None, why: str | None
) -> None:
    started(put_run(tmp_path / "run"), 0, {"steps": 2})
    put_step(tmp_path / "run", 0, [turn(id="z")], counts={"cancelled": 1})  # it went on, so it was not stopped
    records = [turn(id="a"), turn(id="b", idx=1)]
    table = encode(records, [Context(run="r1", step=1, group_index=5 + i) for i in range(2)])
    step = Step(step=1, counts=counts, next_group_index=None if asked is None else 5 + asked)
    put_part(
        tmp_path / "run",
        Part("train", 1, 0, "main"),
        table,
        [group(records[:1])],
        [Outcome(trace_id=t, disposition="emitted") for t in "ab"],
        step,
    )
    [run] = list_runs(tmp_path).runs
    assert (run.state, run.why) == ("unfinished" if why else "complete", why)
    assert (f"run: {why}" in rolltape("list", tmp_path)[1]) == (why is not None)


@pytest.mark.parametrize("scores", [True, False])
def test_a_run_in_which_nothing_ended_well_is_seen(tmp_path: Path, rolltape: Run, scores: bool) -> None:
    started(put_run(tmp_path / "bad"), 0, {"steps": 1})
    failed = [turn(id=f"t{i}", reward=None, errors=["ToolError: no"]) for i in range(2)]
    put_step(tmp_path / "bad", 0, failed, fates={"t0": "cancelled", "t1": "error"})
    if not scores:  # as earlier versions wrote commits
        [path] = (tmp_path / "bad" / "commits").rglob("*.json")
        commit = Commit.read(path)
        path.write_bytes(replace(commit, file=replace(commit.file, scores=None)).to_bytes())
    _, out, _ = rolltape("list", tmp_path)
    assert "none ended" in out.splitlines()[2]
    assert f"bad: none of 2 tries ended well; `rolltape stats {tmp_path / 'bad'}` says why." in out
    put_step(tmp_path / "bad", 1, [turn(id="good")], first=9)
    assert [r.state for r in list_runs(tmp_path).runs] == ["complete"]


def test_looking_at_a_journal_does_not_let_go_of_its_writers_lock(tmp_path: Path) -> None:
    journal = RunPaths(put_run(tmp_path)).journal(0, "main")
    journal.parent.mkdir()
    with journal.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [list_runs(tmp_path).runs[0].state for _ in range(2)] == ["being written"] * 2


def damage(root: Path, how: str) -> str:
    """Damage a run of two steps; what must be named."""
    paths, part = RunPaths(root), Part("train", 1, 0, "main")
    if how == "commit":
        paths.commit(part).write_bytes(paths.commit(part).read_bytes()[:-9])
        return str(paths.commit(part))
    if how == "cut":
        os.truncate(paths.parquet(part), 100)
        return f"{paths.parquet(part)} has 100 bytes"
    if how == "missing":
        paths.parquet(part).unlink()
        return f"{paths.parquet(part)} is missing"
    paths.run.write_text("{")
    return str(paths.run)


@pytest.mark.parametrize("how", ["commit", "cut", "missing", "run.json"])
def test_a_damaged_run_is_listed_with_what_is_damaged(tmp_path: Path, rolltape: Run, how: str) -> None:
    put_run(tmp_path / "bad")
    put_step(tmp_path / "bad", 0, [turn(id="a")])
    put_step(tmp_path / "bad", 1, [turn(id="b")])
    put_run(tmp_path / "good")
    named = damage(tmp_path / "bad", how)
    states = {r.name: r.state for r in list_runs(tmp_path).runs}
    assert states == {"bad": "damaged", "good": "settled"}
    code, out, _ = rolltape("list", tmp_path)
    assert code == 0
    assert f"bad: {named}" in out


def test_a_run_of_a_newer_version_is_said_to_be_one(tmp_path: Path) -> None:
    put_run(tmp_path, schema="2.0")
    [run] = list_runs(tmp_path).runs
    assert run.state == "newer version"
    assert "install a newer rolltape" in str(run.why)


# -- the command


def test_the_table_fits_a_hundred_columns(tmp_path: Path, rolltape: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    root = put_run(tmp_path / "first", model="some-organisation/a-model-of-some-name", taskset="a.package.name")
    put_step(root, 0, [turn()])
    put_step(root, 0, [turn(id="u")], split="eval")
    monkeypatch.setattr("rolltape.replay.printing.console.out._width", 100)
    _, out, _ = rolltape("list", tmp_path)
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == [
        "began",
        "state",
        "steps",
        "evals",
        "traces",
        "tokens",
        "size",
        "reward",
        "model",
        "taskset",
        "run",
    ]
    assert all(word in lines[2] for word in ("settled", "1.00", " kB", "first", "…"))
    monkeypatch.setattr("rolltape.replay.printing.console.out._width", 80)
    _, out, _ = rolltape("list", tmp_path)
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert out.endswith("no room for model, taskset: in a wider terminal, or with --json\n")
    monkeypatch.setattr("rolltape.replay.printing.console.out._width", 60)
    _, out, _ = rolltape("list", tmp_path)
    assert max(map(len, out.splitlines()[:-1])) <= 60
    assert {"state", "reward", "run"} <= set(out.splitlines()[0].split())
    assert out.endswith("no room for model, taskset, size, evals: in a wider terminal, or with --json\n")


def test_a_run_of_evaluations_only_shows_them(tmp_path: Path, rolltape: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one = put_run(tmp_path / "one")
    for step, reward in enumerate([0.25, 0.75]):
        put_step(one, step, [turn(id=f"e{step}", reward=reward)], split="eval-math")
    several = put_run(tmp_path / "several")
    put_step(several, 0, [turn(id="m")], split="eval-math")
    put_step(several, 0, [turn(id="c")], split="eval-code")
    put_step(several, 1, [turn(id="d")], split="eval-code")
    started(several, 0, {"steps": 4, "eval": True})
    monkeypatch.setattr("rolltape.replay.printing.console.out._width", 70)
    _, out, _ = rolltape("list", tmp_path)
    lines = {line.split()[-1]: re.split(r" {2,}", line.strip()) for line in out.splitlines() if line}
    assert lines["run"][1:3] == ["state", "steps"]
    assert "evals" not in lines["run"]
    assert (lines["one"][2], lines["one"][-2:]) == ("2 evals", ["0.25→0.75", "one"])
    assert (lines["several"][2], lines["several"][-2:]) == ("3 of 4 evals", ["–", "several"])
    put_step(several, 0, [turn(id="t")])
    _, out, _ = rolltape("list", several)
    assert "evals" in out.splitlines()[0]
    assert "3 of 4 evals" not in out


def test_what_all_runs_share_is_said_once(tmp_path: Path, rolltape: Run) -> None:
    put_run(tmp_path / "a", model="m", taskset="x")
    put_run(tmp_path / "b", model="m", taskset="y")
    _, out, _ = rolltape("list", tmp_path)
    lines = out.splitlines()
    assert lines[0] == "model m"
    assert lines[2].split()[-2:] == ["taskset", "run"]


def test_json_holds_every_run(tmp_path: Path, rolltape: Run) -> None:
    put_step(put_run(tmp_path / "one"), 0, [turn(reward=0.5)])
    code, out, _ = rolltape("list", tmp_path, "--json")
    [run] = json.loads(out)["runs"]
    assert code == 0
    assert (run["path"], run["reward_first"], run["reward_last"]) == (str(tmp_path / "one"), 0.5, 0.5)


def test_an_empty_folder_and_a_missing_one_say_so(tmp_path: Path, rolltape: Run) -> None:
    code, out, _ = rolltape("list", tmp_path)
    assert (code, out) == (
        0,
        f"No recorded run in {tmp_path} or below; `rolltape demo` records one to look at.\n",
    )
    code, _, err = rolltape("list", tmp_path / "nothing")
    assert (code, err) == (2, f"Error: {tmp_path / 'nothing'} does not exist.\n")
    (tmp_path / "file").touch()
    with pytest.raises(RunNotFound, match="is a file"):
        list_runs(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    [line] = list_runs(tmp_path).unreadable
    assert "closed: Permission denied" in line


def test_a_name_with_control_characters_is_printed_as_escapes(tmp_path: Path) -> None:
    put_run(tmp_path / "a\x1b[31mrun", model="m\x1b]0;x\x07")
    words = [sys.executable, "-m", "rolltape.replay.cli", "list", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mrun" in done.stdout


def test_a_reward_that_is_no_number_is_in_no_mean(tmp_path: Path, rolltape: Run) -> None:
    put_run(tmp_path)
    record = trace(said(None, [1, 2]), reply(0, [3], [4]), id="n", rewards={"ok": float("nan")})
    put_step(tmp_path, 0, [record], fates={"n": "failed_check"})
    _, out, _ = rolltape("list", tmp_path)
    assert "nan" not in out
    assert list_runs(tmp_path).runs[0].ends == (None, None)
