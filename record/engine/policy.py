"""What the toy model would like to say: candidate replies for the open assistant turn at the end of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Candidates = Sequence[tuple[float, str]]
"""Pairs of (weight, reply text). Weights are positive, of any sum; each reply gets the end of the turn added."""


class Policy(Protocol):
    """A rule that knows replies to some prompts."""

    def candidates(self, prompt_text: str) -> Candidates | None:
        """Replies to a prompt in Qwen's chat markup that ends with an open assistant turn.

        Args:
            prompt_text: Everything up to and with `<|im_start|>assistant` and its line break.

        Returns:
            The candidates, or None for a prompt the policy does not know.
        """
        ...


class NoPolicy:
    """Knows no prompt: every reply follows the unigram."""

    def candidates(self, prompt_text: str) -> Candidates | None:  # noqa: ARG002
        """None, always."""
        return None
