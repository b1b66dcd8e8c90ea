"""The journal: what has ended and is not committed yet, one framed record after the other.

    frame    magic (8 bytes), payload length (8, little-endian), crc32 of length and payload (4), payload
    payload  zstd of: header length (4), header (JSON), arrays one after the other

Each frame is one unbuffered write. One file a writer of an attempt, so no two processes ever append to one file.

    torn tail      a last frame that is not all there: the process died, or power failed, while it was written
    corruption     a frame whose checksum fails anywhere else: named, skipped, reading goes on at the next magic
    zeros          what a file system leaves where a power cut lost pages: neither clean end nor data, named as such
    failed write   cut back to the last good offset, so that the next frame never follows a fragment

The writer holds a lock on its file while it lives, so that nobody takes its journal for a dead one's.
`kill -9` loses nothing that `append` returned from; a power cut may lose what was not synced yet.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zstandard

from rolltape.schema.encoding import Row
from rolltape.schema.errors import BadInput, Damaged
from rolltape.schema.jsontext import pack_extra, unpack_extra

MAGIC = b"\x93RTJ1\r\n\x1a"
_HEAD = struct.Struct("<QI")
_SIZE = struct.Struct("<I")
HEAD_BYTES = len(MAGIC) + _HEAD.size
LARGEST = (1 << 32) - 1
"""Largest payload a frame may carry."""
LEVEL = 1

Fsync = Literal["always", "interval", "never"]

_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=True).encode


@dataclass(frozen=True)
class Fault:
    """A stretch of a journal that is no frame."""

    kind: Literal["torn tail", "corruption", "zeros"]
    offset: int
    """Byte at which it begins."""
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.bytes} bytes at byte {self.offset}"


@dataclass(frozen=True)
class Record:
    """One record of a journal: a kind, plain JSON values, and the row where it is a trace."""

    kind: str
    data: dict[str, Any]
    row: Row | None
    offset: int
    bytes: int


def pack_record(kind: str, data: dict[str, Any], row: Row | None = None) -> bytes:
    """A frame. Raises BadInput where its payload would be larger than a frame may be."""
    arrays: list[bytes] = []
    header: dict[str, Any] = {"kind": kind, **data}
    if row is not None:
        header["row"] = _row_header(row)
        arrays = _row_arrays(row)
    text = _dump(header).encode("utf-8", "surrogatepass")
    payload = _compress(b"".join((_SIZE.pack(len(text)), text, *arrays)))
    if len(payload) > LARGEST:
        raise BadInput(f"a {kind} record of {len(payload)} bytes; a journal frame holds at most {LARGEST}.")
    size = len(payload)
    return b"".join((MAGIC, _HEAD.pack(size, _checksum(size, payload)), payload))


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _checksum(size: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(size.to_bytes(8, "little")))


def _row_header(row: Row) -> dict[str, Any]:
    return {
        "values": row.values,
        "nodes": row.nodes,
        "tokens": len(row.ids),
        "logprobs": len(row.logprobs),
        "all_known": row.known is row.sampled or bool((row.known == row.sampled).all()),
        "content": bool((row.content < 0).any()),
        "extra": len(pack_extra(row.extra)) if row.extra else 0,
    }


def _row_arrays(row: Row) -> list[bytes]:
    known = row.known is row.sampled or bool((row.known == row.sampled).all())
    unknown = row.content < 0
    return [
        row.ids.astype("<i4").tobytes(),
        row.logprobs.astype("<f4").tobytes(),
        np.packbits(row.sampled).tobytes(),
        b"" if known else np.packbits(row.known).tobytes(),
        np.packbits(row.content > 0).tobytes(),
        np.packbits(unknown).tobytes() if unknown.any() else b"",
        pack_extra(row.extra) if row.extra else b"",
    ]


def _unpack(payload: bytes | memoryview, offset: int) -> Record:
    data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=1 << 34)
    (size,) = _SIZE.unpack_from(data)
    header = json.loads(data[_SIZE.size : _SIZE.size + size].decode("utf-8", "surrogatepass"))
    kind, head = header.pop("kind"), header.pop("row", None)
    row = None if head is None else _unpack_row(head, memoryview(data)[_SIZE.size + size :])
    return Record(kind, header, row, offset, HEAD_BYTES + len(payload))


def _unpack_row(head: dict[str, Any], data: memoryview) -> Row:
    n, start = head["tokens"], 0

    def take(count: int, dtype: str) -> Any:
        nonlocal start
        begin, start = start, start + count * np.dtype(dtype).itemsize
        return np.frombuffer(data[begin:start], dtype)

    def bits(there: bool) -> Any:
        return np.unpackbits(take(-(-n // 8), "u1"), count=n).view(np.bool_) if there else None

    ids, logprobs = take(n, "<i4"), take(head["logprobs"], "<f4")
    sampled = bits(True)
    known = bits(not head["all_known"])
    content = bits(True).astype(np.int8)
    unknown = bits(head["content"])
    if unknown is not None:
        content[unknown] = -1
    extra = unpack_extra(bytes(take(head["extra"], "u1"))) if head["extra"] else {}
    return Row(
        head["values"], head["nodes"], ids, sampled, content, logprobs, sampled if known is None else known, extra
    )


class Journal:
    """Appends frames to one file.

    `fsync`: `always` (after each record), `interval` (at most every `seconds`), `never`. What is written survives the
    process in each case; fsync is about losing power.
    """

    def __init__(self, path: Path, *, fsync: Fsync = "interval", seconds: float = 1.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.fsync: Fsync = fsync
        self.seconds = seconds
        self.good = 0
        """Bytes of the file that are whole frames."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._synced = time.monotonic()

    def append(self, frame: bytes) -> int:
        """Write one frame; returns the offset it begins at. Raises OSError with the file as it was before."""
        offset = self.good
        try:
            written = os.pwrite(self._file, frame, offset)
            while written < len(frame):
                written += os.pwrite(self._file, frame[written:], offset + written)
        except OSError:
            self._cut_back()
            raise
        self.good = offset + len(frame)
        if self.fsync == "always" or (self.fsync == "interval" and time.monotonic() - self._synced >= self.seconds):
            self.sync()
        return offset

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._file, self.good)
        except OSError:  # the next append writes over the fragment, and a reader takes it for a torn tail
            return

    def sync(self) -> None:
        """Sync what was written to disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def read(self, offset: int) -> Record:
        """The record whose frame begins at `offset`. Raises Damaged where it does not read back."""
        return read_at(self._file, offset, self.path)

    def clear(self) -> None:
        """Empty the file: everything in it is committed."""
        os.ftruncate(self._file, 0)
        self.good = 0

    def close(self, *, remove: bool = False) -> None:
        """Close the file, and with `remove` take it away."""
        if self._file < 0:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1


def read_at(descriptor: int, offset: int, path: Path | None = None) -> Record:
    """The record whose frame begins at `offset` of an open journal. Raises Damaged where it does not read back."""
    head = os.pread(descriptor, HEAD_BYTES, offset)
    if len(head) == HEAD_BYTES and head.startswith(MAGIC):
        size, crc = _HEAD.unpack_from(head, len(MAGIC))
        payload = os.pread(descriptor, size, offset + HEAD_BYTES)
        if len(payload) == size and _checksum(size, payload) == crc:
            return _unpack(payload, offset)
    raise Damaged(
        f"{path or 'the journal'}: the record at byte {offset} does not read back; its bytes are not what was written."
    )


def is_alive(path: Path) -> bool:
    """Whether the writer of a journal still runs: it holds a lock on the file for as long as it lives."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_journal(path: Path) -> Iterator[Record | Fault]:
    """Every whole record of a journal in order, and every stretch that is none."""
    with path.open("rb") as file:
        data = memoryview(_map(file))
        yield from scan(data)


