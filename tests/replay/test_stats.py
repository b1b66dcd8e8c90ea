"""`rolltape stats`: every number against a count in plain Python, and what is never averaged silently."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from replay_build import Record, group, put_attempt, put_part, put_run, put_step, reply, said, trace, turn
from rich.text import Text

from rolltape.replay import ConvertOptions, convert, open_run, outcomes_of
from rolltape.replay.commands import stats as stats_command
from rolltape.replay.printing.console import SafeConsole
from rolltape.replay.printing.stats import render
from rolltape.replay.printing.words import alike, count, sparkline
from rolltape.replay.rollouts import PassRule
from rolltape.replay.stats import Summary, pass_at, stats
from rolltape.schema import Context, Outcome, Step, encode
from rolltape.schema.errors import BadInput
from rolltape.schema.paths import Part
from rolltape.schema.records import Turn

Cli = Callable[..., tuple[int, str, str]]


def put_rollouts(
    root: Path,
    step: int,
    groups: Sequence[Sequence[Record]],
    *,
    versions: Sequence[Sequence[str | None]] = (),
    fates: Sequence[Outcome] = (),
    writer: str = "main",
    first_group: int = 0,
    **changes: Any,
) -> None:
    """Record a step of groups, with the weight versions of each trace's turns, and outcomes other than conversion's."""
    records = [r for members in groups for r in members]
    place = [first_group + i for i, members in enumerate(groups) for _ in members]
    contexts = [
        Context(
            run="r1",
            step=step,
            writer=writer,
            group_index=g,
            turns=tuple(Turn(weight_version=v) for v in (versions[i] if versions else ())),
        )
        for i, g in enumerate(place)
    ]
    table = encode(records, contexts)
    retried = {o.trace_id for o in fates if o.disposition == "retried"}
    kept = [[r for r in members if r["id"] not in retried] for members in groups]
    made = convert(table, [group(m, first_group + i, step=step) for i, m in enumerate(kept)], ConvertOptions())
    told = {o.trace_id: o for o in (*outcomes_of(made), *fates)}
    counts = Counter(o.disposition for o in told.values())
    record = Step(step=step, writer=writer, counts={"started": counts.total(), **counts, "lost": 0})
    put_part(root, Part("train", step, 0, writer), table, made.records, list(told.values()), replace(record, **changes))


def by_hand(rows: Sequence[Record], k: int, least: float = 1.0) -> dict[str, Any]:
    """The numbers of some rows, counted one after the other."""
    sound = [r for r in rows if r["disposition"] not in ("retried", "cancelled") and not r["error_types"]]
    rewards = [r["reward"] for r in sound if r["reward"] is not None and math.isfinite(r["reward"])]
    lengths = sorted(r["num_sampled"] for r in sound if r["num_sampled"])
    groups: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for r in sound:
        if r["reward"] is not None and math.isfinite(r["reward"]):
            groups[r["step"], r["group_index"]].append(r["reward"])
    passing = [(len(g), sum(x >= least for x in g)) for g in groups.values() if len(g) >= k]
    at = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in passing]
    names: defaultdict[str, list[float]] = defaultdict(list)
    for r in sound:
        for name, value in r["rewards"].items():
            if value is not None and math.isfinite(value):
                names[name].append(value)
    return {
        "tries": len(rows),
        "rollouts": len(sound),
        "reward": statistics.fmean(rewards) if rewards else None,
        "sd": statistics.pstdev(rewards) if rewards else None,
        "names": {name: (len(v), statistics.fmean(v), min(v), max(v)) for name, v in names.items()},
        "pass": statistics.fmean(at) if at else None,
        "groups": sum(len(g) >= 2 for g in groups.values()),
        "flat": sum(len(g) >= 2 and len(set(g)) == 1 for g in groups.values()),
        "length": statistics.fmean(lengths) if lengths else None,
        "p95": _percentile(lengths, 0.95),
        "cut": sum(r["is_truncated"] is True for r in sound),
        "errors": sum(bool(r["error_types"]) for r in rows),
        "sampled": sum(r["num_sampled"] for r in rows),
    }


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low, part = int(place), place - int(place)
    return ordered[low] + part * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def told(summary: Summary, k: int) -> dict[str, Any]:
    """The same numbers of a summary."""
    names = {n: (s.count, s.mean, s.low, s.high) for n, s in summary.rewards.items() if s.count}
    return {
        "tries": summary.tries,
        "rollouts": summary.rollouts,
        "reward": summary.reward.mean,
        "sd": summary.reward.sd,
        "names": names,
        "pass": summary.pass_at.get(k),
        "groups": summary.groups,
        "flat": summary.flat,
        "length": summary.length.mean,
        "p95": summary.length.p95,
        "cut": summary.truncated,
        "errors": summary.errors,
        "sampled": summary.sampled,
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "names":
            assert found[name].keys() == value.keys()
            for reward, numbers in value.items():
                assert found[name][reward] == pytest.approx(numbers), reward
        else:
            assert found[name] == pytest.approx(value), name


# -- numbers


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_demo_run_is_counted_as_by_hand(demo_run: Path, k: int) -> None:
    run = open_run(demo_run)
    found = stats(run)
    rows = run.table().to_pylist(maps_as_pydicts="strict")
    same(told(found.total, k), by_hand(rows, k))
    assert [s.steps for s in found.steps] == [(0,), (1,), (2,)]
    for summary in found.steps:
        same(told(summary, k), by_hand([r for r in rows if r["step"] == summary.steps[0]], k))
    for summary in found.tasks:
        assert summary.task is not None
        same(told(summary, k), by_hand([r for r in rows if r["task_idx"] == summary.task.index], k))


def test_a_run_of_everything_is_counted_as_by_hand(tmp_path: Path) -> None:
    put_run(tmp_path)
    rng = random.Random(0)
    for step in range(7):
        groups = [[_some_trace(rng, f"{step}-{g}-{i}", idx=g + step % 3) for i in range(4)] for g in range(5)]
        fates = [
            Outcome(trace_id=r["id"], disposition=rng.choice(["retried", "cancelled"]))
            for members in groups
            for r in members
            if rng.random() < 0.15
        ]
        put_rollouts(tmp_path, step, groups, fates=fates, first_group=5 * step)
    run = open_run(tmp_path)
    rows = run.table().to_pylist(maps_as_pydicts="strict")
    found = stats(run)
    for k in (1, 2):
        same(told(found.total, k), by_hand(rows, k))
        for summary in (*found.steps, *found.buckets(3)):
            same(told(summary, k), by_hand([r for r in rows if r["step"] in summary.steps], k))
        for summary in found.tasks:
            assert summary.task is not None
            mine = [r for r in rows if r["task_idx"] == summary.task.index]
            same(told(summary, k), by_hand(mine, k))
            for mean, step in zip(summary.curve, sorted({r["step"] for r in mine}), strict=True):
                assert mean == pytest.approx(by_hand([r for r in mine if r["step"] == step], 1)["reward"])
    assert [s.steps for s in found.buckets(3)] == [(0, 1), (2, 3), (4, 5, 6)]


def _some_trace(rng: random.Random, id: str, idx: int) -> Record:
    rewards: dict[str, float | None] = {"a": rng.choice([0.0, 1.0]), "b": rng.choice([0.0, 0.25, None])}
    if rng.random() < 0.05:
        rewards["a"] = math.nan
    if rng.random() < 0.1:
        rewards = {}
    errors = ["ProviderError: 503"] if rng.random() < 0.1 else []
    length = rng.randrange(1, 40)
    last = reply(0, [3], [5] * length, finish=rng.choice(["stop", "length"]))
    return trace(said(None, [1, 2]), last, id=id, idx=idx, rewards=rewards, errors=errors)


def test_only_columns_without_tokens_and_messages_are_read(demo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Sequence[str] | None] = []
    original = pq.ParquetFile.read_row_group

    def spy(self: Any, i: int, columns: Sequence[str] | None = None, **rest: Any) -> Any:
        read.append(columns)
        return original(self, i, columns=columns, **rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    stats(open_run(demo_run))
    assert len(read) == 3
    for columns in read:
        assert columns is not None
        assert not {c for c in columns if c.startswith(("node_", "token")) or c in ("sampled", "logprobs", "extra")}


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                expected = 1 - math.comb(n - c, k) / math.comb(n, k)
                assert pass_at(k, [n], [c]) == pytest.approx(expected)
    assert pass_at(4, [4, 3], [1, 3]) == 1.0
    assert pass_at(4, [3], [3]) is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("correct", PassRule("correct", 1.0)),
        ("correct>=0.5", PassRule("correct", 0.5)),
        ("a>b > 2e-1", PassRule("a>b", 0.2, more=True)),
        (">=.5", PassRule(None, 0.5)),
        ("x>=y", PassRule("x>=y", 1.0)),
    ],
)
def test_what_passed_is_a_reward_and_a_number(text: str, rule: PassRule) -> None:
    assert PassRule.parse(text) == rule


def test_parts_that_almost_add_up_to_one_pass(tmp_path: Path) -> None:
    put_run(tmp_path)
    parts = {"a": 0.7, "b": 0.2, "c": 0.1 - 1e-12}
    assert sum(parts.values()) < 1  # with 0.1 as well, but from Python 3.12 on `sum` gives 1.0 then
    put_rollouts(tmp_path, 0, [[turn(id="t", rewards=parts)]])
    assert stats(open_run(tmp_path)).total.pass_at == {1: 1.0}


def test_a_named_reward_decides_what_passed(tmp_path: Path) -> None:
    put_run(tmp_path)
    rewards: list[dict[str, float | None]] = [{"a": 0.5, "b": 1.0}, {"a": 0.4, "b": 1.0}, {"a": None, "b": 1.0}]
    put_rollouts(tmp_path, 0, [[turn(id=f"t{i}", rewards=r) for i, r in enumerate(rewards)]])
    run = open_run(tmp_path)
    total = stats(run, rule=PassRule("a", 0.5)).total
    assert (total.pass_at[1], total.pass_groups[1], total.pass_groups[3]) == (0.5, 1, 0)
    assert stats(run, rule=PassRule("a", 0.5, more=True)).total.pass_at[1] == 0.0
    with pytest.raises(BadInput, match="no trace has a reward 'c'; recorded are a, b"):
        stats(run, rule=PassRule("c"))


# -- null, NaN, errors, retries


def test_null_and_nan_are_left_out_and_counted_and_neither_is_zero(tmp_path: Path) -> None:
    put_run(tmp_path)
    rewards: list[dict[str, float | None]] = [{"a": 1.0}, {"a": None}, {}, {"a": math.nan}, {"a": math.inf}]
    put_rollouts(tmp_path, 3, [[turn(id=f"t{i}", rewards=r) for i, r in enumerate(rewards)]])
    found = stats(open_run(tmp_path)).total
    a = found.rewards["a"]
    assert (a.count, a.mean, a.missing, a.not_finite) == (1, 1.0, 2, 2)
    assert (found.reward.count, found.reward.mean, found.reward.not_finite) == (1, 1.0, 2)
    assert (found.groups, found.flat) == (0, 0)


def test_nan_and_what_was_not_scored_are_named_with_their_steps(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    for step in range(4):
        value = math.nan if step % 2 else None
        put_rollouts(tmp_path, step, [[turn(id=f"a{step}"), turn(id=f"b{step}", rewards={"ok": value})]])
    _, out, _ = rolltape("stats", tmp_path)
    assert "NaN      ok: 2 of 6 values are NaN or infinite, in steps 1, 3; left out" in out
    assert "unscored ok: 2 of 8 rollouts have none; left out, not 0" in out


def test_what_an_error_left_behind_is_no_reward(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_rollouts(tmp_path, 0, [[turn(id="a", reward=1.0), turn(id="b", reward=0.0, errors=["ToolError: no"])]])
    found = stats(open_run(tmp_path))
    assert (found.total.reward.mean, found.total.reward.missing, found.total.errors) == (1.0, 0, 1)
    assert found.rollouts.errors == {("ToolError", "no"): 1}


def test_a_try_that_was_run_again_counts_as_an_error_and_not_as_a_rollout(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    tries = [turn(id="a0", reward=0.0, errors=["ToolError: no"]), turn(id="a1", reward=1.0)]
    put_rollouts(tmp_path, 0, [tries], fates=[Outcome(trace_id="a0", disposition="retried", reason="ToolError: no")])
    found = stats(open_run(tmp_path)).total
    assert (found.tries, found.rollouts, found.errors, found.reward.mean) == (2, 1, 1, 1.0)
    assert rolltape("stats", tmp_path)[1].startswith(
        f"{tmp_path}  train, step 0: 1 rollout, 2 tries with 6 sampled tokens\n"
    )
    assert found.coverage == {"started": 2, "emitted": 1, "retried": 1, "lost": 0}
    assert found.dropped == {"retried": 1}


def test_groups_that_differ_below_what_a_trainer_sees_carry_no_signal(tmp_path: Path) -> None:
    put_run(tmp_path)
    almost = [turn(id="a", rewards={"ok": 0.3}), turn(id="b", rewards={"ok": 0.1 + 0.2})]
    apart = [turn(id="c", idx=1, rewards={"ok": 0.3}), turn(id="d", idx=1, rewards={"ok": 0.3001})]
    alone = [turn(id="e", idx=2)]
    put_rollouts(tmp_path, 0, [almost, apart, alone])
    total = stats(open_run(tmp_path)).total
    assert (total.groups, total.flat) == (2, 1)


# -- versions, time, coverage


def test_lag_is_that_of_the_oldest_turn_behind_the_newest_of_the_step(tmp_path: Path) -> None:
    put_run(tmp_path)
    members = [turn(id=f"t{i}") for i in range(4)]
    put_rollouts(tmp_path, 0, [members], versions=[["9", "10"], ["10"], [None], []])
    put_rollouts(tmp_path, 1, [[turn(id="u")]], versions=[["12"]], first_group=1)
    found = stats(open_run(tmp_path))
    assert [s.lag for s in found.steps] == [(0, 1), (0, 0)]
    assert found.steps[0].versions == ("9", "10")
    assert found.total.lag == (0, 1)


def test_versions_that_are_no_numbers_have_no_lag(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_rollouts(tmp_path, 0, [[turn(id="a"), turn(id="b")]], versions=[["default"], ["2"]])
    put_rollouts(tmp_path, 1, [[turn(id="c")]])
    found = stats(open_run(tmp_path))
    assert [s.lag for s in found.steps] == [None, None]
    assert found.steps[0].versions == ("2", "default")


def test_speed_is_by_the_time_from_the_first_writers_start_to_the_last_ones_end(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_rollouts(tmp_path, 0, [[turn(id="a")]], started_at=10.0, ended_at=14.0)
    put_rollouts(tmp_path, 0, [[turn(id="b")]], writer="other", first_group=9, started_at=11.0, ended_at=16.0)
    put_rollouts(tmp_path, 1, [[turn(id="c")]], first_group=1)
    first, second = stats(open_run(tmp_path)).steps
    assert (first.sampled, first.seconds, first.tokens_per_second) == (6, 6.0, 1.0)
    assert first.coverage["started"] == 2
    assert (second.seconds, second.tokens_per_second) == (None, None)


def test_lost_tries_are_part_of_the_coverage(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a")], counts={"started": 3, "emitted": 1, "lost": 2})
    assert stats(open_run(tmp_path)).total.dropped == {"lost": 2}
    _, out, _ = rolltape("stats", tmp_path)
    assert "tries    3 started = 1 emitted + 2 lost" in out


def test_reasons_that_differ_in_numbers_only_are_one_line(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    members = [turn(id=f"t{i}") for i in range(6)]
    fates = [
        Outcome(trace_id=f"t{i}", disposition="filtered", reason=f"deviation {i / 7:.3f} of group {i}")
        for i in range(6)
    ]
    put_rollouts(tmp_path, 0, [members], fates=fates)
    code, out, _ = rolltape("stats", tmp_path)
    assert code == 0
    assert "dropped  6 x filtered: deviation 0.000 of group 0 (6 messages, numbers differ)" in out


# -- which steps


def test_only_the_newest_attempt_of_a_step_counts_unless_another_is_asked_for(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a", reward=0.0)])
    put_step(tmp_path, 1, [turn(id="b", reward=0.0)])
    put_attempt(tmp_path, 1, start_step=1)
    put_step(tmp_path, 1, [turn(id="c", reward=1.0)], attempt=1)
    run = open_run(tmp_path)
    assert [s.reward.mean for s in stats(run).steps] == [0.0, 1.0]
    assert [s.reward.mean for s in stats(run, attempt=0).steps] == [0.0, 0.0]


def test_steps_the_last_ones_and_evaluations_are_chosen(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    for step in range(5):
        put_step(tmp_path, step, [turn(id=f"t{step}", reward=step / 4)])
    put_step(tmp_path, 2, [turn(id="e", reward=0.125)], split="eval")
    run = open_run(tmp_path)
    assert [s.steps for s in stats(run, last=2).steps] == [(3,), (4,)]
    assert [s.steps for s in stats(run, steps=[3, 1]).steps] == [(1,), (3,)]

    def splits(*words: str) -> list[tuple[str, list[float]]]:
        code, out, _ = rolltape("stats", tmp_path, "--json", *words)
        assert code == 0
        return [(s["split"], [x["reward"]["mean"] for x in s["steps"]]) for s in json.loads(out)["splits"]]

    assert splits("--step", "1", "--step", "3") == [("train", [0.25, 0.75])]
    assert splits("--eval", "--last", "1") == [("train", [1.0]), ("eval", [0.125])]
    assert splits("--split", "eval") == [("eval", [0.125])]
    code, _, err = rolltape("stats", tmp_path, "--split", "evil")
    assert (code, err) == (2, f"Error: {tmp_path}: no split 'evil' was recorded; recorded are 'train', 'eval'.\n")
    code, _, err = rolltape("stats", tmp_path, "--step", "9")
    assert code == 2
    assert "step 9 of 'train' was not recorded; recorded are 5 steps from 0 to 4." in err


def test_a_run_of_nothing_but_evaluations_needs_no_option(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="e", reward=0.5)], split="eval-aime")
    assert json.loads(rolltape("stats", tmp_path, "--json")[1])["splits"][0]["split"] == "eval-aime"
    assert "eval-aime step 0: 1 trace\n" in rolltape("show", tmp_path)[1]


# -- what is shown


def drawn(found: Any, width: int, **options: Any) -> list[str]:
    console = SafeConsole(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(found, width=width, rows=options.pop("rows", 20), **options))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps of one group of two. Not to be written to."""
    root = put_run(tmp_path_factory.mktemp("long"))
    for step in range(60):
        members = [turn(id=f"{step}-{i}", reward=min(1.0, (step + 60 * i) / 100)) for i in range(2)]
        put_rollouts(root, step, [members], first_group=step, started_at=0.0, ended_at=2.0)
    return root


