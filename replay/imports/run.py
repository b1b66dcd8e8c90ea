"""The run that is imported into: what it has, what becomes of it.

An import is an attempt of its own. Its steps follow those the run has; where traces belong to groups that the run has, they
begin at the first step with one of those, and the rows from there on are written once more, whole groups as before.
Everything is written before anything is committed, the last step first: whenever it is cut short, no trace that the run had
is hidden.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from rolltape.replay.imports.groups import GroupBy
from rolltape.replay.imports.lines import write_rows
from rolltape.replay.imports.sources import Source
from rolltape.replay.imports.steps import Members, Plan, into_steps
from rolltape.replay.run import Run, open_run
from rolltape.replay.whole import naming
from rolltape.schema.commits import Commit
from rolltape.schema.errors import RunConflict
from rolltape.schema.fields import SCHEMA_VERSION, TRACE
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.sealed import seal
from rolltape.schema.storage import AnyPath, StorePath, place

_OURS = {"traces", "commits", "attempts"}
_PREFIX = ".import-"
"""Of the folder for rows on their way."""


@contextmanager
def target_at(where: str | Path) -> Iterator[tuple[Target, Path]]:
    """The run to import into, and a folder for rows on their way, while no other import is at work there.

    Where the block raises, what it had written is removed again. Raises RunConflict where something else is there.
    """
    root = place(where)
    if isinstance(root, StorePath):
        with tempfile.TemporaryDirectory(prefix="rolltape-import-") as folder:
            yield Target(root), Path(folder)
        return
    if root.exists() and not root.is_dir():
        raise RunConflict(f"{root} is a file; choose a new folder for the imported run.")
    root.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(root):
            _remove_left_over(root)
            target = Target(root)
            with naming(root), tempfile.TemporaryDirectory(prefix=_PREFIX, dir=root) as folder:
                try:
                    yield target, Path(folder)
                except BaseException:
                    target.discard()
                    raise
    finally:
        for name in ("traces/train", "traces", "commits/train", "commits", "attempts", "."):
            with suppress(OSError):
                (root / name).resolve().rmdir()


def _remove_left_over(root: Path) -> None:
    """Remove what an import that was killed has left: its rows on their way, and where it was the run's first, its files.

    Files without a run are its own only where every one of them is of the first attempt of an import.
    """
    left = list(root.glob(f"{_PREFIX}*"))
    if left and not (root / "run.json").exists():
        files = [path for name in _OURS for path in (root / name).rglob("*") if path.is_file()]
        if all(".0.import." in path.name or path == root / "attempts" / "0.json" for path in files):
            for name in _OURS:
                shutil.rmtree(root / name, ignore_errors=True)
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    import fcntl

    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunConflict(f"{root}: another import is at work there; wait for its end.") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


class Target:
    """The run at a place: a new one, or one that was imported before. Raises RunConflict where something else is there."""

    def __init__(self, root: AnyPath) -> None:
        self.root = root
        self.run = _run_at(root)
        self.run_id = uuid.uuid4().hex if self.run is None else self.run.run_id
        self.paths = RunPaths.of(root, self.run_id)
        self.plans: list[Plan] = []
        """Steps that are being written, and are no part of the run yet."""
        self.staged: dict[Part, Path] = {}
        """Their commits, in files: the groups of all steps may be more than memory should hold."""
        self.put: set[AnyPath] = set()
        """Commits of theirs."""
        self.steps: dict[int, int] = {}
        """Step of each group that the run has, by its index."""
        self.keys: dict[bytes, int] = {}
        """Its index, by its key."""
        for commit in self.commits:
            keys = _keys(commit)
            self.steps.update((index, commit.part.step) for index in (*keys, *(g.group_index for g in commit.groups)))
            self.keys.update((key, index) for index, key in keys.items())
        self.next_index = max(self.steps, default=-1) + 1

    @cached_property
    def commits(self) -> list[Commit]:
        """What the run has, the newest of each step."""
        return [] if self.run is None else self.run.commits("train")

    @cached_property
    def known(self) -> frozenset[str]:
        """Ids of the traces that the run has."""
        if self.run is None:
            return frozenset()
        tables = (table for c in self.commits for table in self.run.part_batches(c, ["trace_id"]))
        return frozenset(trace for table in tables for trace in table.column(0).to_pylist())

    def index_of(self, key: bytes) -> int:
        """The index of a group: the run's own where it has the group, else the next."""
        if key in self.keys:
            return self.keys[key]
        self.next_index += 1
        return self.next_index - 1

    def has(self, index: int) -> bool:
        """Whether the run had this group before."""
        return index in self.steps

    # -- writing

    def plan(self, members: Mapping[bytes, Members], files: dict[int, Path], folder: Path) -> list[Plan]:
        """The steps to write for the new traces, which lie in `files`; rows to be written once more are put beside them."""
        new = {group.index: group for group in members.values()}
        touched = [self.steps[index] for index in new if index in self.steps]
        first = min(touched, default=max((c.part.step for c in self.commits), default=-1) + 1)
        groups = self._recorded_again(first, files, folder)
        for index, group in new.items():
            if index in groups:
                groups[index].extend(group)
            else:
                groups[index] = group
        steps = into_steps([groups[index] for index in sorted(groups)])
        attempt = self._attempt
        self.plans = [
            Plan(self.run_id, self.paths, Part("train", step, attempt, "import"), step_groups, files)
            for step, step_groups in enumerate(steps, first)
        ]
        return self.plans

    def _recorded_again(self, first: int, files: dict[int, Path], folder: Path) -> dict[int, Members]:
        """The groups that the run has from step `first` on, by index; their rows are put into files of their own."""
        groups: dict[int, Members] = {}
        for commit in (c for c in self.commits if c.part.step >= first):
            assert self.run is not None
            recorded = {g.group_index: g.expected_size for g in commit.groups}
            keys = _keys(commit)
            for table in self.run.part_batches(commit, TRACE.arrow.names):
                number = len(files)
                files[number] = folder / f"again-{number}.arrow"
                write_rows(files[number], table)
                size = table.nbytes // max(1, table.num_rows)
                columns = (table.column(name).to_pylist() for name in ("group_index", "num_tokens"))
                for row, (index, tokens) in enumerate(zip(*columns, strict=True)):
                    if index not in groups:
                        groups[index] = Members(index, keys.get(index, b""), trained=index in recorded)
                    groups[index].add(number, row, size, tokens, recorded.get(index, 0))
        return groups

    @cached_property
    def _attempt(self) -> int:
        """Number of the attempt that this import is."""
        if self.run is None:
            return 0
        return max((*self.run.attempts, *(c.part.attempt for c in self.run.all_commits)), default=-1) + 1

    def discard(self) -> None:
        """Remove what was written of an import that failed; a step that another import committed meanwhile stays."""
        for plan in self.plans:
            commit = self.paths.commit(plan.part)
            if commit in self.put or not commit.exists():
                for path in (commit, self.paths.parquet(plan.part)):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)

    def stage(self, commit: Commit, folder: Path) -> None:
        """Keep the commit of a step that was written for later."""
        self.staged[commit.part] = folder / f"commit-{commit.part.step}.json"
        self.staged[commit.part].write_bytes(commit.to_bytes())

    def commit(self, sources: Sequence[Source], by: GroupBy, model: str | None) -> None:
        """Make what was written part of the run. Raises RunConflict where another import has done so meanwhile.

        `model` is the one that sampled all traces, where it is one.
        """
        now = time.time()
        for plan in reversed(self.plans):
            path = self.paths.commit(plan.part)
            if not put_once(path, self.staged[plan.part].read_bytes()):
                raise RunConflict(f"{self.root}: another import wrote step {plan.part.step}; import once more.")
            self.put.add(path)
        attempt = {
            "attempt": self._attempt,
            "start_step": self.plans[0].part.step,
            "started_at": now,
            "settings": {"imported": [source.to_dict() for source in sources], "group_by": by},
            "versions": {},
        }
        put_once(self.paths.attempt(self._attempt), seal(attempt))
        self.plans = []
        if self.run is None:
            put_once(self.paths.run, seal(self._info(sources, model, now)))  # last: before it there is no run

    def _info(self, sources: Sequence[Source], model: str | None, now: float) -> dict[str, object]:
        tasksets = {source.taskset for source in sources}
        return {
            "run": self.run_id,
            "schema": ".".join(map(str, SCHEMA_VERSION)),
            "model": model,
            "tokenizer": None,
            "taskset": tasksets.pop() if len(tasksets) == 1 else None,
            "imported": True,
            "created_at": now,
        }


def _run_at(root: AnyPath) -> Run | None:
    """The imported run at `root`; None where nothing is there. Raises RunConflict where something else is."""
    names = {path.name for path in root.iterdir() if not path.name.startswith(_PREFIX)} if root.exists() else set()
    if "run.json" not in names:
        if names and names <= _OURS:
            raise RunConflict(f"{root} holds an import that was cut short, and no run; remove the folder first.")
        if names:
            raise RunConflict(f"{root} is not empty; choose a new folder for the imported run.")
        return None
    run = open_run(root)
    attempts = run.attempts.values()
    if not run.info.get("imported") and not (attempts and all("imported" in a.settings for a in attempts)):
        raise RunConflict(
            f"{root} is a recorded run, and only imported ones take more; choose a new folder for the imported run."
        )
    for _, error in run.broken:
        raise error
    return run


def _keys(commit: Commit) -> dict[int, bytes]:
    """The key of each group of a step by its index, where the import that wrote it said."""
    return {int(index): bytes.fromhex(key) for index, key in commit.sums.get("group_keys", {}).items()}
