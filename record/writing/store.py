"""Rows of the steps that are not committed yet: in the journal where it can be written, in memory where it cannot.

One thread writes; nobody waits for it longer than `ack_seconds`. What fails stays in memory and is tried again every
`retry_seconds`. Journaled rows stay in memory too, packed, up to `keep_bytes`, so that a disk that hangs does not stop the
conversion of what it holds. The journal is emptied when no step is open, and written anew when most of it is committed.

A folder can vanish under its writer. The journal is looked for from time to time; one that is gone is begun again, with all
that is not committed.
"""

from __future__ import annotations

import copy
import errno
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from rolltape.record.writing.journal import Fsync, Journal, Reserve
from rolltape.record.writing.limits import LARGEST_COLUMN, drop_extra, fit
from rolltape.record.writing.worker import Worker
from rolltape.schema.encoding import Row
from rolltape.schema.errors import BadInput
from rolltape.schema.frames import pack_record, unpack_frame

T = TypeVar("T")

logger = logging.getLogger(__name__)

StepKey = tuple[str, int, str | None]
"""(split, step, eval name)."""

CLOSED = "the recorder is closed; open the run again to go on."
_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORT = 32 << 10
"""Bytes of a row up to which it is kept beside its frame: unpacking it twice would cost 5 % of a short episode's CPU."""
_TICK = 0.05
"""Seconds between looks for what waits."""
_DEAD_BYTES = 64 << 20
"""Committed bytes in the journal from which on it may be written anew."""


@dataclass(frozen=True)
class StoreOptions:
    """How rows are kept until their step is committed."""

    journal: bool = True
    fsync: Fsync = "interval"
    fsync_seconds: float = 1.0
    keep_bytes: int = 48 << 20
    """Journaled rows that stay in memory, packed, until their step is committed; others are read back."""
    queue_bytes: int = 1 << 30
    """Rows of ended steps that may wait in memory because they cannot be written; beyond it the oldest are given up."""
    ack_seconds: float = 5.0
    """Longest wait for a row to reach the journal before its Sample goes on without."""
    commit_seconds: float = 120.0
    """Longest wait for a step to be committed before training goes on without."""
    retry_seconds: float = 2.0
    """Pause between tries of what failed."""


@dataclass(eq=False)
class Item:
    """A frame that is to be in the journal until its step is committed."""

    frame: bytes | None
    place: tuple[Journal, int] | None = None
    """The journal that has it, and where."""
    was: tuple[Journal, int] | None = None
    """Where it was in a journal that cannot be found at the moment."""
    gone: bool = False
    """Whether nobody needs it any more."""
    begun: tuple[StepKey, int] | None = None
    """Where it says that tries began: of which step, and how many."""


@dataclass(eq=False)
class Entry(Item):
    """A recorded trace of a step that is not committed."""

    trace_id: str = ""
    order: tuple[int, int, int, str] = (0, 0, 0, "")
    bytes: int = 0
    """Of the frame."""
    held: int = 0
    """Bytes it takes in memory."""
    row: Row | None = None
    """The row itself: of a short trace; or where there is no frame, as the journal is off, or a frame cannot hold it."""


@dataclass
class _Step:
    entries: dict[str, Entry] = field(default_factory=dict)
    notes: list[Item] = field(default_factory=list)
    ended: bool = False

    def items(self) -> list[Item]:
        return [*self.notes, *self.entries.values()]


