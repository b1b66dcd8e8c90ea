"""Measure live recording: what it costs an episode, how long it holds the event loop, and a thousand episodes at once.

    python tests/benchmarks/live.py [--json] [--only recording_cpu loop_stall concurrency] [--callbacks]

Real Verifiers episodes through real Renderers on the demo engine, which runs in a process of its own; the harness is the one
inside the process. Sides that are compared take turns, and the median of the ratios counts.

recording_cpu          CPU per episode of a training step (one short turn an episode, the worst case), over that of the same
                       step whose rows are converted and then dropped: what journal, Parquet file and commit cost
recording_cpu_total    CPU per episode of an evaluation, over that of one that encodes nothing either
episodes_per_second    of the recorded side of recording_cpu
loop_stall_ms          longest time that the event loop is held while 16 traces of 8,000 tokens are recorded at once; the
                       median of the repeats. Time in which the operating system gave the thread no core is left out, and
                       told by `..._wall`
concurrency_1000       a thousand episodes of 8 turns and 8,000 tokens at once: memory, speed, and how long the loop was held
                       while they ran, and while their step was closed (converted, written, committed)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollouts import Shape, make_records

TASKSET = """
import verifiers.v1 as vf
from rolltape.record.inprocess import InProcessHarness

class Config(vf.TasksetConfig):
    turns: int = 1
    tasks: int = 64

class Asked(vf.Task):
    @vf.reward
    async def there(self, trace) -> float:
        return 1.0

class Asks(vf.Taskset[Asked, Config]):
    def load(self):
        return [
            Asked(vf.TaskData(idx=i, prompt=f"Question {i}, {self.config.turns} turns."), self.config.task)
            for i in range(self.config.tasks)
        ]

class Talks(InProcessHarness):
    async def user(self, task, messages):
        turns = int(task.prompt.split()[-2])
        return [{"role": "user", "content": "And then?"}] if len(messages) < 2 * turns else None

