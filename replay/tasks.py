"""Which rows are of the same task, and what the task is called: one rule for statistics, comparisons and notebooks.

Tasks are the same by their key where all have one, else by class and index, else by class and name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("task_type", "task_key", "task_idx", "task_name")
"""Columns of a row that say which task it is of, in the order that `task_of` takes them."""


@dataclass(frozen=True)
class Task:
    """One task of a taskset."""

    type: str | None
    """Its class."""
    key: str | None
    index: int | None
    name: str | None
    """What people call it: its name, else its key or index."""


def task_of(type_: str | None, key: str | None, index: int | None, name: str | None) -> Task:
    """The task that these columns of a row say."""
    return Task(type_, key, index, name or key or (str(index) if index is not None else None))


def are_keyed(tasks: Iterable[Task]) -> bool:
    """Whether all of `tasks` have a key, by which they are told apart then."""
    return all(task.key is not None for task in tasks)


def identity_of(task: Task, keyed: bool) -> Any:
    """What makes tasks the same: their key where all have one, else class and index, else class and name; None without any."""
    if keyed:
        return task.key
    if task.index is not None:
        return task.type, task.index
    return None if task.name is None else (task.type, task.name)


def same(tasks: Sequence[Task], keyed: bool) -> tuple[list[Task], list[int]]:
    """([t] tasks that differ, each as it first came, [n] place of each of `tasks` among them)."""
    places: dict[Any, int] = {}
    found: list[Task] = []
    codes = []
    for task in tasks:
        identity = identity_of(task, keyed)
        codes.append(places.setdefault(task if identity is None else identity, len(places)))
        if len(found) < len(places):
            found.append(task)
    return found, codes


def labels(tasks: Sequence[Task], called: Callable[[Task], str]) -> list[str]:
    """[t] names of tasks that differ, no two alike: where a name repeats its index stands behind it, else its key or class."""
    names = [called(task) for task in tasks]
    for tell in (_index, _key, _class):
        counts = Counter(names)
        more = [tell(task) if counts[name] > 1 else None for task, name in zip(tasks, names, strict=True)]
        names = [name if x is None else f"{name} ({x})" for name, x in zip(names, more, strict=True)]
    counts = Counter(names)
    return [f"{name} [{i}]" if counts[name] > 1 else name for i, name in enumerate(names)]


def _index(task: Task) -> str | None:
    return None if task.index is None or task.name == str(task.index) else str(task.index)


def _key(task: Task) -> str | None:
    return None if task.key == task.name else task.key


def _class(task: Task) -> str | None:
    return task.type
