"""What a person sees of a live run: bars on a terminal, lines elsewhere, nothing for a program that only reads JSON."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from rolltape.replay.printing.console import SafeConsole

if TYPE_CHECKING:
    from rolltape.record.recorder import RecorderStatus
from rolltape.replay.printing.words import counted


@dataclass(frozen=True)
class TraceNews:
    """One try of a rollout has ended."""

    tokens: int
    """Sampled, counted once per node."""
    reward: float | None
    """None where it was not scored."""
    error: str | None
    """Type and message of the last error."""
    retried: bool = False
    truncated: bool = False
    durable: bool = True
    """Whether the journal had it in time."""


@dataclass(frozen=True)
class StepNews:
    """A step has been recorded."""

    split: str
    step: int
    traces: int
    emitted: int
    samples: int
    tokens: int
    reward: float | None
    """Mean over the scored rollouts (last tries)."""
    seconds: float
    counts: Mapping[str, int]
    """Tries that were started, and those that ended by what became of them."""
    recording: RecorderStatus | None = None
    """How recording goes, over the whole run."""
    comparable: int = 0
    """Groups with two or more scored rollouts."""
    flat: int = 0
    """Those whose rewards are all equal: their advantages are 0, and they teach nothing."""


@dataclass
class Tally:
    """Running sums of a step. The reward so far is without that of groups, which are scored when they end."""

    traces: int = 0
    tokens: int = 0
    errors: int = 0
    retries: int = 0
    not_durable: int = 0
    rewards: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, news: TraceNews) -> None:
        self.tokens += news.tokens
        self.errors += news.error is not None
        self.retries += news.retried
        self.not_durable += not news.durable
        if not news.retried:
            self.traces += 1
            if news.reward is not None and math.isfinite(news.reward):
                self.rewards.append(news.reward)

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def __str__(self) -> str:
        reward = "–" if self.reward is None else f"{self.reward:.3f}"
        retries = f", {self.retries} retried" if self.retries else ""
        late = f", {self.not_durable} not durable" if self.not_durable else ""
        rate, errors = self.tokens / self.seconds, counted(self.errors, "error")
        return f"{rate:,.0f} tokens/s, reward so far {reward}, {errors}{retries}{late}"


class Progress(Protocol):
    """What `run_live` tells while it runs."""

    def step_started(self, split: str, step: int, number: int, steps: int, rollouts: int) -> None:
        """A step begins: the `number`th, from 1, of the `steps` that were asked for."""

    def trace(self, news: TraceNews) -> None: ...

    def step_ended(self, news: StepNews) -> None: ...

    def note(self, message: str) -> None: ...

    def close(self) -> None: ...


class Quiet:
    """Says nothing."""

    def step_started(self, split: str, step: int, number: int, steps: int, rollouts: int) -> None: ...

    def trace(self, news: TraceNews) -> None: ...

    def step_ended(self, news: StepNews) -> None: ...

    def note(self, message: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line every few seconds and one per step, for logs and pipes."""

    def __init__(self, console: Console | None = None, seconds: float = 10.0) -> None:
        self.console = console or SafeConsole(file=sys.stderr, soft_wrap=True)
        self.seconds = seconds
        self._tally = Tally()
        self._title = ""
        self._total = 0
        self._said = 0.0

    def step_started(self, split: str, step: int, number: int, steps: int, rollouts: int) -> None:
        self._tally = Tally()
        self._title = _title(split, step, number, steps)
        self._total = rollouts
        self._said = time.monotonic()

    def trace(self, news: TraceNews) -> None:
        self._tally.add(news)
        if time.monotonic() - self._said >= self.seconds:
            self._said = time.monotonic()
            self._print(f"{self._title}: {self._tally.traces}/{self._total} traces, {self._tally}")

    def step_ended(self, news: StepNews) -> None:
        self._print(step_line(news))

    def note(self, message: str) -> None:
        self._print(message)

    def close(self) -> None: ...

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


class _Count(MofNCompleteColumn):
    """How many of how many; nothing where that is not known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class Terminal:
    """A bar for the running step, and a line above it for each step that is recorded."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or SafeConsole(stderr=True)
        self._tally = Tally()
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            _Count(),
            TextColumn("{task.fields[news]}", style="dim"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            refresh_per_second=8,
        )
        self._task: TaskID | None = self._bars.add_task("loading environment and tokenizer", total=None, news="")
        self._bars.start()

    def step_started(self, split: str, step: int, number: int, steps: int, rollouts: int) -> None:
        self._tally = Tally()
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(_title(split, step, number, steps), total=rollouts, news="")

    def trace(self, news: TraceNews) -> None:
        self._tally.add(news)
        if self._task is not None:
            self._bars.update(self._task, completed=self._tally.traces, news=str(self._tally))

    def step_ended(self, news: StepNews) -> None:
        self.console.print(step_line(news), markup=False, highlight=False)

    def note(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, style="yellow")

    def close(self) -> None:
        self._bars.stop()


def _title(split: str, step: int, number: int, steps: int) -> str:
    return f"{split} step {step}, {number} of {steps}"


def step_line(news: StepNews) -> str:
    """A step in one line: what was recorded, what it is worth, and why the rest was dropped."""
    reward = "–" if news.reward is None else f"{news.reward:.3f}"
    lost = {name: count for name, count in sorted(news.counts.items()) if name not in ("started", "emitted")}
    dropped = ", ".join(f"{count} {name}" for name, count in lost.items() if count)
    rate = news.tokens / max(news.seconds, 1e-9)
    return (
        f"{news.split} step {news.step}: {counted(news.traces, 'trace')}, {counted(news.tokens, 'token')} ({rate:,.0f}/s), "
        f"reward {reward}, {news.emitted} emitted{f'; {dropped}' if dropped else ''}"
        f"{f'; {trouble}' if (trouble := recording_trouble(news.recording)) else ''}"
    )


def recording_trouble(status: RecorderStatus | None) -> str:
    """What people should know of how recording goes; nothing where all is on disk."""
    if status is None:
        return ""
    told = (
        (status.not_durable, "trace", "not durable in time"),
        (status.pending_steps, "step", "not on disk"),
        (status.lost, "trace", "lost"),
    )
    counts = ", ".join(f"{counted(count, what)} {how}" for count, what, how in told if count)
    return f"{counts} ({status.error})" if counts and status.error else counts or status.error or ""


def for_output(*, quiet: bool = False) -> Progress:
    """The display that suits standard error: bars on a terminal, lines elsewhere."""
    if quiet:
        return Quiet()
    return Terminal() if sys.stderr and sys.stderr.isatty() else Lines()
