"""Where two batches of Samples differ: the first place, and how much there is beside it.

Samples are matched by trace and branch, so that one that is missing, added or out of order is named as that, and the fields of
the others are still compared. What counts is what enters a digest (see `digest.py`); log-probs are compared as float32.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from rolltape.replay.convert import SampleGroup, flatten
from rolltape.replay.digest import DIGEST_FIELDS, canonical, sample_parts
from rolltape.replay.sample import FIELDS, Sample

ARRAYS = {"tokens": "<i4", "loss_mask": "u1", "rollout_log_probs": "<f4"}
"""Fields compared as arrays, and their types."""
_COMPARED = tuple(name for name in FIELDS if name in ARRAYS or name in DIGEST_FIELDS)

Key = tuple[str | None, int | None, int]
"""Trace id, branch index, and which of several of the two."""


class _Word:
    """Stands in the place of a value and is no text of the batch."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


NOTHING = _Word("nothing")
"""Where one side holds no value at all, which is not null."""
_SAMPLE = _Word("a Sample")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place where two batches differ."""

    field: str
    """A field of Sample with the path inside it; or `sample` (missing, or not expected), `order` or `nesting` of the batch."""
    group_index: int | None = None
    trace_id: str | None = None
    branch: int | None = None
    position: int | None = None
    """Index in the list, or of the character in a long text; None where the field is one value."""
    token: int | None = None
    """Index of the token that the position belongs to, for lists over the response."""
    expected: Any = NOTHING
    now: Any = NOTHING

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values without those that say nothing."""
        values = {k: v for k, v in self.__dict__.items() if k in ("expected", "now") and v is not NOTHING}
        place = {k: v for k, v in self.__dict__.items() if k not in ("expected", "now") and v is not None}
        return place | {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items() if v is not _SAMPLE}

    def __str__(self) -> str:
        names = (("group", self.group_index), ("trace", self.trace_id), ("branch", self.branch))
        place = ", ".join(f"{name} {value}" for name, value in names if value is not None)
        at = "" if self.position is None else f" at position {self.position}"
        at += "" if self.token is None else f" (token {self.token})"
        values = f"expected {shown(self.expected, self.position)}, now {shown(self.now, self.position)}"
        return f"{place or 'the batch'}: {self.field}{at}: {values}"


@dataclass(frozen=True)
class Comparison:
    """How two batches differ."""

    first: Difference
    """In the order of the expected batch, and of the fields of a Sample."""
    samples: int
    """Samples that differ, are missing, or were not expected."""
    of: int
    """Samples of both batches."""
    fields: Mapping[str, int]
    """How many Samples differ in each field."""

    @property
    def summary(self) -> str:
        """How much differs, in a line."""
        counts = ", ".join(f"{name} {n}" for name, n in self.fields.items())
        return f"{self.samples} of {self.of} Samples differ{f' ({counts})' if counts else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "first": self.first.to_dict(), "fields": dict(self.fields)}


def compare(expected: Sequence[SampleGroup], now: Sequence[SampleGroup]) -> Comparison | None:
    """How the batch `now` differs from the `expected` one; None where a trainer would see the same."""
    branches = _common_branches(expected, now)
    before, after = _by_key(expected, branches), _by_key(now, branches)
    fields: Counter[str] = Counter()
    different = 0
    for key, sample in before.items():
        names = [] if key not in after else [name for name in _COMPARED if _differs(name, sample, after[key])]
        fields.update(names)
        different += bool(names) or key not in after
    different += sum(key not in before for key in after)
    first = _first(before, after) or _nesting(expected, now)
    return None if first is None else Comparison(first, different, len({*before, *after}), dict(fields))


def _first(before: Mapping[Key, Sample], after: Mapping[Key, Sample]) -> Difference | None:
    """The first difference: of a Sample's place in the batch, or inside it."""
    for then, now in zip_longest(before, after):
        if then is not None and then == now:
            if (found := _inside(then, before[then], after[now])) is not None:
                return found
        elif then is not None and then not in after:
            return _place("sample", then, before[then], expected=_SAMPLE)
        elif now not in before:
            return _place("sample", now, after[now], now=_SAMPLE)
        else:  # both are there, in another order
            names = [{"trace": key[0], "branch": _branch(s[key])} for key, s in ((then, before), (now, after))]
            return _place(
                "order", then, before[then], position=list(before).index(then), expected=names[0], now=names[1]
            )
    return None


def _inside(key: Key, before: Sample, after: Sample) -> Difference | None:
    """The first field that differs, in the order of Sample's fields."""
    if sample_parts(before) == sample_parts(after):
        return None
    name = next(name for name in _COMPARED if _differs(name, before, after))
    if name in ARRAYS:
        position, then, now = _in_arrays(_array(name, before), _array(name, after))
        token = None if name == "tokens" else len(before.tokens) - before.response_length + position
        return _place(name, key, before, position=position, token=token, expected=then, now=now)
    path, at, then, now = _descend(json.loads(_text(name, before)), json.loads(_text(name, after)), name)
    return _place(path, key, before, position=at, expected=then, now=now)