@pytest.mark.parametrize("width", [80, 100])
def test_a_long_run_fits_a_screen(long_run: Path, width: int) -> None:
    found = stats(open_run(long_run))
    lines = drawn(found, width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 45
    steps = [line.split()[0] for line in lines[2:22]]
    assert (steps[0], steps[1], steps[-1]) == ("0–2", "3–5", "57–59")
    assert any(line.startswith("reward") and "▁" in line and "█" in line for line in lines)


def test_what_there_is_no_room_for_is_named(long_run: Path) -> None:
    found = stats(open_run(long_run))
    narrow = drawn(found, 60)
    assert max(map(len, narrow)) <= 60
    told = " ".join(" ".join(narrow).split())
    assert "no room for p95" in told
    assert "no room for low, high: in a wider terminal, or with --json" in told
    assert {"step", "reward", "errors", "dropped"} <= set(next(line.split() for line in narrow if " reward " in line))
    assert any(line.startswith("reward ") for line in narrow)
    assert not [line for line in drawn(found, 120) if line.startswith("no room")]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80])
def test_only_what_is_shown_is_explained_and_no_figure_is_cut(long_run: Path, width: int) -> None:
    one = drawn(stats(open_run(long_run)), width)
    heads, rows = one[0].split(), [line.split() for line in one[2:22]]
    assert all(len(row) == len(heads) for row in rows)
    assert [row[heads.index("reward")] for row in rows[:2]] == ["0.310", "0.340"]
    below = " ".join(one[22:]).partition("curve")[0]
    legend = below.partition("no room")[0]
    assert {name.partition("@")[0] for name in heads} >= set(re.findall(r"(?:^|; )(\w+):", legend))
    left = re.search(r"no room for (.*?): in", below)
    assert not set(heads) & set(left[1].split(", ") if left else ())


