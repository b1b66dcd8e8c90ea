"""Statistics of a run: what was rewarded, how long, how often it failed, and what became of it; by step or by task.

Populations, which every number here keeps to:

    try         a row: one try of one rollout
    rollout     the last try of a rollout that came to its end: without an error, and not cancelled. What an error leaves
                behind, a part of the rewards perhaps, says nothing about the answer, and is never trained
    scored      a rollout with a reward. Null is no reward, and not 0; NaN and infinities are counted and left out of means
    length      tokens the model sampled, over rollouts that sampled any
    group       the rollouts of one task in one step
    flat        a group whose scored rollouts, two or more, have all the same reward as float32, which is what trainers
                compute advantages from: it carries no signal
    pass@k      by the unbiased estimator 1 - C(n-c, k) / C(n, k) of a group with n scored rollouts, c of them passed, as the
                mean over groups with n >= k (Chen et al. 2021, arXiv:2107.03374)
    lag         weight versions by which the oldest turn of a try is behind the newest of its step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.replay.means import deviation_of, mean_of, means_by
from rolltape.replay.printing.words import pieces
from rolltape.replay.rollouts import COLUMNS, Floats, Ints, PassRule, Rollouts, Values, concat
from rolltape.replay.run import Run
from rolltape.replay.tasks import Task
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput


@dataclass(frozen=True)
class Spread:
    """Values in a few numbers. `sd` is that of the population; all None where no value is finite."""

    count: int
    """Finite values."""
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    p95: float | None = None
    """95th percentile, between two values by their distance."""
    missing: int = 0
    """Rollouts without a value."""
    not_finite: int = 0
    """NaN and infinities, which are in no other number here."""

    @classmethod
    def of(cls, values: Floats, among: int | None = None) -> Spread:
        """The spread of `values`, which are those of `among` rollouts."""
        finite = values[np.isfinite(values)]
        missing = 0 if among is None else among - len(values)
        if not len(finite):
            return cls(0, missing=missing, not_finite=len(values))
        mean, low, high = mean_of(finite), float(finite.min()), float(finite.max())
        with np.errstate(over="ignore", invalid="ignore"):
            p95 = float(np.percentile(finite, 95))
        sd = deviation_of(finite, mean)
        return cls(len(finite), mean, sd, low, high, p95, missing, len(values) - len(finite))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What can be said of some tries: those of a step, of several steps, or of a task."""

    steps: tuple[int, ...]
    """Steps that the tries are of."""
    task: Task | None = None
    tries: int = 0
    rollouts: int = 0
    """Those that came to their end."""
    reward: Spread = field(default_factory=lambda: Spread(0))
    rewards: Mapping[str, Spread] = field(default_factory=dict)
    """By reward name, weighted as they add up to the total."""
    length: Spread = field(default_factory=lambda: Spread(0))
    groups: int = 0
    """Groups with two or more scored rollouts."""
    flat: int = 0
    """Those of them that carry no signal."""
    pass_at: Mapping[int, float | None] = field(default_factory=dict)
    """pass@k by k; None where no group is large enough."""
    pass_groups: Mapping[int, int] = field(default_factory=dict)
    """Groups that pass@k is the mean of."""
    truncated: int = 0
    truncated_of: int = 0
    """Rollouts of which it is known whether they were cut off."""
    errors: int = 0
    """Tries with an error, those that were run again included."""
    sampled: int = 0
    """Tokens that were sampled in all tries."""
    seconds: float | None = None
    """Time from the start of the step to its end, over all writers; None where a step does not say."""
    versions: tuple[str, ...] = ()
    lag: tuple[int, int] | None = None
    """Least and largest lag of a try, in weight versions."""
    curve: tuple[float | None, ...] = ()
    """Of a task: its mean reward in each step that has it; None where no rollout was scored."""
    coverage: Mapping[str, int] = field(default_factory=dict)
    """Tries started, ended by disposition, and lost, as the commits count them."""

    @property
    def tokens_per_second(self) -> float | None:
        """Sampled tokens by the time of the step."""
        return self.sampled / self.seconds if self.seconds else None

    @property
    def dropped(self) -> dict[str, int]:
        """Tries that were not handed on, by what became of them; lost ones included."""
        return {k: n for k, n in self.coverage.items() if n and k not in ("started", "emitted", "eval", "recorded")}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second, "dropped": self.dropped}


