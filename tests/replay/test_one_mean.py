"""One rule for means: they are of the rollouts that came to their end, wherever a mean is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay_build import group, put_run, put_step, trace, turn

from rolltape.replay import open_run
from rolltape.replay.diff import Diff
from rolltape.replay.diff_side import read_side
from rolltape.replay.means import mean_of, means_by
from rolltape.replay.printing.words import decimal
from rolltape.replay.stats import Spread, stats
from rolltape.schema.commits import Commit

Cli = Callable[..., tuple[int, str, str]]
NAN = float("nan")
ENDED = "WHERE coalesce(len(error_types), 0) = 0 AND coalesce(disposition NOT IN ('retried', 'cancelled'), true)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps with rollouts that failed with a part of their rewards, were cancelled, run again, not scored, or got NaN."""
    put_run(tmp_path)
    for step in range(2):
        records = [
            turn(id=f"s{step}good", reward=1.0 + step, idx=0),
            turn(id=f"s{step}bad", reward=0.25, idx=0),
            turn(id=f"s{step}failed", reward=0.0, idx=1, errors=["TaskError: finalize"]),
            turn(id=f"s{step}again", reward=9.0, idx=1, errors=["ProviderError: 503"]),
            turn(id=f"s{step}stopped", reward=7.0, idx=1),
            trace(id=f"s{step}empty", idx=2, rewards={}),
            turn(id=f"s{step}nan", reward=NAN, idx=3),
        ]
        fates = {f"s{step}again": "retried", f"s{step}stopped": "cancelled", f"s{step}nan": "failed_check"}
        groups = [
            group([r for r in records[:6] if r["id"] != f"s{step}again"], 2 * step),
            group(records[6:], 2 * step + 1),
        ]
        put_step(tmp_path, step, records, groups=groups, fates=fates, first=8 * step)
    return tmp_path


def test_stats_counts_what_came_to_its_end(run: Path) -> None:
    first, second = stats(open_run(run)).steps
    assert (first.reward.mean, second.reward.mean) == (0.625, 1.125)
    assert (first.rollouts, first.reward.count, first.reward.missing, first.reward.not_finite) == (4, 2, 1, 1)


def test_diff_list_and_sql_give_the_mean_of_stats(run: Path, rolltape: Cli) -> None:
    total = stats(open_run(run)).total
    found = json.loads(rolltape("diff", run, run, "--by", "step", "--json")[1])
    for name, spread in {"reward": total.reward, "sampled_tokens": total.length}.items():
        assert found["quantities"][name]["a"]["mean"] == pytest.approx(spread.mean)
    reward = found["quantities"]["reward"]["a"]
    assert (reward["n"], reward["unscored"], reward["not_finite"]) == (4, 2, 2)
    by_step = [row["changes"]["reward"]["a"]["mean"] for row in found["rows"]]
    assert by_step == [0.625, 1.125]
    [listed] = json.loads(rolltape("list", run, "--json")[1])["runs"]
    assert (listed["reward_first"], listed["reward_last"]) == (0.625, 1.125)
    assert f"{decimal(0.625, 2)}→{decimal(1.125, 2)}" in rolltape("list", run)[1]
    query = f"SELECT avg(reward) FILTER (isfinite(reward)) FROM traces {ENDED}"
    assert open_run(run).sql(query).fetchall() == [(total.reward.mean,)]


def test_the_share_of_errors_is_over_all_rollouts(run: Path, rolltape: Cli) -> None:
    found = json.loads(rolltape("diff", run, run, "--json")[1])
    assert found["quantities"]["error_rate"]["a"] == {
        "mean": pytest.approx(2 / 12),
        "n": 12,
        "unscored": 0,
        "not_finite": 0,
    }
    assert found["totals"]["failed"] == {"a": 4, "b": 4}


def test_a_list_reads_rows_only_where_its_commits_do_not_tell_the_mean(run: Path, rolltape: Cli) -> None:
    put_step(run, 2, [turn(id="x", reward=0.5)], groups=[group([turn(id="x", reward=0.5)], 9)], first=20)
    for file in (run / "traces").rglob("*.parquet"):
        file.write_bytes(bytes(file.stat().st_size))  # the same size, other bytes
    [listed] = json.loads(rolltape("list", run, "--json")[1])["runs"]
    assert (listed["reward_first"], listed["reward_last"]) == (0.625, 0.5)
    for path in (run / "commits").rglob("*.json"):  # as earlier versions wrote them, without scores
        commit = Commit.read(path)
        path.write_bytes(replace(commit, file=replace(commit.file, scores=None)).to_bytes())
    [listed] = json.loads(rolltape("list", run, "--json")[1])["runs"]
    assert (listed["reward_first"], listed["reward_last"]) == (None, 0.5)


