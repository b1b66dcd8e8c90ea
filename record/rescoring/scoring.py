"""Scoring a recorded trace again: a taskset's metrics, rewards and judges, without a runtime and without its harness.

    record ─► task row ─► the taskset's Task ─┐
       └────► Trace ──────────────────────────┴─► each signal ─► scores, or why there is none

A signal is one `@metric`, `@reward`, judge or `@group_reward`. Verifiers' `Task.score` gives up a trace at the first
signal that raises; here each is run for itself, in the same order and with the same arguments, so that one judge that
fails costs its own reward and nothing else. A Task with a `score` of its own is left to it.

What a signal would see live and no recording holds is not made up: a signal that asks for the runtime, or reads a field
of `trace.state` that nothing has set, is `unscorable`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import ValidationError
from verifiers.v1.decorators import discover_decorated, invoke
from verifiers.v1.errors import RolloutError
from verifiers.v1.loaders import load_harness, task_type
from verifiers.v1.state import state_cls
from verifiers.v1.task import Task, task_data_cls

from rolltape.record.rescoring.bounded import call
from rolltape.record.retrace import trace_of
from rolltape.schema.errors import BadInput, RolltapeError

LATER_FIELDS = frozenset(("skills", "network_allow", "network_block", "artifacts", "artifact_max_bytes"))
"""Fields that later releases of Verifiers gave every task row. They say how a task is run, not how it is scored."""

SECONDS = 600.0
"""What scoring a trace or a group may take where neither the config (`timeout.scoring`) nor the task's row says."""

Status = Literal["scored", "kept", "skipped", "failed"]
"""`kept`: the recorded value; `skipped`: there is none to be had; `failed`: its signal raised."""


class NotRecorded(RolltapeError, RuntimeError):
    """A signal asks for something that a recording does not hold."""


@dataclass(frozen=True)
class Signal:
    """One thing a taskset scores."""

    kind: Literal["metric", "reward", "judge", "group reward"]
    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    @property
    def needs_runtime(self) -> bool:
        """Whether it asks for the runtime: a parameter of that name without a default."""
        wanted = inspect.signature(self.function).parameters.get("runtime")
        return wanted is not None and wanted.default is inspect.Parameter.empty

    @property
    def is_reward(self) -> bool:
        """Whether its scores count towards the total."""
        return self.kind != "metric"


@dataclass(frozen=True)
class Score:
    """What came of one name of one trace."""

    status: Status
    value: float | None = None
    """The weighted contribution of a reward, or a metric."""
    score: float | None = None
    """Of a reward, before its weight; None where that is not known."""
    weight: float | None = None
    reason: str | None = None


@dataclass
class Scored:
    """A trace and what it was scored."""

    trace_id: str
    task: Any
    trace: Any
    """Verifiers' Trace, as the signals see it."""
    signals: list[Signal]
    recorded: Mapping[str, Mapping[str, float | None]]
    """Recorded `rewards` (weighted) and `metrics`."""
    rewards: dict[str, Score] = field(default_factory=dict)
    metrics: dict[str, Score] = field(default_factory=dict)
    unscorable: dict[str, str] = field(default_factory=dict)
    """Why, by name of the signal."""
    failures: dict[str, str] = field(default_factory=dict)
    """What was raised, by name of the signal."""
    errors: list[dict[str, str | None]] = field(default_factory=list)
    """The same as errors of a trace; a group reward's are no trace's own, and not among them."""
    started: float = 0.0
    ended: float = 0.0

    @property
    def owner(self) -> str:
        """How Verifiers names what went wrong here."""
        return f"task {type(self.task).__name__} scoring"

    def show_recorded(self) -> None:
        """Let signals see what was recorded and cannot be scored again, as they saw it live.

        Metrics that no signal has the name of were left by the rollout itself (in `finalize`, by a tool).
        """
        again = {s.name for s in self.signals if not s.needs_runtime}
        self.unscorable = {s.name: "it needs the runtime" for s in self.signals if s.needs_runtime}
        rewards, metrics = self.recorded["rewards"], self.recorded["metrics"]
        self.trace.rewards = {k: v for k, v in rewards.items() if k in self.unscorable and v is not None}
        self.trace.metrics = {k: v for k, v in metrics.items() if k not in again and v is not None}

    def enter(self, signal: Signal, result: Any) -> None:
        """Enter what a signal gave (one score, or several by name), or the exception that it raised."""
        if isinstance(result, NotRecorded):
            self.unscorable[signal.name] = str(result)
        elif isinstance(result, BaseException):
            self.fail(signal, result)
        else:
            try:
                self._add(signal, result)
            except (TypeError, ValueError, OverflowError) as error:
                self.fail(signal, error)

    def _add(self, signal: Signal, result: Any) -> None:
        several = result if isinstance(result, Mapping) else {signal.name: result}
        for name in several:
            if not isinstance(name, str):
                raise TypeError(f"a score's name is {name!r}; expected text")
            name.encode()  # halves of surrogates are no text
        for name, value in [(name, float(score)) for name, score in several.items()]:
            if signal.is_reward:
                self.rewards[name] = Score("scored", value * signal.weight, value, signal.weight)
                self.trace.rewards[name] = value * signal.weight
            else:
                self.metrics[name] = Score("scored", value)
                self.trace.metrics[name] = value

    def fail(self, signal: Signal, error: BaseException) -> None:
        """Enter that a signal raised: its score is null, and the trace has an error, unless it was a group's."""
        found = str(error) if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        self.failures[signal.name] = found
        scores = self.rewards if signal.is_reward else self.metrics
        scores[signal.name] = Score("failed", weight=signal.weight if signal.is_reward else None, reason=found)
        if signal.kind != "group reward":
            kind = type(error).__name__ if isinstance(error, RolloutError) else "TaskError"
            lines = "".join(traceback.format_exception(error))
            self.errors.append({"type": kind, "message": f"{self.owner}: {signal.name}: {found}", "traceback": lines})

    def take_over(self, before: Mapping[str, Mapping[str, float]], signals: Sequence[Signal]) -> None:
        """Enter what a Task's own `score` has put on the trace: what was not there before, or has a signal's name."""
        weights = {s.name: s.weight for s in signals if s.is_reward}
        for name, value in self.trace.rewards.items():
            if name not in before["rewards"] or name in weights:
                weight = weights.get(name)
                self.rewards[name] = Score("scored", value, value / weight if weight else None, weight)
        names = {s.name for s in signals if not s.is_reward} | (self.trace.metrics.keys() - before["metrics"].keys())
        self.metrics.update((k, Score("scored", v)) for k, v in self.trace.metrics.items() if k in names)


