"""Runs and questions for the tests of SQL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from replay_build import put_step, turn

from rolltape.replay import open_run
from rolltape.schema.commits import Commit

BY_NAME = "SELECT step, name, avg(value) FROM rewards GROUP BY ALL ORDER BY ALL"


def ask(root: Path, query: str, **selection: Any) -> list[tuple[Any, ...]]:
    """The answer of a run."""
    return open_run(root).sql(query, **selection).fetchall()


def steps_of(root: Path, count: int, start: int = 0) -> Path:
    """Steps of one trace each, rewarded by their number."""
    for step in range(start, start + count):
        put_step(root, step, [turn(f"t{step}", reward=float(step))], first=step)
    return root


def without_scores(root: Path) -> Path:
    """Take the scores out of a run's commits, which then are as earlier ones were."""
    for path in root.glob("commits/*/*.json"):
        commit = Commit.read(path)
        path.write_bytes(replace(commit, file=replace(commit.file, scores=None)).to_bytes())
    return root
