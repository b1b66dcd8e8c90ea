"""Removing what is no longer wanted: files that do not count, parts that were taken back, token columns, old steps' content.

Nothing is removed before what stands for it was written, read back and committed (see `rewrite`). Scores stay in every case but
for parts that a newer attempt recorded again. A process that is killed leaves a run that reads as before or as after; the
same wish once more finishes the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from rolltape.replay.housekeeping.compact import MOST_PARTS, TARGET
from rolltape.replay.housekeeping.pruned import CONTENT, TOKENS, spans
from rolltape.replay.housekeeping.rewrite import Task, Unit, alone, rewrite, units
from rolltape.replay.listing.runs import is_locked
from rolltape.replay.run import Run, open_run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged, RunConflict, Unreachable
from rolltape.schema.fields import ROW
from rolltape.schema.parquet import open_parquet
from rolltape.schema.paths import Part, part_of
from rolltape.schema.rewrites import Rewrite
from rolltape.schema.storage import AnyPath, StorePath, each, sha256_of, size_of, sizes

MOST_BYTES = 10 * TARGET
"""Bytes of the files that become one without the columns that are left out."""
OWNER = 300
"""Bytes that a journal without a trace may have: it may say whose it is."""
TAKEN_BACK = "recorded again by a newer attempt"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to go."""

    superseded: bool = False
    """Parts whose step a newer attempt has recorded again."""
    replaced: bool = False
    """Files that a compaction, or an earlier prune that was killed, has rewritten."""
    tokens: bool = False
    """Token ids, masks and log-probs: of all steps, or of those before `before`."""
    before: int | None = None
    """Alone: everything but the scores of steps before this one."""
    splits: tuple[str, ...] = ()
    """Splits whose tokens or content goes; empty for all."""

    @property
    def anything(self) -> bool:
        """Whether anything is to go."""
        return self.superseded or self.replaced or self.tokens or self.before is not None

    def columns(self, commit: Commit) -> frozenset[str]:
        """Columns of a part that are to go."""
        part = commit.part
        if (self.splits and part.split not in self.splits) or not (self.tokens or self.before is not None):
            return frozenset()
        if self.before is not None and part.step >= self.before:
            return frozenset()
        return TOKENS if self.tokens else CONTENT


@dataclass(frozen=True)
class Item:
    """One thing that goes, for people and JSON."""

    what: str
    files: int
    """Removed, or written anew."""
    bytes: int
    """Freed; of columns the compressed bytes that they take now."""
    rows: int | None = None
    option: Literal["superseded", "replaced", "columns"] = "columns"
    """What is wished for by it; `columns`: tokens, or all but the scores."""