class Scorer:
    """A taskset's signals, from an EnvConfig. Loads no task and no dataset.

    Raises BadInput where the taskset or its harness does not load.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        try:
            self.task_class: type[Any] = task_type(config.taskset.id)
            self.harness = load_harness(config.harness)
        except Exception as error:
            raise BadInput(
                f"The environment {config.env_id!r} does not load: {type(error).__name__}: {error}"
            ) from error
        self.data_class = task_data_cls(self.task_class)
        self._state = _unrecorded(state_cls(self.task_class))
        self._tasks: dict[str, Any] = {}

    def task(self, text: str, data: Mapping[str, Any]) -> Any:
        """The Task of a recorded task row, `text` being `data` as JSON. Raises BadInput where it is no row of the taskset."""
        if text not in self._tasks:
            try:
                row = self.data_class.model_validate(_of_today(data, self.data_class.model_fields))
            except ValidationError as error:
                problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors()[:4])
                raise BadInput(
                    f"its task row is no {self.data_class.__name__}, which {self.task_class.__name__} scores ({problems})"
                ) from error
            self._tasks[text] = self.task_class(row, self.config.taskset.task)
        return self._tasks[text]

    def signals(self, task: Any) -> list[Signal]:
        """Metrics, rewards, judges and group rewards of a task. Raises BadInput for a judge that does not load."""
        try:
            judges = task.plugged_judges()
        except Exception as error:
            raise BadInput(f"A judge does not load: {type(error).__name__}: {error}") from error
        return [
            *(Signal("metric", fn.__name__, fn) for fn in discover_decorated(task, "metric")),
            *(Signal("metric", fn.__name__, fn) for fn in discover_decorated(self.harness, "metric")),
            *(Signal("reward", fn.__name__, fn, _weight(fn)) for fn in discover_decorated(task, "reward")),
            *(Signal("judge", j.reward_name, j.score, float(j.config.weight)) for j in judges),
            *(Signal("group reward", fn.__name__, fn, _weight(fn)) for fn in discover_decorated(task, "group_reward")),
        ]

    def opened(self, record: Mapping[str, Any], columns: Mapping[str, Any], *, again: bool) -> Scored:
        """A record made ready to be scored, or with `again` false to be looked at by group rewards only.

        `columns`: `retrace.COLUMNS` of its row. Raises BadInput where the row is not the taskset's, or the record makes no
        Trace.
        """
        task = self.task(columns["task"], record["task"]["data"])
        trace = trace_of(record, columns, task, self._state())
        recorded = {name: columns[name] or {} for name in ("rewards", "metrics")}
        scored = Scored(columns["trace_id"], task, trace, self.signals(task), recorded)
        if again:
            trace.errors = []
            scored.show_recorded()
        else:
            names = {s.name for s in scored.signals if s.kind == "group reward"}
            rewards = recorded["rewards"].items()
            trace.rewards = {k: v for k, v in rewards if v is not None and k not in names}
            trace.metrics = {k: v for k, v in recorded["metrics"].items() if v is not None}
        return scored

    async def score(self, scored: Scored) -> None:
        """Metrics, then rewards, then judges of one trace, each phase at once. What signals raise is entered, not raised."""
        limit, end = self._limit(scored.task)
        scored.started = time.time()
        signals = [s for s in scored.signals if not s.needs_runtime]
        if type(scored.task).score is not Task.score:
            await self._by_itself([scored], signals, "score", {"trace": scored.trace, "runtime": None}, end, limit)
        else:
            given = {"task": scored.task.data, "trace": scored.trace}
            for kind in ("metric", "reward", "judge"):
                phase = [s for s in signals if s.kind == kind]
                results = await asyncio.gather(
                    *(call(partial(invoke, s.function, dict(given)), end, limit) for s in phase)
                )
                for signal, result in zip(phase, results, strict=True):
                    scored.enter(signal, result)
        scored.ended = 0.0 if scored.errors else time.time()

    async def score_group(self, group: Sequence[Scored]) -> None:
        """Group rewards over a whole group, in rollout order. What they raise is entered, not raised."""
        task, traces = group[0].task, [s.trace for s in group]
        signals = [s for s in group[0].signals if s.kind == "group reward"]
        limit, end = self._limit(task)
        if type(task).score_group is not Task.score_group:
            await self._by_itself(group, signals, "score_group", {"traces": traces}, end, limit)
            return
        given = {"task": task.data, "traces": traces}
        results = await asyncio.gather(*(call(partial(invoke, s.function, dict(given)), end, limit) for s in signals))
        for signal, result in zip(signals, results, strict=True):
            for member, score in zip(group, _one_each(result, len(group)), strict=True):
                member.enter(signal, score)

    def _limit(self, task: Any) -> tuple[float, float]:
        """Seconds that scoring a trace, or a group, of a task may take, and when they end on the loop's clock."""
        limit = self.config.timeout.scoring
        limit = task.data.timeout.scoring if limit is None else limit
        limit = SECONDS if limit is None else limit
        return limit, asyncio.get_running_loop().time() + limit

    async def _by_itself(
        self,
        group: Sequence[Scored],
        signals: Sequence[Signal],
        method: str,
        given: Mapping[str, Any],
        end: float,
        limit: float,
    ) -> None:
        """Let a Task with a method of its own score; where it raises, nothing it did counts."""
        before = [{"rewards": dict(s.trace.rewards), "metrics": dict(s.trace.metrics)} for s in group]
        result = await call(partial(invoke, getattr(group[0].task, method), dict(given)), end, limit)
        kind = "reward" if method == "score" else "group reward"
        mine = [s for s in signals if (s.kind == "group reward") == (kind == "group reward")]
        for member, then in zip(group, before, strict=True):
            if not isinstance(result, BaseException):
                member.take_over(then, mine)
                continue
            member.trace.rewards, member.trace.metrics = then["rewards"], then["metrics"]
            for signal in mine:
                member.enter(signal, result)


