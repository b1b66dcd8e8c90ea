"""The journal: what has ended and is not committed yet, one frame after the other.

How a frame looks is told in `rolltape.schema.frames`, how a journal is read in `rolltape.schema.journals`.

Each frame is one unbuffered write. One file a writer of an attempt, so no two processes ever append to one file.

    torn tail      a last frame that is not all there: the process died, or power failed, while it was written
    corruption     a frame whose checksum fails anywhere else: named, skipped, reading goes on at the next magic
    zeros          what a file system leaves where a power cut lost pages: neither clean end nor data, named as such
    failed write   cut back to the last good offset, so that the next frame never follows a fragment

The writer holds a lock on its file while it lives, so that nobody takes its journal for a dead one's; the file gets its
name when it is locked already. Where a file system knows no locks the journal begins with its process instead, which tells
whether it lives on the same host only. `kill -9` loses nothing that `append` returned from; a power cut may lose what was
not synced yet.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rolltape.schema.errors import Damaged
from rolltape.schema.frames import HEAD, HEAD_BYTES, MAGIC, Record, checksum, pack_record, unpack_frame
from rolltape.schema.journals import Fault, read_journal, scan
from rolltape.schema.parquet import make_folder, name_once, sync_folder

__all__ = ["Fault", "Fsync", "Journal", "Record", "claim", "is_alive", "pack_record", "read_at", "read_journal", "scan"]

Fsync = Literal["always", "interval", "never"]

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class Journal:
    """Appends frames to one file.

    `fsync`: `always` (after each record), `interval` (`seconds` after the first record that is not synced), `never`. What
    is written survives the process in each case; fsync is about losing power. Raises FileExistsError where there is such a
    file.
    """

    def __init__(
        self, path: Path, *, fsync: Fsync = "interval", seconds: float = 1.0, frames: Iterable[bytes] | None = None
    ) -> None:
        """With `frames` the file holds them, in `offsets`, and takes the place of the one that is there."""
        make_folder(path.parent)
        self.path = path
        self.fsync: Fsync = fsync
        self.seconds = seconds
        self.good = 0
        """Bytes of the file that are whole frames."""
        self._unsynced: float | None = None  # when the first frame was written that is not synced yet
        self._fragment = False
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        self._file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._closer = weakref.finalize(self, os.close, self._file)
        _living.add(self)
        try:
            self._owner = b"" if _lock(self._file) else _owner()
            self._begin()
            self.offsets = [self.append(frame) for frame in frames or ()]
            if frames is not None:
                self.sync()
            if frames is None:
                name_once(temporary, path)
            else:
                temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
            self._closer()
            raise
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _begin(self) -> None:
        """Say whose the file is, where no lock does and it is empty."""
        if self._owner and not self.good:
            self._write(self._owner)

    @property
    def empty(self) -> bool:
        """Whether nothing was recorded since the file was made or emptied."""
        return self.good <= len(self._owner)

    def append(self, frame: bytes) -> int:
        """Write one frame; returns the offset it begins at. Raises OSError with the file as it was before."""
        self._begin()  # it may have failed when the file was emptied
        return self._write(frame)

    def _write(self, frame: bytes) -> int:
        offset = self.good
        try:
            if self._fragment:
                self._cut_back()
            _write_all(self._file, frame, offset)
            if self._unsynced is None:
                self._unsynced = time.monotonic()
            if self.fsync == "always" or self._due():
                self.sync()
        except BaseException:
            with suppress(OSError):  # what cannot be cut now is cut before the next frame is written
                self._cut_back()
            raise
        self.good = offset + len(frame)
        return offset

    def _cut_back(self) -> None:
        self._fragment = True
        os.ftruncate(self._file, self.good)
        self._fragment = False

    def _due(self) -> bool:
        since = self._unsynced
        return self.fsync == "interval" and since is not None and time.monotonic() - since >= self.seconds

    def sync(self) -> None:
        """Sync what was written to disk."""
        os.fsync(self._file)
        self._unsynced = None

    def sync_if_due(self) -> None:
        """Sync the last frames before a pause."""
        if self._due():
            self.sync()

    def read(self, offset: int) -> Record:
        """The record whose frame begins at `offset`. Raises Damaged where it does not read back."""
        return read_at(self._file, offset, self.path)

    def frame(self, offset: int) -> bytes:
        """The frame that begins at `offset`. Raises Damaged where it does not read back."""
        return frame_at(self._file, offset, self.path)

    def in_place(self) -> bool:
        """Whether the file still stands under its name: folders are deleted, moved and unmounted under their writers."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False

    def clear(self) -> None:
        """Empty the file: everything in it is committed."""
        os.ftruncate(self._file, 0)
        self.good, self._fragment, self._unsynced = 0, False, None
        self._begin()

    def close(self, *, remove: bool = False) -> None:
        """Close the file, and with `remove` take it away."""
        if remove and self._closer.alive and self.in_place():
            self.path.unlink(missing_ok=True)
        self._closer()