class Stats:
    """Statistics of the newest attempt of each step that was asked for."""

    def __init__(self, commits: Sequence[Commit], tables: Sequence[pa.Table], split: str, rule: PassRule) -> None:
        """`tables` [c] hold the rows of each of the `commits` [c]. Raises BadInput where no trace has the rule's reward."""
        self.split, self.rule = split, rule
        self._parts: dict[int, list[tuple[Commit, pa.Table]]] = {}
        for commit, table in zip(commits, tables, strict=True):
            self._parts.setdefault(commit.part.step, []).append((commit, table))
        self.rollouts = Rollouts(concat(tables))
        names = self.rollouts.rewards
        if rule.name is not None and rule.name not in names and self.rollouts.n:
            raise BadInput(f"--pass: no trace has a reward {rule.name!r}; recorded are {', '.join(names) or 'none'}.")
        self.ks = _ks(self.rollouts)

    @cached_property
    def steps(self) -> list[Summary]:
        """One a step, in order."""
        return [self._of([step]) for step in sorted(self._parts)]

    @cached_property
    def total(self) -> Summary:
        """All steps together."""
        return self._of(sorted(self._parts))

    def buckets(self, most: int) -> list[Summary]:
        """The steps in at most `most` stretches of nearly as many steps each, counted over all tries of a stretch."""
        steps = sorted(self._parts)
        return self.steps if len(steps) <= most else [self._of(steps[a:b]) for a, b in pieces(len(steps), most)]

    @cached_property
    def tasks(self) -> list[Summary]:
        """One a task: those without a scored rollout first, then those with the lowest mean reward."""
        order = np.argsort(self.rollouts.task, kind="stable")
        sorted_rows = self.rollouts.table.take(pa.array(order))
        ends = np.cumsum(np.bincount(self.rollouts.task, minlength=len(self.rollouts.tasks))).tolist()
        found = []
        for task, (begin, end) in zip(self.rollouts.tasks, pairwise([0, *ends]), strict=True):
            rows = Rollouts(sorted_rows.slice(begin, end - begin))
            found.append(replace(_summary(rows, self.rule, self.ks), task=task, lag=None, curve=_curve(rows)))
        return sorted(found, key=lambda t: (t.reward.mean is not None, t.reward.mean or 0.0))

    def _of(self, steps: Sequence[int]) -> Summary:
        """Whole steps together."""
        rows = Rollouts(concat(table for step in steps for _, table in self._parts[step]))
        times = [_seconds([commit for commit, _ in self._parts[step]]) for step in steps]
        coverage: Counter[str] = Counter()
        for step in steps:
            for commit, table in self._parts[step]:
                coverage.update(_counts(commit, table))
        return replace(
            _summary(rows, self.rule, self.ks),
            steps=tuple(steps),
            seconds=None if None in times else sum(t for t in times if t is not None),
            coverage=dict(coverage),
        )

    @cached_property
    def trouble(self) -> dict[str, int]:
        """Tries that were not durable in time, or were given up before they could be written, as commits count them."""
        counts: Counter[str] = Counter()
        for commit in (commit for parts in self._parts.values() for commit, _ in parts):
            counts.update({name: int(commit.sums.get(name) or 0) for name in ("not_durable", "lost_before")})
        return {name: n for name, n in counts.items() if n}

    def to_dict(self, *, tasks: bool = False) -> dict[str, Any]:
        """Plain JSON values; with `tasks` one summary a task instead of one a step."""
        kinds = [{"type": t, "message": m, "count": n} for (t, m), n in self.rollouts.errors.most_common()]
        of = {"tasks": [t.to_dict() for t in self.tasks]} if tasks else {"steps": [s.to_dict() for s in self.steps]}
        head = {"split": self.split, "pass": str(self.rule), "total": self.total.to_dict()}
        reasons = [{"disposition": d, "reason": r, "count": n} for (d, r), n in self.rollouts.reasons.most_common()]
        return {**head, **of, "errors": kinds, "reasons": reasons, "trouble": self.trouble}


def stats(
    run: Run,
    split: str = "train",
    steps: Iterable[int] | None = None,
    *,
    rule: PassRule | None = None,
    last: int | None = None,
    attempt: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    cache: dict[str, pa.Table] | None = None,
) -> Stats:
    """Statistics of `run`: of all steps, of those named, or of the `last` ones.

    `cache` keeps the rows that were read, by the sha256 of their file, for the next call. Raises BadInput for a step that was
    not recorded and a reward that no trace has, Damaged where a file or commit does not read back.
    """
    commits = run.commits(split, steps, attempt=attempt)
    if last is not None:
        wanted = set(sorted({c.part.step for c in commits})[-last:])
        commits = [c for c in commits if c.part.step in wanted]
    known = {} if cache is None else cache
    tables = []
    for i, commit in enumerate(commits):
        if commit.file.sha256 not in known:
            known[commit.file.sha256] = concat(run.part_batches(commit, COLUMNS))
        tables.append(known[commit.file.sha256])
        if progress is not None:
            progress(i + 1, len(commits))
    return Stats(commits, tables, split, rule or PassRule())


