"""What counts in a run: which commits, and where the rows of each part lie now.

A part's rows are in the file it was recorded in, until a rewrite stands for it (see `rolltape.schema.rewrites`): then in the
rewritten file, and its own file no longer counts, whether it is still there or not. So every row is read once, at each moment
of a compaction and after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolltape.schema.commits import Commit
from rolltape.schema.errors import Damaged, RolltapeError, Unreachable
from rolltape.schema.parquet import Written
from rolltape.schema.paths import Part, RunPaths, part_of
from rolltape.schema.rewrites import Dropped, Rewrite
from rolltape.schema.storage import AnyPath, StorePath, each, listed, size_of
from rolltape.schema.table import uncollected


@dataclass(frozen=True)
class Held:
    """Where the rows of a part lie."""

    path: AnyPath
    file: Written
    """The whole file as it was written."""
    row_groups: range | None = None
    """Those of the part; None where the file is its own."""
    pruned: tuple[str, ...] = ()
    """Columns that were left out since the part was recorded; they are null."""

    def check_size(self) -> None:
        """Raise Damaged where the file is missing, or not as long as it was."""
        try:
            found = size_of(self.path)
        except FileNotFoundError:
            raise Damaged(
                f"{self.path}: the commit names this file, but it is missing; restore it from a copy."
            ) from None
        if found != self.file.bytes:
            raise Damaged(f"{self.path}: {found} bytes, but {self.file.bytes} were committed; restore it from a copy.")


@dataclass(frozen=True)
class Contents:
    """The commits of a run, read once."""

    commits: list[Commit]
    """Of every part that counts, in order of split, step, attempt and writer."""
    broken: list[tuple[Part, RolltapeError]]
    """Those that cannot be read, and why."""
    rewrites: list[Rewrite]
    """Those that count."""
    moved: Mapping[Part, Held]
    """Parts whose rows lie in a rewritten file."""
    replaced: frozenset[tuple[str, str]]
    """(split, stem) of files that no longer count."""
    listed: frozenset[Part]
    """Names of all rewrites that were there."""

    @property
    def dropped(self) -> list[Dropped]:
        """Parts whose rows were dropped."""
        return [d for rewrite in self.rewrites for d in rewrite.dropped]


def read_contents(paths: RunPaths) -> Contents:
    """Read the commits of a run: a listing, and one small read a commit that counts. Raises Unreachable."""
    for _ in range(3):
        with uncollected():
            contents, vanished = _read_contents(paths)
        if not vanished:
            break  # else files were pruned between the listing and now: a new listing shows what stands for them
    return contents


def _read_contents(paths: RunPaths) -> tuple[Contents, bool]:
    """The commits, and whether some that were listed were gone when they were read."""
    remote = isinstance(paths.root, StorePath)
    files = {part: file for file in listed(paths.commits, "*/*.json") if (part := part_of(file)) is not None}
    found = list(each(_read, [f for p, f in files.items() if p.last_step is not None], remote))
    all_rewrites = [f for f in found if isinstance(f, Rewrite)]
    replaced = frozenset((r.part.split, stem) for r in all_rewrites for stem in r.replaces)
    rewrites = [r for r in all_rewrites if (r.part.split, r.part.stem) not in replaced]
    commits, moved = _moved(paths, rewrites)
    left = (f for p, f in files.items() if p.last_step is None and (p.split, p.stem) not in replaced)
    found += each(_read, left, remote)
    commits += [f for f in found if isinstance(f, Commit) and f.part not in moved]
    broken = [f for f in found if isinstance(f, tuple)]
    names = frozenset(p for p in files if p.last_step is not None)
    contents = Contents(sorted(commits, key=lambda c: c.part), broken, rewrites, moved, replaced, names)
    return contents, None in found


def rewrites_in(paths: RunPaths, split: str) -> set[Part]:
    """Names of the rewrites of a split that are there now."""
    found = map(part_of, listed(paths.commits / split, "*.rewrite-*.json"))
    return {part for part in found if part is not None and part.last_step is not None}


def _moved(paths: RunPaths, rewrites: Iterable[Rewrite]) -> tuple[list[Commit], dict[Part, Held]]:
    """The parts that lie in rewritten files. Where two hold one part, as two machines may have made them, the first does."""
    commits: list[Commit] = []
    held: dict[Part, Held] = {}
    for rewrite in rewrites:
        for part in rewrite.moved:
            if rewrite.file is not None and part.commit.part not in held:
                held[part.commit.part] = Held(paths.parquet(rewrite.part), rewrite.file, part.row_groups, part.pruned)
                commits.append(part.commit)
    return commits, held


def _read(file: AnyPath) -> Commit | Rewrite | tuple[Part, RolltapeError] | None:
    """The commit in a file, or the part it belongs to and why it cannot be read; None where the file is gone."""
    part = part_of(file)
    assert part is not None
    try:
        commit = Commit.read(file) if part.last_step is None else Rewrite.read(file)
        if commit.part != part:
            raise Damaged(f"{file}: its content says it is {commit.part}; it was renamed or copied.")
    except Unreachable:
        raise
    except FileNotFoundError:
        return None
    except RolltapeError as error:
        return part, error
    except (OSError, TypeError, KeyError) as error:
        return part, Damaged(f"{file}: no readable commit ({error}); restore it from a copy.")
    return commit