class JournalStore:
    """Rows by step, and the journal behind them. All methods may be called from any thread."""

    def __init__(self, path: Path, options: StoreOptions, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises OSError where the folder is not to be written to; it is called before a journal is made."""
        self.options = options
        self._path, self._check = path, check
        self._journal: Journal | None = None
        self._former: Journal | None = None
        self._reserve: Reserve | None = None
        self._lock = RLock()  # close() may be called by a signal handler, in the middle of anything
        self._steps: dict[StepKey, _Step] = {}
        self._over: set[StepKey] = set()
        self._waiting: deque[Item] = deque()
        self._unhurried: deque[Item] = deque()
        """What nobody waits for: written with what comes next, or at the next tick."""
        self._begun: Counter[StepKey] = Counter()
        """Tries that began since the last record or tick."""
        self._kept = 0
        self.closed = self._ended = False
        self._failed_at: float | None = None
        self.error: str | None = None
        """Why the journal cannot be written at the moment."""
        self.begin()
        self._looked = time.monotonic()
        self.worker = Worker(f"rolltape-journal-{path.stem}", self._tick, min(_TICK, options.retry_seconds))
        self._reader: Worker | None = None

    def begin(self) -> None:
        """Open the journal, whose lock tells other processes that this writer lives. A failure is told by `error`."""
        try:
            self._open()
        except OSError as error:
            self._fails(error)

    def _open(self) -> Journal:
        if self._journal is None:
            self._check()
            if self._former is not None and self._former.in_place():
                self._journal = self._former
            else:
                self._journal = Journal(self._path, fsync=self.options.fsync, seconds=self.options.fsync_seconds)
            self._former = None
            if self._reserve is None and self.options.journal:
                with suppress(OSError):
                    self._reserve = Reserve(self._path.parent)
        return self._journal

    def _fails(self, error: Exception) -> None:
        self._failed_at = time.monotonic()
        self.error = f"{self._path}: {getattr(error, 'strerror', None) or error or type(error).__name__}"

    # -- recording

    def put(self, key: StepKey, row: Row, head: dict[str, Any]) -> Entry:
        """Keep a row, in place of an earlier one of the same trace. It is journaled by `write`.

        Raises BadInput where the step has ended.
        """
        frame = self._packed(head, fit(row)) if self.options.journal else None
        size, length = row.nbytes, len(frame or b"")
        keeps = frame is None or (size <= _SHORT and not row.extra)
        if frame is None and row.extra:  # it may hold what the caller changes later
            row.extra = copy.deepcopy(row.extra)
        entry = Entry(
            frame,
            trace_id=row.values["trace_id"],
            order=row.order,
            bytes=length,
            held=length + size if keeps else length,
            row=row if keeps else None,
        )
        with self._lock:
            step = self._open_step(key)
            earlier = step.entries.get(entry.trace_id)
            if earlier is not None:
                self._release(earlier)
            step.entries[entry.trace_id] = entry
        return entry

    def write(self, entries: Sequence[Item]) -> Future[list[bool]]:
        """Have entries journaled; whether each is, which its `place` tells too."""
        if not any(entry.frame for entry in entries):
            return _done([False] * len(entries))
        return self.worker.submit(lambda: self._arrived(entries))

    def _packed(self, head: dict[str, Any], row: Row) -> bytes | None:
        try:
            frame = pack_record("trace", head, row)
            if len(frame) > LARGEST_COLUMN and row.extra:
                drop_extra(row, len(frame))
                frame = pack_record("trace", head, row)
        except Exception as error:
            self.error = f"trace {row.values['trace_id']} cannot be journaled: {error}"
            logger.warning(self.error)
            return None
        return frame

    def note(
        self, kind: str, data: dict[str, Any], key: StepKey, arrays: Any = (), *, hurry: bool = True
    ) -> Future[bool]:
        """Journal a record of a step that is no trace. Without `hurry` before the next record, and nothing tells when."""
        if not self.options.journal:
            return _done(False)
        try:
            item = Item(pack_record(kind, data, arrays=arrays), begun=(key, data["n"]) if kind == "started" else None)
        except Exception as error:
            self.error = f"a {kind} record cannot be journaled: {error}"
            logger.warning(self.error)
            return _done(False)
        with self._lock:
            if self.closed or key in self._over:
                return _done(False)
            self._steps.setdefault(key, _Step()).notes.append(item)
        if hurry:
            return self.worker.submit(lambda: self._arrived([item])[0])
        self._unhurried.append(item)
        return _done(False)

    def started(self, key: StepKey, n: int) -> None:
        """Journal that `n` tries begin, before the next record and within some 50 ms."""
        with self._lock:
            self._begun[key] += n

    def _open_step(self, key: StepKey) -> _Step:
        step = self._steps.get(key)
        if self.closed:
            raise BadInput(CLOSED)
        if key in self._over or (step is not None and step.ended):
            raise BadInput(f"step {key[1]} of {key[0]!r} has ended; its traces can no longer be recorded.")
        return self._steps.setdefault(key, _Step())

    def end(self, key: StepKey, ended: bool = True) -> list[str] | None:
        """Take no further rows for a step, or take them again. Its trace ids; None where it had ended before."""
        with self._lock:
            if self.closed:
                raise BadInput(CLOSED)
            if key in self._over or (ended and key in self._steps and self._steps[key].ended):
                return None
            step = self._steps.setdefault(key, _Step())
            step.ended = ended
            return list(step.entries)

    # -- writing: in the journal's thread

    def _arrived(self, items: Sequence[Item]) -> list[bool]:
        """Write items, unless the disk has just refused others: they are tried together, from time to time."""
        self._take_unhurried()
        self._waiting.extend(items)
        self._write_if_due()
        return [item.place is not None for item in items]

    def _note_begun(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, Counter()
        for key, n in begun.items():
            self.note("started", {**place_of(key), "n": n}, key, hurry=False)

    def _take_unhurried(self) -> None:
        if self._begun:
            self._note_begun()
        while self._unhurried:
            self._waiting.append(self._unhurried.popleft())

    def _write_if_due(self) -> None:
        if self._failed_at is None or time.monotonic() - self._failed_at >= self.options.retry_seconds:
            self._write_waiting()

    def _tick(self) -> None:
        self._take_unhurried()
        self._write_if_due()
        if self._journal is None:
            return
        try:
            if self.options.journal:
                self._journal.sync_if_due()
            if time.monotonic() - self._looked >= min(self.options.retry_seconds, 1.0):
                self._looked = time.monotonic()
                self._look()
        except OSError as error:
            self._fails(error)

    def _write_waiting(self) -> None:
        """Write what waits, in order. Of a disk that is full, what is smaller than the first that failed may still fit."""
        if self._ended:  # a tick may follow the end
            return
        self.begin()
        if self._journal is None:
            return
        waiting, self._waiting = self._waiting, deque()
        most: int | None = None
        while waiting:
            item = waiting.popleft()
            frame = item.frame
            if frame is None or item.gone or item.place is not None:
                continue
            if most is not None and len(frame) >= most:
                self._waiting.append(item)
                continue
            try:
                self._write(item, frame)
            except Exception as error:
                self._fails(error)
                self._waiting.append(item)
                most = len(frame)
                if not isinstance(error, OSError) or error.errno not in _SPACE:
                    break
        self._waiting.extend(waiting)
        if not self._waiting:
            self._failed_at = self.error = None

    def _write(self, item: Item, frame: bytes) -> None:
        journal = self._open()
        there = item.was is not None and item.was[0] is journal  # the journal has turned up again, and has it
        place = item.was if there else (journal, journal.append(frame))
        with self._lock:
            item.place, item.was = place, None
            self._keep(item)

    def _keep(self, item: Item) -> None:
        """Keep a journaled frame in memory where there is room."""
        if item.frame is None or not isinstance(item, Entry):
            return
        if item.gone or self._kept + item.held > self.options.keep_bytes:
            item.frame = item.row = None
        else:
            self._kept += item.held

    def _release(self, item: Item) -> None:
        """Forget an item. Under the lock."""
        if isinstance(item, Entry) and item.frame is not None and item.place is not None:
            self._kept -= item.held
        item.gone, item.frame = True, None
        if isinstance(item, Entry):
            item.row = None

    def _look(self) -> None:
        """Begin a journal again that is no longer where it was, with all that is not committed."""
        journal = self._journal
        if journal is None or journal.in_place():
            return
        logger.warning("%s is gone; it is begun again", self._path)
        self._journal, self._former = None, journal
        with self._lock:
            items = [(i, i.place) for step in self._steps.values() for i in step.items()]
        for item, place in items:
            if place is not None:
                with suppress(OSError):
                    self._take_back(item, item.frame or place[0].frame(place[1]))
        self._write_waiting()

    def _take_back(self, item: Item, frame: bytes) -> None:
        """Have a journaled item in memory only, to write it again."""
        with self._lock:
            if isinstance(item, Entry) and item.frame is not None:
                self._kept -= item.held
            if not item.gone:
                item.frame, item.place, item.was = frame, None, item.place
                self._waiting.append(item)

    # -- reading

    def entries(self, key: StepKey) -> list[Entry]:
        """Entries of a step in the order of its file: by group, rollout and try."""
        with self._lock:
            step = self._steps.get(key, _Step())
            return sorted(step.entries.values(), key=lambda e: e.order)

    def row(self, entry: Entry) -> Row | None:
        """The row of an entry, from memory or from the journal. None where it was given up or does not read back."""
        with self._lock:
            row, frame, place = entry.row, entry.frame, entry.place
        if row is not None or frame is not None:
            return row if row is not None else unpack_frame(frame or b"").row
        if place is None:
            return None
        try:
            return self._read(*place)
        except (OSError, TimeoutError) as error:
            logger.error("trace %s cannot be read back from the journal: %s", entry.trace_id, error or "no answer")
            return None

    def _read(self, journal: Journal, offset: int) -> Row | None:
        """A row from the journal, by a thread of its own: a disk that hangs must not hold up who asks."""
        if self._reader is None:
            self._reader = Worker(f"rolltape-reader-{self._path.stem}", lambda: None, 3600.0)
        done = self._reader.submit(lambda: journal.read(offset).row)
        if not self._reader.wait(done, self.options.ack_seconds):
            raise TimeoutError(f"no answer within {self.options.ack_seconds} s")
        row: Row | None = done.result()
        return row

    # -- ending

    def latest(self, key: StepKey, entry: Entry) -> Entry:
        """What took the place of an entry whose trace was recorded again; else the entry itself."""
        with self._lock:
            step = self._steps.get(key)
            return entry if step is None else step.entries.get(entry.trace_id, entry)

    def memory(self, key: StepKey | None = None) -> int:
        """Bytes of rows, of one step or of all, that are in memory only."""
        with self._lock:
            steps = self._steps.values() if key is None else [self._steps.get(key, _Step())]
            return sum(e.held for step in steps for e in step.entries.values() if e.place is None)

    def give_up(self, key: StepKey) -> int:
        """Forget the rows of a step that are in memory only; returns how many."""
        with self._lock:
            step = self._steps.get(key, _Step())
            lost = [e for e in step.entries.values() if e.place is None]
            for entry in lost:
                self._release(entry)
                del step.entries[entry.trace_id]
            if not step.entries:  # of a step of which no trace is left it is enough how many began
                for item in step.notes:
                    if item.begun is None:
                        self._release(item)
                step.notes = [item for item in step.notes if not item.gone]
            return len(lost)

    def forget_memory(self) -> int:
        """Forget what is in memory only, at the end of the process; how many rows that were."""
        return sum(self.give_up(key) for key in list(self._steps))

    def leave(self, key: StepKey) -> int:
        """Leave a step to `recover`: it stays in the journal, out of memory. How many rows the journal does not have."""
        lost = self.give_up(key)
        with self._lock:
            for entry in self._steps[key].entries.values():
                if entry.frame is not None:
                    self._kept -= entry.held
                    entry.frame = entry.row = None
        return lost

    def drop(self, key: StepKey) -> Future[None]:
        """Forget a step that is committed."""
        with self._lock:
            step = self._steps.pop(key, None)
            self._over.add(key)
            for item in step.items() if step else ():
                self._release(item)
        return self.worker.submit(self._tidy)

    def _tidy(self) -> None:
        """Empty the journal where no step is open; write it anew where most of it is committed."""
        with self._lock:
            items = [i for step in self._steps.values() for i in step.items() if i.place is not None]
            empty = not any(step.items() for step in self._steps.values())
        journal = self._journal
        if journal is None:
            return
        try:
            if empty:
                journal.clear()
            elif journal.good >= _DEAD_BYTES:
                self._compact(journal, items)
        except OSError as error:
            self.error = f"{self._path}: {error.strerror or error}"

    def _compact(self, journal: Journal, items: list[Item]) -> None:
        """Write the journal anew with `items` only, where they are less than half of it."""
        live = sum(i.bytes if isinstance(i, Entry) else len(i.frame or b"") for i in items)
        if live > journal.good // 2:
            return
        frames = (i.frame or place[0].frame(place[1]) for i in items if (place := i.place) is not None)
        other = Journal(self._path, fsync=journal.fsync, seconds=journal.seconds, frames=frames)
        with self._lock:
            for item, offset in zip(items, other.offsets, strict=True):
                item.place = (other, offset)
        self._journal = other

    def close(self, seconds: float) -> bool:
        """Write what waits and close the journal; an empty one is removed. Whether that was within `seconds`."""
        self._note_begun()
        with self._lock:
            self.closed = True
        self.worker.submit(self._close)
        if self._reader is not None:
            self._reader.stop(0.0)
        return self.worker.stop(seconds)

    def _close(self) -> None:
        self._take_unhurried()
        self._write_waiting()
        if self._reserve is not None:
            with suppress(OSError):
                self._reserve.give_back()
            self._write_begun()
        if self._journal is not None:
            with self._lock:
                empty = not any(step.items() for step in self._steps.values())
            with suppress(OSError):
                if self.options.journal and not empty and self.options.fsync != "never":
                    self._journal.sync()
            self._journal.close(remove=empty or self._journal.empty)
            self._journal = None
        self._ended = True

    def _write_begun(self) -> None:
        """Of what finds no room in the end, write first how many tries began, so that those that are lost are counted."""
        begun: Counter[StepKey] = Counter()
        for item in self._waiting:
            if item.begun is not None and not item.gone:
                begun[item.begun[0]] += item.begun[1]
                item.gone = True
        frames = [pack_record("started", {**place_of(key), "n": n}) for key, n in begun.items()]
        self._waiting.extendleft(Item(frame) for frame in reversed(frames))
        self._write_waiting()


def place_of(key: StepKey) -> dict[str, Any]:
    """The step that a journal record belongs to, as it says it."""
    return {"split": key[0], "step": key[1], "eval_name": key[2]}


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
