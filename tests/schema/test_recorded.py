"""Recorded traces of every release come back bit for bit, and their columns say what Verifiers says of them."""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from renderers.base import MultiModalData, PlaceholderRange
from schema_records import FILES, TRACES, node, record, recorded, text_of
from verifiers.v1.graph import message_hash
from verifiers.v1.trace import WireTrace

from rolltape.schema import BadInput, Context, MissingExtra, Turn, decode, encode, to_trace
from rolltape.schema.parquet import read_parquet, write_parquet

READABLE = [f for f in FILES if f.startswith("0.2.0/") and "written_by" not in f]
"""Files that the installed Verifiers reads."""
WITH_FACTS = [f for f in FILES if (TRACES / f).with_suffix(".facts.json").exists()]


def kept(traces: list[Any], folder: Path) -> list[dict[str, Any]]:
    """What is read back of `traces` from a Parquet file."""
    write_parquet(folder / "a.parquet", [encode(traces)])
    return decode(read_parquet(folder / "a.parquet"))


def same_trace(found: Any, expected: Any) -> bool:
    """Whether two Verifiers traces are equal, raw arrays included and NaN equal to NaN."""
    if text_of(found.to_record()) != text_of(expected.to_record()):
        return False
    return all(_same_arrays(a, b) for a, b in zip(found.nodes, expected.nodes, strict=True))


def _same_arrays(a: Any, b: Any) -> bool:
    return _same(a.routed_experts, b.routed_experts) and _same(
        a.multi_modal_data and vars(a.multi_modal_data), b.multi_modal_data and vars(b.multi_modal_data)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


# -- bit for bit


def test_the_traces_of_four_releases_are_here() -> None:
    assert {f.split("/")[0] for f in FILES} == {"0.2.0", "0.2.1", "0.3.0", "0.4.0"}
    assert sum(len(recorded(f)) for f in FILES) > 100


@pytest.mark.parametrize("name", FILES)
def test_every_recorded_trace_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    traces = recorded(name)
    table = encode(traces)
    assert [text_of(r) for r in decode(table)] == [text_of(r) for r in traces]
    assert [text_of(r) for r in kept(traces, tmp_path)] == [text_of(r) for r in traces]
    assert table["problems"].null_count == len(traces)


@pytest.mark.parametrize("name", READABLE)
def test_a_decoded_record_is_the_trace_that_verifiers_reads(name: str, tmp_path: Path) -> None:
    traces = recorded(name)
    for found, given in zip(kept(traces, tmp_path), traces, strict=True):
        assert same_trace(to_trace(found), WireTrace.model_validate(given))


@pytest.mark.parametrize("name", READABLE)
def test_a_trace_object_and_its_record_make_the_same_row(name: str) -> None:
    traces = recorded(name)
    objects = [WireTrace.model_validate(t) for t in traces]
    assert text_of(decode(encode(objects))) == text_of(traces)
    left, right = encode(objects), encode(traces)
    assert [c for c in left.column_names if not _same_column(left[c], right[c])] == []


def _same_column(a: Any, b: Any) -> bool:
    return repr(a.to_pylist()) == repr(b.to_pylist())


def test_all_recorded_traces_of_a_release_share_one_file(tmp_path: Path) -> None:
    """Rows with and without errors, tools, nodes and rewards in one table, in either order."""
    traces = [t for f in FILES if f.startswith("0.2.0/") and "written" not in f for t in recorded(f)]
    for order in (traces, traces[::-1]):
        assert [text_of(r) for r in kept(order, tmp_path)] == [text_of(r) for r in order]


def test_rows_survive_slicing_and_reordering() -> None:
    """Tables as readers cut them: slices share buffers and begin in the middle."""
    traces = recorded("0.2.0/errors.jsonl") + recorded("0.2.0/tools.jsonl")
    table = encode(traces)
    assert text_of(decode(table.slice(3, 9))) == text_of(traces[3:12])
    assert text_of(decode(table.slice(15))) == text_of(traces[15:])
    assert text_of(decode(table.take([16, 0, 11]))) == text_of([traces[16], traces[0], traces[11]])
    assert decode(table.slice(0, 0)) == []


# -- raw arrays, images, provider state


def rich_trace() -> Any:
    """A trace with everything that a 0.2.0 Trace object can hold."""
    given = record(
        nodes=[
            node(
                role="user",
                content=[
                    {"type": "text", "text": "what is this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                    {"type": "text", "text": "and this \u2028 \ud800"},
                ],
                ids=[1, 2, 3],
                mask=[False] * 3,
            ),
            node(
                role="assistant",
                content=None,
                ids=[4, 5],
                mask=[False, True],
                logprobs=[-0.1],
                parent=0,
                is_content=[False, True],
            ),
        ]
    )
    given["nodes"][1]["message"] |= {
        "reasoning_content": "",
        "tool_calls": [{"id": "c", "name": "look", "arguments": '{"q": 1.0}'}],
        "provider_state": [{"type": "reasoning", "encrypted": "eA==", "n": 2**70}, {}],
    }
    given["nodes"][1]["usage"] = {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "cached_input_tokens": None,
        "reasoning_tokens": 0,
        "cost": 0.125,
    }
    trace = WireTrace.model_validate(given)
    rng = np.random.default_rng(0)
    trace.nodes[0].routed_experts = rng.integers(0, 256, (3, 4, 2)).astype(np.uint8)
    trace.nodes[1].routed_experts = np.zeros((2, 0, 2), np.uint8)
    trace.nodes[0].multi_modal_data = MultiModalData(
        mm_hashes={"image": ["ab"]},
        mm_placeholders={"image": [PlaceholderRange(offset=1, length=2)]},
        mm_items={
            "image": [{"pixel_values": rng.normal(size=(4, 6)).astype(np.float32), "grid": np.array([[1, 2, 2]])}]
        },
    )
    return trace


def test_arrays_images_and_provider_state_survive(tmp_path: Path) -> None:
    trace = rich_trace()
    (found,) = kept([trace], tmp_path)
    assert same_trace(to_trace(found), trace)
    assert text_of(encode([trace])["problems"].to_pylist()) == "[null]"


def test_what_was_decoded_can_be_encoded_again(tmp_path: Path) -> None:
    once = kept([rich_trace()], tmp_path)
    again = kept(once, tmp_path)
    assert again == once
    assert isinstance(once[0]["nodes"][0]["routed_experts"]["data"], bytes)


def test_arrays_are_kept_compressed(tmp_path: Path) -> None:
    trace = rich_trace()
    trace.nodes[0].routed_experts = np.zeros((3, 60, 8_000), np.uint8)
    (found,) = kept([trace], tmp_path)
    assert same_trace(to_trace(found), trace)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000


def test_encoding_changes_nothing_in_the_trace() -> None:
    trace, untouched = rich_trace(), rich_trace()
    encode([trace])
    assert same_trace(trace, untouched)


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], "text"])
def test_null_empty_and_missing_content_stay_apart(content: Any, tmp_path: Path) -> None:
    given = record(nodes=[node(role="user", content=content, ids=[], mask=[])])
    assert kept([given], tmp_path) == [given]


