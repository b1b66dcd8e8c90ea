"""JSON text that SQL can trust, and the residue that keeps a record exact.

Columns hold valid JSON in valid UTF-8: DuckDB fails a whole query over one `NaN` token or one `\\ud800`. What such a
column cannot say exactly goes, whole, into the row's `extra`.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import json
import marshal
import pathlib
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import zstandard

try:
    from pydantic_core import to_json as _write
except ImportError:
    pydantic_json: Callable[..., bytes] | None = None
else:
    pydantic_json = _write
"""A writer of JSON several times as fast as the standard library's, where Verifiers has brought it."""

_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_LOOSE = json.JSONEncoder(ensure_ascii=True, allow_nan=True, separators=(",", ":")).encode
_RAW = json.JSONEncoder(ensure_ascii=False, allow_nan=True, separators=(",", ":")).encode
_SPLIT_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")
_LOCAL = threading.local()
_MAX_EXTRA = 1 << 32
_DEEPEST = 100
"""Levels that `plain` goes down. JSON values never come to it, at any depth that `json` writes."""
_LONGEST_INT = 1 << 14_000
"""Below the 4,300 digits that Python refuses to write or read."""
_NESTED = (dict, list, tuple)
_SIMPLE = frozenset((str, int, bool, type(None)))
_TEXT = frozenset((str,))
_LISTS = frozenset((dict, list))
_INT64 = range(-(1 << 63), 1 << 63)
_MOST_NESTED = 1000
_MOST_LEVELS = 950
"""Levels that JSON values may have. Python 3.11 reads 985 of them, from an empty stack."""
_MOST_REMEMBERED = 64 << 10
_MARSHAL_VERSION = 2  # says the type of each value, and floats bit for bit
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def are_clean(texts: Sequence[str]) -> bool:
    """Whether texts are valid UTF-8: whether they hold no lone surrogate."""
    return all(map(str.isascii, texts)) or _LONE.search("".join(texts)) is None


def clean_text(text: str) -> tuple[str, bool]:
    """`text` as valid UTF-8, and whether it already was: lone surrogates become U+FFFD."""
    if text.isascii() or _LONE.search(text) is None:
        return text, True
    return _LONE.sub("\ufffd", text), False


def to_json(value: Any) -> tuple[str, bool]:
    """`value` as valid JSON in valid UTF-8, and whether the text says it exactly.

    NaN and infinities become null, lone surrogates U+FFFD. Raises TypeError, ValueError or RecursionError where `value` is
    no JSON value (see `plain`).
    """
    if not value and type(value) in (dict, list):  # what most records hold in most places
        return ("{}" if type(value) is dict else "[]"), True
    if pydantic_json is not None and _is_simple(value):
        with suppress(Exception):  # a lone surrogate
            return pydantic_json(value).decode(), True
    try:
        text, exact = _STRICT(value), True
    except ValueError as error:
        if "JSON compliant" not in str(error):
            raise
        text, exact = _STRICT(json.loads(_RAW(value), parse_constant=lambda _: None)), False
    _check_shape(value)
    cleaned, valid = clean_text(text)
    return cleaned, exact and valid


def to_json_again(value: Any) -> tuple[str, bool]:
    """`to_json` of what was mostly written before: rollouts of a group share their task, those of a run their settings."""
    with suppress(Exception):  # what marshal does not know, or takes for bytes
        packed = marshal.dumps(value, _MARSHAL_VERSION)
        if len(packed) <= _MOST_REMEMBERED:
            return _to_json_of(packed)
    return to_json(value)


@lru_cache(64)
def _to_json_of(packed: bytes) -> tuple[str, bool]:
    return to_json(marshal.loads(packed))


def any_json(value: Any) -> tuple[str, bool]:
    """`to_json` of any object. What is lost is not named: that is done where the whole is written."""
    try:
        return to_json(value)
    except Exception:  # also what an object of somebody else's raises
        return to_json(plain(value, "", []))[0], False


def _is_simple(value: Any) -> bool:
    """Whether `value` is made of text, integers of 64 bits, booleans and null: everybody writes the same JSON of these."""
    todo: list[Any] = [[value]]
    for _ in range(_MOST_NESTED):  # a cycle has no end
        if not todo:
            return True
        item = todo.pop()
        if type(item) is dict and not _TEXT.issuperset(map(type, item)):
            return False
        parts = item.values() if type(item) is dict else item
        kinds = set(map(type, parts))
        if int in kinds and not all(type(part) is not int or part in _INT64 for part in parts):
            return False
        if not kinds <= _SIMPLE:
            if not kinds <= _SIMPLE | _LISTS:
                return False
            todo += [part for part in parts if type(part) in _LISTS]
    return False


def from_json(text: str) -> Any:
    """The value of a JSON text, also of one that is nested so deeply that only an empty stack has room for it."""
    return _with_room(json.loads, text)