def _place(field: str, key: Key, sample: Sample, **rest: Any) -> Difference:
    return Difference(field=field, group_index=sample.group_index, trace_id=key[0], branch=_branch(sample), **rest)


def _differs(name: str, before: Sample, after: Sample) -> bool:
    if name in ARRAYS:
        return bool(_array(name, before).tobytes() != _array(name, after).tobytes())
    return _text(name, before) != _text(name, after)


def _array(name: str, sample: Sample) -> Any:
    return np.asarray(getattr(sample, name) or (), ARRAYS[name])


def _text(name: str, sample: Sample) -> str:
    """A field's value as it enters the digest."""
    return canonical(sample.status.value if name == "status" else getattr(sample, name))


def _in_arrays(before: Any, after: Any) -> tuple[int, Any, Any]:
    """(position, value before, value after) of the first difference; bits decide, so that NaN equals NaN."""
    n = min(len(before), len(after))
    bits = f"u{before.itemsize}"
    unequal = np.flatnonzero(before[:n].view(bits) != after[:n].view(bits))
    at = int(unequal[0]) if len(unequal) else n
    then, now = (array[at] if at < len(array) else NOTHING for array in (before, after))
    return at, then, now


def _descend(before: Any, after: Any, path: str) -> tuple[str, int | None, Any, Any]:
    """(path, position, value before, value after) of the first difference inside two JSON values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            then, now = before.get(name, NOTHING), after.get(name, NOTHING)
            if _unequal(then, now):
                step = f".{name}" if name.replace("_", "").isalnum() else f"[{json.dumps(name)}]"
                return _descend(then, now, path + step)
    if isinstance(before, list) and isinstance(after, list):
        for i, (then, now) in enumerate(zip_longest(before, after, fillvalue=NOTHING)):
            if _unequal(then, now):
                return _descend(then, now, f"{path}[{i}]")
    if isinstance(before, str) and isinstance(after, str):
        at = next(i for i, (a, b) in enumerate(zip_longest(before, after)) if a != b)
        return path, at if max(len(before), len(after)) > 2 * _AROUND else None, before, after
    return path, None, before, after


def _unequal(a: Any, b: Any) -> bool:
    return a is not b and (a is NOTHING or b is NOTHING or canonical(a) != canonical(b))


def _nesting(expected: Sequence[SampleGroup], now: Sequence[SampleGroup]) -> Difference | None:
    """The first group whose Samples are the same, in lists of another shape."""
    for i, (then, after) in enumerate(zip_longest(map(_shape, expected), map(_shape, now), fillvalue=NOTHING)):
        if then != after:
            return Difference(field="nesting", position=i, expected=then, now=after)
    return None


def _shape(group: SampleGroup) -> list[int] | int:
    """Samples of a flat group, or of each rollout of a nested one."""
    return [len(item) for item in group if isinstance(item, list)] or len(group)


# -- keys


def _common_branches(*batches: Sequence[SampleGroup]) -> frozenset[str | None]:
    """Traces whose Samples are told apart by their branch: those of which both batches hold a branch in common."""
    known: list[set[tuple[str | None, int | None]]] = [
        {(s.routing_key, _branch(s)) for group in batch for s in flatten(group)} for batch in batches
    ]
    return frozenset(trace for trace, _ in set.intersection(*known))


def _by_key(groups: Sequence[SampleGroup], branches: frozenset[str | None]) -> dict[Key, Sample]:
    seen: Counter[tuple[str | None, int | None]] = Counter()
    result: dict[Key, Sample] = {}
    for sample in (s for group in groups for s in flatten(group)):
        name = (sample.routing_key, _branch(sample) if sample.routing_key in branches else None)
        result[*name, seen[name]] = sample
        seen[name] += 1
    return result


def _branch(sample: Sample) -> int | None:
    """The branch of the trace that a Sample says it is."""
    said = sample.metadata.get("verifiers") if isinstance(sample.metadata, dict) else None
    index = said.get("branch_index") if isinstance(said, dict) else None
    return index if isinstance(index, int) else None


_AROUND = 30
"""Characters of a long text that are shown before and after the place."""


def shown(value: Any, position: int | None = None) -> str:
    """A value as it stands in a sentence: long texts are cut to what lies around `position`."""
    if isinstance(value, (np.generic, _Word)):
        return str(value)
    if isinstance(value, str) and len(value) > 2 * _AROUND:
        begin, end = max(0, (position or 0) - _AROUND), (position or 0) + _AROUND
        cut = json.dumps(value[begin:end], ensure_ascii=True)
        return ("…" if begin else "") + cut + ("…" if end < len(value) else "")
    text = canonical(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


__all__ = ["ARRAYS", "NOTHING", "Comparison", "Difference", "compare", "shown"]
