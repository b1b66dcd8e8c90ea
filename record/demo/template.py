"""A taskset to start from; `rolltape demo --write` copies this file. `config.toml` beside it names it.

A task is a question and what its rollouts are scored by. The demo engine knows this question; change it for a real one.
"""

import random
import re

import verifiers.v1 as vf

SYSTEM_PROMPT = "Use the calculator. End each reply with a line that says Answer: and the number."


class PlumData(vf.TaskData):
    """A task: beside its prompt, what it is scored by."""

    answer: int


class PlumTask(vf.Task[PlumData]):
    """How rollouts are scored. The reward of a rollout is the sum of its scores, each times its weight."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the last line of the last reply is `Answer:` and the right number, else 0."""
        found = re.search(r"Answer: (-?\d+)$", trace.last_reply.strip())
        return float(found is not None and int(found[1]) == self.data.answer)

    @vf.group_reward(weight=0.5)
    async def quickest(self, traces: list[vf.Trace]) -> list[float]:
        """Compares all rollouts of a task, a score for each: 1 for the fewest turns among the correct ones, else 0.

        A rollout that failed is among them, and has no rewards of its own.
        """
        turns = [trace.num_turns if trace.rewards.get("correct") == 1.0 else 1000 for trace in traces]
        return [float(mine == min(turns) < 1000) for mine in turns]


class PlumConfig(vf.TasksetConfig):
    """Settings under [taskset] in config.toml."""

    size: int = 20
    seed: int = 0


class Plums(vf.Taskset[PlumTask, PlumConfig]):
    """The tasks. Load a dataset here, or make them, as this does."""

    def load(self) -> list[PlumTask]:
        """The tasks in their order, the same for equal settings."""
        numbers = random.Random(self.config.seed)
        return [self._task(idx, numbers) for idx in range(self.config.size)]

    def _task(self, idx: int, numbers: random.Random) -> PlumTask:
        boxes, plums, loose = numbers.randint(11, 48), numbers.randint(3, 9), numbers.randint(2, 9)
        question = f"Mei sells {boxes} boxes of {plums} plums and {loose} loose ones. How many plums is that in all?"
        answer = boxes * plums + loose
        data = PlumData(idx=idx, name=f"plums-{idx}", prompt=question, system_prompt=SYSTEM_PROMPT, answer=answer)
        return PlumTask(data, self.config.task)


__all__ = ["Plums"]
