"""Files of Verifiers to import: found, opened, and cut into blocks of whole lines.

A file is what its first bytes say: gzip, zstd, or text. Lines end with a newline byte and with nothing else: a prompt may
hold U+2028. Of a file of text only the places where lines end are looked up, and whoever takes a block reads it. What is
compressed or comes through a pipe is read once, in order. What is in memory is a block, or a line where one is longer.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import zstandard

from rolltape.schema.errors import BadInput
from rolltape.schema.records import Context, as_mapping

TRACES = "traces.jsonl"
"""Name that Verifiers gives its file of traces."""
_NAMES = (TRACES, f"{TRACES}.zst", f"{TRACES}.gz")
_CONFIGS = ("config.toml", "configs/resolved/*.json", "configs/*.json", "configs/*.toml")
"""Where a run of an evaluation keeps its configuration: 0.2.0 to 0.3.0 in the first, later ones in the others."""
BLOCK_BYTES = 8 << 20
_PIECE = 1 << 20
_PACKED_PIECE = 1 << 16
_MAX_WINDOW = 1 << 31


@dataclass(frozen=True)
class Source:
    """A file to import. `path` is None for standard input."""

    name: str
    """As the user named it, for messages."""
    path: Path | None
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration beside it; empty where there is none."""
    unread: str | None = None
    """Which configuration beside it could not be read, and why."""

    @property
    def bytes(self) -> int | None:
        """Length of the file; None where that is not known beforehand."""
        return self.path.stat().st_size if self.path is not None and self.path.is_file() else None

    @property
    def identity(self) -> str:
        """What tells it from other files, wherever it is imported from. A pipe is another each time."""
        return uuid.uuid4().hex if self.path is None else str(self.path.resolve())

    @property
    def rollouts(self) -> int:
        """Rollouts of each task that were asked for; 0 where that is not known."""
        found = self.config.get("num_rollouts")
        return found if type(found) is int and found > 0 else 0

    @property
    def taskset(self) -> str | None:
        """Id of the taskset."""
        holder = as_mapping(self.config.get("env", self.config))
        found = as_mapping(holder.get("taskset")).get("id")
        return found if isinstance(found, str) else None

    @property
    def context(self) -> Context:
        """Model, sampling and renderer settings, for traces that do not say them themselves."""
        client = as_mapping(self.config.get("client"))
        model, tokenizer = self.config.get("model"), client.get("renderer_model_name")
        sampling, renderer = self.config.get("sampling"), client.get("renderer")
        return Context(
            model=model if isinstance(model, str) else None,
            tokenizer=tokenizer if isinstance(tokenizer, str) else None,
            sampling=sampling if isinstance(sampling, dict) else None,
            renderer=renderer if isinstance(renderer, dict) else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """What an imported run keeps of it: of the configuration only what cannot be a secret."""
        context = self.context
        found = {"file": self.name, "model": context.model, "sampling": context.sampling, "taskset": self.taskset}
        return {k: v for k, v in {**found, "num_rollouts": self.rollouts or None}.items() if v is not None}


@dataclass(frozen=True)
class Block:
    """Whole lines of a source, the last one perhaps without its newline: bytes `start` to `end` of `data`, or of the file."""

    source: int
    data: bytes | bytearray | None
    """None where the lines are still to be read (see `Loader`)."""
    start: int
    end: int
    read: int
    """Bytes of the file up to the end of the block."""
    inode: int = 0
    """Of the file that is to be read."""

    def kept(self) -> Block:
        """The block for later, when its buffer holds the next one."""
        if self.data is None:
            return self
        return replace(
            self, data=bytes(memoryview(self.data)[self.start : self.end]), start=0, end=self.end - self.start
        )


class Cut(Exception):
    """Something in a compressed file that is not what was compressed, or its end before its end."""


def find_sources(files: Sequence[str | Path]) -> list[Source]:
    """The files that paths name: a file, `-` for standard input, or a folder of an evaluation.

    A folder that holds no traces itself stands for every one below it that does. Raises BadInput where there is nothing.
    """
    found: list[Source] = []
    for file in files:
        found += [Source("standard input", None)] if str(file) == "-" else _at(Path(file))
    if sum(source.path is None for source in found) > 1:
        raise BadInput("standard input is named twice; it can be read once.")
    return found


def _at(path: Path) -> list[Source]:
    try:
        if path.is_dir():
            return _in_folder(path)
        if not path.exists():
            raise BadInput(f"{path}: no such file; expected Verifiers' traces.jsonl, or the folder it lies in.")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); expected Verifiers' traces.jsonl.") from error
    return [_source(path, path.parent) if path.name in _NAMES else Source(str(path), path)]


def _in_folder(folder: Path) -> list[Source]:
    here = [folder / name for name in _NAMES if (folder / name).is_file()]
    found = here or sorted(p for name in _NAMES for p in folder.rglob(name) if p.is_file())
    if not found:
        raise BadInput(
            f"{folder}: no traces.jsonl in this folder or below it; expected Verifiers' traces.jsonl. Files with other "
            f"names are taken where they are named themselves, such as {folder}/*.jsonl."
        )
    return [_source(path, path.parent) for path in found]


def _source(path: Path, folder: Path) -> Source:
    """A file, with the configuration of the evaluation that wrote to `folder` where one is there."""
    unread = None
    for place in (p for pattern in _CONFIGS for p in sorted(folder.glob(pattern))):
        try:
            text = place.read_text(encoding="utf-8")
            value = tomllib.loads(text) if place.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            unread = f"{place}: no configuration that can be read ({error}); nothing was taken from it"
            continue
        if isinstance(value, dict):
            return Source(str(path), path, value)
    return Source(str(path), path, unread=unread)


