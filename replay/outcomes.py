"""What the trainer did after conversion, applied again: rewards by its hooks, removals, recomputed log-probs, order.

Live, the outcomes are built from what the hooks changed (`outcomes_of`); offline they are read from the rows. `finish`
makes the same batch of both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.replay.convert import Conversion, SampleGroup, flatten
from rolltape.replay.sample import Sample
from rolltape.schema.errors import BadInput
from rolltape.schema.records import Outcome, Step
from rolltape.schema.table import needs, reward_of


def outcomes_of(conversion: Conversion, emitted: str = "emitted") -> list[Outcome]:
    """The outcome of every converted or dropped trace, before any hook: `emitted`, or why not."""
    kept = dict.fromkeys(s.routing_key or "" for g in conversion.groups for s in flatten(g))
    lost = [Outcome(trace_id=t, disposition=d, reason=r) for t, (d, r) in conversion.dropped.items()]
    return [*(Outcome(trace_id=t, disposition=emitted) for t in kept), *lost]


def read_outcomes(table: pa.Table) -> list[Outcome]:
    """The outcomes that the rows of `table` carry. Raises BadInput where it lacks their columns."""
    names = ("trace_id", "disposition", "reason", "handed_reward", "remove_sample", "recomputed_logprobs")
    needs(table, names, "read_outcomes")
    return [
        Outcome(
            trace_id=row["trace_id"],
            disposition=row["disposition"],
            reason=row["reason"],
            handed_reward=None if row["handed_reward"] is None else reward_of(row["handed_reward"]),
            remove_sample=None if row["remove_sample"] is None else tuple(row["remove_sample"]),
            logprobs=None if row["recomputed_logprobs"] is None else np.array(row["recomputed_logprobs"], np.float32),
        )
        for row in table.select(list(names)).to_pylist()
        if row["disposition"] is not None
    ]


def finish(samples: Sequence[SampleGroup], outcomes: Iterable[Outcome], step: Step | None = None) -> list[SampleGroup]:
    """The batch as the trainer got it: groups of Samples with the outcomes applied, in the order handed over.

    `samples`: the groups of a Conversion (they are not changed). A trace whose outcome is not `emitted`, or that has none,
    is left out. `step.batch` gives the order; without it groups keep theirs. Raises BadInput where samples of one rollout
    would get different rewards, where an outcome does not fit its samples, or where `step.batch` names samples that were
    not converted.
    """
    by_trace = {o.trace_id: o for o in outcomes if o.disposition == "emitted"}
    groups = [_apply(group, by_trace) for group in samples]
    groups = [g for g in groups if g]
    check_rewards(groups)
    return groups if step is None or step.batch is None else _ordered(groups, step.batch)


def _apply(group: SampleGroup, outcomes: Mapping[str, Outcome]) -> SampleGroup:
    nested = bool(group) and isinstance(group[0], list)
    rollouts: dict[str, list[Sample]] = {}
    for sample in flatten(group):
        if sample.routing_key in outcomes:
            rollouts.setdefault(sample.routing_key or "", []).append(sample)
    changed = [_changed(siblings, outcomes[trace]) for trace, siblings in rollouts.items()]
    return changed if nested else [s for siblings in changed for s in siblings]


def _changed(siblings: list[Sample], outcome: Outcome) -> list[Sample]:
    """Copies of one rollout's samples with its outcome applied."""
    result = [replace(s) for s in siblings]
    if outcome.handed_reward is not None:
        for sample in result:
            sample.reward = outcome.handed_reward
    if outcome.remove_sample is not None:
        _fits(outcome, "remove_sample flags", len(outcome.remove_sample), len(result))
        for sample, remove in zip(result, outcome.remove_sample, strict=True):
            sample.remove_sample = remove
    if outcome.logprobs is not None:
        _fits(outcome, "recomputed log-probs", len(outcome.logprobs), sum(s.response_length for s in result))
        start = 0
        for sample in result:
            end = start + sample.response_length
            sample.rollout_log_probs = outcome.logprobs[start:end].tolist()
            start = end
    return result


def _fits(outcome: Outcome, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise BadInput(
            f"trace {outcome.trace_id}: its outcome holds {found} {what}, its samples take {expected}; the outcome belongs "
            "to another conversion of the trace."
        )


def _ordered(groups: list[SampleGroup], batch: Sequence[int]) -> list[SampleGroup]:
    place = {index: i for i, index in enumerate(batch)}
    found = {s.index for g in groups for s in flatten(g)}
    if len(place) != len(batch):
        twice = sorted(index for index, n in Counter(batch).items() if n > 1)
        raise BadInput(f"the step's batch names samples {twice[:5]} more than once; expected each once.")
    if found != set(batch):
        missing, surplus = sorted(set(batch) - found, key=str)[:5], sorted(found - set(batch), key=str)[:5]
        raise BadInput(
            f"the step's batch and its converted samples differ: batch only {missing}, converted only {surplus}; "
            "`rolltape verify` shows why."
        )

    def key(item: Any) -> int:
        return min(place[s.index or 0] for s in (item if isinstance(item, list) else [item]))

    inner: list[Any] = [sorted(group, key=key) for group in groups]
    return sorted(inner, key=lambda group: key(flatten(group)))


def check_rewards(groups: Sequence[SampleGroup]) -> None:
    """Refuse a batch in which samples of one rollout disagree on the reward. Raises BadInput naming trace and branches."""
    for group in groups:
        first: dict[str | None, Sample] = {}
        for sample in flatten(group):
            other = first.setdefault(sample.routing_key, sample)
            if not _equal(other.reward, sample.reward):
                branches = [s.metadata.get("verifiers", {}).get("branch_index") for s in (other, sample)]
                raise BadInput(
                    f"trace {sample.routing_key}: branches {branches[0]} and {branches[1]} carry the rewards "
                    f"{other.reward} and {sample.reward}; a rollout has one reward, equal on all its samples."
                )


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or json.dumps(a, sort_keys=True, default=str) == json.dumps(b, sort_keys=True, default=str)
