"""Recorded training steps as the batches they were, and evaluations as their rollouts. One step is in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rolltape.replay.checks.findings import Finding
from rolltape.replay.convert import SampleGroup, convert, convert_alone, flatten
from rolltape.replay.digest import digest
from rolltape.replay.housekeeping.pruned import refuse_pruned
from rolltape.replay.options import BranchPolicy, ConvertOptions
from rolltape.replay.outcomes import finish, read_outcomes
from rolltape.replay.run import Run
from rolltape.replay.sample import Sample
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, CheckFailed
from rolltape.schema.fields import ROW
from rolltape.schema.records import Group, Step


@dataclass(frozen=True)
class Batch:
    """A recorded training step, converted again."""

    step: Step
    groups: list[SampleGroup]
    """As handed to the trainer."""
    table: pa.Table
    """The rows it was made of."""
    warnings: list[Finding] = field(default_factory=list)
    """What is to be known of all of it."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Traces that gave no Sample, by what became of them; of an import, and under another policy, by what conversion says."""

    @property
    def samples(self) -> list[Sample]:
        """All Samples, in order."""
        return [sample for group in self.groups for sample in flatten(group)]


def batches(run: Run, step: int, branch_policy: BranchPolicy | None = None) -> list[Batch]:
    """The batches of a training step, one for each writer that recorded it.

    `branch_policy`: instead of the recorded one. Then they are what converting gives and not what trained: what hooks of the
    trainer changed fits no other Samples.

    Raises BadInput where the step was not recorded, Damaged where its file is not what was committed, and CheckFailed where
    its rows no longer convert to the Samples that trained.
    """
    return [_batch(run, commit, branch_policy) for commit in run.commits("train", step)]


def _batch(run: Run, commit: Commit, branch_policy: BranchPolicy | None) -> Batch:
    table, step = read_part(run, commit), commit.step
    recorded = ConvertOptions.from_dict(step.options)
    options = recorded.with_branches(branch_policy)
    conversion = convert(table, commit.groups, options)
    rounded = [f for f in conversion.findings if f.code == "logprobs_rounded"]
    if options != recorded:
        left_out = _left_out(table.drop_columns(["disposition"]), conversion.groups, conversion.dropped)
        return Batch(step, conversion.groups, table, rounded, left_out)
    outcomes = read_outcomes(table)
    groups = finish(conversion.groups, outcomes, step) if outcomes else conversion.groups  # an import has none
    for what, then, now in (
        ("converted", step.digest_converted, conversion.groups),
        ("handed over", step.digest_handed, groups),
    ):
        if then is not None and then != digest(now):
            raise CheckFailed(
                f"step {step.step}: its rows give other Samples than were {what} then; `rolltape verify {run.paths.root}` "
                "names what differs."
            )
    return Batch(step, groups, table, rounded, _left_out(table, groups, conversion.dropped))


def _left_out(table: pa.Table, groups: Iterable[SampleGroup], dropped: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    kept = {sample.routing_key for group in groups for sample in flatten(group)}
    ids = table["trace_id"].to_pylist()
    known = table["disposition"].to_pylist() if "disposition" in table.column_names else [None] * len(ids)
    return dict(
        Counter(
            fate or dropped.get(id, ("unknown", ""))[0] for id, fate in zip(ids, known, strict=True) if id not in kept
        ).most_common()
    )


def read_part(run: Run, commit: Commit) -> pa.Table:
    """All rows of a committed part. Raises BadInput where their tokens were pruned."""
    refuse_pruned(run, [commit])
    tables = list(run.part_batches(commit))
    return pa.concat_tables(tables, promote_options="default") if tables else ROW.arrow.empty_table()


# -- evaluations


@dataclass(frozen=True)
class Evaluated:
    """One rollout of an evaluation."""

    trace_id: str
    reward: float | None
    """None where it failed, or nothing was scored."""
    failed: bool
    truncated: bool
    samples: list[Sample]
    """Empty where nothing was sampled, or a check failed."""


def evaluated(
    table: pa.Table, groups: Iterable[Group], options: ConvertOptions, reward_key: str | None
) -> list[Evaluated]:
    """The rollouts of an evaluation: groups in order, rollouts in order; their Samples numbered from 0.

    `reward_key` names one of the rewards, or `reward` for the total; None takes the total. Raises BadInput where a
    rollout that did not fail has no such reward.
    """
    names = ("trace_id", "reward", "rewards", "error_types", "is_truncated")
    rows = {r["trace_id"]: r for r in table.select(list(names)).to_pylist(maps_as_pydicts="strict")}
    made, _ = convert_alone(table, options)
    result, index = [], 0
    for group in groups:
        for trace in group.trace_ids:
            row, samples = rows.get(trace, _LOST), made.get(trace, [])
            first = index
            for sample in samples:
                sample.group_index, sample.index = group.group_index, index
                sample.rollout_id = first if options.branch_policy == "siblings" else None
                index += 1
            failed = bool(row["error_types"])
            reward = None if failed else _named_reward(row, reward_key)
            result.append(Evaluated(trace, reward, failed, bool(row["is_truncated"]), samples))
    return result


_LOST: Mapping[str, Any] = {"error_types": ["lost"], "is_truncated": False}
"""What is known of a rollout whose row is not there."""


def _named_reward(row: Mapping[str, Any], key: str | None) -> float | None:
    total: float | None = row["reward"]
    named: dict[str, float | None] = {**(row["rewards"] or {}), "reward": total}
    if key is None or key == "reward":
        return total
    if key not in named:
        raise BadInput(f"trace {row['trace_id']}: no reward is named {key!r}; there are {sorted(named)}.")
    return named[key]