# -- rounding


TENTHS = [0.1, 0.2, 0.3, 0.7]


@pytest.mark.parametrize("value", TENTHS)
def test_values_that_are_all_equal_have_that_mean_and_no_deviation(value: float) -> None:
    for n in (1, 3, 7, 10, 49, 1000):
        spread = Spread.of(np.full(n, value))
        assert (spread.mean, spread.sd) == (value, 0.0)
        assert means_by(np.arange(2 * n) % 2, np.full(2 * n, value), 3)[1].tolist() == [
            value,
            value,
            pytest.approx(NAN, nan_ok=True),
        ]


def test_a_mean_is_that_of_the_exact_sum_in_any_order() -> None:
    values = np.array([0.1] * 10 + [1e16, -1e16, 0.3])
    mean = math.fsum(values) / 13
    assert Spread.of(values).mean == Spread.of(values[::-1]).mean == mean_of(values) == mean
    assert means_by(np.zeros(13, np.int64), values, 1)[1].tolist() == [mean]
    assert means_by(np.array([0, 0, 2]), np.array([1.0, 2.0, 5.0]), 3)[1].tolist()[::2] == [1.5, 5.0]


@pytest.fixture
def level(tmp_path: Path) -> Path:
    """Ten steps whose rewards are all 0.2, each of one rollout more than the last; half of them are sums of parts."""
    put_run(tmp_path / "level")
    for step in range(10):
        parts = [{"a": 0.2, "b": 0.0} if i % 2 else {"a": 0.1, "b": 0.1} for i in range(step + 3)]
        put_step(
            tmp_path / "level", step, [turn(id=f"{step}-{i}", rewards=p) for i, p in enumerate(parts)], first=100 * step
        )
    return tmp_path / "level"


def test_equal_rewards_are_a_level_curve_without_deviation_in_every_command(level: Path, rolltape: Cli) -> None:
    total = stats(open_run(level)).total
    assert (total.reward.mean, total.reward.sd) == (0.2, 0.0)
    out = rolltape("stats", level)[1]
    [curve] = [line.split() for line in out.splitlines() if line.startswith("reward ")]
    assert curve == ["reward", "▄" * 10, "0.200", "0.200", "0.200", "0.000", "0.200", "0.200", "75"]
    assert "▄" * 10 in rolltape("stats", level, "--by", "task")[1]
    [listed] = json.loads(rolltape("list", level, "--json")[1])["runs"]
    assert (listed["reward_first"], listed["reward_last"]) == (0.2, 0.2)
    reward = json.loads(rolltape("diff", level, level, "--json")[1])["quantities"]["reward"]
    assert (reward["a"]["mean"], reward["se"]) == (0.2, 0.0)


def test_sums_that_are_equal_but_for_rounding_are_shown_as_equal(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    for step, parts in enumerate([{"a": 0.1, "b": 0.2}, {"a": 0.3, "b": 0.0}]):
        put_step(tmp_path, step, [turn(id=f"{step}", rewards=parts)], first=10 * step)
    assert stats(open_run(tmp_path)).total.reward.sd != 0.0
    [curve] = [line.split() for line in rolltape("stats", tmp_path)[1].splitlines() if line.startswith("reward ")]
    assert curve == ["reward", "▄▄", "0.300", "0.300", "0.300", "0.000", "0.300", "0.300", "2"]


def test_a_change_that_is_the_same_for_every_task_has_no_noise(tmp_path: Path) -> None:
    for name, shift in (("a", 0.0), ("b", 0.1)):
        records = [turn(id=f"{i}", idx=i, reward=value + shift) for i, value in enumerate((0.1, 0.2, 0.3, 0.7))]
        put_step(put_run(tmp_path / name), 0, records)
    sides = [read_side(open_run(tmp_path / name), "train") for name in "ab"]
    paired = Diff(*sides).paired("reward")
    assert (paired.change, paired.se) == (pytest.approx(0.1), 0.0)