def read_json(text: str | bytes) -> Any:
    """The value of the JSON text of a file. Raises ValueError where it is none, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _with_room(function: Callable[[_In], _Out], argument: _In) -> _Out:
    try:
        return function(argument)
    except RecursionError:  # what could be read from some depth of the stack can be written from an empty one, and back
        with ThreadPoolExecutor(1) as empty:
            return empty.submit(function, argument).result()


def as_json(value: Any, path: str, problems: list[str]) -> Any:
    """A copy of `value` as JSON values; what is none of them is handled and named as by `plain`."""
    if type(value) is dict and not value:
        return {}
    try:
        text = _RAW(value)
        _check_shape(value)
        return from_json(text)
    except Exception:  # also what an object of somebody else's raises
        return plain(value, path, problems)


def _check_shape(value: Any) -> None:
    """Raise TypeError where a key in `value` (without cycles) is no text, for `json` writes 1 and "1" alike; RecursionError
    where it lies deeper than every Python reads: from 3.12 on `json` writes what 3.11 cannot read."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(_MOST_LEVELS):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                "".join(item)  # raises; the fastest way to look at every key
            below += [v for v in (item.values() if isinstance(item, dict) else item) if isinstance(v, _NESTED)]
        if not below:
            return
        level = below
    raise RecursionError(f"nested more than {_MOST_LEVELS} levels deep")


def _compress(data: bytes) -> bytes:
    """A zstd frame of `data`. A compressor a thread: two threads in one crash, or garble what they write."""
    compressor = getattr(_LOCAL, "compressor", None)
    if compressor is None:
        compressor = _LOCAL.compressor = zstandard.ZstdCompressor(level=3)
    packed: bytes = compressor.compress(data)
    return packed


def pack_extra(value: Mapping[str, Any]) -> bytes:
    """`value` as zstd-compressed JSON: ASCII-escaped, bytes inside it as base64 of their zstd frame.

    The one string that an escape cannot say, two lone surrogates that would read as a pair, makes the text UTF-8 with
    surrogates passed through.
    """
    return _with_room(_pack_extra, value)


def _pack_extra(value: Mapping[str, Any]) -> bytes:
    try:
        text = _LOOSE(value)
    except TypeError:
        value = {"$packed": True, "value": _pack(value)}
        text = _LOOSE(value)
    if "\\ud" in text and _SPLIT_PAIR.search(raw := _RAW(value)):
        return _compress(raw.encode("utf-8", "surrogatepass"))
    return _compress(text.encode("ascii"))


def fits_extra(value: Any) -> bool:
    """Whether `pack_extra` keeps `value` as it is: JSON values and bytes, no cycles, keys that are text."""
    try:
        _CHECK(value)
        _check_shape(value)
    except Exception:  # also what an object of somebody else's raises
        return False
    return True


def _bytes_too(value: Any) -> None:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(type(value).__qualname__)


_CHECK = json.JSONEncoder(default=_bytes_too).encode


def unpack_extra(data: bytes) -> dict[str, Any]:
    """The inverse of `pack_extra`."""
    return _with_room(_unpack_extra, data)


def _unpack_extra(data: bytes) -> dict[str, Any]:
    raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_EXTRA)
    value: dict[str, Any] = json.loads(raw.decode("utf-8", "surrogatepass"))
    return _unpack(value["value"]) if value.get("$packed") is True else value


def _pack(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(_compress(bytes(value))).decode()}
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

    Each loss is named in `problems` with its path: an unknown type, a cycle, a key that is no text. Never raises, and ends.
    """
    if value is None or type(value) in (bool, str, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return _plain_int(value, path, problems)
    if id(value) in above:
        problems.append(f"{path}: refers to itself and was left out")
        return None
    if len(above) >= _DEEPEST:
        problems.append(f"{path}: lies more than {_DEEPEST} levels deep and was left out")
        return None
    try:
        return _plain_object(value, path, problems, (*above, id(value)))
    except Exception as error:  # an object of somebody else's
        problems.append(f"{path}: a {type(value).__qualname__} could not be read ({type(error).__name__})")
        return None


def _plain_int(value: int, path: str, problems: list[str]) -> int | str:
    value = int.__index__(value)
    if -_LONGEST_INT < value < _LONGEST_INT:
        return value
    problems.append(f"{path}: an integer of {value.bit_length()} bits was kept as hexadecimal text")
    return hex(value)


def _plain_mapping(value: Mapping[Any, Any], path: str, problems: list[str], above: tuple[int, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    odd = [key for key in value if not isinstance(key, str)]
    if odd:
        problems.append(f"{path}: {len(odd)} keys that are no text were kept as text, the first of them {odd[0]!r}")
    for key, item in value.items():
        name = str.__str__(key) if isinstance(key, str) else _key(key)
        if name in result:
            problems.append(f"{path}: several keys read {name!r}; the last one was kept")
        result[name] = plain(item, f"{path}.{name}", problems, above)
    return result


def _key(key: Any) -> str:
    return ",".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _plain_object(value: Any, path: str, problems: list[str], above: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, problems, above)
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{path}[{i}]", problems, above) for i, v in enumerate(value)]
    if isinstance(value, Set):
        return [plain(v, f"{path}[]", problems, above) for v in sorted(value, key=repr)]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
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
    if isinstance(value, enum.Enum):
        return plain(value.value, path, problems, above)
    if hasattr(value, "model_dump"):
        return plain(dict(value), path, problems, above)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return plain(fields, path, problems, above)
    kind: Any = type(value)
    if kind.__str__ is not object.__str__:
        text = str(value)
        problems.append(f"{path}: a {type(value).__qualname__} was kept as its text")
        return text
    problems.append(f"{path}: a {type(value).__qualname__} cannot be written as JSON and was left out")
    return None
