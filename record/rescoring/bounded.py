"""A bounded wait for code of others: what awaits for ever, what blocks the event loop, and what sits in a thread.

Scoring functions are coroutines by their signature and blocking by habit: a regular expression that backtracks, a request
without a timeout. No timer of the event loop ends those, and they must run in the main thread, where they ran live and
where alone libraries may set alarms of their own. So the kernel's timer runs while a step of theirs does. When it rings,
`Hung` is raised in their midst, and the clock of the loop is put back, so that nobody else pays for the time that was lost.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Container, Coroutine, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from typer import Exit

from rolltape.replay.printing.console import say_error
from rolltape.schema.errors import RolltapeError

T = TypeVar("T")
_AGAIN = 1.0
"""Seconds until it rings again, for code that takes any exception for a reason to go on."""


class Hung(BaseException):
    """Raised in code that blocks the event loop; no Exception, so that `except Exception` does not make a score of it."""


@dataclass
class _Call:
    """A call that may take so long."""

    limit: float
    hung: bool = False


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)
"""The call that the running code belongs to, also in tasks that it starts."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, where calls by `call` are bounded also when they block.

    Outside of the main thread, where Python hears no signals, only what awaits is bounded.
    """
    before = signal.getsignal(signal.SIGALRM)
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            return runner.run(main)
    finally:
        if _in_main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


async def call(function: Callable[[], Any], end: float, limit: float) -> Any:
    """What `function`, plain or a coroutine's, gives, or the exception that it raises.

    `limit` seconds end at `end` of the loop's clock; what takes longer gives TimeoutError. Only being cancelled is raised.
    """
    mine = _Call(limit)
    before = _CALL.set(mine)
    task = asyncio.create_task(_outcome(function))
    _CALL.reset(before)
    result: Any = TimeoutError(f"not done within {limit:g} s")
    try:
        async with asyncio.timeout_at(end):
            result = await task
    except (TimeoutError, Hung):
        pass
    except asyncio.CancelledError as error:
        me = asyncio.current_task()
        if me is not None and me.cancelling():
            raise  # this call is cancelled, and not only something that the function did
        result = error
    return TimeoutError(f"not done within {limit:g} s, which it blocked") if mine.hung else result


async def _outcome(function: Callable[[], Any]) -> Any:
    try:
        result = function()
        return await result if inspect.isawaitable(result) else result
    except (Exception, SystemExit, Hung) as error:
        return error


# -- the event loop


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that rings where a step of a call takes longer than the call may, and whose threads nobody waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0.0
        self._began = 0.0
        self._rings = _in_main_thread()
        self.set_task_factory(_task)
        self.set_default_executor(_Daemons())

    def time(self) -> float:
        """Seconds, without those in which a call hung."""
        return super().time() - self.lost

    @contextmanager
    def ringing(self) -> Iterator[None]:
        """Ring where the code in this context takes longer than its call may."""
        mine = _CALL.get()
        if mine is None or not self._rings:
            yield
            return
        self._began = time.monotonic()
        signal.signal(signal.SIGALRM, self._ring)  # each time, for libraries set handlers of their own
        signal.setitimer(signal.ITIMER_REAL, max(mine.limit, 0.001), _AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, *_signal: Any) -> None:
        mine = _CALL.get()
        if mine is not None:
            mine.hung = True
            now = time.monotonic()
            self.lost, self._began = self.lost + now - self._began, now
            raise Hung


def _task(loop: Any, coroutine: Any, **rest: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_bounded(loop, coroutine), loop=loop, **rest)


async def _bounded(loop: _Loop, coroutine: Any) -> Any:
    return await _steps(loop, coroutine)


@types.coroutine
def _steps(loop: _Loop, coroutine: Any) -> Generator[Any, Any, Any]:
    """Run a coroutine step by step, each bounded."""
    step, value = coroutine.send, None
    while True:
        try:
            with loop.ringing():
                waits_for = step(value)
        except StopIteration as done:
            return done.value
        try:
            step, value = coroutine.send, (yield waits_for)
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:
            step, value = coroutine.throw, error


# -- threads


class _Daemons(ThreadPoolExecutor):
    """For `asyncio.to_thread`: a thread a call, which neither the loop nor the process waits for at its end."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """Start a call."""
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **named))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for nothing."""


@contextmanager
def threads_left_behind() -> Iterator[None]:
    """End the process at the end of this context where a thread hangs that began in it; a command's last act.

    Python waits for threads at its end, so one that a scoring function started and that hangs would keep it for ever.
    """
    before = set(threading.enumerate())
    try:
        yield
    except (RolltapeError, OSError) as error:
        if _hang(before):
            say_error(error)
            _end_process(2)
        raise
    except Exit as done:
        if _hang(before):
            _end_process(done.exit_code)
        raise


def _hang(before: Container[threading.Thread]) -> bool:
    """Whether threads that are not in `before` go on for more than a second. Those of idle pools do not count."""
    began = [t for t in threading.enumerate() if t not in before and not t.daemon]
    until = time.monotonic() + 1.0
    for thread in began:
        thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in began)


def _end_process(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
