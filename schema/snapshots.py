"""The JSON record of a live Verifiers Trace: what a recorder keeps of it before the episode goes on."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

from rolltape.schema import jsontext
from rolltape.schema.errors import BadInput
from rolltape.schema.layouts import V0_2_0
from rolltape.schema.nodes import LISTS

Problems = list[str]

_RAW = ("multi_modal_data", "routed_experts")
"""What a node holds as arrays."""
_HEAVY = {"__all__": {*LISTS, *_RAW}}
"""What pydantic is not to write of nodes."""
_ALL = {"__all__": True}
_LIGHT = tuple(key for key in V0_2_0.node if key not in LISTS)
_Kind = frozenset[tuple[type, ...]]
"""The types that the values of a model may have, in their order."""


def _kind(*values: tuple[type, ...]) -> _Kind:
    return frozenset(product(*values))


_NONE = type(None)
_STRING, _TEXT, _WHOLE = (str,), (str, _NONE), (int, _NONE)
_NODE = _kind(_WHOLE, (dict,), (bool,), (float,), *((list,) for _ in LISTS), _TEXT, (dict, _NONE))
"""Of a node without its arrays, its models as mappings."""
_MESSAGE = (
    _kind(_STRING, _STRING)
    | _kind(_STRING, _TEXT, _TEXT, (list, _NONE), (_NONE,))
    | _kind(_STRING, _STRING, _STRING, _TEXT)
)
_CALL = _kind(_STRING, _STRING, _STRING)
_USAGE = _kind(*(_WHOLE for _ in range(4)), (float, _NONE))
_MODELS = (("message", _MESSAGE), ("usage", _USAGE))
"""What a node holds as models."""
_PLAIN = {
    "verifiers.v1.graph.MessageNode": _NODE,
    **{f"verifiers.v1.types.{name}Message": _MESSAGE for name in ("System", "User", "Assistant", "Tool")},
    "verifiers.v1.types.ToolCall": _CALL,
    "verifiers.v1.types.Usage": _USAGE,
}
"""Models whose values pydantic writes as they are, where their types are these: others it converts, as 1 to 1.0."""


def record_of(trace: Any, problems: Problems | None = None) -> dict[str, Any]:
    """A Verifiers Trace object as its JSON record, with the token lists by reference and raw arrays kept.

    Values that JSON does not know are written in a stable form; what is lost is named in `problems`. `info`, where
    anybody may put anything, is taken apart here: pydantic turns NaN into null and lets keys collide without a word.
    Raises BadInput where `trace` is no Trace.
    """
    problems = [] if problems is None else problems
    if not hasattr(trace, "model_dump") or not hasattr(trace, "nodes"):
        raise BadInput(
            f"a {type(trace).__qualname__} is no trace: expected a Verifiers Trace object or its JSON record (a dict)."
        )
    nodes, info = _plain_nodes(trace.nodes), trace.info
    exclude = {"nodes": _HEAVY if nodes is None else _ALL, "info": _ALL if type(info) is dict else True}
    record: dict[str, Any]
    try:
        record = trace.model_dump(mode="json", exclude=exclude, warnings="none", fallback=_Fallback(problems))
    except Exception:  # cycles, bytes that are no UTF-8, keys of any type: take it apart value by value
        record = jsontext.plain(trace.model_dump(exclude=exclude, warnings="none"), "trace", problems)
    if nodes is None:
        nodes = [_node_record(*pair) for pair in zip(trace.nodes, record["nodes"], strict=False)]
    if "info" not in record:  # back to its place
        place = list(record).index("extra_usage")
        items = list(record.items())
        record = dict((*items[:place], ("info", None), *items[place:]))
    record["nodes"], record["info"] = nodes, jsontext.as_json(info, "info", problems)
    return record


class _Fallback:
    """What pydantic asks for a value of a type it does not know."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def __call__(self, value: Any) -> Any:
        return jsontext.plain(value, "trace", self.problems)


def _plain_nodes(nodes: Any) -> list[dict[str, Any]] | None:
    """The records of nodes that hold Verifiers' own models of plain values; None where one holds anything else.

    The usual case, several times faster than pydantic, in the thread of the event loop.
    """
    records = []
    for node in nodes:
        if _kind_of(node.__class__) is not _NODE:
            return None
        record = node.__dict__.copy()
        if record.pop("multi_modal_data", None) is not None or record.pop("routed_experts", None) is not None:
            return None
        for key, kind in _MODELS:
            if record.get(key) is not None:
                record[key] = _plain(record[key], kind)
                if record[key] is None:
                    return None
        if tuple(map(type, record.values())) not in _NODE:
            return None
        records.append(record)
    return records


def _plain(model: Any, kind: _Kind) -> dict[str, Any] | None:
    """The fields of a model of this kind in their order; None where it is none, or holds values of other types."""
    if _kind_of(model.__class__) is not kind:
        return None
    values: dict[str, Any] = model.__dict__.copy()
    if tuple(map(type, values.values())) not in kind:
        return None
    if values.get("tool_calls") is not None:
        values["tool_calls"] = calls = [_plain(call, _CALL) for call in values["tool_calls"]]
        if None in calls:
            return None
    return values


@lru_cache(64)
def _kind_of(model: Any) -> _Kind | None:
    return _PLAIN.get(f"{model.__module__}.{model.__qualname__}")


def _node_record(node: Any, light: dict[str, Any]) -> dict[str, Any]:
    """The node's record in Verifiers' key order, its token lists taken over as they are."""
    if tuple(light) == _LIGHT:
        result = {key: light[key] if key in light else getattr(node, key) for key in V0_2_0.node}
    else:  # a node with fields of its own
        result = {}
        for key, value in light.items():
            if key == "finish_reason":
                result.update((name, getattr(node, name)) for name in LISTS)
            result[key] = value
    for key in _RAW:
        if getattr(node, key, None) is not None:
            result[key] = node.model_dump(include={key})[key]
    return result
