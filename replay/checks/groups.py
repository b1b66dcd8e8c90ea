"""Checks on groups: size, one task, no trace twice, and reward sums that equal what the live traces gave.

Group sums count a trace once, however many branches it has, and know groups by their stored ids only: neither position
nor count in a file says anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rolltape.replay.checks.findings import Finding
from rolltape.replay.options import ConvertOptions
from rolltape.replay.printing.words import counted
from rolltape.replay.view import View, views
from rolltape.schema.records import Group, RewardSum, exact_sum, sum_rewards

_COLUMNS = ("trace_id", "task_idx", "task_key", "rewards", "error_types")


@dataclass(frozen=True)
class Member:
    """What the checks of a group need to know of a trace."""

    task: tuple[Any, Any]
    rewards: Mapping[str, float | None]
    failed: bool


def members(parts: Iterable[View]) -> dict[str, Member]:
    """Every trace of `parts` by its id. Ids that stand twice are found by `repeated`."""
    rows = [row for view in parts for row in zip(*map(view.pylist, _COLUMNS), strict=True)]
    return {trace: Member((idx, key), rewards or {}, bool(errors)) for trace, idx, key, rewards, errors in rows}


def repeated(table: pa.Table) -> list[Finding]:
    """Traces that stand more than once in `table`."""
    counts = Counter(table.column("trace_id").to_pylist())
    return [
        Finding(
            code="trace_twice",
            message=f"the trace stands {n} times among the rows; expected once",
            trace_id=t,
            expected=1,
            found=n,
        )
        for t, n in counts.items()
        if n > 1
    ]


def check_groups(table: pa.Table, groups: Sequence[Group], options: ConvertOptions) -> list[Finding]:
    """Findings of `groups` over the traces of `table`, in the order of the groups."""
    known, shared = members(views(table)), Shared.among(groups)
    return [*repeated(table), *(f for group in groups for f in check_group(group, known, options, shared))]


@dataclass(frozen=True)
class Shared:
    """What several group records claim, and only one may."""

    traces: Mapping[str, list[int]]
    """Indices of the groups that hold a trace, where it is more than one."""
    indices: frozenset[int]
    """Group indices that stand on several records: a trainer would take them for one group."""

    @classmethod
    def among(cls, groups: Sequence[Group]) -> Shared:
        """What is shared among `groups`."""
        owners: dict[str, list[int]] = {}
        for group in groups:
            for trace in dict.fromkeys(group.trace_ids):
                owners.setdefault(trace, []).append(group.group_index)
        counts = Counter(group.group_index for group in groups)
        return cls(
            {trace: found for trace, found in owners.items() if len(found) > 1},
            frozenset(index for index, n in counts.items() if n > 1),
        )


def check_group(
    group: Group, known: Mapping[str, Member], options: ConvertOptions, shared: Shared
) -> Iterator[Finding]:
    """Findings of one group; `shared` is what it has in common with others."""
    if group.group_index in shared.indices:
        message = f"several groups have the index {group.group_index}, and a trainer would compare their rewards"
        yield _finding(group, "group_twice", message, found=group.group_index)
    for trace, n in Counter(group.trace_ids).items():
        if n > 1:
            yield _finding(group, "trace_twice", f"the group holds the trace {n} times", trace_id=trace, found=n)
    for trace in group.trace_ids:
        if trace not in known:
            message = "the group holds a trace that is not among the rows; was a file of the run lost?"
            yield _finding(group, "trace_missing", message, trace_id=trace)
        if others := shared.traces.get(trace):
            message = f"the trace is in groups {others}; expected one"
            yield _finding(group, "trace_in_two_groups", message, trace_id=trace, expected=1, found=others)
    present = [known[t] for t in group.trace_ids if t in known]
    yield from _size(group, options)
    tasks = list(dict.fromkeys(m.task for m in present))
    if len(tasks) > 1:
        message = f"the group mixes {len(tasks)} tasks ({[t[0] for t in tasks]}); its rollouts must share one"
        yield _finding(group, "group_task", message, expected=1, found=[t[0] for t in tasks])
    if len(present) == len(group.trace_ids):
        yield from _sums(group, present)
    yield from _expected_sums(group, present, options)


def _size(group: Group, options: ConvertOptions) -> Iterator[Finding]:
    size, wanted = len(group.trace_ids), options.expect.group_size
    if wanted is not None and size != wanted:
        message = f"{counted(size, 'trace')}; {wanted} expected"
        yield _finding(group, "expected_group_size", message, expected=wanted, found=size)
    least = needed_size(group, options)
    if size < least or size > group.expected_size:
        message = f"{counted(size, 'trace')}, asked for {counted(group.expected_size, 'rollout')}"
        yield _finding(group, "group_size", message, expected=group.expected_size, found=size)
    elif size < group.expected_size:
        message = f"{counted(size, 'trace')}, asked for {counted(group.expected_size, 'rollout')}; min_group_size lets it go on"
        yield _finding(group, "group_size", message, severity="warning", expected=group.expected_size, found=size)


def needed_size(group: Group, options: ConvertOptions) -> int:
    """Sound traces a group must have: all of them, unless `min_group_size` is set and no reward compares rollouts."""
    if options.min_group_size is None or group.group_reward_names != ():
        return group.expected_size
    return min(options.min_group_size, group.expected_size)


def _sums(group: Group, present: Sequence[Member]) -> Iterator[Finding]:
    """Recorded counts and sums against those of the rows."""
    for name, then, found in other_sums(group, [m.rewards for m in present]):
        yield _finding(
            group,
            "group_reward_sum",
            f"reward {name!r} {_adds(found.sum if found else None, found.count if found else 0)}, but of the live traces "
            f"it {_added(then.sum if then else None, then.count if then else 0)}",
            expected=then and {"count": then.count, "sum": then.sum},
            found=found and {"count": found.count, "sum": found.sum},
        )


def other_sums(
    group: Group, rewards: Sequence[Mapping[str, float | None]]
) -> Iterator[tuple[str, RewardSum | None, RewardSum | None]]:
    """(name, as the group record says, as `rewards` of all its traces say) where the two differ."""
    now = sum_rewards(rewards)
    for name in dict.fromkeys((*group.rewards, *now)):
        then, found = group.rewards.get(name), now.get(name)
        if then is None or found is None or then.count != found.count or not _same(then.sum, found.sum):
            yield name, then, found


def _expected_sums(group: Group, present: Sequence[Member], options: ConvertOptions) -> Iterator[Finding]:
    for name, wanted in options.expect.group_reward_sum.items():
        values = [m.rewards.get(name) for m in present]
        scored = [v for v in values if v is not None]
        found = exact_sum(scored) if scored and all(map(math.isfinite, scored)) else None
        if any(m.failed for m in present) or (
            found is not None and math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9)
        ):
            continue
        yield _finding(
            group,
            "expected_group_reward_sum",
            f"reward {name!r} {_adds(found, len(scored))} of group {group.group_index}; {wanted} is expected",
            expected=wanted,
            found=found,
        )


def _adds(total: float | None, scored: int) -> str:
    """What a reward comes to over so many scored traces; no sum where nothing was scored, or one is no finite number."""
    over = counted(scored, "scored trace")
    return f"has no sum over {over}" if total is None else f"adds up to {total} over {over}"


def _added(total: float | None, scored: int) -> str:
    return _adds(total, scored).replace("has no", "had no").replace("adds", "added")


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


def _finding(group: Group, code: str, message: str, **rest: Any) -> Finding:
    return Finding(code=code, message=message, step=group.step, group_index=group.group_index, **rest)


def signal(rewards: Sequence[float | None]) -> str:
    """What a group's rewards teach: `varied`, `flat` (all equal within 1e-6), `single`, or `unscored`.

    By spread, never by standard deviation: in float32 that of seven rewards 0.7 is 6e-8, and that of one value NaN.
    """
    scored = [r for r in rewards if r is not None and math.isfinite(r)]
    if not scored:
        return "unscored"
    if len(scored) == 1:
        return "single"
    return "flat" if max(scored) - min(scored) <= 1e-6 else "varied"
