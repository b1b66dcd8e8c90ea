"""The means of a re-scoring are those that `rolltape stats` gives of either run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rescore_build import DEMO, demo_config

from rolltape.record.rescoring.rescore import rescore
from rolltape.replay.run import open_run
from rolltape.replay.stats import stats


def test_a_re_scoring_of_a_run_with_failed_rollouts_shows_the_means_of_stats(tmp_path: Path) -> None:
    result = rescore(DEMO, demo_config(tmp_path), tmp_path / "new")
    assert result.changes is not None
    then, now = (stats(open_run(run)).total for run in (DEMO, tmp_path / "new"))
    assert then.errors > 0
    for name in result.changes.names:
        if name["kind"] == "metric":
            continue
        old, new = (t.reward if name["kind"] == "total" else t.rewards[name["name"]] for t in (then, now))
        assert (name["old_mean"], name["new_mean"]) == (pytest.approx(old.mean), pytest.approx(new.mean))
    total = next(n for n in result.changes.names if n["kind"] == "total")
    assert total["old_mean"] == pytest.approx(then.reward.mean)