def _of_today(data: Mapping[str, Any], fields: Container[str]) -> dict[str, Any]:
    """A task row without what only later releases have; those call the harness an agent."""
    row = {k: v for k, v in data.items() if k not in LATER_FIELDS or k in fields}
    row.setdefault("prompt", None)  # Verifiers 0.2.0 leaves a null out of its own files
    if isinstance(timeout := row.get("timeout"), dict) and "agent" in timeout:
        row["timeout"] = {"harness" if k == "agent" else k: v for k, v in timeout.items()}
    return row


def _weight(function: Any) -> float:
    return float(getattr(function, "_vf_weight", 1.0))


def _one_each(result: Any, members: int) -> Sequence[Any]:
    """A group reward's result, an item a member; an exception is every member's."""
    if isinstance(result, BaseException):
        return [result] * members
    try:
        scores = list(result)
    except TypeError as error:
        return [error] * members
    if len(scores) == members:
        return scores
    return [ValueError(f"it gave {len(scores)} scores for {members} rollouts; expected one each")] * members


def _unrecorded(state: type[Any]) -> type[Any]:
    """`state` as it is offline: reading a field that nothing has set raises NotRecorded."""
    fields = frozenset(state.model_fields)
    if not fields:
        return state

    class Unrecorded(state):
        def __getattribute__(self, name: str) -> Any:
            if name in fields and name not in object.__getattribute__(self, "__pydantic_fields_set__"):
                raise NotRecorded(f"it reads trace.state.{name}, which no recording holds")
            return super().__getattribute__(name)

    return Unrecorded
