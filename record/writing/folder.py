"""The folder of a run as its writers see it: entering it, claiming an attempt, and being sure that it is still there.

Of a run in an object store, what tells writers of one machine apart (journals, the lock) lies in its state folder there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rolltape.record.writing.journal import is_alive
from rolltape.replay.run import open_run
from rolltape.schema.errors import RolltapeError, RunConflict
from rolltape.schema.fields import SCHEMA_VERSION
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import RunPaths, part_of
from rolltape.schema.sealed import seal
from rolltape.schema.storage import AnyPath, StorePath, listed

logger = logging.getLogger(__name__)


def enter(paths: RunPaths, identity: Mapping[str, str | None], resume: bool) -> str:
    """The id of the run at `paths`: of a new one, or of the one that is resumed.

    Raises RunConflict where the folder holds something else, a run although `resume` is not set, or a run of another
    model, tokenizer or taskset.
    """
    with one_at_a_time(paths) if isinstance(paths.root, StorePath) else nullcontext():
        if not paths.run.exists() and (made := _made(paths, identity)) is not None:
            return made
    if not resume:
        expect_free(paths)
    run = open_run(paths.root)
    then = run.info
    both = {k: (then.get(k), v) for k, v in identity.items() if v is not None and then.get(k) is not None}
    other = {k: (old, new) for k, (old, new) in both.items() if not _same(old, new)}
    if other:
        told = "; ".join(f"{k} {old!r} then, {new!r} now" for k, (old, new) in other.items())
        moved = (
            "" if not any(os.path.isdir(new) for _, new in other.values()) else " (where a folder was moved: by a link)"
        )
        raise RunConflict(
            f"{paths.root} holds a run of something else ({told}); two runs are not mixed in one folder. Choose a new folder, "
            f"or go on with what the run was begun with{moved}."
        )
    return run.run_id


def expect_free(paths: RunPaths) -> None:
    """Raise RunConflict where the folder holds a run."""
    if paths.run.exists():
        raise RunConflict(
            f"{paths.root} holds run {open_run(paths.root).run_id} already; choose a new folder, or go on with it by --resume "
            "(in Python resume=True), with a --writer name of its own where another process still records into it."
        )


def _same(old: Any, new: str) -> bool:
    """Whether two names say the same, or are two ways to one folder, such as a tokenizer's."""
    with suppress(OSError, TypeError, ValueError):
        return bool(old == new or os.path.samefile(old, new))
    return False


def _made(paths: RunPaths, identity: Mapping[str, str | None]) -> str | None:
    """The id of a new run; None where another writer has made one meanwhile."""
    if paths.root.exists() and not paths.root.is_dir():
        raise RunConflict(f"{paths.root} is a file; a run is a folder, choose a new one.")
    found = sorted(p.name for p in paths.root.iterdir()) if paths.root.is_dir() else []
    strangers = [name for name in found if not name.endswith(".tmp")]  # another writer may be entering as well
    if strangers and not paths.run.exists():
        raise RunConflict(
            f"{paths.root} is not empty ({', '.join(strangers[:5])}) and holds no run.json; choose a new folder."
        )
    fresh = {
        "run": uuid.uuid4().hex,
        "schema": ".".join(map(str, SCHEMA_VERSION)),
        **identity,
        "created_at": time.time(),
    }
    return str(fresh["run"]) if put_once(paths.run, seal(fresh)) else None


@contextmanager
def one_at_a_time(paths: RunPaths) -> Iterator[None]:
    """Let one process at a time open or recover the run, so that writers that start together share an attempt."""
    descriptor = _to_lock(paths.root)
    try:
        with suppress(OSError):  # a file system without locks; writers there should not start at the same moment
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _to_lock(root: AnyPath) -> int:
    """A descriptor of the file that writers of a run lock."""
    if isinstance(root, StorePath):
        root.state.mkdir(parents=True, exist_ok=True)
        return os.open(root.state / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return os.open(root / "run.json", os.O_RDWR)  # NFS locks only what is open for writing
    except OSError:
        return os.open(root / "run.json", os.O_RDONLY)


def joined_attempt(paths: RunPaths, writer: str) -> int | None:
    """The attempt that living writers record; None where there is none. Raises RunConflict where one has our name."""
    alive = []
    for file in paths.journals.glob("*.journal"):
        number, _, name = file.stem.partition(".")
        if number.isdigit() and is_alive(file):
            alive.append((int(number), name))
    if any(name == writer for _, name in alive):
        raise RunConflict(
            f"writer {writer!r} records into {paths.root} at this moment; give this one another name, or end the other."
        )
    return max((number for number, _ in alive), default=None)


def next_attempt(paths: RunPaths, start_step: int, settings: Mapping[str, Any], versions: Mapping[str, str]) -> int:
    """Claim the next attempt number by putting its file. No number is used twice: that of a part whose attempt's file is gone
    is taken."""
    taken = [int(p.stem) for p in listed(paths.attempts, "*.json") if p.stem.isdigit()]
    taken += [int(p.name.split(".")[0]) for p in paths.journals.glob("*.journal") if p.name.split(".")[0].isdigit()]
    files = [*listed(paths.commits, "*/*.json"), *listed(paths.traces, "*/*.parquet")]
    taken += [part.attempt for part in map(part_of, files) if part is not None]
    number = max(taken, default=-1) + 1
    while True:
        body = {
            "attempt": number,
            "start_step": start_step,
            "started_at": time.time(),
            "process": os.getpid(),
            "versions": dict(versions),
            "settings": dict(settings),
        }
        if put_once(paths.attempt(number), seal(body)):
            return number
        number += 1


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide what a recording holds, where they are installed."""
    found = {}
    for name in ("rolltape", "verifiers", "renderers", "transformers", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Displaced(RolltapeError, OSError):
    """The folder of a run is not there any more, or not this run's."""


class Home:
    """The folder that a recorder writes to. It may be deleted, or its file system vanish, while the recorder lives."""

    def __init__(self, paths: RunPaths, attempt: int) -> None:
        self._files = {p: p.read_bytes() for p in (paths.run, paths.attempt(attempt)) if p.exists()}
        self._root = paths.root
        self._device = None if isinstance(paths.root, StorePath) else os.stat(paths.root).st_dev

    def check_journal(self) -> None:
        """`check` before a journal is made; of a run in a store it lies elsewhere, and must not wait for the store."""
        if self._device is not None:
            self.check()

    def check(self) -> None:
        """Make sure that the folder is this run's; one that was deleted is made again.

        Raises Displaced where its file system is gone or another run has taken its place: then nothing is to be written.
        """
        for path, data in self._files.items():
            try:
                there = path.read_bytes()
            except FileNotFoundError:
                self._same_device()
                logger.warning("%s is gone; it is put there again", path)
                put_once(path, data)
                continue
            if there != data:
                raise Displaced(f"{path} is no longer what this recorder put there; another run has taken its place.")

    def _same_device(self) -> None:
        """An empty mount point is not where the run belongs."""
        if isinstance(self._root, StorePath):
            return
        there = next(p for p in (self._root, *self._root.absolute().parents) if p.exists())
        if os.stat(there).st_dev != self._device:
            raise Displaced(f"{self._root}: the file system that it was on is gone.")
