"""A request to `/generate`, read and checked as SGLang does (facts of SGLang 0.5.15)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.record.engine.vocabulary import Ids
from rolltape.schema.errors import BadInput

GREEDY_BELOW = 1e-6
"""At a temperature below this SGLang takes the most likely token and reports log-probs at temperature 1."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None, {}),
    "stream_interval": (None, 1),
}
"""Sampling keys that SGLang knows and this engine does not do: accepted with the values that change nothing."""


class UnknownSamplingKey(BadInput):
    """A sampling key that SGLang does not know; it answers such a request with HTTP 500."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request, under SGLang's names."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 means no limit."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    sampling_seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """No token ends the generation, only its length or a stop text."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    """Accepted; a byte-level tokenizer puts no spaces there either way."""
    n: int = 1

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Sampling:
        """Read the `sampling_params` of a request.

        Raises:
            UnknownSamplingKey: A key SGLang does not know.
            BadInput: A value out of range, or a known key this engine does not do.
        """
        unknown = sorted(set(raw) - set(cls.__dataclass_fields__) - set(_NEUTRAL))
        if unknown:
            raise UnknownSamplingKey(
                f"unexpected sampling parameter {unknown[0]!r}; known: {', '.join(_known_keys())}."
            )
        for key, neutral in _NEUTRAL.items():
            if key in raw and raw[key] not in neutral:
                raise BadInput(f"sampling parameter {key}={raw[key]!r} is not done by the demo engine; leave it out.")
        given = {key: value for key, value in raw.items() if key not in _NEUTRAL and value is not None}
        stop = given.get("stop", ())
        given["stop"] = tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text)
        given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
        return cls(**given)._checked()

    def _checked(self) -> Sampling:
        numbers = (self.temperature, self.top_p, self.top_k, self.max_new_tokens, self.min_new_tokens)
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
            raise BadInput("temperature, top_p, top_k, max_new_tokens and min_new_tokens must be numbers.")
        rules = (
            (self.temperature >= 0, f"temperature must not be negative, got {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}"),
            (self.top_k == -1 or self.top_k >= 1, f"top_k must be -1 (off) or at least 1, got {self.top_k}"),
            (self.max_new_tokens >= 0, f"max_new_tokens must not be negative, got {self.max_new_tokens}"),
            (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"min_new_tokens must be between 0 and max_new_tokens, got {self.min_new_tokens}",
            ),
            (self.n == 1, f"n must be 1, got {self.n}; send one request per sample"),
        )
        for holds, sentence in rules:
            if not holds:
                raise BadInput(f"{sentence}.")
        return self

    @property
    def effective_temperature(self) -> float:
        """The temperature that log-probs are taken at."""
        return 1.0 if self.temperature < GREEDY_BELOW else float(self.temperature)

    @property
    def effective_top_k(self) -> int:
        """The number of tokens that may be drawn; 1 when greedy, -1 for all."""
        return 1 if self.temperature < GREEDY_BELOW else int(self.top_k)


@dataclass(frozen=True)
class Request:
    """One request to `/generate`."""

    ids: Ids
    """Prompt ids, shape [tokens], at least one."""
    sampling: Sampling
    return_logprob: bool
    logprob_start_len: int
    """Prompt position from which log-probs of given tokens are wanted; -1 for none."""
    rid: str | None
    routing_key: str | None

    @classmethod
    def parse(cls, body: Any, *, vocabulary_size: int, routing_key: str | None = None) -> Request:
        """Read the JSON body of a request.

        Args:
            body: The decoded JSON.
            vocabulary_size: Ids must be below it.
            routing_key: Value of the X-SMG-Routing-Key header.

        Raises:
            UnknownSamplingKey: See `Sampling.parse`.
            BadInput: Anything else that is wrong with the request.
        """
        if not isinstance(body, dict):
            raise BadInput(f"the body must be a JSON object, got {type(body).__name__}.")
        ids = _prompt_ids(body.get("input_ids"), vocabulary_size)
        start = body.get("logprob_start_len")
        start = -1 if start is None else int(start)
        if not -1 <= start <= len(ids):
            raise BadInput(f"logprob_start_len must be between -1 and the prompt's {len(ids)} tokens, got {start}.")
        if body.get("stream"):
            raise BadInput("streaming is not done by the demo engine; leave stream out.")
        return cls(
            ids=ids,
            sampling=Sampling.parse(body.get("sampling_params") or {}),
            return_logprob=bool(body.get("return_logprob")),
            logprob_start_len=start,
            rid=body.get("rid"),
            routing_key=routing_key,
        )


def _prompt_ids(raw: Any, vocabulary_size: int) -> Ids:
    """The prompt as an array, or a refusal that says what it is instead."""
    if not isinstance(raw, list) or not raw:
        raise BadInput("input_ids must be a list of token ids with at least one entry.")
    if isinstance(raw[0], list):
        raise BadInput("input_ids is a list of lists; the demo engine takes one prompt a request.")
    array = np.asarray(raw)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise BadInput("input_ids must hold whole numbers only.")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocabulary_size:
        raise BadInput(f"input_ids must lie between 0 and {vocabulary_size - 1}, got {low if low < 0 else high}.")
    return array.astype(np.int64)


def _known_keys() -> list[str]:
    return sorted([*Sampling.__dataclass_fields__, *_NEUTRAL])
