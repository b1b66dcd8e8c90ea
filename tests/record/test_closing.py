"""The end of a recorder, and traces that are recorded again before their first row is taken apart."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from record_build import trace

from rolltape.record.recorder import Recorder, StoreOptions
from rolltape.record.writing import encoder
from rolltape.record.writing.journal import Journal
from rolltape.record.writing.recover import recover
from rolltape.replay.run import Run, open_run
from rolltape.schema import Context, Outcome, Step, decode
from rolltape.schema.errors import BadInput

AT = Context(group_index=0, rollout_index=0)


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces wait for each other for a while."""
    monkeypatch.setattr(encoder, "WINDOW", 0.3)


def ended(recorder: Recorder, *traces: str) -> Run:
    """The run after its only step has ended with these traces."""
    outcomes = [Outcome(trace_id=name, disposition="leftover") for name in traces]
    recorder.commit_now("train", 0, groups=[], outcomes=outcomes, record=Step())
    recorder.close()
    return open_run(recorder.paths.root)


def test_what_ended_before_a_signal_is_in_the_journal_when_its_handler_has_closed(tmp_path: Path) -> None:
    code = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[2])
from record_build import trace
from rolltape.record.recorder import Recorder
from rolltape.schema import Context

recorder = Recorder.open(sys.argv[1])

def end(*_):
    print(recorder.close(30).lost, flush=True)
    os._exit(0)

async def main():
    async def one(i):
        recorder.started("train", 0)
        await recorder.trace(trace(f"t{i}", tokens=2000), Context(group_index=0, rollout_index=i))
    tasks = [asyncio.create_task(one(i)) for i in range(128)]
    await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.gather(*tasks)

signal.signal(signal.SIGTERM, end)
asyncio.run(main())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
    recover(tmp_path / "run")
    assert dict(open_run(tmp_path / "run").steps()[0].counts) == {"started": 128, "interrupted": 128, "lost": 0}


@pytest.mark.usefixtures("window")
def test_traces_that_wait_are_recorded_before_the_end(tmp_path: Path) -> None:
    async def main(recorder: Recorder) -> list[bool]:
        tasks = [asyncio.ensure_future(recorder.trace(trace(f"t{i}"), AT)) for i in range(3)]
        await asyncio.sleep(0)
        status = await asyncio.to_thread(recorder.close)
        assert (status.lost, status.not_durable) == (0, 0)
        return await asyncio.gather(*tasks)

    assert asyncio.run(main(Recorder.open(tmp_path))) == [True] * 3


def test_nothing_is_recorded_after_the_end_and_closing_again_takes_no_time(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path)
    recorder.close()
    recorder.close(60.0)
    with pytest.raises(BadInput, match="the recorder is closed"):
        recorder.add(trace("a"), AT)
    with pytest.raises(BadInput, match="the recorder is closed"):
        recorder.commit_now("train", 0, groups=[], outcomes=[], record=Step())
    with pytest.raises(BadInput, match="the recorder is closed"):
        asyncio.run(recorder.commit("train", 0, groups=[], outcomes=[], record=Step()))


def test_what_is_done_from_time_to_time_makes_no_journal_after_the_end(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path)
    recorder.add(trace("a"), AT)
    ended(recorder, "a")
    recorder._store._tick()
    assert list(recorder.paths.journals.iterdir()) == []
    Recorder.open(tmp_path, resume=True).close()


@pytest.mark.usefixtures("window")
def test_a_trace_that_is_recorded_twice_at_once_is_acknowledged_twice(tmp_path: Path) -> None:
    async def main(recorder: Recorder) -> list[bool]:
        return await asyncio.gather(recorder.trace(trace("a"), AT), recorder.trace(trace("a", rewards={"ok": 2.0}), AT))

    recorder = Recorder.open(tmp_path, strict=True)
    assert asyncio.run(main(recorder)) == [True, True]
    assert recorder.status.not_durable == 0
    assert ended(recorder, "a").table(columns=["reward"]).to_pylist() == [{"reward": 2.0}]


