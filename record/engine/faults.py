"""What can go wrong on purpose: one table of named faults, each with a probability, drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from rolltape.record.engine.reply import Reply
from rolltape.schema.errors import BadInput


class Fault(Enum):
    """Every fault: its name on the command line and one line on what it does."""

    LATENCY = ("latency", "waits `latency` seconds plus up to `jitter` before answering")
    HTTP_400 = ("http_400", "HTTP 400 with a JSON body")
    HTTP_403 = ("http_403", "HTTP 403 with a JSON body")
    HTTP_404 = ("http_404", "HTTP 404 with a JSON body")
    HTTP_429 = ("http_429", "HTTP 429 with a JSON body")
    HTTP_500 = ("http_500", "HTTP 500 with a JSON body")
    HTTP_503 = ("http_503", "HTTP 503 with a JSON body")
    DROP_CONNECTION = ("drop_connection", "generates, then closes the connection without an answer")
    MALFORMED_JSON = ("malformed_json", "HTTP 200 with a body that breaks off in the middle")
    ABORT_PARTIAL = ("abort_partial", "HTTP 200, finish reason abort, half of the tokens with their log-probs")
    ABORT_MINIMAL = (
        "abort_minimal",
        "HTTP 200, finish reason abort, no tokens, meta_info without output_token_logprobs",
    )
    ABORT_EMPTY = ("abort_empty", "HTTP 200, finish reason abort, no tokens and empty lists")
    EMPTY_COMPLETION = ("empty_completion", "finish reason stop and no token at all")
    LOGPROBS_ABSENT = ("logprobs_absent", "no output_token_logprobs in meta_info")
    LOGPROBS_SHORT = ("logprobs_short", "one log-prob less than ids")
    LOGPROBS_SURPLUS = ("logprobs_surplus", "one log-prob more than ids")
    LOGPROB_NAN = ("logprob_nan", "the last log-prob is a bare NaN")
    LOGPROB_NULL = ("logprob_null", "the last log-prob is null")
    LOGPROB_OTHER_TOKEN = ("logprob_other_token", "the last log-prob belongs to another id than output_ids")
    WRONG_COUNT = ("wrong_count", "completion_tokens is one too many")
    FINISH_NULL = ("finish_null", "finish_reason is null")
    FINISH_UNKNOWN = ("finish_unknown", 'finish_reason has the type "banana"')
    FINISH_STRING = ("finish_string", "finish_reason is a plain string instead of an object")
    NO_WEIGHT_VERSION = ("no_weight_version", "meta_info without weight_version")
    NO_PROMPT_TOKENS = ("no_prompt_tokens", "meta_info without prompt_tokens")
    NO_CACHED_TOKENS = ("no_cached_tokens", "meta_info without cached_tokens")
    NO_ID = ("no_id", "meta_info without id")

    def __init__(self, label: str, effect: str) -> None:
        self.label = label
        self.effect = effect

    @property
    def status(self) -> int | None:
        """The HTTP status of an `http_…` fault, None for the others."""
        return int(self.label[5:]) if self.label.startswith("http_") else None

    @classmethod
    def named(cls, label: str) -> Fault:
        """The fault of that name.

        Raises:
            BadInput: There is none; the message lists those there are.
        """
        for fault in cls:
            if fault.label == label:
                return fault
        raise BadInput(f"{label!r} is not a fault; known: {', '.join(fault.label for fault in cls)}.")


@dataclass
class Switch:
    """How often one fault strikes."""

    probability: float
    times: int | None = None
    """Strikes left; None for no end."""


@dataclass
class Faults:
    """Which faults are on. At most one strikes a reply, the first in the order of `Fault`; latency comes on top."""

    switches: dict[Fault, Switch] = field(default_factory=dict)
    latency: float = 0.05
    """Seconds that the latency fault waits."""
    jitter: float = 0.0
    """Seconds; up to so many are added, evenly distributed."""
    seed: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Faults:
        """Read `{"faults": {name: probability | {"probability", "times"}}, "latency", "jitter", "seed"}`.

        Raises:
            BadInput: An unknown name or key, or a probability outside 0 to 1.
        """
        unknown = sorted(set(raw) - {"faults", "latency", "jitter", "seed"})
        if unknown:
            raise BadInput(f"{unknown[0]!r} is not known here; known: faults, latency, jitter, seed.")
        switches = {}
        for name, value in dict(raw.get("faults", {})).items():
            switch = Switch(**value) if isinstance(value, Mapping) else Switch(float(value))
            if not 0 <= switch.probability <= 1:
                raise BadInput(f"the probability of {name} must lie between 0 and 1, got {switch.probability}.")
            switches[Fault.named(name)] = switch
        return cls(switches, float(raw.get("latency", 0.05)), float(raw.get("jitter", 0.0)), int(raw.get("seed", 0)))

    @classmethod
    def of(cls, text: list[str], *, latency: float = 0.05, jitter: float = 0.0, seed: int = 0) -> Faults:
        """Read the command line's `name=probability` or `name=probability:times`.

        Raises:
            BadInput: As `parse`, or an entry of another form.
        """
        switches: dict[str, Any] = {}
        for item in text:
            name, _, value = item.partition("=")
            probability, _, times = value.partition(":")
            try:
                switches[name] = {"probability": float(probability), "times": int(times) if times else None}
            except ValueError:
                raise BadInput(
                    f"--fault {item!r} was not understood; write name=probability, e.g. http_503=0.1."
                ) from None
        return cls.parse({"faults": switches, "latency": latency, "jitter": jitter, "seed": seed})

    def describe(self) -> dict[str, Any]:
        """The form that `parse` reads."""
        faults = {
            fault.label: {"probability": switch.probability, "times": switch.times}
            for fault, switch in self.switches.items()
        }
        return {"faults": faults, "latency": self.latency, "jitter": self.jitter, "seed": self.seed}

    def strike(self, rng: np.random.Generator) -> tuple[float, Fault | None]:
        """Draw for one request: seconds to wait, and the fault of the reply if there is one."""
        chances = dict(zip(Fault, rng.random(len(Fault)).tolist(), strict=True))
        wait = self.latency + self.jitter * float(rng.random()) if self._hits(Fault.LATENCY, chances) else 0.0
        for fault in Fault:
            if fault is not Fault.LATENCY and self._hits(fault, chances):
                return wait, fault
        return wait, None

    def _hits(self, fault: Fault, chances: dict[Fault, float]) -> bool:
        switch = self.switches.get(fault)
        if switch is None or switch.times == 0 or chances[fault] >= switch.probability:
            return False
        if switch.times is not None:
            switch.times -= 1
        return True


def spoil(reply: Reply, fault: Fault) -> None:
    """Change a reply as a fault says; faults of status, connection and body text change nothing here."""
    meta = reply.meta
    match fault:
        case Fault.ABORT_PARTIAL:
            reply.keep(len(reply.ids) // 2)
            meta["finish_reason"] = abort_reason()
        case Fault.ABORT_MINIMAL:
            reply.keep(0)
            reply.entries = reply.input_entries = None
            reply.meta = {"id": meta["id"], "finish_reason": abort_reason()}
        case Fault.ABORT_EMPTY:
            reply.keep(0)
            meta["finish_reason"] = abort_reason()
        case Fault.EMPTY_COMPLETION:
            reply.keep(0)
            meta["finish_reason"] = {"type": "stop", "matched": None}
        case Fault.WRONG_COUNT:
            meta["completion_tokens"] += 1
        case Fault.FINISH_NULL:
            meta["finish_reason"] = None
        case Fault.FINISH_UNKNOWN:
            meta["finish_reason"] = {"type": "banana"}
        case Fault.FINISH_STRING:
            meta["finish_reason"] = meta["finish_reason"]["type"]
        case Fault.NO_WEIGHT_VERSION | Fault.NO_PROMPT_TOKENS | Fault.NO_CACHED_TOKENS | Fault.NO_ID:
            meta.pop(fault.label.removeprefix("no_"))
        case _:
            _spoil_logprobs(reply, fault)


def abort_reason(message: str = "Aborted by a fault switch") -> dict[str, Any]:
    """SGLang's finish reason of an aborted request."""
    return {"type": "abort", "message": message}


def _spoil_logprobs(reply: Reply, fault: Fault) -> None:
    entries = reply.entries
    if not entries:
        return
    number, token = entries[-1][1:].split(b",")[:2]
    match fault:
        case Fault.LOGPROBS_ABSENT:
            reply.entries = None
        case Fault.LOGPROBS_SHORT:
            entries.pop()
        case Fault.LOGPROBS_SURPLUS:
            entries.append(entries[-1])
        case Fault.LOGPROB_NAN:
            entries[-1] = b"[NaN,%s,null]" % token
        case Fault.LOGPROB_NULL:
            entries[-1] = b"[null,%s,null]" % token
        case Fault.LOGPROB_OTHER_TOKEN:
            entries[-1] = b"[%s,%d,null]" % (number, int(token) - 1 if int(token) else 1)
