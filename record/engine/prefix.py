"""A prefix cache in miniature: how many tokens of a prompt an engine would have found computed already."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from rolltape.record.engine.vocabulary import Ids

HEAD = 32
"""Requests without a routing key share a cache entry when their first so many tokens are equal."""


class PrefixCache:
    """Remembers the newest sequence of each routing key, least recently used out first.

    Args:
        capacity: Tokens kept in all; 4 bytes each.
    """

    def __init__(self, capacity: int = 16_000_000) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._kept: OrderedDict[object, npt.NDArray[np.int32]] = OrderedDict()

    def lookup(self, key: str | None, prompt: Ids) -> int:
        """Length of the common prefix with the sequence kept last; the prompt's last token is always computed anew."""
        kept = self._kept.get(self._entry(key, prompt))
        if kept is None:
            return 0
        length = min(len(kept), len(prompt) - 1)
        differ = np.flatnonzero(kept[:length] != prompt[:length])
        return int(differ[0]) if len(differ) else length

    def store(self, key: str | None, prompt: Ids, completion: Ids) -> None:
        """Keep a prompt with what was generated for it."""
        entry = self._entry(key, prompt)
        old = self._kept.pop(entry, None)
        sequence = np.concatenate([prompt, completion]).astype(np.int32)
        self._kept[entry] = sequence
        self.tokens += len(sequence) - (0 if old is None else len(old))
        while self.tokens > self.capacity and len(self._kept) > 1:
            self.tokens -= len(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything, as an engine does when its weights change."""
        self._kept.clear()
        self.tokens = 0

    @staticmethod
    def _entry(key: str | None, prompt: Ids) -> object:
        return key if key is not None else prompt[:HEAD].tobytes()