def blocks(number: int, source: Source) -> Iterator[Block]:
    """The lines of `source`, which is the `number`-th, in blocks of about BLOCK_BYTES.

    What is not a plain file of text lies in one buffer, each block until the next is asked for. Raises BadInput where the
    source cannot be read, and Cut, after everything before, where it was compressed and is damaged.
    """
    with _opened(source) as file:
        if source.bytes is None or isinstance(file, _Packed):
            yield from _texts(number, file)
        else:
            yield from _places(number, file.file)


def _places(number: int, file: BufferedReader) -> Iterator[Block]:
    """Where the blocks of a file of text lie, as long as it is now."""
    now = os.fstat(file.fileno())
    end = 0
    while end < now.st_size:
        start = end
        file.seek(start + BLOCK_BYTES - 1)
        file.readline()
        end = min(file.tell(), now.st_size)
        yield Block(number, None, start, end, end, now.st_ino)


def _texts(number: int, file: _File) -> Iterator[Block]:
    """The blocks of what can be read once only, in one buffer: fresh memory for each costs more than reading."""
    buffer, have = bytearray(BLOCK_BYTES), 0
    cut: Cut | None = None
    while cut is None:
        try:
            n = file.readinto(memoryview(buffer)[have:])
        except Cut as error:
            cut, n = error, 0
        have += n
        if n and have < len(buffer):
            continue
        end = buffer.rfind(b"\n", 0, have) + 1 if n else have
        if end:
            yield Block(number, buffer, 0, end, file.read)
        elif n:
            buffer.extend(bytes(len(buffer)))  # a line longer than the buffer
        buffer[: have - end] = buffer[end:have]
        have -= end
        if not n:
            break
    if cut is not None:
        raise cut


class Loader:
    """Reads the lines of blocks into one buffer, each until the next is read."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.buffer = bytearray()

    def text(self, block: Block) -> tuple[bytes | bytearray, int, int]:
        """Bytes, and where in them the lines of a block begin and end.

        Raises BadInput where the file cannot be read, or is not the one that the block was looked up in.
        """
        source = self.sources[block.source]
        if block.data is not None or source.path is None:
            return block.data or b"", block.start, block.end
        size, have = block.end - block.start, 0
        if len(self.buffer) < size:
            self.buffer = bytearray(size)
        with _named(source), source.path.open("rb", buffering=0) as file:
            same = os.fstat(file.fileno()).st_ino == block.inode
            file.seek(block.start)
            while same and have < size and (n := file.readinto(memoryview(self.buffer)[have:size])):
                have += n
        if have < size:
            raise BadInput(
                f"{source.name}: was replaced or cut while it was read, so nothing was imported; import once more."
            )
        return self.buffer, 0, size


class _File:
    """A file of text, read piece by piece."""

    def __init__(self, file: BufferedReader) -> None:
        self.file = file
        self.read = 0
        """Bytes of the file that were read."""

    def readinto(self, view: memoryview) -> int:
        """Fill `view` from its beginning. Returns the number of bytes, 0 at the end."""
        n = self.file.readinto(view[:_PIECE])
        self.read += n
        return n


class _Packed(_File):
    """A file that is compressed: one frame or member, or several after each other. Raises Cut where it is damaged."""

    def __init__(self, file: BufferedReader, unpacker: Callable[[], Any], failure: type[Exception]) -> None:
        super().__init__(file)
        self.unpacker, self.failure = unpacker, failure
        self.frame: Any = None
        self.packed = b""
        self.text = memoryview(b"")

    def readinto(self, view: memoryview) -> int:
        """Fill `view` from its beginning. Returns the number of bytes, 0 at the end."""
        while not self.text:
            if not self._unpack():
                return 0
        n = min(len(view), len(self.text))
        view[:n] = self.text[:n]
        self.text = self.text[n:]
        return n

    def _unpack(self) -> bool:
        """Unpack some more; False at the end."""
        if not self.packed:
            self.packed = self.file.read(_PACKED_PIECE)
            self.read += len(self.packed)
        if not self.packed:
            if self.frame is not None:
                raise Cut("the compressed file ends there, before its end")
            return False
        self.frame = self.frame or self.unpacker()
        try:
            self.text = memoryview(self.frame.decompress(self.packed))
        except self.failure as error:
            raise Cut(f"the compressed bytes after it are damaged ({error})") from error
        self.packed = self.frame.unused_data if self.frame.eof else b""
        self.frame = None if self.frame.eof else self.frame
        return True


@contextmanager
def _opened(source: Source) -> Iterator[_File]:
    """`source` as a file of text, whether it is compressed or not."""
    with _named(source):
        given = nullcontext(sys.stdin.buffer) if source.path is None else source.path.open("rb")
        with cast(AbstractContextManager[BufferedReader], given) as file:
            begin = file.peek(len(zstandard.FRAME_HEADER))
            if begin.startswith(b"\x1f\x8b"):
                yield _Packed(file, lambda: zlib.decompressobj(31), zlib.error)
            elif begin.startswith(zstandard.FRAME_HEADER):
                yield _Packed(file, _zstd, zstandard.ZstdError)
            else:
                yield _File(file)


@contextmanager
def _named(source: Source) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"{source.name}: cannot be read ({error.strerror}); expected Verifiers' traces.jsonl."
        ) from error


def _zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
