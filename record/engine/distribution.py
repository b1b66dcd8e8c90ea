"""Probability vectors: tempering, truncation, and the fixed unigram with everything about it worked out once.

As in SGLang, a log-prob is taken after the temperature and before top-k and top-p: those two only limit what is drawn.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rolltape.record.engine.vocabulary import Vocabulary

Probs = npt.NDArray[np.float64]

FLOOR = 1e-12
"""Share of the unigram spread over tokens that are never meant to be drawn: log-probs of prompts stay finite."""


def forbid(probs: Probs, banned: tuple[int, ...]) -> Probs:
    """The distribution with some tokens taken out."""
    if not banned:
        return probs
    kept = probs.copy()
    kept[list(banned)] = 0.0
    return _normal(kept)


def temper(probs: Probs, temperature: float) -> Probs:
    """The distribution proportional to probs ** (1 / temperature)."""
    if temperature == 1.0:
        return probs
    with np.errstate(divide="ignore"):
        logits = np.log(probs) / temperature
    weights = np.exp(logits - logits.max())
    return _normal(weights)


def truncate(probs: Probs, top_k: int, top_p: float) -> Probs:
    """What is drawn from: the top_k likeliest tokens, and of those the least number that reach top_p."""
    if top_k == -1 and top_p >= 1.0:
        return probs
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order]
    keep = (np.cumsum(ranked) - ranked) <= top_p
    if top_k != -1:
        keep[top_k:] = False
    drawn = np.zeros_like(probs)
    drawn[order[keep]] = ranked[keep]
    return _normal(drawn)


def cumulative(probs: Probs) -> Probs:
    """Cumulative sums, with everything from the last possible token on at exactly 1."""
    sums = np.cumsum(probs)
    sums[np.flatnonzero(probs)[-1] :] = 1.0
    return sums


def invert(sums: Probs, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Token ids for uniform numbers in [0, 1), given cumulative sums."""
    return np.searchsorted(sums, uniform, side="right")


def _normal(weights: Probs) -> Probs:
    normal: Probs = weights / weights.sum()
    return normal


def log32(probability: float) -> np.float32:
    """The float32 log-prob of a probability; zero gives the lowest finite float32, as SGLang clamps it."""
    return np.float32(math.log(probability)) if probability > 0 else np.finfo(np.float32).min


def entry(logprob: float, token_id: int) -> bytes:
    """One JSON entry of a log-prob list. Floats are float32 values written in full, so that they come back exactly."""
    return b"[%s,%d,null]" % (repr(float(logprob)).encode(), token_id)


class Table:
    """The unigram under one setting: cumulative sums to draw from, float32 log-probs and JSON entries per token."""

    def __init__(self, probs: Probs, top_k: int, top_p: float) -> None:
        self.cumulative = cumulative(truncate(probs, top_k, top_p))
        self.logprobs = np.array([log32(value) for value in probs.tolist()], dtype=np.float32)
        entries = [entry(value, token) for token, value in enumerate(self.logprobs.tolist())]
        self.entries = np.array(entries, dtype=object)


class Unigram:
    """A fixed Zipf distribution over a vocabulary, with a constant chance that the turn ends.

    P(turn end) = end_hazard. The other tokens whose bytes are printable text share the rest in proportion to
    1 / rank ** exponent, ranked in a fixed shuffled order; all remaining tokens share FLOOR.
    """

    def __init__(self, vocabulary: Vocabulary, *, end_hazard: float, exponent: float) -> None:
        self.probs = _zipf(vocabulary, end_hazard, exponent)
        self.table = lru_cache(maxsize=16)(self._table)

    def _table(self, temperature: float, top_k: int, top_p: float, banned: tuple[int, ...]) -> Table:
        return Table(temper(forbid(self.probs, banned), temperature), top_k, top_p)


def _zipf(vocabulary: Vocabulary, end_hazard: float, exponent: float) -> Probs:
    printable = np.array([_is_printable(piece) for piece in vocabulary.pieces.tolist()]) & ~vocabulary.special
    shuffled = np.random.Generator(np.random.PCG64(20260801)).permutation(np.flatnonzero(printable))
    weights = 1.0 / np.arange(1, len(shuffled) + 1) ** exponent
    probs = np.full(vocabulary.size, FLOOR / vocabulary.size)
    probs[shuffled] = weights / weights.sum() * (1.0 - end_hazard - FLOOR)
    probs[vocabulary.turn_end] = end_hazard
    return _normal(probs)


def _is_printable(piece: bytes) -> bool:
    """Whether the bytes of a token are readable text by themselves, and no markup."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(text) and "<" not in text and text.replace("\n", " ").isprintable()
