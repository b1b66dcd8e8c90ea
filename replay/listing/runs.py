"""The runs below a folder, each summed up from its run.json and its commits; rows are read only where those hold no scores."""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rolltape.replay.listing.steps import asked_steps, cut_short, none_ended, scores_of
from rolltape.replay.means import mean_of
from rolltape.replay.printing.words import counted
from rolltape.replay.rollouts import Rollouts, concat
from rolltape.replay.run import Run, open_run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import RolltapeError, RunNotFound, Unreachable, UnsupportedVersion
from rolltape.schema.records import RewardSum, exact_sum
from rolltape.schema.storage import AnyPath, StorePath, each, place, sizes

State = Literal[
    "complete",
    "unfinished",
    "settled",
    "none ended",
    "being written",
    "needs recover",
    "damaged",
    "newer version",
]
"""All steps that were asked for are committed, or fewer, or the last was cut short; everything is that was recorded, and how
much was asked for is not known; no rollout came to its end; a writer is at work; one died and left a journal; bytes are
wrong or gone."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One run, counted over the newest attempt of each step; `bytes` is everything that is committed."""

    path: AnyPath
    name: str
    """The path below the folder that was searched; of that folder itself its name."""
    state: State
    why: str | None = None
    """What is damaged or left, or that nothing ended well."""
    run: str | None = None
    model: str | None = None
    taskset: str | None = None
    started_at: float | None = None
    committed_at: float | None = None
    """Time of the last commit."""
    steps: int = 0
    steps_asked: int | None = None
    """Steps that there are once all is recorded that the newest attempt was started for; None where none says it."""
    evaluations: int = 0
    evaluations_asked: int | None = None
    traces: int = 0
    tokens: int | None = 0
    """None where a commit does not say."""
    bytes: int = 0
    ends: tuple[float | None, float | None] = (None, None)
    """Mean reward of the first and of the last training step that has one (see `mean_reward`); of a run without training
    steps, of its evaluations where all are of one name."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        first, last = self.ends
        rest = {k: v for k, v in self.__dict__.items() if k != "ends"}
        return {**rest, "path": str(self.path), "reward_first": first, "reward_last": last}


@dataclass(frozen=True)
class Listing:
    """What was found below a folder."""

    runs: list[Listed]
    """The newest first."""
    unreadable: list[str]
    """Folders that could not be looked into, and why."""


def list_runs(folder: str | AnyPath = ".", told: Callable[[int], None] | None = None) -> Listing:
    """Every run at or below `folder`, newest first. Raises RunNotFound where there is no such folder.

    Folders with a leading dot are not searched, nor those below a run. `told` is called with the number of runs read.
    """
    root = place(folder)
    unreadable: list[str] = []
    runs = []
    for path in runs_in_store(root) if isinstance(root, StorePath) else _in_folder(root, unreadable):
        runs.append(look_at(path, _below(root, path)))
        if told is not None:
            told(len(runs))
    return Listing(sorted(runs, key=lambda r: (-(r.started_at or 0.0), r.name)), unreadable)


def _below(root: AnyPath, path: AnyPath) -> str:
    """The name of a run that was found below `root`."""
    if isinstance(path, Path) and isinstance(root, Path):
        return str(path.relative_to(root)) if path != root else path.resolve().name or "/"
    return str(path).removeprefix(str(root)).strip("/") or str(root).rstrip("/").rpartition("/")[2]


def runs_in_store(root: StorePath) -> Iterator[StorePath]:
    """Prefixes at or below `root` with a run.json, level by level: what lies below a run, which is most, is not listed.

    Raises RunNotFound where nothing lies below `root`, Unreachable where the store does not answer.
    """
    level = [root]
    while level:
        found = list(zip(level, each(StorePath.folders, level, remote=True), strict=True))
        if level == [root] and found[0][1] == ([], []):
            raise RunNotFound(root.missing_bucket or f"{root}: no object lies there or below.")
        yield from (place_ for place_, (_, names) in found if "run.json" in names)
        level = [f for _, (below, names) in found if "run.json" not in names for f in below if f.name[:1] != "."]


def _in_folder(root: Path, unreadable: list[str]) -> Iterator[AnyPath]:
    """Folders with a run.json. Links are followed, each folder once."""
    if not root.is_dir():
        what = "is a file; expected a folder to look for runs in" if root.exists() else "does not exist"
        raise RunNotFound(f"{root} {what}.")
    seen: set[str] = set()

    def cannot(error: OSError) -> None:
        unreadable.append(f"{error.filename}: {error.strerror}")

    for here, folders, files in os.walk(root, followlinks=True, onerror=cannot):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if "run.json" in files:
            folders.clear()
            yield Path(here)
        folders[:] = sorted(f for f in folders if not f.startswith("."))


def look_at(path: AnyPath, name: str) -> Listed:
    """The run at `path`; one that cannot be opened is `damaged`, with the reason."""
    try:
        run = open_run(path)
        commits = run.all_commits
    except UnsupportedVersion as error:
        return Listed(path=path, name=name, state="newer version", why=str(error))
    except Unreachable:
        raise
    except (RolltapeError, OSError) as error:
        return Listed(path=path, name=name, state="damaged", why=str(error))
    parts = run.newest({c.part for c in commits} | {p for p, _ in run.broken})
    newest = [c for c in commits if c.part in parts]
    steps, evaluations = ({(p.split, p.step) for p in parts if (p.split == "train") == t} for t in (True, False))
    asked, asked_evaluations = (asked_steps(run, parts, training=training) for training in (True, False))
    state, why = _state(run)
    if state == "settled" and (asked, asked_evaluations) != (None, None):
        whole = len(steps) >= (asked or 0) and len(evaluations) >= (asked_evaluations or 0)
        why = cut_short(run, newest) if whole else None
        state = "complete" if whole and not why else "unfinished"
    if (why is None or state == "unfinished") and (tries := none_ended(newest)):
        why = f"none of {counted(tries, 'try', 'tries')} ended well; `rolltape stats {run.paths.root}` says why."
        state = state if state == "being written" else "none ended"
    info = run.info
    return Listed(
        path=path,
        name=name,
        state=state,
        why=why,
        run=run.run_id,
        model=_text(info.get("model")),
        taskset=_text(info.get("taskset")),
        started_at=_seconds(info.get("created_at")),
        committed_at=max((c.written_at for c in commits if c.written_at is not None), default=None),
        steps=len(steps),
        steps_asked=asked,
        evaluations=len(evaluations),
        evaluations_asked=asked_evaluations,
        traces=sum(c.file.rows for c in newest),
        tokens=_tokens(newest),
        bytes=sum({held.path: held.file.bytes for held in map(run.held, commits)}.values()),
        ends=_ends(run, newest),
    )


def _tokens(commits: Sequence[Commit]) -> int | None:
    told = [c.sums.get("tokens") for c in commits]
    return sum(n for n in told if n is not None) if None not in told else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _state(run: Run) -> tuple[State, str | None]:
    """How the run stands, and what there is to say about it."""
    faults = [str(error) for _, error in run.broken] + list(_missing(run))
    if faults:
        more = f" ({len(faults) - 1} more files)" if len(faults) > 1 else ""
        return "damaged", faults[0] + more
    journals = sizes(run.paths.journals, "*.journal")
    if any(is_locked(j) for j in journals):
        return "being written", None
    left = [j for j, n in journals.items() if n]
    if left:
        return (
            "needs recover",
            f"{left[0]} holds what is not committed; `rolltape recover {run.paths.root}` commits it.",
        )
    return "settled", None


def _missing(run: Run) -> Iterator[str]:
    """Committed files that are not there, or not as long as they were."""
    there = sizes(run.paths.traces, "*/*.parquet")
    for path, file in {held.path: held.file for held in map(run.held, run.all_commits)}.items():
        found = there.get(path)
        if found != file.bytes:
            what = "is missing" if found is None else f"has {found:,} bytes"
            yield f"{path} {what}, but {file.bytes:,} were committed; restore it from a copy."


def is_locked(journal: AnyPath) -> bool:
    """Whether a writer holds its journal: it locks the file for as long as it lives.

    Also False where there are no locks.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _ends(run: Run, commits: Sequence[Commit]) -> tuple[float | None, float | None]:
    """Mean reward of the first and of the last step that has one: of training, else of the only evaluation."""
    splits = {commit.part.split for commit in commits}
    split = "train" if "train" in splits or len(splits) != 1 else splits.pop()
    steps: defaultdict[int, list[Commit]] = defaultdict(list)
    for commit in commits:
        if commit.part.split == split:
            steps[commit.part.step].append(commit)
    in_order = [parts for _, parts in sorted(steps.items())]
    return _first_mean(run, in_order), _first_mean(run, reversed(in_order))


