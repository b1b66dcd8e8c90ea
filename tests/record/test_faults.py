"""Disks that are full, gone, read-only, hanging or lying, and traces that nobody expected: training goes on, all is counted."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from record_build import (
    LONG,
    at,
    checked,
    commit,
    counts,
    dispositions,
    emitted,
    lifelike,
    record_step,
    records_of,
    same,
    trace,
    unsynced,
)

from rolltape.record import limits
from rolltape.record import store as store_module
from rolltape.record.journal import Journal, Record, pack_record, read_journal
from rolltape.record.recorder import NotRecorded, Recorder, StoreOptions
from rolltape.record.recover import recover
from rolltape.record.worker import Worker
from rolltape.replay import open_run
from rolltape.replay.verify import verify
from rolltape.schema import Context, Group, Outcome, RolltapeError, Step, decode, frames
from rolltape.schema.encoding import row_of
from rolltape.schema.errors import BadInput, RunConflict
from rolltape.schema.fields import TRACE
from rolltape.schema.paths import RunPaths
from rolltape.schema.table import rows_to_table

QUICK = {"ack_seconds": 60.0, "commit_seconds": 60.0, "retry_seconds": 0.05, "fsync_seconds": 0.05}
IMPATIENT: dict[str, Any] = {"ack_seconds": 0.3, "commit_seconds": 0.5}
"""For disks that hang: what is waited for does not come."""


def opened(root: Path, *, strict: bool = False, **options: Any) -> Recorder:
    store = StoreOptions(**{**QUICK, **options})
    return Recorder.open(root, resume=root.exists(), strict=strict, store=store)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in the background."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def settled(recorder: Recorder) -> bool:
    return recorder.status.pending_steps == 0


@contextmanager
def mounted(at: Path, *words: str) -> Iterator[Path]:
    """A mount for the time of a test; skips where that is not permitted."""
    at.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *words, str(at)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], capture_output=True, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as disk:
        yield disk


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill a disk but for some bytes; the file to delete to free it."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if leave:
        os.truncate(filler, filler.stat().st_size - leave)
    return filler


# -- a full disk


def test_a_disk_that_is_full_for_the_journal_costs_durability_and_nothing_else(small_disk: Path) -> None:
    recorder = opened(small_disk / "run")
    record_step(recorder, 0, ["before"])
    filler = fill(small_disk, leave=3 * 4096)
    names = [f"t{i}" for i in range(30)]
    recorder.started("train", 1, 30)
    said = [recorder.add(trace(n, text=f"{n} " * 800, info={"n": n}), at(1)) for n in names]
    assert said[0]
    assert not all(said)
    assert recorder.status.not_durable == said.count(False)
    assert "No space left" in str(recorder.status.error)
    assert recorder.rows("train", 1).num_rows == 30
    done = commit(recorder, 1, emitted(*names))
    assert done.commit is None
    assert "step 1 of 'train' is not on disk: " in str(done.error)
    assert "No space left" in str(done.error)
    record_step(recorder, 2, ["after"])
    assert recorder.status.pending_steps >= 1
    assert records_of(small_disk / "run").keys() <= {"before", "after"}
    filler.unlink()
    eventually(lambda: settled(recorder))
    recorder.close()
    assert recorder.status.lost == 0
    assert recorder.status.error is None
    found = records_of(small_disk / "run")
    assert found.keys() == {"before", "after", *names}
    assert open_run(small_disk / "run").commits(steps=1)[0].sums["not_durable"] == said.count(False)
    checked(small_disk / "run")
    assert not list((small_disk / "run").rglob("*.journal"))


def test_a_disk_that_is_full_for_the_file_damages_nothing_and_is_waited_for(small_disk: Path) -> None:
    root = small_disk / "run"
    recorder = opened(root)
    record_step(recorder, 0, ["old"])
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and "journal" not in str(p)}
    recorder.add(trace("new", text=os.urandom(20_000).hex()), at(1))
    filler = fill(small_disk)
    done = commit(recorder, 1, emitted("new"))
    assert done.commit is None
    assert {p: p.read_bytes() for p in before} == before
    assert not [p for p in root.rglob("*.tmp") if p.stat().st_size]
    assert records_of(root).keys() == {"old"}
    filler.unlink()
    eventually(lambda: settled(recorder))
    assert records_of(root).keys() == {"old", "new"}
    recorder.close()
    checked(root)


def test_what_a_full_disk_kept_out_is_settled_by_recover_after_a_crash(small_disk: Path, tmp_path: Path) -> None:
    recorder = opened(small_disk / "run")
    recorder.started("train", 0, 3)
    said = {n: recorder.add(trace(n, text=n * 20_000), at(0)) for n in "ab"}
    filler = fill(small_disk, leave=4096)
    said["c"] = recorder.add(trace("c", text=os.urandom(20_000).hex()), at(0))
    assert said == {"a": True, "b": True, "c": False}
    assert commit(recorder, 0, emitted(*"abc")).commit is None
    shutil.copytree(small_disk / "run", tmp_path / "copy")  # what a crash would leave
    recover(tmp_path / "copy")
    assert records_of(tmp_path / "copy").keys() == set("ab")
    assert counts(tmp_path / "copy")["lost"] == 1
    checked(tmp_path / "copy")
    filler.unlink()
    recorder.close()
    assert records_of(small_disk / "run").keys() == set("abc")


def test_smaller_rows_go_on_being_journaled_where_larger_ones_find_no_room(small_disk: Path) -> None:
    recorder = opened(small_disk / "run")
    filler = fill(small_disk, leave=6 * 4096)
    assert not recorder.add(trace("large", text=os.urandom(40_000).hex()), at(0))
    assert recorder.add(trace("small"), at(0)) or recorder.status.error
    eventually(lambda: any(e.place for e in recorder._store.entries(("train", 0, None)) if e.trace_id == "small"))
    filler.unlink()
    eventually(lambda: all(e.place for e in recorder._store.entries(("train", 0, None))))
    recorder.close()
    kept = recover(small_disk / "run")
    assert records_of(small_disk / "run").keys() == {"large", "small"}
    assert kept.faults == []


def test_a_run_cannot_be_begun_on_a_full_disk_and_leaves_nothing_half_made(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(NotRecorded, match=r"cannot be written to: .*No space left"):
        Recorder.open(small_disk / "run")
    assert not list(small_disk.rglob("*.json"))


# -- read-only, gone, in other hands


def test_a_folder_that_becomes_read_only_is_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "run"
    recorder = opened(root)
    record_step(recorder, 0, ["old"])
    with mounted(root / "traces", "--bind", str(root / "traces")) as folder:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        assert recorder.add(trace("new"), at(1))
        done = commit(recorder, 1, emitted("new"))
        assert "Read-only file system" in str(done.error)
        record_step(recorder, 2, ["newer"])
        assert recorder.status.pending_steps == 2
    eventually(lambda: settled(recorder))
    recorder.close()
    assert records_of(root).keys() == {"old", "new", "newer"}
    checked(root)


def test_a_read_only_journal_costs_durability_until_it_can_be_made(tmp_path: Path) -> None:
    root = tmp_path / "run"
    opened(root).close()
    with mounted(root / "journal", "--bind", str(root / "journal")) as folder:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        recorder = opened(root)
        assert not recorder.add(trace("a"), at(0))
        assert "Read-only file system" in str(recorder.status.error)
        record_step(recorder, 1, ["b"])
        assert records_of(root).keys() == {"b"}
    eventually(lambda: recorder.status.error is None)
    assert recorder.add(trace("c"), at(0))
    [journal] = (root / "journal").glob("*.journal")
    traces = [r.row.values["trace_id"] for r in read_journal(journal) if isinstance(r, Record) and r.row]
    assert traces == ["a", "c"]
    commit(recorder, 0, emitted("a", "c"))
    recorder.close()
    checked(root)


def test_a_file_system_without_hard_links_locks_and_synced_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As object stores are when they are mounted."""
    import fcntl
    import stat

    real = os.fsync

    def not_known(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "link", not_known)
    monkeypatch.setattr(fcntl, "flock", not_known)
    monkeypatch.setattr(os, "fsync", fsync)
    root = tmp_path / "run"
    recorder = opened(root)
    record_step(recorder, 0, ["a"])
    recorder.add(trace("b"), at(1))
    with pytest.raises(RunConflict, match="'main' records into"):
        opened(root)
    assert len(recover(root).alive) == 1
    recorder.close()
    assert recorder.status.error is None
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    recover(root)
    assert dispositions(root) == {"a": "emitted", "b": "interrupted"}
    checked(root)


