"""The toy language model: a distribution over the next token that anybody can recompute.

P(next | context) at temperature 1:

- The context ends inside an assistant turn, the policy knows candidate replies to the prompt before that turn, and the
  turn so far is the beginning of at least one of them: (1 - epsilon) * Q + epsilon * U, where Q follows the candidates
  that begin like this in proportion to their weights (each ends with `<|im_end|>`) and U is the fixed unigram.
- Otherwise: U.

It is a function of the context alone, so `score` of given tokens equals the log-probs returned when they were sampled.
(Two things stand outside it: `min_new_tokens` takes the stop tokens out while it lasts, and a role header that the
unigram might draw by itself, with a probability of 1e-12, is not looked at before the next request.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.record.engine.distribution import (
    Probs,
    Table,
    Unigram,
    cumulative,
    entry,
    forbid,
    invert,
    log32,
    temper,
    truncate,
)
from rolltape.record.engine.policy import Candidates, NoPolicy, Policy
from rolltape.record.engine.request import Sampling
from rolltape.record.engine.vocabulary import TURN_END, Ids, Vocabulary

ROLE_HEADER = "assistant\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass
class Node:
    """A place in the candidates' token trie."""

    weight: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)

    def add(self, ids: Sequence[int], weight: float) -> None:
        """Add one candidate below this node."""
        self.weight += weight
        node = self
        for token in ids:
            node = node.children.setdefault(token, Node())
            node.weight += weight


@dataclass(frozen=True)
class Sampled:
    """What was generated for one prompt; `ids`, `logprobs` and `entries` have one element per token."""

    ids: Ids
    logprobs: npt.NDArray[np.float32]
    entries: list[bytes]
    """The log-probs as JSON entries."""
    finish: dict[str, Any]
    """`{"type": "stop", "matched": id or text}` or `{"type": "length", "length": tokens}`."""


