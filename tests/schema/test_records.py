"""The records beside a trace: reward sums in which null is not 0, and round trips through plain JSON values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_records import record, recorded
from schema_strategies import GENERATED
from verifiers.v1.trace import WireTrace

from rolltape.schema import DISPOSITIONS, GROUP, STEP, Group, RewardSum, Step
from rolltape.schema.records import contribution, number, sum_rewards

INF, NAN = math.inf, math.nan


# -- sums


def test_a_reward_that_one_trace_lacks_has_a_count_and_no_sum() -> None:
    rewards: list[dict[str, float | None]] = [{"a": 1.0, "b": 0.5}, {"a": None, "b": 0.25}, {"b": 0.25, "c": 0.0}]
    assert sum_rewards(rewards) == {"a": RewardSum(1, None), "b": RewardSum(3, 1.0), "c": RewardSum(1, None)}


def test_zero_is_a_score_and_null_is_none() -> None:
    assert sum_rewards([{"a": 0.0}, {"a": -0.0}]) == {"a": RewardSum(2, 0.0)}
    assert sum_rewards([{"a": None}]) == {"a": RewardSum(0, None)}
    assert sum_rewards([{}, {}]) == {}
    assert sum_rewards([]) == {}


def test_names_keep_the_order_in_which_they_appear() -> None:
    assert list(sum_rewards([{"b": 1.0}, {"a": 1.0, "b": 1.0}, {"c": 1.0}])) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1] * 10, 1.0),  # adding one by one gives 0.9999999999999999
        ([1e16, 1.0, -1e16], 1.0),
        ([INF, 1.0], INF),
        ([-INF, 1.0], -INF),
        ([INF, -INF], NAN),
        ([NAN, INF], NAN),
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], INF),
        ([-1e308, -1e308], -INF),
        ([1e308, 1e308, -INF], -INF),
    ],
)
def test_sums_are_correctly_rounded_and_end_in_infinity(values: list[float], expected: float) -> None:
    for order in (values, values[::-1]):
        (found,) = sum_rewards([{"a": v} for v in order]).values()
        assert found.count == len(values)
        assert repr(found.sum) == repr(expected)


@GENERATED
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_a_sum_is_the_exact_one_rounded_once_whatever_the_order(values: list[float]) -> None:
    exact = sum(map(Fraction, values))
    try:
        expected = float(exact)
    except OverflowError:
        expected = INF if exact > 0 else -INF
    assert sum_rewards([{"a": v} for v in values])["a"].sum == expected
    assert sum_rewards([{"a": v} for v in sorted(values)])["a"].sum == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(False), 0.0),
        (None, None),
        ("1.0", None),
        ([1.0], None),
        (1j, None),
        (10**400, None),
        ({"score": 0.5, "weight": 2.0}, 1.0),
        ({"score": 0.5}, 0.5),
        ({"score": 0.5, "weight": None}, 0.5),
        ({"score": None, "weight": 1.0}, None),
        ({"score": 0.5, "weight": "2"}, None),
        ({"score": [], "weight": 1.0}, None),
        ({}, None),
    ],
)
def test_a_contribution_is_a_number_or_not_scored(value: Any, expected: float | None) -> None:
    assert contribution(value) == expected
    assert type(contribution(value)) is type(expected)


def test_a_number_is_never_a_guess() -> None:
    assert [number(x) for x in (-0.0, NAN, "5", b"5", None)] == [
        -0.0,
        pytest.approx(NAN, nan_ok=True),
        None,
        None,
        None,
    ]


# -- groups


def test_a_group_of_records_is_the_group_of_their_trace_objects() -> None:
    records = recorded("0.2.0/group_rewards.jsonl")[:4]
    objects = [WireTrace.model_validate(r) for r in records]
    group = Group.from_records(records, group_index=5, expected_size=4, step=2, first_sample_index=40)
    assert group == Group.from_records(objects, group_index=5, expected_size=4, step=2, first_sample_index=40)
    assert group.trace_ids == tuple(r["id"] for r in records)
    assert group.task_index == records[0]["task"]["data"]["idx"]
    assert group.rewards["fastest"] == RewardSum(4, 0.5)
    assert group.rewards["most_concise"] == RewardSum(4, 1.0)


def test_the_groups_of_a_race_have_one_winner_each() -> None:
    records = recorded("0.2.0/group_rewards.jsonl")
    groups = [Group.from_records(records[i : i + 4], group_index=i // 4, expected_size=4) for i in (0, 4, 8)]
    assert [g.rewards["fastest"].sum for g in groups] == [0.5, 0.5, 0.5]
    assert [g.rewards["most_concise"].sum for g in groups] == [1.0, 0.5, 0.5]


def test_a_failed_rollout_leaves_its_group_without_a_sum() -> None:
    group = Group.from_records([record(id="a"), record(id="b", rewards={})], group_index=0, expected_size=2)
    assert group.rewards == {"ok": RewardSum(1, None)}


def test_scores_of_later_releases_count_by_their_weight() -> None:
    rewards = [
        {"a": {"score": 1.0, "weight": 0.5}, "b": None},
        {"a": {"score": 0.5, "weight": 0.5}, "b": {"score": 1.0}},
    ]
    group = Group.from_records(
        [record(id=str(i), rewards=r) for i, r in enumerate(rewards)], group_index=0, expected_size=2
    )
    assert group.rewards == {"a": RewardSum(2, 0.75), "b": RewardSum(1, None)}


def test_a_group_may_be_empty_or_of_broken_records() -> None:
    assert Group.from_records([], group_index=0, expected_size=4).trace_ids == ()
    broken = [
        {"id": "a"},
        {"id": "b", "task": "x", "rewards": [1]},
        {"id": "c", "task": {"data": [1], "key": 5}, "rewards": {"r": "x"}},
        {"id": "d", "task": {"data": {"idx": "7"}}, "rewards": None},
    ]
    group = Group.from_records(broken, group_index=0, expected_size=4)
    assert (group.trace_ids, group.task_index, group.task_key) == (("a", "b", "c", "d"), None, None)
    assert group.rewards == {"r": RewardSum(0, None)}


def test_the_task_of_a_group_can_be_given() -> None:
    group = Group.from_records([record()], group_index=0, expected_size=1, task_index=9, task_key="k", split="eval")
    assert (group.task_index, group.task_key, group.split) == (9, "k", "eval")


REWARDS = {"a.b": RewardSum(2, 0.5), "": RewardSum(1, None), "n": RewardSum(2, NAN), "\ud800": RewardSum(2, -INF)}


@pytest.mark.parametrize("names", [None, (), ("fastest", "most_concise")])
def test_a_group_survives_json(names: tuple[str, ...] | None) -> None:
    group = Group(
        split="eval",
        eval_name="math",
        step=2**40,
        group_index=2**40,
        task_index=-1,
        task_key="k",
        expected_size=4,
        trace_ids=("a", "b"),
        rewards=REWARDS,
        group_reward_names=names,
        first_sample_index=0,
    )
    data = json.loads(json.dumps(group.to_dict()))
    assert repr(Group.from_dict(data)) == repr(group)
    assert list(data) == list(GROUP.by_name)
    assert data["actual_size"] == 2
    assert repr(Group.from_dict({**data, "later": 1})) == repr(group), "a later minor version may say more"
    assert Group.from_dict(replace(group, rewards={}).to_dict()).rewards == {}


def test_a_step_survives_json() -> None:
    step = Step(
        split="eval",
        eval_name="math",
        step=3,
        attempt=1,
        writer="w",
        cursor=12,
        next_group_index=5,
        next_sample_index=41,
        options={"branch_policy": "siblings", "min_group_size": None},
        batch=(3, 1, 2),
        digest_converted="aa",
        digest_handed="bb",
        counts={"started": 4, "emitted": 3, "error": 1},
        started_at=1.5,
        ended_at=2.5,
    )
    for given_step in (step, Step(), Step(batch=())):
        data = json.loads(json.dumps(given_step.to_dict()))
        assert Step.from_dict(data) == given_step
        assert Step.from_dict({**data, "later": 1}) == given_step
        assert list(data) == list(STEP.by_name)


def test_every_disposition_is_explained() -> None:
    assert {"emitted", "eval", "error", "retried", "filtered"} <= DISPOSITIONS.keys()
    assert all(text and not text.endswith(".") for text in DISPOSITIONS.values())
