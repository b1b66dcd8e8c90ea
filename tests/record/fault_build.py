"""Recorders for tests of faults, and disks of their own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rolltape.record.recorder import Recorder, StoreOptions

QUICK = {"ack_seconds": 60.0, "commit_seconds": 60.0, "retry_seconds": 0.05, "fsync_seconds": 0.05}
IMPATIENT: dict[str, Any] = {"ack_seconds": 0.3, "commit_seconds": 0.5}
"""For disks that hang: what is waited for does not come."""


def opened(root: Path, *, strict: bool = False, **options: Any) -> Recorder:
    store = StoreOptions(**{**QUICK, **options})
    return Recorder.open(root, resume=root.exists(), strict=strict, store=store)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in the background."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def settled(recorder: Recorder) -> bool:
    return recorder.status.pending_steps == 0


@contextmanager
def mounted(at: Path, *words: str) -> Iterator[Path]:
    """A mount for the time of a test; skips where that is not permitted."""
    at.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *words, str(at)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], capture_output=True, check=False)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill a disk but for some bytes; the file to delete to free it."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if leave:
        os.truncate(filler, filler.stat().st_size - leave)
    return filler
