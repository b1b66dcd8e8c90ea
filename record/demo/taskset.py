"""The demo's taskset: word problems at a market stall, with a follow-up question, scored alone and in groups."""

from __future__ import annotations

import random

from pydantic import Field
from verifiers.v1 import Task, TaskData, Taskset, TasksetConfig, Trace
from verifiers.v1.decorators import group_reward, metric, reward

from rolltape.record.demo.problems import FOLLOW_UP, SYSTEM_PROMPT, make_problem, read_answer

KINDS = ("boxes", "bags", "walk", "boxes", "boxes", "torn", "walk", "bags", "boxes", "walk", "count", "bags")
"""Kinds of the tasks in order, from the beginning again after the last. `torn` is a `boxes` problem that cannot be
finalised: its rollouts end in an error. `count` asks for more than a short reply can hold: it is cut off."""


class StallConfig(TasksetConfig):
    """Settings under `[taskset]`."""

    seed: int = 0
    """Seed of the numbers in the problems."""
    size: int = Field(len(KINDS), ge=1)
    """Number of tasks."""


class StallData(TaskData):
    """One task: two questions with their answers."""

    kind: str
    answer: str
    """Answer to the first question."""
    follow_up: str
    """The second question, asked once the first has been answered in the form that was asked for."""
    follow_up_answer: str


class StallTask(Task[StallData]):
    """Scores a conversation of two answers."""

    async def finalize(self, trace: Trace) -> None:  # noqa: ARG002
        """Fails for tasks of the kind `torn`, so that the demo has something to drop."""
        if self.data.kind == "torn":
            raise ValueError(f"the receipt of task {self.data.idx} is torn: there is no total to compare with")

    @reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def correct(self, trace: Trace) -> float:
        """Share of the two questions that are answered right."""
        expected = (self.data.answer, self.data.follow_up_answer)
        given = [read_answer(text) for text in answers(trace)]
        right: int = sum(str(got) == want for got, want in zip(given, expected, strict=False))
        return right / 2

    @reward(weight=0.1)  # type: ignore[untyped-decorator]
    async def format(self, trace: Trace) -> float:
        """Share of the replies that end with the line asked for."""
        given = [read_answer(text) for text in answers(trace)]
        return sum(answer is not None for answer in given) / len(given) if given else 0.0

    @metric  # type: ignore[untyped-decorator]
    async def tool_calls(self, trace: Trace) -> float:
        """Calls of the calculator."""
        return float(len(trace.tool_messages))

    @metric  # type: ignore[untyped-decorator]
    async def questions_answered(self, trace: Trace) -> float:
        """Replies that came without a tool call."""
        return float(len(answers(trace)))

    @group_reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def fastest(self, traces: list[Trace]) -> list[float]:
        """A race with one winner: the most correct, then the fewest turns, then the fewest tokens, then the first.

        Turns and tokens stand for the time: a clock would let equal runs have different winners.
        """
        winner = min(range(len(traces)), key=lambda place: (*_pace(traces[place]), place))
        return [float(place == winner) for place in range(len(traces))]

    @group_reward(weight=0.25)  # type: ignore[untyped-decorator]
    async def shortest(self, traces: list[Trace]) -> list[float]:
        """The fewest sampled tokens among rollouts with both answers right; several may share it, or none get it."""
        lengths = [sampled_tokens(trace) for trace in traces if trace.rewards.get("correct") == 1.0]
        return [
            float(trace.rewards.get("correct") == 1.0 and sampled_tokens(trace) == min(lengths)) for trace in traces
        ]


class StallTaskset(Taskset[StallTask, StallConfig]):
    """The tasks, the same for equal seeds."""

    def load(self) -> list[StallTask]:
        """Make the tasks."""
        numbers = random.Random(self.config.seed)
        return [self._task(idx, numbers) for idx in range(self.config.size)]

    def _task(self, idx: int, numbers: random.Random) -> StallTask:
        kind = KINDS[idx % len(KINDS)]
        problem = make_problem("boxes" if kind == "torn" else kind, numbers)
        taken = numbers.randint(1, min(9, problem.answer))
        data = StallData(
            idx=idx,
            name=f"{kind}-{idx}",
            prompt=problem.question,
            system_prompt=SYSTEM_PROMPT,
            kind=kind,
            answer=str(problem.answer),
            follow_up=FOLLOW_UP.format(taken=taken),
            follow_up_answer=str(problem.answer - taken),
        )
        return StallTask(data, self.config.task)


def answers(trace: Trace) -> list[str]:
    """The replies of a rollout that call no tool, in order."""
    return [
        message.content if isinstance(message.content, str) else ""
        for message in trace.assistant_messages
        if not message.tool_calls
    ]


def sampled_tokens(trace: Trace) -> int:
    """Tokens the model sampled in a rollout."""
    return sum(sum(node.mask) for node in trace.nodes if node.sampled)


def _pace(trace: Trace) -> tuple[float, int, int]:
    return (-trace.rewards.get("correct", -1.0), trace.num_turns, sampled_tokens(trace))
