"""Disks that hang or stay dead: nobody waits for long, memory is bounded, what is lost is counted."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_build import IMPATIENT, eventually, opened, settled
from record_build import (
    at,
    checked,
    commit,
    counts,
    dispositions,
    emitted,
    record_step,
    records_of,
    trace,
)

from rolltape.record.recorder import NotRecorded, Recorder
from rolltape.record.writing.recover import recover
from rolltape.record.writing.worker import Worker
from rolltape.replay import open_run
from rolltape.schema import Group, Step
from rolltape.schema.errors import BadInput, RunConflict

# -- a disk that hangs


class Hang:
    """Calls that do not return until `release` is set."""

    def __init__(self) -> None:
        self.release, self.reached = threading.Event(), threading.Event()

    def around(self, real: Callable[..., Any], only: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
        def hanging(*args: Any, **kwargs: Any) -> Any:
            if only() and not self.release.is_set():
                self.reached.set()
                self.release.wait()
            return real(*args, **kwargs)

        return hanging


@pytest.fixture
def hang() -> Iterator[Hang]:
    hanging = Hang()
    yield hanging
    hanging.release.set()


def test_a_journal_write_that_never_returns_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    recorder = opened(tmp_path / "run", **IMPATIENT)
    record_step(recorder, 0, ["old"])
    eventually(lambda: settled(recorder))
    monkeypatch.setattr(os, "pwrite", hang.around(os.pwrite))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def go() -> None:
        ticking = asyncio.create_task(tick())
        assert not await recorder.trace(trace("a"), at(1))
        assert ticks > 100, "the event loop ran while the trace waited"
        assert await asyncio.gather(*(recorder.trace(trace(n), at(1)) for n in "bcd")) == [False] * 3
        done = await recorder.commit("train", 1, groups=[], outcomes=emitted(*"abcd"), record=Step())
        assert done.commit is not None, "the file does not need the journal"
        ticking.cancel()

    asyncio.run(go())
    assert hang.reached.is_set()
    assert recorder.status.not_durable == 4
    assert records_of(tmp_path / "run").keys() == {"old", *"abcd"}
    recorder.close(0.1)
    hang.release.set()
    recorder._store.worker.stop(30)
    assert not recover(tmp_path / "run").faults
    assert records_of(tmp_path / "run").keys() == {"old", *"abcd"}
    checked(tmp_path / "run")


def test_nobody_waits_again_for_a_write_that_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    recorder = opened(tmp_path / "run", ack_seconds=0.2)
    monkeypatch.setattr(os, "pwrite", hang.around(os.pwrite))
    recorder.add(trace("a"), at(0))
    waits: list[float] = []

    async def go() -> None:
        loop: Any = asyncio.get_running_loop()
        real = loop.call_later

        def call_later(delay: float, callback: Any, *rest: Any, **more: Any) -> Any:
            def waited() -> None:
                waits.append(delay)
                callback(*rest)

            return real(delay, waited, **more)

        loop.call_later = call_later
        for i in range(50):
            assert not await recorder.trace(trace(f"b{i}"), at(0))

    asyncio.run(go())
    assert waits == []
    hang.release.set()
    eventually(
        lambda: recorder.status.error is None and all(e.place for e in recorder._store.entries(("train", 0, None)))
    )
    recorder.close()
    recover(tmp_path / "run")
    assert len(records_of(tmp_path / "run")) == 51


@pytest.mark.parametrize("where", ["write", "sync"])
def test_a_file_write_that_never_returns_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang, where: str
) -> None:
    recorder = opened(tmp_path / "run", commit_seconds=0.5)
    committing = recorder._commits._thread
    mine = hang.around(os.fsync, lambda: threading.current_thread() is committing)
    if where == "sync":
        monkeypatch.setattr(os, "fsync", mine)
    else:
        from rolltape.schema.parquet import HashingFile

        write = hang.around(HashingFile.write, lambda: threading.current_thread() is committing)
        monkeypatch.setattr(HashingFile, "write", write)
    for step in range(3):
        assert recorder.add(trace(f"a{step}"), at(step)), "the journal does not wait for the file"
        done = commit(recorder, step, emitted(f"a{step}"))
        assert done.commit is None
        assert "no answer within 0.5 s" in str(done.error)
    assert recorder.status.pending_steps == 3
    assert hang.reached.is_set()
    hang.release.set()
    eventually(lambda: settled(recorder))
    assert recorder.close().lost == 0
    assert records_of(tmp_path / "run").keys() == {"a0", "a1", "a2"}
    checked(tmp_path / "run")


def test_closing_ends_in_time_and_counts_what_is_lost_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    recorder = opened(tmp_path / "run", commit_seconds=0.5, ack_seconds=1.0)
    assert recorder.add(trace("journaled"), at(0))
    monkeypatch.setattr(os, "pwrite", hang.around(os.pwrite))
    monkeypatch.setattr("rolltape.record.writing.parts.write_parquet", hang.around(lambda *_: None))
    recorder.add(trace("in memory"), at(0))
    commit(recorder, 0, emitted("journaled", "in memory"))
    status = recorder.close(0.2)
    assert (status.lost, status.pending_steps, status.not_durable) == (1, 1, 1)
    assert recorder._commits._thread.daemon
    assert recorder._store.worker._thread.daemon
    with pytest.raises(BadInput, match="the recorder is closed"):
        recorder.add(trace("later"), at(0))


def test_rows_that_a_hanging_disk_holds_are_converted_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    recorder = opened(tmp_path / "run")
    assert recorder.add(trace("a"), at(0))
    monkeypatch.setattr(os, "pread", hang.around(os.pread))
    assert recorder.rows("train", 0).column("trace_id").to_pylist() == ["a"]
    assert not hang.reached.is_set()
    recorder.close()


def test_rows_that_cannot_be_read_back_in_time_are_left_out_of_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    recorder = opened(tmp_path / "run", keep_bytes=0, ack_seconds=2.0)
    assert [recorder.add(trace(n), at(0)) for n in "ab"] == [True, True]
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", hang.around(os.pread))
        assert recorder.rows("train", 0).num_rows == 0
        hang.release.set()
    eventually(lambda: recorder.rows("train", 0).num_rows == 2)
    assert commit(recorder, 0, emitted("a", "b")).step.counts == {"started": 2, "emitted": 2, "lost": 0}
    recorder.close()


# -- a disk that is dead for long


def dead_disk(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fails)
    monkeypatch.setattr("rolltape.record.writing.parts.write_parquet", fails)
    return monkeypatch


def test_memory_for_what_cannot_be_written_is_bounded_and_the_oldest_steps_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 100_000
    recorder = opened(tmp_path / "run", queue_bytes=limit)
    record_step(recorder, 0, ["old"])
    held = []
    with monkeypatch.context() as patched:
        dead_disk(patched)
        for step in range(1, 41):
            names = [f"{step}.{i}" for i in range(4)]
            assert record_step(recorder, step, names, tokens=500).commit is None
            held.append(recorder._store.memory())
    assert max(held) <= limit
    lost = recorder.status.lost
    assert 0 < lost < 160
    assert recorder.status.pending_steps == 40
    eventually(lambda: settled(recorder))
    assert recorder.close().lost == lost
    root = tmp_path / "run"
    found = records_of(root)
    assert len(found) == 161 - lost
    assert {n for n in found if n != "old"} >= {f"40.{i}" for i in range(4)}
    assert counts(root) == {"started": 161, "emitted": 161 - lost, "lost": lost}
    steps = [c.step.counts["lost"] for c in open_run(root).commits()]
    assert steps == sorted(steps[:1]) + sorted(steps[1:], reverse=True), "the oldest went first"
    checked(root)


def test_a_step_that_lost_rows_has_no_digest_and_verifies_but_for_its_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = opened(tmp_path / "run", queue_bytes=0)
    assert recorder.add(trace("kept"), at(0, group_index=0, rollout_index=0))
    group = Group.from_records([trace("kept"), trace("gone")], group_index=0, expected_size=2)
    with monkeypatch.context() as patched:
        dead_disk(patched)
        assert not recorder.add(trace("gone"), at(0, group_index=0, rollout_index=1))
        record = Step(digest_converted="0" * 64, digest_handed="1" * 64, batch=(0, 1))
        recorder.commit_now("train", 0, groups=[group], outcomes=emitted("kept", "gone"), record=record)
        eventually(lambda: recorder.status.lost == 1)
    eventually(lambda: settled(recorder))
    recorder.close()
    [done] = open_run(tmp_path / "run").all_commits
    assert done.step.counts == {"started": 2, "emitted": 1, "lost": 1}
    assert (done.step.digest_converted, done.step.digest_handed) == (None, None)
    assert [g.trace_ids for g in done.groups] == [("kept", "gone")]
    checked(tmp_path / "run")


def test_a_dead_disk_is_not_tried_for_every_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = opened(tmp_path / "run", retry_seconds=1e6)
    calls = 0

    def fails(*_: Any) -> None:
        nonlocal calls
        calls += 1
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fails)
    assert [recorder.add(trace(f"a{i}"), at(0)) for i in range(50)] == [False] * 50
    assert calls == 1


def test_the_background_tries_again_while_traces_keep_coming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = opened(tmp_path / "run")
    with monkeypatch.context() as patched:
        dead_disk(patched)
        commit(recorder, 0, [])
    number = iter(range(10**6))

    def one_more() -> bool:
        recorder.add(trace(f"b{next(number)}"), at(1))
        return settled(recorder)

    eventually(one_more)
    recorder.close()


def test_what_is_to_be_done_from_time_to_time_is_done_while_jobs_keep_coming() -> None:
    done = threading.Event()
    worker = Worker("busy", done.set, 0.02)

    def busy() -> bool:
        for _ in range(20):
            worker.submit(lambda: time.sleep(0.002))
        return done.is_set()

    eventually(busy)
    assert worker.stop(60)


def test_strict_raises_instead_of_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = opened(tmp_path / "run", strict=True)
    recorder.add(trace("a"), at(0))
    with monkeypatch.context() as patched:
        dead_disk(patched)
        with pytest.raises(NotRecorded, match=r"a trace of step 0 is not in the journal: .*Input/output error"):
            recorder.add(trace("b"), at(0))
        with pytest.raises(NotRecorded, match=r"a trace of step 0 is not in the journal"):
            asyncio.run(recorder.trace(trace("c"), at(0)))
        with pytest.raises(NotRecorded, match=r"step 0 of 'train' is not on disk: .*Input/output error"):
            commit(recorder, 0, emitted(*"abc"))
    eventually(lambda: settled(recorder))
    recorder.close()
    assert records_of(tmp_path / "run").keys() == set("abc"), "it is kept all the same"


def test_a_commit_that_was_put_although_it_was_said_to_have_failed_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = opened(tmp_path / "run")
    record_step(recorder, 0, ["old"])
    recorder.add(trace("a"), at(1))
    from rolltape.schema import parquet

    real = parquet.sync_folder

    def fails(path: Path) -> None:
        if path.parent.name == "commits":
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(parquet, "sync_folder", fails)
        assert "Input/output error" in str(commit(recorder, 1, emitted("a")).error)
    eventually(lambda: settled(recorder))
    assert recorder.close().lost == 0
    assert records_of(tmp_path / "run").keys() == {"old", "a"}
    checked(tmp_path / "run")


def test_a_writer_that_came_back_never_writes_over_a_step_that_it_had_committed(tmp_path: Path) -> None:
    """While another lives it joins the same attempt; what it records again is a part of its own after a recovery."""
    root = tmp_path / "run"
    other = Recorder.open(root, writer="other")
    first = opened(root)
    record_step(first, 0, ["first"])
    first.close()
    second = opened(root)
    assert second.attempt == first.attempt
    second.started("train", 0)
    second.add(trace("second"), at(0))
    before = [p.read_bytes() for p in sorted((root / "traces").rglob("*.parquet"))]
    with pytest.raises(RunConflict, match="'main' has committed step 0 of 'train' in attempt 0 already"):
        commit(second, 0, emitted("second"))
    assert [p.read_bytes() for p in sorted((root / "traces").rglob("*.parquet"))] == before
    record_step(second, 1, ["third"])
    assert second.close().lost == 0
    other.close()
    recover(root)
    assert records_of(root).keys() == {"first", "second", "third"}
    assert dispositions(root)["second"] == "emitted"
    checked(root)
