"""Known ways to get tokens, log-probs and masks wrong: what checks and conversion make of each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_build import (
    Record,
    by_task,
    codes,
    converted,
    each_alone,
    group,
    reply,
    said,
    samples,
    trace,
    trained_ids,
    turn,
)
from typer.testing import CliRunner

from rolltape.replay import ConvertOptions, Finding, Status, check, convert
from rolltape.replay.cli import app
from rolltape.schema import Context, Turn, decode, encode, read_parquet, write_parquet


def found(record: Record, code: str, **options: Any) -> Finding:
    """The one finding of that code."""
    [finding] = [f for f in check(encode([record]), ConvertOptions(**options)) if f.code == code]
    return finding


def test_the_lowest_log_prob_belongs_to_the_sampled_token_it_was_given_for() -> None:
    record = trace(reply(None, [10, 11, 12, 13], [20, 21, 22], [-0.1, -9.0, -0.2]))
    [row] = encode([record]).to_pylist()
    assert row["logprobs"] == [None] * 4 + [np.float32(v) for v in (-0.1, -9.0, -0.2)]
    [sample] = samples(converted([record]))
    values = sample.rollout_log_probs or []
    assert sample.tokens[len(sample.tokens) - sample.response_length + int(np.argmin(values))] == 21


def test_log_probs_are_those_of_one_branch_and_end_with_it() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [2], [3, 4], [-1.0, -2.0]),
        said(0, [5], "edited"),
        reply(2, [6], [7], [-8.0]),
    )
    first, second = samples(converted([record], branch_policy="siblings"))
    assert first.rollout_log_probs == [-1.0, -2.0]
    assert second.rollout_log_probs == [-8.0]


def test_a_turn_that_branches_share_is_trained_once() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [], [10, 11, 12, 13, 14]),
        said(1, [2], role="tool"),
        reply(2, [], [20, 21, 22]),
        said(1, [3], "another result", role="tool"),
        reply(4, [], [30, 31, 32, 33]),
    )
    first, second = samples(converted([record], branch_policy="siblings"))
    assert trained_ids(first) == [10, 11, 12, 13, 14, 20, 21, 22]
    assert trained_ids(second) == [30, 31, 32, 33]
    assert second.tokens == [1, 10, 11, 12, 13, 14, 3, 30, 31, 32, 33]
    assert (second.response_length, second.loss_mask) == (4, [1, 1, 1, 1])


def test_an_end_token_that_was_never_sampled_shows_against_the_reported_count() -> None:
    record = trace(said(None, [1]), reply(0, [2], range(10, 20), [-1.0] * 9 + [0.0], prompt=2, completion=9))
    finding = found(record, "usage")
    assert (finding.severity, finding.node, finding.expected, finding.found) == ("warning", 1, 9, 10)


def test_log_probs_that_leave_out_the_stop_token_cost_the_trace() -> None:
    record = trace(said(None, [1]), reply(0, [2], [10, 11, 12], [-1.0, -2.0]))
    finding = found(record, "lists")
    assert finding.node == 1
    assert finding.found == {"logprobs": 2}
    assert converted([record]).dropped["t"][0] == "failed_check"


def test_log_probs_that_hold_a_trimmed_stop_token_cost_the_trace() -> None:
    record = trace(said(None, [1]), reply(0, [2], [10, 11], [-1.0, -2.0, -0.5]))
    assert found(record, "lists").found == {"logprobs": 3}
    assert samples(converted([record])) == []


def test_a_mask_shorter_than_its_tokens_is_named_and_costs_one_group_only() -> None:
    short = trace(said(None, [1]), reply(0, [], range(12), [], mask=[False] * 7), id="short")
    records = [short, turn(id="good", idx=1)]
    conversion = converted(records, by_task(records))
    assert [s.routing_key for s in samples(conversion)] == ["good"]
    [finding] = [f for f in conversion.findings if f.code == "lists"]
    assert (finding.trace_id, finding.node, finding.found) == ("short", 1, {"mask": 7})


def test_a_reply_without_token_ids_among_others_that_have_them_costs_the_trace() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [2], [3], text="first try"),
        reply(0, [2], [3, 4], text="first try, and more"),
        said(2, [5]),
        reply(3, [], [], text="words, but no tokens"),
    )
    finding = found(record, "no_tokens", branch_policy="siblings")
    assert finding.node == 4
    assert samples(converted([record], branch_policy="siblings")) == []


def test_what_a_retry_left_behind_is_not_trained() -> None:
    record = trace(said(None, [1]), reply(0, [2], [3], text="first try"), reply(0, [2], [4, 5], text="second try"))
    conversion = converted([record], branch_policy="siblings")
    [sample] = samples(conversion)
    assert trained_ids(sample) == [4, 5]
    [finding] = conversion.findings
    assert (finding.code, finding.severity, finding.node, finding.found) == ("asked_again", "warning", 1, 2)
    assert "[1] are left out" in finding.message


def test_a_trace_whose_only_answered_turn_was_asked_again_for_nothing_is_empty() -> None:
    record = trace(said(None, [1]), reply(0, [2], [3]), reply(0, [2], [], text=""))
    conversion = converted([record], branch_policy="siblings")
    assert samples(conversion) == []
    assert conversion.dropped["t"][0] == "empty"


def test_a_prompt_that_rewrote_an_earlier_answer_costs_the_trace() -> None:
    record = trace(
        said(None, [100]),
        reply(0, [], range(1, 9), prompt=1),
        said(1, [50, 51]),
        reply(2, [], [60], prompt=8),  # 100, 1 to 5, then two other ids: not the 11 tokens that are recorded
    )
    finding = found(record, "prompt_length")
    assert (finding.severity, finding.node, finding.expected, finding.found) == ("error", 3, 8, 11)
    assert converted([record]).dropped["t"][0] == "failed_check"


def test_a_separator_that_is_lost_at_each_turn_shows_at_the_first_turn_after_it() -> None:
    record = trace(
        said(None, [1, 2]),
        reply(0, [3], [4, 5], prompt=3),
        said(1, [6, 7], role="tool"),
        reply(2, [8], [9], prompt=9),
        said(3, [10], role="tool"),
        reply(4, [11], [12], prompt=13),
    )
    lost = [f for f in check(encode([record])) if f.code == "prompt_length"]
    assert [(f.node, f.expected, f.found) for f in lost] == [(3, 9, 8), (5, 13, 11)]


def test_prompt_lengths_are_followed_along_each_branch() -> None:
    record = trace(
        said(None, [1, 2]),
        reply(0, [3], [4, 5], prompt=3),
        said(0, [6], "edited"),
        reply(2, [7], [8], prompt=4),
    )
    assert codes(check(encode([record]), ConvertOptions(branch_policy="siblings"))) == []


def test_stored_ids_are_used_whatever_the_text_would_tokenise_to() -> None:
    text = "hello \ufffd world"
    record = trace(said(None, [1]), reply(0, [2], [900, 901, 902, 903], text=text, prompt=2))
    conversion = converted([record])
    [sample] = samples(conversion)
    assert conversion.findings == []
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 900, 901, 902, 903], 4, text)


def test_tool_output_counts_in_the_response_but_not_among_trained_tokens() -> None:
    record = trace(
        said(None, [1, 2, 3]),
        reply(0, [], [4, 5, 6, 7]),
        said(1, [8, 9, 10], role="tool"),
        reply(2, [], [11, 12, 13, 14, 15]),
    )
    [sample] = samples(converted([record]))
    assert sample.response_length == 12
    assert sum(sample.loss_mask or []) == 9
    [row] = encode([record]).to_pylist()
    assert (row["num_tokens"], row["num_sampled"]) == (15, 9)


def conversation(finishes: list[str], stop: str = "agent_completed") -> Record:
    nodes: list[Record] = []
    for i, finish in enumerate(finishes):
        nodes.append(said(len(nodes) - 1 if nodes else None, [1]))
        nodes.append(reply(len(nodes) - 1, [2], [100 + i], finish=finish))
    return trace(*nodes, stop=stop)


def test_a_conversation_whose_last_replies_were_cut_by_length_is_truncated() -> None:
    record = conversation(["stop"] * 17 + ["length"] * 13)
    [sample] = samples(converted([record]))
    assert sample.status is Status.TRUNCATED
    [row] = encode([record]).to_pylist()
    assert row["node_finish_reason"].count("length") == 13


def test_a_conversation_that_went_on_after_a_cut_reply_is_completed_and_the_cut_can_be_counted() -> None:
    record = conversation(["stop", "length", "stop"])
    [sample] = samples(converted([record]))
    assert sample.status is Status.COMPLETED
    [row] = encode([record]).to_pylist()
    assert row["node_finish_reason"].count("length") == 1


@pytest.mark.parametrize(
    "stop",
    ["max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length", "harness_timeout"],
)
def test_a_conversation_that_a_limit_ended_is_truncated(stop: str) -> None:
    [sample] = samples(converted([conversation(["stop"], stop=stop)]))
    assert sample.status is Status.TRUNCATED


def test_a_conversation_that_went_on_after_an_aborted_turn_costs_the_trace() -> None:
    record = conversation(["stop", "stop", "stop"])
    turns = [Turn(completion_tokens=1, finish_reason=reason) for reason in ("stop", "abort", "stop")]
    conversion = converted([record], contexts=[Context(turns=turns)])
    [finding] = conversion.findings
    assert (finding.code, finding.severity, finding.node) == ("aborted_turn", "error", 3)
    assert samples(conversion) == []


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.5])
def test_a_log_prob_that_is_no_log_prob_costs_the_trace_with_its_place(value: float) -> None:
    record = trace(said(None, [1]), reply(0, [2], [3, 4, 5], [-0.1, value, -0.2]))
    finding = found(record, "logprob_value")
    assert (finding.node, finding.position, finding.found) == (1, 2, str(value))
    assert samples(converted([record])) == []


def test_a_log_prob_just_above_zero_is_rounding_and_only_warned_about() -> None:
    record = trace(said(None, [1]), reply(0, [2], [3, 4], [-0.1, 2.0**-12]))
    assert found(record, "logprob_rounding").severity == "warning"
    [sample] = samples(converted([record]))
    assert sample.rollout_log_probs == [float(np.float32(-0.1)), 2.0**-12]


def test_a_null_among_log_probs_costs_the_trace_with_its_place() -> None:
    values: list[Any] = [-0.5] * 20
    values[7] = None
    record = trace(said(None, [1]), reply(0, [2], range(100, 120), values))
    finding = found(record, "lists")
    assert finding.found == {"logprobs": 20, "null log-probs at": [7]}
    assert samples(converted([record])) == []


def test_log_probs_and_rewards_that_are_no_numbers_survive_being_saved(tmp_path: Any) -> None:
    record = trace(said(None, [1]), reply(0, [2], [3, 4, 5], [-0.1, math.nan, -math.inf]), rewards={"ok": math.nan})
    write_parquet(tmp_path / "t.parquet", [encode([record])])
    table = read_parquet(tmp_path / "t.parquet")
    [back] = decode(table)
    values = back["nodes"][1]["logprobs"]
    assert values[0] == -0.1
    assert math.isnan(values[1])
    assert values[2] == -math.inf
    assert math.isnan(back["rewards"]["ok"])
    conversion = convert(table, [group([record])])
    assert codes(conversion.findings, "error")[:2] == ["logprob_value", "reward_value"]


def test_sampled_tokens_without_any_log_prob_cost_the_trace() -> None:
    record = trace(said(None, [1]), reply(0, [2], [3, 4, 5], []))
    finding = found(record, "logprob_missing")
    assert (finding.severity, finding.node, finding.position, finding.found) == ("error", 1, 1, 3)
    assert samples(converted([record])) == []
    [row] = encode([record]).to_pylist()
    assert row["logprobs"] == [None] * 5


def test_traces_without_token_ids_are_counted_and_none_is_trained() -> None:
    records = [trace(said(None, []), reply(0, [], [], text="words"), id=str(i)) for i in range(4)]
    conversion = converted(records)
    assert codes(conversion.findings).count("no_trainable_token") == 4
    assert conversion.groups == []
    assert {d for d, _ in conversion.dropped.values()} == {"empty"}


def test_traces_whose_mask_is_all_false_are_counted_and_none_is_trained() -> None:
    records = [trace(said(None, [1, 2]), reply(0, [3, 4], [], text=""), id=str(i)) for i in range(4)]
    conversion = converted(records)
    assert codes(conversion.findings) == ["no_trainable_token"] * 4
    assert all("0 trainable tokens in 2 nodes" in f.message for f in conversion.findings)
    assert conversion.groups == []


@pytest.mark.parametrize(
    "empty",
    [
        trace(said(None, []), reply(0, [], [], text="words")),
        trace(said(None, [1, 2]), reply(0, [3, 4], [], text="words", mask=[False] * 2)),
    ],
    ids=["no token ids", "nothing sampled"],
)
def test_a_file_of_traces_that_train_nothing_fails_verification_and_says_how_many(
    tmp_path: Path, empty: Record
) -> None:
    lines = [json.dumps({**empty, "id": str(i)}) for i in range(4)]
    (tmp_path / "traces.jsonl").write_text("\n".join(lines) + "\n")
    run = CliRunner()
    assert run.invoke(app, ["import", f"{tmp_path}/traces.jsonl", "--run", f"{tmp_path}/run"]).exit_code == 0
    result = run.invoke(app, ["verify", f"{tmp_path}/run", "--json"])
    assert result.exit_code == 1
    codes_found = [finding["code"] for finding in json.loads(result.output)["findings"]]
    assert codes_found.count("no_trainable_token") == 4
    result = run.invoke(app, ["convert", f"{tmp_path}/run", "--out", f"{tmp_path}/samples.jsonl"])
    assert "0 samples: no trace of this step gives one" in result.output


def test_an_empty_completion_is_no_sample() -> None:
    record = trace(said(None, [1, 2]), reply(0, [3], [], text="", completion=0, prompt=3))
    conversion = converted([record])
    assert samples(conversion) == []
    assert conversion.dropped["t"][0] == "empty"


def with_temperature(*values: float | None) -> tuple[list[Record], list[Context]]:
    records = [turn(id=str(i)) for i in range(len(values))]
    return records, [Context(sampling=None if v is None else {"temperature": v}) for v in values]


def test_a_batch_that_mixes_temperatures_is_reported_and_a_missing_one_is_unknown() -> None:
    records, contexts = with_temperature(1.0, 0.7, None)
    [finding] = converted(records, contexts=contexts).findings
    assert (finding.code, finding.severity, finding.found) == ("temperature", "warning", ["0.7", "1.0", "unknown"])


@pytest.mark.parametrize("value", [1.0, None])
def test_a_batch_of_one_temperature_is_not_reported(value: float | None) -> None:
    records, contexts = with_temperature(value, value)
    assert converted(records, contexts=contexts).findings == []


def with_versions(*versions: str | None) -> tuple[list[Record], list[Context]]:
    turns = [Turn(weight_version=v, completion_tokens=1) for v in versions]
    return [conversation(["stop"] * len(versions))], [Context(turns=turns)]


def test_the_weight_version_of_every_turn_is_kept_in_order() -> None:
    records, contexts = with_versions("7", "7", "8")
    conversion = converted(records, contexts=contexts)
    assert samples(conversion)[0].weight_versions == ["7", "7", "8"]
    assert conversion.findings == []


def test_a_missing_weight_version_is_left_out_and_not_made_up() -> None:
    records, contexts = with_versions("7", None, "8")
    [row] = encode(records, contexts).to_pylist()
    assert row["turn_weight_version"] == ["7", None, "8"]
    assert samples(converted(records, contexts=contexts))[0].weight_versions == ["7", "8"]


def test_weight_versions_that_go_back_are_reported() -> None:
    records, contexts = with_versions("8", "7")
    [finding] = converted(records, contexts=contexts).findings
    assert (finding.code, finding.severity, finding.found) == ("weight_versions", "warning", [8, 7])


def test_a_long_trajectory_is_never_cut() -> None:
    nodes: list[Record] = []
    for _ in range(5):
        nodes.append(said(len(nodes) - 1 if nodes else None, range(1000)))
        nodes.append(reply(len(nodes) - 1, [2], range(4000)))
    [sample] = samples(converted([trace(*nodes)]))
    assert len(sample.tokens) == 5 * 5001
    assert sum(sample.loss_mask or []) == 5 * 4000
    assert len(sample.rollout_log_probs or []) == sample.response_length == 5 * 5001 - 1001


def test_a_start_token_that_stands_twice_is_warned_about_and_still_converts() -> None:
    first = said(None, [151643, 151643, 872], is_content=[False, False, True])
    record = trace(first, reply(0, [2], [3]))
    finding = found(record, "double_start")
    assert (finding.severity, finding.node, finding.found) == ("warning", 0, 151643)
    assert len(samples(converted([record]))) == 1


def test_a_word_that_stands_twice_at_the_start_is_no_doubled_start_token() -> None:
    record = trace(said(None, [872, 872]), reply(0, [2], [3]))
    assert check(encode([record])) == []


def test_means_over_recorded_log_probs_leave_out_tokens_that_were_not_sampled() -> None:
    record = trace(
        said(None, [1]),
        reply(0, [], range(100, 105), [-1.0] * 5),
        said(1, range(200, 210), role="tool"),
        reply(2, [], range(300, 305), [-3.0] * 5),
    )
    [sample] = samples(converted([record]))
    values, mask = np.array(sample.rollout_log_probs), np.array(sample.loss_mask)
    assert values[mask == 1].mean() == -2.0
    assert set(values[mask == 0]) == {0.0}
    column = np.array([v for v in encode([record]).column("logprobs")[0].as_py() if v is not None])
    assert column.mean() == -2.0


@pytest.mark.parametrize(("ids", "limit"), [([3, -1], None), ([3, 1000], 1000), ([3, 2**31 - 1], 151936)])
def test_token_ids_outside_the_vocabulary_cost_the_trace(ids: list[int], limit: int | None) -> None:
    record = trace(said(None, [1]), reply(0, [2], ids))
    finding = found(record, "token_id", vocab_size=limit)
    assert (finding.node, finding.position, finding.found) == (1, 2, ids[1])
    assert samples(converted([record], vocab_size=limit)) == []


@pytest.mark.parametrize("ids", [[2**31], [2**80], [1.5], ["7"]])
def test_token_ids_that_are_no_ids_cost_the_trace(ids: list[Any]) -> None:
    record = trace(said(None, [1]), reply(0, [], ids))
    assert found(record, "lists").node == 1
    assert samples(converted([record])) == []


@pytest.mark.parametrize(
    "node",
    [
        reply(0, [2], [3]) | {"sampled": False},
        reply(0, [2], [3]) | {"message": {"role": "user", "content": "typed by nobody"}},
    ],
)
def test_sampled_tokens_on_a_message_the_model_did_not_produce_cost_the_trace(node: Record) -> None:
    record = trace(said(None, [1]), node, reply(1, [4], [5]))
    finding = found(record, "sampled_place")
    assert (finding.node, finding.found) == (1, 1)
    assert samples(converted([record])) == []


def test_no_check_stops_at_the_first_finding() -> None:
    record = trace(
        said(None, [-1]),
        reply(0, [2], [3, 4], [math.nan, -1.0]),
        said(5, [6]),
        reply(2, [7], [8], [0.5]),
        rewards={"ok": math.inf},
    )
    found_codes = codes(check(encode([record])), "error")
    assert sorted(set(found_codes)) == ["branches", "logprob_value", "parent", "reward_value", "token_id"]
    assert found_codes.count("logprob_value") == 2


def test_findings_come_in_the_order_of_the_rows() -> None:
    bad = trace(said(None, [1]), reply(0, [2], [3], [0.5]))
    records = [{**bad, "id": "a"}, turn(id="b"), {**bad, "id": "c"}]
    assert [f.trace_id for f in check(encode(records))] == ["a", "c"]


def test_one_bad_trace_costs_its_group_and_no_other() -> None:
    bad = trace(said(None, [1]), reply(0, [2], [3], []), id="bad")
    records = [turn(id="a"), bad, turn(id="b", idx=1), turn(id="c", idx=1)]
    conversion = converted(records, by_task(records))
    assert [s.routing_key for s in samples(conversion)] == ["b", "c"]
    assert conversion.dropped["bad"][0] == "failed_check"
    assert conversion.dropped["bad"][1].startswith("logprob_missing: node 1")
    assert conversion.dropped["a"] == ("incomplete_group", "group 0 has 1 of 2 sound rollouts (1 failed_check)")


def test_messages_name_step_group_trace_and_node() -> None:
    record = trace(said(None, [1]), reply(0, [2], [3], [0.5]), id="abc")
    [finding] = check(encode([record], [Context(step=4, group_index=2)]))
    assert str(finding).startswith("error logprob_value (step 4, group 2, trace abc, node 1, token 1): node 1 has")


def test_every_trace_alone_is_a_group_of_one() -> None:
    records = [turn(id="a"), turn(id="b")]
    assert len(converted(records, each_alone(records)).groups) == 2
