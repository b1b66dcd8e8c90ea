"""Comparing two runs: settings, coverage, and numbers of their rollouts, over all of them, by task and by step.

Populations and rules:

- A rollout is the last try of it. Means are of those that came to their end, without an error and not cancelled, as in `stats`:
  what an error leaves behind, a part of the rewards perhaps, says nothing about the answer. Only `error_rate` is over all.
- Of those a mean is over the rollouts that have a finite value: null (not scored, not measured) is never 0, NaN and infinities
  are in no mean, and both are counted.
- A change is B - A. `se` is its standard error, sqrt(var A / n A + var B / n B), with sample variances; None where a side has
  fewer than two values.
- Over the same tasks: the mean over tasks of (mean of B - mean of A), each task counted once, whichever side ran it more
  often. Its standard error is that of the changes of the tasks, sd / sqrt(tasks); what tasks differ in by themselves is no
  noise there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from rolltape.replay.diff_side import IDENTITY, Side
from rolltape.replay.means import means_by
from rolltape.replay.printing.words import ROUNDING
from rolltape.replay.rollouts import Floats, Ints, Values
from rolltape.replay.tasks import Task, identity_of, labels

By = Literal["task", "step", "none"]

RATES = ("emitted_rate", "lost_rate")
"""Quantities of a whole run: shares of the rollouts started, by the last try of each: what was run again is none."""


@dataclass(frozen=True)
class Mean:
    """The mean of a quantity on one side."""

    mean: float | None
    n: int
    """Rollouts with a finite value."""
    unscored: int = 0
    """Rollouts without one: null, or not there."""
    not_finite: int = 0


@dataclass(frozen=True)
class Change:
    """A quantity on both sides."""

    a: Mean
    b: Mean
    change: float | None
    """B - A; None where a side has no value."""
    se: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        counts = [(m.n, m.unscored, m.not_finite) for m in (self.a, self.b)]
        return counts[0] == counts[1] and not self.change


@dataclass(frozen=True)
class Paired:
    """A quantity over the tasks that both sides have values of."""

    tasks: int
    change: float | None
    se: float | None


@dataclass(frozen=True)
class Row:
    """A task or a step that both sides have, with the change of every quantity."""

    name: str
    a: int
    """Rollouts of A, failed ones too."""
    b: int
    changes: Mapping[str, Change]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "changes": {name: c.to_dict() for name, c in self.changes.items()}}


@dataclass(frozen=True)
class Rows:
    """Both sides by task or by step."""

    by: Literal["task", "step"]
    rows: list[Row]
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    unnamed: tuple[int, int] = (0, 0)
    """Rollouts of either side whose task says neither key, index nor name."""

    def by_size(self, quantity: str) -> list[Row]:
        """Rows whose `quantity` changed, the largest change first."""
        return sorted(
            (r for r in self.rows if r.changes[quantity].change), key=lambda r: -abs(r.changes[quantity].change or 0)
        )


class Diff:
    """What differs between two runs."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b

    @cached_property
    def notes(self) -> list[str]:
        """What must be known before any number is read."""
        found = []
        for name in IDENTITY:
            a, b = self.a.identity[name], self.b.identity[name]
            if a != b:
                found.append(f"different {name}s: {_said(a)} and {_said(b)}")
        if self.a.steps != self.b.steps:
            found.append(f"different steps: {_steps(self.a.steps)} and {_steps(self.b.steps)}")
        return found

    @cached_property
    def settings(self) -> dict[str, tuple[list[str], list[str]]]:
        """Settings that differ: every value of A and of B; no value where a side does not have the setting."""
        a, b = self.a.settings, self.b.settings
        return {
            k: (a.get(k, []), b.get(k, [])) for k in dict.fromkeys([*a, *b]) if set(a.get(k, [])) != set(b.get(k, []))
        }

    @cached_property
    def coverage(self) -> dict[str, tuple[int, int]]:
        """Tries started, ended by disposition, and lost."""
        a, b = self.a.coverage, self.b.coverage
        names = ["started", *sorted({*a, *b} - {"started", "lost"}), "lost"]
        return {name: (a.get(name, 0), b.get(name, 0)) for name in names}

    @cached_property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Steps, groups, tries, rollouts and tokens."""
        return {name: (n, self.b.totals[name]) for name, n in self.a.totals.items()}

    @cached_property
    def quantities(self) -> dict[str, Change]:
        """Every quantity over all rollouts, and the rates of the coverage."""
        in_a, in_b = (np.where(side.rollouts.final, 0, -1) for side in (self.a, self.b))
        found = {name: self._changes(name, in_a, in_b, 1)[0] for name in self._names}
        again = self.coverage.get("retried", (0, 0))
        begun = [started - n for started, n in zip(self.coverage["started"], again, strict=True)]
        for name in RATES:
            ended = self.coverage.get(name.removesuffix("_rate"), (0, 0))
            a, b = (Mean(n / all_ if all_ else None, all_) for n, all_ in zip(ended, begun, strict=True))
            found[name] = Change(a, b, None if a.mean is None or b.mean is None else b.mean - a.mean)
        return found

    @cached_property
    def _names(self) -> list[str]:
        """Quantities of rollouts that either side has: total reward first, then those of A, then those only in B."""
        return list(dict.fromkeys([*self.a.quantities, *self.b.quantities]))

    def _changes(self, name: str, in_a: Ints, in_b: Ints, size: int) -> list[Change]:
        """The change of a quantity by group: `in_a` and `in_b` put rollouts into groups, -1 into none."""
        none = Values(np.zeros(0, np.int64), np.zeros(0))
        a, b = (side.quantities.get(name, none) for side in (self.a, self.b))
        in_a, in_b = (np.where(side.among(name), codes, -1) for side, codes in ((self.a, in_a), (self.b, in_b)))
        return _changes(a, b, in_a, in_b, size)

    @property
    def same(self) -> bool:
        """Whether nothing differs: settings, coverage, any quantity over all, by task or by step."""
        return not (
            self.notes
            or self.settings
            or any(a != b for a, b in (*self.coverage.values(), *self.totals.values()))
            or not all(c.same for c in self.quantities.values())
            or any(not c.same for rows in (self.tasks, self.steps) for row in rows.rows for c in row.changes.values())
            or any(rows.only_a or rows.only_b for rows in (self.tasks, self.steps))
        )

    # -- by task and by step

    @cached_property
    def tasks(self) -> Rows:
        """By task, in order of first appearance."""
        keyed = self.a.rollouts.keyed and self.b.rollouts.keyed
        places: dict[Any, int] = {}
        tasks: list[Task] = []
        codes = [_by_task(side, keyed, places, tasks) for side in (self.a, self.b)]
        unnamed = [
            int((side.rollouts.final & (code < 0)).sum()) for side, code in zip((self.a, self.b), codes, strict=True)
        ]
        rows = self._rows("task", labels(tasks, _called), *codes)
        return replace(rows, unnamed=(unnamed[0], unnamed[1]))

    @cached_property
    def steps(self) -> Rows:
        """By step, in order."""
        steps = sorted({*self.a.steps, *self.b.steps})
        codes = [
            np.where(side.rollouts.final, np.searchsorted(steps, side.rollouts.step), -1) for side in (self.a, self.b)
        ]
        return self._rows("step", [str(s) for s in steps], *codes)

    def _rows(self, by: Literal["task", "step"], names: Sequence[str], in_a: Ints, in_b: Ints) -> Rows:
        """Rows of the groups that `in_a` and `in_b` put rollouts into; -1 is in none."""
        a, b = (np.bincount(codes[codes >= 0], minlength=len(names)) for codes in (in_a, in_b))
        changes = {name: self._changes(name, in_a, in_b, len(names)) for name in self._names}
        both = np.flatnonzero((a > 0) & (b > 0)).tolist()
        rows = [Row(names[i], int(a[i]), int(b[i]), {name: c[i] for name, c in changes.items()}) for i in both]
        only_a, only_b = ([names[i] for i in np.flatnonzero((x > 0) & (y == 0)).tolist()] for x, y in ((a, b), (b, a)))
        return Rows(by, rows, only_a, only_b)

    def paired(self, quantity: str) -> Paired:
        """A quantity over the tasks of both sides."""
        found = [c for row in self.tasks.rows if (c := row.changes[quantity]).change is not None]
        if not found:
            return Paired(0, None, None)
        changes = [c.change or 0.0 for c in found]
        rounding = ROUNDING * max(abs(mean or 0.0) for c in found for mean in (c.a.mean, c.b.mean))
        n, mean = len(changes), math.fsum(changes) / len(changes)
        mean = 0.0 if abs(mean) <= rounding else mean
        if n < 2:
            return Paired(n, mean, None)
        variance = math.fsum((c - mean) ** 2 for c in changes) / (n - 1)
        se = math.sqrt(variance / n)
        return Paired(n, mean, 0.0 if se <= rounding else se)

    def to_dict(self, by: By = "task") -> dict[str, Any]:
        """Plain JSON values."""
        rows = None if by == "none" else self.tasks if by == "task" else self.steps
        quantities = {name: c.to_dict() for name, c in self.quantities.items()}
        for name in self._names:
            quantities[name]["same_tasks"] = asdict(self.paired(name))
        return {
            **{letter: _head(side) for letter, side in (("a", self.a), ("b", self.b))},
            "same": self.same,
            "notes": self.notes,
            "settings": {k: {"a": a, "b": b} for k, (a, b) in self.settings.items()},
            "coverage": {k: {"a": a, "b": b} for k, (a, b) in self.coverage.items()},
            "totals": {k: {"a": a, "b": b} for k, (a, b) in self.totals.items()},
            "quantities": quantities,
            "by": by,
            **({} if rows is None else {**rows.__dict__, "rows": [row.to_dict() for row in rows.rows]}),
        }


# -- numbers


@dataclass(frozen=True)
class _Stats:
    """A quantity on one side by group [g]."""

    n: Ints
    mean: Floats
    variance: Floats
    unscored: Ints
    not_finite: Ints

    def at(self, i: int) -> Mean:
        n = int(self.n[i])
        return Mean(
            None if np.isnan(self.mean[i]) else float(self.mean[i]), n, int(self.unscored[i]), int(self.not_finite[i])
        )


def _stats(values: Values, codes: Ints, size: int) -> _Stats:
    """Statistics of `values` by group: `codes` [n] of the rollouts, -1 for those in none."""
    group = codes[values.rows]
    finite, inside = np.isfinite(values.values), group >= 0
    wild = np.bincount(group[~finite & inside], minlength=size)
    group, numbers = group[finite & inside], values.values[finite & inside]
    n, mean = means_by(group, numbers, size)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean[np.isinf(mean)] = np.nan  # a sum that no float holds: nothing follows from it
        variance = np.bincount(group, (numbers - mean[group]) ** 2, minlength=size) / (n - 1)
    rollouts = np.bincount(codes[codes >= 0], minlength=size)
    return _Stats(n, mean, variance, rollouts - n - wild, wild)


def _changes(a: Values, b: Values, in_a: Ints, in_b: Ints, size: int) -> list[Change]:
    """The change of a quantity by group."""
    x, y = _stats(a, in_a, size), _stats(b, in_b, size)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        se = np.sqrt(x.variance / x.n + y.variance / y.n)
        change = y.mean - x.mean
        rounding = ROUNDING * np.maximum(np.abs(x.mean), np.abs(y.mean))
        change[np.abs(change) <= rounding] = 0.0
        se[se <= rounding] = 0.0
    scored, spread = np.isfinite(change), (x.n > 1) & (y.n > 1) & np.isfinite(se)
    return [
        Change(x.at(i), y.at(i), float(change[i]) if scored[i] else None, float(se[i]) if spread[i] else None)
        for i in range(size)
    ]


def _by_task(side: Side, keyed: bool, places: dict[Any, int], tasks: list[Task]) -> Ints:
    """[n] place of each rollout's task among `tasks`, to which new ones are added; -1 where it has no identity."""
    mine, task = side.rollouts.tasks_by(keyed)
    code = np.full(len(mine), -1, np.int64)
    for i, each in enumerate(mine):
        identity = identity_of(each, keyed)
        if identity is not None:
            code[i] = places.setdefault(identity, len(places))
            if len(tasks) < len(places):
                tasks.append(each)
    return np.where(side.rollouts.final, code[task], -1)


# -- words


def _called(task: Task) -> str:
    return task.name if task.name and not task.name.isdecimal() else f"{task.type or 'task'} {task.name}"


def _said(value: str | None) -> str:
    return value or "unknown"


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    whole = f"{steps[0]}–{steps[-1]}" if len(steps) > 1 else str(steps[0])
    return f"{whole} ({len(steps)})"


def _head(side: Side) -> dict[str, Any]:
    return {"path": side.name, "run": side.run.run_id, "split": side.split, **side.identity, "steps": side.steps}
