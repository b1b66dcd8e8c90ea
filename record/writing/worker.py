"""A thread that does jobs one after the other, for work that may hang: a disk can keep a write for ever.

Waiting for it is always bounded, and not even begun where it has been stuck for longer already. It is a daemon thread, so
that a job which never returns does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)


class Worker:
    """Does jobs in order, and `idle` every `seconds`, also while jobs keep coming."""

    def __init__(self, name: str, idle: Callable[[], None], seconds: float) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._idle, self._seconds = idle, seconds
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """Queue a job; its future gets the result or the exception."""
        done: Future[Any] = Future()
        self._jobs.put((run, done))
        return done

    @property
    def stuck_for(self) -> float:
        """Seconds that the present job has taken."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def wait(self, done: Future[Any], seconds: float) -> bool:
        """Wait for a job, at most `seconds` less what the worker has been stuck for; whether it is done."""
        wait_for([done], max(0.0, seconds - self.stuck_for))
        return done.done()

    async def arrived(self, done: Future[Any], seconds: float) -> bool:
        """`wait` for an event loop."""
        queued: Future[Future[Any]] = Future()
        queued.set_result(done)
        return (await self.passed_on(queued, seconds)).done()

    async def passed_on(self, made: Future[Future[Any]], seconds: float) -> Future[Any]:
        """`arrived` for a job that another thread queues here, however long that takes it.

        `made`: the other thread's job, which returns this one's. Raises what `made` raised.
        """
        waiter = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if not waiter.done():
                waiter.set_result(None)

        self.call_when_passed_on(made, seconds, settle)
        await waiter
        return made.result()

    def call_when_passed_on(self, made: Future[Future[Any]], seconds: float, then: Callable[[], None]) -> None:
        """Have the running event loop call `then` when a job is done that another thread queues here (see `passed_on`).

        The loop is woken once for both jobs: waking a thread costs more than what it does for a short trace.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        limit: float | None = None
        told = False

        def settle() -> None:
            nonlocal told
            if timer is not None:
                timer.cancel()
            if not told:
                told = True
                then()

        def tell(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop may be gone when a stuck job ends
                loop.call_soon_threadsafe(settle)

        def queued(_: Future[Future[Any]]) -> None:
            nonlocal limit
            left = seconds - self.stuck_for
            limit = time.monotonic() + left
            if made.cancelled() or made.exception() or left <= 0:
                tell(made)
            else:
                made.result().add_done_callback(tell)

        def look() -> None:
            nonlocal timer
            left = seconds if limit is None else limit - time.monotonic()
            if left <= 0:
                settle()
            else:
                timer = loop.call_later(left, look)

        timer = loop.call_later(seconds, look)
        made.add_done_callback(queued)

    def stop(self, seconds: float) -> bool:
        """End after the jobs that are queued; whether that was within `seconds`, less what it has been stuck for."""
        self._jobs.put(None)
        self._thread.join(max(0.0, seconds - self.stuck_for))
        return not self._thread.is_alive()

    def _loop(self) -> None:
        due = time.monotonic() + self._seconds
        while True:
            job = None
            with suppress(queue.Empty):
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()))
                if job is None:
                    return
            self._busy_since = time.monotonic()
            if job is not None:
                _do(*job)
            job = None
            if time.monotonic() >= due:
                self._guarded()
                due = time.monotonic() + self._seconds
            self._busy_since = None

    def _guarded(self) -> None:
        try:
            self._idle()
        except Exception:
            logger.exception("what was to be done from time to time failed")


def _do(run: Callable[[], Any], done: Future[Any]) -> None:
    try:
        result = run()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)
