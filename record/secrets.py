"""Masking secrets before anything is written.

Config copies and the parts of a trace that describe its harness (environment, headers, client, runtime) are masked: values
under names that say so (key, token, secret, password, authorization, cookie …), every value of an environment or header
mapping that is not plainly harmless, and credentials inside URLs. Messages and tokens are never touched: a masked token
would no longer be the one that was trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MASK = "***"

_NAME = re.compile(
    r"(?:^|[_\-.\s])(?:(?:api|access|private|signing|auth)[_\-]?key|token|auth|bearer|cookie)(?:$|[_\-.\s])"
    r"|apikey|secret|passw(?:or)?d|passphrase|authorization|credential",
    re.IGNORECASE,
)
_HARMLESS = re.compile(
    r"(?:max|min|num|n|total|prompt|completion|cached|sampled|stop|pad|eos|bos|special)[_\-]?.*tokens?(?:_ids?)?$|"
    r"tokenizer|token_ids?$|task_key|eval_key|reward_key|key_var$|session_id$|.*_var$",
    re.IGNORECASE,
)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)(?P<user>[^\s/@:]*):(?P<password>[^\s/@]+)@")
_QUERY = re.compile(
    r"(?P<name>[?&](?:[\w\-]*(?:key|token|secret|password|signature|sig)[\w\-]*)=)(?P<value>[^&\s\"'#]+)", re.IGNORECASE
)
_BEARER = re.compile(r"(?P<name>\b(?:bearer|basic)\s+)(?P<value>[A-Za-z0-9._~+/=\-]{8,})", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:sk-[A-Za-z0-9_\-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9\-]{10,}"
    r"|pit_[A-Za-z0-9]{16,}|eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{5,})"
)
_MAPPINGS = ("env", "headers", "environment", "extra_headers", "default_headers")


@dataclass(frozen=True)
class Secrets:
    """What is masked: the built-in rules and further patterns (regular expressions over names and values)."""

    patterns: Sequence[str] = ()
    _compiled: tuple[re.Pattern[str], ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", tuple(re.compile(p) for p in self.patterns))

    def mask(self, value: Any, name: str = "") -> Any:
        """A copy of `value` (JSON values) with secrets replaced by `***`."""
        if isinstance(value, Mapping):
            inside = name.lower() in _MAPPINGS
            return {k: self._under(str(k), v, inside) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mask(v, name) for v in value]
        return self.text(value) if isinstance(value, str) else value

    def _under(self, name: str, value: Any, everything: bool) -> Any:
        if isinstance(value, str) and value and (everything or self.is_secret_name(name)):
            return MASK
        return self.mask(value, name)

    def is_secret_name(self, name: str) -> bool:
        """Whether a value under this name is masked whatever it says."""
        if any(p.search(name) for p in self._compiled):
            return True
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
        return bool(_NAME.search(spaced)) and not _HARMLESS.search(name)

    def text(self, text: str) -> str:
        """`text` with credentials in URLs, bearer tokens and well-known key shapes masked."""
        text = _URL.sub(rf"\g<scheme>{MASK}:{MASK}@", text)
        text = _QUERY.sub(rf"\g<name>{MASK}", text)
        text = _BEARER.sub(rf"\g<name>{MASK}", text)
        text = _SHAPES.sub(MASK, text)
        for pattern in self._compiled:
            text = pattern.sub(MASK, text)
        return text

    def mask_record(self, record: dict[str, Any]) -> dict[str, Any]:
        """A trace's record with what describes its surroundings masked; the same object where nothing changes.

        Masked: runtime, agent, info, errors, the calls' endpoints and headers. Left as they are: task row, messages, tokens.
        """
        changed = dict(record)
        for key in ("runtime", "agent", "info", "errors", "calls", "env"):
            if record.get(key):
                changed[key] = self.mask(record[key], key)
        return record if changed == record else changed
