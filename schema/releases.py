"""What the releases of Verifiers say in different places, read from the shape of a record.

    Verifiers                     0.2.0           0.2.1            0.3.0 and later
    model, sampling               not recorded    agent            agent.config
    renderer, tokenizer           not recorded    not recorded     agent.config.client
    runtime                       the trace       the trace        agent
    finish reason, usage          the node        calls, by node   calls, by node
    run                           not recorded    the trace        the trace; from 0.3.1 on the episode
    log-probs                     full            full             full; from 0.4.0 on rounded to 4 decimals

The field `version` says none of this: it is absent, 2, 1, 1 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolltape.schema.records import as_mapping

_ROUNDING_FROM = (0, 4)


@dataclass(frozen=True)
class Settings:
    """What a record says of the settings it was sampled with; None where it says nothing."""

    model: str | None = None
    tokenizer: str | None = None
    sampling: Mapping[str, Any] | None = None
    renderer: Mapping[str, Any] | None = None
    runtime: Mapping[str, Any] | None = None


def settings_of(record: Mapping[str, Any]) -> Settings:
    """The settings that a record of 0.2.1 or later carries with its agent."""
    agent = record.get("agent")
    if not isinstance(agent, Mapping):
        return _NOTHING
    config = as_mapping(agent.get("config", agent))
    client = as_mapping(config.get("client"))
    return Settings(
        model=_text(config.get("model")),
        tokenizer=_text(client.get("renderer_model_name")),
        sampling=_mapping(config.get("sampling")),
        renderer=_mapping(client.get("renderer")),
        runtime=_mapping(agent.get("runtime")),
    )


_NOTHING = Settings()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def version_of(record: Mapping[str, Any]) -> str | None:
    """The release that a record names as its producer; None before 0.2.1, where records name none."""
    return _text(as_mapping(record.get("verifiers")).get("version"))


def rounds_logprobs(record: Mapping[str, Any]) -> bool:
    """Whether the release that wrote the record rounds log-probs unless told otherwise."""
    numbers = (version_of(record) or "").split(".")[:2]
    return all(n.isdecimal() for n in numbers) and tuple(map(int, numbers)) >= _ROUNDING_FROM


def calls_of(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The model calls of a record, in order; none before 0.2.1."""
    calls = record.get("calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else ()


def last_finish_reason(calls: Sequence[Mapping[str, Any]]) -> Any:
    """Finish reason of the last call that was answered, whether or not its reply became a node."""
    return next((call.get("finish_reason") for call in reversed(calls) if call.get("error") is None), None)
