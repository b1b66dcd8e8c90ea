"""Rewritten files: rows of many parts in one file, in place of the files they were recorded in.

A rewrite is put as a recording is: first its Parquet file, then its commit, both under names of their own. The commit repeats
the commits of the parts, says which row groups are whose (none holds rows of two parts), and names the files that it stands
for. From the moment it is there those no longer count; they stay until `rolltape prune` removes them.

    commits/<split>/<first step>.<attempt>.rewrite-<last step>-<key>.json
    traces/<split>/<first step>.<attempt>.rewrite-<last step>-<key>.parquet

Three kinds of change make one: small files are merged (`rolltape compact`, no row and no column changes), columns are left
out (`rolltape prune`: null in the new file, and named in `pruned`), parts are dropped (named in `dropped`). A rewrite may be
rewritten again; its successor names all that it stood for. `key` is a digest of what went in, so that the same work that is
begun again after a crash has the same name.

Its version has a major number of its own. A reader that does not know it would read a step twice before `prune` and not at
all afterwards, so it is to refuse: the name is that of a commit of the first step in it, and the version 2.0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rolltape.schema.commits import Commit, sealed, unsealed
from rolltape.schema.errors import Damaged
from rolltape.schema.parquet import Written
from rolltape.schema.paths import Part
from rolltape.schema.storage import AnyPath

REWRITE_VERSION = (2, 0)
"""(major, minor) of commits of rewritten files. Their rows are those of schema version 1."""


@dataclass(frozen=True)
class Moved:
    """A part whose rows lie in a rewritten file."""

    body: Mapping[str, Any]
    """Its commit as it was put, without the checksum."""
    row_groups: range
    pruned: tuple[str, ...] = ()
    """Columns that were left out since it was recorded; they are null."""

    @cached_property
    def commit(self) -> Commit:
        """Its commit."""
        return Commit.from_dict(self.body)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        groups = {"first_row_group": self.row_groups.start, "row_groups": len(self.row_groups)}
        return {"commit": dict(self.body), **groups, "pruned": list(self.pruned)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Moved:
        """The inverse of `to_dict`."""
        first = data["first_row_group"]
        return cls(data["commit"], range(first, first + data["row_groups"]), tuple(data["pruned"]))


@dataclass(frozen=True)
class Dropped:
    """A part whose rows were dropped."""

    part: Part
    rows: int
    bytes: int
    """Of the file it was recorded in."""
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"part": self.part.to_dict(), "rows": self.rows, "bytes": self.bytes, "why": self.why}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Dropped:
        """The inverse of `to_dict`."""
        return cls(Part.from_dict(data["part"]), data["rows"], data["bytes"], data["why"])


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """The commit of a rewritten file."""

    part: Part
    """Its place among the parts: first step, attempt, and `rewrite-<last step>-<key>` as the writer."""
    file: Written | None
    """None where it only drops."""
    moved: tuple[Moved, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    replaces: tuple[str, ...] = ()
    """Stems of the files in the same split that no longer count: a commit and a Parquet file each."""
    written_at: float | None = None

    def to_bytes(self) -> bytes:
        """The commit as JSON with its checksum."""
        file = self.file
        return sealed(
            {
                "schema": ".".join(map(str, REWRITE_VERSION)),
                "part": self.part.to_dict(),
                "rows": file and file.rows,
                "bytes": file and file.bytes,
                "sha256": file and file.sha256,
                "parts": [m.to_dict() for m in self.moved],
                "dropped": [d.to_dict() for d in self.dropped],
                "replaces": list(self.replaces),
                "written_at": self.written_at,
            }
        )

    @classmethod
    def read(cls, path: AnyPath) -> Rewrite:
        """Read the commit of a rewritten file. Raises Damaged and UnsupportedVersion as `Commit.read`."""
        body = unsealed(path, REWRITE_VERSION)
        return cls(
            part=Part.from_dict(body["part"]),
            file=None if body["rows"] is None else Written(body["rows"], body["bytes"], body["sha256"]),
            moved=tuple(map(Moved.from_dict, body["parts"])),
            dropped=tuple(map(Dropped.from_dict, body["dropped"])),
            replaces=tuple(body["replaces"]),
            written_at=body["written_at"],
        )


def rewrite_part(parts: Iterable[Part], work: Any) -> Part:
    """The name of a rewritten file for `parts` (of one split and attempt). `work`: JSON values that say what is done."""
    parts = sorted(parts)
    key = hashlib.sha256(json.dumps([[p.stem for p in parts], work]).encode()).hexdigest()[:8]
    first, last = parts[0], max(p.step for p in parts)
    return Part(first.split, first.step, first.attempt, f"rewrite-{last:08d}-{key}")


def row_groups_of(rows: Iterable[int], lengths: Iterable[int], where: object) -> list[range]:
    """Which row groups hold which part: `rows` of each part in order, `lengths` of the row groups of the file.

    Raises Damaged where a row group holds rows of two parts, or rows are missing.
    """
    found, left, first = [], list(lengths), 0
    for count in rows:
        end = first
        while count > 0 and end < len(left):
            count -= left[end]
            end += 1
        if count:
            raise Damaged(f"{where}: its row groups do not divide it by parts; it is not used.")
        found.append(range(first, end))
        first = end
    if first != len(left):
        raise Damaged(f"{where}: it holds more row groups than its parts have; it is not used.")
    return found
