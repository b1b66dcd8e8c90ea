"""One rule for means: they are of the rollouts that came to their end, wherever a mean is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_build import group, put_run, put_step, trace, turn

from rolltape.replay import open_run
from rolltape.replay.stats import stats
from rolltape.replay.words import decimal

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
    assert (listed["reward_first"], listed["reward_last"]) == (None, 0.5)
