"""Hypothesis strategies for trace records: as Verifiers 0.2.0 writes them, and as nobody should."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

GENERATED = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""The same examples in every run."""

# -- values

TEXTS = st.text(st.characters(), max_size=6) | st.sampled_from(
    [
        "",
        "\0",
        "\u2028",
        "\ud800",
        "\udfff tail",
        "\ud83d\ude00",  # two surrogates that would read as one character
        "\U0001f600",
        "a.b",
        'q"uote',
        "$bytes",
        "$packed",
        "None",
        "user",
        "message.content",
        "\ufffd",
    ]
)
BORDERS = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 2**70]
INTS = st.integers(0, 151_935) | st.sampled_from(BORDERS) | st.integers(-(2**80), 2**80)
FLOATS = (
    st.floats(width=32)
    | st.floats()
    | st.floats(-9, 0).map(lambda x: round(x, 4))
    | st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1e300, 5e-324])
)
SCALARS = st.none() | st.booleans() | INTS | FLOATS | TEXTS
JSON = st.recursive(SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(TEXTS, x, max_size=4), max_leaves=8)

# -- records as Verifiers 0.2.0 writes them


def optional(values: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.none() | values


def fields(**values: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(values)


CALLS = st.lists(fields(id=TEXTS, name=TEXTS, arguments=TEXTS), max_size=2)
PARTS = st.lists(
    fields(type=st.just("text"), text=TEXTS) | fields(type=st.just("image_url"), image_url=fields(url=TEXTS)),
    max_size=3,
)
MESSAGES = (
    fields(role=st.sampled_from(["system", "user"]), content=TEXTS | PARTS)
    | fields(
        role=st.just("assistant"),
        content=optional(TEXTS),
        reasoning_content=optional(TEXTS),
        tool_calls=optional(CALLS),
        provider_state=optional(st.lists(st.dictionaries(TEXTS, JSON, max_size=2), max_size=2)),
    )
    | fields(role=st.just("tool"), tool_call_id=TEXTS, content=TEXTS | PARTS, name=optional(TEXTS))
)
COUNTS = st.integers(0, 2**40)
USAGES = fields(
    prompt_tokens=COUNTS,
    completion_tokens=COUNTS,
    cached_input_tokens=optional(COUNTS),
    reasoning_tokens=optional(COUNTS),
    cost=optional(FLOATS),
)
SPANS = fields(start=FLOATS, end=FLOATS)
NUMBERS = st.dictionaries(TEXTS, FLOATS, max_size=3)
TASK_ROWS = st.dictionaries(TEXTS | st.sampled_from(["idx", "name", "prompt", "label", "answer"]), JSON, max_size=5)


@st.composite
def nodes(draw: DrawFn) -> dict[str, Any]:
    n = draw(st.integers(0, 4))
    mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    size, scored = draw(st.sampled_from([0, n])), draw(st.sampled_from([0, sum(mask)]))
    return {
        "parent": draw(optional(st.integers(0, 3))),
        "message": draw(MESSAGES),
        "sampled": draw(st.booleans()),
        "timestamp": draw(FLOATS),
        "token_ids": draw(st.lists(st.integers(0, 151_935), min_size=n, max_size=n)),
        "mask": mask,
        "is_content": draw(st.lists(st.booleans(), min_size=size, max_size=size)),
        "logprobs": draw(st.lists(FLOATS, min_size=scored, max_size=scored)),
        "finish_reason": draw(st.sampled_from([None, "stop", "length", "tool_calls"])),
        "usage": draw(optional(USAGES)),
    }


RECORDS = fields(
    id=TEXTS,
    task=fields(type=TEXTS, data=TASK_ROWS),
    runtime=optional(st.dictionaries(TEXTS, JSON, max_size=2)),
    nodes=st.lists(nodes(), max_size=4),
    rewards=NUMBERS,
    metrics=NUMBERS,
    info=st.dictionaries(TEXTS, JSON, max_size=3),
    extra_usage=st.lists(USAGES, max_size=2),
    is_completed=st.booleans(),
    stop_condition=optional(TEXTS),
    errors=st.lists(fields(type=TEXTS, message=TEXTS, traceback=optional(TEXTS)), max_size=2),
    timing=fields(start=FLOATS, setup=SPANS, generation=SPANS, finalize=SPANS, scoring=SPANS),
)

# -- and what becomes of them in the hands of other releases, broken writers and vandals

RETYPED: dict[type, Callable[[Any], Any]] = {
    bool: int,
    int: lambda x: float(x) if abs(x) < 2**60 else str(x),
    float: lambda x: int(x) if math.isfinite(x) else None,
    str: lambda x: [x],
    list: lambda x: {str(i): v for i, v in enumerate(x)},
    dict: lambda x: [list(item) for item in x.items()],
    type(None): lambda _: False,
}
ODD: SearchStrategy[Any] = st.sampled_from([True, 0, 2**31, 2**70, 1.0, -0.0, math.nan, "\ud800", None, []])
LISTS = ("token_ids", "mask", "is_content", "logprobs")
SCORES = st.dictionaries(TEXTS, st.none() | fields(score=SCALARS, weight=SCALARS), max_size=3)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of everything inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from places(item)


def nodes_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes that are nodes, in whatever state the record is."""
    nodes = record.get("nodes")
    return [n for n in nodes if isinstance(n, dict)] if isinstance(nodes, list) else []


def spoil_node(draw: DrawFn, record: dict[str, Any]) -> None:
    """Put an odd value into a field of a node, or into one of its lists."""
    nodes = nodes_of(record)
    if not nodes:
        return
    node = draw(st.sampled_from(nodes))
    values = node.get(draw(st.sampled_from(LISTS)))
    if values and isinstance(values, list) and draw(st.booleans()):
        values[draw(st.integers(0, len(values) - 1))] = draw(ODD)
    elif node:
        node[draw(st.sampled_from(list(node)))] = draw(ODD)


def mutate(draw: DrawFn, record: dict[str, Any]) -> None:
    """Change one thing somewhere in `record`: at its top, in a node, in a message, in a list, anywhere."""
    nodes = nodes_of(record)
    messages = [n["message"] for n in nodes if isinstance(n.get("message"), dict)]
    inner = [inside[key] for inside, key in places(record) if isinstance(inside[key], dict | list)]
    inside = draw(st.sampled_from(draw(st.sampled_from([x for x in ([record], nodes, messages, inner) if x]))))
    keys = list(inside) if isinstance(inside, dict) else range(len(inside))
    what = draw(st.sampled_from(["remove", "null", "replace", "retype", "add", "shuffle", "scores"]))
    if what == "add" or not keys:
        new = draw(JSON)
        if isinstance(inside, dict):
            inside[draw(TEXTS)] = new
        else:
            inside.append(new)
    elif what == "shuffle":
        order = draw(st.permutations(list(inside.items() if isinstance(inside, dict) else inside)))
        inside.clear()
        (inside.update if isinstance(inside, dict) else inside.extend)(order)
    elif what == "scores":
        record["rewards"] = draw(SCORES)
    else:
        key = draw(st.sampled_from(keys))
        if what == "remove":
            del inside[key]
        elif what == "null":
            inside[key] = None
        elif what == "replace":
            inside[key] = draw(JSON)
        else:
            inside[key] = RETYPED[type(inside[key])](inside[key])


@st.composite
def broken_records(draw: DrawFn) -> dict[str, Any]:
    record = draw(RECORDS)
    for _ in range(draw(st.integers(1, 6))):
        draw(st.sampled_from([mutate, spoil_node, spoil_node]))(draw, record)
        if not isinstance(record.get("id"), str):
            record["id"] = draw(TEXTS)
    return record


BROKEN_RECORDS = broken_records()
ANY_RECORD = RECORDS | BROKEN_RECORDS
