"""The nodes of a record as columns: what is said of each message, and the token lists of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.schema import jsontext
from rolltape.schema.layouts import Layout
from rolltape.schema.packing import decimals_of, float32_exact, pack_bools, pack_floats, pack_ints
from rolltape.schema.records import number

INT32 = range(-(1 << 31), 1 << 31)
INT64 = range(-(1 << 63), 1 << 63)
LISTS = ("token_ids", "mask", "is_content", "logprobs")
"""The token lists of a node."""
_USAGE = ("prompt_tokens", "completion_tokens", "cached_input_tokens", "reasoning_tokens", "cost")


def text_keys(mapping: Mapping[Any, Any] | Sequence[Any]) -> Iterable[str]:
    """The keys; raises TypeError where one is no text."""
    "".join(mapping)  # raises; the fastest way to look at every key
    return mapping


class Nodes:
    """The nodes of a record as columns."""

    def __init__(
        self,
        nodes: list[dict[str, Any]],
        layout: Layout,
        calls: Sequence[Mapping[str, Any]] = (),
        *,
        rounded: bool = False,
    ) -> None:
        """`calls` say of nodes what later releases no longer say on them; `rounded`: the release rounds log-probs."""
        self.nodes = nodes
        self.rounded = rounded
        self.extra: dict[str, Any] = {}
        self.rest: dict[str, dict[str, Any]] = {}
        self.messages: dict[str, dict[str, Any]] = {}
        self.values: dict[str, list[Any]] = {name: [] for name in _NODE_COLUMNS}
        self.decimals: int | None = None
        self.columns: dict[str, list[Any]] = {}
        """What nodes hold, by key, where all have the layout's keys."""
        if not (self._keys(layout) and self._columns_at_once()):
            for i, node in enumerate(nodes):
                self._node(i, node)
        self._calls(calls)
        if not self._lists_at_once():
            self._lists_one_by_one()
        if self.rest:
            self.extra["nodes"] = self.rest
        if self.messages:
            self.extra["messages"] = self.messages

    def _keys(self, layout: Layout) -> bool:
        """Whether messages hold nothing but what columns hold; a key order that is not the layout's is kept."""
        if self._in_order_of(layout):
            return True
        found: dict[Any, int] = {}
        index = []
        for node in self.nodes:
            message = node.get("message")
            role = message.get("role") if isinstance(message, dict) else None
            role = role if isinstance(role, str) else ""
            keys = (tuple(node), tuple(message) if isinstance(message, dict) else None, role)
            index.append(found.setdefault(keys, len(found)))
        for node_keys, message_keys, _ in found:
            text_keys((*node_keys, *(message_keys or ())))
        self.extra["node_keys"] = {"kinds": [keys[:2] for keys in found], "index": index}
        return all(keys is not None and _MESSAGE_COLUMNS.issuperset(keys) for _, keys, _ in found)

    def _in_order_of(self, layout: Layout) -> bool:
        """Whether all nodes and messages have just the layout's keys, in its order: mostly so, and quickly found."""
        if not _DICT.issuperset(map(type, self.nodes)) or set(map(tuple, self.nodes)) - {layout.node}:
            return False
        self.columns = dict(zip(layout.node, map(list, zip(*map(dict.values, self.nodes), strict=True)), strict=False))
        messages = self._values("message")
        if not _DICT.issuperset(map(type, messages)):
            return False
        roles = [message.get("role") for message in messages]
        return {str}.issuperset(map(type, roles)) and list(map(tuple, messages)) == list(
            map(layout.messages.get, roles)
        )

    def _values(self, key: str, default: Any = None) -> list[Any]:
        """What each node holds under `key`."""
        found = self.columns.get(key)
        return [node.get(key, default) for node in self.nodes] if found is None else found

    def _columns_at_once(self) -> bool:
        """Fill the columns from all nodes in one go; False where a value is not what its column holds exactly.

        For messages without keys of their own. The usual case, five times faster than node by node.
        """
        messages = self._values("message")
        parents, sampled, stamps = (self._values(key) for key in ("parent", "sampled", "timestamp"))
        texts = {name: [m.get(key) for m in messages] for name, key in (("node_content", "content"), *_MESSAGE_TEXTS)}
        texts["node_finish_reason"] = self._values("finish_reason")
        said = [*chain.from_iterable(texts.values())]
        fits = (
            _WHOLE.issuperset(map(type, parents))
            and _TRUTH.issuperset(map(type, sampled))
            and _NUMBER.issuperset(map(type, stamps))
            and _TEXT.issuperset(map(type, said))
        )
        if not fits or not jsontext.are_clean([*filter(None, said)]):
            return False
        if not all(p is None or p in INT32 for p in parents):
            return False
        if not _NULL.issuperset(map(type, [m.get("provider_state") for m in messages])):
            return False
        nothing: list[None] = [None] * len(messages)
        self.values.update(texts, node_parent=parents, node_sampled=sampled, node_timestamp=stamps, node_parts=nothing)
        usages, calls = self._values("usage"), [m.get("tool_calls") for m in messages]
        if _NULL.issuperset(map(type, usages)):
            self.values.update((name, [*nothing]) for name in _USAGE_COLUMNS)
        else:
            for i, usage in enumerate(usages):
                self._usage(i, usage)
        if _NULL.issuperset(map(type, calls)):
            self.values["node_tool_calls"] = nothing
        else:
            for i, call in enumerate(calls):
                self._tool_calls(i, call)
        if "node_keys" in self.extra:
            for i, node in enumerate(self.nodes):
                self._others(i, node)
        return True

    def _keep(self, i: int, key: str, value: Any) -> None:
        self.rest.setdefault(str(i), {})[key] = value

    def _keep_message(self, i: int, key: str, value: Any) -> None:
        self.messages.setdefault(str(i), {})[key] = value

    def _node(self, i: int, node: dict[str, Any]) -> None:
        v, get = self.values, node.get
        parent, sampled, stamp = get("parent"), get("sampled"), get("timestamp")
        if not (parent is None or (type(parent) is int and parent in INT32)):
            self._keep(i, "parent", parent)
            parent = -1
        v["node_parent"].append(parent)
        if type(sampled) is not bool and "sampled" in node:
            self._keep(i, "sampled", sampled)
        v["node_sampled"].append(sampled is True)
        if type(stamp) is not float and "timestamp" in node:
            self._keep(i, "timestamp", stamp)
            stamp = number(stamp)
        v["node_timestamp"].append(stamp)
        v["node_finish_reason"].append(_optional(self._keep, i, "finish_reason", get("finish_reason")))
        self._usage(i, get("usage"))
        self._message(i, get("message"))
        self._others(i, node)

    def _others(self, i: int, node: dict[str, Any]) -> None:
        """Keep what a node holds beside what columns hold."""
        for key in () if _NODE_HANDLED.issuperset(node) else node:
            if key not in _NODE_HANDLED:
                self._keep(i, key, node[key])

    def _usage(self, i: int, usage: Any) -> None:
        v = self.values
        if usage is None:
            for name in _USAGE_COLUMNS:
                v[name].append(None)
            return
        u = usage if isinstance(usage, dict) else {}
        found = _usage_numbers(u)
        for name, x in zip(_USAGE_COLUMNS, found, strict=True):
            v[name].append(x)
        exact = tuple(u) == _USAGE and list(found) == list(u.values()) and found[0] is not None
        if not (exact and type(u["cost"]) in (float, type(None))):
            self._keep(i, "usage", usage)

    def _calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Fill in finish reason and usage of nodes that do not say them themselves; of several calls the last counts."""
        v, n = self.values, len(self.nodes)
        for call in calls:
            i = call.get("node")
            if type(i) is not int or not 0 <= i < n:
                continue
            reason, usage = call.get("finish_reason"), call.get("usage")
            if "finish_reason" not in self.nodes[i] and isinstance(reason, str):
                v["node_finish_reason"][i] = jsontext.clean_text(reason)[0]
            if "usage" not in self.nodes[i] and isinstance(usage, dict):
                for name, x in zip(_USAGE_COLUMNS, _usage_numbers(usage), strict=True):
                    v[name][i] = x

    def _message(self, i: int, message: Any) -> None:
        v, m = self.values, message if isinstance(message, dict) else {}
        content = m.get("content")
        text, parts, exact = _content(content)
        v["node_content"].append(text)
        v["node_parts"].append(parts)
        if not exact:
            self._keep_message(i, "content", content)
        for column, key in _MESSAGE_TEXTS:
            v[column].append(_optional(self._keep_message, i, key, m.get(key)))
        self._tool_calls(i, m.get("tool_calls"))
        for key in () if _MESSAGE_HANDLED.issuperset(m) else m:
            if key not in _MESSAGE_HANDLED and (key != "provider_state" or m[key] is not None):
                self._keep_message(i, key, m[key])
        if message is not None and not isinstance(message, dict):
            self._keep(i, "message", message)

    def _tool_calls(self, i: int, calls: Any) -> None:
        text, exact = (None, True) if calls is None else jsontext.any_json(calls)
        self.values["node_tool_calls"].append(text)
        if not exact:
            self._keep_message(i, "tool_calls", calls)

    # -- token lists

    def _lists_at_once(self) -> bool:
        """Fill the token columns from all nodes in one go; False where a node does not fit."""
        lists = [self._values(key, _NONE) for key in LISTS]
        if any(set(map(type, column)) - {list} for column in lists):
            return False
        n, masks, bodies, numbers = ([len(x) for x in column] for column in lists)
        ids, flags, given = pack_ints(lists[0]), pack_bools(lists[1] + lists[2]), pack_floats(lists[3])
        if ids is None or flags is None or given is None or masks != n:
            return False
        mask, body = flags[: len(ids)], flags[len(ids) :]
        wanted = _counts(mask, n)
        if not (_all_or_none(bodies, n) and _all_or_none(numbers, wanted)):
            return False
        self.ids, self.sampled = ids, mask
        self.content = body.view(np.int8) if bodies == n else _spread(body, np.repeat(np.equal(bodies, n), n))
        self.known = mask if numbers == wanted else mask & np.repeat(np.equal(numbers, wanted), n)
        self._logprobs(given)
        self.values["node_tokens"], self.values["node_logprobs"] = n, numbers
        self.values["node_raw"] = [False] * len(self.nodes)
        return True

    def _logprobs(self, given: npt.NDArray[np.float64]) -> None:
        self.logprobs, exact = float32_exact(given)
        if not exact or (self.rounded and len(given)):
            self.decimals = decimals_of(given, self.logprobs)
        if self.decimals is None and not exact:
            self.extra["logprobs64"] = given.astype("<f8").tobytes()

    def _lists_one_by_one(self) -> None:
        parts = [self._node_lists(i, node) for i, node in enumerate(self.nodes)]
        self.ids = np.concatenate([p[0] for p in parts], dtype=np.int32)
        self.sampled = np.concatenate([p[1] for p in parts], dtype=np.bool_)
        self.content = np.concatenate([p[2] for p in parts], dtype=np.int8)
        self.known = np.concatenate([p[4] for p in parts], dtype=np.bool_)
        self._logprobs(np.concatenate([p[3] for p in parts], dtype=np.float64))
        self.values["node_tokens"] = [len(p[0]) for p in parts]
        self.values["node_logprobs"] = [
            len(x) if isinstance(x := node.get("logprobs"), list) else 0 for node in self.nodes
        ]
        self.values["node_raw"] = [p[5] for p in parts]

    def _node_lists(self, i: int, node: dict[str, Any]) -> tuple[Any, ...]:
        """(ids, sampled, content, log-probs, known, raw) of one node; what does not fit is kept as it was given."""
        ids, mask, body, given = (node.get(key) for key in LISTS)
        packed_ids, exact = _as_ints(ids)
        if not exact and "token_ids" in node:
            self._keep(i, "token_ids", ids)
        raw = packed_ids is None
        tokens = np.zeros(0, np.int32) if packed_ids is None else packed_ids
        n = len(tokens)
        packed_mask, exact = _as_bools(mask)
        if packed_mask is None or len(packed_mask) != n:
            packed_mask, exact, raw = np.zeros(n, np.bool_), False, True
        if not exact and "mask" in node:
            self._keep(i, "mask", mask)
        packed_body, exact = _as_bools(body)
        if packed_body is None or len(packed_body) not in (0, n):
            packed_body, exact, raw = np.zeros(0, np.bool_), False, True
        if not exact and "is_content" in node:
            self._keep(i, "is_content", body)
        content = packed_body.astype(np.int8) if len(packed_body) == n else np.full(n, -1, np.int8)
        numbers, exact = _as_floats(given)
        wanted = int(np.count_nonzero(packed_mask))
        if numbers is None or len(numbers) not in (0, wanted):
            numbers, exact, raw = np.zeros(0, np.float64), False, True
        if not exact and "logprobs" in node:
            self._keep(i, "logprobs", given)
        known = packed_mask if len(numbers) else np.zeros(n, np.bool_)
        return tokens, packed_mask, content, numbers, known, raw


_NONE: list[Any] = []
_USAGE_COLUMNS = (
    "node_prompt_tokens",
    "node_completion_tokens",
    "node_cached_tokens",
    "node_reasoning_tokens",
    "node_cost",
)
_NODE_COLUMNS = (
    "node_parent",
    "node_role",
    "node_content",
    "node_parts",
    "node_reasoning",
    "node_tool_calls",
    "node_tool_call_id",
    "node_name",
    "node_sampled",
    "node_finish_reason",
    "node_timestamp",
    *_USAGE_COLUMNS,
)
_NODE_HANDLED = frozenset(("parent", "message", "sampled", "timestamp", "finish_reason", "usage", *LISTS))
_MESSAGE_TEXTS = (
    ("node_role", "role"),
    ("node_reasoning", "reasoning_content"),
    ("node_tool_call_id", "tool_call_id"),
    ("node_name", "name"),
)
_DICT, _NULL = {dict}, {type(None)}
_WHOLE, _TRUTH, _NUMBER, _TEXT = ({int, type(None)}, {bool}, {float}, {str, type(None)})
"""Types of the values that columns hold exactly."""
_MESSAGE_HANDLED = frozenset(("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"))
_MESSAGE_COLUMNS = _MESSAGE_HANDLED | {"provider_state"}


def _optional(keep: Callable[[int, str, Any], None], i: int, key: str, value: Any) -> str | None:
    """`value` where it is text (as valid UTF-8), else None; handed to `keep` where that is not the value itself."""
    text, clean = jsontext.clean_text(value) if isinstance(value, str) else (None, value is None)
    if not clean:
        keep(i, key, value)
    return text


def _usage_numbers(usage: Mapping[str, Any]) -> tuple[int | float | None, ...]:
    """The numbers of a usage in the order of its columns; None where there is none, or none that its column holds."""
    *whole, cost = (usage.get(key) for key in _USAGE)
    return *(x if type(x) is int and x in INT64 else None for x in whole), number(cost)


def _all_or_none(sizes: list[int], full: list[int]) -> bool:
    """Whether each size is the full one or 0."""
    return sizes == full or all(size in (0, k) for size, k in zip(sizes, full, strict=True))


def _counts(mask: npt.NDArray[np.bool_], sizes: list[int]) -> list[int]:
    """True values in each of the consecutive pieces of `mask`."""
    flags, ends = mask.tobytes(), list(accumulate(sizes))
    return [flags.count(1, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _spread(values: npt.NDArray[np.bool_], where: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    result = np.full(len(where), -1, np.int8)
    result[where] = values
    return result


def _content(content: Any) -> tuple[str | None, str | None, bool]:
    """(text, parts as JSON, exact) of a message's content."""
    if content is None:
        return None, None, True
    if isinstance(content, str):
        text, clean = jsontext.clean_text(content)
        return text, None, clean
    if not isinstance(content, list):
        return None, None, False
    texts = [p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)]
    parts, exact = jsontext.any_json(content)
    return jsontext.clean_text("\n".join(texts))[0], parts, exact


