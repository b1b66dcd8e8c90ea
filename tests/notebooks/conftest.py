"""Makes the builders of this folder and of tests/replay importable; runs that the notebooks are opened on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "replay")]

SMALL = {"steps": 12, "groups": 3, "rollouts": 4, "tokens": 14, "tasks": 5}


@pytest.fixture(scope="session")
def demo_run() -> Path:
    """A run that `rolltape demo` recorded. Not to be written to."""
    return Path(__file__).parents[1] / "data" / "runs" / "demo"


@pytest.fixture(scope="session")
def life(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with errors, retries, two attempts, NaN, lag and recomputed log-probs. Not to be written to."""
    from lifelike import Life, record_run

    return record_run(tmp_path_factory.mktemp("runs") / "life", Life(**SMALL, odd=0.1))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one of the kind, without recomputed log-probs. Not to be written to."""
    from lifelike import Life, record_run

    return record_run(tmp_path_factory.mktemp("runs") / "other", Life(**SMALL, seed=1, recomputed=False))
