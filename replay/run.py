"""Reading a recorded run: its commits, its rows, its records.

Only what a commit names is data. A file without one, whatever its name, is never read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.replay.contents import Contents, Held, read_contents, rewrites_in
from rolltape.replay.printing.words import counted
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged, OtherRun, RolltapeError, RunNotFound, Unreachable
from rolltape.schema.fields import ROW, check_version
from rolltape.schema.parquet import open_parquet, read_batches, refuse_text
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.records import Group, Step
from rolltape.schema.sealed import unseal
from rolltape.schema.storage import AnyPath, StorePath, each, listed, place

if TYPE_CHECKING:
    import duckdb

    from rolltape.replay.annotations import Annotation
    from rolltape.replay.sql.scores import ScoreColumn

FOOTERS = 16
"""Footers of files that hold many parts which are kept in memory, of up to a megabyte each."""


@dataclass(frozen=True)
class Attempt:
    """One start of the recording process."""

    number: int
    start_step: int
    """First step it records: older attempts' steps from there on are superseded."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    started_at: float | None = None


def open_run(path: str | AnyPath) -> Run:
    """Open a run for reading: its folder, or a URL such as `s3://bucket/run`.

    Costs a listing and one small read a commit. Raises RunNotFound where there is none, UnsupportedVersion where a newer
    rolltape wrote it, Unreachable where a store does not answer.
    """
    paths = RunPaths(place(path))
    try:
        info = unseal(paths.run.read_bytes(), paths.run)
    except FileNotFoundError:
        raise RunNotFound(_missing(paths.root)) from None
    except NotADirectoryError:
        raise RunNotFound(f"{paths.root} is a file; a run is a folder with a run.json in it.") from None
    except (Damaged, Unreachable):
        raise
    except OSError as error:
        raise Damaged(f"{paths.run}: cannot be read ({error.strerror}).") from error
    check_version(str(info.get("schema")), str(paths.run))
    _check_values(info, paths.run)
    return Run(RunPaths.of(paths.root, info["run"]), info)


def _check_values(info: Mapping[str, Any], path: AnyPath) -> None:
    """Raise Damaged where the run id is missing, or a value is of another type than it is written with."""
    if not isinstance(info.get("run"), str):
        raise Damaged(f"{path}: no run id in it; restore the file from a copy.")
    for names, kinds, expected in _VALUES:
        for name in names:
            value = info.get(name)
            if value is not None and (type(value) not in kinds or value in _ENDLESS or value != value):
                raise Damaged(f"{path}: {name} is {value!r:.80}; expected {expected}. Restore the file from a copy.")


_VALUES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("model", "tokenizer", "taskset", "rescored_from", "rescored_by"), (str,), "text or null"),
    (("imported",), (bool,), "true or false"),
    (("created_at",), (int, float), "a time, in seconds"),
)
"""Names in run.json with the types of their values, and how those are called."""
_ENDLESS = (math.inf, -math.inf)


def _missing(root: AnyPath) -> str:
    if isinstance(root, StorePath):
        said = f"{root} holds no run.json, so there is no recorded run; a run is what `rolltape record --run` wrote."
        return root.missing_bucket or said
    if not root.exists():
        return f"{root} does not exist; expected the folder of a recorded run. `rolltape demo` records one to look at."
    return f"{root} holds no run.json, so it is no recorded run; a run is what `rolltape record --run` wrote."


def _attempt(file: AnyPath) -> Attempt | None:
    try:
        data = unseal(file.read_bytes(), file)
        settings, versions, started = data.get("settings", {}), data.get("versions", {}), data.get("started_at")
        if not (isinstance(settings, dict) and isinstance(versions, dict)):
            return None
        return Attempt(int(data["attempt"]), int(data.get("start_step", 0)), settings, versions, started)
    except Unreachable:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def numbers_of(steps: int | Iterable[int] | None) -> set[int] | None:
    """The steps that are asked for; None where all are. Raises BadInput where something is no number of a step."""
    if steps is None:
        return None
    found = [steps] if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable) else list(steps)
    for step in found:
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise BadInput(
                f"steps: {step!r} is a {type(step).__qualname__}; expected the number of a step, such as 0, several in a "
                "list, or None for all."
            )
    return {int(step) for step in found}


