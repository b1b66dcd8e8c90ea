"""Verifying that no step of training is missing."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from replay_build import group, put_attempt, put_run, put_step, turn

from rolltape.replay import open_run
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.verification.verify import verify
from rolltape.schema.parquet import put_bytes
from rolltape.schema.paths import Part, RunPaths

Found = list[tuple[str, str, int | None]]


def record(root: Path, step: int, attempt: int = 0, writer: str = "main") -> None:
    """Record a step of one group."""
    records = [turn(id=f"{attempt}-{step}-{writer}")]
    put_step(root, step, records, groups=[group(records, 10 * attempt + step)], attempt=attempt, writer=writer)


def found(root: Path) -> Found:
    return [(f.code, f.severity, f.step) for f in verify(open_run(root)).findings]


def lose(root: Path, step: int, attempt: int = 0, writer: str = "main") -> None:
    part = Part("train", step, attempt, writer)
    for path in (RunPaths(root).commit(part), RunPaths(root).parquet(part)):
        path.unlink()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of steps 2 to 5, as its attempt says: it began from a checkpoint."""
    put_run(tmp_path, start_step=2)
    for step in range(2, 6):
        record(tmp_path, step)
    assert found(tmp_path) == []
    return tmp_path


# -- steps


@pytest.mark.parametrize("gone", [(2,), (2, 3), (2, 4)])
def test_steps_from_the_first_of_the_attempt_on_are_missed(run: Path, gone: tuple[int, ...]) -> None:
    for step in gone:
        lose(run, step)
    assert found(run) == [("missing_step", "error", step) for step in gone]


def test_a_first_step_whose_commit_alone_is_gone_is_missed(run: Path) -> None:
    RunPaths(run).commit(Part("train", 2, 0, "main")).unlink()
    assert found(run) == [("missing_step", "error", 2), ("uncommitted", "warning", None)]


def test_a_first_step_that_a_writer_may_hold_yet_is_not_missed(run: Path) -> None:
    lose(run, 2)
    path = RunPaths(run).journal(0, "main")
    put_bytes(path, b"")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert found(run) == []
    assert found(run) == [("missing_step", "error", 2)]
    put_bytes(path, b"x")
    assert found(run) == [("journal", "warning", None)]


def test_the_first_step_of_an_attempt_that_took_everything_back_is_missed(run: Path) -> None:
    put_attempt(run, 1, start_step=2)
    for step in (2, 3):
        record(run, step, attempt=1)
    assert found(run) == []
    prune(open_run(run), Wish(superseded=True))
    assert found(run) == []
    lose(run, 2, attempt=1)
    assert found(run) == [("missing_step", "error", 2)]


def test_steps_before_those_that_were_taken_back_are_missed(run: Path) -> None:
    put_attempt(run, 1, start_step=4)
    for step in (4, 5):
        record(run, step, attempt=1)
    for step in (2, 3):
        lose(run, step)
    assert found(run) == [("missing_step", "error", 2), ("missing_step", "error", 3)]
    prune(open_run(run), Wish(superseded=True))
    assert found(run) == [("missing_step", "error", 2), ("missing_step", "error", 3)]


def test_an_attempt_that_ended_before_it_recorded_anything_misses_nothing(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_attempt(tmp_path, 1, start_step=3)
    record(tmp_path, 3, attempt=1)
    assert found(tmp_path) == []


def test_a_run_that_was_re_scored_begins_with_the_steps_asked_for(tmp_path: Path) -> None:
    put_run(tmp_path, rescored_from="r0")
    record(tmp_path, 3)
    assert found(tmp_path) == []
