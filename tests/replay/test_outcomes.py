"""What the trainer's hooks changed, applied again by `finish`."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from replay_build import Record, by_task, converted, group, reply, said, samples, trace, turn

from rolltape.replay import (
    Conversion,
    ConvertOptions,
    Status,
    convert,
    digest,
    finish,
    flatten,
    outcomes_of,
    read_outcomes,
)
from rolltape.replay.convert import SampleGroup
from rolltape.schema import Outcome, Step, encode, read_parquet, with_outcomes, write_parquet
from rolltape.schema.errors import BadInput

FORK = (said(None, [1]), reply(0, [2], [3, 4]), said(1, [5]), reply(2, [], [6]), said(1, [7]), reply(4, [8], [9, 10]))


def two_groups() -> Conversion:
    records = [turn(id="a"), turn(id="b"), turn(id="c", idx=1), turn(id="d", idx=1)]
    return converted(records, by_task(records))


def forked() -> Conversion:
    records = [trace(*FORK, id="a"), turn(id="b")]
    return converted(records, branch_policy="siblings")


def ids(groups: list[SampleGroup]) -> list[list[str | None]]:
    return [[s.routing_key for s in flatten(g)] for g in groups]


def emitted(*traces: str, **changes: Any) -> list[Outcome]:
    return [Outcome(trace_id=t, disposition="emitted", **changes) for t in traces]


def test_outcomes_of_a_conversion_hand_everything_over_as_it_is() -> None:
    conversion = two_groups()
    outcomes = outcomes_of(conversion)
    assert [(o.trace_id, o.disposition) for o in outcomes] == [(t, "emitted") for t in "abcd"]
    assert finish(conversion.groups, outcomes) == conversion.groups


def test_outcomes_of_a_conversion_name_what_was_dropped_and_why() -> None:
    records = [turn(id="a"), turn(id="bad", idx=1, errors=["TaskError: no"])]
    outcomes = outcomes_of(converted(records, by_task(records)))
    assert [(o.trace_id, o.disposition, o.reason) for o in outcomes] == [
        ("a", "emitted", None),
        ("bad", "error", "TaskError: no"),
    ]


@pytest.mark.parametrize("disposition", ["filtered", "leftover", "error", "eval"])
def test_a_trace_that_was_not_emitted_is_left_out(disposition: str) -> None:
    conversion = two_groups()
    outcomes = [*emitted("a", "c", "d"), Outcome(trace_id="b", disposition=disposition)]
    assert ids(finish(conversion.groups, outcomes)) == [["a"], ["c", "d"]]


def test_a_trace_without_an_outcome_is_left_out_and_an_empty_group_with_it() -> None:
    assert ids(finish(two_groups().groups, emitted("c"))) == [["c"]]


def test_a_reward_that_a_hook_gave_replaces_the_recorded_one_on_every_sibling() -> None:
    made = finish(forked().groups, [*emitted("a", handed_reward=-3.5), *emitted("b")])
    assert [s.reward for g in made for s in flatten(g)] == [-3.5, -3.5, 1.0]


@pytest.mark.parametrize("reward", [0.0, {"ok": 2.0, "reward": 2.0}, [1, 2], "text"])
def test_a_handed_reward_is_taken_whatever_it_is(reward: Any) -> None:
    made = finish(two_groups().groups, [*emitted("a", handed_reward=reward), *emitted("b", "c", "d")])
    assert flatten(made[0])[0].reward == reward


def test_remove_flags_go_to_the_samples_one_by_one() -> None:
    made = finish(forked().groups, [*emitted("a", remove_sample=(False, True)), *emitted("b")])
    assert [s.remove_sample for g in made for s in flatten(g)] == [False, True, False]


def test_recomputed_log_probs_are_cut_at_the_response_of_each_sample() -> None:
    conversion = forked()
    lengths = [s.response_length for s in samples(conversion)[:2]]
    values = np.arange(sum(lengths), dtype=np.float32)
    made = finish(conversion.groups, [*emitted("a", logprobs=values), *emitted("b")])
    first, second, other = (s for g in made for s in flatten(g))
    assert first.rollout_log_probs == list(range(lengths[0]))
    assert second.rollout_log_probs == list(range(lengths[0], sum(lengths)))
    assert other.rollout_log_probs == [-0.25, -0.5, -0.75]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remove_sample": (True,)}, "1 remove_sample flags, its samples take 2"),
        ({"logprobs": np.zeros(3, np.float32)}, "3 recomputed log-probs, its samples take"),
    ],
)
def test_an_outcome_of_another_conversion_is_refused(changes: Any, words: str) -> None:
    with pytest.raises(BadInput, match=f"trace a: its outcome holds {words}"):
        finish(forked().groups, emitted("a", **changes))


def test_finish_leaves_what_it_was_given_as_it_was() -> None:
    conversion = forked()
    before = copy.deepcopy(conversion.groups)
    length = sum(s.response_length for s in samples(conversion)[:2])
    outcomes = emitted("a", handed_reward=5.0, remove_sample=(True, True), logprobs=np.zeros(length, np.float32))
    made = finish(conversion.groups, outcomes, Step(batch=(1, 0)))
    for sample in (s for g in made for s in flatten(g)):
        sample.reward = 9.0
        sample.status = Status.FAILED
    assert conversion.groups == before


# -- order


def test_the_recorded_batch_gives_the_order_of_groups_and_of_samples_in_them() -> None:
    made = finish(two_groups().groups, emitted(*"abcd"), Step(batch=(3, 2, 0, 1)))
    assert ids(made) == [["d", "c"], ["a", "b"]]


def test_siblings_stay_together_in_the_order_of_the_batch() -> None:
    made = finish(forked().groups, emitted("a", "b"), Step(batch=(2, 0, 1)))
    assert [[[s.index for s in r] for r in g if isinstance(r, list)] for g in made] == [[[2], [0, 1]]]


@pytest.mark.parametrize("step", [None, Step()])
def test_without_a_recorded_batch_groups_keep_their_order(step: Step | None) -> None:
    assert ids(finish(two_groups().groups, emitted(*"abcd"), step)) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((0, 1, 2), r"batch only \[\], converted only \[3\]"),
        ((0, 1, 2, 3, 9), r"batch only \[9\], converted only \[\]"),
        ((0, 1, 2, 3, 3), r"samples \[3\] more than once"),
        ((), r"converted only \[0, 1, 2, 3\]"),
    ],
)
def test_a_batch_that_is_not_what_was_converted_is_refused(batch: tuple[int, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        finish(two_groups().groups, emitted(*"abcd"), Step(batch=batch))


def test_an_empty_batch_of_nothing_is_nothing() -> None:
    assert finish(two_groups().groups, [], Step(batch=())) == []


# -- through a file


def test_outcomes_come_back_from_the_rows_as_they_were(tmp_path: Any) -> None:
    records = [turn(id=t) for t in "abcd"]
    outcomes = [
        Outcome(trace_id="a", disposition="emitted", handed_reward={"ok": 1.5, "reward": -0.0}),
        Outcome(
            trace_id="b", disposition="emitted", remove_sample=(True,), logprobs=np.array([0.1, math.nan, -1], "f4")
        ),
        Outcome(trace_id="c", disposition="filtered", reason="zero variance"),
    ]
    write_parquet(tmp_path / "t.parquet", [with_outcomes(encode(records), outcomes)])
    back = read_outcomes(read_parquet(tmp_path / "t.parquet"))
    assert [(o.trace_id, o.disposition, o.reason) for o in back] == [
        ("a", "emitted", None),
        ("b", "emitted", None),
        ("c", "filtered", "zero variance"),
    ]
    assert back[0].handed_reward == {"ok": 1.5, "reward": -0.0}
    assert back[1].remove_sample == (True,)
    assert back[1].logprobs is not None
    assert back[1].logprobs.tobytes() == np.array([0.1, math.nan, -1], "f4").tobytes()


def test_a_batch_that_was_handed_over_comes_back_from_rows_groups_and_step(tmp_path: Any) -> None:
    records = [trace(*FORK, id="a"), turn(id="b"), turn(id="c", idx=1), turn(id="d", idx=1)]
    options = ConvertOptions(branch_policy="siblings")
    live = convert(encode(records), by_task(records), options, start=10)
    lengths = {s.routing_key: s.response_length for s in samples(live)}
    outcomes = [
        Outcome(trace_id="a", disposition="emitted", handed_reward=0.25, remove_sample=(False, True)),
        Outcome(trace_id="b", disposition="filtered"),
        Outcome(trace_id="c", disposition="emitted", logprobs=np.full(lengths["c"], -0.125, np.float32)),
        Outcome(trace_id="d", disposition="emitted"),
    ]
    handed = finish(live.groups, outcomes)[::-1]
    step = Step(batch=tuple(s.index or 0 for g in handed for s in flatten(g)), digest_handed=digest(handed))
    write_parquet(tmp_path / "t.parquet", [with_outcomes(encode(records[::-1]), outcomes)])
    table = read_parquet(tmp_path / "t.parquet")
    again = finish(convert(table, live.records, options).groups, read_outcomes(table), step)
    assert again == handed
    assert digest(again) == step.digest_handed


# -- what a digest sees


def one_sample() -> list[SampleGroup]:
    record: Record = turn(data={"answer": "4"}, metrics={"speed": 2.0})
    return converted([record], branch_policy="siblings").groups


CHANGES: dict[str, Any] = {
    "group_index": 1,
    "index": 1,
    "rollout_id": 1,
    "prompt": "another question",
    "tokens": [1, 2, 3, 4, 5, 7],
    "response": "another answer",
    "response_length": 4,
    "label": 4,
    "reward": {"ok": 1.0},
    "loss_mask": [1, 0, 1],
    "weight_versions": ["1"],
    "rollout_log_probs": [-0.25, -0.5, -0.7500001],
    "remove_sample": True,
    "status": Status.TRUNCATED,
    "metadata": {"verifiers": {"branch_index": 0}},
    "routing_key": "another",
    "non_generation_time": 0.5,
    "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 0},
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_of_any_field_changes_the_digest(name: str) -> None:
    [[[sample]]] = one_sample()  # type: ignore[misc]
    changed = replace(sample, **{name: CHANGES[name]})  # type: ignore[type-var]
    assert getattr(changed, name) != getattr(sample, name)
    assert digest([[[changed]]]) != digest([[[sample]]])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["rewards", "metrics", "stop_condition", "task_index", "branch_index"])
def test_a_change_inside_the_metadata_changes_the_digest(name: str) -> None:
    groups = one_sample()
    before = digest(groups)
    flatten(groups[0])[0].metadata["verifiers"][name] = "changed"
    assert digest(groups) != before


def test_equal_batches_have_equal_digests_and_a_digest_changes_nothing() -> None:
    one, other = one_sample(), one_sample()
    assert one[0] is not other[0]
    assert digest(one) == digest(other) == digest(one)
    assert one == other


def test_order_of_groups_rollouts_and_samples_is_part_of_the_digest() -> None:
    groups = two_groups().groups
    nested = forked().groups
    before = {digest(groups), digest(nested)}
    swapped: list[Any] = [groups[0][::-1], groups[1]]
    turned: list[Any] = [[nested[0][0][::-1], nested[0][1]]]  # type: ignore[index]
    assert {digest(groups[::-1]), digest(swapped), digest(turned), digest([nested[0][::-1]])}.isdisjoint(before)


def test_nesting_is_part_of_the_digest() -> None:
    a, b = (s for s in samples(two_groups())[:2])
    shapes: list[list[Any]] = [[[a, b]], [[a], [b]], [[[a, b]]], [[[a], [b]]], [[[a]], [[b]]]]
    assert len({digest(shape) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 0.0, 1, 1.0, True, None, "1"])
def test_rewards_that_differ_in_value_or_kind_have_digests_of_their_own(value: Any) -> None:
    groups = one_sample()
    others: list[Any] = [math.nan, math.inf, -0.0, 0.0, 1, 1.0, True, None, "1"]
    digests = []
    for other in [value, *others]:
        flatten(groups[0])[0].reward = other
        digests.append(digest(groups))
    assert digests.count(digests[0]) == 2


def test_masks_and_log_probs_of_none_and_of_nothing_are_one() -> None:
    groups = one_sample()
    [sample] = flatten(groups[0])
    sample.loss_mask, sample.rollout_log_probs = None, None
    missing = digest(groups)
    sample.loss_mask, sample.rollout_log_probs = [], []
    assert digest(groups) == missing


def test_tokens_do_not_run_from_one_sample_into_the_next() -> None:
    a, b = (replace(s, loss_mask=[], rollout_log_probs=[]) for s in samples(two_groups())[:2])
    one: list[Any] = [[replace(a, tokens=[1, 2]), replace(b, tokens=[3])]]
    other: list[Any] = [[replace(a, tokens=[1]), replace(b, tokens=[2, 3])]]
    assert digest(one) != digest(other)


def test_a_digest_is_sixty_four_hex_digits_also_of_nothing() -> None:
    assert all(len(d) == 64 and int(d, 16) >= 0 for d in (digest([]), digest(one_sample())))


def test_the_same_batch_has_the_same_digest_in_every_run() -> None:
    """Pinned: it is stored in every commit. Where it changes on purpose, the converter's version must go up."""
    record = trace(said(None, [1, 2]), reply(0, [3], [4, 5], [-0.5, -1.25]), id="t", data={"answer": "4"})
    conversion = convert(encode([record]), [group([record], 2)], ConvertOptions(), start=9)
    assert digest(conversion.groups) == "53f7832b2d570f2ecadc5b1d5b476e6acf7585273259e8dbbfe72d1ac2a4d177"


def test_a_handed_reward_that_json_has_no_number_for_comes_back() -> None:
    table = encode([turn(id="t0")])
    for reward in (math.nan, math.inf, -math.inf, {"a": math.nan, "b": 1.5, "reward": -math.inf}):
        [outcome] = read_outcomes(
            with_outcomes(table, [Outcome(trace_id="t0", disposition="emitted", handed_reward=reward)])
        )
        assert repr(outcome.handed_reward) == repr(reward)
