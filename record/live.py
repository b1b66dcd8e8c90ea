"""A live run without a trainer: steps of task groups on an engine, every trace recorded, Samples made as by a replay.

`run_live` refuses what cannot work before it starts an episode, keeps the environment serving across steps, and commits
each step when its groups have ended. A Ctrl-C cancels what runs and commits what has ended; a second one aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rolltape.record.client import DEFAULT_POOL, RendererSettings, RolloutClient
from rolltape.record.config import load_config, load_environment, load_tasks
from rolltape.record.episode import EpisodeRunner, GroupRun, StepPlace, Stop
from rolltape.record.inprocess.harness import close_client
from rolltape.record.options import LiveOptions
from rolltape.record.progress import Progress, Quiet, StepNews
from rolltape.record.recorder import Recorder, folder_of
from rolltape.record.sampling import Limits, SamplingDefaults
from rolltape.record.step import Counters, StepClosed, close_step
from rolltape.record.transport import RetryPolicy, SGLangTransport
from rolltape.record.versions import check_live
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput, RolltapeError

__all__ = ["LiveOptions", "LiveSummary", "run_live"]

logger = logging.getLogger(__name__)

FORK_ADVICE = (
    "{count} traces have more than one branch and cannot be trained on as they are: the renderer dropped earlier "
    "reasoning or re-tokenised a turn. Keep one branch with --thinking-retention all or --no-thinking, or train on "
    "each branch with --branch-policy siblings."
)


@dataclass
class LiveSummary:
    """What a run recorded and how it ended."""

    run: str
    run_id: str
    attempt: int
    steps: list[StepNews] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Tries started, Samples' traces emitted, and the others by what became of them."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why traces were dropped, and how often."""
    recording_failures: int = 0
    stopped: str | None = None
    """Why the run ended early: interrupted, unsupported, failing, recording or strict."""
    message: str | None = None
    """The sentence that goes with `stopped`."""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0: recorded as asked. 1: ended early, or nothing could be emitted, or a trace was not recorded.

        130: interrupted. Refusals before any episode are exceptions, and exit code 2.
        """
        if self.stopped == "interrupted":
            return 130
        evaluated = any(step.split == "eval" and step.traces for step in self.steps)
        nothing = not self.counts["emitted"] and not evaluated
        return int(bool(self.stopped or nothing or self.recording_failures))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run": self.run,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "steps": [asdict(step) for step in self.steps],
            "counts": dict(self.counts),
            "reasons": dict(self.reasons.most_common()),
            "recording_failures": self.recording_failures,
            "stopped": self.stopped,
            "message": self.message,
            "seconds": self.seconds,
            "exit_code": self.exit_code,
        }


async def run_live(options: LiveOptions, *, progress: Progress | None = None) -> LiveSummary:
    """Run and record the steps that `options` ask for.

    Raises RolltapeError, each a sentence, before any episode: BadInput, MissingExtra, UnsupportedVersion, RunConflict.
    What goes wrong afterwards is in the summary.
    """
    progress = progress or Quiet()
    versions = check_live()
    environment, tasks = await asyncio.to_thread(_loaded, options)
    transport = _transport(options)
    client = _client(transport, options)
    try:
        await client.warm()
        await _expect_engine(transport)
        first, counters, start = _continued(options, environment.config.env_id)
        recorder = Recorder.open(
            options.run,
            model=options.model,
            tokenizer=options.tokenizer or options.model,
            taskset=environment.config.env_id,
            settings=options.to_dict() | {"environment": environment.config.model_dump(mode="json", exclude_none=True)},
            versions=versions,
            resume=options.resume,
            start_step=start,
            strict=options.strict,
        )
        try:
            run = _Run(options, environment, tasks, client, recorder, progress, versions)
            run.first, run.counters = first, counters
            return await run.all_steps()
        finally:
            recorder.close()
    finally:
        progress.close()
        await client.close()
        await close_client()


def _loaded(options: LiveOptions) -> tuple[Any, list[Any]]:
    """The environment and its tasks in their order; importing a taskset can take seconds, so this runs in a thread."""
    environment = load_environment(load_config(options.config))
    tasks = load_tasks(environment, rollouts=options.rollouts)
    if options.shuffle:
        random.Random(options.seed).shuffle(tasks)
    return environment, tasks


class _Run:
    """The steps of one run, after everything has been checked."""

    def __init__(
        self,
        options: LiveOptions,
        environment: Any,
        tasks: Sequence[Any],
        client: RolloutClient,
        recorder: Recorder,
        progress: Progress,
        versions: dict[str, str],
    ) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.clients import ModelContext

        self.options, self.environment, self.tasks = options, environment, tasks
        self.recorder, self.progress = recorder, progress
        self.first = 0
        self.counters = Counters()
        self.stop = Stop()
        self.failed_in_a_row = 0
        self.summary = LiveSummary(str(options.run), recorder.run_id, recorder.attempt)
        sampling = vf.SamplingConfig.model_validate(options.sampling())
        self.runner = EpisodeRunner(
            environment=environment,
            context=ModelContext(model=options.model, client=client, sampling=sampling),
            transport=client.transport,
            recorder=recorder,
            options=options,
            progress=progress,
            stop=self.stop,
            semaphore=asyncio.Semaphore(options.concurrency),
            versions=versions,
            renderer=client.settings.to_dict(),
        )

    async def all_steps(self) -> LiveSummary:
        started = time.monotonic()
        with _interruptible(self.stop, self.progress), calm_collector() as collect:
            async with self._serving():
                for number in range(self.options.steps):
                    if self.stop.event.is_set():
                        break
                    await self._step(self._place(self.first + number), number)
                    collect()
        self.summary.stopped, self.summary.message = self.stop.reason, self.stop.message
        self.summary.recording_failures = self.runner.recording_failures
        self.summary.seconds = time.monotonic() - started
        return self.summary

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        try:
            async with self.environment.serving():
                yield
        except RolltapeError:
            raise
        except (OSError, RuntimeError) as error:
            if self.summary.steps:
                raise
            raise BadInput(f"The environment's servers could not be started: {error}") from error

    def _place(self, step: int) -> StepPlace:
        if not self.options.eval:
            return StepPlace("train", step)
        return StepPlace("eval", step, _eval_name(self.options, self.environment.config.env_id))

    async def _step(self, place: StepPlace, number: int) -> None:
        chosen = self._choose(place)
        self.progress.step_started(place.split, number + 1, self.options.steps, len(chosen) * self.options.rollouts)
        started_at = time.time()
        runs = await self._groups(chosen, place)
        try:
            closed = await close_step(
                self.recorder, place, runs, options=self.options, counters=self.counters, started_at=started_at
            )
        except (OSError, RolltapeError) as error:
            logger.exception("step %d could not be committed", place.step)
            self.stop.set("recording", f"Step {place.step} of {place.split} could not be committed: {error}")
            return
        self._tell(closed)

    def _choose(self, place: StepPlace) -> list[tuple[int, Any]]:
        """(group index, task) of a step: the next tasks, round and round; every task for an evaluation."""
        if place.split == "eval":
            tasks = list(self.tasks)
        else:
            first = self.counters.cursor
            tasks = [self.tasks[i % len(self.tasks)] for i in range(first, first + self.options.groups)]
            self.counters.cursor += self.options.groups
        index = self.counters.next_group_index
        self.counters.next_group_index += len(tasks)
        return list(enumerate(tasks, index))

    async def _groups(self, chosen: Sequence[tuple[int, Any]], place: StepPlace) -> list[GroupRun]:
        """Run groups until all have ended or the run is stopped; the groups in order, also those cut short."""
        seed, size = self.options.seed, self.options.rollouts
        runs = {
            asyncio.create_task(self.runner.run_group(task, run, place, seed + run.index * size)): run
            for task, run in ((task, GroupRun(index)) for index, task in chosen)
        }
        stopped = asyncio.create_task(self.stop.event.wait())
        pending = set(runs)
        try:
            while pending and not self.stop.event.is_set():
                done, _ = await asyncio.wait({*pending, stopped}, return_when=asyncio.FIRST_COMPLETED)
                for task in pending & done:
                    self._judge(task, runs[task])
                pending -= done
        finally:
            stopped.cancel()
            for task in pending:
                task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        return list(runs.values())

    def _judge(self, task: asyncio.Task[None], run: GroupRun) -> None:
        """Count groups that failed one after the other: an environment that always fails must not run for ever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            run.failure = f"{type(error).__name__}: {error}"
            logger.error("group %d could not be run", run.index, exc_info=error)
        self.failed_in_a_row = self.failed_in_a_row + 1 if run.failure else 0
        if self.failed_in_a_row >= self.options.max_failed_groups:
            self.stop.set(
                "failing", f"{self.failed_in_a_row} task groups failed one after the other; in the last, {run.failure}"
            )

    def _tell(self, closed: StepClosed) -> None:
        self.progress.step_ended(closed.news)
        self.summary.steps.append(closed.news)
        self.summary.counts.update(closed.news.counts)
        self.summary.reasons.update(closed.reasons)
        if closed.failed:
            self.stop.set("strict", closed.failed)
        if closed.forked:
            self.progress.note(FORK_ADVICE.format(count=closed.forked))