@pytest.mark.usefixtures("window")
def test_a_row_that_still_waits_does_not_replace_a_later_one(tmp_path: Path) -> None:
    async def main(recorder: Recorder) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(recorder.trace(trace("a"), AT), 0.01)
        assert recorder.add(trace("a", rewards={"ok": 2.0}), AT)

    recorder = Recorder.open(tmp_path)
    asyncio.run(main(recorder))
    assert ended(recorder, "a").table(columns=["reward"]).to_pylist() == [{"reward": 2.0}]


@pytest.mark.usefixtures("window")
def test_a_step_ends_after_the_traces_that_still_wait(tmp_path: Path) -> None:
    async def main(recorder: Recorder) -> Run:
        waits = asyncio.ensure_future(recorder.trace(trace("a"), AT))
        await asyncio.sleep(0)
        run = ended(recorder, "a")
        assert await waits
        return run

    assert asyncio.run(main(Recorder.open(tmp_path))).table(columns=["trace_id"]).to_pylist() == [{"trace_id": "a"}]


def test_what_is_wrong_with_writing_costs_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: the disk's errors are not all there are."""
    append, broken = Journal.append, [True]

    def fails(self: Journal, frame: bytes) -> int:
        if broken:
            raise ValueError("out of order")
        return append(self, frame)

    async def main(recorder: Recorder) -> list[bool]:
        return await asyncio.gather(*(recorder.trace(trace(f"t{i}"), AT) for i in range(4)))

    recorder = Recorder.open(tmp_path, store=StoreOptions(retry_seconds=0.05))
    monkeypatch.setattr(Journal, "append", fails)
    assert asyncio.run(main(recorder)) == [False] * 4
    assert "out of order" in (recorder.status.error or "")
    broken.clear()
    time.sleep(0.1)
    assert recorder.add(trace("t4"), AT)
    assert all(entry.place for entry in recorder._store.entries(("train", 0, None)))
    assert recorder.status.error is None
    recorder.close()


def test_what_a_caller_changes_after_the_acknowledgement_is_not_recorded(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path, store=StoreOptions(journal=False))
    record = trace("a", later={"kept": [1]})
    recorder.add(record, AT)
    record["later"]["kept"].append(2)
    assert [r["later"] for r in decode(ended(recorder, "a").table())] == [{"kept": [1]}]


@pytest.mark.parametrize("field", ["sampling", "renderer"])
def test_secrets_in_settings_are_masked_each_time(tmp_path: Path, field: str) -> None:
    given: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "headers": {"Authorization": "Bearer 9f8e7d6c5b4a39281706f5e4d3c2b1a0"}},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1, "top_k": 5.0},
    ]
    recorder = Recorder.open(tmp_path)
    for i, settings in enumerate(given):
        recorder.add(trace(f"t{i}"), Context(group_index=0, rollout_index=i, **{field: settings}))
    rows = ended(recorder, *(f"t{i}" for i in range(len(given)))).table(columns=[field]).to_pylist()
    expected = [*given]
    expected[1] = {"temperature": 1.0, "headers": {"Authorization": "***"}}
    assert [row[field] for row in rows] == [json.dumps(each, separators=(",", ":")) for each in expected]


def test_a_process_that_was_forked_is_told_and_holds_nobody_s_lock(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from record_build import trace
from rolltape.record.recorder import Recorder
from rolltape.schema import Context

recorder = Recorder.open(sys.argv[1])
recorder.started("train", 0)
recorder.add(trace("a"), Context(group_index=0, rollout_index=0))
if os.fork():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    recorder.add(trace("b"), Context(group_index=0, rollout_index=1))
except Exception as error:
    print(type(error).__name__, error, flush=True)
sys.stdin.read()  # lives on
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "run"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert process.wait(60) == -9
        assert said.startswith(
            f"BadInput the recorder was opened in process {process.pid}, and this one was forked from it"
        )
        found = recover(tmp_path / "run")
    assert (found.alive, [part["traces"] for part in found.committed]) == ([], [1])