@pytest.mark.parametrize(
    "message", [None, {}, "x", [], {"role": None}, {"role": "user"}, {"content": "x", "role": "user"}]
)
def test_a_message_of_any_shape_comes_back(message: Any, tmp_path: Path) -> None:
    given = record()
    given["nodes"][0]["message"] = message
    assert text_of(kept([given], tmp_path)) == text_of([given])


def test_keys_that_look_like_another_place_stay_apart(tmp_path: Path) -> None:
    """Whatever a record calls its keys, they do not meet what we keep beside the columns."""
    given = record(
        nodes_=1, **{"0": 2, "$bytes": "eA==", "$packed": True, "top": {"id": 3}, "extra": {"$bytes": "eA=="}}
    )
    given["nodes"][0] |= {"message.content": 4, "content": 5, "role": 6, "$bytes": b"\xff", "logprobs64": 7}
    given["nodes"][0]["message"] |= {"message": 8, "token_ids": 9, "node_content": 10}
    given["nodes"][1]["logprobs"] = [-0.1, -0.2]
    (found,) = kept([given], tmp_path)
    assert found == given
    assert [list(x) for x in (found, *found["nodes"])] == [list(x) for x in (given, *given["nodes"])]


@pytest.mark.parametrize(
    "info",
    [{}, {"a": {}}, {"a": []}, {"a": None}, {"a": ""}, {"score": 1}, {"score": 1.0}, {"score": True}, {"score": "n/a"}],
)
def test_values_that_a_typed_table_would_unify_stay_as_they_are(info: dict[str, Any], tmp_path: Path) -> None:
    """Two tool calls with different arguments, values of different types under one name, empty objects."""
    calls = [
        {"id": "1", "name": "move", "arguments": '{"x": 1, "y": 2}'},
        {"id": "2", "name": "speak", "arguments": "{}"},
    ]
    given = [record(info=info), record(id="t1", info={"score": {"deep": [1, "1", 1.0]}}), record(id="t2")]
    given[0]["nodes"][1]["message"]["tool_calls"] = calls
    given[1]["nodes"][1]["message"]["tool_calls"] = []
    assert text_of(kept(given, tmp_path)) == text_of(given)


