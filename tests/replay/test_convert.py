"""The field mapping, against a plain reference and against Verifiers' own branches; numbering, nesting and order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_build import (
    SCENARIOS,
    Record,
    by_task,
    converted,
    each_alone,
    group,
    recorded,
    reply,
    said,
    samples,
    trace,
    turn,
    unnumbered,
)

from rolltape.replay import Conversion, ConvertOptions, Sample, Status, convert, digest, flatten
from rolltape.schema import Context, Group, Turn, encode, to_trace

# -- a reference, in plain Python, of what Miles' own Verifiers adapter makes of a trace


def paths(record: Record) -> list[list[int]]:
    """Root-to-leaf paths, in order of their leaves."""
    nodes = record["nodes"]
    inner = {n["parent"] for n in nodes}
    result = []
    for leaf in range(len(nodes)):
        if leaf not in inner:
            path = [leaf]
            while nodes[path[0]]["parent"] is not None:
                path.insert(0, nodes[path[0]]["parent"])
            result.append(path)
    return result


def is_superseded(record: Record, leaf: int) -> bool:
    """Whether a sampled leaf was asked for again: a later sampled node answers the same conversation."""
    nodes = record["nodes"]
    later = nodes[leaf + 1 :]
    return nodes[leaf]["sampled"] and any(n["sampled"] and n["parent"] == nodes[leaf]["parent"] for n in later)


def without_nulls(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [{k: v for k, v in message.items() if v is not None} for message in prompt]
    return "" if prompt is None else prompt


def expected_samples(record: Record) -> list[dict[str, Any]]:
    """Fields of the Samples of a sound trace, one for each branch that trains something, without batch numbers."""
    data, nodes = record["task"]["data"], record["nodes"]
    trained: set[int] = set()
    result = []
    for index, path in enumerate(paths(record)):
        if is_superseded(record, path[-1]):
            continue
        tokens: list[int] = []
        mask: list[int] = []
        values: list[float] = []
        for n in path:
            left = list(nodes[n]["logprobs"])
            for token, is_sampled in zip(nodes[n]["token_ids"], nodes[n]["mask"], strict=True):
                value = left.pop(0) if is_sampled else 0.0
                mine = is_sampled and n not in trained
                tokens.append(token)
                mask.append(int(mine))
                values.append(float(np.float32(value)) if mine else 0.0)
        trained.update(path)
        if 1 not in mask:
            continue
        start = mask.index(1)
        replies = [nodes[n]["message"]["content"] for n in path if nodes[n]["sampled"]]
        result.append(
            {
                "prompt": without_nulls(data["prompt"]),
                "tokens": tokens,
                "response": (replies[-1] or "").strip(),
                "response_length": len(tokens) - start,
                "label": data["label"] if data.get("label") is not None else data.get("answer"),
                "reward": sum(record["rewards"].values()),
                "loss_mask": mask[start:],
                "rollout_log_probs": values[start:],
                "status": status_of(record),
                "routing_key": record["id"],
                "metadata": {
                    "verifiers": {
                        "branch_index": index,
                        "task_index": data["idx"],
                        "rewards": record["rewards"],
                        "metrics": record["metrics"],
                        "stop_condition": record["stop_condition"],
                    }
                },
            }
        )
    return result


def status_of(record: Record) -> Status:
    limits = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
    reasons = [n["finish_reason"] for n in record["nodes"] if n["sampled"]]
    cut = bool(reasons) and reasons[-1] == "length"
    timed_out = record["stop_condition"] == "harness_timeout"
    return Status.TRUNCATED if record["stop_condition"] in limits or timed_out or cut else Status.COMPLETED


def fields(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in expected_samples(turn())[0]}


def sound_alone(records: Sequence[Record], policy: str) -> Conversion:
    return converted(records, each_alone(records), branch_policy=policy)


# -- recorded traces


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_field_of_a_recorded_trace_is_mapped_as_the_reference_says(name: str) -> None:
    records = recorded(name)
    conversion = sound_alone(records, "siblings")
    kept = [r for r in records if r["id"] not in conversion.dropped]
    expected = [s for r in kept for s in expected_samples(r)]
    assert [fields(s) for s in samples(conversion)] == expected


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trace_of_one_branch_becomes_the_same_sample_under_both_policies(name: str) -> None:
    records = recorded(name)
    rejecting, keeping = sound_alone(records, "reject"), sound_alone(records, "siblings")
    single = {s.routing_key for s in samples(rejecting)}
    assert single == {r["id"] for r in records if r["id"] not in keeping.dropped and len(paths(r)) == 1}
    assert [unnumbered(s) for s in samples(rejecting)] == [
        unnumbered(s) for s in samples(keeping) if s.routing_key in single
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_masks_and_log_probs_are_those_of_verifiers_branches(name: str) -> None:
    records = recorded(name)
    traces = {r["id"]: to_trace(r) for r in records}
    for sample in samples(sound_alone(records, "siblings")):
        assert sample.routing_key is not None
        branch = traces[sample.routing_key].branches[sample.metadata["verifiers"]["branch_index"]]
        start = len(sample.tokens) - sample.response_length
        assert sample.tokens == branch.token_ids
        assert not any(branch.sampled_mask[:start]) or len(traces[sample.routing_key].branches) > 1
        for at, (mask, value) in enumerate(
            zip(sample.loss_mask or [], sample.rollout_log_probs or [], strict=True), start
        ):
            if mask:
                assert branch.sampled_mask[at]
                assert value == np.float32(branch.logprobs[at])
            else:
                assert value == 0.0
        if len(traces[sample.routing_key].branches) == 1:
            assert sample.loss_mask == [int(m) for m in branch.sampled_mask[start:]]
            assert sample.response == traces[sample.routing_key].last_reply
            assert sample.reward == traces[sample.routing_key].reward
            assert (sample.status is Status.TRUNCATED) == traces[sample.routing_key].is_truncated


# -- single fields


def test_prompt_messages_lose_the_keys_without_a_value() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a", "reasoning_content": None, "tool_calls": None, "provider_state": None},
    ]
    [sample] = samples(converted([turn(prompt=messages)]))
    assert sample.prompt == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]


def test_a_prompt_that_the_user_simulator_opens_is_empty() -> None:
    [sample] = samples(converted([turn(prompt=None)]))
    assert sample.prompt == ""


@pytest.mark.parametrize(
    ("data", "label"),
    [
        ({"label": "yes", "answer": "no"}, "yes"),
        ({"label": None, "answer": "no"}, "no"),
        ({"answer": "4"}, "4"),
        ({"answer": 4}, 4),
        ({"answer": {"a": [1, None]}}, {"a": [1, None]}),
        ({"label": False, "answer": "no"}, False),
        ({}, None),
    ],
)
def test_the_label_is_the_task_s_label_else_its_answer(data: Record, label: Any) -> None:
    [sample] = samples(converted([turn(data=data)]))
    assert sample.label == label
    assert type(sample.label) is type(label)


def test_what_the_engine_said_of_each_turn_reaches_the_sample() -> None:
    record = trace(
        said(None, [1, 2]),
        reply(0, [3], [4, 5], prompt=3),
        said(1, [6], role="tool"),
        reply(2, [7], [8], prompt=7),
    )
    turns = (
        Turn(weight_version="7", cached_tokens=2, latency=0.5, completion_tokens=2, finish_reason="tool_calls"),
        Turn(weight_version="8", cached_tokens=5, latency=0.25, completion_tokens=1, finish_reason="stop"),
    )
    record["timing"]["generation"] = {"start": 100.0, "end": 102.0}
    [sample] = samples(converted([record], contexts=[Context(turns=turns)]))
    assert sample.weight_versions == ["7", "8"]
    assert sample.prefix_cache_info == {"cached_tokens": 7, "total_prompt_tokens": 10}
    assert sample.non_generation_time == 1.25


def test_time_without_the_engine_is_the_same_on_every_python() -> None:
    nodes: list[Record] = []
    for i in range(10):
        nodes += [said(len(nodes) - 1 if nodes else None, [i]), reply(len(nodes), [], [100 + i])]
    record = trace(*nodes)
    record["timing"]["generation"] = {"start": 100.0, "end": 102.0}
    [sample] = samples(converted([record], contexts=[Context(turns=(Turn(latency=0.1),) * 10)]))
    assert sample.non_generation_time == 2.0 - 0.9999999999999999  # ten times 0.1, one after the other


def test_prompt_tokens_that_were_cached_count_in_the_total() -> None:
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "cached_input_tokens": 2,
        "reasoning_tokens": None,
        "cost": None,
    }
    record = trace(said(None, [1, 2]), reply(0, [3], [4, 5], usage=usage))
    [sample] = samples(converted([record]))
    assert sample.prefix_cache_info["total_prompt_tokens"] == 3


def test_each_branch_gets_the_versions_of_its_own_turns() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [2], [3]),
        said(1, [4]),
        reply(2, [5], [6]),
        said(1, [7]),
        reply(4, [8], [9]),
    )
    turns = tuple(Turn(weight_version=v, completion_tokens=1) for v in ("7", "8", "9"))
    first, second = samples(converted([record], contexts=[Context(turns=turns)], branch_policy="siblings"))
    assert first.weight_versions == ["7", "8"]
    assert second.weight_versions == ["7", "9"]


def test_a_sample_has_miles_fields_and_its_dict_the_status_as_text() -> None:
    [sample] = samples(converted([turn()]))
    as_dict = sample.to_dict()
    assert as_dict["status"] == "completed"
    assert list(as_dict)[:5] == ["group_index", "index", "rollout_id", "prompt", "tokens"]
    assert as_dict["remove_sample"] is False
    assert as_dict["train_metadata"] is None


# -- numbering and nesting


FORK = (said(None, [1]), reply(0, [2], [3]), said(1, [4]), reply(2, [5], [6]), said(1, [7]), reply(4, [8], [9, 10]))


def test_rejecting_batches_are_flat_and_carry_no_rollout_id() -> None:
    records = [turn(id="a"), turn(id="b"), turn(id="c", idx=1), turn(id="d", idx=1)]
    conversion = converted(records, by_task(records))
    assert [[type(s) for s in g] for g in conversion.groups] == [[Sample, Sample], [Sample, Sample]]
    assert [(s.group_index, s.index, s.rollout_id) for s in samples(conversion)] == [
        (0, 0, None),
        (0, 1, None),
        (1, 2, None),
        (1, 3, None),
    ]


def test_siblings_share_the_index_of_the_first_and_every_sample_of_the_batch_has_a_rollout_id() -> None:
    records = [turn(id="a"), trace(*FORK, id="b"), turn(id="c", idx=1), trace(*FORK, id="d", idx=1)]
    conversion = converted(records, by_task(records), branch_policy="siblings")
    assert [[len(rollout) for rollout in g if isinstance(rollout, list)] for g in conversion.groups] == [[1, 2], [1, 2]]
    assert [(s.group_index, s.index, s.rollout_id) for s in samples(conversion)] == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 1),
        (1, 3, 3),
        (1, 4, 4),
        (1, 5, 4),
    ]


def test_siblings_nest_uniformly_even_where_no_trace_forks() -> None:
    conversion = converted([turn(id="a"), turn(id="b")], branch_policy="siblings")
    assert [[[s.routing_key for s in r] for r in g if isinstance(r, list)] for g in conversion.groups] == [
        [["a"], ["b"]]
    ]


def test_a_recorded_first_index_is_kept_and_the_next_group_goes_on_from_it() -> None:
    records = [turn(id="a"), turn(id="b", idx=1)]
    groups = [group(records[:1], 7, first_sample_index=100), group(records[1:], 8)]
    conversion = convert(encode(records), groups, ConvertOptions(), start=5)
    assert [(s.group_index, s.index) for s in samples(conversion)] == [(7, 100), (8, 101)]
    assert [r.first_sample_index for r in conversion.records] == [100, 101]


def test_converting_with_the_records_it_returns_gives_the_same_batch() -> None:
    records = [turn(id="a"), trace(*FORK, id="b", idx=1), turn(id="c", idx=2)]
    options = ConvertOptions(branch_policy="siblings")
    first = convert(encode(records), by_task(records), options, start=40)
    again = convert(encode(records), first.records, options)
    assert digest(again.groups) == digest(first.groups)


def test_a_group_that_is_dropped_takes_no_indices() -> None:
    records = [turn(id="a"), turn(id="b", idx=1, errors=["TaskError: no"]), turn(id="c", idx=2)]
    conversion = converted(records, by_task(records))
    assert [(s.routing_key, s.group_index, s.index) for s in samples(conversion)] == [("a", 0, 0), ("c", 2, 1)]


def test_samples_keep_the_order_of_the_rollouts_in_the_group_record() -> None:
    records = [turn(id=i) for i in "abc"]
    given = group([records[2], records[0], records[1]])
    assert [s.routing_key for s in samples(converted(records, [given]))] == ["c", "a", "b"]


# -- any well-formed trace


@st.composite
def nodes(draw: st.DrawFn) -> list[Record]:
    """A random forest of messages: several turns, unsampled assistant messages among them, any mask inside a reply."""
    result: list[Record] = []
    for i in range(draw(st.integers(1, 10))):
        parent = None if i == 0 or draw(st.integers(0, 12)) == 0 else draw(st.integers(max(0, i - 4), i - 1))
        kind = draw(st.sampled_from(["user", "tool", "assistant", "reply", "reply", "reply"]))
        ids = draw(st.lists(st.integers(0, 150_000), max_size=6))
        if kind != "reply":
            result.append(said(parent, ids, role=kind))
            continue
        mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        values = draw(st.lists(st.floats(-20, 0, width=32), min_size=sum(mask), max_size=sum(mask)))
        finish = draw(st.sampled_from(["stop", "length", "tool_calls", None]))
        text = draw(st.sampled_from(["", " an answer \n"])) if sum(mask) else ""
        result.append(reply(parent, [], ids, values, mask=mask, text=text, finish=finish))
    return result


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Record], list[Group]]:
    """Some groups of some traces."""
    records, groups = [], []
    for g in range(draw(st.integers(1, 3))):
        members = [
            trace(*draw(nodes()), id=f"{g}.{r}", idx=g, rewards={"a": draw(st.floats(-2, 2)), "b": 0.5})
            for r in range(draw(st.integers(1, 3)))
        ]
        records += members
        groups.append(group(members, g))
    return records, groups


def is_trainable(record: Record, policy: str) -> bool:
    if policy == "reject":
        return len(paths(record)) == 1 and any(any(n["mask"]) for n in record["nodes"])
    return bool(expected_samples(record))


few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@pytest.mark.parametrize("policy", ["reject", "siblings"])
@few
@given(batch=batches())
def test_any_batch_becomes_what_the_reference_says(policy: str, batch: tuple[list[Record], list[Group]]) -> None:
    records, groups = batch
    conversion = converted(records, groups, branch_policy=policy)
    by_id = {r["id"]: r for r in records}
    kept = [g for g in groups if all(is_trainable(by_id[t], policy) for t in g.trace_ids)]
    expected = [s for g in kept for t in g.trace_ids for s in expected_samples(by_id[t])]
    made = samples(conversion)
    assert [fields(s) for s in made] == expected
    assert [s.index for s in made] == list(range(len(made)))
    assert set(conversion.dropped) == set(by_id) - {t for g in kept for t in g.trace_ids}
    first = {s.routing_key: s.index for s in reversed(made)}
    assert [s.rollout_id for s in made] == [first[s.routing_key] if policy == "siblings" else None for s in made]


@few
@given(tree=nodes())
def test_a_sampled_token_is_trained_once_unless_its_reply_was_asked_for_again(tree: list[Record]) -> None:
    """Tokens are numbered, so that each can be followed into the Samples."""
    numbers = iter(range(1000))
    tree = [n | {"token_ids": [next(numbers) for _ in n["token_ids"]]} for n in tree]
    record = trace(*tree)
    wanted = {
        token
        for i, node in enumerate(tree)
        if not (i not in {n["parent"] for n in tree} and is_superseded(record, i))
        for token, is_sampled in zip(node["token_ids"], node["mask"], strict=True)
        if is_sampled
    }
    trained = [
        token
        for sample in samples(converted([record], branch_policy="siblings"))
        for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask or [], strict=True)
        if mask
    ]
    assert sorted(trained) == sorted(wanted)


@few
@given(tree=nodes())
def test_any_branch_is_the_one_verifiers_gives(tree: list[Record]) -> None:
    record = trace(*tree)
    branches = to_trace(record).branches
    for sample in samples(converted([record], branch_policy="siblings")):
        branch = branches[sample.metadata["verifiers"]["branch_index"]]
        start = len(sample.tokens) - sample.response_length
        assert sample.tokens == branch.token_ids
        trained = [i for i, m in enumerate(sample.loss_mask or [], start) if m]
        assert all(branch.sampled_mask[i] for i in trained)
        assert [sample.rollout_log_probs[i - start] for i in trained if sample.rollout_log_probs] == [
            branch.logprobs[i] for i in trained
        ]


@few
@given(batch=batches(), seed=st.integers(0, 1000), rows=st.integers(1, 4))
def test_neither_the_order_of_rows_nor_their_chunks_matter(
    batch: tuple[list[Record], list[Group]], seed: int, rows: int
) -> None:
    records, groups = batch
    table, options = encode(records), ConvertOptions(branch_policy="siblings")
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    shuffled = pa.Table.from_batches(table.take(order).combine_chunks().to_batches(max_chunksize=rows))
    one, other = convert(table, groups, options), convert(shuffled, groups, options)
    assert digest(other.groups) == digest(one.groups)
    assert other.dropped == one.dropped
    assert sorted(map(str, other.findings)) == sorted(map(str, one.findings))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_recorded_traces_convert_alike_in_chunks_of_any_size(rows: int) -> None:
    records = [r for name in ("forks", "tools", "truncated", "group_rewards") for r in recorded(name)]
    groups, options = each_alone(records), ConvertOptions(branch_policy="siblings")
    table = encode(records)
    chunked = pa.Table.from_batches(table.to_batches(max_chunksize=rows))
    sliced = pa.concat_tables([table.slice(3), table.slice(0, 3)])
    whole = digest(convert(table, groups, options).groups)
    assert digest(convert(chunked, groups, options).groups) == whole
    assert digest(convert(sliced, groups, options).groups) == whole


def test_converting_twice_gives_equal_samples_that_share_nothing() -> None:
    table, given = encode([trace(*FORK)]), group([trace(*FORK)])
    options = ConvertOptions(branch_policy="siblings")
    one, other = convert(table, [given], options), convert(table, [given], options)
    assert one.groups == other.groups
    first = flatten(one.groups[0])[0]
    first.tokens.append(0)
    first.metadata["verifiers"]["rewards"]["ok"] = 5.0
    assert one.groups != other.groups


def test_siblings_do_not_share_their_metadata_or_rewards() -> None:
    first, second = samples(converted([trace(*FORK)], branch_policy="siblings", reward_key="ok"))
    first.metadata["verifiers"]["rewards"]["ok"] = 5.0
    assert isinstance(first.reward, dict)
    first.reward["ok"] = 5.0
    assert second.metadata["verifiers"]["rewards"] == {"ok": 1.0}
    assert second.reward == {"ok": 1.0, "reward": 1.0}


def test_no_traces_and_no_groups_convert_to_nothing() -> None:
    conversion = convert(encode([]), [])
    assert (conversion.groups, conversion.findings, conversion.dropped) == ([], [], {})