@dataclass
class Plan:
    """What a wish means for a run."""

    items: list[Item] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """What stays although it was asked for, and why: sentences."""
    tasks: list[Task] = field(default_factory=list)
    """Rewrites to be made."""
    rewrites: list[Rewrite] = field(default_factory=list)
    """Those whose old files go."""
    strays: list[AnyPath] = field(default_factory=list)
    """Files that a rewrite left which was killed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"items": [dict(i.__dict__) for i in self.items], "kept": list(self.kept)}


def plan(run: Run, wish: Wish) -> Plan:
    """What `wish` means. Costs listings, and reading footers where columns go; writes nothing.

    Raises RunConflict where a journal holds what is not committed although its writer is dead, Damaged where a commit cannot
    be read or a newer recording of what goes is not there.
    """
    if run.broken:
        raise run.broken[0][1]
    return _Planning(run, wish).plan()


class _Planning:
    """One look at a run with a wish in mind."""

    def __init__(self, run: Run, wish: Wish) -> None:
        self.run, self.wish = run, wish
        self.result = Plan()
        self.there = all_files(run)
        self.newest = run.newest({c.part for c in run.all_commits})
        self.again = self._recorded_again() if wish.superseded else set()

    def plan(self) -> Plan:
        """What is to be done."""
        alive = self._living()
        self._old_files()
        dropping, rewriting = self._chosen(alive)
        for batch in _batches(dropping, bounded=False):
            gone = {c.part: TAKEN_BACK for unit in batch for c in unit.commits}
            self.result.tasks.append(Task(units=batch, dropped=gone))
        self.result.tasks += [self._task(batch) for batch in _batches(rewriting, bounded=True)]
        for task in self.result.tasks:
            self.result.items += self._items(task)
        return self.result

    def _living(self) -> set[int]:
        """Attempts that are being recorded."""
        alive = set()
        for journal, length in sizes(self.run.paths.journals, "*.journal").items():
            if is_locked(journal):
                alive.add(int(journal.name.split(".")[0]))
            elif length > OWNER:
                raise RunConflict(
                    f"{journal} holds what is not committed, and its writer is gone: call `rolltape recover "
                    f"{self.run.paths.root}` first."
                )
        if alive:
            self.result.kept.append(f"attempt {spans(alive)} is being recorded: its files are left alone.")
        return alive

    def _recorded_again(self) -> set[tuple[str, int]]:
        """(split, step) of superseded parts whose newer recording is there."""
        wanted = {(c.part.split, c.part.step) for c in self.run.all_commits if c.part not in self.newest}
        found = set()
        for commit in self.run.all_commits:
            place = commit.part.split, commit.part.step
            if commit.part in self.newest and place in wanted:
                self.run.held(commit).check_size()
                found.add(place)
        return found

    # -- files that do not count

    def _old_files(self) -> None:
        wish, result = self.wish, self.result
        for made in self.run.contents.rewrites:
            columns = wish.tokens or wish.before is not None
            mine = (made.dropped and wish.superseded) or (columns and any(m.pruned for m in made.moved))
            found = [p for p in files_behind(self.run, made) if p in self.there]
            if found and (wish.replaced or mine):
                result.rewrites.append(made)
                what = f"{_place(made.part)}: files of {_steps(_range(made.part))} that were rewritten"
                result.items.append(Item(what, len(found), sum(self.there[p] for p in found), option="replaced"))
        if wish.replaced:
            result.strays = [p for p in self.there if self._is_stray(p)]
        if result.strays:
            lost = sum(self.there[p] for p in result.strays)
            what = "what a compaction left that was killed"
            result.items.append(Item(what, len(result.strays), lost, option="replaced"))

    def _is_stray(self, path: AnyPath) -> bool:
        part = part_of(path)
        if path.suffix != ".parquet" or part is None or part.last_step is None:
            return False
        return self.run.paths.commit(part) not in self.there

    # -- rows and columns

    def _gone(self, commit: Commit) -> bool:
        """Whether the rows of a part go."""
        part = commit.part
        return self.wish.superseded and part not in self.newest and (part.split, part.step) in self.again

    def _lighter(self, commit: Commit) -> bool:
        """Whether a part loses columns."""
        return not self._gone(commit) and bool(self.wish.columns(commit) - set(self.run.held(commit).pruned))

    def _chosen(self, alive: set[int]) -> tuple[list[Unit], list[Unit]]:
        """Files whose rows all go, and files that are to be written anew."""
        mine = [unit for unit in units(self.run) if unit.first.attempt not in alive]
        touched = [u for u in mine if any(self._gone(c) or self._lighter(c) for c in u.commits)]
        dropping = [unit for unit in touched if all(map(self._gone, unit.commits))]
        rewriting = [unit for unit in touched if unit not in dropping]
        foreign = [unit for unit in rewriting if any(c.fingerprint != ROW.fingerprint for c in unit.commits)]
        if foreign:
            what = "is of another minor version of the schema and cannot be written anew here"
            self.result.kept += [f"{unit.path} {what}." for unit in foreign]
        waiting = [c.part.step for u in mine for c in u.commits if c.part not in self.newest and not self._gone(c)]
        if self.wish.superseded and waiting:
            self.result.kept.append(
                f"{_steps(waiting)} of older attempts: kept, for no newer attempt has recorded them again yet."
            )
        return dropping, [unit for unit in rewriting if unit not in foreign]

    def _task(self, batch: list[Unit]) -> Task:
        commits = [c for unit in batch for c in unit.commits]
        return Task(
            units=batch,
            dropped={c.part: TAKEN_BACK for c in commits if self._gone(c)},
            pruned={c.part: self.wish.columns(c) for c in commits if not self._gone(c) and self.wish.columns(c)},
        )

    # -- what people are told

    def _items(self, task: Task) -> Iterator[Item]:
        commits = {c.part: c for unit in task.units for c in unit.commits}
        where = _place(task.units[0].first)
        if task.dropped:
            gone = [commits[p] for p in task.dropped]
            what = f"{where}: {_steps(p.step for p in task.dropped)}, recorded again since"
            files = 0 if task.commits else len(task.units)
            freed, rows = sum(c.file.bytes for c in gone), sum(c.file.rows for c in gone)
            yield Item(what, files, freed, rows, option="superseded")
        if task.pruned:
            lighter = [c for p, c in commits.items() if p in task.pruned and self._lighter(c)]
            what = f"{where}: {_kind(task)} of {_steps(c.part.step for c in lighter)}"
            yield Item(what, len(task.units), self._weight(task), sum(c.file.rows for c in lighter))
        stems = {unit.stem for unit in task.units}
        behind = [
            made for made in self.run.contents.rewrites if made.part.stem in stems and made not in self.result.rewrites
        ]
        old = [p for made in behind for p in files_behind(self.run, made) if p in self.there]
        if old:
            what = f"{where}: files behind these that were rewritten"
            yield Item(what, len(old), sum(self.there[p] for p in old), option="replaced")

    def _weight(self, task: Task) -> int:
        """Compressed bytes of the columns that go."""
        total = 0
        remote = isinstance(self.run.paths.root, StorePath)
        for unit, footer in zip(task.units, each(_footer, [u.path for u in task.units], remote), strict=True):
            if footer is None:
                continue
            names = [footer.schema.column(i).path.split(".")[0] for i in range(footer.num_columns)]
            for commit in unit.commits:
                held, going = self.run.held(commit), task.pruned.get(commit.part, frozenset())
                for number in held.row_groups if held.row_groups is not None else range(footer.num_row_groups):
                    group = footer.row_group(number)
                    total += sum(group.column(i).total_compressed_size for i, name in enumerate(names) if name in going)
        return total


def _footer(path: AnyPath) -> Any:
    """The footer of a file; None of one that is damaged, which is told when it cannot be written anew."""
    try:
        return open_parquet(path).metadata
    except Damaged:
        return None


def all_files(run: Run) -> dict[AnyPath, int]:
    """Parquet and commit files of a run, with their bytes."""
    return {**sizes(run.paths.traces, "*/*.parquet"), **sizes(run.paths.commits, "*/*.json")}


def files_behind(run: Run, made: Rewrite) -> Iterator[AnyPath]:
    """The files that a rewrite stands for."""
    for stem in made.replaces:
        yield run.paths.traces / made.part.split / f"{stem}.parquet"
        yield run.paths.commits / made.part.split / f"{stem}.json"


def _batches(found: list[Unit], *, bounded: bool) -> Iterator[list[Unit]]:
    """Files of one split and attempt that are worked on together."""
    current: list[Unit] = []
    for unit in found:
        parts = sum(len(u.commits) for u in [*current, unit])
        full = bounded and (parts > MOST_PARTS or sum(u.file.bytes for u in [*current, unit]) > MOST_BYTES)
        other = current and (unit.first.split, unit.first.attempt) != (current[0].first.split, current[0].first.attempt)
        if current and (full or other):
            yield current
            current = []
        current.append(unit)
    if current:
        yield current


def _kind(task: Task) -> str:
    content = any(columns > TOKENS for columns in task.pruned.values())
    return "everything but the scores" if content else "token ids, masks and log-probs"


def _place(part: Part) -> str:
    return f"{part.split}, attempt {part.attempt}"


def _range(rewrite: Part) -> tuple[int, ...]:
    return tuple(range(rewrite.step, 1 + (rewrite.last_step or rewrite.step)))


def _steps(numbers: Iterable[int]) -> str:
    numbers = sorted(set(numbers))
    return f"step{'' if len(numbers) == 1 else 's'} {spans(numbers)}"


# -- doing it


@dataclass
class Pruned:
    """What was done."""

    plan: Plan
    bytes_before: int = 0
    """Of all Parquet and commit files of the run."""
    bytes_after: int = 0
    removed: int = 0
    """Files."""
    skipped: list[str] = field(default_factory=list)
    """Why something was left as it is, a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.plan.to_dict(), **{k: v for k, v in self.__dict__.items() if k != "plan"}}


