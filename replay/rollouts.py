"""What is counted of each recorded try, as arrays: rewards, lengths, errors and versions, without its conversation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.replay.tasks import COLUMNS as TASK
from rolltape.replay.tasks import Task, are_keyed, same, task_of
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import ROW

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

COLUMNS = (
    *("step", "group_index", "task_type", "task_idx", "task_key", "task_name", "reward", "rewards", "is_truncated"),
    *("error_types", "error_messages", "num_sampled", "turn_weight_version", "disposition", "reason"),
)
"""Columns that are read: none of a token and none of a message."""

_INTEGER = re.compile(r"-?\d{1,18}")
_RULE = re.compile(r"(?P<name>.*?)\s*(?P<sign>>=|>)\s*(?P<least>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", re.DOTALL)


@dataclass(frozen=True)
class PassRule:
    """What counts as passed: a reward (None: the total) of at least `least`, or more than that."""

    name: str | None = None
    least: float = 1.0
    more: bool = False

    @classmethod
    def parse(cls, text: str) -> PassRule:
        """`NAME`, `NAME>=X`, `NAME>X`, `>=X` or `>X`; without a number 1. Raises BadInput for an empty text."""
        found = _RULE.fullmatch(text.strip())
        if found is None:
            if not text.strip():
                raise BadInput("--pass: expected NAME, NAME>=X or >=X, found nothing.")
            return cls(text.strip())
        return cls(found["name"] or None, float(found["least"]), found["sign"] == ">")

    def __str__(self) -> str:
        return f"{self.name or 'total reward'} {'>' if self.more else '>='} {self.least:g}"

    def holds(self, values: Floats) -> Flags:
        """Which of `values` pass, compared as float32: parts that add up to 0.9999999999999999 are 1."""
        with np.errstate(over="ignore"):
            found, least = values.astype(np.float32), np.float32(self.least)
        return np.asarray(found > least if self.more else found >= least)


@dataclass(frozen=True)
class Values:
    """Values of some of the tries: `rows` [m], ascending, and `values` [m]. A try that is not in it has none."""

    rows: Ints
    values: Floats

    def of(self, chosen: Flags) -> Floats:
        """Values of the tries that are chosen [n]."""
        return self.values[chosen[self.rows]]


class Rollouts:
    """`n` tries of rollouts. Made of a table with at least COLUMNS; no value is made up where one is null."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.n = table.num_rows

    @cached_property
    def step(self) -> Ints:
        """[n] step of each try."""
        return self._ints("step")

    @cached_property
    def final(self) -> Flags:
        """[n] whether the try is the last of its rollout: it was not run again."""
        return ~self._is("disposition", "retried")

    @cached_property
    def sound(self) -> Flags:
        """[n] whether a rollout came to its end: its last try, without an error, and not cancelled."""
        return self.final & ~self.failed & ~self._is("disposition", "cancelled")

    @cached_property
    def groups(self) -> tuple[Ints, int]:
        """([n] number of the group that each sound rollout is in, counted from 0, number of groups).

        -1 where it is in none, and for the other tries.
        """
        members = self.sound & self._known("group_index")
        pairs = np.stack([self.step, self._ints("group_index")], axis=1)[members]
        found, place = np.unique(pairs, axis=0, return_inverse=True)
        numbers = np.full(self.n, -1, np.int64)
        numbers[members] = place.reshape(-1)
        return numbers, len(found)

    @cached_property
    def _kinds(self) -> tuple[list[Task], Ints]:
        """(everything that rows say of their task, [n] which each row says)."""
        columns = [self.table.column(name).to_pylist() for name in TASK]
        numbers: dict[Task, int] = {}
        codes = [numbers.setdefault(task_of(*values), len(numbers)) for values in zip(*columns, strict=True)]
        return list(numbers), np.array(codes, np.int64)

    @cached_property
    def keyed(self) -> bool:
        """Whether all tasks have a key."""
        return are_keyed(self._kinds[0])

    def tasks_by(self, keyed: bool) -> tuple[list[Task], Ints]:
        """(tasks in order of first appearance, [n] place of each try's task), told apart by their keys or without."""
        kinds, codes = self._kinds
        found, places = same(kinds, keyed)
        return found, np.array(places, np.int64)[codes]

    @cached_property
    def _tasks(self) -> tuple[list[Task], Ints]:
        return self.tasks_by(self.keyed)

    @property
    def tasks(self) -> list[Task]:
        """Every task, in order of first appearance."""
        return self._tasks[0]

    @property
    def task(self) -> Ints:
        """[n] place of each try's task in `tasks`."""
        return self._tasks[1]

    # -- what came out

    @cached_property
    def reward(self) -> Values:
        """Total rewards of the tries that were scored; NaN and infinities among them."""
        return self._values("reward")

    @cached_property
    def rewards(self) -> dict[str, Values]:
        """Contributions by reward name, sorted by name."""
        column = _joined(self.table.column("rewards"))
        if not len(column):
            return {}
        offsets = column.offsets.to_numpy().astype(np.int64)
        rows = np.repeat(np.arange(self.n), np.diff(offsets))
        keys = column.keys[offsets[0] : offsets[-1]].dictionary_encode()
        items = column.items[offsets[0] : offsets[-1]]
        known, values = _flags(items.is_valid()), _floats(items)
        codes = keys.indices.to_numpy(zero_copy_only=False)
        found = {}
        for code, name in enumerate(keys.dictionary.to_pylist()):
            mine = (codes == code) & known
            found[str(name)] = Values(rows[mine], values[mine])
        return dict(sorted(found.items()))

    def scored(self, rule: PassRule) -> Values:
        """The values that `rule` looks at."""
        if rule.name is None:
            return self.reward
        return self.rewards.get(rule.name, Values(np.zeros(0, np.int64), np.zeros(0)))

    @cached_property
    def sampled(self) -> Ints:
        """[n] tokens that the model sampled; 0 where that is not known."""
        return self._ints("num_sampled", missing=0)

    @cached_property
    def truncated(self) -> Values:
        """1 where a try was cut off, 0 where it was not."""
        return self._values("is_truncated")

    @cached_property
    def failed(self) -> Flags:
        """[n] whether the try ended in an error, or had one."""
        return np.asarray(_joined(self.table.column("error_types")).value_lengths().fill_null(0).to_numpy() > 0)

    @cached_property
    def errors(self) -> Counter[tuple[str, str]]:
        """Class and message of the last error of each try that has one, counted."""
        rows = pa.array(np.flatnonzero(self.failed))
        types, messages = (self.table.column(n).take(rows).to_pylist() for n in ("error_types", "error_messages"))
        return Counter((t[-1] or "unknown", (m[-1] or "") if m else "") for t, m in zip(types, messages, strict=True))

    @cached_property
    def reasons(self) -> Counter[tuple[str, str]]:
        """Disposition and reason of each try that was dropped for another reason than its error, counted."""
        told = zip(self.table.column("disposition").to_pylist(), self.table.column("reason").to_pylist(), strict=True)
        return Counter((d, r) for d, r in told if r and d not in (None, "emitted", "eval", "error", "retried"))

    # -- weight versions

    @cached_property
    def _turn_versions(self) -> tuple[list[str], Ints, Ints]:
        """(versions, [t] row of each turn that has one, [t] place of its version)."""
        column = _joined(self.table.column("turn_weight_version"))
        offsets = column.offsets.to_numpy().astype(np.int64)
        rows = np.repeat(np.arange(self.n), np.diff(offsets))
        coded = column.values[offsets[0] : offsets[-1]].dictionary_encode()
        known = _flags(coded.is_valid())
        codes = coded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return [str(v) for v in coded.dictionary.to_pylist()], rows[known], codes[known]

    @cached_property
    def versions(self) -> list[str]:
        """Weight versions that produced turns, in order: as numbers where all are."""
        found = set(self._turn_versions[0])
        return sorted(found, key=int) if all(map(_INTEGER.fullmatch, found)) else sorted(found)

    @cached_property
    def lag(self) -> Floats:
        """Weight versions by which the oldest turn of a try is behind the newest turn of its step.

        Of tries with versions, and of steps all of whose versions are whole numbers.
        """
        names, rows, codes = self._turn_versions
        if not len(rows):
            return np.zeros(0)
        whole = np.array([bool(_INTEGER.fullmatch(name)) for name in names])
        number = np.array([int(name) if ok else 0 for name, ok in zip(names, whole, strict=True)], np.int64)
        steps, place = np.unique(self.step[rows], return_inverse=True)
        newest, sound = np.full(len(steps), np.iinfo(np.int64).min), np.ones(len(steps), np.bool_)
        np.maximum.at(newest, place, number[codes])
        np.logical_and.at(sound, place, whole[codes])
        first = np.unique(rows, return_index=True)[1]
        lag = newest[place[first]] - np.minimum.reduceat(number[codes], first)
        return np.asarray(lag[sound[place[first]]], np.float64)

    # -- columns

    def _ints(self, name: str, missing: int = 0) -> Ints:
        column = self.table.column(name)
        numbers: Ints = column.fill_null(missing).to_numpy().astype(np.int64)
        return numbers

    def _known(self, name: str) -> Flags:
        return _flags(self.table.column(name).is_valid())

    def _is(self, name: str, text: str) -> Flags:
        return _flags(pc.fill_null(pc.equal(self.table.column(name), text), False))

    def _values(self, name: str) -> Values:
        known = self._known(name)
        return Values(np.flatnonzero(known), _floats(self.table.column(name))[known])


def concat(tables: Iterable[pa.Table], columns: Sequence[str] = COLUMNS) -> pa.Table:
    """Tables of rows as one with `columns`; a column that an older file lacks is null."""
    found = list(tables)
    if not found:
        return pa.schema([ROW.arrow.field(name).remove_metadata() for name in columns]).empty_table()
    return pa.concat_tables(found, promote_options="default")


def _joined(column: pa.ChunkedArray) -> Any:
    """A list column as one array; none of those here comes near what 32-bit offsets take."""
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _flags(values: Any) -> Flags:
    return np.asarray(
        values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values.to_numpy(), bool
    )


def _floats(values: Any) -> Floats:
    filled = pc.fill_null(pc.cast(values, pa.float64()), 0.0)
    return np.asarray(filled.to_numpy(), np.float64)
