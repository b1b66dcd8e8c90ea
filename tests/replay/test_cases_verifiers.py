"""Ways in which episodes go wrong, and damaged message graphs: what checks and conversion make of each."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from replay_build import (
    Record,
    by_task,
    codes,
    converted,
    each_alone,
    group,
    recorded,
    reply,
    said,
    samples,
    trace,
    trained_ids,
    turn,
)

from rolltape.replay import ConvertOptions, Status, check, convert
from rolltape.replay.branches import leaves, path_to
from rolltape.schema import Context, decode, encode

# -- conversations that ran twice, or were answered twice


def test_a_conversation_that_stands_twice_under_two_roots_is_flagged_and_not_trained_by_default() -> None:
    chain = [said(None, [1]), reply(0, [2], [3])]
    again = [said(None, [1], "a question again"), reply(2, [2], [4])]
    conversion = converted([trace(*chain, *again)])
    assert codes(conversion.findings) == ["branches", "roots"]
    assert samples(conversion) == []


def test_a_conversation_that_stands_twice_under_one_root_is_flagged_under_both_policies() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [2], [3]),
        said(1, [4], role="tool"),
        reply(2, [5], [6]),
        reply(0, [2], [7]),
        said(4, [4], role="tool"),
        reply(5, [5], [8]),
    )
    assert samples(converted([record])) == []
    conversion = converted([record], branch_policy="siblings")
    [finding] = conversion.findings
    assert (finding.code, finding.severity, finding.node, finding.found) == ("asked_again", "warning", 1, 2)
    first, second = samples(conversion)
    assert (first.reward, second.reward, first.rollout_id, second.rollout_id) == (1.0, 1.0, 0, 0)


def test_of_two_summaries_the_rejected_one_is_left_out_and_the_prefix_is_trained_once() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [2], [10]),
        said(1, [3], "summarise"),
        reply(2, [4], [20], text="rejected"),
        reply(2, [4], [21], text="accepted"),
        said(None, [5], "the accepted summary"),
        reply(5, [6], [30]),
    )
    conversion = converted([record], branch_policy="siblings")
    assert [trained_ids(s) for s in samples(conversion)] == [[10, 21], [30]]
    assert codes(conversion.findings, "warning") == ["asked_again", "roots"]


def test_a_history_that_was_edited_is_no_retry_and_what_it_replaced_stays_trained() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [2], [10], text="as sampled"),
        said(0, [2, 10], "as edited", role="assistant"),
        said(2, [3]),
        reply(3, [4], [20]),
    )
    conversion = converted([record], branch_policy="siblings")
    assert [trained_ids(s) for s in samples(conversion)] == [[10], [20]]
    assert conversion.findings == []


def test_the_message_about_a_fork_names_the_node_and_the_settings_that_avoid_it() -> None:
    record = trace(said(None, [1]), reply(0, [2], [3]), said(0, [4], "edited"), reply(2, [5], [6]))
    [finding] = check(encode([record]))
    assert (finding.code, finding.node, finding.expected, finding.found) == ("branches", 2, 1, 2)
    assert "thinking_retention" in finding.message
    assert "enable_thinking" in finding.message
    assert "branch_policy = 'siblings'" in finding.message


@pytest.mark.parametrize("at", [3, 7, 9, 10])
def test_recorded_forks_name_the_node_where_the_second_branch_begins(at: int) -> None:
    record = recorded("forks")[at]
    [finding] = check(encode([record]))
    assert finding.node is not None
    parent = record["nodes"][finding.node]["parent"]
    siblings = [i for i, n in enumerate(record["nodes"]) if n["parent"] == parent]
    assert finding.node in siblings[1:]


# -- scoring and time


def test_messages_that_came_after_scoring_had_begun_cost_the_trace() -> None:
    record = turn()
    record["timing"]["scoring"] = {"start": 999.0, "end": 1001.0}
    [finding] = check(encode([record]))
    assert (finding.code, finding.severity, finding.node, finding.found) == ("late_node", "error", 0, 2)
    conversion = converted([record])
    assert samples(conversion) == []
    assert encode([record]).column("reward").to_pylist() == [1.0]


def test_messages_that_came_before_scoring_do_not() -> None:
    record = turn()
    record["timing"]["scoring"] = {"start": 1000.5, "end": 1001.0}
    assert check(encode([record])) == []


def test_the_recorded_late_reply_is_found() -> None:
    record = recorded("errors")[7]
    [finding] = check(encode([record]))
    assert (finding.code, finding.trace_id) == ("late_node", record["id"])


def test_a_timeout_that_was_scored_is_truncated_and_one_that_is_an_error_is_not_trained() -> None:
    records = [
        turn(id="scored", stop="harness_timeout"),
        turn(id="error", idx=1, reward=None, errors=["TimeoutError: 60 s"]),
    ]
    conversion = converted(records, by_task(records))
    [sample] = samples(conversion)
    assert (sample.routing_key, sample.status) == ("scored", Status.TRUNCATED)
    assert conversion.dropped["error"] == ("error", "TimeoutError: 60 s")
    rows = encode(records).to_pylist()
    assert [(r["stop_condition"], r["error_types"]) for r in rows] == [
        ("harness_timeout", []),
        ("agent_completed", ["TimeoutError"]),
    ]


# -- nothing was said


def test_a_trace_without_nodes_says_its_error_rather_than_that_it_is_empty() -> None:
    records = [
        trace(id="crashed", errors=["HarnessError: exit code 3"], rewards={}),
        trace(id="silent", idx=1),
        turn(id="retried", idx=2, errors=["ProviderError: 400"]),
    ]
    conversion = converted(records, by_task(records))
    assert conversion.dropped["crashed"] == ("error", "HarnessError: exit code 3")
    assert conversion.dropped["silent"][0] == "empty"
    assert conversion.dropped["retried"] == ("error", "ProviderError: 400")


def test_of_several_errors_the_last_one_is_the_reason() -> None:
    record = trace(errors=["ProviderError: first", "ProviderError: second"], rewards={})
    assert converted([record]).dropped["t"] == ("error", "ProviderError: second")


def test_the_recorded_retry_that_succeeded_is_sound() -> None:
    record = recorded("errors")[14]
    assert record["errors"] == []
    assert len(samples(converted([record]))) == 1


@pytest.mark.parametrize("name", ["errors", "zero", "truncated"])
def test_each_recorded_trace_that_is_not_trained_has_the_reason_it_was_made_for(name: str) -> None:
    records = recorded(name)
    conversion = converted(records, each_alone(records))
    for record in records:
        disposition, reason = conversion.dropped.get(record["id"], ("emitted", ""))
        if record["errors"]:
            assert disposition == "error"
            assert reason.startswith(record["errors"][-1]["type"])
        elif not any(any(n["mask"]) for n in record["nodes"]):
            assert disposition == "empty"
        else:
            assert disposition in ("emitted", "failed_check")


# -- what a Sample cannot carry


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, {"type": "input_audio", "data": "AA"}],
)
def test_images_and_sounds_are_not_trained_as_text(part: Record) -> None:
    picture = said(None, [1, 151655, 151655, 2])
    picture["message"]["content"] = [{"type": "text", "text": "what is this?"}, part]
    record = trace(picture, reply(0, [3], [4]))
    [finding] = check(encode([record]))
    assert (finding.code, finding.severity, finding.node) == ("image", "error", 0)
    assert samples(converted([record])) == []


def test_content_in_text_parts_is_text() -> None:
    parts = said(None, [1, 2])
    parts["message"]["content"] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    conversion = converted([trace(parts, reply(0, [3], [4]))])
    assert conversion.findings == []
    assert len(samples(conversion)) == 1


def test_each_branch_keeps_its_own_images_in_order_after_the_context_was_rewritten() -> None:
    def shown(parent: int | None, *names: str) -> Record:
        node = said(parent, [1])
        node["message"]["content"] = [{"type": "image_url", "image_url": {"url": f"data:,{name}"}} for name in names]
        return node

    record = trace(
        shown(None, "one", "two"),
        reply(0, [2], [3]),
        shown(1, "three"),
        reply(2, [2], [4]),
        shown(None, "two", "four"),
        reply(4, [2], [5]),
        shown(5, "five"),
        reply(6, [2], [6]),
    )
    table = encode([record])
    assert decode(table) == [record]
    [row] = table.to_pylist()
    parents = [-1 if parent is None else parent for parent in row["node_parent"]]
    seen = [
        [
            part["image_url"]["url"][6:]
            for n in path_to(leaf, parents)
            for part in json.loads(row["node_parts"][n] or "[]")
        ]
        for leaf in leaves(parents)
    ]
    assert seen == [["one", "two", "three"], ["two", "four", "five"]]


# -- counts


def test_stored_sequence_and_trained_tokens_are_three_numbers() -> None:
    nodes = [said(None, range(1000))]
    for b in range(3):
        nodes.append(reply(0, [], range(2000 + 10 * b, 2010 + 10 * b)))
        nodes.append(said(len(nodes) - 1, [], "go on", role="tool"))
    record = trace(*nodes)
    [row] = encode([record]).to_pylist()
    made = samples(converted([record], branch_policy="siblings"))
    assert (row["num_tokens"], row["num_sampled"], row["num_branches"]) == (1030, 30, 3)
    assert sum(len(s.tokens) for s in made) == 3030
    assert sum(sum(s.loss_mask or []) for s in made) == 30


def test_usage_without_token_ids_stays_a_count_of_its_own() -> None:
    node = reply(0, [], [], text="words", prompt=12, completion=5)
    [row] = encode([trace(said(None, []), node)]).to_pylist()
    assert (row["num_tokens"], row["num_sampled"]) == (0, 0)
    assert (row["node_prompt_tokens"], row["node_completion_tokens"]) == ([None, 12], [None, 5])


def test_a_completion_count_that_differs_from_the_ids_is_reported_and_does_not_stop_training() -> None:
    record = trace(said(None, [1]), reply(0, [2], [3, 4], prompt=2, completion=3))
    conversion = converted([record])
    [finding] = conversion.findings
    assert (finding.code, finding.severity, finding.expected, finding.found) == ("usage", "warning", 3, 2)
    assert len(samples(conversion)) == 1


def test_one_drifting_conversation_of_sixty_four_is_kept_out_and_the_rest_goes_on() -> None:
    records = [
        trace(
            said(None, [1]),
            reply(0, [2], [3, 4], prompt=2),
            said(1, [5]),
            reply(2, [6], [7], prompt=5 if i == 17 else 6),
            id=str(i),
            idx=i,
        )
        for i in range(64)
    ]
    conversion = converted(records, by_task(records))
    [finding] = conversion.findings
    assert (finding.code, finding.trace_id, finding.node) == ("prompt_length", "17", 3)
    assert (finding.expected, finding.found) == (5, 6)
    assert len(samples(conversion)) == 63


def test_duplicated_and_surplus_traces_are_named() -> None:
    records = [turn(id=str(i)) for i in range(6)]
    conversion = convert(encode([*records, records[2]]), [group(records, size=4)])
    assert sorted(codes(conversion.findings)) == ["group_size", "trace_twice"]
    assert conversion.groups == []


# -- message graphs that are none


def graph(*parents: Any) -> Record:
    nodes = [reply(None, [1], [2]) if i % 2 else said(None, [3]) for i in range(len(parents))]
    return trace(*(n | {"parent": p} for n, p in zip(nodes, parents, strict=True)))


@pytest.mark.parametrize("policy", ["reject", "siblings"])
@pytest.mark.parametrize(
    ("parents", "bad"),
    [
        ([None, 1], [1]),
        ([0, 0], [0]),
        ([1, 0], [0]),
        ([2, 0, 1], [0]),
        ([None, 2, 0], [1]),
        ([None, -1], [1]),
        ([None, -(2**31)], [1]),
        ([None, 7], [1]),
        ([None, 2**31 - 1], [1]),
        ([None, 2**40], [1]),
        ([None, "0"], [1]),
        ([None, 0.0], [1]),
        ([None, True], [1]),
        ([-1, -2, 5, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_parents_that_are_no_earlier_node_cost_the_trace_and_never_hang(
    parents: list[Any], bad: list[int], policy: str
) -> None:
    records = [graph(*parents), turn(id="good", idx=1)]
    conversion = converted(records, by_task(records), branch_policy=policy)
    assert [f.node for f in conversion.findings if f.code == "parent"] == bad
    assert [s.routing_key for s in samples(conversion)] == ["good"]
    assert conversion.dropped["t"][0] == "failed_check"


def test_any_parents_at_all_are_checked_without_a_hang() -> None:
    dice = random.Random(0)
    for _ in range(200):
        size = dice.randint(1, 8)
        parents = [dice.choice([None, *range(-2, size + 2)]) for _ in range(size)]
        sound = all(p is None or 0 <= p < i for i, p in enumerate(parents))
        found = codes(check(encode([graph(*parents)]), ConvertOptions(branch_policy="siblings")))
        assert ("parent" not in found) == sound


@pytest.mark.parametrize(
    "broken",
    [
        {"nodes": None},
        {"nodes": "none"},
        {"nodes": [{}]},
        {"nodes": [{"parent": None}]},
        {"nodes": [{"message": None, "token_ids": None, "mask": None}]},
        {"task": None},
        {"task": {"type": "X", "data": {"idx": "seven"}}},
        {"rewards": None},
        {"rewards": {"ok": "high"}},
        {"rewards": {"ok": [1.0]}},
        {"errors": None, "nodes": []},
        {"timing": None, "nodes": []},
    ],
)
def test_a_record_that_is_damaged_in_any_place_costs_itself_only(broken: Record) -> None:
    records = [turn(id="bad", idx=9) | broken, turn(id="good", idx=1)]
    groups = [group([turn(id="bad", idx=9)], 0), group(records[1:], 1)]
    conversion = converted(records, groups)
    made = [s.routing_key for s in samples(conversion)]
    assert made[-1] == "good"
    if broken.keys() != {"task"}:
        assert made == ["good"]
        assert conversion.dropped["bad"][1]


def test_a_check_reads_every_column_it_needs_from_a_projection() -> None:
    from rolltape.replay.view import COLUMNS

    records = [r for name in ("forks", "errors", "zero") for r in recorded(name)]
    table = encode(records, [Context() for _ in records])
    assert list(map(str, check(table.select(COLUMNS)))) == list(map(str, check(table)))