def prune(run: Run, wish: Wish, told: Callable[[int, int], None] | None = None) -> Pruned:
    """Do what `plan` says. `told` is called with pieces of work done and in all.

    Raises BadInput where nothing is wished for, RunConflict as `plan`, and where another process rewrites files of the run.
    """
    if not wish.anything:
        raise BadInput("nothing was chosen: superseded parts, replaced files, tokens, or steps before one.")
    with alone(run):
        run = open_run(run.paths.root)
        found, there = plan(run, wish), all_files(run)
        result = Pruned(found, bytes_before=sum(there.values()))
        work: list[Rewrite | Task] = [*found.rewrites, *found.tasks]  # a task may rewrite what a rewrite made
        for number, each_ in enumerate(work):
            if told is not None:
                told(number, len(work))
            made = each_ if isinstance(each_, Rewrite) else _made(run, each_, result)
            if made is not None:
                _remove_behind(run, made, there, result)
        _remove(run, found.strays, result)
        result.bytes_after = sum(all_files(run).values())
    return result


def _made(run: Run, task: Task, result: Pruned) -> Rewrite | None:
    try:
        return rewrite(run, task)
    except Unreachable:
        raise
    except Damaged as error:
        result.skipped.append(str(error))
        return None


def _remove_behind(run: Run, made: Rewrite, there: dict[AnyPath, int], result: Pruned) -> None:
    """Remove the files that a rewrite stands for, once its own was seen to be whole."""
    if made.file is not None:
        path = run.paths.parquet(made.part)
        try:
            whole = size_of(path) == made.file.bytes and sha256_of(path) == made.file.sha256
        except FileNotFoundError:
            whole = False
        if not whole:
            result.skipped.append(f"{path} is not what was committed, so the files it stands for are kept.")
            return
    for ending in (
        ".parquet",
        ".json",
    ):  # rows first: a commit without its file tells of the loss, a file without it does not
        _remove(run, [p for p in files_behind(run, made) if p in there and p.suffix == ending], result)


def _remove(run: Run, paths: list[AnyPath], result: Pruned) -> None:
    remote = isinstance(run.paths.root, StorePath)
    result.removed += len(list(each(lambda path: path.unlink(missing_ok=True), paths, remote)))
