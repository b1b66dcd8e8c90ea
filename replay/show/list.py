"""The traces that `rolltape show` lists: those of a step, or of a run those that answer a few questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolltape.replay.run import Run
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import DISPOSITIONS

COLUMNS = (
    *("trace_id", "group_index", "rollout_index", "try_number", "task_name", "task_key", "task_idx", "reward"),
    *("num_turns", "num_sampled", "stop_condition", "is_truncated", "error_types", "disposition", "reason"),
)
DROPPED = "dropped"
"""Stands for every outcome but `emitted` and `eval`."""
SORTS = {"reward": "reward", "turns": "num_turns", "sampled": "num_sampled", "tokens": "num_tokens"}
"""What traces can be sorted by, and the column of each."""
_ORDER = ("step", "group_index", "rollout_index", "try_number")
_IS_SCORED = "reward IS NOT NULL AND NOT isnan(reward)"


@dataclass(frozen=True)
class Wanted:
    """Which traces are listed. Raises BadInput for an outcome or an order that there is not."""

    tasks: Sequence[str] = ()
    """Name, key or index of their tasks; empty for all."""
    outcomes: Sequence[str] = ()
    """What became of them: dispositions, or DROPPED; empty for all."""
    errors: bool = False
    """Only those that have an error."""
    where: str | None = None
    """A condition in SQL on the columns of the view `traces`."""
    sort: str | None = None
    """A name of SORTS, the smallest first, or with - before it the largest; those without a value last."""
    limit: int | None = None

    def __post_init__(self) -> None:
        known = [*DISPOSITIONS, DROPPED]
        if unknown := [o for o in self.outcomes if _plain(o) not in known]:
            raise BadInput(f"--outcome {unknown[0]!r}: expected one of {', '.join(known)}.")
        if self.sort is not None and self.sort.removeprefix("-") not in SORTS:
            names = ", ".join(SORTS)
            raise BadInput(f"--sort {self.sort!r}: expected {names}, or one of them with - before it: largest first.")
        if self.where is not None and not self.where.strip():
            raise BadInput("--where is empty; expected a condition in SQL, such as 'reward < 0.5'.")

    @property
    def chooses(self) -> bool:
        """Whether only some traces are wanted."""
        return bool(self.tasks or self.outcomes or self.errors or self.where is not None)

    def said(self) -> list[str]:
        """The conditions, in a few words each."""
        told = [f"task {' or '.join(self.tasks)}"] if self.tasks else []
        told += [f"outcome {' or '.join(map(_plain, self.outcomes))}"] if self.outcomes else []
        told += ["with an error"] if self.errors else []
        return told + ([f"where {self.where}"] if self.where is not None else [])


@dataclass(frozen=True)
class Chosen:
    """Traces of one split, in the order they are listed in."""

    split: str
    steps: Sequence[int]
    """Those that were looked at."""
    rows: Sequence[Mapping[str, Any]]
    """With COLUMNS and `step`."""
    found: int
    """How many there are, of which `rows` are the first."""
    total: int
    """Traces of the steps that were looked at."""
    without: int
    """Those of them whose outcome is not known, where outcomes were asked for."""


def choose(
    run: Run, splits: Sequence[str], steps: Sequence[int] | None, wanted: Wanted, attempt: int | None = None
) -> Iterator[Chosen]:
    """The traces of each of `splits`: of `steps`, else of all where only some traces are wanted, else of the last one.

    Raises BadInput for a step that was not recorded and a condition that DuckDB does not take.
    """
    for split in splits:
        recorded = sorted({c.part.step for c in run.commits(split, attempt=attempt)})
        looked = sorted(set(steps)) if steps else recorded if wanted.chooses else recorded[-1:]
        commits = run.commits(split, looked, attempt=attempt)  # raises for a step that is not there
        if not commits:
            continue
        rows = list(_rows(run, split, looked, wanted, attempt))
        total = sum(c.file.rows for c in commits)
        without = sum(c.file.rows for c in commits if not c.step.counts) if wanted.outcomes else 0
        yield Chosen(split, looked, rows[: wanted.limit], len(rows), total, without)


def _rows(
    run: Run, split: str, steps: Sequence[int], wanted: Wanted, attempt: int | None
) -> Iterator[Mapping[str, Any]]:
    from rolltape.replay.sql.connection import ask

    query = _Query()
    query.add(f"step IN ({', '.join(map(str, steps))})")
    if wanted.tasks:
        query.any_of(("task_name", "task_key", "CAST(task_idx AS VARCHAR)"), wanted.tasks)
    if wanted.outcomes:
        names = list(map(_plain, wanted.outcomes))
        if DROPPED in names:
            names += [d for d in DISPOSITIONS if d not in ("emitted", "eval")]
        query.any_of(("disposition",), names)
    if wanted.errors:
        query.add("len(error_types) > 0")
    if wanted.where is not None:
        query.add(f"(\n{wanted.where}\n)")  # a comment at its end ends there
    text = f"SELECT step, {', '.join(COLUMNS)} FROM traces WHERE {query.text} ORDER BY {_order(wanted.sort)}"
    found = ask(run, text, parameters=query.parameters, split=split, attempt=attempt)
    yield from found.table().to_pylist()


@dataclass
class _Query:
    """Conditions, and the values in them."""

    conditions: list[str] = field(default_factory=list)
    parameters: list[Any] = field(default_factory=list)

    def add(self, condition: str) -> None:
        self.conditions.append(condition)

    def any_of(self, columns: Sequence[str], values: Sequence[str]) -> None:
        """One of `columns` is one of `values`."""
        marks = ", ".join("?" * len(values))
        self.add(f"({' OR '.join(f'{column} IN ({marks})' for column in columns)})")
        self.parameters += list(values) * len(columns)

    @property
    def text(self) -> str:
        return " AND ".join(self.conditions)


def _order(sort: str | None) -> str:
    usual = [f"{name} NULLS FIRST" for name in _ORDER]
    if sort is None:
        return ", ".join(usual)
    name, largest = SORTS[sort.removeprefix("-")], sort.startswith("-")
    value = f"CASE WHEN {_IS_SCORED} THEN reward END" if name == "reward" else name
    return ", ".join([f"{value} {'DESC' if largest else 'ASC'} NULLS LAST", *usual])


def _plain(outcome: str) -> str:
    """An outcome as it is recorded: people may write `failed check` or `failed-check`."""
    return outcome.strip().lower().replace(" ", "_").replace("-", "_")
