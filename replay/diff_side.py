"""One side of a comparison: what a run was recorded with, what became of its tries, and numbers of each rollout."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.replay.chosen import chosen_commits
from rolltape.replay.rollouts import COLUMNS, Flags, Rollouts, Values, concat
from rolltape.replay.run import Run
from rolltape.schema.commits import Commit

_COUNTS = ("num_tokens", "num_turns", "num_branches")
_SETTINGS = ("model", "tokenizer", "sampling", "renderer", "verifiers_version")
_COLUMNS = (*COLUMNS, *_COUNTS, *_SETTINGS, "metrics")
_ELSEWHERE = ("run",)
"""Recorded settings that say where a run lies, not how it was recorded."""

FAILED = "error_rate"
"""The one quantity that is of the rollouts that failed, too."""
IDENTITY = ("model", "tokenizer", "taskset")


class Measured(Rollouts):
    """Rollouts with their metrics and counts."""

    @cached_property
    def metrics(self) -> dict[str, Values]:
        """Metrics by name, sorted by name."""
        return Rollouts(pa.table({"rewards": self.table.column("metrics")})).rewards  # a MAP of the same type

    def count_of(self, name: str) -> Values:
        """A column of counts."""
        return self._values(name)


@dataclass(frozen=True)
class Side:
    """The newest attempt of the chosen steps of one run."""

    run: Run
    split: str
    commits: Sequence[Commit]
    rollouts: Measured

    @property
    def name(self) -> str:
        """What people call the run: its folder."""
        return str(self.run.paths.root)

    @property
    def steps(self) -> list[int]:
        """Steps, in order."""
        return sorted({c.part.step for c in self.commits})

    @cached_property
    def quantities(self) -> dict[str, Values]:
        """Numbers of the rollouts by name; a rollout that is not among the values of one has none (null is not 0)."""
        rows = self.rollouts
        every = np.arange(rows.n)
        sampled = np.flatnonzero(rows.sampled > 0)
        found = {
            "reward": rows.reward,
            **{f"rewards.{name}": values for name, values in rows.rewards.items()},
            **{f"metrics.{name}": values for name, values in rows.metrics.items()},
            FAILED: Values(every, rows.failed.astype(np.float64)),
            "truncated_rate": rows.truncated,
            "sampled_tokens": Values(sampled, rows.sampled[sampled].astype(np.float64)),
            "tokens": rows.count_of("num_tokens"),
            "turns": rows.count_of("num_turns"),
            "branches": rows.count_of("num_branches"),
        }
        return {name: _chosen(values, self.among(name)) for name, values in found.items()}

    def among(self, quantity: str) -> Flags:
        """[n] whether a try is one of the rollouts that `quantity` is a mean of.

        Those that came to their end (`Rollouts.sound`), as in `rolltape stats`; for the share of those that failed every last
        try.
        """
        return self.rollouts.final if quantity == FAILED else self.rollouts.sound

    @cached_property
    def coverage(self) -> dict[str, int]:
        """Tries started, ended by disposition (`recorded` where none is known), and lost."""
        ended = Counter(d or "recorded" for d in self.rollouts.table.column("disposition").to_pylist())
        lost = sum(c.step.counts.get("lost", 0) for c in self.commits)
        started = sum(c.step.counts.get("started", 0) or c.file.rows for c in self.commits)
        return {"started": started, **dict(sorted(ended.items())), "lost": lost}

    @cached_property
    def totals(self) -> dict[str, int]:
        """Steps, groups, tries, rollouts and those of them that failed or were cancelled, and tokens over all tries."""
        table = self.rollouts.table
        tokens = {name: pc.sum(table.column(name)).as_py() or 0 for name in ("num_tokens", "num_sampled")}
        return {
            "steps": len(self.steps),
            "groups": sum(len(c.groups) for c in self.commits),
            "tries": self.rollouts.n,
            "rollouts": int(self.rollouts.final.sum()),
            "failed": int((self.rollouts.final & ~self.rollouts.sound).sum()),
            "tokens": tokens["num_tokens"],
            "sampled_tokens": tokens["num_sampled"],
        }

    @cached_property
    def identity(self) -> dict[str, str | None]:
        """Model, tokenizer and taskset: of the run, else of its rows where they agree."""
        return {name: self.run.info.get(name) or _only(self.settings.get(name, [])) for name in IDENTITY}

    @cached_property
    def settings(self) -> dict[str, list[str]]:
        """Every value that each setting had, as text: of the attempts, of the conversion, of the rows, and versions."""
        found: dict[str, dict[str, None]] = {}
        for number in sorted({c.part.attempt for c in self.commits}):
            attempt = self.run.attempts.get(number)
            for part in () if attempt is None else (attempt.settings, {"versions": attempt.versions}):
                _flatten(part, "", found)
        for options in {json.dumps(c.step.options, sort_keys=True) for c in self.commits}:
            _flatten(json.loads(options), "convert.", found)
        for name in _SETTINGS:
            for text in self.rollouts.table.column(name).unique().to_pylist():
                if text is not None:
                    known = json.loads(text) if name in ("sampling", "renderer") else text
                    _flatten({name: known}, "", found)
        return {key: list(values) for key, values in found.items() if key not in _ELSEWHERE}


def read_side(
    run: Run, split: str, steps: Sequence[int] | None = None, told: Callable[[int], None] = lambda _: None
) -> Side:
    """Read what a comparison needs of `run`, no column of a token or a message.

    `told` is called with the number of files read. Raises BadInput for a split or step that was not recorded, Damaged where a
    file or commit does not read back.
    """
    commits = chosen_commits(run, [split] if split != "train" else [], steps)
    tables = []
    for done, commit in enumerate(commits, 1):
        tables.append(concat(run.part_batches(commit, _COLUMNS), _COLUMNS))
        told(done)
    return Side(run, split, commits, Measured(concat(tables, _COLUMNS)))


def _chosen(values: Values, among: Flags) -> Values:
    keep = among[values.rows]
    return Values(values.rows[keep], values.values[keep])


def _flatten(value: Any, name: str, found: dict[str, dict[str, None]]) -> None:
    """Leaves of nested settings by dotted name, as text. A mapping without entries is no setting."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(inner, f"{name}{'.' if name and not name.endswith('.') else ''}{key}", found)
        return
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    found.setdefault(name, {})[text] = None


def _only(values: Sequence[str]) -> str | None:
    return values[0] if len(values) == 1 else None
