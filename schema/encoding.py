"""From a trace to a row.

`row_of` takes a JSON record (or a Verifiers Trace object, through `record_of`) apart into columns. Whatever a column does
not hold exactly goes into `extra`, so that `decode` gives the record back bit for bit, for any release:

    columns         every value of the expected type
    extra.keys      key order and presence, where they differ from the release's own
    extra.top       top-level values that fit no column
    extra.task      keys of the task beside type and data
    extra.nodes     the same per node, among them lists of the wrong length
    extra.messages  the same per message

`rows_to_table` puts rows together as one Arrow table. The two halves are apart because a live recorder encodes one trace
at a time and builds tables once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.schema import jsontext
from rolltape.schema.errors import BadInput
from rolltape.schema.layouts import Layout, layout_of
from rolltape.schema.nodes import INT32, INT64, Nodes, text_keys
from rolltape.schema.records import Context, Turn, as_mapping, contribution, number
from rolltape.schema.releases import calls_of, last_finish_reason, rounds_logprobs, settings_of, version_of
from rolltape.schema.snapshots import Problems, record_of

TIMINGS = ("setup", "generation", "finalize", "scoring")
TRUNCATING = frozenset(
    (
        *("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length"),
        *("harness_timeout", "compaction_failed"),
    )
)
"""Stop conditions that a release of Verifiers counts as truncation (verifiers.v1.trace.Trace.is_truncated).

`harness_timeout` is one of 0.2, `compaction_failed` of 0.4; neither occurs in the others.
"""
_JSON_KEYS = ("runtime", "info", "extra_usage", "agent", "tools", "calls")


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

    @cached_property
    def nbytes(self) -> int:
        """Roughly the bytes the row takes in memory, as it is when first asked."""
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
        calls = calls_of(self.record)
        columns = Nodes(nodes, self.layout, calls, rounded=rounds_logprobs(self.record))
        self._counts(columns, calls)
        self._turns(columns)
        if tuple(self.record) != self.layout.top:
            self.extra["keys"] = list(text_keys(self.record))
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
        places = [("", self.top), ("task.", self.extra.get("task", {}))]
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
        v["verifiers_version"] = _clean(version_of(self.record) or c.verifiers_version)
        said = settings_of(self.record)
        for name in ("model", "tokenizer", "sampling", "renderer"):
            value = getattr(c, name)
            value = getattr(said, name) if value is None else value
            v[name] = _clean(value) if value is None or isinstance(value, str) else self._json(dict(value), name)[0]
        v["runtime"] = None if said.runtime is None else self._json(dict(said.runtime), "runtime")[0]

    def _task(self) -> None:
        v = self.values
        task = self.record.get("task")
        data = task.get("data") if isinstance(task, dict) else None
        fits = isinstance(task, dict) and tuple(task)[:2] == ("type", "data") and isinstance(data, dict)
        if isinstance(task, dict) and isinstance(task.get("type"), str):
            v["task_type"], clean = jsontext.clean_text(task["type"])
            fits = fits and clean
        else:
            v["task_type"], fits = None, False
        v["task"], exact, kept = self._json(data, "task.data") if isinstance(data, dict) else (None, False, data)
        if not (fits and exact) and "task" in self.record:
            self.top["task"] = {**task, "data": kept} if isinstance(task, dict) and "data" in task else task
        elif task is not None and len(task) > 2:
            self.extra["task"] = {k: x for k, x in task.items() if k not in ("type", "data")}
        row = data if isinstance(data, dict) else {}
        key = task.get("key") if isinstance(task, dict) else None
        v["task_key"] = jsontext.clean_text(key)[0] if isinstance(key, str) else None
        idx = row.get("idx")
        v["task_idx"] = idx if type(idx) is int and idx in INT64 else None
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
            text, exact, value = (None, True, None) if value is None else self._json(value, key)
            v[key] = text if key != "runtime" or key in r else v[key]
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

    def _counts(self, columns: Nodes, calls: Sequence[Mapping[str, Any]]) -> None:
        v, n = self.values, columns.values
        sampled = [i for i, s in enumerate(n["node_sampled"]) if s]
        v["num_nodes"], v["num_turns"] = len(n["node_parent"]), len(sampled)
        nodes = range(v["num_nodes"])
        v["num_branches"] = len(nodes) - len(set(n["node_parent"]).intersection(nodes))
        v["num_tokens"], v["num_sampled"] = len(columns.ids), columns.sampled.tobytes().count(1)
        v["logprob_decimals"] = columns.decimals
        last = n["node_finish_reason"][sampled[-1]] if sampled else None
        last = last_finish_reason(calls) if calls else last
        v["is_truncated"] = v["stop_condition"] in TRUNCATING or last == "length"

    def _turns(self, columns: Nodes) -> None:
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
            return *jsontext.to_json_again(value), value
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
    return None if type(value) is int and value not in INT32 else _clean(value)


def _text_or_json(value: Any) -> tuple[str | None, bool | None]:
    if value is None or isinstance(value, str):
        return _clean(value), None if value is None else False
    return jsontext.any_json(value)[0], True


def _align(turns: Sequence[Turn], columns: Nodes) -> list[Turn | None]:
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
