"""Known ways to get rewards and groups wrong: what checks and conversion make of each."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from replay_build import Record, by_task, codes, converted, group, reply, said, samples, trace, turn

from rolltape.replay import (
    ConvertOptions,
    Expectations,
    Sample,
    check,
    convert,
    digest,
    finish,
    flatten,
    outcomes_of,
)
from rolltape.replay.checks.groups import signal
from rolltape.replay.outcomes import check_rewards
from rolltape.schema import Outcome, RewardSum, encode
from rolltape.schema.errors import BadInput, CheckFailed


def team(name: str, rewards: list[float | None], idx: int) -> list[Record]:
    """Traces of one task with these rewards."""
    return [turn(id=f"{name}{i}", idx=idx, reward=r) for i, r in enumerate(rewards)]


def branched(id: str, branches: int, rewards: dict[str, Any], idx: int = 0) -> Record:
    """A trace of several branches that share nothing but the question."""
    nodes = [said(None, [1])]
    for b in range(branches):
        nodes.append(said(0, [2], f"history {b}"))
        nodes.append(reply(len(nodes) - 1, [3], [100 + b]))
    return trace(*nodes, id=id, idx=idx, rewards=rewards)


def baseline(conversion_samples: list[Sample]) -> float:
    """Mean reward of a group, a rollout counted once, as Miles does by rollout_id, else index."""
    rollouts = {s.index if s.rollout_id is None else s.rollout_id: s.reward for s in conversion_samples}
    return statistics.fmean(r for r in rollouts.values() if isinstance(r, float))


# -- groups are known by their ids


def short_in_the_middle(least: int | None, names: tuple[str, ...] | None = ()) -> Any:
    records = [*team("a", [1.0, 0.0, 1.0, 0.0], 0), *team("b", [5.0] * 3, 1), *team("c", [0.0, 1.0, 1.0, 1.0], 2)]
    sizes = [4, 4, 4]
    members = [[r for r in records if r["task"]["data"]["idx"] == i] for i in range(3)]
    groups = [group(m, i, size=sizes[i], group_reward_names=names) for i, m in enumerate(members)]
    return converted(records, groups, min_group_size=least)


def test_a_short_group_is_dropped_and_reported_with_both_sizes() -> None:
    conversion = short_in_the_middle(None)
    [finding] = conversion.findings
    assert (finding.code, finding.severity, finding.group_index) == ("group_size", "error", 1)
    assert (finding.expected, finding.found) == (4, 3)
    assert [s.group_index for s in samples(conversion)] == [0] * 4 + [2] * 4
    assert {conversion.dropped[f"b{i}"][0] for i in range(3)} == {"incomplete_group"}


def test_a_short_group_that_may_go_on_keeps_its_own_rewards_and_is_warned_about() -> None:
    conversion = short_in_the_middle(3)
    [finding] = conversion.findings
    assert (finding.code, finding.severity, finding.expected, finding.found) == ("group_size", "warning", 4, 3)
    assert [[s.reward for s in flatten(g)] for g in conversion.groups] == [
        [1.0, 0.0, 1.0, 0.0],
        [5.0, 5.0, 5.0],
        [0.0, 1.0, 1.0, 1.0],
    ]


@pytest.mark.parametrize("names", [("fastest",), None])
def test_a_short_group_whose_rewards_compare_its_rollouts_never_goes_on(names: tuple[str, ...] | None) -> None:
    """None: nobody knows whether there are group rewards, so there may be."""
    assert [s.group_index for s in samples(short_in_the_middle(3, names))] == [0] * 4 + [2] * 4


def test_a_group_that_lost_a_row_shifts_no_other_group() -> None:
    records = [r for g in range(5) for r in team("abcde"[g], [float(g), g + 0.5, g + 1.0, g + 1.5], g)]
    whole = by_task(records)
    lost = [r for r in records if r["id"] != "b1"]
    random.Random(3).shuffle(lost)
    conversion = converted(lost, whole)
    assert [s.routing_key for s in samples(conversion)] == [r["id"] for r in records if r["id"][0] != "b"]
    [finding] = conversion.findings
    assert (finding.code, finding.trace_id, finding.group_index) == ("trace_missing", "b1", 1)
    assert conversion.dropped["b0"] == ("incomplete_group", "group 1 has 3 of 4 sound rollouts (1 failed_check)")


def test_interleaved_and_grouped_files_give_the_same_groups_sums_and_samples() -> None:
    grouped = [*team("a", [1.0, 0.0, 0.5], 0), *team("b", [0.0, 2.0, 0.25], 1)]
    interleaved = [grouped[i] for i in (0, 3, 1, 4, 2, 5)]
    groups = by_task(grouped)
    assert by_task(interleaved) == groups
    assert digest(converted(interleaved, groups).groups) == digest(converted(grouped, groups).groups)


def test_groups_of_one_where_four_rollouts_were_asked_for_are_errors() -> None:
    records = team("a", [1.0, 0.0, 1.0, 0.0], 0)
    conversion = converted(records, [group([r], i, size=4) for i, r in enumerate(records)])
    assert codes(conversion.findings, "error") == ["group_size"] * 4
    assert conversion.groups == []


def test_a_group_of_two_tasks_is_an_error() -> None:
    records = [turn(id="a", idx=3), turn(id="b", idx=4)]
    conversion = converted(records)
    [finding] = conversion.findings
    assert (finding.code, finding.found) == ("group_task", [3, 4])
    assert conversion.dropped["a"][0] == "failed_check"


def test_two_groups_of_one_index_are_errors() -> None:
    records = [turn(id="a", idx=0), turn(id="b", idx=1)]
    conversion = converted(records, [group(records[:1], 5), group(records[1:], 5)])
    assert codes(conversion.findings, "error") == ["group_twice"] * 2
    assert conversion.groups == []


def test_a_trace_that_stands_twice_among_the_rows_costs_its_group() -> None:
    records = [turn(id="a"), turn(id="a"), turn(id="b")]
    conversion = converted(records, [group([records[0], records[2]])])
    [finding] = conversion.findings
    assert (finding.code, finding.trace_id, finding.found) == ("trace_twice", "a", 2)
    assert samples(conversion) == []


def test_a_trace_that_a_group_names_twice_is_not_trained_twice() -> None:
    records = [turn(id="a"), turn(id="b")]
    conversion = converted(records, [group([records[0], records[0], records[1]])])
    assert codes(conversion.findings, "error") == ["trace_twice"]
    assert samples(conversion) == []


def test_a_trace_that_two_groups_name_is_trained_by_neither() -> None:
    records = [turn(id="a"), turn(id="b"), turn(id="c")]
    conversion = converted(records, [group([records[0], records[1]], 0), group([records[1], records[2]], 1)])
    assert [(f.code, f.trace_id, f.found) for f in conversion.findings] == [("trace_in_two_groups", "b", [0, 1])]
    assert samples(conversion) == []
    assert (
        codes(check(encode(records), groups=[group(records[:2], 0), group(records[1:], 1)]))
        == ["trace_in_two_groups"] * 2
    )


def test_a_group_larger_than_asked_for_is_an_error() -> None:
    records = team("a", [0.0, 1.0, 1.0], 0)
    conversion = converted(records, [group(records, size=2)])
    assert (codes(conversion.findings), conversion.groups) == (["group_size"], [])


# -- a rollout has one reward, however many branches


def test_a_rollout_of_three_branches_counts_once_in_its_group() -> None:
    records = [branched("x", 1, {"ok": 0.0}), branched("y", 3, {"ok": 1.0})]
    conversion = converted(records, branch_policy="siblings")
    made = samples(conversion)
    assert [s.group_index for s in made] == [0] * 4
    assert [s.rollout_id for s in made] == [0, 1, 1, 1]
    assert baseline(made) == 0.5
    assert conversion.records[0].rewards == {"ok": RewardSum(2, 1.0)}


@pytest.mark.parametrize(("expected", "found"), [(1.5, []), (3.0, ["expected_group_reward_sum"])])
def test_a_group_sum_counts_a_trace_of_four_branches_once(expected: float, found: list[str]) -> None:
    records = [branched("a", 4, {"ok": 0.5}), branched("b", 1, {"ok": 1.0})]
    options = ConvertOptions(branch_policy="siblings", expect=Expectations(group_reward_sum={"ok": expected}))
    assert codes(check(encode(records), options, [group(records)])) == found


def test_siblings_that_disagree_on_the_reward_are_refused_with_trace_and_branches() -> None:
    conversion = converted([branched("x", 2, {"ok": 2.0})], branch_policy="siblings")
    samples(conversion)[1].reward = 6.0
    with pytest.raises(BadInput, match=r"trace x: branches 0 and 1 carry the rewards 2\.0 and 6\.0"):
        check_rewards(conversion.groups)
    with pytest.raises(BadInput, match="trace x: branches 0 and 1"):
        finish(conversion.groups, outcomes_of(conversion))


def test_groups_nest_alike_where_one_trace_of_them_has_two_branches() -> None:
    records = [turn(id="a"), turn(id="b"), branched("c", 2, {"ok": 1.0}), turn(id="d")]
    [made] = converted(records, branch_policy="siblings").groups
    assert [len(rollout) for rollout in made if isinstance(rollout, list)] == [1, 1, 2, 1]
    assert len({s.rollout_id for s in flatten(made)}) == 4
    assert all(s.rollout_id is not None for s in flatten(made))


def test_advantages_and_loss_weights_by_rollout_are_the_known_ones() -> None:
    """The numbers Miles computes for two prompts of three rollouts, of which one has two samples (3 and 5 tokens)."""

    def single(id: str, idx: int, reward: float, tokens: int) -> Record:
        return trace(said(None, [1]), reply(0, [2], range(tokens)), id=id, idx=idx, rewards={"ok": reward})

    fork = [said(None, [1]), reply(0, [2], range(3)), said(0, [3], "edited"), reply(2, [2], range(5))]
    records = [
        single("A", 0, 1.0, 4),
        trace(*fork, id="B", rewards={"ok": 0.0}),
        single("C", 0, 0.0, 2),
        single("D", 1, 1.0, 4),
        single("E", 1, 1.0, 4),
        single("F", 1, 0.0, 4),
    ]
    conversion = converted(records, by_task(records), branch_policy="siblings")
    advantages, sums = [], []
    for made in conversion.groups:
        rollouts = {s.rollout_id: s.reward for s in flatten(made) if isinstance(s.reward, float)}
        mean, spread = statistics.fmean(rollouts.values()), statistics.stdev(rollouts.values())
        for s in flatten(made):
            advantages.append(round((rollouts[s.rollout_id] - mean) / spread, 4))
            sums.append(sum(sum(o.loss_mask or []) for o in flatten(made) if o.rollout_id == s.rollout_id))
    assert advantages == [1.1547, -0.5774, -0.5774, -0.5774, 0.5774, 0.5774, -1.1547]
    assert sums == [4, 8, 8, 2, 4, 4, 4]


# -- what was not scored is not 0


def test_a_trace_that_failed_before_scoring_has_no_reward_and_costs_its_group() -> None:
    records = [*team("a", [1.0, 0.0, 1.0], 0), turn(id="bad", reward=None, errors=["TaskError: no"])]
    assert encode(records).column("reward").to_pylist() == [1.0, 0.0, 1.0, None]
    conversion = converted(records)
    assert conversion.groups == []
    assert conversion.dropped["bad"] == ("error", "TaskError: no")
    assert conversion.dropped["a0"] == ("incomplete_group", "group 0 has 3 of 4 sound rollouts (1 error)")


def test_a_step_in_which_everything_failed_converts_to_nothing_and_says_which_errors() -> None:
    records = [turn(id=str(i), idx=i, reward=None, errors=[f"HarnessError: exit {i}"]) for i in range(3)]
    conversion = converted(records, by_task(records))
    assert (conversion.groups, conversion.findings) == ([], [])
    assert conversion.dropped == {str(i): ("error", f"HarnessError: exit {i}") for i in range(3)}


def test_a_trace_without_any_reward_is_refused_unless_the_trainer_scores() -> None:
    records = team("a", [1.0, None], 0)
    refused = converted(records)
    assert codes(refused.findings, "error") == ["unscored"]
    assert refused.groups == []
    allowed = converted(records, unscored="allow")
    assert [s.reward for s in samples(allowed)] == [1.0, None]


def test_a_missing_reward_moves_no_sibling() -> None:
    records = team("a", [1.0, 0.8, None, 0.9], 0)
    assert converted(records).groups == []
    conversion = converted(records, [group(records, group_reward_names=())], min_group_size=3)
    assert [s.reward for s in samples(conversion)] == [1.0, 0.8, 0.9]
    assert baseline(samples(conversion)) == pytest.approx(0.9)
    assert conversion.dropped["a2"][0] == "failed_check"


def test_a_null_among_named_rewards_is_named() -> None:
    record = turn(rewards={"style": 1.0, "tests": None})
    [finding] = check(encode([record]))
    assert (finding.code, finding.found) == ("unscored", ["tests"])
    assert encode([record]).column("reward").to_pylist() == [None]


def test_scored_and_unscored_traces_of_a_group_are_counted_apart() -> None:
    records = [
        turn(id="a", rewards={"solved": 1.0}),
        turn(id="b", rewards={"solved": 0.0}),
        turn(id="c", rewards={}, errors=["TaskError: no"]),
        turn(id="d", rewards={}, errors=["TaskError: no"]),
    ]
    made = group(records)
    assert made.rewards == {"solved": RewardSum(2, None)}
    rewards = encode(records).column("reward")
    assert pc.mean(rewards).as_py() == 0.5
    assert rewards.null_count == 2
    assert pc.mean(pc.fill_null(rewards, 0.0)).as_py() == 0.25


def test_a_metric_that_few_traces_have_is_no_zero_in_the_others() -> None:
    records = [turn(id=str(i), metrics={"turns_to_fix": m} if m else {}) for i, m in enumerate([4.0, 6.0] + [None] * 6)]
    made = samples(converted(records))
    values = [s.metadata["verifiers"]["metrics"].get("turns_to_fix") for s in made]
    assert values == [4.0, 6.0] + [None] * 6
    scored = [v for v in values if v is not None]
    assert (statistics.fmean(scored), len(scored)) == (5.0, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_costs_the_trace(value: float) -> None:
    record = turn(rewards={"ok": 1.0, "judge": value})
    [finding] = check(encode([record]))
    assert (finding.code, finding.found) == ("reward_value", {"judge": str(value)})
    assert samples(converted([record])) == []


def test_a_group_of_which_two_traces_have_nothing_to_train_is_incomplete_with_both_reasons() -> None:
    records = [
        turn(id="a"),
        turn(id="b"),
        trace(id="none"),
        trace(said(None, [1]), reply(0, [2], [], text=""), id="empty"),
    ]
    conversion = converted([*records, turn(id="z", idx=1)], by_task([*records, turn(id="z", idx=1)]))
    assert [s.routing_key for s in samples(conversion)] == ["z"]
    assert [conversion.dropped[t][0] for t in ("none", "empty")] == ["empty", "empty"]
    assert conversion.dropped["a"] == ("incomplete_group", "group 0 has 2 of 4 sound rollouts (2 empty)")


# -- one number or a mapping of all


def scored(**options: Any) -> Any:
    return converted([turn(rewards={"tests": 1.0, "style": 0.25}, metrics={"speed": 3.0})], **options)


def test_without_a_reward_key_a_sample_carries_the_total() -> None:
    assert [s.reward for s in samples(scored())] == [1.25]


@pytest.mark.parametrize("key", ["tests", "style", "reward"])
def test_with_a_reward_key_a_sample_carries_every_reward_and_the_total(key: str) -> None:
    [sample] = samples(scored(reward_key=key))
    assert sample.reward == {"tests": 1.0, "style": 0.25, "reward": 1.25}


@pytest.mark.parametrize("key", ["testz", "speed"])
def test_a_reward_key_that_names_no_reward_is_refused_with_the_names_there_are(key: str) -> None:
    conversion = scored(reward_key=key)
    [finding] = conversion.findings
    assert finding.code == "reward_key"
    assert finding.found == ["style", "tests"]
    assert "['style', 'tests', 'reward']" in finding.message
    assert conversion.groups == []


def test_a_reward_that_is_itself_named_reward_never_hides_the_total() -> None:
    record = turn(rewards={"reward": 1.0, "style": 0.5})
    assert [s.reward for s in samples(converted([record]))] == [1.5]
    conversion = converted([record], reward_key="style")
    assert codes(conversion.findings, "error") == ["reward_name"]
    assert conversion.groups == []


def test_free_names_stay_below_one_key_of_the_metadata() -> None:
    record = turn(rewards={"raw_reward": 1.0}, metrics={"raw_reward": 2.0, "round_number": 3.0})
    [sample] = samples(converted([record]))
    assert set(sample.metadata) == {"verifiers"}


# -- sums


def test_weighted_parts_add_up_to_the_reward_and_score_and_weight_stay_visible() -> None:
    record = turn(rewards={"a": {"score": 1.0, "weight": 0.2}, "b": {"score": 0.5, "weight": 1.0}})
    table = encode([record])
    [row] = table.to_pylist(maps_as_pydicts="strict")
    assert row["reward"] == pytest.approx(0.7, abs=1e-9)
    assert row["rewards"] == {"a": 0.2, "b": 0.5}
    assert (row["scores"], row["weights"]) == ({"a": 1.0, "b": 0.5}, {"a": 0.2, "b": 1.0})
    assert check(table) == []
    assert samples(converted([record]))[0].reward == pytest.approx(0.7, abs=1e-9)


def rewritten(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """`table` with one column replaced: what a faulty writer would have left."""
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def test_a_reward_that_is_not_the_sum_of_its_parts_costs_the_trace() -> None:
    record = turn(rewards={"a": 0.2, "b": 0.5})
    table = rewritten(encode([record]), "reward", [1.5])
    [finding] = check(table)
    assert (finding.code, finding.expected, finding.found) == ("reward_sum", 0.7, 1.5)
    assert convert(table, [group([record])]).groups == []


def test_a_contribution_that_is_not_score_times_weight_costs_the_trace() -> None:
    record = turn(rewards={"a": {"score": 1.0, "weight": 0.2}})
    table = rewritten(encode([record]), "weights", [[("a", 0.5)]])
    assert codes(check(table)) == ["contribution"]


def test_recorded_sums_that_the_rows_no_longer_give_cost_the_group() -> None:
    live = team("a", [1.0, 0.0], 0)
    made = group(live)
    table = encode([live[0], {**live[1], "rewards": {"ok": 0.5}}])
    [finding] = check(table, groups=[made])
    assert (finding.code, finding.group_index) == ("group_reward_sum", 0)
    assert (finding.expected, finding.found) == ({"count": 2, "sum": 1.0}, {"count": 2, "sum": 1.5})
    conversion = convert(table, [made])
    assert {d for d, _ in conversion.dropped.values()} == {"failed_check"}


def test_fewer_scored_traces_than_recorded_are_found_though_neither_has_a_sum() -> None:
    live = team("a", [1.0, 1.0, None], 0)
    table = encode([live[0], {**live[1], "rewards": {}}, live[2]])
    [finding] = [f for f in check(table, groups=[group(live)]) if f.code == "group_reward_sum"]
    assert (finding.expected, finding.found) == ({"count": 2, "sum": None}, {"count": 1, "sum": None})


def test_a_reward_name_that_only_the_rows_or_only_the_record_know_is_found() -> None:
    live = team("a", [1.0, 0.0], 0)
    more = [{**r, "rewards": {**r["rewards"], "late": 1.0}} for r in live]
    assert [f.expected for f in check(encode(more), groups=[group(live)])] == [None]
    assert [f.found for f in check(encode(live), groups=[group(more)])] == [None]


def test_sums_do_not_depend_on_the_order_of_the_traces() -> None:
    values: list[float | None] = [0.1, 1e16, 0.2, -1e16, 0.3]
    records = team("a", values, 0)
    made = group(records)
    assert made.rewards["ok"].sum == math.fsum(v for v in values if v is not None)
    assert group(records[::-1]).rewards == made.rewards
    assert check(encode(records[::-1]), groups=[made]) == []


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0.7] * 7, "flat"),
        ([1.0, 1.0, 1.0 + 1e-9], "flat"),
        ([0.7], "single"),
        ([0.0, 1.0], "varied"),
        ([None, 0.5], "single"),
        ([None, math.nan], "unscored"),
        ([], "unscored"),
        ([0.5, math.nan, 0.5], "flat"),
    ],
)
def test_equal_rewards_are_told_by_their_spread_not_by_a_standard_deviation(
    rewards: list[float | None], kind: str
) -> None:
    assert signal(rewards) == kind


def test_a_group_of_equal_rewards_is_converted_as_it_is() -> None:
    conversion = converted(team("a", [0.7] * 7, 0))
    assert [s.reward for s in samples(conversion)] == [0.7] * 7
    assert conversion.findings == []


# -- nothing vanishes


def test_every_group_of_a_step_has_a_disposition_and_only_the_trained_ones_come_back() -> None:
    records = [r for g in range(10) for r in team(chr(97 + g), [0.0, 1.0], g)]
    conversion = converted(records, by_task(records))
    settled = [
        Outcome(trace_id=o.trace_id, disposition="filtered" if o.trace_id[0] == "c" else "leftover")
        if o.trace_id[0] in "cj"
        else o
        for o in outcomes_of(conversion)
    ]
    handed = finish(conversion.groups, settled)
    assert len(settled) == len(records)
    assert [flatten(g)[0].group_index for g in handed] == [0, 1, 3, 4, 5, 6, 7, 8]


def test_every_trace_of_every_group_is_either_a_sample_or_dropped_with_a_reason() -> None:
    records = [
        turn(id="good"),
        turn(id="error", idx=1, errors=["TaskError: no"]),
        turn(id="beside", idx=1),
        trace(id="empty", idx=2),
        turn(id="unscored", idx=3, reward=None),
        branched("forked", 2, {"ok": 1.0}, idx=4),
    ]
    conversion = converted(records, by_task(records))
    emitted = {s.routing_key for s in samples(conversion)}
    assert emitted | set(conversion.dropped) == {r["id"] for r in records}
    assert emitted & set(conversion.dropped) == set()
    assert {t: d for t, (d, _) in conversion.dropped.items()} == {
        "error": "error",
        "beside": "incomplete_group",
        "empty": "empty",
        "unscored": "failed_check",
        "forked": "failed_check",
    }
    assert all(reason for _, reason in conversion.dropped.values())


def test_strict_raises_at_the_first_group_that_a_check_costs() -> None:
    records = [turn(id="good"), branched("forked", 2, {"ok": 1.0}, idx=1)]
    with pytest.raises(CheckFailed, match="trace forked, node 3"):
        converted(records, by_task(records), strict=True)


def test_strict_lets_errors_of_episodes_pass() -> None:
    records = [turn(id="good"), turn(id="bad", idx=1, errors=["TaskError: no"])]
    assert [s.routing_key for s in samples(converted(records, by_task(records), strict=True))] == ["good"]


@pytest.mark.parametrize("case", ["short", "missing", "twice"])
def test_strict_raises_for_groups_as_well(case: str) -> None:
    records = [turn(id="a"), turn(id="b")]
    made = {
        "short": group(records, size=3),
        "missing": group([*records, turn(id="gone")]),
        "twice": group([*records, records[0]]),
    }[case]
    with pytest.raises(CheckFailed, match="group 0"):
        converted(records, [made], strict=True)
