"""Masking secrets before anything is written.

Config copies and the parts of a trace that describe its surroundings are masked:

- values under names that say so (API keys, tokens, passwords, authorization, cookies …), and everything below such a name;
- values of environments and headers, unless they are plainly harmless (a switch, a number, a date, a path);
- inside texts: credentials in URLs, bearer tokens, `name=value` where the name says so, passwords that `curl`, `mysql` and
  `sshpass` are given, keys of well-known shapes;
- wherever such a text holds it, a secret that is known: those of the environment's configuration (`Secrets.knowing`);
- whatever further patterns say.

Some names say it only sometimes (`key`, `token`): a `reward_key` names a column, a `serper_key` is one. In a configuration
such a value is masked unless its name is a known harmless one; in what a trace tells of itself, where anybody may put
anything, only where it also looks like a credential.

Tokens, messages, the task's row, rewards and metrics are never touched: a masked token would no longer be the one that was
trained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from rolltape.record.secrets.names import verdict, words_of
from rolltape.record.secrets.shapes import (
    AUTHORIZATION,
    COMMANDS,
    COOKIES,
    HINTS,
    NAME_END,
    NAMED,
    OPTION,
    SHAPES,
    SHAPES_BEGIN,
    SPOKEN,
    USERINFO,
    is_coded,
    is_plain,
    looks_random,
)
from rolltape.schema.errors import BadInput

MASK = "***"

_MAPPINGS = frozenset(("env", "environ", "headers", "cookies"))
"""Last words of names of mappings whose values are masked unless plainly harmless."""
_CONTENT = frozenset(
    ("id", "version", "verifiers", "task", "nodes", "rewards", "metrics", "extra_usage", "timing", "tools")
)
"""Fields of a trace's record that are never touched."""
_LOOSE = frozenset(("info", "errors", "calls", "request_rewrites", "response_rewrites"))
"""Fields where names alone do not decide."""
_SHORTEST = 6
"""Known values shorter than this are not looked for in texts: they would be found everywhere."""


