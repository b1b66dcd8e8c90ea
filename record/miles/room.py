"""What outlives a step: the serving environment, and the recorders of this process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rolltape.record.inprocess.harness import InProcessHarness
from rolltape.record.miles.options import MilesOptions
from rolltape.record.recorder import Recorder
from rolltape.record.secrets import Secrets
from rolltape.record.step import Counters
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput
from rolltape.schema.paths import RunPaths
from rolltape.schema.storage import AnyPath, place

logger = logging.getLogger(__name__)

SERVER_BYTES = 170 << 20
"""Memory of a tool or user server, or of a harness's program, as measured."""
TOKEN_BYTES = 150
"""Memory of a token in a running trace, as measured."""


class Serving:
    """Keeps an environment's servers up between calls, on the event loop of the last one."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._keeper: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def ready(self) -> None:
        """Start serving, unless it is. Raises BadInput where a server cannot be started."""
        loop = asyncio.get_running_loop()
        if self._keeper is not None and not self._keeper.done() and self._keeper.get_loop() is loop:
            return
        self._end = asyncio.Event()
        started: asyncio.Future[None] = loop.create_future()
        self._keeper = loop.create_task(self._keep(self._end, started))
        try:
            await started
        except (OSError, RuntimeError) as error:
            raise BadInput(f"The environment's servers could not be started: {error}") from error

    async def _keep(self, end: asyncio.Event, started: asyncio.Future[None]) -> None:
        """Hold the servers in one task, for they must be closed by the task that opened them."""
        try:
            async with self._environment.serving():
                started.set_result(None)
                await end.wait()
        except Exception as error:
            if started.done():
                logger.exception("the environment's servers failed")
            else:
                started.set_exception(error)

    async def close(self) -> None:
        """Stop serving."""
        self._end.set()
        if self._keeper is not None and self._keeper.get_loop() is asyncio.get_running_loop():
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._keeper = None


def at_exit(loop: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have `close` run on `loop` when the process ends, if the loop still runs then."""

    def ending() -> None:
        if loop.is_running():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(close(), loop).result(10)

    atexit.register(ending)


_lock = threading.Lock()
_recorders: dict[AnyPath, Recorder] = {}
_ended: dict[AnyPath, dict[tuple[str, str | None], int]] = {}


def recorder_for(
    options: MilesOptions, taskset: str, split: str, step: int, eval_name: str | None, versions: dict[str, str]
) -> Recorder:
    """The recorder to record a step with: this process's one for the run, or that of a new attempt.

    A step at or before the last one that this attempt recorded in its split is recorded again: that begins an attempt,
    which supersedes what older ones recorded from there on. Blocks while a run is opened.
    """
    folder, kind = place(options.run).resolve(), (split, eval_name)
    with _lock:
        recorder = _recorders.get(folder)
        if recorder is not None and step <= _ended[folder].get(kind, -1):
            recorder.close()
            recorder = None
        if recorder is None:
            recorder = _opened(options, taskset, step, versions)
            _recorders[folder], _ended[folder] = recorder, {}
        _ended[folder][kind] = step
        return recorder


def _opened(options: MilesOptions, taskset: str, step: int, versions: dict[str, str]) -> Recorder:
    args = options.args
    return Recorder.open(
        options.run,
        model=args.hf_checkpoint,
        tokenizer=getattr(args, "sglang_tokenizer_path", None) or args.hf_checkpoint,
        taskset=taskset,
        settings=options.to_dict(),
        versions=versions,
        resume=RunPaths(place(options.run)).run.exists(),
        start_step=step,
        store=options.store,
        writer=options.own.get("writer", "main"),
        secrets=Secrets(tuple(options.own.get("mask", ()))),
        strict=bool(options.own.get("strict", False)),
        state=options.own.get("state"),
    )


def repeated_eval(options: MilesOptions, name: str, step: int) -> str:
    """The name under which an evaluation is recorded: Miles evaluates one rollout id twice, before and after training."""
    with _lock:
        done = _ended.get(place(options.run).resolve(), {})
        if done.get(("eval", name)) == step and done.get(("eval", f"{name}-again"), -1) < step:
            return f"{name}-again"
    return name


def close_recorders() -> None:
    """End the recorders of this process; what is queued is written first."""
    with _lock:
        for recorder in _recorders.values():
            recorder.close()
        _recorders.clear()
        _ended.clear()


atexit.register(close_recorders)


def counters_before(options: MilesOptions, step: int) -> Counters:
    """Where the taskset and the numbers stand before a training step: as recorded after the one before it.

    Where that one was not recorded, as if every step had taken one batch.
    """
    if RunPaths(place(options.run)).run.exists():
        run = open_run(options.run)
        records = [record for record in run.steps("train") if record.step == step - 1]
        if records and all(record.cursor is not None for record in records):
            return Counters(
                max(record.cursor or 0 for record in records),
                max(record.next_group_index or 0 for record in records),
                max(record.next_sample_index or 0 for record in records),
            )
        if step:
            logger.warning("step %d is not in %s; the taskset goes on at step × batch size", step - 1, options.run)
    groups = step * options.args.rollout_batch_size
    return Counters(groups, groups, groups * options.args.n_samples_per_prompt)


def tell_memory(options: MilesOptions, environment: Any) -> int:
    """Log what the episodes that run at once may take, in bytes, and warn where that is more than there is."""
    rollouts = options.rollouts(evaluation=False)
    tokens = rollouts.max_context or 4 * (rollouts.max_response or 0)
    traces = rollouts.concurrency * tokens * TOKEN_BYTES
    inside = isinstance(environment.harness, InProcessHarness)
    servers = 0 if inside else rollouts.concurrency * SERVER_BYTES
    logger.info(
        "%d episodes at once, %d engine requests at once: up to %.1f GB of traces and %.1f GB of programs and servers",
        rollouts.concurrency,
        options.capacity,
        traces / 1e9,
        servers / 1e9,
    )
    there = _available()
    if there is not None and traces + servers > there:
        logger.warning(
            "that is more than the %.1f GB that are free; lower `concurrency` in ROLLTAPE_CONFIG, which does not lower "
            "what the engines are given at once",
            there / 1e9,
        )
    return traces + servers


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
