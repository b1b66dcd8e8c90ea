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
import shlex
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import dropwhile
from typing import Any

from rolltape.record.client import DEFAULT_POOL, NAME_A_RENDERER, RendererSettings, RolloutClient, model_name
from rolltape.record.config import load_config, load_environment, load_tasks, offered_tools
from rolltape.record.episode import EpisodeRunner, GroupRun, StepPlace, Stop
from rolltape.record.inprocess.harness import close_client
from rolltape.record.options import LiveOptions
from rolltape.record.progress import Progress, Quiet, StepNews
from rolltape.record.recorder import Recorder, RecorderStatus, folder_of
from rolltape.record.sampling import Limits, SamplingDefaults
from rolltape.record.secrets import Secrets
from rolltape.record.step import StepClosed, close_step
from rolltape.record.transport import RetryPolicy, SGLangTransport
from rolltape.record.versions import check_live
from rolltape.record.writing.recover import Recovered
from rolltape.record.writing.resume import Counters, continued
from rolltape.replay.printing.console import err
from rolltape.replay.printing.words import counted
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput, RolltapeError

__all__ = ["LiveOptions", "LiveSummary", "run_live"]

logger = logging.getLogger(__name__)

SIGNALS = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM}
"""What ends a run from outside, in order."""

AGAIN = {"interrupted": "Ctrl-C again", "terminated": "Another SIGTERM"}
"""What then ends it at once."""

