"""Facts of recorded traces hold on their rows and on the Samples they become."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest
from replay_build import SCENARIOS, by_task, converted, each_alone, facts, recorded, samples

from rolltape.replay import ConvertOptions, Sample, check
from rolltape.replay.branches import leaves, path_to
from rolltape.schema import encode


def sha(ids: Any) -> str:
    """How the facts name a list of token ids."""
    return hashlib.sha256(json.dumps([int(i) for i in ids]).encode()).hexdigest()[:16]


def same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_counts_results_and_limits_of_each_row_are_the_known_ones(name: str) -> None:
    rows = encode(recorded(name)).to_pylist(maps_as_pydicts="strict")
    for row, fact in zip(rows, facts(name), strict=True):
        assert row["trace_id"] == fact["id"]
        assert row["num_nodes"] == fact["nodes"]
        assert row["node_parent"].count(None) == fact["roots"]
        assert row["num_branches"] == fact["branches"]
        assert row["num_turns"] == fact["turns"]
        assert row["num_tokens"] == fact["unique_node_tokens"]
        assert row["num_sampled"] == fact["unique_sampled"]
        assert row["task_idx"] == fact["task_idx"]
        assert row["task_type"] == fact["task_type"]
        assert row["stop_condition"] == fact["stop_condition"]
        assert row["is_completed"] == fact["is_completed"]
        assert row["is_truncated"] == fact["is_truncated"]
        assert row["error_types"] == [e["type"] if isinstance(e, dict) else e for e in fact["errors"]]
        assert same(row["rewards"], fact["rewards"])
        assert same(row["metrics"], fact["metrics"])
        assert same(row["reward"], fact["reward"] if fact["rewards"] else None)


@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_and_log_probs_of_each_branch_are_the_known_ones(name: str) -> None:
    for row, fact in zip(encode(recorded(name)).to_pylist(), facts(name), strict=True):
        parents = [-1 if p is None else p for p in row["node_parent"]]
        ends = np.cumsum(row["node_tokens"]).tolist()
        total = 0
        for leaf, known in zip(leaves(parents), fact["per_branch"], strict=True):
            path = path_to(leaf, parents)
            at = [i for n in path for i in range(ends[n] - row["node_tokens"][n], ends[n])]
            total += len(at)
            assert [row["node_role"][n] for n in path] == known["messages"]
            assert len(at) == known["tokens"]
            assert sum(row["sampled"][i] for i in at) == known["sampled"]
            assert sum(row["node_sampled"][n] for n in path) == known["turns"]
            assert sum(bool(row["is_content"][i]) for i in at) == known["content_tokens"]
            assert sha(row["token_ids"][i] for i in at) == known["token_sha"]
            found = math.fsum(row["logprobs"][i] for i in at if row["logprobs"][i] is not None)
            assert found == pytest.approx(known["logprob_sum"], abs=1e-5)
        assert total == fact["num_total_tokens"]


def is_sound(fact: dict[str, Any], policy: str) -> bool:
    """Whether a trace of these facts may be trained: no error, something sampled, a finite reward for what is recorded."""
    late = "late response committed" in fact["what"]
    scored = bool(fact["rewards"]) and all(math.isfinite(v) for v in fact["rewards"].values())
    forked = policy == "reject" and fact["branches"] != 1
    return not fact["errors"] and fact["unique_sampled"] > 0 and scored and not late and not forked


@pytest.mark.parametrize("policy", ["reject", "siblings"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_samples_hold_the_known_branches_and_train_each_sampled_token_once(name: str, policy: str) -> None:
    records = recorded(name)
    conversion = converted(records, each_alone(records), branch_policy=policy)
    made: dict[str, list[Sample]] = {}
    for sample in samples(conversion):
        made.setdefault(sample.routing_key or "", []).append(sample)
    for fact in facts(name):
        if not is_sound(fact, policy):
            assert fact["id"] in conversion.dropped
            assert fact["id"] not in made
            continue
        siblings = made[fact["id"]]
        assert [s.metadata["verifiers"]["branch_index"] for s in siblings] == list(range(fact["branches"]))
        assert sum(sum(s.loss_mask or []) for s in siblings) == fact["unique_sampled"]
        for sample, known in zip(siblings, fact["per_branch"], strict=True):
            assert sha(sample.tokens) == known["token_sha"]
            assert len(sample.tokens) == known["tokens"]
            assert sample.reward == fact["reward"]
            assert sample.status.value == ("truncated" if fact["is_truncated"] else "completed")
            assert sample.metadata["verifiers"]["stop_condition"] == fact["stop_condition"]
            if sum(sample.loss_mask or []) == known["sampled"]:
                assert math.fsum(sample.rollout_log_probs or []) == pytest.approx(known["logprob_sum"], abs=1e-5)


def test_a_turn_that_two_branches_share_is_trained_in_the_first_of_them() -> None:
    record, fact = recorded("forks")[5], facts("forks")[5]
    first, second = samples(converted([record], branch_policy="siblings"))
    assert fact["unique_sampled"] == 40
    assert fact["num_output_tokens"] == 47
    assert sum(first.loss_mask or []) == fact["per_branch"][0]["sampled"]
    assert sum(second.loss_mask or []) == 40 - fact["per_branch"][0]["sampled"]
    assert fact["per_branch"][1]["sampled"] == sum(second.loss_mask or []) + 7


def test_of_a_code_golf_task_fastest_pays_half_and_most_concise_what_its_ties_pay() -> None:
    groups = by_task(recorded("group_rewards"))
    assert [len(g.trace_ids) for g in groups] == [4, 4, 4]
    assert [g.rewards["fastest"].sum for g in groups] == [0.5, 0.5, 0.5]
    assert [g.rewards["most_concise"].sum for g in groups] == [1.0, 0.5, 0.5]
    assert all(s.count == 4 for g in groups for s in g.rewards.values())


def test_group_reward_sums_hold_on_samples_after_conversion() -> None:
    records = recorded("group_rewards")
    conversion = converted(records, by_task(records))
    sums = [
        [math.fsum(s.metadata["verifiers"]["rewards"][name] for s in g) for name in ("fastest", "most_concise")]
        for g in conversion.groups
        if not any(isinstance(s, list) for s in g)
    ]
    assert sums == [[0.5, 1.0], [0.5, 0.5], [0.5, 0.5]]
    assert conversion.findings == []


@pytest.mark.parametrize("name", [n for n in SCENARIOS if n not in ("errors", "truncated", "zero")])
def test_sound_recorded_traces_give_no_error(name: str) -> None:
    found = check(encode(recorded(name)), ConvertOptions(branch_policy="siblings"))
    assert [f for f in found if f.severity == "error"] == []


@pytest.mark.parametrize("name", ["multi_turn_user_sim", "single_turn", "tools"])
def test_what_verifiers_itself_wrote_becomes_the_same_samples(name: str) -> None:
    ours, theirs = recorded(name), recorded(f"written_by_verifiers/{name}")
    for a, b in zip(ours, theirs, strict=True):
        if "prompt" not in b["task"]["data"]:
            assert a["task"]["data"]["prompt"] is None
    [left, right] = [samples(converted(r, each_alone(r))) for r in (ours, theirs)]
    assert len(left) == len(ours)
    assert same([s.to_dict() for s in left], [s.to_dict() for s in right])


@pytest.mark.parametrize("release", ["0.2.1", "0.3.0", "0.4.0"])
@pytest.mark.parametrize("name", ["single_turn", "multi_branch"])
def test_records_of_later_releases_become_samples_too(name: str, release: str) -> None:
    records = [trace for line in recorded(name, release) for trace in line.get("traces", [line])]
    conversion = converted(records, each_alone(records), branch_policy="siblings")
    made = samples(conversion)
    for record, fact in zip(records, facts(name, release), strict=True):
        siblings = [s for s in made if s.routing_key == record["id"]]
        if fact["errors"] or not fact["unique_sampled"]:
            assert siblings == []
            continue
        assert [len(s.tokens) for s in siblings] == [tokens for tokens, _ in fact["per_branch"]]
        assert sum(sum(s.loss_mask or []) for s in siblings) == fact["unique_sampled"]
        assert {s.reward for s in siblings} == {fact["reward"]}
        assert {s.status.value for s in siblings} == {"truncated" if fact["truncated"] else "completed"}