@dataclass(frozen=True)
class Run:
    """A recorded run. Made by `open_run`; commits are read once, rows each time they are asked for."""

    paths: RunPaths
    info: Mapping[str, Any]

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.info["run"])

    @cached_property
    def contents(self) -> Contents:
        """The commits that count, and where the rows of each part lie."""
        return read_contents(self.paths)

    @property
    def all_commits(self) -> list[Commit]:
        """Every readable commit, of all attempts and splits, in order of split, step, attempt and writer."""
        return self.contents.commits

    @property
    def broken(self) -> list[tuple[Part, RolltapeError]]:
        """Commits that cannot be read, and why."""
        return self.contents.broken

    def held(self, commit: Commit) -> Held:
        """Where the rows of a part lie."""
        return self.contents.moved.get(commit.part) or Held(self.paths.parquet(commit.part), commit.file)

    @cached_property
    def attempts(self) -> dict[int, Attempt]:
        """Attempts by number. One whose file is missing or damaged is left out; `verify` names it."""
        result = {}
        for attempt in each(_attempt, listed(self.paths.attempts, "*.json"), isinstance(self.paths.root, StorePath)):
            if attempt is not None:
                result[attempt.number] = attempt
        return dict(sorted(result.items()))

    def commits(
        self, split: str = "train", steps: int | Iterable[int] | None = None, *, attempt: int | None = None
    ) -> list[Commit]:
        """Commits in order of step and writer: those of the newest attempt of each step, or of one attempt.

        `split`: `train`, or `eval` and `eval-<name>`; a run that has trained nothing has no commits of `train`. Raises Damaged
        where a commit among them cannot be read, and BadInput where a split, step or attempt that is asked for is not there.
        """
        wanted = numbers_of(steps)
        self._check_split(split)
        self._check_attempt(attempt)
        parts = [part for part in self._parts if part.split == split]
        mine = {p for p in parts if wanted is None or p.step in wanted}
        chosen = {p for p in mine if p.attempt == attempt} if attempt is not None else self.newest(mine)
        for part, error in self.broken:
            if part in chosen or (part.split == split and self._hides(part, wanted, attempt)):
                raise error
        missing = sorted((wanted or set()) - {p.step for p in chosen})
        if missing:
            for gone in self.contents.dropped:
                if gone.part.split == split and gone.part.step == missing[0] and attempt in (None, gone.part.attempt):
                    raise BadInput(
                        f"{self.paths.root}: step {missing[0]} of {split!r} was dropped by `rolltape prune`."
                    )
            have = sorted({p.step for p in parts})
            raise BadInput(
                f"{self.paths.root}: step {missing[0]} of {split!r} was not recorded; recorded are "
                + (f"{counted(len(have), 'step')} from {have[0]} to {have[-1]}." if have else "none.")
            )
        return [c for c in self.all_commits if c.part in chosen]

    def _check_split(self, split: str) -> None:
        """Raise BadInput where nothing of `split` was recorded; of `train` there may be nothing yet."""
        have = [*self.splits(), *sorted({gone.part.split for gone in self.contents.dropped} - set(self.splits()))]
        if split not in ("train", *have):
            raise BadInput(
                f"{self.paths.root}: no split {split!r} was recorded; recorded are "
                f"{', '.join(map(repr, have)) or 'no splits'}."
            )

    def _check_attempt(self, attempt: int | None) -> None:
        """Raise BadInput where there is no such attempt."""
        if attempt is not None and attempt not in self.attempt_numbers:
            have = ", ".join(map(str, self.attempt_numbers)) or "none"
            raise BadInput(f"{self.paths.root}: there is no attempt {attempt!r}; recorded are {have}.")

    @property
    def attempt_numbers(self) -> list[int]:
        """Numbers of all attempts, in order: those that say so, and those of which anything was committed."""
        dropped = (gone.part.attempt for gone in self.contents.dropped)
        return sorted(
            {*self.attempts, *(p.attempt for p in self._parts), *(p.attempt for p, _ in self.broken), *dropped}
        )

    @cached_property
    def _parts(self) -> list[Part]:
        """Every part that was committed, also where its commit cannot be read."""
        return [c.part for c in self.all_commits] + [p for p, _ in self.broken if p.last_step is None]

    def _hides(self, rewrite: Part, wanted: set[int] | None, attempt: int | None) -> bool:
        """Whether a rewrite that cannot be read may hold what is asked for."""
        if rewrite.last_step is None or attempt not in (None, rewrite.attempt):
            return False
        if attempt is None and self.superseded(rewrite):
            return False
        return wanted is None or any(rewrite.step <= step <= rewrite.last_step for step in wanted)

    def newest(self, parts: set[Part]) -> set[Part]:
        """Those of `parts` that belong to the newest attempt of their step."""
        newest: dict[tuple[str, int], int] = {}
        for p in parts:
            key = (p.split, p.step)
            newest[key] = max(p.attempt, newest.get(key, 0))
        return {p for p in parts if p.attempt == newest[p.split, p.step] and not self.superseded(p)}

    def superseded(self, part: Part) -> bool:
        """Whether a newer attempt began at or before the part's step."""
        begun = self._begun.get(part.split, {}) | {a.number: a.start_step for a in self.attempts.values()}
        return any(number > part.attempt and start <= part.step for number, start in begun.items())

    @cached_property
    def _begun(self) -> dict[str, dict[int, int]]:
        """By split and attempt the first step that was committed: stands in where an attempt's file cannot be read."""
        first: dict[str, dict[int, int]] = {}
        for part in self._parts:
            steps = first.setdefault(part.split, {})
            steps[part.attempt] = min(part.step, steps.get(part.attempt, part.step))
        return first

    def splits(self) -> list[str]:
        """Recorded splits, `train` first."""
        found = {p.split for p in self._parts} | {p.split for p, _ in self.broken}
        return sorted(found, key=lambda s: (s != "train", s))

    def batches(
        self,
        split: str = "train",
        steps: int | Iterable[int] | None = None,
        *,
        columns: Sequence[str] | None = None,
        attempt: int | None = None,
    ) -> Iterator[pa.Table]:
        """Rows, a table a row group (at most 128 MiB in memory), in order of step, writer and file. Verified.

        Raises what `commits` raises, and BadInput where `columns` names a column that is in no file.
        """
        commits = self.commits(split, steps, attempt=attempt)
        self._check_columns(columns, commits)
        for commit in commits:
            yield from self.part_batches(commit, columns)

    def _check_columns(self, columns: Sequence[str] | None, commits: Sequence[Commit]) -> None:
        """Raise BadInput where `columns` is a text, or names a column that neither the row record nor a file has."""
        refuse_text(columns)
        unknown = [name for name in columns or () if name not in ROW.by_name]
        if not unknown:
            return
        later = [c for c in commits if c.fingerprint != ROW.fingerprint]
        known = {*ROW.by_name, *(n for c in later for n in open_parquet(self.there(c).path).schema_arrow.names)}
        for name in unknown:
            if name not in known:
                have = ", ".join([*ROW.by_name, *sorted(known - ROW.by_name.keys())])
                raise BadInput(f"columns: there is no column {name!r}; there are {have}.")

    def part_batches(
        self, commit: Commit, columns: Sequence[str] | None = None, row_groups: Iterable[int] | None = None
    ) -> Iterator[pa.Table]:
        """Rows of one committed part, a table a row group: of all, or of those chosen by their place in it.

        Raises Damaged where its file is missing, or not the one that was committed, and OtherRun where it is another run's.
        """
        chosen = None if row_groups is None else list(row_groups)
        said = self._said_run(commit)
        names = columns if said or columns is None or "run" in columns else [*columns, "run"]
        try:
            found = self._open(self.there(commit), names, chosen)
        except FileNotFoundError:  # pruned in between: what stands for it is there
            found = self._open(self.there(commit), names, chosen)
        for table in found:
            if not said:
                self._refuse_other(table.column("run"), commit)
            yield table if names is columns else table.drop_columns("run")

    def _said_run(self, commit: Commit) -> bool:
        """Whether a commit repeats which run its rows are of. Raises OtherRun where that is another one."""
        try:
            self._refuse_other(commit.score("run"), commit)
        except (KeyError, ValueError):  # of an earlier version: the rows say it
            return False
        return True

    def _refuse_other(self, runs: pa.Array | pa.ChunkedArray, commit: Commit) -> None:
        """Raise OtherRun where `runs` of a part's rows name another run than this one. Both may name none."""
        mine = self.info.get("run")
        other = [name for name in pc.unique(runs).to_pylist() if name not in (None, mine)]
        if other and mine is not None:
            raise OtherRun(
                f"{self.held(commit).path}: its rows are of run {other[0]}, but {self.paths.run} says that this is run "
                f"{mine}; two runs are not mixed. Put the run's own file and commit there, or restore run.json from a "
                "copy."
            )

    def _open(self, held: Held, columns: Sequence[str] | None, chosen: list[int] | None) -> Iterator[pa.Table]:
        """Rows of a part. Raises FileNotFoundError before the first of them."""
        wanted: Iterable[int] | None = held.row_groups
        if chosen is not None:
            wanted = [i if held.row_groups is None else held.row_groups[i] for i in chosen]
        tables = read_batches(held.path, columns, wanted, self.footer(held))
        first = next(tables, None)
        return iter(()) if first is None else itertools.chain([first], tables)

    def there(self, commit: Commit) -> Held:
        """Where the rows of a part lie, which may have changed since the run was opened: then its file is gone.

        Raises Damaged where it is missing, or not as long as it was.
        """
        held = self.held(commit)
        try:
            held.check_size()
        except Damaged:
            there = rewrites_in(self.paths, commit.part.split)
            if there <= self.contents.listed:
                raise
            if not self._later or not there <= self._later[-1].contents.listed:
                self._later[:] = [Run(self.paths, self.info)]
            now = self._later[-1].held(commit)
            now.check_size()
            if set(now.pruned) > set(held.pruned):
                raise Damaged(f"{held.path}: columns of it were pruned meanwhile; open the run again.") from None
            return now
        return held

    def footer(self, held: Held) -> Any:
        """The footer of a file that holds many parts, for reading it takes longer than reading one; None of another."""
        if held.row_groups is None:
            return None
        found = self._footers.get(held.path)
        if found is None:
            while len(self._footers) >= FOOTERS:
                self._footers.pop(next(iter(self._footers)), None)
            found = self._footers[held.path] = open_parquet(held.path).metadata
        return found

    @cached_property
    def sound(self) -> set[AnyPath]:
        """Files whose bytes were compared with their sha256 and are those that were committed."""
        return set()

    @cached_property
    def scores(self) -> dict[str, ScoreColumn]:
        """Scores of parts that were asked for, by column: what `rolltape.replay.sql` keeps in memory."""
        return {}

    @cached_property
    def _later(self) -> list[Run]:
        """The run as it was last found, where files were rewritten and removed since it was opened."""
        return []

    @cached_property
    def _footers(self) -> dict[AnyPath, Any]:
        return {}

    def table(
        self,
        split: str = "train",
        steps: int | Iterable[int] | None = None,
        *,
        columns: Sequence[str] | None = None,
        attempt: int | None = None,
    ) -> pa.Table:
        """Rows as one table (several chunks, never joined): every column of the row record, or `columns`.

        Raises what `batches` raises.
        """
        tables = list(self.batches(split, steps, columns=columns, attempt=attempt)) or [ROW.arrow.empty_table()]
        found = pa.concat_tables(tables, promote_options="default")
        return found if columns is None else found.select([c for c in columns if c in found.column_names])

    def groups(
        self, split: str = "train", steps: int | Iterable[int] | None = None, *, attempt: int | None = None
    ) -> list[Group]:
        """Group records, in order of step, writer and group."""
        commits = self.commits(split, steps, attempt=attempt)
        return [g for c in commits for g in sorted(c.groups, key=lambda g: g.group_index)]

    def steps(
        self, split: str = "train", steps: int | Iterable[int] | None = None, *, attempt: int | None = None
    ) -> list[Step]:
        """Step records, in order of step and writer."""
        return [c.step for c in self.commits(split, steps, attempt=attempt)]

    def sql(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None, **selection: Any
    ) -> duckdb.DuckDBPyRelation:
        """Ask the run a question in SQL: a DuckDB relation over the views that `rolltape sql --schema` prints.

        `.fetchall()`, `.to_arrow_table()` and `.df()` fetch it. Training, newest attempts, unless told otherwise:
        `split`, `attempt`, `all_attempts`, `live` (see `rolltape.replay.sql.Selection`). Raises BadInput for what is no query.
        """
        from rolltape.replay.sql import sql

        return sql(self, query, parameters=parameters, **selection)

    def annotate(self, name: str, table: Any, *, overwrite: bool = False) -> Annotation:
        """Add columns to traces, nodes or tokens under a name of their own; SQL joins them as `annotation_<name>`.

        What `table` may be, and what is refused, is told at `rolltape.replay.annotations.annotate`.
        """
        from rolltape.replay.annotations import annotate

        return annotate(self, name, table, overwrite=overwrite)
