"""kill -9 at random moments of a recording run with two writers: what was acknowledged is there once, whatever was going on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_server import Children
from record_build import LONG, checked, counts, dispositions, recorded_of_today, records_of

from rolltape.record.recorder import Recorder
from rolltape.record.writing.recover import recover
from rolltape.replay import open_run
from rolltape.replay.run import Run
from rolltape.schema.errors import RunConflict

KILLS = 200 if LONG else 12
ROUNDS = 4
"""Kills of one run: it is gone on with after each, a step or more back."""


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as server:
        yield server


def told(path: Path, what: str) -> list[str]:
    """What a writer told before it was killed; a line that is not whole is none."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [line.split(" ", 1)[1] for line in whole if line.startswith(what + " ")]


def wait_for(path: Path, what: str) -> None:
    end = time.monotonic() + 60
    while not told(path, what):
        assert time.monotonic() < end, "the writer did not begin"
        time.sleep(0.002)


def kill_two_writers(children: Children, root: Path, moment: float, seed: int, step: int) -> list[Path]:
    """Start two writers at once, kill both after `moment` seconds of recording (or of starting, where it is negative)."""
    said = [root.parent / f"told.{seed}.{name}" for name in "ab"]
    writers = [
        children.start("write_for_ever", root=str(root), writer=name, acks=str(path), seed=seed, step=step)
        for name, path in zip("ab", said, strict=True)
    ]
    for path in said if moment >= 0 else ():
        wait_for(path, "opened")
    time.sleep(abs(moment))
    for writer in writers:
        children.kill(writer)
    return said


def expect_all(run: Run, said: list[Path], known: dict[str, dict[str, object]]) -> None:
    """Each trace that was acknowledged is there, once, as it was recorded; committed steps are as they were committed."""
    found = records_of(run)
    acknowledged = {name for path in said for name in told(path, "trace")}
    assert acknowledged <= found.keys()
    assert len(found.keys() - acknowledged) <= 6 * len(said), "at most those that were on their way"
    assert all(repr({**found[name], "id": None}) in known for name in found)
    disposition = dispositions(run)
    for path in said:
        writer, seed = path.name.split(".")[2], path.name.split(".")[1]
        for step in told(path, "step"):
            assert {disposition[f"{writer}.{seed}.{step}.{i}"] for i in range(6)} == {"emitted"}


@pytest.mark.parametrize("number", range(KILLS // ROUNDS))
def test_a_killed_run_of_two_writers_keeps_every_acknowledged_trace_once(
    tmp_path: Path, children: Children, number: int
) -> None:
    rng = random.Random(number)
    root = tmp_path / "run"
    known = {repr({**r, "id": None}): r for r in recorded_of_today()}
    said: list[Path] = []
    step = 0
    for i in range(ROUNDS):
        moment = rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.6), -rng.uniform(0.0, 0.1)])
        said += kill_two_writers(children, root, moment, seed=100 * number + i, step=step)
        opened = {attempt for path in said[-2:] for attempt in told(path, "opened")}
        assert len(opened) == 1 or moment < 0, "writers that start together share an attempt"
        if not (root / "run.json").exists():
            continue
        if rng.random() < 0.5:
            recover(root)
        newest = max((c.part.step for c in open_run(root).commits()), default=0)
        step = max(0, newest - rng.randrange(3))
    if not (root / "run.json").exists():
        Recorder.open(root).close()
    result = recover(root)
    assert all("torn tail" in fault for fault in result.faults)
    run = open_run(root)
    expect_all(run, said, known)
    total = counts(run)
    assert total["started"] == total["emitted"] + total["interrupted"] + total["lost"]
    assert total["emitted"] + total["interrupted"] == len(records_of(run))
    checked(root)
    assert not recover(root).anything
    assert not list(root.rglob("*.journal"))
    assert not list(root.rglob(".*.tmp"))


def test_a_living_writer_s_name_is_refused_and_its_journal_left_alone(tmp_path: Path, children: Children) -> None:
    root, said = tmp_path / "run", tmp_path / "told"
    writer = children.start("write_for_ever", root=str(root), writer="a", acks=str(said), seed=0, step=0)
    wait_for(said, "step")
    with pytest.raises(RunConflict, match=r"writer 'a' records into .* at this moment"):
        Recorder.open(root, writer="a", resume=True)
    assert len(recover(root).alive) == 1
    other = Recorder.open(root, writer="b", resume=True)
    assert other.attempt == 0
    other.close()
    before = len(told(said, "step"))
    while len(told(said, "step")) <= before:
        time.sleep(0.002)
    children.kill(writer)
    recover(root)
    assert set(told(said, "trace")) <= records_of(root).keys()
    checked(root)


def test_writers_that_start_at_the_same_moment_make_one_run_and_one_attempt(tmp_path: Path, children: Children) -> None:
    for number in range(20 if LONG else 4):
        root = tmp_path / str(number)
        files = [tmp_path / f"{number}.{i}" for i in range(4)]
        processes = [
            children.start("hold", root=str(root), writer=f"w{i}", told=str(file)) for i, file in enumerate(files)
        ]
        end = time.monotonic() + 60
        while not all(f.exists() and f.read_text() for f in files):
            assert time.monotonic() < end, "a writer did not open the run"
            time.sleep(0.002)
        for process in processes:
            children.kill(process)
        assert {f.read_text() for f in files} == {"0"}
        assert open_run(root).attempts.keys() == {0}


def test_two_runs_are_never_mixed_whoever_is_first(tmp_path: Path, children: Children) -> None:
    """Of two that begin a run of different models in one folder, at the same moment, one is refused."""
    for number in range(20 if LONG else 4):
        root = tmp_path / str(number)
        files = [tmp_path / f"{number}.{model}" for model in "mn"]
        processes = [
            children.start("begin", root=str(root), model=model, told=str(file))
            for model, file in zip("mn", files, strict=True)
        ]
        codes = [children.wait(process) for process in processes]
        assert sorted(codes) == [0, 1]
        won = "mn"[codes.index(0)]
        assert open_run(root).info["model"] == won
        assert "two runs are not mixed in one folder" in files[codes.index(1)].read_text()
