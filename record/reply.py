"""Reads one reply of SGLang's `/generate`: the sampled ids, their log-probs, why it ended, what the engine says of it.

Required are the log-prob entries (each carries its token id) and the finish reason; whatever else is in `meta_info` is
read where present. A reply that contradicts itself is refused whole, with a sentence: ids and log-probs are never
shifted, cut or filled up, and a missing finish reason never counts as "stop".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LOGPROB = 1e-3
"""Above 0 by more than this is no rounding: such a log-prob is refused (the same bound as the checks')."""

MIN_LOGPROB = -3.4e38
"""Below this float32 holds it as minus infinity."""

TOKEN_IDS = range(1 << 31)
"""What a column holds; which of them the model has is for the checks to say."""

ABORTED = 503
"""HTTP status of an aborted request whose reply names none: another try may pass."""

MALFORMED = 502
"""HTTP status of a reply that contradicts itself."""

FINISHED = ("stop", "length")


class BadReply(ValueError):
    """A reply that cannot become a turn; `status` is the HTTP status to report for it."""

    def __init__(self, message: str, status: int = MALFORMED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """A reply whose ids, log-probs and counts agree."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """"stop" or "length"."""
    meta: Mapping[str, Any]
    """The reply's `meta_info`, as it came."""

    def to_renderers(self) -> bytes:
        """The body that Renderers expects of `/inference/v1/generate`."""
        # Text instead of a thousand small dictionaries, which would set off garbage collection again and again.
        content = ",".join(
            f'{{"token":"token_id:{token}","logprob":{logprob!r}}}'
            for token, logprob in zip(self.token_ids, self.logprobs, strict=True)
        )
        reply = (
            f'{{"request_id":{json.dumps(str(self.meta.get("id") or ""))},"choices":[{{'
            f'"token_ids":{json.dumps(self.token_ids)},"logprobs":{{"content":[{content}]}},'
            f'"finish_reason":{json.dumps(self.finish_reason)}}}]}}'
        )
        return reply.encode()


def read_reply(payload: object) -> Reply:
    """The checked reply in the decoded JSON `payload`.

    Raises BadReply for an abort (also one sent with HTTP 200, with or without tokens), for a finish reason that is
    null, a plain string or unknown, and for ids, log-probs and counts that disagree or cannot be probabilities.
    """
    if not isinstance(payload, Mapping):
        raise BadReply(f"The engine's reply is a JSON {type(payload).__name__}, expected an object with meta_info.")
    meta = payload.get("meta_info")
    if not isinstance(meta, Mapping):
        raise BadReply(
            f"The engine's reply has no meta_info object (found {_short(meta)}); is this SGLang's /generate?"
        )
    finish_reason = _finish_reason(meta)
    token_ids, logprobs = _sampled(meta)
    _check_ids(payload.get("output_ids"), token_ids, meta)
    _check_count(meta.get("completion_tokens"), token_ids)
    _check_logprobs(logprobs)
    return Reply(token_ids, logprobs, finish_reason, meta)


def check_asked(reply: Reply, prompt_tokens: int, most: int) -> None:
    """Raise BadReply where the engine counts another prompt than the `prompt_tokens` ids that it was sent, or has sampled
    more than `most` tokens."""
    seen = reply.meta.get("prompt_tokens")
    if seen is not None and seen != prompt_tokens:
        raise BadReply(
            f"The engine was sent a prompt of {prompt_tokens} tokens and counts {_short(seen)}: it saw another text, to which "
            "the log-probs belong. Start it without truncation of long prompts (`allow_auto_truncate` of SGLang)."
        )
    if len(reply.token_ids) > most:
        raise BadReply(f"The engine was asked for at most {most} tokens and sent {len(reply.token_ids)}.")


def _finish_reason(meta: Mapping[str, Any]) -> str:
    reason = meta.get("finish_reason")
    if isinstance(reason, str):
        raise BadReply(
            f"The engine's finish_reason is the plain string {_short(reason)}, expected an object with a type; "
            "the reply is refused because it cannot be told whether the turn was complete."
        )
    if not isinstance(reason, Mapping):
        raise BadReply(
            f"The engine's finish_reason is {_short(reason)}, expected an object with a type: the reply is not final. "
            "Nothing in it is used."
        )
    kind = reason.get("type")
    if kind == "abort":
        raise _aborted(reason, meta)
    if kind not in FINISHED:
        raise BadReply(f"The engine's finish reason {_short(kind)} is unknown, expected stop, length or abort.")
    return str(kind)


def _aborted(reason: Mapping[str, Any], meta: Mapping[str, Any]) -> BadReply:
    said = f": {reason['message']}" if reason.get("message") else "; it gave no message"
    entries = meta.get("output_token_logprobs")
    discarded = len(entries) if isinstance(entries, list) else 0
    status = reason.get("status_code")
    known = isinstance(status, int) and not isinstance(status, bool) and 400 <= status < 600
    return BadReply(
        f"The engine aborted the request after {discarded} sampled tokens, which are not used{said}.",
        int(status) if known and isinstance(status, int) else ABORTED,
    )


def _sampled(meta: Mapping[str, Any]) -> tuple[list[int], list[Any]]:
    """Ids and log-probs, taken from the same entries."""
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list):
        raise BadReply(
            f"The engine's reply has no output_token_logprobs list (found {_short(entries)}); "
            "log-probs were asked for with return_logprob."
        )
    if not entries:
        return [], []
    try:
        logprobs = [entry[0] for entry in entries]
        token_ids = [entry[1] for entry in entries]
    except (TypeError, IndexError, KeyError) as error:
        position = next(i for i, entry in enumerate(entries) if not isinstance(entry, list) or len(entry) < 2)
        raise BadReply(
            f"output_token_logprobs[{position}] is {_short(entries[position])}, expected [logprob, token id, text]."
        ) from error
    if not all(type(token) is int for token in token_ids):
        position = next(i for i, token in enumerate(token_ids) if type(token) is not int)
        raise BadReply(
            f"output_token_logprobs[{position}] holds the token id {_short(token_ids[position])}, no integer."
        )
    if min(token_ids) not in TOKEN_IDS or max(token_ids) not in TOKEN_IDS:
        position = next(i for i, token in enumerate(token_ids) if token not in TOKEN_IDS)
        raise BadReply(
            f"output_token_logprobs[{position}] holds the token id {_short(token_ids[position])}; expected one from 0 to "
            f"{TOKEN_IDS[-1]}."
        )
    return token_ids, logprobs


def _check_ids(output_ids: object, token_ids: list[int], meta: Mapping[str, Any]) -> None:
    """`output_ids` may be absent (the entries carry the ids); where present it must say the same."""
    if output_ids is None or output_ids == token_ids:
        return
    if not isinstance(output_ids, list):
        raise BadReply(f"The engine's output_ids are {_short(output_ids)}, expected a list of integers.")
    if len(output_ids) != len(token_ids):
        raise BadReply(
            f"The engine's reply holds {len(output_ids)} output_ids and {len(token_ids)} log-probs; "
            f"expected one for each id.{_stop_token_hint(output_ids, token_ids, meta)}"
        )
    position = next(i for i, (a, b) in enumerate(zip(output_ids, token_ids, strict=True)) if a != b)
    raise BadReply(
        f"Position {position} of the engine's reply is token {_short(output_ids[position])} in output_ids and "
        f"{token_ids[position]} in output_token_logprobs: the log-prob belongs to another token."
    )


def _stop_token_hint(output_ids: Sequence[Any], token_ids: Sequence[int], meta: Mapping[str, Any]) -> str:
    """A sentence where only a trailing stop token differs: one convention is stored, never a mixture."""
    short, long = sorted((list(output_ids), list(token_ids)), key=len)
    if len(long) != len(short) + 1 or long[:-1] != short:
        return ""
    reason = meta.get("finish_reason")
    matched = reason.get("matched") if isinstance(reason, Mapping) else None
    what = f"the matched stop token {matched}" if long[-1] == matched else f"a last token {long[-1]}"
    where = "log-probs" if len(token_ids) > len(output_ids) else "output_ids"
    return (
        f" Only the {where} keep {what}. rolltape stores the stop token as sampled (it asks with no_stop_trim), "
        "so both lists must keep it: switch off stop trimming in the engine or router."
    )


def _check_count(count: object, token_ids: list[int]) -> None:
    if count is not None and count != len(token_ids):
        raise BadReply(
            f"The engine counts {_short(count)} completion tokens and sent {len(token_ids)} log-probs; "
            "expected as many."
        )


def _check_logprobs(logprobs: list[Any]) -> None:
    if not logprobs:
        return
    # Built-ins rather than numpy: numpy lets go of the interpreter lock, and with renderers busy in threads the event
    # loop would wait for it after every reply.
    numbers = logprobs if all(type(value) is float for value in logprobs) else [_number(value) for value in logprobs]
    if all(map(math.isfinite, numbers)) and max(numbers) <= MAX_LOGPROB and min(numbers) >= MIN_LOGPROB:
        return
    bad = [i for i, value in enumerate(numbers) if not MIN_LOGPROB <= value <= MAX_LOGPROB]
    position = bad[0]
    raise BadReply(
        f"The log-prob at position {position} of {len(logprobs)} is {_short(logprobs[position])} "
        f"({len(bad)} such in the reply); expected a finite number of float32, of at most {MAX_LOGPROB:g}."
    )


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    except OverflowError:
        return float("inf")


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
