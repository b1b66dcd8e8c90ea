"""What the demo engine says to the demo's questions: mostly right, sometimes wrong, once without an end."""

from __future__ import annotations

import json
import re

from rolltape.record.demo.problems import Problem, read_answer, read_follow_up, read_problem

Candidates = list[tuple[float, str]]

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class DemoPolicy:
    """Answers the demo's word problems; any other prompt is unknown to it."""

    def candidates(self, prompt_text: str) -> Candidates | None:
        """Weighted replies to the last message of a prompt in Qwen's chat markup."""
        messages: list[tuple[str, str]] = _MESSAGE.findall(prompt_text)
        if not messages or messages[-1][0] != "user":
            return None
        last = messages[-1][1]
        result = _RESULT.search(last)
        if result:
            return _after_tool(result[1])
        problem = read_problem(last)
        if problem is not None:
            return _first_replies(problem)
        taken = read_follow_up(last)
        return None if taken is None else _follow_up_replies(_last_answer(messages), taken)


def _first_replies(problem: Problem) -> Candidates:
    if problem.kind == "count":
        numbers = [str(number) for number in range(1, problem.a + 1)]
        last = f"\nAnswer: {problem.answer}"
        return [(0.6, "\n".join(numbers) + last), (0.4, "I count: " + ", ".join(numbers) + last)]
    return [
        (0.50, f"I will use the calculator.\n{_call(problem.expression)}"),
        (0.12, _call(problem.expression)),
        (0.13, f"I will use the calculator.\n{_call(problem.mistake)}"),
        (0.15, f"That is {problem.answer}.\nAnswer: {problem.answer}"),
        (0.10, f"That is {problem.wrong_answer}.\nAnswer: {problem.wrong_answer}"),
    ]


def _follow_up_replies(before: int, taken: int) -> Candidates:
    left = before - taken
    return [
        (0.50, f"There are {left} left.\nAnswer: {left}"),
        (0.15, f"Answer: {left}"),
        (0.20, _call(f"{before} - {taken}")),
        (0.10, f"There are {before + taken} left.\nAnswer: {before + taken}"),
        (0.05, f"There are {left} left, I think."),
    ]


def _after_tool(result: str) -> Candidates:
    if not re.fullmatch(r"-?\d+", result.strip()):
        return [(1.0, "The calculator does not help here.\nAnswer: 0")]
    value = int(result)
    return [
        (0.55, f"The calculator says {value}.\nAnswer: {value}"),
        (0.35, f"Answer: {value}"),
        (0.10, f"The calculator says {value}, so with one more that is {value + 1}.\nAnswer: {value + 1}"),
    ]


def _last_answer(messages: list[tuple[str, str]]) -> int:
    answers = (read_answer(text) for role, text in reversed(messages) if role == "assistant")
    return next((answer for answer in answers if answer is not None), 0)


def _call(expression: str) -> str:
    arguments = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{arguments}\n</tool_call>"
