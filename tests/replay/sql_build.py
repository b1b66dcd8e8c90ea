"""Runs and questions for the tests of SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_build import put_step, turn

from rolltape.replay import open_run

BY_NAME = "SELECT step, name, avg(value) FROM rewards GROUP BY ALL ORDER BY ALL"


def ask(root: Path, query: str, **selection: Any) -> list[tuple[Any, ...]]:
    """The answer of a run."""
    return open_run(root).sql(query, **selection).fetchall()


def steps_of(root: Path, count: int, start: int = 0) -> Path:
    """Steps of one trace each, rewarded by their number."""
    for step in range(start, start + count):
        put_step(root, step, [turn(f"t{step}", reward=float(step))], first=step)
    return root
