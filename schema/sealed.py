"""Small JSON files that carry their own checksum, so that a flipped bit in one is found and never read as a setting."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rolltape.schema.errors import Damaged
from rolltape.schema.jsontext import read_json
from rolltape.schema.storage import AnyPath

_SUM = re.compile(r"[0-9a-f]{64}")


def seal(body: Mapping[str, Any]) -> bytes:
    """`body` as JSON for people, its last value the sha256 of the rest. What JSON does not know is written as its text."""
    body = json.loads(_text(body))  # keys as JSON has them
    return _text({**body, "checksum": hashlib.sha256(_text(body)).hexdigest()})


def unseal(raw: bytes, path: AnyPath) -> dict[str, Any]:
    """The values of a sealed file without its checksum. A file without one (earlier, or written by hand) is taken as it is.

    Raises Damaged, which names `path`, where the text is no JSON object or its checksum does not fit.
    """
    try:
        body = read_json(raw)
    except ValueError as error:
        raise Damaged(f"{path}: no readable JSON ({error}); restore the file from a copy.") from error
    if not isinstance(body, dict):
        raise Damaged(f"{path}: expected a JSON object, found {type(body).__name__}; restore the file from a copy.")
    last = next(reversed(body.values()), None)
    if "checksum" not in body and not (isinstance(last, str) and _SUM.fullmatch(last)):
        return body
    found = body.pop("checksum", None)
    if not _fits(body, raw):
        raise Damaged(f"{path}: its checksum ({str(found)[:12]}…) does not fit its content; restore it from a copy.")
    return body


def _fits(body: Mapping[str, Any], raw: bytes) -> bool:
    try:
        return seal(body) == raw
    except RecursionError:  # nested less deeply than is read, more than is written
        return False


def _text(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, default=str) + "\n").encode()
