"""What a re-scoring is asked for, and what of it can be refused before Verifiers is loaded, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rolltape.record.config import read_config
from rolltape.replay.chosen import chosen_splits
from rolltape.replay.printing.words import of_steps
from rolltape.replay.run import Run, open_run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, RunConflict
from rolltape.schema.storage import AnyPath, place


@dataclass(frozen=True, kw_only=True)
class RescoreOptions:
    """How to re-score."""

    keep: bool = False
    """Keep the recorded scores of signals that cannot be scored offline, instead of null."""
    concurrency: int = 64
    """Traces that are scored, and in memory, at once; a group is never split."""
    steps: tuple[int, ...] = ()
    """Only these steps; empty takes all."""
    split: str | None = None
    """Only this split."""
    resume: bool = False
    """Go on with a re-scoring that was cut short."""
    strict: bool = False
    """Stop at the first trace that cannot be scored, and refuse a Task class of another name."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise BadInput(f"concurrency is {self.concurrency}; expected 1 or more.")


def look_first(source: str | AnyPath, config: str | Path, out: str | AnyPath, options: RescoreOptions) -> None:
    """Raise what can be said of the run, the config's file and `out` without Verifiers."""
    run = open_run(source)
    chosen(run, options)
    read_config(config)
    refuse_out(run, out, options)


def chosen(run: Run, options: RescoreOptions) -> list[Commit]:
    """The newest commits of the steps that are asked for. Raises BadInput where there is none, or no such split."""
    splits = run.splits() if options.split is None else chosen_splits(run, [options.split])
    found = [c for split in splits for c in run.commits(split)]
    chosen = [c for c in found if not options.steps or c.part.step in options.steps]
    missing = sorted(set(options.steps) - {c.part.step for c in chosen})
    if missing or not chosen:
        what = f"step {missing[0]}" if missing else "a committed step"
        where = "" if options.split is None else f" of split {options.split!r}"
        have = sorted({c.part.step for c in found})
        known = f"recorded: {of_steps(have)}" if have else "none is committed"
        raise BadInput(f"{run.paths.root} holds no {what.removeprefix('a ')}{where} to re-score; {known}.")
    return chosen


def refuse_out(run: Run, out: str | AnyPath, options: RescoreOptions) -> None:
    """Raise where the new run cannot lie at `out`: BadInput for the run itself, or a place inside it, or a file;
    RunConflict for another run, or a re-scoring that is not to be resumed."""
    root = place(out)
    if isinstance(root, Path):
        if root.exists() and not root.is_dir():
            raise BadInput(f"--out {out} is a file; a re-scored run is a folder, choose another one.")
        if isinstance(run.paths.root, Path) and run.paths.root.resolve() in root.resolve().parents:
            raise BadInput(f"--out {out} lies inside of the run {run.paths.root}; choose a folder of its own.")
    if not (root / "run.json").exists():
        return
    there = open_run(root)
    if there.run_id == run.run_id:
        raise BadInput(f"--out {out} is the run itself; a re-scored run is a new one, choose another folder.")
    if there.info.get("rescored_from") != run.run_id:
        raise RunConflict(f"{out} holds a run that is no re-scoring of {run.paths.root}; choose a new folder.")
    if not options.resume:
        raise RunConflict(
            f"{out} holds a re-scoring of {run.paths.root} already; choose a new folder, or go on with it by --resume."
        )