def test_recovering_on_a_read_only_disk_says_so_and_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "disk" / "run"
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as disk:
        recorder = opened(root)
        recorder.add(trace("a"), at(0))
        recorder.close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        result = recover(root)
        assert any("Read-only file system" in fault for fault in result.faults)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert recover(root).faults == []
        assert records_of(root).keys() == {"a"}


@pytest.mark.parametrize("keep", [0, 1 << 20])
@pytest.mark.parametrize("moved", [False, True], ids=["deleted", "moved away"])
def test_a_folder_that_vanishes_under_the_recorder_is_made_again_with_what_is_not_committed(
    tmp_path: Path, keep: int, moved: bool
) -> None:
    root = tmp_path / "run"
    recorder = opened(root, keep_bytes=keep)
    record_step(recorder, 0, ["old"])
    recorder.started("train", 1, 4)
    assert [recorder.add(trace(n), at(1)) for n in "ab"] == [True, True]
    if moved:
        root.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(root.rename(tmp_path / "gone"))  # at once: it is made again while it is being deleted
    eventually(lambda: any((root / "journal").glob("*.journal")) if (root / "journal").exists() else False)
    eventually(lambda: recorder.status.error is None)
    assert recorder.add(trace("c"), at(1))
    shutil.copytree(root, tmp_path / "copy")
    recover(tmp_path / "copy")
    assert dispositions(tmp_path / "copy") == dict.fromkeys("abc", "interrupted")
    assert counts(tmp_path / "copy") == {"started": 4, "interrupted": 3, "lost": 1}
    commit(recorder, 1, emitted(*"abc"))
    recorder.close()
    assert open_run(root).run_id == recorder.run_id
    assert records_of(root).keys() == set("abc")
    checked(root)
    if moved:
        recover(tmp_path / "elsewhere")
        assert records_of(tmp_path / "elsewhere").keys() == {"old", "a", "b"}


