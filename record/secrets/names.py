"""Whether a value is a secret by the name it stands under."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

Verdict = Literal["yes", "maybe", "no"]


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ALWAYS = _set(
    "password passwords passwd pwd passphrase passcode secret secrets credential credentials authorization bearer jwt "
    "apikey apikeys"
)
_ENDINGS = (
    "password",
    "passwd",
    "secret",
    "apikey",
    "secretkey",
    "accesskey",
    "privatekey",
    "authtoken",
    "accesstoken",
)
_KEYS_OF = _set(
    "api access private secret signing signature encryption auth ssh rsa account client master service deploy hmac webhook "
    "license admin subscription"
)
_TOKENS_OF = _set(
    "api access auth refresh session bearer id secret private client security csrf xsrf oauth hf hub github gitlab wandb slack "
    "admin deploy registry"
)
_HARMLESS_KEYS = _set(
    "task reward eval prompt answer question label input output sort primary foreign cache routing metadata group dataset "
    "data column field index dict json image text response target solution message messages tool score metric info state "
    "split id seed map row item entry object lookup partition cell env config hot model winner any public"
)
_HARMLESS_TOKENS = _set(
    "max min num n total prompt completion cached sampled stop pad eos bos unk sep cls mask special image audio video think "
    "thinking reasoning input output new first last next previous per start end begin added extra tool target draft stop "
    "page continuation placeholder boundary"
)
_OF_SOMETHING = _set(
    "var vars name names type types kind file files path paths dir folder count counts length len size limit rate required "
    "enabled header headers prefix format policy url uri"
)
"""As a last word: `api_key_var` names a variable, `token_count` is a number."""
_IN_GAMES = _set("word words number numbers code codes phrase letter letters color colors answer message santa")
"""After `secret`: what a guessing game hides is no credential."""


def words_of(name: str) -> list[str]:
    """The words of a name in lower case: `OPENAI_API_KEY`, `x-api-key` and `refreshToken` alike."""
    return [word.lower() for word in _WORDS.findall(name)]


@lru_cache(maxsize=4096)
def verdict(name: str) -> Verdict:
    """Whether a value under `name` is a secret by its name alone."""
    words = words_of(name)
    if not words or (len(words) > 1 and words[-1] in _OF_SOMETHING) or words[-2:] == ["from", "env"]:
        return "no"
    if _is_secret_of_game(words):
        return "maybe"
    if any(word in _ALWAYS or word.endswith(_ENDINGS) for word in words) or words[-1] in ("cookie", "cookies"):
        return "yes"
    pairs = list(itertools.pairwise(words))
    if any(b in ("key", "keys") and a in _KEYS_OF for a, b in pairs):
        return "yes"
    if any(b in ("token", "tokens") and a in _TOKENS_OF for a, b in pairs):
        return "yes"
    before, last = (words[-2] if len(words) > 1 else ""), words[-1]
    if last == "key":
        return "no" if before in _HARMLESS_KEYS else "maybe"
    if last == "token":
        return "no" if before in _HARMLESS_TOKENS else "maybe"
    return "maybe" if last in ("auth", "pass", "pin", "otp", "pat", "dsn", "sig", "signature") else "no"


def _is_secret_of_game(words: Sequence[str]) -> bool:
    return len(words) > 1 and words[-2] in ("secret", "secrets") and words[-1] in _IN_GAMES