__all__ = ["Asks", "Talks"]
"""

ENVIRONMENT = '[taskset]\nid = "benchmark_tasks"\nturns = {turns}\ntasks = {tasks}\n'


class Tells:
    """What the engine says: about as many tokens as asked for in BENCHMARK_TOKENS, with each reply."""

    def __init__(self) -> None:
        tokens = int(os.environ.get("BENCHMARK_TOKENS", "64"))
        words = [chr(97 + i % 26) * (1 + i % 7) for i in range(tokens)]
        self.reply = " ".join(words)[:tokens]

    def candidates(self, prompt_text: str) -> list[tuple[float, str]]:  # noqa: ARG002
        return [(1.0, self.reply)]


def serve() -> None:
    """The engine, until standard input ends."""
    from rolltape.record.engine import DemoEngine

    engine = DemoEngine(policy=Tells(), epsilon=1e-9)
    with engine.serve_in_thread():
        print(engine.url, flush=True)
        sys.stdin.read()


@dataclass
class Watch:
    """How long the event loop was away while steps ran, and which of its callbacks held it."""

    on: bool = False
    longest: float = 0.0
    """Seconds, less those in which the operating system gave the thread no core."""
    longest_wall: float = 0.0
    over_50_ms: int = 0
    running: float = 0.0
    """`longest` until the last episode had ended."""
    callbacks: list[tuple[float, float, str]] = field(default_factory=list)
    """(wall seconds, CPU seconds of the loop's thread, what) of those above 20 ms."""

    @contextmanager
    def watching(self, *, callbacks: bool = False) -> Iterator[None]:
        """Watch the running loop."""
        task = asyncio.get_running_loop().create_task(self._ticks())
        real = asyncio.events.Handle._run
        if callbacks:
            asyncio.events.Handle._run = self._timed(real)  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.events.Handle._run = real  # type: ignore[method-assign]
            task.cancel()

    def all_ended(self) -> None:
        """No episode runs any more."""
        self.running, self.longest = self.longest, 0.0

    async def _ticks(self) -> None:
        last, waited = time.perf_counter(), _waited()
        while True:
            await asyncio.sleep(0.002)
            now, then = time.perf_counter(), waited
            waited = _waited()
            if self.on:
                away = now - last - 0.002
                self.longest_wall = max(self.longest_wall, away)
                self.longest = max(self.longest, away - (waited - then))
                self.over_50_ms += away - (waited - then) > 0.05
            last = now

    def _timed(self, run: Any) -> Any:
        def timed(handle: Any) -> None:
            wall, cpu, waited = time.perf_counter(), time.thread_time(), _waited()
            run(handle)
            wall, cpu = time.perf_counter() - wall - (_waited() - waited), time.thread_time() - cpu
            if wall > 0.02 and self.on:
                self.callbacks.append((wall, cpu, _name(handle)))

        return timed


def _waited() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def _name(handle: Any) -> str:
    task = getattr(handle._callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    frames: list[str] = []
    while hasattr(coroutine, "cr_frame") and len(frames) < 30:
        frames.append(f"{coroutine.__qualname__}:{coroutine.cr_frame.f_lineno if coroutine.cr_frame else '-'}")
        coroutine = coroutine.cr_await
    return " > ".join(frames[-4:]) or repr(handle._callback)[:120]


class Unrecorded:
    """In place of the recorder: nothing is recorded."""

    run_id, attempt, writer = "none", 0, "main"
    recovered = SimpleNamespace(anything=False, to_dict=dict)

    def __init__(self) -> None:
        from rolltape.record.recorder import RecorderStatus
        from rolltape.record.secrets import Secrets

        self.status, self.secrets = RecorderStatus(0, 0, 0, None), Secrets()

    @classmethod
    def open(cls, *_: Any, **__: Any) -> Unrecorded:
        return cls()

    def started(self, *_: Any, **__: Any) -> None: ...

    async def trace(self, *_: Any) -> bool:
        return True

    async def commit(self, *_: Any, outcomes: Any, record: Any, **__: Any) -> Any:
        return SimpleNamespace(step=record, commit=None, error=None, outcomes=list(outcomes))

    def close(self) -> Any:
        return self.status


class Clock:
    """A display that takes the time and the CPU time of the steps after the first."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.wall = self.cpu = 0.0
        self.rss = 0
        self._steps = 0

    def step_started(self, _split: str, _step: int, _number: int, _steps: int, rollouts: int) -> None:
        gc.collect()
        self._left = rollouts
        self.watch.on = True
        self._begin = time.perf_counter(), time.process_time()
        self.rss = self.rss or _resident()

    def step_ended(self, _: Any) -> None:
        if self._steps:
            self.wall += time.perf_counter() - self._begin[0]
            self.cpu += time.process_time() - self._begin[1]
        self._steps += 1
        self.watch.on = False

    def trace(self, _: Any) -> None:
        self._left -= 1
        if not self._left:
            self.watch.all_ended()

    def note(self, message: str) -> None:
        print(message, file=sys.stderr)

    def close(self) -> None: ...


def _resident() -> int:
    """Bytes in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def engine(tokens: int) -> Iterator[str]:
    """The address of a demo engine in a process of its own."""
    command = [sys.executable, __file__, "--serve"]
    environment = {**os.environ, "BENCHMARK_TOKENS": str(tokens)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()


async def episodes(
    url: str, *, turns: int, watch: Watch, recorded: bool = True, callbacks: bool = False, **options: Any
) -> Any:
    """Run steps of episodes; (summary, clock)."""
    from rolltape.record import live
    from rolltape.record.engine import write_tokenizer

    clock, recorder = Clock(watch), live.Recorder
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "benchmark_tasks.py").write_text(TASKSET)
        sys.path.insert(0, name)
        (folder / "env.toml").write_text(ENVIRONMENT.format(turns=turns, tasks=options.pop("tasks", 64)))
        given = {"config": folder / "env.toml", "run": folder / "run", "engine": url, "model": "demo"}
        given |= {
            "tokenizer": str(write_tokenizer(folder / "tokenizer")),
            "renderer": "qwen3",
            "enable_thinking": False,
        }
        try:
            live.Recorder = recorder if recorded else Unrecorded  # type: ignore[assignment, misc]
            with watch.watching(callbacks=callbacks):
                summary = await live.run_live(live.LiveOptions(**{**given, **options}), progress=clock)
        finally:
            live.Recorder = recorder  # type: ignore[misc]
            sys.path.remove(name)
            sys.modules.pop("benchmark_tasks", None)
    return summary, clock


@contextmanager
def in_memory() -> Iterator[None]:
    """Recorders write no Parquet file and no commit."""
    from rolltape.record import recorder

    def dropped(*_: Any, step: Any, **__: Any) -> Any:
        ended = {name: count for name, count in step.counts.items() if name not in ("started", "lost")}
        return SimpleNamespace(step=step, file=SimpleNamespace(rows=sum(ended.values())))

    real, recorder.write_part = recorder.write_part, dropped  # type: ignore[attr-defined]
    try:
        yield
    finally:
        recorder.write_part = real  # type: ignore[attr-defined]


def recording_cpu(repeats: int, steps: int, rollouts: int) -> dict[str, float]:
    """CPU per episode with recording, over that without."""
    options = {"rollouts": 4, "tasks": rollouts // 4, "steps": steps + 1, "concurrency": 32, "max_response": 256}
    train = {**options, "groups": rollouts // 4}
    seconds: dict[str, list[float]] = {}
    rates = []
    with engine(64) as url:

        def run(side: str, *, recorded: bool = True, **options: Any) -> None:
            summary, clock = asyncio.run(episodes(url, turns=1, watch=Watch(), recorded=recorded, **options))
            assert summary.exit_code == 0, (summary.counts, summary.reasons)
            seconds.setdefault(side, []).append(1e3 * clock.cpu / (steps * rollouts))
            if side == "recorded":
                rates.append(steps * rollouts / clock.wall)

        def without_files() -> None:
            with in_memory():
                run("in_memory", **train, journal=False)

        def in_turn(sides: Sequence[Callable[[], None]], turn: int) -> None:
            for side in sides if turn % 2 else reversed(sides):
                side()

        for turn in range(repeats):
            in_turn((lambda: run("recorded", **train), without_files), turn)
            in_turn(
                (
                    lambda: run("evaluated", **options, eval=True),
                    lambda: run("nothing", **options, eval=True, recorded=False),
                ),
                turn,
            )
    return {
        "recording_cpu": _ratio(seconds["recorded"], seconds["in_memory"]),
        "recording_cpu_total": _ratio(seconds["evaluated"], seconds["nothing"]),
        "episodes_per_second": statistics.median(rates),
        **{f"cpu_ms_{side}": statistics.median(found) for side, found in seconds.items()},
    }


def _ratio(these: list[float], those: list[float]) -> float:
    """The median of the ratios of two runs that followed each other: a machine's speed changes while many run."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def loop_stall(repeats: int, callbacks: bool) -> dict[str, Any]:
    """The longest that the event loop is held while 16 traces of 8,000 tokens are recorded at once."""
    from baselines import to_traces

    from rolltape.record.recorder import Recorder
    from rolltape.schema import Context, Outcome
    from rolltape.schema.records import Step

    shape = Shape(rollouts=16, turns=8, prompt=500, completion=600, observation=340)
    stalls: list[float] = []
    walls: list[float] = []
    held: list[tuple[float, float, str]] = []

    async def once(folder: str) -> None:
        recorder = Recorder.open(folder)
        traces = to_traces(make_records(shape, 1))
        await recorder.trace(traces[0], Context(group_index=0, rollout_index=0))
        watch = Watch()
        with watch.watching(callbacks=callbacks):
            await asyncio.sleep(0.05)
            watch.on = True
            await asyncio.gather(
                *(recorder.trace(t, Context(group_index=1, rollout_index=i)) for i, t in enumerate(traces))
            )
            await asyncio.sleep(0.05)
        stalls.append(watch.longest)
        walls.append(watch.longest_wall)
        held.extend(watch.callbacks)
        outcomes = [Outcome(trace_id=trace.id, disposition="leftover") for trace in traces]
        await recorder.commit("train", 0, groups=[], outcomes=outcomes, record=Step())
        recorder.close()

    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(once(folder))
    return {
        "loop_stall_ms": 1e3 * statistics.median(stalls),
        "loop_stall_ms_longest": 1e3 * max(stalls),
        "callbacks": held,
    }


def concurrency(episodes_: int, callbacks: bool) -> dict[str, Any]:
    """Episodes of 8 turns and about 8,000 tokens, all at once."""
    watch = Watch()
    with engine(1190) as url:
        options = {"rollouts": 8, "groups": episodes_ // 8, "concurrency": episodes_, "max_response": 2048, "steps": 1}
        summary, clock = asyncio.run(episodes(url, turns=8, watch=watch, callbacks=callbacks, **options))
    assert summary.counts["emitted"] == episodes_, (summary.counts, summary.reasons)
    (step,) = summary.steps
    return {
        "episodes": episodes_,
        "tokens": step.tokens,
        "errors": summary.counts["started"] - summary.counts["emitted"],
        "episodes_per_second": episodes_ / step.seconds,
        "rss_start_mb": clock.rss / 1e6,
        "rss_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "loop_stall_ms": 1e3 * watch.running,
        "loop_stall_ms_closing": 1e3 * watch.longest,
        "loop_stall_ms_wall": 1e3 * watch.longest_wall,
        "stalls_over_50_ms": watch.over_50_ms,
        "not_durable": summary.recording.not_durable,
        "callbacks": watch.callbacks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--only", nargs="+", choices=("recording_cpu", "loop_stall", "concurrency"), help="leave out the others"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=1000, help="how many at once")
    parser.add_argument("--callbacks", action="store_true", help="name callbacks of more than 20 ms on standard error")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    import logging

    logging.disable(logging.WARNING)
    only = args.only or ("recording_cpu", "loop_stall", "concurrency")
    found: dict[str, Any] = {"cores": os.cpu_count(), "threads": threading.active_count()}
    if "recording_cpu" in only:
        found |= recording_cpu(args.repeats, steps=3, rollouts=256)
    if "loop_stall" in only:
        found |= loop_stall(args.repeats, args.callbacks)
        _told(found.pop("callbacks"))
    if "concurrency" in only:
        found["concurrency_1000"] = concurrency(args.episodes, args.callbacks)
        _told(found["concurrency_1000"].pop("callbacks"))
    print(json.dumps(found, indent=2) if args.json else "\n".join(_lines(found)))


def _told(callbacks: list[tuple[float, float, str]]) -> None:
    for wall, cpu, name in sorted(callbacks, reverse=True)[:25]:
        print(f"{1e3 * wall:6.0f} ms, {1e3 * cpu:6.0f} ms CPU  {name}", file=sys.stderr)


def _lines(found: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name:24} {value:,.2f}" if isinstance(value, float) else f"{indent}{name:24} {value}"


if __name__ == "__main__":
    main()
