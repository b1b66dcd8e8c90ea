"""The record of a live trace is what pydantic writes of it, by whichever way it is made."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_records import record, recorded
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import (
    AssistantMessage,
    ImageUrlContentPart,
    ImageUrlSource,
    SystemMessage,
    TextContentPart,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)

from rolltape.schema import snapshots
from rolltape.schema.snapshots import record_of

TEXTS = st.text(max_size=5)
FLOATS = st.floats(allow_nan=False)
CALLS = st.builds(ToolCall, id=TEXTS, name=TEXTS, arguments=TEXTS)
PARTS = st.lists(
    st.builds(TextContentPart, text=TEXTS)
    | st.builds(ImageUrlContentPart, image_url=st.builds(ImageUrlSource, url=TEXTS)),
    max_size=2,
)
MESSAGES = st.one_of(
    st.builds(SystemMessage, content=TEXTS | PARTS),
    st.builds(UserMessage, content=TEXTS | PARTS),
    st.builds(
        AssistantMessage,
        content=st.none() | TEXTS,
        reasoning_content=st.none() | TEXTS,
        tool_calls=st.none() | st.lists(CALLS, max_size=2),
        provider_state=st.none() | st.lists(st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2), max_size=2),
    ),
    st.builds(ToolMessage, tool_call_id=TEXTS, content=TEXTS | PARTS, name=st.none() | TEXTS),
)
COUNTS = st.integers(0, 10)
USAGES = st.builds(Usage, prompt_tokens=COUNTS, completion_tokens=COUNTS, cost=st.none() | FLOATS)
NODES = st.builds(
    MessageNode,
    parent=st.none() | COUNTS,
    message=MESSAGES,
    sampled=st.booleans(),
    timestamp=FLOATS,
    token_ids=st.lists(COUNTS, max_size=3),
    mask=st.lists(st.booleans(), max_size=3),
    is_content=st.lists(st.booleans(), max_size=3),
    logprobs=st.lists(FLOATS, max_size=3),
    finish_reason=st.sampled_from([None, "stop", "length", "tool_calls"]),
    usage=st.none() | USAGES,
)


def written(trace: Any) -> dict[str, Any]:
    """What pydantic writes, without the arrays that no node has."""
    result: dict[str, Any] = trace.model_dump(mode="json", warnings="none")
    for node in result["nodes"]:
        for key in ("multi_modal_data", "routed_experts"):
            if node[key] is None:
                del node[key]
    return result


def keys(value: Any) -> Any:
    """The keys of mappings in their order, all the way down."""
    if isinstance(value, dict):
        return [(key, keys(part)) for key, part in value.items()]
    return [keys(part) for part in value] if isinstance(value, list) else type(value)


def traced(*nodes: Any) -> Any:
    trace = WireTrace.model_validate(record())
    trace.nodes = list(nodes)
    return trace


def assert_as_written(trace: Any) -> None:
    found, expected = record_of(trace), written(trace)
    assert found == expected
    assert keys(found) == keys(expected)


def is_plain(trace: Any) -> bool:
    return snapshots._plain_nodes(trace.nodes) is not None


@given(st.lists(NODES, max_size=4))
def test_generated_nodes(nodes: list[Any]) -> None:
    assert_as_written(traced(*nodes))


@pytest.mark.parametrize("name", ["0.2.0/group_rewards.jsonl", "0.2.0/multi_turn_user_sim.jsonl", "0.2.0/tools.jsonl"])
def test_recorded_traces_take_the_short_way(name: str) -> None:
    for given_record in recorded(name):
        trace = WireTrace.model_validate(given_record)
        assert is_plain(trace)
        assert_as_written(trace)


def test_calls_of_tools_and_usage_take_the_short_way() -> None:
    call = ToolCall(id="1", name="add", arguments="{}")
    message = AssistantMessage(content=None, tool_calls=[call])
    trace = traced(MessageNode(message=message, usage=Usage(prompt_tokens=1, completion_tokens=2)))
    assert is_plain(trace)
    assert_as_written(trace)


def test_what_is_changed_later_is_not_seen() -> None:
    call = ToolCall(id="1", name="add", arguments="{}")
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    trace = traced(MessageNode(message=AssistantMessage(content="a", tool_calls=[call]), usage=usage))
    before = written(trace)
    found = record_of(trace)
    trace.nodes[0].message.content, call.name, usage.cost, trace.nodes[0].finish_reason = "b", "sub", 0.5, "stop"
    trace.nodes[0].message.tool_calls.append(call)
    assert found == before


class Own(UserMessage):
    secret: bytes = b"x"


class OwnNode(MessageNode):
    mine: int = 3


@pytest.mark.parametrize(
    "node",
    [
        MessageNode(message=UserMessage(content=[TextContentPart(text="a")])),
        MessageNode(message=AssistantMessage(content="a", provider_state=[{"a": [1, {"b": None}]}])),
        MessageNode(message=UserMessage(content="a"), routed_experts=np.zeros((2, 1, 1), np.uint8)),
        MessageNode.model_construct(message=Own(content="a"), token_ids=[], mask=[], is_content=[], logprobs=[]),
        MessageNode.model_construct(message=UserMessage(content="a"), timestamp=np.float64(2)),
        OwnNode(message=UserMessage(content="a")),
        MessageNode(message=AssistantMessage(content="a", tool_calls=[])).model_copy(update={"usage": {"cost": 1}}),
    ],
    ids=["parts", "state", "experts", "subclass", "number", "node", "mapping"],
)
def test_anything_else_takes_the_long_way(node: Any) -> None:
    assert not is_plain(traced(node))
    assert [n["message"]["role"] for n in record_of(traced(node))["nodes"]] == [node.message.role]


def odd(place: str, value: Any) -> Any:
    """A trace of which one value was set after it was made: pydantic does not look at those."""
    call = ToolCall(id="1", name="add", arguments="{}")
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    trace = traced(MessageNode(message=AssistantMessage(content="a", tool_calls=[call]), usage=usage))
    node = trace.nodes[0]
    owner, _, name = place.partition(".")
    setattr({"node": node, "message": node.message, "call": call, "usage": usage}[owner], name, value)
    return trace


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("node.timestamp", 1),
        ("node.timestamp", True),
        ("node.parent", False),
        ("node.parent", math.nan),
        ("node.parent", [1]),
        ("node.sampled", 1),
        ("node.finish_reason", math.inf),
        ("node.usage", UserMessage(content="a")),
        ("usage.cost", 1),
        ("usage.cached_input_tokens", True),
        ("usage.prompt_tokens", math.nan),
        ("message.content", math.nan),
        ("message.tool_calls", [UserMessage(content="a")]),
        ("call.arguments", math.nan),
    ],
)
def test_a_value_of_another_type_is_what_pydantic_makes_of_it(place: str, value: Any) -> None:
    assert not is_plain(odd(place, value))
    assert_as_written(odd(place, value))


def test_what_pydantic_does_not_know_of_a_model_is_left_out() -> None:
    trace = traced(MessageNode(message=UserMessage(content="a")))
    trace.nodes[0].__dict__["mine"] = trace.nodes[0].message.__dict__["mine"] = "x"
    assert_as_written(trace)


@pytest.mark.parametrize("place", ["message.content", "call.arguments"])
def test_a_model_that_holds_itself_is_told(place: str) -> None:
    trace = odd(place, None)
    message = trace.nodes[0].message
    holder = message if place == "message.content" else message.tool_calls[0]
    setattr(holder, place.partition(".")[2], [holder])
    problems: list[str] = []
    assert record_of(trace, problems)["id"] == "t0"
    assert ["refers to itself" in problem for problem in problems] == [True]


@pytest.mark.parametrize("info", [OrderedDict(a=1), defaultdict(int, a=1), None, [1]], ids=repr)
def test_info_stands_where_pydantic_writes_it(info: Any) -> None:
    trace = traced(MessageNode(message=UserMessage(content="a")))
    trace.info = info
    assert_as_written(trace)


def test_one_odd_node_leaves_the_others_as_they_are() -> None:
    plain = MessageNode(message=UserMessage(content="a"), token_ids=[1], mask=[False])
    odd = MessageNode(message=UserMessage(content=[TextContentPart(text="b")]), token_ids=[2], mask=[False])
    assert_as_written(traced(plain, odd, plain))