FORK_ADVICE = (
    "{count} with more than one branch, not to be trained on as they are: the renderer dropped earlier "
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
    unversioned: int = 0
    """Turns, where the engine named a weight version with none of them; else 0."""
    recording: RecorderStatus | None = None
    """How recording stood when the run had ended."""
    recovered: Recovered | None = None
    """What an earlier recording had left and was settled before this one."""
    stopped: str | None = None
    """Why the run ended early: interrupted, terminated, unsupported, failing, recording or strict."""
    message: str | None = None
    """The sentence that goes with `stopped`."""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0: recorded as asked. 1: ended early, or nothing could be emitted, or a trace was not recorded.

        130: interrupted; 143: terminated. Refusals before any episode are exceptions, and exit code 2.
        """
        if self.stopped in SIGNALS:
            return 128 + SIGNALS[self.stopped]
        evaluated = any(step.split == "eval" and step.traces for step in self.steps)
        nothing = not self.counts["emitted"] and not evaluated
        return int(bool(self.stopped or nothing or self.recording_failures or self.unwritten))

    @property
    def untaught(self) -> str | None:
        """How many groups had equal rewards, and so taught nothing, where these are all or most; else None."""
        steps = [step for step in self.steps if step.split == "train"]
        flat, comparable = sum(step.flat for step in steps), sum(step.comparable for step in steps)
        if 2 * flat <= comparable:
            return None
        groups = counted(comparable, "group")
        their, teach = ("its", "teaches") if flat == 1 else ("their", "teach")
        return f"{flat} of {groups} had equal rewards in all {their} rollouts, and so {teach} nothing."

    @property
    def unwritten(self) -> str | None:
        """What was not written and what can be done; None where everything is on disk."""
        status = self.recording
        if status is None or not (status.lost or status.pending_steps):
            return None
        told = [f"lost {counted(status.lost, 'trace')}"] if status.lost else []
        told += [f"{counted(status.pending_steps, 'step')} not on disk"] if status.pending_steps else []
        counts = " and ".join(told)
        why = f" ({status.error})" if status.error else ""
        return f"{counts}{why}; `rolltape recover {self.run}` commits what the journal still holds."

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
            "unversioned": self.unversioned,
            "recording": None if self.recording is None else asdict(self.recording),
            "recovered": None if self.recovered is None else self.recovered.to_dict(),
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
        if (renderer := client.toolless) and (offer := await asyncio.to_thread(offered_tools, environment, tasks)):
            raise BadInput(f"{options.config}: {offer}, and {renderer} cannot render tools. {NAME_A_RENDERER}")
        await _expect_engine(transport)
        if (told := _other_model(options.model, await transport.models())) is not None:
            progress.note(told)
        recorder = await asyncio.to_thread(_recorder, options, environment, versions)
        stop = Stop()
        with _interruptible(stop, progress, str(options.run)):
            try:
                if recorder.recovered.anything:
                    progress.note(_told(recorder.recovered))
                run = _Run(options, environment, tasks, client, recorder, progress, versions, stop)
                if options.resume and not run.first:
                    progress.note(f"{options.run} holds no step to go on after; this begins at step 0.")
                await run.all_steps()
            finally:
                status = await asyncio.to_thread(recorder.close)
        run.summary.recording = status
        return run.summary
    finally:
        with _uninterrupted():
            progress.close()
            await client.close()
            await close_client()


def _loaded(options: LiveOptions) -> tuple[Any, list[Any]]:
    """The environment and its tasks in their order; importing a taskset can take seconds, so this runs in a thread."""
    environment = load_environment(load_config(options.config), options.config)
    tasks = load_tasks(environment, rollouts=options.rollouts)
    if options.shuffle:
        random.Random(options.seed).shuffle(tasks)
    return environment, tasks


def _told(recovered: Recovered) -> str:
    """What was settled, in one line."""
    traces, lost = (sum(part[name] for part in recovered.committed) for name in ("traces", "lost"))
    told = f"An earlier recording had not ended well: {traces} journaled traces are committed now"
    told += f", {lost} are lost" if lost else ""
    told += f"; not readable: {', '.join(recovered.faults)}" if recovered.faults else ""
    told += f"; moved aside: {', '.join(recovered.discarded)}" if recovered.discarded else ""
    return told + "."


def _recorder(options: LiveOptions, environment: Any, versions: dict[str, str]) -> Recorder:
    """Open the run for writing. What the configuration holds of secrets is masked in whatever is recorded."""
    config = environment.config.model_dump(mode="json", exclude_none=True)
    return Recorder.open(
        options.run,
        model=options.model,
        tokenizer=options.tokenizer or options.model,
        taskset=environment.config.env_id,
        settings=options.to_dict() | {"environment": config},
        versions=versions,
        resume=options.resume,
        start_step=None,
        writer=options.writer,
        store=options.store(),
        secrets=Secrets(options.mask).knowing(environment.config, options.engine),
        strict=options.strict,
        state=options.state,
    )


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
        stop: Stop,
    ) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.clients import ModelContext

        self.options, self.environment, self.tasks = options, environment, tasks
        self.recorder, self.progress = recorder, progress
        self.first, self.counters = self._begin()
        self.stop = stop
        self.failed_in_a_row = 0
        self.summary = LiveSummary(str(options.run), recorder.run_id, recorder.attempt, recovered=recorder.recovered)
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

    def _begin(self) -> tuple[int, Counters]:
        """The first step and the counters; of a run that is resumed, those after what was recorded."""
        if not self.options.resume:
            return 0, Counters.of_writer(self.recorder.writer)
        place = self._place(0)
        return continued(open_run(self.options.run), folder_of(place.split, place.eval_name), self.recorder.writer)

    async def all_steps(self) -> None:
        started = time.monotonic()
        with cancelled_unsaid(), calm_collector() as collect:
            async with self._serving():
                for number in range(self.options.steps):
                    if self.stop.event.is_set():
                        break
                    await self._step(self._place(self.first + number), number)
                    collect()
        self.summary.stopped = self.stop.reason
        self.summary.message = self.stop.message and self.recorder.secrets.text(self.stop.message)
        self.summary.recording_failures = self.runner.recording_failures
        self.summary.unversioned = 0 if self.runner.turns[True] else self.runner.turns[False]
        self.summary.seconds = time.monotonic() - started

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
        return StepPlace("eval", step, self.options.eval_name or self.environment.config.env_id)

    async def _step(self, place: StepPlace, number: int) -> None:
        chosen = self._choose(place)
        rollouts = len(chosen) * self.options.rollouts
        self.progress.step_started(place.split, place.step, number + 1, self.options.steps, rollouts)
        started_at = time.time()
        runs = await self._groups(chosen, place)
        if place.split == "train" and self.stop.event.is_set():
            self.counters.cursor -= self._left_over(runs)
        try:
            closed = await close_step(
                self.recorder, place, runs, options=self.options, counters=self.counters, started_at=started_at
            )
        except (OSError, RolltapeError) as error:
            logger.warning("step %d could not be committed", place.step, exc_info=True)
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

    def _left_over(self, runs: Sequence[GroupRun]) -> int:
        """Tasks that a resumed run is to take again: from the first whose group has not ended, or failed as all after it."""
        failing = self.failed_in_a_row if self.stop.reason == "failing" else 0
        left = list(dropwhile(lambda run: bool(run.scored if not run.failure else not failing), runs))
        before = failing - sum(run.failure is not None for run in runs) if len(left) == len(runs) else 0
        return len(left) + max(0, before)

    async def _groups(self, chosen: Sequence[tuple[int, Any]], place: StepPlace) -> list[GroupRun]:
        """Run groups until all have ended or the run is stopped; the groups in order, also those cut short."""
        seed, size = self.options.seed, self.options.rollouts
        runs: dict[asyncio.Task[None], GroupRun] = {}
        stopped = asyncio.create_task(self.stop.event.wait())
        try:
            for index, task in chosen:
                run = GroupRun(index)
                runs[asyncio.create_task(self.runner.run_group(task, run, place, seed + index * size))] = run
                await asyncio.sleep(
                    0
                )  # a thousand rollouts begun in one turn of the event loop would hold it for 0.2 s
            pending = set(runs)
            while pending and not self.stop.event.is_set():
                done, _ = await asyncio.wait({*pending, stopped}, return_when=asyncio.FIRST_COMPLETED)
                for ended in pending & done:
                    self._judge(ended, runs[ended])
                pending -= done
        finally:
            stopped.cancel()
            for running in runs:
                running.cancel()
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
            self.progress.note(FORK_ADVICE.format(count=counted(closed.forked, "trace")))


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
            f"No engine answers at {Secrets().text(transport.engine_url)} ({problem}); start one, or give its address "
            "with --engine."
        )


def _other_model(model: str, served: Sequence[str]) -> str | None:
    """What to say where the engine serves a model of another name than is recorded; where it lies does not matter."""
    if not served or model_name(model).lower() in {model_name(name).lower() for name in served}:
        return None
    return f"The engine serves {served[0]}, but --model says {model}, and that is what is recorded."


@contextlib.contextmanager
def calm_collector() -> Iterator[Callable[[], object]]:
    """Keep Python's garbage collector from walking all running traces, and hand out the collection for a step's end.

    A full collection visits every token of every running trace: 0.3 s for 1,000 traces of 8k tokens, with the event loop
    standing still, several times a step. A full one is cheap after a step, when its traces are gone. Young objects are
    collected a hundred at a time: each may be a prompt of many thousand tokens, and when 1,000 episodes grow together a
    pass over the usual 700 takes 0.1 s, over 200 still 50 ms. What was there before is left out of collections meanwhile.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100, 1, 1_000_000)
    try:
        yield gc.collect
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def _interruptible(stop: Stop, progress: Progress, run: str) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM stop the run in order, and a second one end the process."""
    loop = asyncio.get_running_loop()
    handled: list[int] = []

    def interrupt(reason: str) -> None:
        for each in handled:
            loop.remove_signal_handler(each)
            signal.signal(each, lambda number, _frame: _abort(number, progress, run))
        progress.note(f"Stopping: running episodes are cancelled, what has ended is kept. {AGAIN[reason]} aborts.")
        stop.set(reason, f"The run was {reason}; what had ended was recorded.")

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or no signals
        for reason, number in SIGNALS.items():
            loop.add_signal_handler(number, interrupt, reason)
            handled.append(number)
    try:
        yield
    finally:
        for each in handled:
            loop.remove_signal_handler(each)
        if handled:
            _as_in_any_program()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let no Ctrl-C or SIGTERM cut short what takes a moment and comes after everything else."""
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for each in SIGNALS.values():
            before[each] = signal.signal(each, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _abort(number: int, progress: Progress, run: str) -> None:
    """End the process as the signal does, and say how to keep what had ended."""
    _as_in_any_program()
    with contextlib.suppress(Exception):  # whatever stands in the way, the process ends
        progress.close()
        told = f"Aborted in the run {run}; `rolltape recover {shlex.quote(run)}` commits what had ended."
        err.print(told, markup=False, highlight=False, soft_wrap=True)
    signal.raise_signal(number)


def _as_in_any_program() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def cancelled_unsaid() -> Iterator[None]:
    """Keep the event loop from logging cancellations and interrupts that nobody waits for as errors.

    Verifiers scores in `wait_for(gather(…))`, of which Python 3.11 never looks at the result when the rollout is cancelled.
    A second Ctrl-C is raised in whichever task runs. What ends by an exception leaves such tasks behind: this then stays.
    """
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), (asyncio.CancelledError, KeyboardInterrupt)):
            return
        if before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    loop.set_exception_handler(handle)
    yield
    loop.set_exception_handler(before)