@dataclass(frozen=True)
class Secrets:
    """What is masked: the built-in rules, further patterns, and known secrets. Raises BadInput for a pattern that is none."""

    patterns: Sequence[str] = ()
    """Regular expressions. What they find in a text is masked, and the value under a name in which they find something."""
    values: Sequence[str] = field(default=(), repr=False)
    """Secrets that are known, masked wherever a text holds them."""
    _compiled: tuple[re.Pattern[str], ...] = field(init=False, repr=False, default=())
    _known: re.Pattern[str] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", tuple(_pattern(p) for p in self.patterns))
        known = sorted({v for v in self.values if len(v) >= _SHORTEST}, key=len, reverse=True)
        if known:
            object.__setattr__(self, "_known", re.compile("|".join(map(re.escape, known))))

    def knowing(self, *configs: Any, environment: Sequence[str] = ()) -> Secrets:
        """These rules, and the secrets that `configs` (JSON values or pydantic models, such as an EnvConfig), the variables
        they forward and the named variables of the process's environment hold: they are masked wherever they turn up, also
        where no name tells, as in an error message.
        """
        found: list[str] = []
        for config in configs:
            self._mask(_opened(config, found), "", strict=True, found=found)
        forwarded = (name for config in configs for name in _forwarded(config))
        for name in (*environment, *forwarded):
            value = os.environ.get(name, "")
            if verdict(name) != "no" or is_coded(value):
                found.append(value)
        values = dict.fromkeys((*self.values, *(part for value in found for part in _forms(value))))
        return self if len(values) == len(self.values) else replace(self, values=tuple(values))

    # -- configurations and JSON values

    def mask(self, value: Any, name: str = "") -> Any:
        """`value` (JSON values of a configuration) with secrets replaced by `***`; the same object where none is found."""
        return self._mask(value, name, strict=True)

    def _mask(
        self, value: Any, name: str, *, strict: bool, inside: str | None = None, found: list[str] | None = None
    ) -> Any:
        """`inside`: the kind of mapping that `value` lies in, `secret` where everything below is one, or `env`."""
        if isinstance(value, str):
            return self._masked_text(value, name, strict, inside, found)
        if isinstance(value, Mapping):
            inside = inside if inside == "secret" else self._inside(name)
            changed = {
                self._name(k): self._mask(
                    v, _told(value, k), strict=strict, inside=_around(value, k, inside), found=found
                )
                for k, v in value.items()
            }
            same = all(a is b for a, b in zip(changed.values(), value.values(), strict=False))
            return value if same and tuple(changed) == tuple(value) else changed
        if isinstance(value, (list, tuple)):
            names = [self._name_before(value, i, name) for i in range(len(value))]
            items = [
                self._mask(v, n, strict=strict, inside=inside, found=found) for v, n in zip(value, names, strict=True)
            ]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        whole = isinstance(value, int) and not isinstance(value, bool)
        return MASK if whole and strict and (inside == "secret" or self.is_secret_name(name)) else value

    def _masked_text(self, value: str, name: str, strict: bool, inside: str | None, found: list[str] | None) -> str:
        if not value or value == MASK:
            return value
        named = self._is_secret(name, value, strict)
        if named or inside == "secret" or (inside == "env" and not is_plain(value)):
            if found is not None and (named or inside == "secret" or is_coded(value)):
                found.append(value)
            return MASK
        text = self.text(value)
        if text == value:
            return value
        if found is not None:
            found.extend(_credentials(value))
        return text

    def _name_before(self, items: Sequence[Any], place: int, name: str) -> str:
        """The name of a list's item: that of the list, or what stands before it (a header as a pair, an option)."""
        before = items[place - 1] if place else None
        if not isinstance(before, str) or not self.is_secret_name(before):
            return name
        pair = place == 1 and len(items) == 2 and self._inside(name) == "env"
        return before if pair or (before.startswith("-") and "=" not in before) else name

    def _inside(self, name: str) -> str | None:
        """What kind of mapping a name promises."""
        words = words_of(name)
        if words and words[-1] in _MAPPINGS and words[-2:] != ["from", "env"]:
            return "env"
        return "secret" if self.is_secret_name(name) else None

    def _name(self, name: Any) -> Any:
        """A key of a mapping; only one as long as a credential can be one."""
        return self.text(name) if isinstance(name, str) and len(name) >= 20 else name

    def _is_secret(self, name: str, value: str, strict: bool) -> bool:
        said = "yes" if any(p.search(name) for p in self._compiled) else verdict(name)
        if said == "maybe":
            return looks_random(value) or (strict and not is_plain(value))
        return said == "yes"

    def is_secret_name(self, name: str) -> bool:
        """Whether a value under this name is masked whatever it says."""
        return verdict(name) == "yes" or any(p.search(name) for p in self._compiled)

    # -- texts

    def text(self, text: str) -> str:
        """`text` with credentials, known secrets and what the patterns find masked."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        if len(text) >= 16 or not text.isalnum():
            text = self._shaped(text)
        for pattern in self._compiled:
            text = pattern.sub(MASK, text)
        return text

    @staticmethod
    def _shaped(text: str) -> str:
        """`text` with what looks like a credential masked."""
        if "://" in text:
            text = USERINFO.sub(rf"\g<scheme>{MASK}@", text)
        low = text.lower()
        if "authorization" in low:
            text = AUTHORIZATION.sub(rf"\g<name>{MASK}", text)
        if "cookie" in low:
            text = COOKIES.sub(rf"\g<name>{MASK}", text)
        for command, password in COMMANDS.items():
            if command in low:
                text = password.sub(rf"\g<name>{MASK}", text)
        text = _named_values(text)
        if "bearer" in low or "basic" in low:
            text = SPOKEN.sub(lambda found: found["name"] + MASK if is_coded(found["value"]) else found[0], text)
        if any(begin in text for begin in SHAPES_BEGIN):
            text = SHAPES.sub(lambda found: MASK if is_coded(found[0][3:]) or " " in found[0] else found[0], text)
        return text

    # -- traces

    def mask_record(self, record: dict[str, Any]) -> dict[str, Any]:
        """A trace's record with what it tells of its surroundings masked; the same object where there is no secret.

        Left as they are, and not copied: the task's row, messages, tokens, rewards, metrics.
        """
        changed = {
            key: self._mask(value, key, strict=key not in _LOOSE)
            for key, value in record.items()
            if key not in _CONTENT and value
        }
        if all(value is record[key] for key, value in changed.items()):
            return record
        return {key: changed.get(key, value) for key, value in record.items()}


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise BadInput(f"{text!r} is no regular expression ({error}); it was to say what is masked.") from error
    if pattern.search(""):
        raise BadInput(f"{text!r} matches an empty text, so it would mask everything; say what is to be masked.")
    return pattern


def _opened(value: Any, found: list[str]) -> Any:
    """`value` with models as mappings; what pydantic itself holds for a secret goes to `found`."""
    if hasattr(value, "get_secret_value"):
        secret = value.get_secret_value()
        found.append(secret.decode(errors="replace") if isinstance(secret, bytes) else str(secret))
        return MASK
    if hasattr(value, "model_dump") and not isinstance(value, type):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {k: _opened(v, found) for k, v in value.items()}
    return [_opened(v, found) for v in value] if isinstance(value, (list, tuple, set, frozenset)) else value


def _forwarded(config: Any) -> Sequence[str]:
    """The variables that a harness is given of the process's environment: of an EnvConfig, or the harness's own."""
    names: Sequence[str] = getattr(getattr(config, "harness", config), "forward_env", None) or ()
    return names


def _told(mapping: Mapping[Any, Any], key: Any) -> str:
    """The name of a value in a mapping, which may stand beside it: `{name: OPENAI_API_KEY, value: …}`, or `{key: …}`."""
    if key == "key" and "value" in mapping:
        return "name"
    beside = (mapping.get(name) for name in ("name", "key")) if key == "value" else ()
    return next((name for name in beside if isinstance(name, str)), str(key))


def _around(mapping: Mapping[Any, Any], key: Any, inside: str | None) -> str | None:
    """What kind of mapping a value lies in; the name beside a value lies in none."""
    return None if key in ("name", "key") and "value" in mapping and inside == "env" else inside


def _named_values(text: str) -> str:
    """`text` with the values behind names of secrets masked: `name=value`, `name: value`, `--name value`, `?name=value`.

    Looks only around words that such names are made of, so that a long text costs little.
    """
    low = text.lower()
    if len(low) != len(text):  # a letter whose lower case is longer: places would not fit
        return NAMED.sub(_named, text)
    places = sorted(place for hint in HINTS for place in _places(low, hint))
    pieces, done = [], 0
    for place in places:
        if place < done:
            continue
        begin = NAME_END.search(text, max(done, place - 64), place)
        start = begin.start() if begin else place
        for form in (NAMED, OPTION):
            found = form.match(text, start)
            if found and found.end("name") > place:
                pieces += [text[done:start], _named(found)]
                done = found.end()
                break
    return "".join([*pieces, text[done:]]) if pieces else text


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + 1)


def _named(found: re.Match[str]) -> str:
    """A name with its value, the value masked where the name says so, or says it perhaps and the value looks like one."""
    said, value = verdict(found["name"]), found["value"]
    if said == "no" or value in ("None", "null", "True", "False", "str", "int", MASK):
        return found[0]
    in_url = found.start() > 0 and found.string[found.start() - 1] in "?&" and "=" in found[0]
    return found[0][: -len(value)] + MASK if said == "yes" or in_url or looks_random(value) else found[0]


def _credentials(text: str) -> Iterator[str]:
    """Credentials of the URLs in a text."""
    for word in text.split():
        if "://" not in word:
            continue
        try:
            url = urlsplit(word)
            parts = [url.password, *(v for k, v in parse_qsl(url.query) if verdict(k) != "no")]
        except ValueError:
            continue
        yield from (part for part in parts if part)


def _forms(value: str) -> set[str]:
    """A secret as it may be written: as it is, and as a URL gives it."""
    return {value, unquote(value)}
