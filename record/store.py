"""Rows of the steps that are not committed yet: in the journal where it can be written, in memory where it cannot.

One thread writes, in order, whatever the event loop hands it; nobody waits for it longer than `ack_seconds`. A write that
fails leaves its row in memory and is tried again before the next one and every `retry_seconds`. A write that never returns
costs memory up to `queue_bytes` of waiting frames, beyond which rows are no longer journaled; they stay in memory until
their step is committed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolltape.record.journal import Fsync, Journal, pack_record
from rolltape.schema.encoding import Row
from rolltape.schema.errors import RolltapeError

logger = logging.getLogger(__name__)

StepKey = tuple[str, int, str | None]
"""(split, step, eval name)."""


@dataclass
class Entry:
    """One recorded trace of a step that is not committed."""

    trace_id: str
    order: tuple[int, int, int, str]
    bytes: int
    row: Row | None
    """The row while it is not in the journal."""
    offset: int | None = None
    durable_in_time: bool = False
    """Whether the journal had the row before its Sample was handed on."""


@dataclass(frozen=True)
class StoreOptions:
    """How rows are kept until their step is committed."""

    journal: bool = True
    fsync: Fsync = "interval"
    fsync_seconds: float = 1.0
    queue_bytes: int = 1 << 30
    """Frames that may wait for the writing thread."""
    ack_seconds: float = 5.0
    """Longest wait for a row to reach the journal before its Sample goes on without."""
    commit_seconds: float = 120.0
    """Longest wait for a step to be committed before training goes on without."""
    retry_seconds: float = 2.0
    """Pause between tries of what failed."""


@dataclass
class Job:
    """Something the writing thread does."""

    run: Callable[[], Any]
    bytes: int = 0
    done: Future[Any] = field(default_factory=Future)


class WriterThread:
    """Does jobs one after the other in a daemon thread, so that a job that never returns holds nobody up at the end."""

    def __init__(self, name: str, retry: Callable[[], None], seconds: float) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._retry, self._seconds = retry, seconds
        self._lock = threading.Lock()
        self.waiting = 0
        """Bytes of the jobs that wait or run."""
        self.busy_since: float | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any], size: int = 0) -> Future[Any]:
        """Queue a job; its future gets the result or the exception."""
        job = Job(run, size)
        with self._lock:
            self.waiting += size
        self._jobs.put(job)
        return job.done

    def _loop(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._seconds)
            except queue.Empty:
                self._guarded(self._retry)
                continue
            if job is None:
                return
            self.busy_since = time.monotonic()
            self._do(job)
            self.busy_since = None
            with self._lock:
                self.waiting -= job.bytes

    def _do(self, job: Job) -> None:
        try:
            result = job.run()
        except BaseException as error:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)

    @staticmethod
    def _guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            logger.exception("retrying what could not be written failed")

    def stop(self, seconds: float) -> bool:
        """End after the jobs that are queued; whether that was within `seconds`."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()


class JournalStore:
    """Rows by step, and the journal behind them. All methods may be called from any thread."""

    def __init__(self, path: Path | None, options: StoreOptions, thread: WriterThread) -> None:
        self.options = options
        self._path = path
        self._journal: Journal | None = None
        self._thread = thread
        self._lock = threading.Lock()
        self._entries: dict[StepKey, dict[str, Entry]] = {}
        self._unwritten: deque[tuple[Entry | None, bytes]] = deque()
        self.error: str | None = None
        """Why the journal cannot be written at the moment."""

    def begin(self) -> None:
        """Open the journal, whose lock tells other processes that this writer lives. Its failure is told by `error`."""
        if self._path is None:
            return
        try:
            self._journal = Journal(self._path, fsync=self.options.fsync, seconds=self.options.fsync_seconds)
        except OSError as error:
            self.error = f"{self._path}: {error.strerror or error}"

    # -- writing

    def put(self, key: StepKey, row: Row, head: dict[str, Any]) -> Future[bool]:
        """Keep a row, in place of an earlier one of the same trace.

        The future tells whether the journal has it. It is done at once where the journal is off or its queue is full.
        """
        entry = Entry(row.values["trace_id"], row.order, row.nbytes, row)
        with self._lock:
            self._entries.setdefault(key, {})[entry.trace_id] = entry
        if self._path is None:
            return _done(False)
        try:
            frame = pack_record("trace", head, row)
        except RolltapeError as error:
            self.error = str(error)
            return _done(False)
        return self._submit(entry, frame)

    def note(self, kind: str, data: dict[str, Any]) -> Future[bool]:
        """Journal a record that is no trace."""
        return _done(False) if self._path is None else self._submit(None, pack_record(kind, data))

    def _submit(self, entry: Entry | None, frame: bytes) -> Future[bool]:
        if self._thread.waiting + len(frame) > self.options.queue_bytes:
            self.error = f"{self._thread.waiting:,} bytes wait to be written, the most that may"
            return _done(False)
        return self._thread.submit(lambda: self._append(entry, frame), len(frame))

    def _append(self, entry: Entry | None, frame: bytes) -> bool:
        """Write a frame, after those that failed before. In the writing thread."""
        self.retry()
        if self._unwritten or not self._write(entry, frame):
            self._unwritten.append((entry, frame))
            return False
        return True

    def _write(self, entry: Entry | None, frame: bytes) -> bool:
        try:
            if self._journal is None:
                self.begin()
            if self._journal is None:
                return False
            offset = self._journal.append(frame)
        except OSError as error:
            self.error = f"{self._path}: {error.strerror or error}"
            return False
        self.error = None
        if entry is not None:
            with self._lock:
                entry.offset, entry.row = offset, None
        return True

    def retry(self) -> None:
        """Try again what could not be written. In the writing thread."""
        while self._unwritten and self._write(*self._unwritten[0]):
            self._unwritten.popleft()

    # -- reading

    def entries(self, key: StepKey) -> list[Entry]:
        """Entries of a step in the order of its file: by group, rollout and try."""
        with self._lock:
            return sorted(self._entries.get(key, {}).values(), key=lambda e: e.order)

    def row(self, entry: Entry) -> Row:
        """The row of an entry, from memory or from the journal. Raises Damaged where the journal does not give it back."""
        with self._lock:
            row, offset = entry.row, entry.offset
        if row is not None:
            return row
        assert self._journal is not None
        assert offset is not None
        found = self._journal.read(offset).row
        assert found is not None
        return found

    def rows(self, key: StepKey) -> Iterator[Row]:
        """Rows of a step, one after the other."""
        return (self.row(e) for e in self.entries(key))

    # -- ending

    def drop(self, key: StepKey) -> None:
        """Forget a step; the journal is emptied when no other step needs it. In the writing thread."""
        with self._lock:
            gone = {id(e) for e in self._entries.pop(key, {}).values()}
            empty = not self._entries
        self._unwritten = deque(u for u in self._unwritten if id(u[0]) not in gone and not empty)
        if empty and self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.clear()

    def close(self) -> None:
        """Close the journal; an empty one is removed. In the writing thread."""
        if self._journal is not None:
            self._journal.close(remove=not self._entries)
            self._journal = None


def _done(value: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(value)
    return future
