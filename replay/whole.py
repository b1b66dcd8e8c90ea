"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltape.replay.run import Run
from rolltape.schema.errors import BadInput, RunConflict
from rolltape.schema.parquet import naming as naming
from rolltape.schema.parquet import sync_folder
from rolltape.schema.storage import is_url


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to. What was written there is synced and takes the name of `path` when the block ends.

    Where the block raises, nothing remains, and a file that was at `path` is still there. Folders above are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with naming(path):
            yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def check_targets(run: Run, paths: Iterable[Path], overwrite: bool) -> None:
    """Refuse files that must not be written: BadInput inside the run, RunConflict where one exists, without `overwrite`."""
    for path in paths:
        if is_url(path):
            raise BadInput(f"{path} is a URL; files are written on this machine, for you to copy.")
        root = run.paths.root
        if isinstance(root, Path) and path.resolve().is_relative_to(root.resolve()):
            raise BadInput(f"{path} lies inside the run; nothing but recordings belongs there. Choose another folder.")
        if path.is_dir():
            raise BadInput(f"{path} is a folder; name the file to write.")
        if path.exists() and not overwrite:
            raise RunConflict(f"{path} exists; choose another name, or set --overwrite.")