def _summary(rollouts: Rollouts, rule: PassRule, ks: Sequence[int]) -> Summary:
    """What rows alone say."""
    sound = rollouts.sound
    n = int(sound.sum())
    lengths = rollouts.sampled[sound]
    truncated = rollouts.truncated.of(sound)
    rewards = {name: values.of(sound) for name, values in rollouts.rewards.items()}
    lag = rollouts.lag
    return Summary(
        steps=tuple(np.unique(rollouts.step).tolist()),
        tries=rollouts.n,
        rollouts=n,
        reward=Spread.of(rollouts.reward.of(sound), n),
        rewards={name: Spread.of(values, n) for name, values in rewards.items() if len(values)},
        length=Spread.of(lengths[lengths > 0].astype(np.float64)),
        **_groups(rollouts, rule, ks),
        truncated=int(truncated.sum()),
        truncated_of=len(truncated),
        errors=int(rollouts.failed.sum()),
        sampled=int(rollouts.sampled.sum()),
        versions=tuple(rollouts.versions),
        lag=(int(lag.min()), int(lag.max())) if len(lag) else None,
    )


def _curve(rollouts: Rollouts) -> tuple[float | None, ...]:
    """Mean reward in each step, in order."""
    steps, place = np.unique(rollouts.step, return_inverse=True)
    rows, values = rollouts.reward.rows, rollouts.reward.values
    sound = np.isfinite(values) & rollouts.sound[rows]
    at, values = place[rows[sound]], values[sound]
    counts, means = means_by(at, values, len(steps))
    return tuple(mean if n else None for mean, n in zip(means.tolist(), counts.tolist(), strict=True))


# -- groups


def _groups(rollouts: Rollouts, rule: PassRule, ks: Sequence[int]) -> dict[str, Any]:
    """The fields of a summary that are about groups."""
    group, size = rollouts.groups
    at, values = _finite(rollouts.scored(rule), group)
    n, passed = np.bincount(at, minlength=size), np.bincount(at[rule.holds(values)], minlength=size)
    at, totals = _finite(rollouts.reward, group)
    low, high = np.full(size, np.inf, np.float32), np.full(size, -np.inf, np.float32)
    with np.errstate(over="ignore"):
        np.minimum.at(low, at, totals.astype(np.float32))
        np.maximum.at(high, at, totals.astype(np.float32))
    comparable = np.bincount(at, minlength=size) >= 2
    return {
        "groups": int(comparable.sum()),
        "flat": int((comparable & (low == high)).sum()),
        "pass_at": {k: pass_at(k, n, passed) for k in ks},
        "pass_groups": {k: int((n >= k).sum()) for k in ks},
    }


def pass_at(k: int, n: npt.ArrayLike, passed: npt.ArrayLike) -> float | None:
    """pass@k: the mean of 1 - C(n-c, k) / C(n, k) over groups with `n` [g] rollouts, `passed` [g] of them.

    Groups of fewer than `k` are left out; None where none is left.
    """
    size, right = np.asarray(n, np.int64), np.asarray(passed, np.int64)
    size, right = size[size >= k], right[size >= k]
    if not len(size):
        return None
    none = np.ones(len(size))
    for i in range(k):
        none *= np.maximum(size - right - i, 0) / (size - i)
    return mean_of(1.0 - none)


def _finite(values: Values, group: Ints) -> tuple[Ints, Floats]:
    """([m] group of each finite value of a rollout that is in one, [m] the values)."""
    sound = np.isfinite(values.values) & (group[values.rows] >= 0)
    return group[values.rows[sound]], values.values[sound]


def _ks(rollouts: Rollouts) -> tuple[int, ...]:
    """Powers of two up to the size that most groups have, and that size."""
    group, size = rollouts.groups
    if not size:
        return ()
    usual = int(np.argmax(np.bincount(np.bincount(group[group >= 0], minlength=size))))
    return tuple(sorted({2**i for i in range(usual.bit_length())} | {usual}))


# -- what commits say


def _seconds(commits: Sequence[Commit]) -> float | None:
    """Time that a step took, from the start of its first writer to the end of its last."""
    begun, ended = [c.step.started_at for c in commits], [c.step.ended_at for c in commits]
    if None in begun or None in ended:
        return None
    return max(t for t in ended if t is not None) - min(t for t in begun if t is not None)


def _counts(commit: Commit, table: pa.Table) -> Mapping[str, int]:
    """Counts of a part. Where its commit has none (it was imported), those of its rows; `recorded` is all they say then."""
    if commit.step.counts:
        return commit.step.counts
    said = Counter(table.column("disposition").to_pylist())
    return {"started": said.total(), **{name or "recorded": n for name, n in said.items()}}
