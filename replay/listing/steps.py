"""How many steps a run was started for, as far as the settings of its attempts say, and whether anything in it ended well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rolltape.replay.printing.words import counted
from rolltape.replay.rollouts import Rollouts, concat
from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.paths import Part

_FATE = ("error_types", "disposition")
_UNSOUND = ("started", "error", "retried", "cancelled", "lost")
"""Counts of a commit that are not of rollouts that came to their end."""


def asked_steps(run: Run, newest: set[Part], *, training: bool = True) -> int | None:
    """Training steps, or evaluations, that `run` has once its newest attempt has recorded all that it was started for.

    `newest`: parts that count. None where no attempt says a number, as of an import.
    """
    mine = [p for p in newest if (p.split == "train") == training]
    have = {(p.split, p.step) for p in mine}
    for attempt in reversed(list(run.attempts.values())):
        settings = attempt.settings if isinstance(attempt.settings, Mapping) else {}
        number, last = _whole(settings.get("steps")), _trainers(settings)
        if number and bool(settings.get("eval")) != training:
            kept, dropped = (c.part for c in run.all_commits), (d.part for d in run.contents.dropped)
            recorded = [
                p for p in (*kept, *dropped) if p.attempt == attempt.number and (p.split == "train") == training
            ]
            done = {(p.split, p.step) for p in recorded}  # also what was recorded again since
            return len(have) + max(0, number - len(done))
        if last and training:
            return len(have | {("train", step) for step in range(attempt.start_step, last)}) or None
    return None


def _trainers(settings: Mapping[str, Any]) -> int | None:
    """Miles' `num_rollout`, the number behind its last step: told by its rollout function, or by its adapter."""
    given = settings.get("miles")
    return _whole((given if isinstance(given, Mapping) else settings).get("num_rollout"))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def cut_short(run: Run, newest: Sequence[Commit]) -> str | None:
    """A sentence where the last step of the newest attempt is not whole: its writer was stopped, gave up, or died.

    `newest`: commits that count.
    """
    attempt = max((c.part.attempt for c in newest), default=0)
    settings = run.attempts[attempt].settings if attempt in run.attempts else {}
    live = isinstance(settings, Mapping) and _whole(settings.get("steps")) is not None
    mine = [c for c in newest if c.part.attempt == attempt and "-late" not in c.part.writer]
    last = {(c.part.split, c.part.writer): c for c in sorted(mine, key=lambda c: c.part.step)}
    for commit in last.values():
        part, counts = commit.part, commit.step.counts
        begun, asked = _groups(commit) if live else (0, 0)
        if begun < asked or counts.get("interrupted") or (live and counts.get("cancelled")):
            where = f"step {part.step}" if part.split == "train" else "its evaluation"
            ended = f": {len(commit.groups)} of {counted(asked, 'task group')} ended" if asked else ""
            return f"{where} was cut short{ended}."
    return None


def _groups(commit: Commit) -> tuple[int, int]:
    """Task groups that `rolltape record` began in a step, and those it was to have; (0, 0) where that is not known."""
    try:
        indices = set(commit.score("group_index").to_pylist()) - {None}
    except (KeyError, ValueError):
        return 0, 0
    behind = commit.step.next_group_index
    return (0, 0) if behind is None or not indices else (len(indices), behind - min(indices))


def none_ended(commits: Sequence[Commit]) -> int:
    """Number of tries where it is known that none of them came to its end without an error; else 0. No row is read."""
    tries = 0
    for commit in commits:
        counts, table = commit.step.counts, scores_of(commit, _FATE)
        if table is not None and Rollouts(concat([table], _FATE)).sound.any():
            return 0
        if table is None and commit.file.rows and (not counts or any(counts[name] for name in {*counts} - {*_UNSOUND})):
            return 0
        tries += counts.get("started") or commit.file.rows
    return tries


def scores_of(commit: Commit, columns: Sequence[str]) -> pa.Table | None:
    """Columns of a part's rows as its commit repeats them; None where it does not."""
    try:
        return pa.table({name: commit.score(name) for name in columns})
    except (KeyError, ValueError):
        return None
