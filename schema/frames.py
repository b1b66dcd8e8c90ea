"""Frames: one record of a journal as bytes that say themselves whether they are whole.

    frame    magic (8 bytes), payload length (8, little-endian), crc32 of length and payload (4), payload
    payload  length of a zstd frame (8), the zstd frame, then arrays as they are, one after the other
    zstd     length of a JSON text (8), the JSON text, then the row's long texts, one after the other

Token ids, log-probs and masks are not compressed, and text only where it is very long, and quickly: a frame is written once
and gone after the step. Level 1 over everything would take 25 instead of 3 ns a token, of 80 in all, for 7 instead of 12 bytes.
What is null is left out, and takes its place again when the frame is read.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard

from rolltape.schema.encoding import Row
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import TEXT, TRACE
from rolltape.schema.jsontext import pack_extra, pydantic_json, unpack_extra

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

MAGIC = b"\x93RTJ1\r\n\x1a"
HEAD = struct.Struct("<QI")
HEAD_BYTES = len(MAGIC) + HEAD.size
LARGEST = (1 << 32) - 1
"""Largest payload a frame may carry."""
LEVEL = -20
LONG = 64
"""Characters from which on a text stands beside the JSON: escaping it would cost more than the rest of the row."""

SHORT = 128 << 10
"""Bytes of JSON and texts below which they are stored as they are: the largest block that zstd knows."""

_ZSTD = b"\x28\xb5\x2f\xfd"
_STORED = struct.Struct("<BIBH")
_SIZE = struct.Struct("<Q")
_MOST = 1 << 36
_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=True).encode
_VALUES = tuple(f.name for f in TRACE.fields if f.shape not in ("token", "node") and f.name != "extra")
_NODE_TEXTS = frozenset(f.name for f in TRACE.fields if f.shape == "node" and f.type == TEXT)
_UNKNOWN = 0xFF
"""The byte of -1."""
_local = threading.local()


@dataclass(frozen=True)
class Record:
    """One record of a journal."""

    kind: str
    data: dict[str, Any]
    """Plain JSON values."""
    row: Row | None
    """The row, where the record is a trace."""
    arrays: list[Any] = field(default_factory=list)
    """Further float32 arrays."""
    offset: int = 0
    bytes: int = 0


def pack_record(kind: str, data: dict[str, Any], row: Row | None = None, arrays: Sequence[Any] = ()) -> bytes:
    """A frame. Raises BadInput where its payload would be larger than a frame may be."""
    header: dict[str, Any] = {"kind": kind, **data}
    texts: list[str] = []
    pieces: list[Any] = []
    if row is not None:
        header["row"] = _row_header(row, texts)
        pieces = _row_arrays(row, header["row"])
    if arrays:
        header["arrays"] = [len(a) for a in arrays]
        pieces += [_bytes(a, "<f4") for a in arrays]
    text = _json(header, plain=row is not None)
    packed = _compressed((_SIZE.pack(len(text)), text, "".join(texts).encode("utf-8", "surrogatepass")))
    pieces = [_SIZE.pack(sum(map(len, packed))), *packed, *pieces]
    size = sum(map(len, pieces))
    if size > LARGEST:
        raise BadInput(f"a {kind} record of {size} bytes; a journal frame holds at most {LARGEST}.")
    return b"".join((MAGIC, HEAD.pack(size, checksum(size, pieces)), *pieces))


def _json(header: dict[str, Any], *, plain: bool) -> bytes:
    """JSON, of plain values by the faster writer where there is one: its words for some floats read back as the same."""
    if plain and pydantic_json is not None:
        with suppress(Exception):  # a lone surrogate
            return pydantic_json(header, inf_nan_mode="constants")
    return _dump(header).encode("utf-8", "surrogatepass")


def checksum(size: int, pieces: Sequence[Any]) -> int:
    """The crc32 of a payload in pieces, and of its length."""
    crc = crc32(size.to_bytes(8, "little"))
    for piece in pieces:
        crc = crc32(piece, crc)
    return crc


def _compressed(parts: Sequence[bytes]) -> Sequence[bytes]:
    """`parts` as one zstd frame, in pieces.

    Short ones in one block that is not compressed (RFC 8878, 3.1.1): a compressor lets other threads run meanwhile, and
    coming back costs a thread more than packing a trace.
    """
    size = sum(map(len, parts))
    if size < SHORT:
        descriptor = 0b10_1_00000  # the length as four bytes, a single segment, no checksum
        block = size << 3 | 1  # the last block, and raw
        return _ZSTD, _STORED.pack(descriptor, size, block & 0xFF, block >> 8), *parts
    found: tuple[int, Any] | None = getattr(_local, "compressor", None)
    if found is None or found[0] != LEVEL:  # making one costs as much as packing a short trace
        found = _local.compressor = (LEVEL, zstandard.ZstdCompressor(level=LEVEL).compress)
    return (found[1](b"".join(parts)),)


def _bytes(array: Any, dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype).data.cast("B")


def _row_header(row: Row, texts: list[str]) -> dict[str, Any]:
    """What the JSON text says of a row; its long texts go to `texts`."""
    values = {name: value for name, value in row.values.items() if value is not None}
    long = {name: len(value) for name, value in values.items() if type(value) is str and len(value) >= LONG}
    texts += map(values.pop, long)
    nodes: dict[str, list[Any] | int] = dict(row.nodes)
    columns = {}
    for name, column in row.nodes.items():
        if column.count(None) == len(column):
            nodes[name] = len(column)
        elif name in _NODE_TEXTS:
            del nodes[name]
            columns[name] = [None if x is None else len(x) for x in column]
            texts += filter(None, column)
    return {"values": values, "long": long, "nodes": nodes, "texts": columns}


def _row_arrays(row: Row, header: dict[str, Any]) -> list[Any]:
    """The row's arrays; their lengths go into `header`."""
    header["tokens"], header["logprobs"] = len(row.ids), len(row.logprobs)
    header["all_known"] = row.known is row.sampled or bool((row.known == row.sampled).all())
    header["content"] = _UNKNOWN in row.content.tobytes()
    pieces = [_bytes(row.ids, "<i4"), _bytes(row.logprobs, "<f4"), np.packbits(row.sampled).data]
    if not header["all_known"]:
        pieces.append(np.packbits(row.known).data)
    pieces.append(np.packbits(row.content > 0 if header["content"] else row.content).data)
    if header["content"]:
        pieces.append(np.packbits(row.content < 0).data)
    extra = pack_extra(row.extra) if row.extra else b""
    header["extra"] = len(extra)
    return [*pieces, extra]


