"""Who does the work of an import: this process, alone or with others.

Others read, take apart and put into files of their own whole blocks of lines; what comes back is a few bytes about each trace.
This process does the same, from the first moment: others take half a second to start. Steps are written in threads, at least
two at a time, as Parquet needs Python for little.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from rolltape.replay.imports.lines import Taken, Taker
from rolltape.replay.imports.sources import Block, Source
from rolltape.replay.imports.steps import Plan, write_step
from rolltape.schema.commits import Commit
from rolltape.schema.errors import RolltapeError

T = TypeVar("T")
R = TypeVar("R")

_WRITERS = 2

PAYS_BYTES = 256 << 20
"""Length of files from which further processes pay: this one reads half of it while they start."""
MOST_JOBS = 8
"""Processes that are taken unasked; each takes 0.15 GB of memory."""


def jobs_for(sources: Iterable[Source]) -> int:
    """The processes to read files with where nobody says: one a core for large files."""
    if sum(source.bytes or 0 for source in sources) < PAYS_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS)


class BrokenImport(RolltapeError, RuntimeError):
    """A process of an import was killed."""


class Workers:
    """This process, and `jobs` - 1 others. Results come in the order of what they are made of."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.pools: list[Executor] = []

    def take(self, taker: Taker, blocks: Iterable[Block]) -> Iterator[Taken]:
        """Take blocks."""
        if self.jobs == 1:
            yield from map(taker.take, blocks)
            if (rest := taker.rest()) is not None:
                yield rest
            return
        # a fork of this process would copy locks that threads of Arrow's hold
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        taker.flush_bytes = 0  # the rows of a process are nobody else's
        pool = ProcessPoolExecutor(self.jobs - 1, context, _begin, (taker,))
        self.pools.append(pool)
        yield from _shared(lambda block: pool.submit(_take, block.kept()), 2 * self.jobs - 2, taker.take, blocks)

    def write(self, plans: Iterable[Plan]) -> Iterator[Commit]:
        """Write steps, in threads: Parquet does not need Python."""
        threads = max(self.jobs, _WRITERS) - 1
        pool = ThreadPoolExecutor(threads)
        self.pools.append(pool)
        return _shared(lambda plan: pool.submit(write_step, plan), threads, write_step, plans)


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
        for pool in work.pools:
            pool.shutdown(cancel_futures=True)


def _shared(
    submit: Callable[[T], Future[R]], ahead: int, function: Callable[[T], R], items: Iterable[T]
) -> Iterator[R]:
    """The results of `function` for `items`: others have `ahead` of them at a time, and this thread does the next one itself.

    So it is at work while the others are still starting, and never waits as long as there is something to do.
    """
    waiting: deque[Future[R]] = deque()
    for item in items:
        if sum(not result.done() for result in waiting) < ahead:
            waiting.append(submit(item))
        else:
            waiting.append(Future())
            waiting[-1].set_result(function(item))
        while waiting and waiting[0].done():
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


# -- in a process of the pool

_taker: Taker | None = None


def _begin(taker: Taker) -> None:
    """What a process does first. An interrupt is the parent's to handle."""
    global _taker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _taker = taker


def _end_with_parent() -> None:
    """End where the parent was killed: what it would have asked for next is waited for without end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _take(block: Block) -> Taken:
    assert _taker is not None
    return _taker.take(block)
