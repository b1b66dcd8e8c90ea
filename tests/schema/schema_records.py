"""Records to write tests with: recorded ones, and small ones made here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[1] / "data" / "traces"
"""Recorded traces of several Verifiers releases, with the facts expected of each."""

FILES = sorted(str(p.relative_to(TRACES)) for p in TRACES.rglob("*.jsonl"))
"""Every file of recorded traces."""


def lines(name: str) -> Iterator[dict[str, Any]]:
    """The lines of a file, as they are."""
    with (TRACES / name).open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def recorded(name: str) -> list[dict[str, Any]]:
    """The traces of a file: its lines, or the traces within them where a line is an Episode."""
    return [trace for line in lines(name) for trace in line.get("traces", [line])]


def record(**changes: Any) -> dict[str, Any]:
    """A finished trace of one turn, as Verifiers 0.2.0 writes it; `changes` replace top-level values."""
    times = {"start": 1.0, "end": 2.0}
    result = {
        "id": "t0",
        "task": {"type": "ProbeTask", "data": task_row()},
        "runtime": {"id": "workdir/t0", "type": "subprocess"},
        "nodes": [
            node(role="user", content="hi", ids=[5, 6], mask=[False, False]),
            node(
                role="assistant",
                content="ho",
                ids=[7, 8, 9],
                mask=[False, True, True],
                logprobs=[-0.5, -0.25],
                parent=0,
            ),
        ],
        "rewards": {"ok": 1.0},
        "metrics": {"chars": 2.0},
        "info": {},
        "extra_usage": [],
        "is_completed": True,
        "stop_condition": "agent_completed",
        "errors": [],
        "timing": {"start": 1.0, "setup": times, "generation": times, "finalize": times, "scoring": times},
    }
    return result | changes


def task_row() -> dict[str, Any]:
    """A task's row with all that Verifiers 0.2.0 writes of it."""
    return {
        "idx": 0,
        "name": "probe#0",
        "description": None,
        "prompt": "hi",
        "system_prompt": None,
        "image": None,
        "workdir": None,
        "timeout": {"setup": None, "harness": None, "finalize": None, "scoring": None},
        "resources": {"cpu": None, "memory": None, "gpu": None, "disk": None},
        "answer": "ho",
    }


def node(
    *,
    role: str,
    content: Any,
    ids: list[int],
    mask: list[bool],
    logprobs: list[float] | None = None,
    parent: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A node as Verifiers 0.2.0 writes it, sampled where log-probs are given; `changes` replace its values."""
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        message |= {"reasoning_content": None, "tool_calls": None, "provider_state": None}
    result = {
        "parent": parent,
        "message": message,
        "sampled": logprobs is not None,
        "timestamp": 1.5,
        "token_ids": ids,
        "mask": mask,
        "is_content": [],
        "logprobs": logprobs or [],
        "finish_reason": None if logprobs is None else "stop",
        "usage": None,
    }
    return result | changes


def text_of(value: Any) -> str:
    """Equal exactly where two JSON values are: NaN is NaN, 1 is neither 1.0 nor true, keys have an order."""
    return json.dumps(value, ensure_ascii=False)
