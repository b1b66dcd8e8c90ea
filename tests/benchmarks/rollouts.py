"""Made-up rollouts to measure with: Verifiers 0.2.0 trace records, the same for the same seed.

What decides sizes and speeds is drawn from distributions that resemble real ones:

- token ids: Zipf (exponent 1.07) over a vocabulary of 151,936 in random order, or over fewer distinct ids
- log-probs: float32, minus a gamma variate; about a third of them within 1e-3 of zero, as sharp policies give them
- text: words of a made-up lexicon with Zipf frequencies, which zstd brings to about 2.2 bits a character, like prose
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = 151_936
NOW = 1.79e9
"""Seconds since epoch at which everything here happens."""
_LEXICON = 20_000
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"

Record = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of a group, in rollouts, turns and tokens. Completions and observations vary by half around their mean."""

    rollouts: int
    turns: int
    prompt: int
    """Tokens of the prompt that all rollouts of a group share."""
    completion: int
    observation: int


SHAPES = {
    "agentic": Shape(rollouts=8, turns=6, prompt=600, completion=500, observation=200),
    "long_prompt": Shape(rollouts=16, turns=1, prompt=8000, completion=1000, observation=0),
    "tiny": Shape(rollouts=2, turns=2, prompt=20, completion=10, observation=10),
}
"""`agentic`: about 4,600 tokens a trace, two thirds of them sampled. `tiny` is for trying the benchmark out."""


class Source:
    """Draws token ids, log-probs and text."""

    def __init__(self, seed: int = 0, distinct: int = VOCABULARY) -> None:
        """`distinct`: how many different token ids there are; it decides how wide a dictionary's index would be."""
        self.rng = np.random.default_rng(seed)
        self.ids = self.rng.permutation(VOCABULARY)[:distinct]
        self.id_steps = _zipf(distinct, 1.07)
        self.words = self._lexicon()
        self.word_steps = _zipf(_LEXICON, 0.95)

    def _lexicon(self) -> npt.NDArray[np.str_]:
        weights = np.arange(1, len(_LETTERS) + 1) ** -0.8
        lengths = self.rng.integers(1, 11, _LEXICON)
        letters = self.rng.choice(list(_LETTERS), int(lengths.sum()), p=weights / weights.sum())
        text, ends = "".join(letters), np.cumsum(lengths)
        return np.array([text[end - n : end] for n, end in zip(lengths, ends, strict=True)])

    def tokens(self, n: int) -> list[int]:
        """`n` token ids."""
        chosen: list[int] = self.ids[_draw(self.rng, self.id_steps, n)].tolist()
        return chosen

    def logprobs(self, n: int) -> list[float]:
        """`n` log-probs."""
        values = -self.rng.gamma(0.25, 1.2, n)
        certain = self.rng.random(n) < 0.35
        drawn: list[float] = np.where(certain, values * 1e-4, values).astype(np.float32).tolist()
        return drawn

    def text(self, tokens: int) -> str:
        """Text of about the length that `tokens` tokens spell: three words for four tokens."""
        return " ".join(self.words[_draw(self.rng, self.word_steps, max(1, tokens * 3 // 4))])

    def around(self, mean: int) -> int:
        """A length between half and one and a half times `mean`."""
        return int(self.rng.integers(mean // 2, mean * 3 // 2))


def _zipf(n: int, exponent: float) -> npt.NDArray[np.float64]:
    """Cumulated probabilities of `n` ranks."""
    steps = np.cumsum(np.arange(1, n + 1) ** -exponent)
    return np.asarray(steps / steps[-1])


def _draw(rng: np.random.Generator, steps: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.intp]:
    return np.minimum(np.searchsorted(steps, rng.random(n)), len(steps) - 1)


def make_records(shape: Shape, groups: int, *, seed: int = 0, distinct: int = VOCABULARY) -> list[Record]:
    """The trace records of `groups` groups, group after group."""
    source = Source(seed, distinct)
    records: list[Record] = []
    for group in range(groups):
        prompt = source.tokens(shape.prompt), source.text(shape.prompt)
        for _ in range(shape.rollouts):
            records.append(_trace(source, shape, group, prompt, number=len(records)))
    return records


def _trace(source: Source, shape: Shape, group: int, prompt: tuple[list[int], str], *, number: int) -> Record:
    span = {"start": NOW, "end": NOW + 1}
    return {
        "id": uuid.UUID(int=int(source.rng.integers(1 << 62)) << 64 | number).hex,
        "task": {"type": "BenchmarkTask", "data": _task(group, prompt[1])},
        "runtime": None,
        "nodes": _nodes(source, shape, prompt),
        "rewards": {"correct": float(source.rng.integers(2)), "format": 0.25},
        "metrics": {"turns": float(shape.turns)},
        "info": {},
        "extra_usage": [],
        "is_completed": True,
        "stop_condition": "agent_completed",
        "errors": [],
        "timing": {"start": NOW, "setup": span, "generation": span, "finalize": span, "scoring": span},
    }


def _task(group: int, prompt: str) -> Record:
    return {
        "idx": group,
        "name": f"task-{group}",
        "description": None,
        "prompt": prompt,
        "system_prompt": None,
        "image": None,
        "workdir": None,
        "timeout": dict.fromkeys(("setup", "harness", "finalize", "scoring")),
        "resources": dict.fromkeys(("cpu", "memory", "gpu", "disk")),
        "answer": "42",
    }


def _nodes(source: Source, shape: Shape, prompt: tuple[list[int], str]) -> list[Record]:
    """Prompt, then reply and observation in turn; the last reply has no observation after it."""
    ids, text = prompt
    nodes = [_node(None, {"role": "user", "content": text}, ids)]
    for turn in range(shape.turns):
        n = source.around(shape.completion)
        ids, logprobs, text = source.tokens(5 + n), source.logprobs(n), source.text(n)
        reply = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        nodes.append(_node(len(nodes) - 1, {**reply, "provider_state": None}, ids, logprobs))
        if turn < shape.turns - 1:
            n = source.around(shape.observation)
            ids, text = source.tokens(n), source.text(n)
            answer = {"role": "tool", "tool_call_id": "call_0", "content": text, "name": None}
            nodes.append(_node(len(nodes) - 1, answer, ids))
    return nodes


def _node(parent: int | None, message: Record, ids: list[int], logprobs: list[float] | None = None) -> Record:
    """A node; of a sampled one the first tokens, up to as many as there are log-probs, are the template's."""
    sampled = logprobs is not None
    logprobs = logprobs or []
    header = len(ids) - len(logprobs) if sampled else 3
    mask = [False] * header + [True] * (len(ids) - header)
    return {
        "parent": parent,
        "message": message,
        "sampled": sampled,
        "timestamp": NOW,
        "token_ids": ids,
        "mask": mask if sampled else [False] * len(ids),
        "is_content": mask,
        "logprobs": logprobs,
        "finish_reason": "stop" if sampled else None,
        "multi_modal_data": None,
        "usage": None,
        "routed_experts": None,
    }
