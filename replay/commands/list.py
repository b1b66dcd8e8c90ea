"""`rolltape list`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.text import Text

from rolltape.replay.listing.runs import Listed, Listing, list_runs
from rolltape.replay.printing.console import out, print_json, progress, table
from rolltape.replay.printing.fitting import left_out, no_room
from rolltape.replay.printing.words import MISSING, count, decimal, end_of, moment, size

_STYLES = {
    "complete": "green",
    "settled": "green",
    "being written": "cyan",
    "unfinished": "yellow",
    "needs recover": "yellow",
}


def list_command(
    folder: Annotated[str, typer.Argument(help="Folder or URL to look in, also below.")] = ".",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the runs below a folder, the newest first.

    The reward is the mean of the first and of the last step, as `rolltape stats`
    has it; of a run that holds evaluations only, of its first and its last one,
    where all are of one name. Traces and tokens are those of the newest attempt
    of each step. All that is read is what run.json and the commits say; of runs
    of earlier versions also the rewards of those two steps.

    A run is `complete` where it has all steps that it was started for, and
    `unfinished` where it has fewer (`8 of 40`), or where its last one was cut
    short. Of one that says no number, as an import, it is known only that
    everything recorded is committed: it is `settled`. `none ended`: every try
    failed, was cancelled or got lost. It is `being written` as long as a writer
    is at work, and `needs recover` where one died and left a journal. `damaged`:
    bytes are wrong or gone.

        rolltape list runs

    Exit code: 0 listed, 2 no such folder or bucket.
    """
    with progress("reading, runs") as tell:
        found = list_runs(folder, lambda n: tell(n))
    if as_json:
        print_json({"runs": [r.to_dict() for r in found.runs], "unreadable": found.unreadable})
    else:
        show(found, folder)


def show(found: Listing, folder: str) -> None:
    """Print a listing as a table, and what is wrong below it."""
    if found.runs:
        _table(found.runs)
    else:
        _say(f"No recorded run in {folder} or below; `rolltape demo` records one to look at.")
    for run in found.runs:
        if run.why:
            _say(f"{run.name}: {run.why}")
    for line in found.unreadable:
        _say(f"not looked into: {line}")


def _table(runs: Sequence[Listed]) -> None:
    """One line a run. A model or taskset that all of them have is said once; a narrow terminal has no room for either."""
    common = {name: value for name in _LONG if (value := _common(runs, name)) is not None}
    narrow = [n for n in _LONG if n not in common] if out.width < _WIDE else []
    evaluated = any((r.evaluations or r.evaluations_asked) and not _only_evaluates(r) for r in runs)
    hidden = {*common, *narrow, *(() if evaluated else ("evals",))}
    columns = {name: [cell(run) for run in runs] for name, cell in _COLUMNS.items() if name not in hidden}
    gone = [*narrow, *left_out(columns, out.width, _SPARE, {"run": 16, **dict.fromkeys(_LONG, 8)})]
    if common:
        _say(", ".join(f"{name} {value}" for name, value in common.items()) + "\n")
    rows = list(zip(*columns.values(), strict=True))
    out.print(table("", list(columns), rows, _RIGHT, cut=_LONG, fold=("run",), dense=True))
    if gone:
        _say(f"\n{no_room(gone)}")


def _common(runs: Sequence[Listed], name: str) -> str | None:
    """The model or taskset that all of several runs have."""
    values = {getattr(run, name) for run in runs} if name in ("model", "taskset") and len(runs) > 1 else set()
    return str(values.pop()) if len(values) == 1 and None not in values else None


def _of(have: int, asked: int | None) -> str:
    return count(have) if asked is None or have >= asked else f"{count(have)} of {count(asked)}"


def _only_evaluates(run: Listed) -> bool:
    return bool(run.evaluations or run.evaluations_asked) and not (run.steps or run.steps_asked)


def _steps(run: Listed) -> str:
    """Training steps; of a run without, its evaluations."""
    if not _only_evaluates(run):
        return _of(run.steps, run.steps_asked)
    evaluations = _of(run.evaluations, run.evaluations_asked)
    return f"{evaluations} eval{'s' * (evaluations != '1')}"


def _reward(run: Listed) -> str:
    first, last = (decimal(r, 2) for r in run.ends)
    return f"{first}→{last}" if (run.steps or run.evaluations) > 1 and first != MISSING else first


_COLUMNS: dict[str, Callable[[Listed], object]] = {
    "began": lambda run: moment(run.started_at),
    "state": lambda run: Text(run.state, _STYLES.get(run.state, "red")),
    "steps": _steps,
    "evals": lambda run: "" if _only_evaluates(run) else _of(run.evaluations, run.evaluations_asked),
    "traces": lambda run: count(run.traces),
    "tokens": lambda run: count(run.tokens),
    "size": lambda run: size(run.bytes),
    "reward": _reward,
    "model": lambda run: end_of((run.model or MISSING).rsplit("/", 1)[-1], 16),
    "taskset": lambda run: end_of((run.taskset or MISSING).rsplit("/", 1)[-1], 16),
    "run": lambda run: run.name,
}
_RIGHT = ("steps", "evals", "traces", "tokens", "size", "reward")
_LONG = ("model", "taskset")
_SPARE = ("size", "evals", "tokens", "began")
"""Columns that are left out first where there is no room."""
_WIDE = 100
"""Columns of a terminal from which on there is room for what is long."""


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)
