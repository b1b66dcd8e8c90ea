"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltape.schema.parquet import sync_folder


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to. What was written there is synced and takes the name of `path` when the block ends.

    Where the block raises, nothing remains, and a file that was at `path` is still there. Folders above are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
