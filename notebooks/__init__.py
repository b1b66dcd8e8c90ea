"""Notebooks that open on a recorded run: marimo files, and what they draw and find runs with.

`rolltape notebook` opens them. Listing them needs nothing; running one needs the extra `notebooks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Notebook:
    """A notebook of this folder."""

    name: str
    """What `rolltape notebook` calls it; the name of its file."""
    title: str
    answers: str
    runs: int = 1
    """Runs that it opens on."""

    @property
    def path(self) -> Path:
        """Its file."""
        return Path(__file__).with_name(f"{self.name}.py")


NOTEBOOKS = {
    n.name: n
    for n in (
        Notebook(
            "look",
            "Look at a run",
            "What became of the rollouts, how do reward and length move, which tasks fail, what did they say?",
        ),
        Notebook(
            "reward",
            "Why did the reward rise?",
            "Which parts rose, was it bought with length or format, in which tasks, or are the tasks others?",
        ),
        Notebook(
            "groups",
            "Groups and signal",
            "How many groups teach nothing, because they are too hard or too easy? pass@k, reward sums, sizes.",
        ),
        Notebook(
            "drift",
            "Log-probs and drift",
            "How sure is the policy, how old are the weights that sampled, does the trainer see the same log-probs?",
        ),
        Notebook(
            "compare",
            "Compare two runs",
            "What is set otherwise, what came of it step by step, reward by reward and task by task?",
            runs=2,
        ),
    )
}
"""Every notebook by name."""
