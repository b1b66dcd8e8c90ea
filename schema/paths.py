"""Every path of a run, in one place.

    <run>/run.json                                         which run this is
    <run>/attempts/<attempt>.json                          one per start of a recording process
    <run>/traces/<split>/<step>.<attempt>.<writer>.parquet
    <run>/commits/<split>/<step>.<attempt>.<writer>.json   put after its Parquet file; without it the file is not data
    <run>/journal/<attempt>.<writer>.journal               what has ended and is not committed yet
    <run>/annotations/<name>/<version>.json                columns that were added later, and beside it their file; no recording
    <run>/expected/<split>/<step>.<attempt>.<writer>.parquet   Samples that were approved, to be compared with; no recording
    <run>/expected/SHA256SUMS                              the sha256 of each of these, as `sha256sum -c` reads it
    <run>/rescored/<split>/<step>.<attempt>.<writer>.parquet   of a re-scored run: old scores beside new

Steps are padded to eight digits so that names sort in time order; nothing relies on it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltape.schema.errors import BadInput
from rolltape.schema.storage import AnyPath, StorePath

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")
_COMMIT = re.compile(r"(\d{8,})\.(\d+)\.([A-Za-z0-9_\-]+)")
_REWRITE = re.compile(r"rewrite-(\d{8,})-[0-9a-f]{8}")


@dataclass(frozen=True, order=True)
class Part:
    """What one writer recorded of one step in one attempt."""

    split: str
    step: int
    attempt: int
    writer: str

    @property
    def stem(self) -> str:
        """File name without its ending."""
        return f"{self.step:08d}.{self.attempt}.{self.writer}"

    @property
    def last_step(self) -> int | None:
        """The last step in a rewritten file that goes by this name (see `rewrites`); None where it is a part."""
        found = _REWRITE.fullmatch(self.writer)
        return int(found[1]) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"split": self.split, "step": self.step, "attempt": self.attempt, "writer": self.writer}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Part:
        """The inverse of `to_dict`."""
        return cls(data["split"], data["step"], data["attempt"], data["writer"])


def check_name(name: str, what: str) -> str:
    """`name` where it is safe as a part of a file name.

    Letters, digits, - and _ only: a `key=value` folder would override a column of that name in SQL. Raises BadInput.
    """
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"{what} {name!r}: expected 1 to 64 letters, digits, '-' or '_', beginning with a letter or digit."
        )
    if _REWRITE.fullmatch(name):
        raise BadInput(f"{what} {name!r}: such names are those of rewritten files; choose another.")
    return name


ENTRIES = frozenset(
    (
        *("run.json", "attempts", "traces", "commits", "journal"),
        *("annotations", "expected", "rescored", "discarded"),
    )
)
"""What the folder of a run holds: what was recorded, and what was added to it."""


@dataclass(frozen=True)
class RunPaths:
    """The paths of the run at `root`, a folder or a place in an object store."""

    root: AnyPath
    local: Path | None = None
    """Folder on this machine for the journals, where `root` cannot hold them; None where it can, or nothing is written."""

    @classmethod
    def of(cls, root: AnyPath, run_id: str) -> RunPaths:
        """The paths of run `run_id`: in a store, whatever was recorded at that place before has its own local folder."""
        return cls(root, root.state / run_id if isinstance(root, StorePath) else None)

    @property
    def run(self) -> AnyPath:
        """Identity of the run."""
        return self.root / "run.json"

    @property
    def attempts(self) -> AnyPath:
        """Folder of the attempts."""
        return self.root / "attempts"

    @property
    def commits(self) -> AnyPath:
        """Folder of the commits, one folder a split below."""
        return self.root / "commits"

    @property
    def traces(self) -> AnyPath:
        """Folder of the Parquet files, one folder a split below."""
        return self.root / "traces"

    @property
    def annotations(self) -> AnyPath:
        """Folder of columns that were added later, one folder a name below."""
        return self.root / "annotations"

    @property
    def here(self) -> Path:
        """Folder of the run on this machine. Raises BadInput where the run lies in a store and its id is not known."""
        if self.local is not None:
            return self.local
        if isinstance(self.root, StorePath):
            raise BadInput(
                f"{self.root} is in an object store; its journals are found by the run's id, which is not known."
            )
        return self.root

    @property
    def journals(self) -> Path:
        """Folder of the journals."""
        return self.here / "journal"

    def attempt(self, attempt: int) -> AnyPath:
        """Settings of one attempt."""
        return self.attempts / f"{attempt}.json"

    def parquet(self, part: Part) -> AnyPath:
        """Traces of a part."""
        return self.root / f"traces/{part.split}/{part.stem}.parquet"

    def commit(self, part: Part) -> AnyPath:
        """Commit of a part."""
        return self.commits / part.split / f"{part.stem}.json"

    def expected(self, part: Part) -> AnyPath:
        """Samples of a part that were approved."""
        return self.root / "expected" / part.split / f"{part.stem}.parquet"

    @property
    def sums(self) -> AnyPath:
        """sha256 of every file of approved Samples: which there must be, and that they are as they were."""
        return self.root / "expected" / "SHA256SUMS"

    def rescored(self, part: Part) -> AnyPath:
        """Old scores beside new, of a part of a re-scored run."""
        return self.root / "rescored" / part.split / f"{part.stem}.parquet"

    def journal(self, attempt: int, writer: str) -> Path:
        """Journal of one writer in one attempt."""
        return self.journals / f"{attempt}.{writer}.journal"


def part_of(path: AnyPath) -> Part | None:
    """The part that a Parquet or commit file belongs to; None where its name is not one of ours."""
    found = _COMMIT.fullmatch(path.stem)
    return Part(path.parent.name, int(found[1]), int(found[2]), found[3]) if found else None


def folder_of(split: str, eval_name: str | None) -> str:
    """The folder of a split: `train`, `eval`, or `eval-<name>`.

    What no file name takes is replaced, and a digest of the name appended, so that two names never share a folder.
    """
    if eval_name is None:
        return split
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in eval_name[:64])
    return (
        f"{split}-{safe}"
        if safe == eval_name
        else f"{split}-{safe}-{hashlib.sha256(eval_name.encode()).hexdigest()[:8]}"
    )