def _as_ints(values: Any) -> tuple[npt.NDArray[np.int32] | None, bool]:
    """(`values` as int32, whether they were just that): absent reads as empty, True as 1; None where it is no int32."""
    if values is None:
        return np.zeros(0, np.int32), False
    if type(values) is not list:
        return None, False
    packed = pack_ints([values])
    if packed is not None:
        return packed, True
    if all(isinstance(x, (int, np.integer)) and int(x) in INT32 for x in values):
        return np.array([int(x) for x in values], np.int32), False
    return None, False


def _as_bools(values: Any) -> tuple[npt.NDArray[np.bool_] | None, bool]:
    if values is None:
        return np.zeros(0, np.bool_), False
    if type(values) is not list:
        return None, False
    packed = pack_bools([values])
    if packed is not None:
        return packed, True
    if all(isinstance(x, (int, np.bool_)) and x in (0, 1) for x in values):
        return np.array(values, np.bool_), False
    return None, False


def _as_floats(values: Any) -> tuple[npt.NDArray[np.float64] | None, bool]:
    if values is None:
        return np.zeros(0, np.float64), False
    if type(values) is not list:
        return None, False
    packed = pack_floats([values])
    if packed is not None:
        return packed, True
    numbers = [number(x) for x in values]
    if all(x is not None for x in numbers):
        return np.array(numbers, np.float64), False
    return None, False