def unpack_frame(frame: bytes | memoryview, offset: int = 0) -> Record:
    """The record of a whole frame whose checksum fits. Its arrays are views of `frame`."""
    payload = memoryview(frame)[HEAD_BYTES:]
    (size,) = _SIZE.unpack_from(payload)
    end = _SIZE.size + size
    data = zstandard.ZstdDecompressor().decompress(payload[_SIZE.size : end], max_output_size=_MOST)
    (size,) = _SIZE.unpack_from(data)
    header = json.loads(data[_SIZE.size : _SIZE.size + size].decode("utf-8", "surrogatepass"))
    kind, head, sizes = header.pop("kind"), header.pop("row", None), header.pop("arrays", ())
    arrays = _Arrays(payload[end:])
    row = None
    if head is not None:
        row = _row(head, data[_SIZE.size + size :].decode("utf-8", "surrogatepass"), arrays)
    return Record(kind, header, row, [arrays.take(n, "<f4") for n in sizes], offset, HEAD_BYTES + len(payload))


class _Arrays:
    """Arrays one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._start = data, 0

    def take(self, count: int, dtype: str) -> Any:
        begin, self._start = self._start, self._start + count * np.dtype(dtype).itemsize
        return np.frombuffer(self._data[begin : self._start], dtype)

    def bits(self, count: int) -> Any:
        return np.unpackbits(self.take(-(-count // 8), "u1"), count=count).view(np.bool_)


def _row(head: dict[str, Any], text: str, arrays: _Arrays) -> Row:
    place = 0

    def piece(length: int | None) -> str | None:
        nonlocal place
        if length is None:
            return None
        begin, place = place, place + length
        return text[begin:place]

    n = head["tokens"]
    values = dict.fromkeys(_VALUES) | head["values"]
    nodes = {name: [None] * column if type(column) is int else column for name, column in head["nodes"].items()}
    values |= {name: piece(length) for name, length in head["long"].items()}
    nodes |= {name: [piece(length) for length in lengths] for name, lengths in head["texts"].items()}
    ids, logprobs = arrays.take(n, "<i4"), arrays.take(head["logprobs"], "<f4")
    sampled = arrays.bits(n)
    known = sampled if head["all_known"] else arrays.bits(n)
    content = arrays.bits(n).astype(np.int8)
    if head["content"]:
        content[arrays.bits(n)] = -1
    extra = unpack_extra(bytes(arrays.take(head["extra"], "u1"))) if head["extra"] else {}
    return Row(values, nodes, ids, sampled, content, logprobs, known, extra)
