"""The demo's harness: the calculator, and a customer who asks one more question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rolltape.record.demo.calculator import calculator
from rolltape.record.demo.problems import read_answer
from rolltape.record.inprocess import InProcessHarness


class StallHarness(InProcessHarness):
    """Runs a conversation in the process, see `rolltape.record.inprocess`."""

    def tools(self, task: Any) -> Mapping[str, Callable[..., Any]]:  # noqa: ARG002
        """The calculator."""
        return {"calculator": calculator}

    async def user(self, task: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The follow-up question, once, if the first reply has an answer."""
        asked = any(message.get("content") == task.follow_up for message in messages if message["role"] == "user")
        if asked or read_answer(messages[-1].get("content") or "") is None:
            return None
        return [{"role": "user", "content": task.follow_up}]