class Reserve:
    """Room on a disk for when it is full: a file without a name, which ends with the process."""

    def __init__(self, folder: Path, size: int = 16 << 10) -> None:
        """Raises OSError where there is no room."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            _write_all(file.fileno(), os.urandom(size), 0)  # nothing that a file system packs
            self._file = os.dup(file.fileno())
        self._closer = weakref.finalize(self, os.close, self._file)

    def give_back(self) -> None:
        """Free the room; also where a forked process has the file open."""
        os.ftruncate(self._file, 0)
        self._closer()


_living: weakref.WeakSet[Journal] = weakref.WeakSet()


def _let_go() -> None:
    """Close the journals of the process that this one was forked from: it would hold their locks beyond that one's end."""
    for journal in list(_living):
        journal._closer()


os.register_at_fork(after_in_child=_let_go)


def _owner() -> bytes:
    """The frame that says whose journal this is, where no lock does."""
    return pack_record("writer", {"host": socket.gethostname(), "process": os.getpid()})


def _lock(descriptor: int) -> bool:
    """Lock a file; False where the file system knows no locks. Raises BlockingIOError where somebody holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        written = os.pwrite(descriptor, view[done:], offset + done)
        if not written:
            raise OSError(errno.EIO, "nothing was written, without an error")
        done += written


# -- whose it is


def claim(path: Path) -> int | None:
    """A descriptor that holds the lock of a dead writer's journal; None where its writer lives, or there is none."""
    while True:
        try:
            descriptor = _open(path)
        except FileNotFoundError:
            return None
        try:
            lives = not _lock(descriptor) and _owner_lives(path)
            same = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            os.close(descriptor)
            return None
        if same and not lives:
            return descriptor
        os.close(descriptor)
        if same:
            return None


def is_alive(path: Path) -> bool:
    """Whether the writer of a journal still runs: it holds a lock on the file for as long as it lives."""
    descriptor = claim(path)
    if descriptor is None:
        return path.exists()
    os.close(descriptor)
    return False


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)  # NFS locks only what is open for writing
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return os.open(path, os.O_RDONLY)


def _owner_lives(path: Path) -> bool:
    """Whether the process that a journal begins with runs on this host."""
    first = next(read_journal(path), None)
    if not isinstance(first, Record) or first.kind != "writer" or first.data["host"] != socket.gethostname():
        return False
    try:
        os.kill(first.data["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# -- reading


def frame_at(descriptor: int, offset: int, path: Path | None = None) -> bytes:
    """The frame that begins at `offset` of an open journal. Raises Damaged where it does not read back."""
    head = os.pread(descriptor, HEAD_BYTES, offset)
    if len(head) == HEAD_BYTES and head.startswith(MAGIC):
        size, crc = HEAD.unpack_from(head, len(MAGIC))
        if size <= os.fstat(descriptor).st_size - offset - HEAD_BYTES:
            frame = _read_all(descriptor, HEAD_BYTES + size, offset)
            if len(frame) == HEAD_BYTES + size and checksum(size, [memoryview(frame)[HEAD_BYTES:]]) == crc:
                return frame
    raise Damaged(
        f"{path or 'the journal'}: the record at byte {offset} does not read back; its bytes are not what was written."
    )


def _read_all(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more
    return data


def read_at(descriptor: int, offset: int, path: Path | None = None) -> Record:
    """The record whose frame begins at `offset` of an open journal. Raises Damaged where it does not read back."""
    return unpack_frame(frame_at(descriptor, offset, path), offset)
