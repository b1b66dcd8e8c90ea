"""What pruning took away: which columns can go, how a run says so, and what is refused afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rolltape.replay.printing.words import counted, size
from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import ROW
from rolltape.schema.paths import part_of
from rolltape.schema.scores import SCORES
from rolltape.schema.storage import sizes

TOKENS = frozenset(f.name for f in ROW.fields if f.shape == "token")
"""Columns that hold a value a token."""


CONTENT = frozenset(ROW.arrow.names) - SCORES
"""Columns that say what a trace said: tokens, turns, messages, texts. The others are scores: who, what task, which rewards and
metrics, how long, how it ended."""


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as text: `0 to 3, 7`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in found)


def notes_of(run: Run) -> list[str]:
    """What can no longer be proved of a run, and what takes room without counting: sentences."""
    return [*_columns_gone(run), *_parts_gone(run), *_replaced_files(run)]


def _columns_gone(run: Run) -> Iterator[str]:
    for split in run.splits():
        steps: dict[str, list[int]] = {}
        for commit in run.all_commits:
            if commit.part.split == split and (pruned := run.held(commit).pruned):
                what = "everything but the scores" if frozenset(pruned) > TOKENS else "token ids, masks and log-probs"
                steps.setdefault(what, []).append(commit.part.step)
        for what, gone in steps.items():
            yield (
                f"{split}: {what} of {_steps(gone)} were pruned; that the rows are what the model sampled, and that they "
                "convert to the Samples that trained, can no longer be proved."
            )


def _parts_gone(run: Run) -> Iterator[str]:
    for split in sorted({d.part.split for d in run.contents.dropped}):
        gone = [d for d in run.contents.dropped if d.part.split == split]
        attempts = spans(d.part.attempt for d in gone)
        yield (
            f"{split}: {counted(len(gone), 'part')} that newer attempts took back, pruned ("
            f"{counted(sum(d.rows for d in gone), 'trace')} of "
            f"{_steps(d.part.step for d in gone)}, attempt {attempts}); nothing can be said of them any more."
        )


def _replaced_files(run: Run) -> Iterator[str]:
    if not run.contents.replaced:
        return
    found = [n for path, n in sizes(run.paths.traces, "*/*.parquet").items() if _is_replaced(run, part_of(path))]
    if found:
        yield (
            f"{counted(len(found), 'file')} ({size(sum(found))}) still there that were rewritten and do not count; `rolltape "
            f"prune {run.paths.root} --replaced` removes them."
        )


def _is_replaced(run: Run, part: object) -> bool:
    return part is not None and (getattr(part, "split", ""), getattr(part, "stem", "")) in run.contents.replaced


def _steps(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    return f"step{'' if len(set(numbers)) == 1 else 's'} {spans(numbers)}"


def refuse_pruned(run: Run, commits: Iterable[Commit]) -> None:
    """Raise BadInput where the tokens of a part were pruned: then there is nothing to convert."""
    for commit in commits:
        if not TOKENS.isdisjoint(run.held(commit).pruned):
            raise BadInput(
                f"{run.paths.root}: the tokens of step {commit.part.step} of {commit.part.split!r} were pruned, so it cannot "
                "be converted; its scores are still there (`rolltape stats`, `rolltape sql`)."
            )
