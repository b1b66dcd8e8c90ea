"""Key order of the records that Verifiers releases write, told apart by shape, never by the `version` field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TRACE = (
    "id",
    "task",
    "runtime",
    "nodes",
    "rewards",
    "metrics",
    "info",
    "extra_usage",
    "is_completed",
    "stop_condition",
    "errors",
    "timing",
)
_NODE = (
    "parent",
    "message",
    "sampled",
    "timestamp",
    "token_ids",
    "mask",
    "is_content",
    "logprobs",
    "finish_reason",
    "usage",
)
_MESSAGES = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "reasoning_content", "tool_calls", "provider_state"),
    "tool": ("role", "tool_call_id", "content", "name"),
}


@dataclass(frozen=True)
class Layout:
    """Key order of one release: of a trace, of a node, and of a message by role."""

    name: str
    top: tuple[str, ...]
    node: tuple[str, ...]
    messages: Mapping[str, tuple[str, ...]]

    def message_keys(self, role: str | None) -> tuple[str, ...]:
        """Keys of a message of that role."""
        return self.messages.get(role or "", ())


V0_2_0 = Layout("0.2.0", _TRACE, _NODE, _MESSAGES)
LAYOUTS = {layout.name: layout for layout in (V0_2_0,)}


def layout_of(_record: Mapping[str, Any]) -> Layout:
    """The layout a record is stored in. Records of other releases keep their own key order in `extra`."""
    return V0_2_0
