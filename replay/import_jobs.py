"""Who does the work of an import: this process alone, or several, which take whole blocks and whole steps.

Alone, blocks are taken one by one, as Python runs one thread at a time; steps are written two at a time, as Parquet does not
need Python.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from rolltape.replay.import_lines import Taken, Taker
from rolltape.replay.import_sources import Block
from rolltape.replay.import_steps import Plan, write_step
from rolltape.schema.commits import Commit
from rolltape.schema.errors import RolltapeError

T = TypeVar("T")
R = TypeVar("R")

_WRITERS = 2
_PRELOADED = ["rolltape.replay.import_lines", "rolltape.replay.import_steps"]


class BrokenImport(RolltapeError, RuntimeError):
    """A process of an import was killed."""


class Workers:
    """One process, or `jobs`. Results come in the order of what they are made of."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.pool: Executor | None = None

    def take(self, taker: Taker, blocks: Iterable[Block]) -> Iterator[Taken]:
        """Take blocks, a few ahead where there are several processes."""
        if self.jobs == 1:
            yield from map(taker.take, blocks)
            if (rest := taker.rest()) is not None:
                yield rest
            return
        # a fork of this process would copy locks that threads of Arrow's hold
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        taker.flush_bytes = 0  # the rows of a process are nobody else's
        self.pool = ProcessPoolExecutor(self.jobs, context, _begin, (taker,))
        yield from _ahead(self.pool, self.jobs, _take, blocks)

    def write(self, plans: Iterable[Plan]) -> Iterator[Commit]:
        """Write steps."""
        self.pool = self.pool or ThreadPoolExecutor(_WRITERS)
        return _ahead(self.pool, max(self.jobs, _WRITERS), write_step, plans)


@contextmanager
def workers(jobs: int) -> Iterator[Workers]:
    """Workers, which are gone when the block ends. Raises BrokenImport where one of them was killed."""
    work = Workers(jobs)
    try:
        yield work
    except BrokenProcessPool as error:
        raise BrokenImport(
            "one of the import's processes ended before its work did, and nothing was imported: for want of memory, so try "
            "fewer; or the script that started it lacks `if __name__ == '__main__':`."
        ) from error
    finally:
        if work.pool is not None:
            work.pool.shutdown(cancel_futures=True)


def _ahead(pool: Executor, ahead: int, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


# -- in a process of the pool

_taker: Taker | None = None


def _begin(taker: Taker) -> None:
    """What a process does first. An interrupt is the parent's to handle."""
    global _taker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _taker = taker


def _take(block: Block) -> Taken:
    assert _taker is not None
    return _taker.take(block)