def test_keys_that_first_appear_in_a_later_row_are_kept(tmp_path: Path) -> None:
    given = [
        record(rewards={"a": 1.0}),
        record(id="t1", rewards={"a": 1.0, "b": 0.5}),
        record(id="t2", new_in_0_9={"x": [1]}),
    ]
    given[2]["nodes"][0]["new_too"] = False
    assert text_of(kept(given, tmp_path)) == text_of(given)
    assert encode(given)["rewards"].to_pylist() == [[("a", 1.0)], [("a", 1.0), ("b", 0.5)], [("ok", 1.0)]]


def test_messages_keep_the_identity_that_verifiers_gives_them(tmp_path: Path) -> None:
    """Its hash decides which turns share a prefix: no argument may be gained, lost or reordered."""
    traces = recorded("0.2.0/tools.jsonl") + recorded("0.2.0/forks.jsonl")
    for found, given in zip(kept(traces, tmp_path), traces, strict=True):
        hashes = [[message_hash(n.message) for n in WireTrace.model_validate(t).nodes] for t in (found, given)]
        assert hashes[0] == hashes[1]


def test_json_nested_as_deeply_as_json_itself_goes_survives() -> None:
    deep: Any = math.nan
    for _ in range(300):
        deep = {"a": [deep]}
    given = [record(info={"deep": deep}, future=deep), record(id="t1", info=json.loads("[" * 900 + "]" * 900))]
    table = encode(given)

    def deeper(levels: int) -> list[dict[str, Any]]:
        return deeper(levels - 1) if levels else decode(table)

    for found in (decode(table), deeper(300)):
        assert found[0] == found[0]
        assert [text_of(r["info"]) for r in found] == [text_of(r["info"]) for r in given]


@pytest.mark.parametrize("place", ["info", "future"])
def test_json_nested_deeper_than_every_python_reads_is_cut_on_every_python(place: str, tmp_path: Path) -> None:
    for levels, whole in ((900, True), (960, False), (3_000, False)):
        value: Any = []
        for _ in range(levels):
            value = [value]
        [found] = kept([record(**{place: {"x": value}})], tmp_path)
        assert (text_of(found[place]).count("[") > 900) == whole


# -- numbers at their borders


@pytest.mark.parametrize(
    "values",
    [
        [-0.5, -1.25],
        [-0.1, -0.2],  # not float32-exact
        [-0.6423, -1.7593],  # rounded to 4 decimals
        [-0.6423, -0.1 - 1e-12],
        [0.0, -0.0],
        [-0.0, -0.1235],
        [math.nan, -0.5],
        [math.nan, -0.1234],
        [math.inf, -math.inf],
        [-math.inf, -0.1],
        [1e300, -5e-324],
        [3.4028235677973366e38, -1.0],  # just over float32
        [-9999.9999, -0.0001],
    ],
)
def test_log_probs_come_back_exactly(values: list[float], tmp_path: Path) -> None:
    given = record()
    given["nodes"][1]["logprobs"] = values
    (found,) = kept([given], tmp_path)
    assert repr(found["nodes"][1]["logprobs"]) == repr(values)


@pytest.mark.parametrize(
    "token", [0, 151_935, 2**31 - 1, -1, -(2**31), 2**31, -(2**31) - 1, 2**70, True, 1.0, None, "5"]
)
def test_a_token_id_of_any_value_comes_back_and_a_strange_one_is_flagged(token: Any, tmp_path: Path) -> None:
    given = record()
    given["nodes"][1]["token_ids"][1] = token
    assert text_of(kept([given], tmp_path)) == text_of([given])
    fits = isinstance(token, int) and -(2**31) <= token < 2**31
    assert encode([given])["node_raw"].to_pylist() == [[False, not fits]]
    assert encode([given])["token_ids"].to_pylist() == [[5, 6, 7, int(token), 9] if fits else [5, 6]]


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**63, 2**64, -(2**70), 1.0, True, None, "3"])
def test_a_count_of_any_value_comes_back(value: Any, tmp_path: Path) -> None:
    usage = {
        "prompt_tokens": value,
        "completion_tokens": 1,
        "cached_input_tokens": None,
        "reasoning_tokens": None,
        "cost": None,
    }
    given = record(task={"type": "T", "data": {"idx": value}})
    given["nodes"][1]["usage"] = usage
    assert text_of(kept([given], tmp_path)) == text_of([given])


