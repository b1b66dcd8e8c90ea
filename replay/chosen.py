"""Which part of a run a command is about: splits and steps."""

from __future__ import annotations

from collections.abc import Sequence

from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput


def chosen_commits(
    run: Run, splits: Sequence[str] = (), steps: Sequence[int] | None = None, evaluations: bool = False
) -> list[Commit]:
    """The newest commits of the chosen splits (`train` by default) and steps, in the run's order.

    `evaluations` adds every evaluation, of those steps where steps are chosen. Raises BadInput where a split or step was not
    recorded, or nothing is left.
    """
    recorded = run.splits()
    unknown = [s for s in splits if s not in recorded]
    if unknown:
        raise BadInput(f"{run.paths.root}: no split {unknown[0]!r} was recorded; recorded are {_listed(recorded)}.")
    named = list(dict.fromkeys(splits)) or ([] if evaluations and "train" not in recorded else ["train"])
    commits = [c for split in named for c in run.commits(split, steps or None)]
    for split in recorded if evaluations else ():
        if split.startswith("eval") and split not in named:
            commits += [c for c in run.commits(split) if not steps or c.part.step in steps]
    if not commits:
        others = f" Recorded are {_listed(recorded)}: choose with --split." if recorded else ""
        raise BadInput(f"{run.paths.root}: nothing was recorded in {_listed(named)}.{others}")
    return commits


def chosen_splits(run: Run, splits: Sequence[str] = (), evaluations: bool = False) -> list[str]:
    """The chosen splits, by default `train`, or whatever there is where nothing was trained; of an empty run `train`.

    `evaluations` adds every evaluation. Raises BadInput where a split was not recorded.
    """
    recorded = run.splits()
    unknown = [s for s in splits if s not in recorded]
    if unknown and recorded:
        raise BadInput(f"{run.paths.root}: no split {unknown[0]!r} was recorded; recorded are {_listed(recorded)}.")
    named = list(dict.fromkeys(splits)) or (["train"] if "train" in recorded or not recorded else recorded)
    return named + ([s for s in recorded if s.startswith("eval") and s not in named] if evaluations else [])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(n) for n in names) or "no splits"