def _eval_name(options: LiveOptions, taskset: str) -> str:
    return options.eval_name or taskset


def _continued(options: LiveOptions, taskset: str) -> tuple[int, Counters, int]:
    """Where a run goes on: the number of its first step, the counters, and from where older attempts are superseded.

    The latter lies behind everything recorded, of whichever split: going on supersedes nothing.
    """
    if not options.resume:
        return 0, Counters(), 0
    run = open_run(options.run)
    split = folder_of("eval", _eval_name(options, taskset)) if options.eval else "train"
    recorded = {name: run.steps(name) for name in run.splits()}
    start = 1 + max((record.step for records in recorded.values() for record in records), default=-1)
    if not recorded.get(split):
        return 0, Counters(), start
    last = max(recorded[split], key=lambda record: record.step)
    counters = Counters(last.cursor or 0, last.next_group_index or 0, last.next_sample_index or 0)
    return last.step + 1, counters, start


def _transport(options: LiveOptions) -> SGLangTransport:
    return SGLangTransport(
        options.engine,
        limits=Limits(options.max_response, options.max_context, options.max_prompt),
        defaults=SamplingDefaults(options.stop, options.stop_token_ids),
        retry=RetryPolicy(attempts=options.request_attempts, seconds=options.retry_seconds),
        routing_key=options.routing_key,
        lora_path=options.lora,
        request_seconds=options.request_seconds,
        connections=max(options.concurrency * 2, 64),
    )