def test_every_step_is_shown_on_request(long_run: Path, rolltape: Cli) -> None:
    _, out, _ = rolltape("stats", long_run, "--all")
    assert [line.split()[0] for line in out.splitlines()[4:64]] == [str(n) for n in range(60)]


def test_tasks_that_fail_come_first_and_the_rest_is_counted(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    groups = [[turn(id=f"t{i}", idx=i, reward=i / 30)] for i in range(30)]
    groups[20] = [turn(id="broken", idx=20, reward=None, errors=["ToolError: no"])]
    put_rollouts(tmp_path, 0, groups)
    _, out, _ = rolltape("stats", tmp_path, "--by", "task")
    assert [line.split()[0] for line in out.splitlines()[4:8]] == ["20", "0", "1", "2"]
    assert "… and 10 tasks with higher rewards (--all lists them)" in out
    _, out, _ = rolltape("stats", tmp_path, "--by", "task", "--json")
    assert len(json.loads(out)["splits"][0]["tasks"]) == 30


def test_tasks_of_several_types_are_told_by_their_type(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    golf = turn(id="golf", reward=0.5)
    golf["task"]["type"] = "GolfTask"
    put_rollouts(tmp_path, 0, [[golf], [turn(id="probe")]])
    _, out, _ = rolltape("stats", tmp_path, "--by", "task")
    assert [line.split()[:2] for line in out.splitlines() if line.strip()[:2] in ("ta", "0 ")] == [
        ["task", "type"],
        ["0", "GolfTask"],
        ["0", "ProbeTask"],
    ]
    put_rollouts(put_run(tmp_path / "one"), 0, [[turn(id="a")], [turn(id="b", idx=1)]])
    assert "ProbeTask" not in rolltape("stats", tmp_path / "one", "--by", "task")[1]


def test_tasks_of_one_name_have_their_index_beside_it_and_one_of_two_names_is_one(
    tmp_path: Path, rolltape: Cli
) -> None:
    put_run(tmp_path)
    records = [turn(id=f"t{i}", idx=idx, reward=i / 10) for i, idx in enumerate((0, 8, 1, 1))]
    for record, name in zip(records, ("plums-0", "plums-0", "plums-1", "renamed"), strict=True):
        record["task"]["data"]["name"] = name
    put_rollouts(tmp_path, 0, [[record] for record in records])
    _, out, _ = rolltape("stats", tmp_path, "--by", "task")
    rows = [line for line in out.splitlines() if line.strip().startswith("plums")]
    assert [line.split("  ")[0].strip() for line in rows] == ["plums-0 (0)", "plums-0 (8)", "plums-1"]
    assert rows[2].split()[1] == "2"


def test_an_attempt_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, rolltape: Cli) -> None:
    put_rollouts(put_run(tmp_path), 0, [[turn(id="a")]])
    code, out, said = rolltape("stats", tmp_path, "--attempt", 7)
    assert (code, out) == (2, "")
    assert "there is no attempt 7; recorded are 0." in " ".join(said.split())


def test_an_unreachable_rule_is_pointed_out(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    put_rollouts(tmp_path, 0, [[turn(id="a", reward=0.5)]])
    _, out, _ = rolltape("stats", tmp_path)
    assert "pass     no total reward >= 1: the largest is 0.500; --pass NAME>=X says what counts as passed" in out


def test_names_and_messages_from_traces_do_nothing_to_the_terminal(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    hostile = turn(id="a", rewards={"\x1b[31mname\nx": 1.0}, data={"name": "\x1b]0;t\x07"})
    bad = turn(id="b", idx=1, reward=None, errors=["ToolError: \x1b[2J\u202e"])
    put_rollouts(tmp_path, 0, [[hostile], [bad]])
    for words in ([], ["--by", "task"], ["--json"]):
        _, out, _ = rolltape("stats", tmp_path, *words)
        assert not {"\x1b", "\x07", "\u202e"} & set(out)
        assert "\\x1b" in out or "\\u001b" in out


def test_a_run_without_traces_says_so(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    code, out, _ = rolltape("stats", tmp_path)
    assert code == 0
    assert "train: 0 rollouts, 0 tries" in out
    assert "No traces in train" in out
    put_step(tmp_path, 0, [])
    code, out, _ = rolltape("stats", tmp_path)
    assert (code, "No traces in train" in out) == (0, True)


@pytest.mark.parametrize("words", [["--watch", "--json"], ["--pass", " "], ["--last", "0"], ["--by", "group"]])
def test_what_cannot_be_meant_is_refused(long_run: Path, rolltape: Cli, words: list[str]) -> None:
    assert rolltape("stats", long_run, *words)[0] == 2


def test_a_damaged_file_is_a_sentence(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    commit = put_step(tmp_path, 0, [turn()])
    file = open_run(tmp_path).paths.parquet(commit.part)
    os.truncate(str(file), 200)
    code, _, err = rolltape("stats", tmp_path)
    assert code == 2
    assert err.startswith(f"Error: {file}: 200 bytes, but ")


# -- following


def test_a_run_that_grows_is_followed_until_ctrl_c(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a", reward=0.5)])
    words = [sys.executable, "-m", "rolltape.replay.cli", "stats", str(tmp_path), "--watch"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            first = _until(watching.stdout, "nobody records; Ctrl-C ends")
            put_step(tmp_path, 1, [turn(id="b", reward=1.0)])
            second = _until(watching.stdout, "nobody records; Ctrl-C ends")
            watching.send_signal(signal.SIGINT)
            out, err = watching.communicate(timeout=60)
        finally:
            watching.kill()
    assert any("train, step 0: 1 rollout," in line for line in first)
    assert any("train, steps 0–1: 2 rollouts," in line for line in second)
    assert (watching.returncode, err) == (0, "")
    assert "Traceback" not in out


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-m", "rolltape.replay.cli", "stats", str(run), "--watch"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        try:
            said = watching.stderr.readline()
            put_step(put_run(run), 0, [turn(id="a", reward=0.5)])
            first = _until(watching.stdout, "nobody records; Ctrl-C ends")
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=60)
        finally:
            watching.kill()
    assert said.startswith(f"{run} does not exist; ")
    assert said.endswith(" Waiting for it; Ctrl-C ends.\n")
    assert any("train, step 0: 1 rollout," in line or "No traces in train" in line for line in first)
    assert watching.returncode == 0


def test_waiting_for_a_run_ends_with_ctrl_c_and_never_begins_at_a_file(tmp_path: Path, rolltape: Cli) -> None:
    words = [sys.executable, "-m", "rolltape.replay.cli", "stats", str(tmp_path), "--watch"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stderr is not None
        try:
            assert "holds no run.json" in watching.stderr.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.communicate(timeout=60) == ("", "")
        finally:
            watching.kill()
    assert watching.returncode == 0
    (tmp_path / "file").write_text("x")
    assert rolltape("stats", tmp_path / "file", "--watch")[0] == 2


@pytest.mark.parametrize("height", [12, 40, 60])
def test_what_a_terminal_has_no_lines_for_is_counted(
    long_run: Path, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = SafeConsole(width=100, height=height, color_system=None, force_terminal=True)
    monkeypatch.setattr(stats_command, "out", console)
    found = render(stats(open_run(long_run)), width=100, rows=30)
    whole, status = len(console.render_lines(found)), "\nnobody records; Ctrl-C ends"
    with console.capture() as capture:
        console.print(stats_command._screen(found, Text(status)))
    lines = capture.get().splitlines()
    assert len(lines) == min(height, whole + 2)
    assert lines[-1] == "nobody records; Ctrl-C ends"
    left = whole - (height - 3)
    said = f"… {left} lines left out: in a taller terminal, or without --watch"
    assert (said in lines) == (height < whole + 2)
    assert height == 60 or said in lines


def _until(file: Any, text: str) -> list[str]:
    lines = []
    for line in file:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not printed: {lines}")


def test_following_reads_each_file_once(long_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: dict[str, Any] = {}
    root = Path(shutil.copytree(long_run, tmp_path / "run"))
    stats(open_run(root), cache=cache)
    opened: list[Any] = []
    original = pq.ParquetFile.__init__

    def spy(self: Any, source: Any, *rest: Any, **named: Any) -> None:
        opened.append(source)
        original(self, source, *rest, **named)

    monkeypatch.setattr(pq.ParquetFile, "__init__", spy)
    put_rollouts(root, 60, [[turn(id="new", reward=0.25)]], first_group=60)
    found = stats(open_run(root), cache=cache)
    assert len(opened) == 1
    assert (len(found.steps), found.steps[-1].reward.mean) == (61, 0.25)


# -- words


def test_sparklines_leave_gaps_where_nothing_is_known() -> None:
    assert sparkline([0.0, None, 1.0, math.nan, 0.5]) == "▁ █ ▅"
    assert sparkline([]) == ""
    assert sparkline([None, None]) == "  "
    assert len(sparkline(list(range(1000)), width=30)) == 30
    assert sparkline([2.0, 2.0]) == "▄▄"


def test_counts_stay_short() -> None:
    numbers = (0, 812, 9999, 10_000, 29_998, 123_456, 999_999, 1_234_567, 10**12)
    assert [count(n) for n in numbers] == [
        *("0", "812", "9,999", "10.0k", "30.0k", "123k", "1.0M", "1.2M", "1.0T"),
    ]


def test_messages_are_alike_where_only_numbers_and_ids_differ() -> None:
    messages = {
        "task 5 took 1.5 s": 3,
        "task 6 took 2e-3 s": 1,
        "task five": 1,
        f"trace {'0a' * 16}": 1,
        f"trace {'1b' * 16}": 1,
    }
    assert [(a.count, a.variants) for a in alike(messages)] == [(4, 2), (2, 2), (1, 1)]
    assert str(alike(messages)[0]) == "4 x task 5 took 1.5 s (2 messages, numbers differ)"