def _map(file: Any) -> Any:
    import mmap

    size = os.fstat(file.fileno()).st_size
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


def scan(data: memoryview) -> Iterator[Record | Fault]:
    """`read_journal` over bytes."""
    offset, end = 0, len(data)
    while offset < end:
        record = _frame_at(data, offset)
        if record is not None:
            yield record
            offset += record.bytes
            continue
        following = _next_frame(data, offset + 1)
        stop = end if following is None else following
        yield _fault(data, offset, stop, following is None)
        offset = stop


def _frame_at(data: memoryview, offset: int) -> Record | None:
    if bytes(data[offset : offset + len(MAGIC)]) != MAGIC or len(data) < offset + HEAD_BYTES:
        return None
    size, crc = _HEAD.unpack_from(data, offset + len(MAGIC))
    start = offset + HEAD_BYTES
    if size > len(data) - start or _checksum(size, data[start : start + size]) != crc:
        return None
    try:
        return _unpack(data[start : start + size], offset)
    except (ValueError, KeyError, struct.error, zstandard.ZstdError):
        return None


def _next_frame(data: memoryview, offset: int) -> int | None:
    """Offset of the next whole frame."""
    source = data.obj
    while (offset := source.find(MAGIC, offset)) >= 0:  # type: ignore[attr-defined]
        if _frame_at(data, offset) is not None:
            return offset
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
    size, _ = _HEAD.unpack_from(piece, len(MAGIC))
    return bool(HEAD_BYTES + size > len(piece))
