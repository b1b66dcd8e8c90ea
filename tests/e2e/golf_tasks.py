"""Small code golf for the demo engine: a program prints a number, the subprocess runtime runs it, and rollouts compete.

Named like the rewards and metrics of `code-golf-v1`, so that what checks a run of that one can be tried on this one.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf

_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_ASKED = re.compile(r"sum of the numbers from 1 to (\d+)")


class GolfData(vf.TaskData):
    """One task: a number to print."""

    expected: str


class GolfTask(vf.Task[GolfData]):
    """Runs the program of a reply and scores it, alone and against the other rollouts of its task."""

    async def finalize(self, trace: Any, runtime: Any) -> None:
        """Run the program once; what it printed and how long it took becomes metrics."""
        code = _code(trace)
        await runtime.write("program.py", code.encode())
        began = time.perf_counter()
        ended = await runtime.run([sys.executable, "-I", "-S", "program.py"], {})
        trace.record_metric("latency", time.perf_counter() - began)
        right = ended.exit_code == 0 and ended.stdout.strip() == self.data.expected
        trace.record_metric("passed", float(bool(code) and right))

    @vf.reward(weight=1.0)
    async def correct(self, trace: Any) -> float:
        """Whether the program printed the number."""
        passed: float = trace.metrics["passed"]
        return passed

    @vf.group_reward(weight=0.5)
    async def fastest(self, traces: list[Any]) -> list[float]:
        """One winner a group: right before wrong, then quick before slow."""
        return _winner([(-t.metrics["passed"], t.metrics["latency"]) for t in traces])

    @vf.group_reward(weight=0.5)
    async def most_concise(self, traces: list[Any]) -> list[float]:
        """One winner a group: right before wrong, then short before long."""
        return _winner([(-t.metrics["passed"], float(len(_code(t)))) for t in traces])


class GolfTaskset(vf.Taskset[GolfTask, vf.TasksetConfig]):
    """Sums to print."""

    def load(self) -> list[GolfTask]:
        """Five tasks."""
        return [
            GolfTask(
                GolfData(
                    idx=idx,
                    prompt=f"Write a Python program that prints the sum of the numbers from 1 to {last}.",
                    expected=str(last * (last + 1) // 2),
                ),
                self.config.task,
            )
            for idx, last in enumerate((4, 7, 10, 20, 100))
        ]


class GolfPolicy:
    """The demo engine's replies: mostly programs that work, one that does not, one that counts wrong."""

    def candidates(self, prompt_text: str) -> Sequence[tuple[float, str]] | None:
        """Weighted replies to a task."""
        asked = _ASKED.findall(prompt_text)
        if not asked:
            return None
        last = int(asked[-1])
        programs = [
            (0.4, f"print(sum(range({last + 1})))"),
            (0.3, f"total = 0\nfor number in range(1, {last + 1}):\n    total += number\nprint(total)"),
            (0.2, f"print(sum(range({last})))"),
            (0.1, "print(sum("),
        ]
        return [(weight, f"```python\n{program}\n```") for weight, program in programs]


def _code(trace: Any) -> str:
    found = _CODE.findall(trace.last_reply or "")
    return str(found[-1]) if found else ""


def _winner(places: list[tuple[float, float]]) -> list[float]:
    best = min(range(len(places)), key=lambda rollout: (places[rollout], rollout))
    return [float(rollout == best) for rollout in range(len(places))]


__all__ = ["GolfTaskset"]
