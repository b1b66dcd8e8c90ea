"""Statistics as tables that fit a screen: a line a step, a stretch of steps or a task, curves, and what there is to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from rolltape.replay.printing.console import printable, table
from rolltape.replay.printing.fitting import left_out, no_room
from rolltape.replay.printing.words import (
    MISSING,
    alike,
    count,
    counted,
    decimal,
    duration,
    end_of,
    is_level,
    of_steps,
    percent,
    shortened,
    sparkline,
)
from rolltape.replay.stats import Spread, Stats, Summary
from rolltape.replay.tasks import Task, labels
from rolltape.schema.fields import DISPOSITIONS

_FIGURES = 7 * 8
"""Characters of the figures beside a curve."""
_KINDS = 5
"""Kinds of errors, and of other reasons, that are shown."""


@dataclass(frozen=True)
class _Column:
    """A column of a table of summaries. Those with the largest `spare` are left out first where there is no room; 0: never."""

    name: str
    cell: Callable[[Summary], str]
    spare: int = 0


def render(stats: Stats, *, width: int, rows: int, by_task: bool = False) -> RenderableType:
    """Everything there is to see, in tables of at most `rows` lines and `width` columns."""
    if not stats.total.tries:
        return Text(f"No traces in {stats.split}.")
    parts: list[RenderableType] = []
    if by_task:
        tasks = stats.tasks
        parts += _lines_of(stats, tasks[:rows], _task_columns(stats), width)
        if len(tasks) > rows:
            parts.append(_say(f"… and {counted(len(tasks) - rows, 'task')} with higher rewards (--all lists them)"))
    else:
        buckets = stats.buckets(rows)
        parts += _lines_of(stats, buckets, _step_columns(stats), width)
        parts += ["", *_curves(stats, width)]
    return Group(*parts, "", *_notes(stats, width))


def heading(stats: Stats) -> str:
    """What was counted, in a line."""
    total = stats.total
    tries = f"{counted(total.tries, 'try', 'tries')} with {counted(total.sampled, 'sampled token')}"
    counts = f"{counted(total.rollouts, 'rollout')}, {tries}"
    took = f" in {duration(total.seconds)}" if total.seconds is not None else ""
    steps = f", {of_steps(total.steps)}" if total.steps else ""
    return f"{stats.split}{steps}: {counts}{took}"


# -- a line a step or task


def _step_columns(stats: Stats) -> list[_Column]:
    return [
        _Column("step", lambda s: _range(s.steps)),
        _Column("n", lambda s: count(s.rollouts), 8),
        *_common(stats),
        _Column("errors", lambda s: count(s.errors), 4),
        _Column("dropped", lambda s: count(sum(s.dropped.values())), 5),
        _Column("tok/s", lambda s: count(s.tokens_per_second), 10),
        _Column("lag", lambda s: _lag(s.lag), 11),
    ]


def _task_columns(stats: Stats) -> list[_Column]:
    tasks = stats.rollouts.tasks
    apart = len({task.type for task in tasks}) > 1
    called = _called(tasks)
    types = [_Column("type", lambda s: end_of(printable((s.task and s.task.type) or MISSING, one_line=True), 24))]
    return [
        _Column("task", lambda s: end_of(printable(called[s.task], one_line=True), 24)),
        *(types if apart else ()),
        _Column("n", lambda s: count(s.rollouts), 8),
        _Column("by step", lambda s: sparkline(s.curve, 12) if len(s.curve) > 1 else "", 9),
        *_common(stats),
        _Column("errors", lambda s: count(s.errors), 4),
    ]


def _called(tasks: Sequence[Task]) -> dict[Task | None, str]:
    """What each task is called. The column beside tells classes apart, so names have to differ within a class only."""
    found: dict[Task | None, str] = {None: MISSING}
    for type_ in {task.type for task in tasks}:
        mine = [task for task in tasks if task.type == type_]
        found.update(zip(mine, labels(mine, lambda task: task.name or MISSING), strict=True))
    return found


def _common(stats: Stats) -> list[_Column]:
    ks = stats.ks
    at = [
        _Column(f"pass@{k}", lambda s, k=k: decimal(s.pass_at[k], 2), 1 if k == ks[-1] else 7)  # type: ignore[misc]
        for k in dict.fromkeys((*ks[:1], *ks[-1:]))
    ]
    return [
        _Column("reward", lambda s: decimal(s.reward.mean)),
        _Column("sd", lambda s: decimal(_sd(s.reward)), 9),
        _Column("flat", lambda s: f"{s.flat}/{s.groups}" if s.groups else MISSING, 2),
        *at,
        _Column("length", lambda s: count(s.length.mean), 3),
        _Column("p95", lambda s: count(s.length.p95), 12),
        _Column("cut", lambda s: percent(s.truncated, s.truncated_of), 6),
    ]


def _sd(spread: Spread) -> float | None:
    """The deviation; 0 where the values differ by no more than rounding."""
    level = spread.low is not None and spread.high is not None and is_level(spread.low, spread.high)
    return 0.0 if level else spread.sd


def _range(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}" if steps else MISSING


def _lag(lag: tuple[int, int] | None) -> str:
    return MISSING if lag is None else str(lag[0]) if lag[0] == lag[1] else f"{lag[0]}–{lag[1]}"


def _lines_of(
    stats: Stats, lines: Sequence[Summary], columns: Sequence[_Column], width: int
) -> Iterator[RenderableType]:
    """The table, and what its heads mean. A column that says nothing in any line is left out."""
    cells = {c: [c.cell(s) for s in lines] for c in columns}
    shown = [c for c in columns if c.name in ("step", "task") or set(cells[c]) - {MISSING, ""}]
    gone: list[str] = []
    while _width(shown, cells) > width and any(c.spare for c in shown):
        spare = max(shown, key=lambda c: c.spare)
        shown.remove(spare)
        gone.append(spare.name)
    names = [c.name for c in shown]
    right = [n for n in names if n not in ("task", "type", "by step")]
    yield table(
        "", names, [[cells[c][i] for c in shown] for i in range(len(lines))], right, fold=("task", "type"), dense=True
    )
    if legend := _legend(stats, names):
        yield _say(legend)
    if gone:
        yield _say(no_room(gone))


def _width(columns: Sequence[_Column], cells: dict[_Column, list[str]]) -> int:
    return sum(max(map(len, (c.name, *cells[c]))) + 2 for c in columns) - 2


def _legend(stats: Stats, names: Sequence[str]) -> str:
    meanings = {
        "n": "rollouts without error",
        "flat": "groups whose rewards are all equal",
        "pass": f"{stats.rule}",
        "length": "tokens sampled a rollout",
        "cut": "truncated",
        "lag": "in weight versions",
    }
    heads = {name.partition("@")[0] for name in names}
    return "; ".join(f"{name}: {meaning}" for name, meaning in meanings.items() if name in heads)


# -- curves


def _curves(stats: Stats, width: int) -> Iterator[RenderableType]:
    """Rewards by name and what else moves, a line each: the curve over all steps, its ends, and all values."""
    steps, total = stats.steps, stats.total
    first, last = (steps[0], steps[-1]) if steps else (total, total)
    called = {name: f"  {shortened(printable(name, one_line=True), 22)}" for name in total.rewards}
    curve = min(max(width - max(map(len, ("reward", *called.values()))) - _FIGURES - 4, 8), 40)
    rows: list[list[str]] = []

    def spread(name: str, of: Callable[[Summary], Spread], digits: int = 3) -> None:
        line = sparkline([of(s).mean for s in steps], curve)
        whole = of(total)
        figures = (of(first).mean, of(last).mean, whole.mean, _sd(whole), whole.low, whole.high)
        rows.append([name, line, *(decimal(f, digits) for f in figures), count(whole.count)])

    def share(name: str, of: Callable[[Summary], float | None]) -> None:
        figures = (of(first), of(last), of(total))
        if any(f is not None for f in figures):
            rows.append([name, sparkline([of(s) for s in steps], curve), *map(decimal, figures), "", "", "", ""])

    spread("reward", lambda s: s.reward)
    for name, shown in called.items():
        spread(shown, lambda s, name=name: _reward(s, name))  # type: ignore[misc]
    spread("length", lambda s: s.length, 0)
    for k in dict.fromkeys((*stats.ks[:1], *stats.ks[-1:])):
        share(f"pass@{k}", lambda s, k=k: s.pass_at[k])  # type: ignore[misc]
    share("flat", lambda s: s.flat / s.groups if s.groups else None)
    share("cut", lambda s: s.truncated / s.truncated_of if s.truncated_of else None)
    names = ["", "curve", "first", "last", "mean", "sd", "low", "high", "values"]
    if len(steps) < 2:
        names, rows = ["", *names[4:]], [[row[0], *row[4:]] for row in rows if row[5]]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    gone = left_out(columns, width, (("low", "high"), "sd", "values", "first", "last", "curve"), {"": 16})
    right = [n for n in columns if n not in ("", "curve")]
    yield table("", list(columns), list(zip(*columns.values(), strict=True)), right, cut=("",), dense=True)
    if gone:
        yield _say(no_room(gone))


# -- what there is to know


def _notes(stats: Stats, width: int) -> list[Text]:
    """Coverage, errors by kind, and whatever is not in the numbers above."""
    errors = {f"{type_}: {message}" if message else type_: n for (type_, message), n in stats.rollouts.errors.items()}
    reasons = {f"{why.replace('_', ' ')}: {reason}": n for (why, reason), n in stats.rollouts.reasons.items()}
    lines = [_coverage(stats.total), *_kinds("error", errors, width), *_kinds("dropped", reasons, width)]
    lines += _not_counted(stats)
    if stats.trouble:
        words = {"not_durable": "not durable in time", "lost_before": "given up before they could be written"}
        lines.append(
            "trouble  " + ", ".join(f"{counted(n, 'try', 'tries')} {words[name]}" for name, n in stats.trouble.items())
        )
    return [_say(line) for line in lines]


def _kinds(head: str, messages: Mapping[str, int], width: int) -> Iterator[str]:
    merged = alike(messages)
    for kind in merged[:_KINDS]:
        yield f"{head:<9}{kind.line(width - 9)}"
    if len(merged) > _KINDS:
        more = sum(kind.count for kind in merged[_KINDS:])
        kinds = counted(len(merged) - _KINDS, "other kind")
        yield f"{head:<9}and {more:,} more, of {kinds} (--json lists them)"


def _coverage(total: Summary) -> str:
    counts = dict(total.coverage)
    started, lost = counts.pop("started", total.tries), counts.pop("lost", 0)
    known = [name for name in (*DISPOSITIONS, *counts) if counts.get(name)]
    ended = " + ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in dict.fromkeys(known))
    return f"tries    {started:,} started = {ended or 'none ended'}{f' + {lost:,} lost' if lost else ''}"


def _not_counted(stats: Stats) -> Iterator[str]:
    """Values that are in no mean: rewards that are no number, and rollouts without any."""
    for name in (None, *stats.total.rewards):
        whole, called = _reward(stats.total, name), "total" if name is None else name
        if whole.not_finite:
            steps = [n for s in stats.steps if _reward(s, name).not_finite for n in s.steps]
            yield (
                f"NaN      {called}: {whole.not_finite} of {whole.count + whole.not_finite} values are NaN or infinite, "
                f"in {of_steps(steps)}; left out"
            )
        if whole.missing:
            of, have = counted(stats.total.rollouts, "rollout"), "has" if whole.missing == 1 else "have"
            yield f"unscored {called}: {whole.missing:,} of {of} {have} none; left out, not 0"
    best = _reward(stats.total, stats.rule.name).high
    if best is not None and not stats.rule.holds(np.array([best])):
        yield f"pass     no {stats.rule}: the largest is {decimal(best)}; --pass NAME>=X says what counts as passed"
    largest = stats.ks[-1] if stats.ks else 0
    fewer = stats.total.pass_groups.get(1, 0) - stats.total.pass_groups.get(largest, 0)
    if fewer:
        yield f"pass@{largest}   left out of it: {counted(fewer, 'group')} with fewer than {largest} scored rollouts"


def _reward(summary: Summary, name: str | None) -> Spread:
    """The spread of one reward, or of the total."""
    return summary.reward if name is None else summary.rewards.get(name, Spread(0))


def _say(line: str) -> Text:
    return Text(printable(line), style="dim" if line.startswith(("n:", "no room", "…")) else "", overflow="fold")