def test_rounded_log_probs_are_stored_as_float32_and_their_decimals() -> None:
    """Verifiers 0.4.0 rounds to 4 decimals: that needs no second copy of the numbers."""
    table = encode(recorded("0.4.0/written_by_verifiers/single_turn.jsonl"))
    assert set(table["logprob_decimals"].to_pylist()) == {4}
    assert set(encode(recorded("0.4.0/single_turn.jsonl"))["logprob_decimals"].to_pylist()) <= {None, 4}


# -- columns say what Verifiers says


FACTS = {
    "trace_id": "id",
    "task_idx": "task_idx",
    "task_type": "task_type",
    "num_nodes": "nodes",
    "num_branches": "branches",
    "num_turns": "turns",
    "num_tokens": "unique_node_tokens",
    "num_sampled": "unique_sampled",
    "is_truncated": "is_truncated",
    "stop_condition": "stop_condition",
    "error_types": "errors",
    "metrics": "metrics",
    "reward": "reward",
}
"""Column and the name of its fact; not every file of facts has each."""


@pytest.mark.parametrize("name", WITH_FACTS)
def test_columns_agree_with_the_facts_of_recorded_traces(name: str) -> None:
    facts = json.loads((TRACES / name).with_suffix(".facts.json").read_text(encoding="utf-8"))
    rows = encode(recorded(name)).to_pylist(maps_as_pydicts="strict")
    for row, fact in zip(rows, facts, strict=True):
        fact |= {"is_truncated": fact.get("is_truncated", fact.get("truncated"))}
        fact |= {"stop_condition": fact.get("stop_condition", fact.get("stop"))}
        if not row["rewards"]:
            assert row["reward"] is None, "nothing was scored, which is not 0"
            fact["reward"] = None
        elif fact["reward"] is not None:
            fact["reward"] = float(fact["reward"])
        known = {column: fact[key] for column, key in FACTS.items() if key in fact}
        assert repr({column: row[column] for column in known}) == repr(known)
        assert len(known) >= 9


@pytest.mark.parametrize("name", READABLE)
def test_truncation_and_branches_are_as_verifiers_computes_them(name: str) -> None:
    traces = recorded(name)
    rows = encode(traces).select(["is_truncated", "num_branches", "num_turns"]).to_pylist()
    for row, trace in zip(rows, map(WireTrace.model_validate, traces), strict=True):
        assert row == {
            "is_truncated": trace.is_truncated,
            "num_branches": trace.num_branches,
            "num_turns": trace.num_turns,
        }


def test_scores_and_weights_stand_beside_contributions() -> None:
    rewards = {"a": {"score": 0.5, "weight": 2.0}, "b": None, "c": {"score": 1.0}, "d": {"score": None, "weight": 1.0}}
    (row,) = encode([record(rewards=rewards)]).to_pylist(maps_as_pydicts="strict")
    assert row["rewards"] == {"a": 1.0, "b": None, "c": 1.0, "d": None}
    assert row["scores"] == {"a": 0.5, "c": 1.0, "d": None}
    assert row["weights"] == {"a": 2.0, "c": None, "d": 1.0}
    assert row["reward"] is None, "a reward that was not scored is not 0"


@pytest.mark.parametrize(
    ("value", "column"), [(1, 1.0), (True, 1.0), ("0.5", None), (10**400, None), ([1.0], None), ({"score": "x"}, None)]
)
def test_a_reward_of_another_type_counts_where_it_is_a_number(value: Any, column: float | None, tmp_path: Path) -> None:
    given = record(rewards={"a": value, "b": 0.5}, metrics={"a": value})
    (row,) = encode([given]).to_pylist(maps_as_pydicts="strict")
    assert row["rewards"] == {"a": column, "b": 0.5}
    assert row["metrics"] == {"a": column}
    assert row["reward"] == (None if column is None else column + 0.5)
    assert text_of(kept([given], tmp_path)) == text_of([given])


