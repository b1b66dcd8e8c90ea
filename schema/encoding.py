"""From a trace to a row.

`row_of` takes a JSON record (or a Verifiers Trace object, through `record_of`) apart into columns. Whatever a column does
not hold exactly goes into `extra`, so that `decode` gives the record back bit for bit, for any release:

    columns      every value of the expected type
    extra.keys      key order and presence, where they differ from the release's own
    extra.top       top-level values that fit no column
    extra.nodes     the same per node, among them lists of the wrong length
    extra.messages  the same per message

`rows_to_table` puts rows together as one Arrow table. The two halves are apart because a live recorder encodes one trace
at a time and builds tables once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.schema import jsontext
from rolltape.schema.errors import BadInput
from rolltape.schema.layouts import Layout, layout_of
from rolltape.schema.packing import decimals_of, float32_exact, pack_bools, pack_floats, pack_ints
from rolltape.schema.records import Context, Turn, as_mapping, contribution, number

Problems = list[str]

TIMINGS = ("setup", "generation", "finalize", "scoring")
TRUNCATING = frozenset(
    ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length", "harness_timeout")
)
"""Stop conditions that Verifiers counts as truncation (verifiers.v1.trace.Trace.is_truncated)."""
_INT32 = range(-(1 << 31), 1 << 31)
_INT64 = range(-(1 << 63), 1 << 63)
_LISTS = ("token_ids", "mask", "is_content", "logprobs")
_JSON_KEYS = ("runtime", "info", "extra_usage", "agent", "tools", "calls")
_USAGE = ("prompt_tokens", "completion_tokens", "cached_input_tokens", "reasoning_tokens", "cost")


@dataclass
class Row:
    """One trace, taken apart. Per-token arrays run over all nodes in order."""

    values: dict[str, Any]
    """Columns that are no per-token and no per-node list."""
    nodes: dict[str, list[Any]]
    """Per-node columns."""
    ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]
    content: npt.NDArray[np.int8]
    """1 body, 0 template, -1 unknown."""
    logprobs: npt.NDArray[np.float32]
    """Values at the positions where `known` is true, in order."""
    known: npt.NDArray[np.bool_]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Where the row stands in its file: group, rollout, try, trace id."""
        v = self.values
        group = v["group_index"]
        return -1 if group is None else group, v["rollout_index"] or 0, v["try_number"], v["trace_id"]

    @property
    def nbytes(self) -> int:
        """Roughly the bytes the row takes in memory."""
        text = sum(len(v) for v in self.values.values() if isinstance(v, str))
        text += sum(len(v) for column in self.nodes.values() for v in column if isinstance(v, str))
        return text + self.ids.nbytes + self.logprobs.nbytes + 3 * len(self.ids) + 2000


def row_of(trace: Any, context: Context | None = None, problems: Sequence[str] = ()) -> Row:
    """Take a trace apart.

    `trace` is a JSON record (dict) of any Verifiers release or a Verifiers Trace object; `problems` are those that
    `record_of` named when it made the record. Raises BadInput where `trace` is neither, or has no id.
    """
    known = list(problems)
    record = trace if isinstance(trace, dict) else record_of(trace, known)
    try:
        return _Encoder(record, context or Context(), list(known)).row()
    except BadInput:
        raise
    except Exception:  # no JSON record: a key that is no text, a set, a cycle, an object of somebody else's
        record = jsontext.plain(record, "trace", known)
        return _Encoder(record, context or Context(), known).row()


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
    heavy = {"nodes": {"__all__": {*_LISTS, "multi_modal_data", "routed_experts"}}, "info": True}
    try:
        record = trace.model_dump(mode="json", exclude=heavy, warnings="none", fallback=_Fallback(problems))
    except Exception:  # cycles, bytes that are no UTF-8, keys of any type: take it apart value by value
        record = jsontext.plain(trace.model_dump(exclude=heavy, warnings="none"), "trace", problems)
    nodes = record["nodes"]
    for i, node in enumerate(trace.nodes[: len(nodes)]):
        nodes[i] = _node_record(node, nodes[i])
    result: dict[str, Any] = {}
    for key, value in record.items():
        if key == "extra_usage":
            result["info"] = jsontext.as_json(trace.info, "info", problems)
        result[key] = value
    return result


