"""Reading a journal: its whole frames, and every stretch that is none. `rolltape.record.writing.journal` writes them."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zstandard

from rolltape.schema.frames import HEAD, HEAD_BYTES, MAGIC, Record, checksum, unpack_frame


@dataclass(frozen=True)
class Fault:
    """A stretch of a journal that is no frame."""

    kind: Literal["torn tail", "corruption", "zeros"]
    offset: int
    """Byte at which it begins."""
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.bytes} bytes at byte {self.offset}"


def read_journal(path: Path) -> Iterator[Record | Fault]:
    """Every whole record of a journal in order, and every stretch that is none."""
    with path.open("rb") as file:
        yield from scan(memoryview(_map(file)))


def _map(file: Any) -> Any:
    size = os.fstat(file.fileno()).st_size
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


def scan(data: memoryview) -> Iterator[Record | Fault]:
    """`read_journal` over bytes."""
    offset, end = 0, len(data)
    while offset < end:
        record = _record_at(data, offset)
        if record is None:
            following = _next_record(data, _after(data, offset))
            stop = end if following is None else following.offset
            yield _fault(data, offset, stop, following is None)
            record, offset = following, stop
        if record is not None:
            yield record
            offset = record.offset + record.bytes


def _after(data: memoryview, offset: int) -> int:
    """Where to look for the next frame behind a damaged one: at its end, where another begins, not among its tokens."""
    start = offset + HEAD_BYTES
    if len(data) >= start and data[offset : offset + len(MAGIC)] == MAGIC:
        size, _ = HEAD.unpack_from(data, offset + len(MAGIC))
        following = data[start + size : start + size + len(MAGIC)] if size < len(data) - start else b""
        if following == MAGIC or size == len(data) - start:
            return int(start + size)
    return offset + 1


def _record_at(data: memoryview, offset: int) -> Record | None:
    start = offset + HEAD_BYTES
    if len(data) < start or bytes(data[offset : offset + len(MAGIC)]) != MAGIC:
        return None
    size, crc = HEAD.unpack_from(data, offset + len(MAGIC))
    if size > len(data) - start or checksum(size, [data[start : start + size]]) != crc:
        return None
    try:
        return unpack_frame(data[offset : start + size], offset)
    except (ValueError, KeyError, TypeError, IndexError, struct.error, zstandard.ZstdError):
        return None


def _next_record(data: memoryview, offset: int) -> Record | None:
    """The next whole record."""
    source = data.obj
    while (offset := source.find(MAGIC, offset)) >= 0:  # type: ignore[attr-defined]
        if (record := _record_at(data, offset)) is not None:
            return record
        offset += 1
    return None


def _fault(data: memoryview, start: int, stop: int, last: bool) -> Fault:
    piece = data[start:stop]
    if not any(piece[i : i + 65536].tobytes().strip(b"\0") for i in range(0, len(piece), 65536)):
        return Fault("zeros", start, stop - start)
    head = bytes(piece[: len(MAGIC)])
    torn = last and MAGIC.startswith(head) and _is_cut(piece)
    return Fault("torn tail" if torn else "corruption", start, stop - start)


def _is_cut(piece: memoryview) -> bool:
    """Whether a frame that begins here says it is longer than what is left."""
    if len(piece) < HEAD_BYTES:
        return True
    size, _ = HEAD.unpack_from(piece, len(MAGIC))
    return bool(HEAD_BYTES + size > len(piece))
