"""What secrets look like inside texts. Every pattern begins at something fixed or is bounded, so that long texts stay cheap."""

from __future__ import annotations

import re

USERINFO = re.compile(r"(?P<scheme>://)[^\s/?#\"'<>]+@")
"""User and password of a URL."""

AUTHORIZATION = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization\\?[\"']?\s{0,2}[:=]\s{0,2}\\?[\"']?)(?:(?:bearer|basic|digest|token)\s+)?[^\s\"',;\\]+",
    re.IGNORECASE,
)
COOKIES = re.compile(r"(?P<name>\b(?:set-)?cookie\\?[\"']?\s{0,2}:\s{0,2}\\?[\"']?)[^\n\"']+", re.IGNORECASE)

HINTS = (
    "key",
    "token",
    "secret",
    "passw",
    "passphrase",
    "passcode",
    "_pass",
    "pwd",
    "auth",
    "credential",
    "bearer",
    "jwt",
    "sig",
)
"""What names of secrets are made of."""

NAME_END = re.compile(r"[A-Za-z_][\w.\-]*\Z")
"""The name that reaches to the end of what is looked at."""

NAMED = re.compile(
    r"(?P<name>[A-Za-z_][\w.\-]{1,63})\\?[\"']?\]?\s{0,2}(?:=>|=|:)\s{0,2}\\?[\"']?(?P<value>[^\s\"',;&(){}\[\]<>\\#]+)"
)
"""`name=value`, `name: value`, `"name": "value"`."""

OPTION = re.compile(r"(?<=--)(?P<name>[A-Za-z][\w.\-]{1,63})\s{1,2}(?P<value>[^\s\"'\-][^\s\"']*)")
"""`--name value`."""

SPOKEN = re.compile(r"(?P<name>\b(?:bearer|basic)\s{1,2})(?P<value>[A-Za-z0-9._~+/=\-]{8,})", re.IGNORECASE)
"""`Bearer …`; whether what follows is a credential is decided by `is_coded`: "basic understanding" is none."""

_GIVEN = r"\\?[\"']?"
_PASSWORD = r"(?![$<{%])[^\s\"'\\]*[^\s\"'\\;,.)`|&]"  # no variable, no placeholder, without what ends the command
COMMANDS = {
    # -u name:password of the same command, which may go on in the next line, also where all of it is JSON
    "curl": re.compile(
        r"(?P<name>\bcurl\s(?:[^\n;|&\\]|\\{3}n|\\[^n]|(?<=\S)&(?=\S)){0,400}?(?<=\s)"
        rf"(?:-[sSfkLvIigG]{{0,6}}[uU]\s{{0,2}}|--(?:proxy-)?user[=\s]\s?){_GIVEN}[^\s:\"'\\/{{]{{0,64}}:(?!//)){_PASSWORD}"
    ),
    # -ppassword behind nothing but options; numbers may be ports: `docker run --name mysql -p3306:3306`
    "mysql": re.compile(
        r"(?P<name>(?<![\w\-])mysql(?:dump|admin)?(?:\s{1,2}-{1,2}[^\s\\]{1,99}(?:\s{1,2}[^\s\\\-][^\s\\]{0,99})?){0,8}?"
        rf"\s{{1,2}}-p{_GIVEN})(?![\d.:]+(?:[\s\"'\\]|\Z)){_PASSWORD}"
    ),
    "sshpass": re.compile(rf"(?P<name>\bsshpass\s{{1,2}}(?:-v\s{{1,2}})?-p\s{{0,2}}{_GIVEN}){_PASSWORD}"),
}
"""Passwords that commands are given by options whose names do not say so, by the command."""

SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[\s\S]{0,8000}?(?:-----END [A-Z ]{0,20}PRIVATE KEY-----|\Z)"
    r"|\b(?:sk-[A-Za-z0-9_\-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_\-]{16,}|A(?:KI|SI)A[0-9A-Z]{16}|AIza[0-9A-Za-z_\-]{30,}"
    r"|xox[abeprs]-[A-Za-z0-9\-]{10,}|pit_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_\-]{20,}|r8_[A-Za-z0-9]{20,}"
    r"|eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{5,})"
)
"""Keys of well-known services, JSON web tokens, private keys."""

SHAPES_BEGIN = (
    *(
        "sk-",
        "sk_",
        "rk_",
        "hf_",
        "ghp_",
        "gho_",
        "ghu_",
        "ghs_",
        "ghr_",
        "github_pat_",
        "glpat-",
        "AKIA",
        "ASIA",
        "AIza",
    ),
    *("xox", "pit_", "npm_", "pypi-", "r8_", "eyJ", "PRIVATE KEY"),
)
"""Where none of these is, there is nothing of the kind."""

_PLAIN = re.compile(
    r"true|false|yes|no|on|off|none|null|[+-]?\d{1,9}(?:\.\d{1,9})?|\d{4}-\d\d-\d\d(?:[T ][\d:.+Z\-]*)?|[<\[].{0,60}[>\]]"
    r"|(?:/|~/|\./)[\w./+\-]*|https?://[\w.\-]+(?::\d+)?/?|(?:application|text)/[\w.+\-]+(?:; ?charset=[\w\-]+)?",
    re.IGNORECASE,
)
_CODE = re.compile(r"[A-Za-z0-9_\-+/=.~:$]+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d.{0,20}")


def is_plain(value: str) -> bool:
    """Whether a value can be no secret: a switch, a number, a date, a special token, a path, a host, a media type."""
    return len(value) <= 300 and _PLAIN.fullmatch(value) is not None


def is_coded(value: str) -> bool:
    """Whether a value of one word is no word: digits or capitals stand among its letters."""
    if len(value) < 8 or is_plain(value) or _CODE.fullmatch(value) is None:
        return False
    return any(c.isdigit() for c in value) or any(c.isupper() for c in value[1:]) or value.endswith("=")


def looks_random(value: str) -> bool:
    """Whether a value looks like a credential: one long word of letters and digits that is no date and no path."""
    if not 16 <= len(value) <= 4096 or _CODE.fullmatch(value) is None or is_plain(value) or _DATE.fullmatch(value):
        return False
    digits = sum(c.isdigit() for c in value)
    return digits >= 3 and sum(c.isalpha() for c in value) >= 3