def _client(transport: SGLangTransport, options: LiveOptions) -> RolloutClient:
    return RolloutClient(
        transport,
        model=options.model,
        tokenizer=options.tokenizer,
        renderer=RendererSettings(options.renderer, options.enable_thinking, options.thinking_retention),
        pool_size=options.renderer_pool or DEFAULT_POOL,
    )


async def _expect_engine(transport: SGLangTransport) -> None:
    problem = await transport.healthy()
    if problem is not None:
        raise BadInput(
            f"No engine answers at {transport.engine_url} ({problem}); start one, or give its address with --engine."
        )


@contextlib.contextmanager
def calm_collector() -> Iterator[Callable[[], object]]:
    """Keep Python's garbage collector from walking all running traces, and hand out the collection for a step's end.

    A full collection visits every token of every running trace: 0.3 s for 1,000 traces of 8k tokens, with the event loop
    standing still, several times a step. Young objects are collected as before; a full collection is cheap after a step,
    when its traces are gone. What was there before is left out of collections meanwhile.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1_000_000)
    try:
        yield gc.collect
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def _interruptible(stop: Stop, progress: Progress) -> Iterator[None]:
    """Let the first Ctrl-C (or SIGTERM) stop the run in order, and a second one end the process as usual."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupt() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        progress.note("Stopping: running episodes are cancelled, what has ended is kept. Ctrl-C again aborts.")
        stop.set("interrupted", "The run was interrupted; what had ended was recorded.")

    installed = False
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or no signals
        for number in signals:
            loop.add_signal_handler(number, interrupt)
        installed = True
    try:
        yield
    finally:
        if installed:
            for number in signals:
                loop.remove_signal_handler(number)