def test_a_file_system_that_is_gone_is_not_written_to_beneath_and_found_again(tmp_path: Path) -> None:
    real, point = tmp_path / "real", tmp_path / "point"
    with mounted(real, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        with mounted(point, "--bind", str(real)):
            recorder = opened(point / "run")
            record_step(recorder, 0, ["old"])
            recorder.started("train", 1, 2)
            assert recorder.add(trace("a"), at(1))
        eventually(lambda: recorder.status.error is not None)
        assert "is gone" in str(recorder.status.error)
        assert not recorder.add(trace("b"), at(1))
        done = commit(recorder, 1, emitted("a", "b"))
        assert done.commit is None
        assert list(point.iterdir()) == []
        with mounted(point, "--bind", str(real)):
            eventually(lambda: settled(recorder))
            recorder.close()
            assert records_of(point / "run").keys() == {"old", "a", "b"}
            assert counts(point / "run") == {"started": 3, "emitted": 3, "lost": 0}
            checked(point / "run")
            assert list((point / "run" / "journal").iterdir()) == []


def test_a_run_that_took_the_place_of_a_deleted_one_is_never_written_to(tmp_path: Path) -> None:
    root = tmp_path / "run"
    recorder = opened(root, fsync_seconds=1e6, retry_seconds=1e6)  # it looks when it is told to
    recorder.add(trace("mine"), at(0))
    shutil.rmtree(root.rename(tmp_path / "gone"))
    other = opened(root)
    other.add(trace("theirs"), at(0))
    assert other.run_id != recorder.run_id
    recorder._store.worker.submit(recorder._store._tick).result()
    eventually(lambda: "another run has taken its place" in str(recorder.status.error))
    assert commit(recorder, 0, emitted("mine")).commit is None
    commit(other, 0, emitted("theirs"))
    recorder.close()
    other.close()
    assert recorder.status.lost == 1
    assert records_of(root).keys() == {"theirs"}
    assert not recover(root).anything
    checked(root)


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

        def call_later(delay: float, *rest: Any, **more: Any) -> Any:
            waits.append(delay)
            return real(delay, *rest, **more)

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
    monkeypatch.setattr("rolltape.record.parts.write_parquet", hang.around(lambda *_: None))
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
    monkeypatch.setattr("rolltape.record.parts.write_parquet", fails)
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


# -- damage while the recorder lives


def test_a_journaled_row_that_does_not_read_back_is_lost_alone(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "run", keep_bytes=0)
    recorder.started("train", 0, 3)
    for n in "abc":
        recorder.add(trace(n), at(0))
    [journal] = (tmp_path / "run" / "journal").glob("*.journal")
    [_, damaged, _] = [r for r in read_journal(journal) if isinstance(r, Record) and r.row]
    with journal.open("r+b") as file:
        file.seek(damaged.offset + damaged.bytes - 1)
        file.write(b"\xff")
    assert recorder.rows("train", 0).column("trace_id").to_pylist() == ["a", "c"]
    done = commit(recorder, 0, emitted(*"abc"))
    assert done.step.counts == {"started": 3, "emitted": 2, "lost": 1}
    assert recorder.close().lost == 1
    assert records_of(tmp_path / "run").keys() == {"a", "c"}
    checked(tmp_path / "run")


def test_a_row_that_no_table_can_be_made_of_is_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltape.record import parts

    real = rows_to_table

    def picky(rows: list[Any]) -> Any:
        if any(r.values["trace_id"] == "b" for r in rows):
            raise ValueError("nobody knows why")
        return real(rows)

    recorder = opened(tmp_path / "run")
    for n in "abc":
        recorder.add(trace(n), at(0))
    monkeypatch.setattr(parts, "rows_to_table", picky)
    assert commit(recorder, 0, emitted(*"abc")).step.counts == {"started": 3, "emitted": 2, "lost": 1}
    recorder.close()
    assert records_of(tmp_path / "run").keys() == {"a", "c"}
    checked(tmp_path / "run")


def test_a_trace_that_cannot_be_taken_apart_is_lost_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = row_of

    def picky(record: Any, *rest: Any) -> Any:
        if record["id"] == "b":
            raise RuntimeError("nobody knows why")
        return real(record, *rest)

    monkeypatch.setattr("rolltape.record.recorder.row_of", picky)
    recorder = opened(tmp_path / "run")
    recorder.started("train", 0, 3)
    assert recorder.add(trace("a"), at(0))
    assert not recorder.add(trace("b"), at(0))
    assert asyncio.run(recorder.trace(trace("c"), at(0)))
    assert recorder.status.lost == 1
    assert commit(recorder, 0, emitted(*"abc")).step.counts == {"started": 3, "emitted": 2, "lost": 1}
    recorder.close()
    strict = opened(tmp_path / "run", strict=True)
    with pytest.raises(NotRecorded, match="trace b could not be recorded: RuntimeError: nobody knows why"):
        strict.add(trace("b"), at(1))
    strict.close()


def test_the_journal_does_not_grow_where_steps_always_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous trainer begins a step before the last one ends, so that no moment is without an open one."""
    unsynced(monkeypatch)
    monkeypatch.setattr(store_module, "_DEAD_BYTES", 30_000)
    root = tmp_path / "run"
    recorder = opened(root, keep_bytes=0)
    [journal] = (root / "journal").glob("*.journal")
    sizes = []
    recorder.started("train", 0)
    recorder.add(trace("t0", tokens=500), at(0))
    for step in range(60):
        recorder.started("train", step + 1)
        recorder.add(trace(f"t{step + 1}", tokens=500), at(step + 1))
        commit(recorder, step, emitted(f"t{step}"))
        sizes.append(journal.stat().st_size)
    assert max(sizes) < 60_000
    shutil.copytree(root, tmp_path / "copy")
    recover(tmp_path / "copy")
    assert records_of(tmp_path / "copy").keys() == {f"t{i}" for i in range(61)}
    assert counts(tmp_path / "copy")["started"] == 61
    assert dispositions(tmp_path / "copy")["t60"] == "interrupted"
    commit(recorder, 60, emitted("t60"))
    recorder.close()
    assert records_of(root).keys() == {f"t{i}" for i in range(61)}
    checked(root)


def test_a_trace_that_comes_while_its_step_ends_is_in_it_or_refused(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "run")

    async def go(step: int) -> int:
        tasks = [asyncio.create_task(recorder.trace(trace(f"{step}.{i}"), at(step))) for i in range(8)]
        for _ in range(step):
            await asyncio.sleep(0)
        outcomes = emitted(*(f"{step}.{i}" for i in range(8)))
        await recorder.commit("train", step, groups=[], outcomes=outcomes, record=Step())
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(a is True or isinstance(a, BadInput) for a in answers)
        return sum(a is True for a in answers)

    recorded = [asyncio.run(go(step)) for step in range(12)]
    recorder.close()
    assert len(records_of(tmp_path / "run")) == sum(recorded)
    assert not list((tmp_path / "run").rglob("*.journal"))
    checked(tmp_path / "run")


# -- traces that nobody expected


def deep(levels: int) -> Any:
    value: Any = "the bottom"
    for _ in range(levels):
        value = {"down": [value]}
    return value


def endless() -> Any:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    "info",
    [
        pytest.param(lambda: {"x": object()}, id="an object"),
        pytest.param(lambda: {"x": {1, 2}, ("a", 1): lambda: 0}, id="a set, a function, a key that is no text"),
        pytest.param(endless, id="a cycle"),
        pytest.param(lambda: deep(200), id="nested deeply"),
        pytest.param(lambda: deep(5000), id="nested more deeply than Python goes"),
        pytest.param(lambda: {"x": b"\xff\x00", "n": 10**5000, "nan": float("nan")}, id="bytes, a long integer, NaN"),
        pytest.param(lambda: {"x": "\ud800", "y": "z" * 10**6}, id="a lone surrogate, long text"),
    ],
)
def test_whatever_lies_in_info_the_trace_is_recorded_and_survives(tmp_path: Path, info: Callable[[], Any]) -> None:
    from rolltape.schema import to_trace

    recorder = opened(tmp_path / "run")
    live = to_trace(trace("live"))
    live.info = info()
    assert asyncio.run(recorder.trace(live, at(0)))
    assert recorder.add(trace("plain", info=info()), at(0))
    assert recorder.rows("train", 0).num_rows == 2
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    recover(tmp_path / "copy")
    commit(recorder, 0, emitted("live", "plain"))
    recorder.close()
    for root in (tmp_path / "run", tmp_path / "copy"):
        found = records_of(root)
        assert found.keys() == {"live", "plain"}
        assert all(found[n]["nodes"] == trace(n)["nodes"] for n in found)
        checked(root)
    assert same(records_of(tmp_path / "run"), records_of(tmp_path / "copy"))


def test_a_text_longer_than_parquet_holds_is_cut_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LARGEST_COLUMN", 10_000)
    recorder = opened(tmp_path / "run")
    long = trace("long", text="é" * 30_000, info={"x": "y" * 20_000})
    long["nodes"][0]["message"]["content"] = "short"
    long["errors"] = [{"type": "E", "message": "m" * 12_000, "traceback": None}]
    assert recorder.add(long, at(0))
    assert recorder.add(trace("other"), at(0))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    recover(tmp_path / "copy")
    assert commit(recorder, 0, emitted("long", "other")).commit is not None
    recorder.close()
    for root in (tmp_path / "run", tmp_path / "copy"):
        row, other = open_run(root).table().to_pylist()
        assert (row["trace_id"], other["problems"]) == ("long", None)
        assert row["problems"] == [
            "error_messages: 12,000 bytes are more than a Parquet value holds; cut to 10,000",
            "info: 20,008 bytes of JSON are more than a Parquet value holds and were left out",
            "node_content[1]: 60,000 bytes are more than a Parquet value holds; cut to 9,995",
        ]
        assert row["node_content"] == ["short", "é" * 4997]
        assert row["error_messages"] == ["m" * 10_000]
        assert row["info"] is None
        assert row["token_ids"] == [1, 2, 0, 7, 14]
        assert [r["id"] for r in decode(open_run(root).table().select(TRACE.arrow.names))] == ["long", "other"]
        checked(root)


def test_many_texts_that_are_too_long_together_are_cut_where_they_are_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGEST_COLUMN", 1000)
    nodes = [trace("x")["nodes"][0] for _ in range(5)]
    for node, size in zip(nodes, (10, 900, 200, 0, 700), strict=True):
        node["message"] = {"role": "user", "content": "x" * size}
    row = limits.fit(row_of(trace("t", nodes=nodes)))
    sizes = [len(t) for t in row.nodes["node_content"]]
    assert sizes == [10, 395, 200, 0, 395]
    assert sum(sizes) == 1000


def test_a_row_that_no_frame_holds_is_not_durable_but_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = opened(tmp_path / "run")
    assert recorder.add(trace("a"), at(0))
    monkeypatch.setattr(frames, "LARGEST", 5000)
    assert not recorder.add(trace("b", tokens=5000), at(0))
    assert "a journal frame holds at most 5000" in str(recorder.status.error)
    assert recorder.rows("train", 0).num_rows == 2
    done = commit(recorder, 0, emitted("a", "b"))
    assert done.commit is not None
    assert done.commit.sums["not_durable"] == 1
    recorder.close()
    assert len(records_of(tmp_path / "run")["b"]["nodes"][1]["token_ids"]) == 5000


def test_outcomes_that_hooks_fill_with_anything_are_written(tmp_path: Path) -> None:
    import numpy as np

    recorder = opened(tmp_path / "run")
    for n in "abc":
        recorder.add(trace(n), at(0))
    outcomes = [
        Outcome(trace_id="a", disposition="emitted", handed_reward=np.float32(0.5), logprobs=[-1.0, -2.0, -3.0]),  # type: ignore[arg-type]
        Outcome(trace_id="b", disposition="error", reason="bad \ud800 text", handed_reward={"x": {1, 2}}),
        Outcome(trace_id="c", disposition="filtered", remove_sample=[np.True_]),  # type: ignore[arg-type]
    ]
    record = Step(options={"path": Path("x")}, batch=(np.int64(3),))  # type: ignore[arg-type]
    done = recorder.commit_now("train", 0, groups=[], outcomes=outcomes, record=record)
    assert done.error is None
    recorder.close()
    rows = open_run(tmp_path / "run").table().to_pylist()
    assert [r["handed_reward"] for r in rows] == ["0.5", '{"x":[1,2]}', None]
    assert (rows[1]["reason"], rows[2]["remove_sample"]) == ("bad \ufffd text", [True])
    assert open_run(tmp_path / "run").steps()[0].batch == (3,)


def test_traces_of_no_nodes_are_recorded(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "run")
    assert recorder.add(trace("a", nodes=[]), at(0))
    commit(recorder, 0, [Outcome(trace_id="a", disposition="empty")])
    recorder.close()
    assert records_of(tmp_path / "run")["a"]["nodes"] == []
    checked(tmp_path / "run")


def test_twenty_thousand_tiny_traces_make_one_step_of_few_row_groups(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "run", store=StoreOptions(fsync="never"))
    names = [f"{i:05}" for i in range(20_000 if LONG else 4000)]
    tiny = {"task": {"type": "T", "data": {"idx": 0}}, "nodes": [], "rewards": {}}
    for i, n in enumerate(names):
        assert recorder.add({"id": n, **tiny}, at(0, group_index=i // 8, rollout_index=i % 8))
    done = commit(recorder, 0, [Outcome(trace_id=n, disposition="empty") for n in names])
    assert done.commit is not None
    recorder.close()
    run = open_run(tmp_path / "run")
    batches = list(run.batches(columns=["trace_id"]))
    assert [t for b in batches for t in b.column(0).to_pylist()] == names
    assert len(batches) <= 8
    assert done.commit.file.bytes < 60 * len(names)


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
