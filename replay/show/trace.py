"""One recorded trace, taken apart for a reader: its messages as a tree, its turns, tokens, rewards, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.replay.run import Run
from rolltape.replay.show.lookup import Place, read_row
from rolltape.replay.view import View
from rolltape.schema.fields import ROW
from rolltape.schema.jsontext import read_json
from rolltape.schema.records import exact_sum

TOKENS = ("token_ids", "sampled", "is_content", "logprobs", "recomputed_logprobs")
_NODES = tuple(f.name for f in ROW.fields if f.shape == "node")
_TURNS = tuple(f.name for f in ROW.fields if f.shape == "turn")
_JSON = ("task", "info", "runtime", "extra_usage", "agent", "tools", "calls", "sampling", "renderer", "handed_reward")


@dataclass(frozen=True)
class Token:
    """One token of a message."""

    id: int
    sampled: bool
    logprob: float | None
    """None where it was not sampled, or none was recorded."""


@dataclass(frozen=True)
class Message:
    """One node of the message graph."""

    index: int
    parent: int | None
    """None for a root; also where the recorded parent does not come before it."""
    fields: Mapping[str, Any]
    """Columns of the node, without `node_`."""
    turn: Mapping[str, Any] | None
    """What the engine said of the reply, columns without `turn_`; None where it is not recorded."""
    tokens: Sequence[Token] | None
    """None where tokens were not asked for."""

    @property
    def tool_calls(self) -> list[tuple[str, str]]:
        """(name, arguments as text) of each call."""
        calls = parsed(self.fields["tool_calls"]) or []
        return [_call(c) for c in calls] if isinstance(calls, list) else [("", str(calls))]

    @property
    def other_parts(self) -> list[str]:
        """Types of content parts that are no text."""
        parts = parsed(self.fields["parts"]) or []
        kinds = [str(p.get("type")) for p in parts if isinstance(p, Mapping)] if isinstance(parts, list) else []
        return [kind for kind in kinds if kind != "text"]


def _call(call: Any) -> tuple[str, str]:
    """Name and arguments of a tool call, in either of the forms that releases write."""
    if not isinstance(call, Mapping):
        return "", str(call)
    inner = call.get("function")
    body = inner if isinstance(inner, Mapping) else call
    arguments = body.get("arguments")
    values = parsed(arguments) if isinstance(arguments, str) else arguments
    if isinstance(values, Mapping):
        return str(body.get("name")), ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in values.items())
    return str(body.get("name")), "" if arguments is None else str(arguments)


def parsed(text: Any) -> Any:
    """JSON text as its value; None where there is none, the text itself where it is no JSON."""
    if not isinstance(text, str):
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


class Trace:
    """A recorded trace. `row` holds its columns as Python values; token columns only where they were read."""

    def __init__(self, table: pa.Table, place: Place) -> None:
        self.place = place
        light = table.drop_columns([name for name in TOKENS if name in table.column_names])
        self.row: dict[str, Any] = light.to_pylist(maps_as_pydicts="strict")[0]
        asked = "token_ids" in table.column_names
        self.tokens_gone = asked and table.column("token_ids").null_count > 0
        """Whether tokens were asked for and are not there any more."""
        self._view = View(table.to_batches()[0]) if asked and not self.tokens_gone else None

    @cached_property
    def messages(self) -> list[Message]:
        """Messages in the order they were recorded."""
        row, turns = self.row, self._turns
        found = []
        for i in range(len(row["node_tokens"] or ())):
            fields = {name[5:]: row[name][i] for name in _NODES if row[name]}
            parent = fields["parent"]
            parent = parent if parent is not None and 0 <= parent < i else None
            found.append(Message(i, parent, fields, turns.get(i), self._tokens(i)))
        return found

    @cached_property
    def _turns(self) -> dict[int, dict[str, Any]]:
        """What the engine said, by sampled message."""
        sampled = [i for i, s in enumerate(self.row["node_sampled"] or ()) if s]
        columns = {name[5:]: self.row[name] for name in _TURNS if self.row[name]}
        rows = zip(*columns.values(), strict=True)
        return {node: dict(zip(columns, values, strict=True)) for node, values in zip(sampled, rows, strict=False)}

    def _tokens(self, node: int) -> list[Token] | None:
        view = self._view
        if view is None:
            return None
        begin, end = view.node_token_starts[node : node + 2].tolist()
        part = slice(begin, min(end, len(view.ids)))
        known = np.ones(part.stop - begin, np.bool_) if view.known is None else view.known[part]
        columns = (view.ids[part].tolist(), view.sampled[part].tolist(), view.logprobs[part].tolist(), known.tolist())
        return [Token(i, s, p if s and k else None) for i, s, p, k in zip(*columns, strict=True)]

    @cached_property
    def children(self) -> dict[int | None, list[int]]:
        """Messages that follow each message, in order; roots under None."""
        found: dict[int | None, list[int]] = {}
        for message in self.messages:
            found.setdefault(message.parent, []).append(message.index)
        return found

    def chain(self, start: int) -> Iterator[Message]:
        """Messages from `start` on, up to and including the next that has several or none behind it."""
        following = [start]
        while len(following) == 1:
            message = self.messages[following[0]]
            yield message
            following = self.children.get(message.index, [])

    @property
    def parts(self) -> list[tuple[str, float | None, float | None, float | None]]:
        """(name, contribution, score, weight) of each reward; None where it was not scored or is not recorded."""
        rewards, scores, weights = (self.row[name] or {} for name in ("rewards", "scores", "weights"))
        names = dict.fromkeys((*rewards, *scores, *weights))
        return [(name, rewards.get(name), scores.get(name), weights.get(name)) for name in names]

    @property
    def reward_differs(self) -> float | None:
        """The sum of the parts, where the total is another number."""
        known = [value for _, value, _, _ in self.parts if value is not None]
        total = exact_sum(known)
        reward = self.row["reward"]
        if reward is None or not known or reward == total or (reward != reward and total != total):
            return None
        return None if abs(reward - total) <= 1e-9 * max(1.0, abs(total)) else total

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the columns under their names, nodes and turns as lists, JSON columns as what they say."""
        skip = {*_NODES, *_TURNS, *TOKENS, "extra"}
        head = {k: parsed(v) if k in _JSON else v for k, v in self.row.items() if k not in skip}
        group = self.place.group
        return {
            **head,
            "superseded": self.place.superseded,
            "kept_beside": self.row["extra"] is not None,
            "group": None if group is None else group.to_dict(),
            "nodes": [_node(m) for m in self.messages],
        }


def _node(message: Message) -> dict[str, Any]:
    fields = {k: parsed(v) if k in ("parts", "tool_calls") else v for k, v in message.fields.items()}
    fields["num_tokens"], fields["num_logprobs"] = fields.pop("tokens", None), fields.pop("logprobs", None)
    node = {"index": message.index, **fields, "turn": message.turn}
    if message.tokens is not None:
        node["token_ids"] = [t.id for t in message.tokens]
        node["sampled_tokens"] = [t.sampled for t in message.tokens]
        node["logprobs"] = [t.logprob for t in message.tokens]
    return node


def read_trace(run: Run, place: Place, *, tokens: bool = False) -> Trace:
    """Read one trace; token columns only where `tokens` are asked for. Raises Damaged as `lookup.read_row` does."""
    columns = [f.name for f in ROW.fields if tokens or f.name not in TOKENS]
    return Trace(read_row(run, place, columns), place)
