"""Disks that are full, read-only, gone or in other hands: training goes on, all is counted."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_build import eventually, fill, mounted, opened, settled
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
from rolltape.record.writing.journal import Record, read_journal
from rolltape.record.writing.recover import recover
from rolltape.replay import open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema.errors import RunConflict


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as disk:
        yield disk


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


@pytest.mark.parametrize("queue_bytes", [1 << 30, 1000])
def test_what_began_while_a_disk_stayed_full_is_counted_by_recover(small_disk: Path, queue_bytes: int) -> None:
    recorder = opened(small_disk / "run", queue_bytes=queue_bytes)
    record_step(recorder, 0, ["before"])
    filler = fill(small_disk)
    for step in (1, 2, 3):
        names = [f"t{step}-{i}" for i in range(10)]
        for name in names:
            recorder.started("train", step)
            recorder.add(trace(name, text=os.urandom(20_000).hex()), at(step))
        if step < 3:
            assert commit(recorder, step, emitted(*names)).commit is None
    lost = recorder.close().lost
    filler.unlink()
    assert recover(small_disk / "run").faults == []
    found = counts(small_disk / "run")
    assert found["started"] == 31
    assert found["lost"] == lost >= 25
    checked(small_disk / "run")


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
    assert {(f.code, f.step) for f in verify(open_run(root)).findings} == {("missing_step", 0), ("lost", 1)}
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
