"""JSON text that SQL can trust, and the residue that keeps a record exact.

Columns hold valid JSON in valid UTF-8: DuckDB fails a whole query over one `NaN` token or one `\\ud800`. What such a
column cannot say exactly goes, whole, into the row's `extra`.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import json
import math
import pathlib
import re
import uuid
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import zstandard

_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_LOOSE = json.JSONEncoder(ensure_ascii=True, allow_nan=True, separators=(",", ":")).encode
_RAW = json.JSONEncoder(ensure_ascii=False, allow_nan=True, separators=(",", ":")).encode
_SPLIT_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")
_COMPRESS = zstandard.ZstdCompressor(level=3).compress
_MAX_EXTRA = 1 << 32


def clean_text(text: str) -> tuple[str, bool]:
    """`text` as valid UTF-8, and whether it already was: lone surrogates become U+FFFD."""
    if text.isascii() or _LONE.search(text) is None:
        return text, True
    return _LONE.sub("\ufffd", text), False


def to_json(value: Any) -> tuple[str, bool]:
    """`value` as valid JSON in valid UTF-8, and whether the text says it exactly.

    NaN and infinities become null, lone surrogates U+FFFD. Raises TypeError or ValueError where `value` is no JSON value
    (see `plain`).
    """
    try:
        text, exact = _STRICT(value), True
    except ValueError as error:
        if "JSON compliant" not in str(error):
            raise
        text, exact = _STRICT(_finite(value)), False
    cleaned, valid = clean_text(text)
    return cleaned, exact and valid


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def pack_extra(value: Mapping[str, Any]) -> bytes:
    """`value` as zstd-compressed JSON: ASCII-escaped, bytes inside it as base64 of their zstd frame.

    The one string that an escape cannot say, two lone surrogates that would read as a pair, makes the text UTF-8 with
    surrogates passed through.
    """
    try:
        text = _LOOSE(value)
    except TypeError:
        value = {"$packed": True, "value": _pack(value)}
        text = _LOOSE(value)
    if "\\ud" in text and _SPLIT_PAIR.search(raw := _RAW(value)):
        return _COMPRESS(raw.encode("utf-8", "surrogatepass"))
    return _COMPRESS(text.encode("ascii"))


def unpack_extra(data: bytes) -> dict[str, Any]:
    """The inverse of `pack_extra`."""
    raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_EXTRA)
    value: dict[str, Any] = json.loads(raw.decode("utf-8", "surrogatepass"))
    return _unpack(value["value"]) if value.get("$packed") is True else value


def _pack(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(_COMPRESS(bytes(value))).decode()}
    if isinstance(value, dict):
        return {("$" + k if k.startswith("$") else k): _pack(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(v) for v in value]
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$bytes"}:
            return zstandard.ZstdDecompressor().decompress(
                base64.b64decode(value["$bytes"]), max_output_size=_MAX_EXTRA
            )
        return {(k[1:] if k.startswith("$") else k): _unpack(v) for k, v in value.items()}
    return [_unpack(v) for v in value] if isinstance(value, list) else value


def plain(value: Any, path: str, problems: list[str], above: tuple[int, ...] = ()) -> Any:
    """`value` as JSON values. What has a stable text or number form takes it; the rest becomes null.

    Each loss is named in `problems` with its path: an unknown type, a cycle, a key that is no string.
    """
    if value is None or isinstance(value, (bool, str)):
        return value if type(value) in (bool, str, type(None)) else str(value)
    if isinstance(value, (int, float)):
        return value if type(value) in (int, float) else (int(value) if isinstance(value, int) else float(value))
    if id(value) in above:
        problems.append(f"{path}: refers to itself and was left out")
        return None
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, problems, inside)
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{path}[{i}]", problems, inside) for i, v in enumerate(value)]
    if isinstance(value, Set):
        return [plain(v, f"{path}[]", problems, inside) for v in sorted(value, key=repr)]
    return _plain_object(value, path, problems, inside)


def _plain_mapping(value: Mapping[Any, Any], path: str, problems: list[str], above: tuple[int, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = key if isinstance(key, str) else ",".join(map(str, key)) if isinstance(key, tuple) else str(key)
        if name in result:
            problems.append(f"{path}: several keys read {name!r}; the last one was kept")
        result[str(name)] = plain(item, f"{path}.{name}", problems, above)
    return result


def _plain_object(value: Any, path: str, problems: list[str], above: tuple[int, ...]) -> Any:
    if isinstance(value, np.generic):
        return plain(value.item(), path, problems, above)
    if isinstance(value, np.ndarray) or (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return plain(value.tolist(), path, problems, above)
    if isinstance(value, (decimal.Decimal, pathlib.PurePath, uuid.UUID)):
        return str(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if hasattr(value, "model_dump"):
        return plain(dict(value), path, problems, above)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return plain(fields, path, problems, above)
    if hasattr(value, "value") and hasattr(value, "name"):  # an enum member
        return plain(value.value, path, problems, above)
    if getattr(type(value), "__str__", None) is not object.__str__:
        problems.append(f"{path}: a {type(value).__qualname__} was kept as its text")
        return str(value)
    problems.append(f"{path}: a {type(value).__qualname__} cannot be written as JSON and was left out")
    return None