class _Fallback:
    """What pydantic asks for a value of a type it does not know."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def __call__(self, value: Any) -> Any:
        return jsontext.plain(value, "trace", self.problems)


def _node_record(node: Any, light: dict[str, Any]) -> dict[str, Any]:
    """The node's record in Verifiers' key order, its token lists taken over as they are."""
    result: dict[str, Any] = {}
    for key, value in light.items():
        if key == "finish_reason":
            for name in _LISTS:
                result[name] = getattr(node, name)
        result[key] = value
    for key in ("multi_modal_data", "routed_experts"):
        if getattr(node, key, None) is not None:
            result[key] = node.model_dump(include={key})[key]
    return result


class _Encoder:
    """Takes one record apart. A class only to share what the parts of a record write to."""

    def __init__(self, record: dict[str, Any], context: Context, problems: Problems) -> None:
        self.record = record
        self.context = context
        self.layout: Layout = layout_of(record)
        self.values: dict[str, Any] = {}
        self.top: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}
        self.problems = problems

    def row(self) -> Row:
        if not isinstance(self.record.get("id"), str):
            raise BadInput(
                f"a record without a trace id (id is {self.record.get('id')!r}): expected one Verifiers trace a record; "
                "an Episode line holds its traces under 'traces'."
            )
        if "traces" in self.record and "nodes" not in self.record:
            raise BadInput(
                f"record {self.record['id']} is an Episode, not a trace: encode the traces it holds under 'traces'."
            )
        self._identity()
        self._task()
        self._result()
        self._timing()
        nodes = self.record.get("nodes")
        if not isinstance(nodes, list) or not all(isinstance(n, dict) for n in nodes):
            if "nodes" in self.record:
                self.top["nodes"] = nodes
            nodes = []
        columns = _Nodes(nodes, self.layout)
        self._counts(columns)
        self._turns(columns)
        if tuple(self.record) != self.layout.top:
            self.extra["keys"] = list(_text_keys(self.record))
        if self.top:
            self.extra["top"] = self.top
        self.extra.update(columns.extra)
        if self.extra and not jsontext.fits_extra(self.extra):
            self._kept_as_json()
        self.values["problems"] = [jsontext.clean_text(p)[0] for p in self.problems] or None
        return Row(
            self.values,
            columns.values,
            columns.ids,
            columns.sampled,
            columns.content,
            columns.logprobs,
            columns.known,
            self.extra,
        )

    def _kept_as_json(self) -> None:
        """Replace what lies in `extra` and is no JSON value, each with its path in the problems."""
        places = [("", self.top)]
        for name, below in (("nodes", ""), ("messages", "message.")):
            places += [(f"nodes[{i}].{below}", kept) for i, kept in self.extra.get(name, {}).items()]
        for path, kept in places:
            for key, value in kept.items():
                if not jsontext.fits_extra(value):
                    kept[key] = jsontext.plain(value, path + key, self.problems)

    # -- parts of a record

    def _identity(self) -> None:
        c, v = self.context, self.values
        for name in ("run", "split", "eval_name", "step", "attempt", "writer", "group_index", "rollout_index"):
            v[name] = _clean(getattr(c, name))
        v["try_number"] = c.try_number
        v["trace_id"] = self._text(self.record["id"], "id")
        v["layout"] = self.layout.name
        producer = self.record.get("verifiers")
        version = producer.get("version") if isinstance(producer, dict) else None
        v["verifiers_version"] = _clean(version if isinstance(version, str) else c.verifiers_version)
        v["model"], v["tokenizer"] = _clean(c.model), _clean(c.tokenizer)
        v["sampling"] = None if c.sampling is None else self._json(dict(c.sampling), "sampling")[0]
        v["renderer"] = None if c.renderer is None else self._json(dict(c.renderer), "renderer")[0]

    def _task(self) -> None:
        v = self.values
        task = self.record.get("task")
        data = task.get("data") if isinstance(task, dict) else None
        fits = isinstance(task, dict) and tuple(task) == ("type", "data") and isinstance(data, dict)
        if isinstance(task, dict) and isinstance(task.get("type"), str):
            v["task_type"], clean = jsontext.clean_text(task["type"])
            fits = fits and clean
        else:
            v["task_type"], fits = None, False
        v["task"], exact, kept = self._json(data, "task.data") if isinstance(data, dict) else (None, False, data)
        if not (fits and exact) and "task" in self.record:
            self.top["task"] = {**task, "data": kept} if isinstance(task, dict) and "data" in task else task
        row = data if isinstance(data, dict) else {}
        key = task.get("key") if isinstance(task, dict) else None
        v["task_key"] = jsontext.clean_text(key)[0] if isinstance(key, str) else None
        idx = row.get("idx")
        v["task_idx"] = idx if type(idx) is int and idx in _INT64 else None
        v["task_name"] = jsontext.clean_text(row["name"])[0] if isinstance(row.get("name"), str) else None
        label = row.get("label")
        label = row.get("answer") if label is None else label
        v["task_prompt"], v["task_prompt_is_json"] = _text_or_json(row.get("prompt"))
        v["task_label"], v["task_label_is_json"] = _text_or_json(label)

    def _result(self) -> None:
        v, r = self.values, self.record
        self._numbers("rewards")
        self._numbers("metrics")
        given = v["rewards"]
        v["reward"] = None
        if given and all(x is not None for x in given.values()):
            v["reward"] = float(sum(given.values()))
        if any(isinstance(x, dict) for x in as_mapping(r.get("rewards")).values()):
            parts = {k: x for k, x in r["rewards"].items() if isinstance(x, dict)}
            v["scores"] = {jsontext.clean_text(str(k))[0]: number(x.get("score")) for k, x in parts.items()}
            v["weights"] = {jsontext.clean_text(str(k))[0]: number(x.get("weight")) for k, x in parts.items()}
        else:
            v["scores"] = v["weights"] = None
        completed = r.get("is_completed")
        v["is_completed"] = completed if isinstance(completed, bool) else None
        if not isinstance(completed, bool) and "is_completed" in r:
            self.top["is_completed"] = completed
        v["stop_condition"] = self._optional_text("stop_condition")
        self._errors()
        for key in _JSON_KEYS:
            value = r.get(key)
            v[key], exact, value = (None, True, None) if value is None else self._json(value, key)
            if not exact:
                self.top[key] = value
        self.top.update({key: value for key, value in r.items() if key not in _HANDLED})

    def _errors(self) -> None:
        v, errors = self.values, self.record.get("errors")
        items = [e for e in errors if isinstance(e, dict)] if isinstance(errors, list) else []
        exact = isinstance(errors, list) and len(items) == len(errors)
        columns: dict[str, list[str | None]] = {"type": [], "message": [], "traceback": []}
        for error in items:
            exact = exact and tuple(error) == tuple(columns)
            for key, column in columns.items():
                value = error.get(key)
                text, clean = jsontext.clean_text(value) if isinstance(value, str) else (None, value is None)
                exact = exact and clean and (value is not None or key == "traceback")
                column.append(text)
        v["error_types"], v["error_messages"], v["error_tracebacks"] = columns.values()
        if not exact and "errors" in self.record:
            self.top["errors"] = errors

    def _timing(self) -> None:
        v, timing = self.values, self.record.get("timing")
        timing = timing if isinstance(timing, dict) else {}
        exact = tuple(timing) == ("start", *TIMINGS) and type(timing["start"]) is float
        v["started_at"] = number(timing.get("start"))
        for name in TIMINGS:
            span = timing.get(name, timing.get("agent") if name == "generation" else None)
            span = span if isinstance(span, dict) else {}
            exact = exact and tuple(span) == ("start", "end")
            for end in ("start", "end"):
                exact = exact and type(span.get(end)) is float
                v[f"{name}_{end}"] = number(span.get(end))
        if not exact and "timing" in self.record:
            self.top["timing"] = self.record["timing"]

    def _counts(self, columns: _Nodes) -> None:
        v, n = self.values, columns.values
        sampled = [i for i, s in enumerate(n["node_sampled"]) if s]
        v["num_nodes"], v["num_turns"] = len(n["node_parent"]), len(sampled)
        nodes = range(v["num_nodes"])
        v["num_branches"] = len(nodes) - len({p for p in n["node_parent"] if p in nodes})
        v["num_tokens"], v["num_sampled"] = len(columns.ids), int(np.count_nonzero(columns.sampled))
        v["logprob_decimals"] = columns.decimals
        last = n["node_finish_reason"][sampled[-1]] if sampled else None
        v["is_truncated"] = v["stop_condition"] in TRUNCATING or last == "length"

    def _turns(self, columns: _Nodes) -> None:
        turns = _align(self.context.turns, columns) if self.context.turns else None
        for name in ("weight_version", "cached_tokens", "latency", "engine", "finish_reason", "retries"):
            self.values[f"turn_{name}"] = None if turns is None else [t and _said(getattr(t, name)) for t in turns]

    # -- values

    def _text(self, value: str, key: str) -> str:
        text, clean = jsontext.clean_text(value)
        if not clean:
            self.top[key] = value
        return text

    def _optional_text(self, key: str) -> str | None:
        value = self.record.get(key)
        if isinstance(value, str):
            return self._text(value, key)
        if value is not None:
            self.top[key] = value
        return None

    def _json(self, value: Any, path: str) -> tuple[str, bool, Any]:
        """(`value` as valid JSON, whether the text says it exactly, `value` as JSON values)."""
        try:
            return *jsontext.to_json(value), value
        except Exception:  # also what an object of somebody else's raises
            known = jsontext.plain(value, path, self.problems)
            return *jsontext.to_json(known), known

    def _numbers(self, key: str) -> None:
        """A mapping from name to number, as the MAP column of that name."""
        value = self.record.get(key)
        exact = isinstance(value, dict)
        column: dict[str, float | None] = {}
        for name, part in as_mapping(value).items():
            text, clean = jsontext.clean_text(str(name))
            exact = exact and clean and (type(part) is float or (part is None and key == "metrics"))
            column[text] = contribution(part)
        self.values[key] = column
        if not exact and key in self.record:
            self.top[key] = value


_HANDLED = frozenset(
    ("id", "task", "nodes", "rewards", "metrics", "is_completed", "stop_condition", "errors", "timing", *_JSON_KEYS)
)


def _clean(value: Any) -> Any:
    """Text as valid UTF-8: names come from settings, engines and foreign records."""
    return jsontext.clean_text(value)[0] if isinstance(value, str) else value


def _said(value: Any) -> Any:
    """What an engine said of a turn, where a column holds it: a wrong counter must not cost the step."""
    return None if type(value) is int and value not in _INT32 else _clean(value)


def _text_or_json(value: Any) -> tuple[str | None, bool | None]:
    if value is None or isinstance(value, str):
        return _clean(value), None if value is None else False
    try:
        return jsontext.to_json(value)[0], True
    except Exception:  # named where the whole task is written
        return jsontext.to_json(jsontext.plain(value, "", []))[0], True


def _text_keys(mapping: Mapping[Any, Any] | Sequence[Any]) -> Iterable[str]:
    """The keys; raises TypeError where one is no text."""
    if not all(isinstance(key, str) for key in mapping):
        raise TypeError("a key is no text")
    return mapping


def _align(turns: Sequence[Turn], columns: _Nodes) -> list[Turn | None]:
    """One engine turn per sampled node, in order, by prompt and completion length; None where none belongs to it.

    A reply that never became a node (the renderer refused it, the rollout was cancelled) is passed over.
    """
    result: list[Turn | None] = []
    waiting = list(turns)
    for i, sampled in enumerate(columns.values["node_sampled"]):
        if not sampled:
            continue
        completion = columns.values["node_completion_tokens"][i]
        fits = (t.completion_tokens in (None, completion) or completion is None for t in waiting)
        found = next((k for k, fit in enumerate(fits) if fit), None)
        result.append(None if found is None else waiting[found])
        del waiting[: 0 if found is None else found + 1]
    return result


class _Nodes:
    """The nodes of a record as columns."""

    def __init__(self, nodes: list[dict[str, Any]], layout: Layout) -> None:
        self.nodes = nodes
        self.extra: dict[str, Any] = {}
        self.rest: dict[str, dict[str, Any]] = {}
        self.messages: dict[str, dict[str, Any]] = {}
        self.values: dict[str, list[Any]] = {name: [] for name in _NODE_COLUMNS}
        self.decimals: int | None = None
        self._keys(layout)
        for i, node in enumerate(nodes):
            self._node(i, node)
        if not self._lists_at_once():
            self._lists_one_by_one()
        if self.rest:
            self.extra["nodes"] = self.rest
        if self.messages:
            self.extra["messages"] = self.messages

    def _keys(self, layout: Layout) -> None:
        """Keep the key order of nodes and messages where it is not the layout's."""
        found: dict[Any, int] = {}
        index = []
        for node in self.nodes:
            message = node.get("message")
            role = message.get("role") if isinstance(message, dict) else None
            role = role if isinstance(role, str) else ""
            keys = (tuple(node), tuple(message) if isinstance(message, dict) else None, role)
            index.append(found.setdefault(keys, len(found)))
        if any(not layout.has(*keys) for keys in found):
            for node_keys, message_keys, _ in found:
                _text_keys((*node_keys, *(message_keys or ())))
            self.extra["node_keys"] = {"kinds": [keys[:2] for keys in found], "index": index}

    def _keep(self, i: int, key: str, value: Any) -> None:
        self.rest.setdefault(str(i), {})[key] = value

    def _keep_message(self, i: int, key: str, value: Any) -> None:
        self.messages.setdefault(str(i), {})[key] = value

    def _node(self, i: int, node: dict[str, Any]) -> None:
        v, get = self.values, node.get
        parent, sampled, stamp = get("parent"), get("sampled"), get("timestamp")
        if not (parent is None or (type(parent) is int and parent in _INT32)):
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
        numbers = [u.get(k) for k in _USAGE]
        whole = [x if type(x) is int and x in _INT64 else None for x in numbers[:4]]
        cost = number(numbers[4])
        for name, x in zip(_USAGE_COLUMNS, (*whole, cost), strict=True):
            v[name].append(x)
        exact = (
            tuple(u) == _USAGE
            and whole == numbers[:4]
            and whole[0] is not None
            and type(numbers[4]) in (float, type(None))
        )
        if not exact:
            self._keep(i, "usage", usage)

    def _message(self, i: int, message: Any) -> None:
        v, m = self.values, message if isinstance(message, dict) else {}
        content, calls = m.get("content"), m.get("tool_calls")
        text, parts, exact = _content(content)
        v["node_content"].append(text)
        v["node_parts"].append(parts)
        if not exact:
            self._keep_message(i, "content", content)
        for column, key in _MESSAGE_TEXTS:
            v[column].append(_optional(self._keep_message, i, key, m.get(key)))
        text, exact = (None, True) if calls is None else jsontext.to_json(calls)
        v["node_tool_calls"].append(text)
        if not exact:
            self._keep_message(i, "tool_calls", calls)
        for key in () if _MESSAGE_HANDLED.issuperset(m) else m:
            if key not in _MESSAGE_HANDLED and (key != "provider_state" or m[key] is not None):
                self._keep_message(i, key, m[key])
        if message is not None and not isinstance(message, dict):
            self._keep(i, "message", message)

    # -- token lists

    def _lists_at_once(self) -> bool:
        """Fill the token columns from all nodes in one go; False where a node does not fit."""
        lists = [[node.get(key, _NONE) for node in self.nodes] for key in _LISTS]
        if not all(type(x) is list for column in lists for x in column):
            return False
        n, masks, bodies, numbers = ([len(x) for x in column] for column in lists)
        ids, mask, body, given = pack_ints(lists[0]), pack_bools(lists[1]), pack_bools(lists[2]), pack_floats(lists[3])
        if ids is None or mask is None or body is None or given is None or masks != n:
            return False
        wanted = _counts(mask, n)
        if any(x not in (0, k) for x, k in zip(bodies, n, strict=True)):
            return False
        if any(x not in (0, k) for x, k in zip(numbers, wanted, strict=True)):
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
        if exact:
            return
        self.decimals = decimals_of(given, self.logprobs)
        if self.decimals is None:
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
        ids, mask, body, given = (node.get(key) for key in _LISTS)
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
_NODE_HANDLED = frozenset(("parent", "message", "sampled", "timestamp", "finish_reason", "usage", *_LISTS))
_MESSAGE_TEXTS = (
    ("node_role", "role"),
    ("node_reasoning", "reasoning_content"),
    ("node_tool_call_id", "tool_call_id"),
    ("node_name", "name"),
)
_MESSAGE_HANDLED = frozenset(("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"))


def _optional(keep: Callable[[int, str, Any], None], i: int, key: str, value: Any) -> str | None:
    """`value` where it is text (as valid UTF-8), else None; handed to `keep` where that is not the value itself."""
    text, clean = jsontext.clean_text(value) if isinstance(value, str) else (None, value is None)
    if not clean:
        keep(i, key, value)
    return text


def _counts(mask: npt.NDArray[np.bool_], sizes: list[int]) -> list[int]:
    """True values in each of the consecutive pieces of `mask`."""
    counts, start = [], 0
    for size in sizes:
        counts.append(int(np.count_nonzero(mask[start : start + size])) if size else 0)
        start += size
    return counts


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
    parts, exact = jsontext.to_json(content)
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
    if all(isinstance(x, (int, np.integer)) and int(x) in _INT32 for x in values):
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
