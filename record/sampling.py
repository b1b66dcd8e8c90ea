"""Which sampling settings reach the engine, under which names, and how many tokens a turn may sample.

SGLang answers HTTP 500 to a sampling key it does not know, and Renderers adds keys of its own (`logprobs`, and on a
bridged turn `routed_experts_prompt_start`). So a fixed set of keys is sent and every other one stays here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""Renderers' and OpenAI's names, and SGLang's names for the same settings."""

PASSED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "sampling_seed",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
    }
)
"""Settings sent as given. `max_new_tokens` and the keys of `FIXED` are always sent too; nothing else ever is."""

FIXED: Mapping[str, Any] = {"no_stop_trim": True, "spaces_between_special_tokens": False, "n": 1}
"""Settings every request needs: the sampled stop token stays in the reply, and one reply per request."""

EXPECTED = frozenset({"logprobs", "routed_experts_prompt_start", "max_tokens", "max_new_tokens", *FIXED})
"""Keys whose absence from `PASSED` needs no warning."""


@dataclass(frozen=True)
class Limits:
    """The three length limits, in tokens; None is no limit."""

    response: int | None = None
    """Sampled tokens per model turn."""
    context: int | None = None
    """Prompt and sampled tokens together."""
    prompt: int | None = None
    """Tokens of the first prompt of a rollout."""

    def max_new_tokens(self, requested: int | None, prompt_tokens: int) -> int | None:
        """The least of what was requested, the response limit and the room left in the context.

        None where none of the three is set; below 1 means that nothing can be sampled.
        """
        room = None if self.context is None else self.context - prompt_tokens
        bounds = [bound for bound in (requested, self.response, room) if bound is not None]
        return min(bounds, default=None)


@dataclass(frozen=True)
class SamplingDefaults:
    """Settings of the run that requests do not carry."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Added to the renderer's own stop ids, which every request carries."""
    skip_special_tokens: bool = False


def rename(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` under SGLang's names, without None values; a setting given under both names keeps SGLang's."""
    renamed = {RENAMED[key]: value for key, value in raw.items() if key in RENAMED and value is not None}
    return renamed | {key: value for key, value in raw.items() if key not in RENAMED and value is not None}


def engine_params(params: Mapping[str, Any], max_new_tokens: int, defaults: SamplingDefaults) -> dict[str, Any]:
    """The `sampling_params` of an SGLang `/generate` request, from settings already under SGLang's names."""
    sent = {key: value for key, value in params.items() if key in PASSED}
    if defaults.stop:
        sent.setdefault("stop", list(defaults.stop))
    if defaults.stop_token_ids:
        sent["stop_token_ids"] = _merged(sent.get("stop_token_ids") or (), defaults.stop_token_ids)
    sent["skip_special_tokens"] = defaults.skip_special_tokens
    return {**sent, **FIXED, "max_new_tokens": max_new_tokens}


def left_out(params: Mapping[str, Any]) -> set[str]:
    """The keys of `params` that are not sent and that somebody may have meant: worth a warning."""
    return set(params) - PASSED - EXPECTED


def _merged(first: Iterable[int], second: Iterable[int]) -> list[int]:
    return list(dict.fromkeys([*first, *second]))