def _first_mean(run: Run, steps: Iterable[Sequence[Commit]]) -> float | None:
    try:
        return next((mean for parts in steps if (mean := mean_reward(run, parts)) is not None), None)
    except Unreachable:
        raise
    except (RolltapeError, OSError):  # a damaged file, which the state names
        return None


def mean_reward(run: Run, parts: Sequence[Commit]) -> float | None:
    """Mean reward of a step, over the rollouts that came to their end and were scored: the number that `stats` gives.

    The scores in its commits tell it. Of earlier commits, which have none, the sums in the group records do where each rollout
    came to its end and was scored; else the columns it takes are read. None where nothing was scored. Raises Damaged where a
    file does not read back.
    """
    told = [scores_of(commit, _COLUMNS) for commit in parts]
    known = [table for table in told if table is not None]
    if len(known) == len(told):
        return _mean(known)
    groups = [group for commit in parts for group in commit.groups]
    if all(map(_all_ended, parts)) and all(g.rewards and all(map(_is_sum, g.rewards.values())) for g in groups):
        traces = sum(len(g.trace_ids) for g in groups)
        return exact_sum([r.sum or 0.0 for g in groups for r in g.rewards.values()]) / traces if traces else None
    if not any(g.rewards for g in groups) and groups:
        return None
    return _mean(table for commit in parts for table in run.part_batches(commit, _COLUMNS))


def _mean(tables: Iterable[pa.Table]) -> float | None:
    rollouts = Rollouts(concat(tables, _COLUMNS))
    values = rollouts.reward.of(rollouts.sound)
    finite = values[np.isfinite(values)]
    return mean_of(finite) if len(finite) else None


_COLUMNS = ("reward", "error_types", "disposition")


def _all_ended(commit: Commit) -> bool:
    """Whether the commit says that every row is a rollout of a group that came to its end."""
    counts = commit.step.counts
    bad = any(counts.get(name) for name in ("error", "retried", "cancelled", "lost"))
    return bool(counts) and not bad and sum(len(g.trace_ids) for g in commit.groups) == commit.file.rows


def _is_sum(reward: RewardSum) -> bool:
    return reward.sum is not None and math.isfinite(reward.sum)