class ToyModel:
    """The mixture described in this module's docstring."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        policy: Policy | None = None,
        epsilon: float = 1e-4,
        end_hazard: float = 1 / 400,
        zipf_exponent: float = 1.1,
    ) -> None:
        self.vocabulary = vocabulary
        self.policy: Policy = policy or NoPolicy()
        self.epsilon = epsilon
        self.unigram = Unigram(vocabulary, end_hazard=end_hazard, exponent=zipf_exponent)
        self._header = np.array(vocabulary.encode(ROLE_HEADER), dtype=np.int64)
        self._thought = np.array(vocabulary.encode(EMPTY_THOUGHT), dtype=np.int64)

    def sample(self, prompt: Ids, sampling: Sampling, rng: np.random.Generator) -> Sampled:
        """Generate a continuation of a prompt.

        Args:
            prompt: Token ids, shape [tokens].
            sampling: Lengths, stops and how to draw.
            rng: Source of every random number; the same state gives the same reply.
        """
        stops = self._stop_ids(sampling)
        scripted, node = self._follow(self._place(prompt), sampling, stops, rng)
        rest = sampling.max_new_tokens - len(scripted)
        if node is None and rest > 0 and not (scripted and scripted[-1][0] in stops):
            ids, logprobs, entries = self._ramble(len(scripted), rest, sampling, stops, rng)
        else:
            ids, logprobs, entries = np.empty(0, np.int64), np.empty(0, np.float32), []
        begun = [token for token, _ in scripted]
        return self._end(
            np.concatenate([np.array(begun, dtype=np.int64), ids]),
            np.concatenate([np.array([value for _, value in scripted], dtype=np.float32), logprobs]),
            [*(entry(value, token) for token, value in scripted), *entries],
            sampling,
            stops,
        )

    def score(self, ids: Ids, start: int, temperature: float) -> npt.NDArray[np.float32]:
        """Log-probs of given tokens, each under the tokens before it.

        Args:
            ids: Token ids, shape [tokens].
            start: First position wanted.
            temperature: As when sampling.

        Returns:
            Shape [tokens - start]. Position 0 of a sequence has no context: it is NaN.
        """
        table: Table = self.unigram.table(temperature, -1, 1.0, ())
        scores = table.logprobs[ids]
        for opening in self._openings(ids):
            node: Node | None = self._trie(ids[:opening])
            place = self._skip_thought(ids, opening)
            while node is not None and node.children and place < len(ids):
                token = int(ids[place])
                scores[place] = log32(float(temper(self._mixture(node), temperature)[token]))
                node = node.children.get(token)
                place += 1
        if len(scores):
            scores[0] = np.nan
        return scores[start:]

    def _follow(
        self, node: Node | None, sampling: Sampling, stops: frozenset[int], rng: np.random.Generator
    ) -> tuple[list[tuple[int, float]], Node | None]:
        """Draw token by token while the candidates know the way; (id, log-prob) pairs and where it ended."""
        drawn: list[tuple[int, float]] = []
        node = node if node and node.children else None
        while node is not None and len(drawn) < sampling.max_new_tokens:
            banned = tuple(stops) if len(drawn) < sampling.min_new_tokens else ()
            probs = temper(forbid(self._mixture(node), banned), sampling.effective_temperature)
            sums = cumulative(truncate(probs, sampling.effective_top_k, sampling.top_p))
            token = int(invert(sums, rng.random(1))[0])
            drawn.append((token, float(log32(float(probs[token])))))
            node = node.children.get(token)
            node = node if node and node.children else None
            if token in stops:
                break
        return drawn, node

    def _ramble(
        self, begun: int, count: int, sampling: Sampling, stops: frozenset[int], rng: np.random.Generator
    ) -> tuple[Ids, npt.NDArray[np.float32], list[bytes]]:
        """Draw up to `count` tokens from the unigram at once, cut after the first stop token."""
        setting = (sampling.effective_temperature, sampling.effective_top_k, float(sampling.top_p))
        table: Table = self.unigram.table(*setting, ())
        uniform = rng.random(count)
        ids = invert(table.cumulative, uniform)
        logprobs = table.logprobs[ids]
        entries = table.entries[ids]
        held = min(max(sampling.min_new_tokens - begun, 0), count)
        if held and stops:
            holding: Table = self.unigram.table(*setting, tuple(sorted(stops)))
            ids[:held] = invert(holding.cumulative, uniform[:held])
            logprobs[:held] = holding.logprobs[ids[:held]]
            entries[:held] = holding.entries[ids[:held]]
        ends = np.flatnonzero(np.isin(ids, list(stops))) if stops else np.empty(0, np.int64)
        length = int(ends[0]) + 1 if len(ends) else count
        return ids[:length], logprobs[:length], entries[:length].tolist()

    def _end(
        self,
        ids: Ids,
        logprobs: npt.NDArray[np.float32],
        entries: list[bytes],
        sampling: Sampling,
        stops: frozenset[int],
    ) -> Sampled:
        """Cut at the first stop text and say why the generation ended."""
        cut, text = self._stop_text(ids, sampling)
        if text is not None:
            return Sampled(ids[:cut], logprobs[:cut], entries[:cut], {"type": "stop", "matched": text})
        if len(ids) and int(ids[-1]) in stops:
            return Sampled(ids, logprobs, entries, {"type": "stop", "matched": int(ids[-1])})
        return Sampled(ids, logprobs, entries, {"type": "length", "length": len(ids)})

    def _stop_text(self, ids: Ids, sampling: Sampling) -> tuple[int, str | None]:
        """Number of tokens up to the one that completes the earliest stop text, and that text."""
        if not sampling.stop:
            return len(ids), None
        pieces = self.vocabulary.pieces[ids].tolist()
        ends = np.cumsum([len(piece) for piece in pieces])
        written = b"".join(pieces)
        found = [(written.find(text.encode()) + len(text.encode()), text) for text in sampling.stop]
        found = [(end, text) for end, text in found if end >= len(text.encode())]
        if not found:
            return len(ids), None
        end, text = min(found)
        return int(np.searchsorted(ends, end)) + 1, text

    def _stop_ids(self, sampling: Sampling) -> frozenset[int]:
        if sampling.ignore_eos:
            return frozenset()
        return frozenset({self.vocabulary.turn_end, self.vocabulary.text_end, *sampling.stop_token_ids})

    def _place(self, prompt: Ids) -> Node | None:
        """The trie node that the end of a prompt stands at, None where only the unigram applies."""
        openings = self._openings(prompt)
        if not openings:
            return None
        node: Node | None = self._trie(prompt[: openings[-1]])
        for token in prompt[self._skip_thought(prompt, openings[-1]) :].tolist():
            node = node.children.get(token) if node else None
        return node

    def _openings(self, ids: Ids) -> list[int]:
        """Positions right after each `<|im_start|>assistant` and its line break."""
        width = len(self._header)
        starts = np.flatnonzero(ids == self.vocabulary.turn_start)
        return [
            int(start) + 1 + width
            for start in starts
            if np.array_equal(ids[start + 1 : start + 1 + width], self._header)
        ]

    def _skip_thought(self, ids: Ids, opening: int) -> int:
        """The position after an empty thought that a chat template put at the beginning of the turn."""
        end = opening + len(self._thought)
        return end if np.array_equal(ids[opening:end], self._thought) else opening

    def _trie(self, prompt: Ids) -> Node | None:
        """The candidates for a prompt that ends with an open assistant turn."""
        candidates: Candidates | None = self.policy.candidates(self.vocabulary.decode(prompt))
        if not candidates:
            return None
        root = Node()
        for weight, reply in candidates:
            root.add(self.vocabulary.encode_cached(reply + TURN_END), weight)
        return root

    def _mixture(self, node: Node) -> Probs:
        """P(next) at a trie node, at temperature 1, shape [vocabulary]."""
        probs = self.epsilon * self.unigram.probs
        total = sum(child.weight for child in node.children.values())
        for token, child in node.children.items():
            probs[token] += (1.0 - self.epsilon) * child.weight / total
        return probs