def test_parents_outside_the_trace_do_not_hide_branches() -> None:
    given = record()
    given["nodes"][1]["parent"] = 7
    assert encode([given])["num_branches"].to_pylist() == [2]


# -- context and turns


def test_the_context_fills_what_a_trace_does_not_say_of_itself() -> None:
    context = Context(
        run="r",
        split="eval",
        eval_name="math",
        step=2**40,
        attempt=3,
        writer="w",
        group_index=2**40,
        rollout_index=1,
        try_number=2,
        model="m",
        tokenizer="t",
        sampling={"temperature": 1.0, "stop": ["\ud800"]},
        renderer={"name": "qwen3"},
        verifiers_version="0.2.0",
    )
    (row,) = encode([record()], [context]).to_pylist()
    assert {k: row[k] for k in ("run", "split", "eval_name", "step", "attempt", "writer", "group_index")} == {
        "run": "r",
        "split": "eval",
        "eval_name": "math",
        "step": 2**40,
        "attempt": 3,
        "writer": "w",
        "group_index": 2**40,
    }
    assert (row["rollout_index"], row["try_number"], row["model"], row["tokenizer"]) == (1, 2, "m", "t")
    assert row["sampling"] == '{"temperature":1.0,"stop":["\ufffd"]}'
    assert (row["renderer"], row["verifiers_version"]) == ('{"name":"qwen3"}', "0.2.0")


def test_the_record_of_a_later_release_names_its_own_version() -> None:
    context = Context(verifiers_version="0.2.0")
    table = encode([*recorded("0.4.0/single_turn.jsonl")[:1], record()], [context, context])
    assert table["verifiers_version"].to_pylist() == ["0.4.0", "0.2.0"]


def test_contexts_and_traces_must_match_in_number() -> None:
    with pytest.raises(BadInput, match=r"more traces than contexts \(1\)"):
        encode([record(), record()], [Context()])


def test_turns_go_to_their_nodes_and_lost_replies_are_passed_over() -> None:
    given = record()
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_input_tokens": 1,
        "reasoning_tokens": None,
        "cost": None,
    }
    given["nodes"][1]["usage"] = usage
    lost = Turn(weight_version="6", completion_tokens=9, engine="e0")
    used = Turn(weight_version="7", completion_tokens=2, engine="e1\ud800", latency=0.25, cached_tokens=1, retries=2)
    (row,) = encode([given], [Context(turns=(lost, used))]).to_pylist()
    assert row["turn_weight_version"] == ["7"]
    assert row["turn_engine"] == ["e1\ufffd"]
    assert (row["turn_latency"], row["turn_cached_tokens"], row["turn_retries"]) == ([0.25], [1], [2])
    (row,) = encode([given], [Context(turns=(replace(used, cached_tokens=2**31),))]).to_pylist()
    assert (row["turn_cached_tokens"], row["turn_weight_version"]) == ([None], ["7"]), "no counter costs the step"
    (row,) = encode([given], [Context(turns=(lost,))]).to_pylist()
    assert row["turn_weight_version"] == [None]
    (row,) = encode([given]).to_pylist()
    assert row["turn_weight_version"] is None


# -- what is no trace


@pytest.mark.parametrize("given", [5, None, "x", [], object()])
def test_what_is_no_trace_is_refused_with_a_sentence(given: Any) -> None:
    with pytest.raises(BadInput, match="is no trace: expected a Verifiers Trace object or its JSON record"):
        encode([given])


@pytest.mark.parametrize("given", [{}, {"id": None}, {"id": 5}, {"traces": []}])
def test_a_record_without_an_id_is_refused_with_a_sentence(given: Any) -> None:
    with pytest.raises(BadInput, match="a record without a trace id"):
        encode([given])


def test_a_record_of_nothing_but_an_id_comes_back() -> None:
    assert decode(encode([{"id": ""}])) == [{"id": ""}]


def test_a_trace_without_verifiers_asks_for_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1.trace", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rolltape\[live\]'"):
        to_trace(record())


def test_mappings_that_keep_an_order_of_their_own_are_read_in_it(tmp_path: Path) -> None:
    """`move_to_end` changes what an OrderedDict says its order is, and not where its values lie."""
    given = record()
    expected = json.loads(json.dumps(given))
    for i, plain in enumerate(given["nodes"]):
        moved = OrderedDict(sorted(plain.items()))
        for key in plain:
            moved.move_to_end(key)
        given["nodes"][i] = moved
    assert kept([given], tmp_path) == [expected]
