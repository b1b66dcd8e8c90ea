"""What travels beside a trace: the context it was recorded in, and the group, outcome and step records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Turn:
    """What the engine said about one accepted reply."""

    weight_version: str | None = None
    cached_tokens: int | None = None
    latency: float | None = None
    """Seconds, end to end."""
    engine: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    retries: int = 0


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where and how a trace was recorded: what a Verifiers trace does not say of itself."""

    run: str | None = None
    split: str = "train"
    eval_name: str | None = None
    step: int = 0
    attempt: int = 0
    writer: str = "main"
    group_index: int | None = None
    rollout_index: int | None = None
    try_number: int = 0
    model: str | None = None
    tokenizer: str | None = None
    sampling: Mapping[str, Any] | None = None
    renderer: Mapping[str, Any] | None = None
    verifiers_version: str | None = None
    turns: Sequence[Turn] = ()


@dataclass(frozen=True)
class RewardSum:
    """Traces scored under one reward name, and the sum of their contributions (None unless all were scored)."""

    count: int
    sum: float | None


def sum_rewards(rewards: Sequence[Mapping[str, float | None]]) -> dict[str, RewardSum]:
    """Count and correctly rounded sum per reward name over the traces of a group.

    A name that some trace lacks, or holds None for, gets no sum: null is not 0.
    """
    names = dict.fromkeys(name for mapping in rewards for name in mapping)
    result = {}
    for name in names:
        values = [v for mapping in rewards if (v := mapping.get(name)) is not None]
        complete = len(values) == len(rewards)
        result[name] = RewardSum(len(values), exact_sum(values) if complete else None)
    return result


def exact_sum(values: Sequence[float]) -> float:
    endless = [v for v in values if not math.isfinite(v)]
    if endless:
        return sum(endless)
    try:
        return math.fsum(values)
    except OverflowError:  # on the way, or of the sum
        exact = sum(map(Fraction, values))
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one task in one step."""

    split: str = "train"
    eval_name: str | None = None
    step: int = 0
    group_index: int
    task_index: int | None = None
    task_key: str | None = None
    expected_size: int
    trace_ids: tuple[str, ...]
    rewards: Mapping[str, RewardSum] = field(default_factory=dict)
    group_reward_names: tuple[str, ...] | None = None
    """Names of the task's group rewards; empty where it has none, None where that is not known."""
    first_sample_index: int | None = None

    @classmethod
    def from_records(cls, records: Sequence[Any], *, expected_size: int, group_index: int, **rest: Any) -> Group:
        """The group of `records` (Verifiers Trace objects or JSON records): the last try of each rollout, in order."""
        rows = [_summary(r) for r in records]
        first = rows[0] if rows else None
        return cls(
            group_index=group_index,
            expected_size=expected_size,
            trace_ids=tuple(r[0] for r in rows),
            rewards=sum_rewards([r[3] for r in rows]),
            **{"task_index": first and first[1], "task_key": first and first[2], **rest},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, one per field of the group record."""
        return {
            "split": self.split,
            "eval_name": self.eval_name,
            "step": self.step,
            "group_index": self.group_index,
            "task_index": self.task_index,
            "task_key": self.task_key,
            "expected_size": self.expected_size,
            "actual_size": len(self.trace_ids),
            "trace_ids": list(self.trace_ids),
            "reward_counts": {k: v.count for k, v in self.rewards.items()},
            "reward_sums": {k: v.sum for k, v in self.rewards.items()},
            "group_reward_names": None if self.group_reward_names is None else list(self.group_reward_names),
            "first_sample_index": self.first_sample_index,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Group:
        """The inverse of `to_dict`."""
        sums, names = data["reward_sums"], data.get("group_reward_names")
        return cls(
            split=data["split"],
            eval_name=data["eval_name"],
            step=data["step"],
            group_index=data["group_index"],
            task_index=data["task_index"],
            task_key=data["task_key"],
            expected_size=data["expected_size"],
            trace_ids=tuple(data["trace_ids"]),
            rewards={name: RewardSum(count, sums.get(name)) for name, count in data["reward_counts"].items()},
            group_reward_names=None if names is None else tuple(names),
            first_sample_index=data["first_sample_index"],
        )


def _summary(record: Any) -> tuple[str, int | None, str | None, dict[str, float | None]]:
    """(trace id, task index, task key, contribution by reward name) of a Trace object or a JSON record."""
    if isinstance(record, Mapping):
        task = as_mapping(record.get("task"))
        index, key = as_mapping(task.get("data")).get("idx"), task.get("key")
        rewards = {k: contribution(v) for k, v in as_mapping(record.get("rewards")).items()}
        index = index if type(index) is int else None
        return record["id"], index, key if isinstance(key, str) else None, rewards
    return record.id, record.task.data.idx, None, {k: contribution(v) for k, v in record.rewards.items()}


def contribution(value: Any) -> float | None:
    """The weighted contribution of a recorded reward: a number, or score times weight; None where it was not scored."""
    if not isinstance(value, Mapping):
        return number(value)
    score, weight = number(value.get("score")), value.get("weight")
    factor = 1.0 if weight is None else number(weight)
    return None if score is None or factor is None else score * factor


def number(value: Any) -> float | None:
    """`value` as a float where it is a number (True is 1, as Verifiers sums it); None where it is none, or too large."""
    if type(value) is float:
        return value
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """`value`, or an empty mapping where it is none."""
    return value if type(value) is dict or isinstance(value, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trace."""

    trace_id: str
    disposition: str
    reason: str | None = None
    handed_reward: Any = None
    """The reward handed over where a hook changed it, a number or a mapping; None where none did."""
    remove_sample: tuple[bool, ...] | None = None
    """One flag per Sample of the trace, where any is set."""
    logprobs: npt.NDArray[np.float32] | None = None
    """Recomputed log-probs over the responses of the trace's Samples, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rollout call of one writer."""

    split: str = "train"
    eval_name: str | None = None
    step: int = 0
    attempt: int = 0
    writer: str = "main"
    cursor: int | None = None
    next_group_index: int | None = None
    next_sample_index: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: tuple[int, ...] | None = None
    """Sample indices in the order handed over; None where nothing was handed over."""
    digest_converted: str | None = None
    digest_handed: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    started_at: float | None = None
    ended_at: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, one per field of the step record."""
        return {
            **self.__dict__,
            "options": dict(self.options),
            "batch": None if self.batch is None else list(self.batch),
            "counts": dict(self.counts),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Step:
        """The inverse of `to_dict`; keys of later minor versions are left out."""
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        batch = known.get("batch")
        return cls(**{**known, "batch": None if batch is None else tuple(batch)})
