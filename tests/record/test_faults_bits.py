"""The end by a signal, and flipped bits of what lies on disk: none is read as data."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from record_build import (
    LONG,
    at,
    checked,
    commit,
    dispositions,
    lifelike,
    records_of,
    same,
    unsynced,
)

from rolltape.record.recorder import Recorder
from rolltape.record.writing.journal import Journal, pack_record
from rolltape.record.writing.recover import recover
from rolltape.replay import open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema import Context, Group, Outcome, RolltapeError, decode
from rolltape.schema.encoding import row_of
from rolltape.schema.fields import TRACE
from rolltape.schema.paths import RunPaths

# -- the end by a signal


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_recorder_that_a_signal_handler_closes_leaves_a_journal_that_recovers(tmp_path: Path, signal: str) -> None:
    import signal as signals
    import sys

    words = [sys.executable, str(Path(__file__).with_name("fault_children.py")), "until", str(tmp_path), signal]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(30)]
        process.send_signal(getattr(signals, signal))
        told += process.stdout.read().splitlines()
    assert process.returncode == 0
    acknowledged = {line.split()[1] for line in told if line.startswith("trace")}
    [closed] = [line for line in told if line.startswith("closed")]
    assert closed.split() == ["closed", "lost", "0"]
    assert len(acknowledged) >= 29
    recover(tmp_path / "run")
    found = dispositions(tmp_path / "run")
    assert acknowledged <= found.keys()
    assert set(found.values()) == {"interrupted"}
    checked(tmp_path / "run")


# -- flipped bits


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two committed steps and a journal that a dead writer left; and every record by trace id."""
    root = tmp_path_factory.mktemp("flips") / "run"
    rng = random.Random(11)
    recorder = Recorder.open(root, model="m", settings={"seed": 5})
    expected = {}
    for step in range(2):
        names = [f"s{step}.{i}" for i in range(4)]
        recorder.started("train", step, len(names))
        for i, n in enumerate(names):
            expected[n] = lifelike(rng, n)
            recorder.add(expected[n], at(step, group_index=step, rollout_index=i))
        group = Group.from_records([expected[n] for n in names], group_index=step, expected_size=len(names), step=step)
        commit(recorder, step, [Outcome(trace_id=n, disposition="filtered") for n in names], [group])
    recorder.close()
    journal = Journal(RunPaths(root).journal(0, "gone"))
    head = {"split": "train", "step": 2, "eval_name": None}
    journal.append(pack_record("started", {**head, "n": 3}))
    for i in range(3):
        expected[f"j{i}"] = lifelike(rng, f"j{i}")
        context = Context(run=recorder.run_id, step=2, writer="gone", group_index=i)
        journal.append(pack_record("trace", head, row_of(expected[f"j{i}"], context)))
    journal.close()
    return root, expected


def readable(root: Path, expected: dict[str, Any]) -> bool:
    """Whether every step reads back; what reads is what was written."""
    whole = True
    for step in range(2):
        try:
            found = decode(open_run(root).table(steps=step).select(TRACE.arrow.names))
        except RolltapeError:
            whole = False
            continue
        assert same({r["id"]: r for r in found}, {n: r for n, r in expected.items() if n.startswith(f"s{step}.")})
    return whole


def flipped(path: Path, rng: random.Random) -> bytes:
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    return data


@pytest.mark.timeout(3600 if LONG else 180)
@pytest.mark.parametrize("what", ["traces/train/*", "commits/train/*", "run.json", "attempts/0.json"])
def test_no_flipped_bit_of_what_is_committed_is_read_as_data_or_missed(
    crashed: tuple[Path, dict[str, Any]], what: str
) -> None:
    root, expected = crashed
    assert verify(open_run(root)).errors == []
    rng = random.Random(what)
    flips = {"traces/train/*": 120, "commits/train/*": 100}.get(what, 30) * (10 if LONG else 1)
    for _ in range(flips):
        path = rng.choice(sorted(root.glob(what)))
        before = flipped(path, rng)
        try:
            readable(root, expected)
            found = [f.message for f in verify(open_run(root)).errors]
        except RolltapeError as error:
            found = [str(error)]
        finally:
            path.write_bytes(before)
        assert any(path.name in message for message in found), f"a flipped bit in {path.name} was missed: {found}"


@pytest.mark.timeout(3600 if LONG else 180)
def test_no_flipped_bit_of_a_journal_is_read_as_data_or_missed(
    crashed: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsynced(monkeypatch)
    source, expected = crashed
    rng = random.Random("journal")
    for i in range(1200 if LONG else 120):
        root = tmp_path / str(i)
        shutil.copytree(source, root)
        [journal] = (root / "journal").glob("*.journal")
        flipped(journal, rng)
        result = recover(root)
        assert any(journal.name in fault for fault in result.faults), "a flipped bit was missed"
        found = records_of(root)
        lost = expected.keys() - found.keys()
        assert len(lost) <= 1
        assert same({n: found[n] for n in sorted(found)}, {n: expected[n] for n in sorted(found)})
        started = open_run(root).steps(steps=2)[0].counts["started"]
        assert started == 3, "coverage adds up, whichever record was lost"
        if i % 4 == 0:
            assert verify(open_run(root)).errors == []
        shutil.rmtree(root)
