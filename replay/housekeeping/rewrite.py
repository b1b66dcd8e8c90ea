"""Rewriting files of a run: `compact` and `prune` say what is to lie where, this does it.

    check the sources' sha256 ─► write the new file ─► read it back and compare ─► put its commit ─► (prune) remove the sources

Until the commit is there nothing has changed, and from then on the sources do not count: a process that is killed between
any two of these leaves a run that reads as before or as after. What it leaves besides (a file without a commit, sources that
no longer count) is written over, or removed, when the work is begun again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.replay.contents import Held
from rolltape.replay.run import Run
from rolltape.schema.commits import Commit, unsealed
from rolltape.schema.errors import Damaged, RunConflict
from rolltape.schema.fields import SCHEMA_VERSION
from rolltape.schema.parquet import Written, open_parquet, put_once, read_batches, write_parquet
from rolltape.schema.paths import Part
from rolltape.schema.rewrites import Dropped, Moved, Rewrite, rewrite_part, row_groups_of
from rolltape.schema.storage import AnyPath, StorePath, sha256_of


@dataclass(frozen=True)
class Unit:
    """A file whose rows count, with the parts in it."""

    stem: str
    path: AnyPath
    file: Written
    commits: tuple[Commit, ...]

    @property
    def first(self) -> Part:
        """The first part in it, by which files are in order."""
        return self.commits[0].part


@dataclass(frozen=True, kw_only=True)
class Task:
    """One rewrite that is to be made."""

    units: Sequence[Unit]
    """Files that it stands for: of one split and attempt, in order."""
    pruned: Mapping[Part, frozenset[str]] = field(default_factory=dict)
    """Columns to leave out, by part; those that were left out before stay so."""
    dropped: Mapping[Part, str] = field(default_factory=dict)
    """Parts whose rows are dropped, and why."""

    @property
    def commits(self) -> list[Commit]:
        """The parts whose rows stay, in order."""
        found = (c for unit in self.units for c in unit.commits if c.part not in self.dropped)
        return sorted(found, key=lambda c: c.part)


def units(run: Run) -> list[Unit]:
    """Every file that counts, in order of split, attempt and first part."""
    files: dict[AnyPath, list[Commit]] = {}
    for commit in run.all_commits:
        files.setdefault(run.held(commit).path, []).append(commit)
    found = [Unit(path.stem, path, run.held(of[0]).file, tuple(of)) for path, of in files.items()]
    return sorted(found, key=lambda u: (u.first.split, u.first.attempt, u.first))


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Let one process of this machine at a time rewrite files of the run. Raises RunConflict where another does."""
    if isinstance(run.paths.root, StorePath):
        run.paths.here.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run.paths.here / "housekeeping", os.O_RDWR | os.O_CREAT, 0o644)
    else:
        descriptor = os.open(str(run.paths.root), os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunConflict(
                f"{run.paths.root} is being compacted or pruned at this moment; wait for its end."
            ) from None
        except OSError:  # a file system without locks; what two processes make of one part is read once all the same
            pass
        yield
    finally:
        os.close(descriptor)


def rewrite(run: Run, task: Task) -> Rewrite:
    """Make one rewrite and put its commit.

    Raises Damaged where a source is not what was committed, or the new file does not read back as the sources; then
    nothing has changed.
    """
    commits = task.commits
    replaced = _replaced(run, task.units)
    work = {
        "rows": [c.file.sha256 for c in commits],
        "pruned": {c.part.stem: sorted(_pruned(run, task, c)) for c in commits},
        "dropped": sorted(p.stem for p in task.dropped),
        "replaces": replaced,
    }
    part = rewrite_part([c.part for unit in task.units for c in unit.commits], work)
    path = run.paths.parquet(part)
    file: Written | None = None
    ranges: list[range] = []
    if commits:
        _check_sources(task)
        file = _write(path, lambda: _tables(run, task), lambda there: _compare(there, _tables(run, task)))
        lengths = _lengths(path)
        ranges = row_groups_of((c.file.rows for c in commits), lengths, path)
    made = Rewrite(
        part=part,
        file=file,
        moved=tuple(
            Moved(body, groups, tuple(sorted(_pruned(run, task, c))))
            for c, body, groups in zip(commits, _bodies(run, commits), ranges, strict=True)
        ),
        dropped=tuple(_dropped(run, task)),
        replaces=tuple(replaced),
        written_at=time.time(),
    )
    put_once(run.paths.commit(part), made.to_bytes())
    return made


def _replaced(run: Run, units: Sequence[Unit]) -> list[str]:
    """Stems of the files of `units`, and of what those stood for themselves."""
    stems = {unit.stem for unit in units}
    for made in run.contents.rewrites:
        if made.part.split == units[0].first.split and made.part.stem in stems:
            stems |= set(made.replaces)
    return sorted(stems)


def _dropped(run: Run, task: Task) -> Iterator[Dropped]:
    for unit in task.units:
        for commit in unit.commits:
            if commit.part in task.dropped:
                yield Dropped(commit.part, commit.file.rows, commit.file.bytes, task.dropped[commit.part])
    stems = {unit.stem for unit in task.units}
    for made in run.contents.rewrites:
        if made.part.stem in stems and made.part.split == task.units[0].first.split:
            yield from made.dropped


def _pruned(run: Run, task: Task, commit: Commit) -> frozenset[str]:
    return frozenset(run.held(commit).pruned) | task.pruned.get(commit.part, frozenset())


def _bodies(run: Run, commits: Sequence[Commit]) -> Iterator[Mapping[str, Any]]:
    """The commits as they were put: with what a later minor version may have added."""
    moved = {m.commit.part: m.body for made in run.contents.rewrites for m in made.moved}
    for commit in commits:
        yield moved.get(commit.part) or unsealed(run.paths.commit(commit.part), SCHEMA_VERSION)


def _check_sources(task: Task) -> None:
    for unit in task.units:
        Held(unit.path, unit.file).check_size()  # a pipe has none, and reading it would not end
        if sha256_of(unit.path) != unit.file.sha256:
            raise Damaged(f"{unit.path}: its bytes are not those that were committed; `rolltape verify` says more.")


def _tables(run: Run, task: Task) -> Iterator[pa.Table]:
    """The rows that stay, a table a row group, without the columns that are left out."""
    for commit in task.commits:
        left_out = _pruned(run, task, commit)
        for table in run.part_batches(commit):
            for name in left_out:
                i = table.schema.get_field_index(name)
                table = table.set_column(i, table.schema.field(i), pa.nulls(table.num_rows, table.schema.field(i).type))
            yield table


def _write(path: AnyPath, tables: Callable[[], Iterator[pa.Table]], check: Callable[[Path], None]) -> Written:
    """Write a file, read it back by `check`, and leave it only if that raises nothing."""
    if isinstance(path, StorePath):
        with path.staged() as file:
            written = write_parquet(file, tables())
            check(file)
            path.upload(file)
        return written
    written = write_parquet(path, tables())
    try:
        check(path)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    return written


def _lengths(path: AnyPath) -> list[int]:
    """Rows of each row group."""
    footer = open_parquet(path).metadata
    return [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]


# -- the same rows


def _compare(path: Path, sources: Iterator[pa.Table]) -> None:
    """Raise Damaged unless the file holds the rows of `sources`, bit for bit and in order."""
    written = read_batches(path)
    for source in sources:
        rows = 0
        while rows < source.num_rows:
            table = next(written, None)
            if table is None or not same_rows(table, source.slice(rows, table.num_rows)):
                raise Damaged(f"{path}: its rows do not read back as those they were made of; it is not used.")
            rows += table.num_rows
    if next(written, None) is not None:
        raise Damaged(f"{path}: more rows were written than there are; the file is not used.")


def same_rows(a: pa.Table, b: pa.Table) -> bool:
    """Whether two tables hold the same values in the same columns, floats bit for bit (NaN is NaN, -0.0 is not 0.0)."""
    if a.num_rows != b.num_rows or a.column_names != b.column_names:
        return False
    return all(_same(_joined(x), _joined(y)) for x, y in zip(a.columns, b.columns, strict=True))


def _joined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _same(a: pa.Array, b: pa.Array) -> bool:
    kind = a.type
    if kind != b.type or len(a) != len(b):
        return False
    if pa.types.is_floating(kind):
        whole = pa.int32() if kind.bit_width == 32 else pa.int64()
        return bool(a.view(whole).equals(b.view(whole)))
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return bool((_lengths_of(a) == _lengths_of(b)).all()) and all(map(_same, _inner(a), _inner(b)))
    return bool(a.equals(b))


def _lengths_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """Elements of each list, -1 where there is none."""
    lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return np.where(array.is_null().to_numpy(zero_copy_only=False), -1, lengths)


def _inner(array: pa.Array) -> list[pa.Array]:
    """The elements of lists, or keys and values of maps, one after the other. Lists that a file gave keep none where null."""
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    inner = [array.keys, array.items] if pa.types.is_map(array.type) else [array.values]
    return [values.slice(first, last - first) for values in inner]
