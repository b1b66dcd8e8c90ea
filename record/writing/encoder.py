"""Takes traces apart in a thread of its own, several in a row where several end at about the same time.

What a trace costs is many small steps of Python, which take two to three times as long between the steps of episodes as
one trace after the other. So traces wait for each other: WINDOW seconds at most, and seldom where that brought no other.
They are journaled each for itself, and their waiters woken together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rolltape.record.writing.store import CLOSED, Entry
from rolltape.record.writing.worker import Worker
from rolltape.schema.errors import BadInput

T = TypeVar("T")

WINDOW = 0.03
"""Seconds that the first trace waits for others."""
MOST = 8
"""Traces that are taken apart in a row: who waits for them goes on at once, and holds the event loop for that long."""
_SELDOM = 64
"""Batches after which waiting is tried again, at most."""


@dataclass(eq=False)
class _Place:
    """A trace among others."""

    make: Callable[[], Entry]
    waiter: asyncio.Future[None]
    entry: Entry | None = None
    error: Exception | None = None


@dataclass(eq=False)
class _Batch:
    """Traces that are taken apart in a row."""

    loop: asyncio.AbstractEventLoop
    places: list[_Place] = field(default_factory=list)
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set where it is not to wait any longer."""

    def settle(self) -> None:
        """Let all go on. In the event loop."""
        for place in self.places:
            if not place.waiter.done():
                place.waiter.set_result(None)


class Encoder:
    """One thread. `write` hands entries to `worker`, which journals them."""

    def __init__(self, name: str, worker: Worker, write: Callable[[Sequence[Entry]], Future[Any]]) -> None:
        self._worker, self._write = worker, write
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.RLock()
        self._open: _Batch | None = None
        """The batch that takes further traces."""
        self._waiting = 0
        """Traces that are put and not taken apart."""
        self._barren, self._skip = 0, 0

    async def put(self, make: Callable[[], Entry], seconds: float) -> Entry:
        """Call `make` in the thread and have its entry written; waits at most `seconds` for the latter.

        Whether it was written is said by its `place`. Raises what `make` raised.
        """
        loop = asyncio.get_running_loop()
        place = _Place(make, loop.create_future())
        with self._lock:
            batch = self._open
            if batch is None or batch.loop is not loop:
                self._close()  # nobody joins it any more: it need not wait
                batch = _Batch(loop)
                try:
                    made = self._thread.submit(self._encode, batch)
                except RuntimeError as error:
                    raise BadInput(CLOSED) from error
                self._worker.call_when_passed_on(made, seconds, batch.settle)
                self._open = batch
            batch.places.append(place)
            self._waiting += 1
            if len(batch.places) == MOST:
                self._close()
        await place.waiter
        if place.error is not None:
            raise place.error
        assert place.entry is not None
        return place.entry

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Do a job in the thread, after the traces that were put before. Raises BadInput where it was stopped."""
        self._close()
        try:
            return self._thread.submit(job)
        except RuntimeError as error:
            raise BadInput(CLOSED) from error

    def stop(self, seconds: float = 0.0) -> None:
        """Take no more. What was put is still done; waits for that, at most `seconds`."""
        if self._lock.acquire(timeout=WINDOW):  # by then what waits goes on by itself
            try:
                self._close()
            finally:
                self._lock.release()
        with suppress(RuntimeError):  # it was stopped before
            last = self._thread.submit(int)
            self._thread.shutdown(wait=False)
            wait_for([last], max(0.0, seconds))

    @property
    def idle(self) -> bool:
        """Whether nothing was put that has not been taken apart."""
        with self._lock:
            return not self._waiting

    def _close(self) -> None:
        """Have the batch that takes traces take no more, nor wait for them."""
        with self._lock:
            batch, self._open = self._open, None
        if batch is not None:
            batch.hurry.set()

    # -- in the thread

    def _encode(self, batch: _Batch) -> Future[Any]:
        waited = not self._skip
        if waited:
            batch.hurry.wait(WINDOW)
        with self._lock:
            if self._open is batch:
                self._open = None
        self._learn(waited, len(batch.places) > 1)
        entries: list[Entry] = []
        written, begun = None, time.monotonic()
        for place in batch.places:
            if entries and time.monotonic() - begun > WINDOW:  # what is there must not wait for a trace that takes long
                written = self._write(entries)
                entries, begun = [], time.monotonic()
            try:
                place.entry = place.make()
            except Exception as error:
                place.error = error
            except BaseException as error:  # somebody's text that ends the process: not here, and not for the others
                place.error = RuntimeError(f"{type(error).__name__}: {error}")
            else:
                entries.append(place.entry)
        with self._lock:
            self._waiting -= len(batch.places)
        return written if written is not None and not entries else self._write(entries)

    def _learn(self, waited: bool, found: bool) -> None:
        """Wait where others come, and after a wait that brought none only after 1, 2, 4 … further batches."""
        if found:
            self._barren = self._skip = 0
        elif waited:
            self._barren = min(2 * self._barren or 1, _SELDOM)
            self._skip = self._barren
        else:
            self._skip -= 1
