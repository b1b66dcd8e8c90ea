"""A recorded trace of any Verifiers release as a Trace of the installed one: what its scoring functions expect to see."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from verifiers.v1.graph import MessageNode
from verifiers.v1.runtimes import RuntimeInfo
from verifiers.v1.trace import Error, Timing, Trace, TraceTask
from verifiers.v1.types import Message, Usage

from rolltape.schema.errors import BadInput

_SPANS = ("setup", "generation", "finalize", "scoring")
_USAGE = {
    "prompt_tokens": "node_prompt_tokens",
    "completion_tokens": "node_completion_tokens",
    "cached_input_tokens": "node_cached_tokens",
    "reasoning_tokens": "node_reasoning_tokens",
    "cost": "node_cost",
}
COLUMNS = (
    *("trace_id", "task_type", "task", "task_name", "group_index", "rollout_index", "reward", "rewards", "metrics"),
    *("is_completed", "stop_condition", "error_types", "error_messages", "error_tracebacks", "started_at"),
    *(f"{name}_{end}" for name in _SPANS for end in ("start", "end")),
    *("node_finish_reason", *_USAGE.values(), "disposition"),
)
"""Columns without tokens that are read beside the record: they say the same for every release."""

_MESSAGE: TypeAdapter[Any] = TypeAdapter(Message)
_RUNTIME: TypeAdapter[Any] = TypeAdapter(RuntimeInfo)
_MESSAGE_KEYS = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "reasoning_content", "tool_calls", "provider_state"),
    "tool": ("role", "tool_call_id", "content", "name"),
}
_CALL_KEYS = ("id", "name", "arguments")
_LISTS = ("token_ids", "mask", "is_content", "logprobs")
_REASONS = ("stop", "length", "tool_calls")


def trace_of(record: Mapping[str, Any], columns: Mapping[str, Any], task: Any, state: Any) -> Any:
    """The Trace of a decoded record, with the row of `task` and the given state, without rewards and metrics.

    `columns`: `COLUMNS` of its row. Token lists are taken over as they were recorded. Judges' calls are left out of `info`:
    judges are asked again. Raises BadInput where the record makes no Trace.
    """
    try:
        return _trace(record, columns, task, state)
    except (ValidationError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise BadInput(f"no Verifiers Trace can be made of it ({type(error).__name__}: {error})") from error


def _trace(record: Mapping[str, Any], columns: Mapping[str, Any], task: Any, state: Any) -> Any:
    spans = {name: {end: columns[f"{name}_{end}"] or 0.0 for end in ("start", "end")} for name in _SPANS}
    info = {k: v for k, v in (record.get("info") or {}).items() if k != "judge"}
    errors = zip(columns["error_types"], columns["error_messages"], columns["error_tracebacks"], strict=True)
    trace: Any = Trace(
        id=columns["trace_id"],
        task=TraceTask(type=type(task).__name__, data=task.data),
        runtime=_runtime(record.get("runtime")),
        info=copy.deepcopy(info),
        is_completed=bool(columns["is_completed"]),
        stop_condition=columns["stop_condition"],
        errors=[Error(type=kind or "", message=text or "", traceback=lines) for kind, text, lines in errors],
        timing=Timing.model_validate({"start": columns["started_at"] or 0.0, **spans}),
    )
    trace.nodes = [_node(node, i, columns) for i, node in enumerate(record["nodes"])]
    trace.state = state
    return trace


def _runtime(recorded: Any) -> Any:
    """The runtime, where the installed release knows its kind."""
    try:
        return None if recorded is None else _RUNTIME.validate_python(recorded)
    except ValidationError:
        return None


def _node(node: Mapping[str, Any], i: int, columns: Mapping[str, Any]) -> Any:
    reason = columns["node_finish_reason"][i]
    return MessageNode.model_construct(
        parent=node.get("parent"),
        message=message_of(node["message"]),
        sampled=bool(node.get("sampled")),
        timestamp=node.get("timestamp") or 0.0,
        **{name: node.get(name) or [] for name in _LISTS},
        finish_reason=reason if reason in _REASONS else None,
        usage=_usage({name: columns[column][i] for name, column in _USAGE.items()}),
    )


def message_of(message: Mapping[str, Any]) -> Any:
    """A recorded message of any release as the installed release's. Raises pydantic's ValidationError where it is none."""
    known = {key: message[key] for key in _MESSAGE_KEYS.get(message["role"], tuple(message)) if key in message}
    if calls := known.get("tool_calls"):
        known["tool_calls"] = [{key: call[key] for key in _CALL_KEYS if key in call} for call in calls]
    return _MESSAGE.validate_python(known)


def _usage(values: Mapping[str, Any]) -> Any:
    if values["prompt_tokens"] is None:
        return None
    return Usage.model_construct(**{**values, "completion_tokens": values["completion_tokens"] or 0})
