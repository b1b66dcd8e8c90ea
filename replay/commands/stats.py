"""`rolltape stats`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from rolltape.replay.chosen import chosen_splits
from rolltape.replay.listing.runs import is_locked
from rolltape.replay.printing.console import err, out, print_json, printable, progress
from rolltape.replay.printing.stats import heading, render
from rolltape.replay.printing.words import counted, duration, shortened, size
from rolltape.replay.rollouts import PassRule
from rolltape.replay.run import Run, open_run
from rolltape.replay.stats import Stats, stats
from rolltape.schema.errors import BadInput, RunNotFound
from rolltape.schema.storage import AnyPath, listed

SECONDS = 2.0
"""Pause between two looks at a run that is followed."""
_ROWS = 20
"""Lines of a table where standard output is no terminal."""
_REST = 26
"""Lines of a terminal that everything but the table of steps takes."""


def stats_command(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    step: Annotated[list[int] | None, typer.Option(help="Only this step; repeatable.", show_default=False)] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Recorded split, by default train if there is one; repeatable.", show_default=False),
    ] = None,
    evaluations: Annotated[bool, typer.Option("--eval", help="Also the evaluations.")] = False,
    by: Annotated[Literal["step", "task"], typer.Option(help="A line a step, or a line a task.")] = "step",
    last: Annotated[int | None, typer.Option(min=1, help="Only the last N steps.", show_default=False)] = None,
    passed: Annotated[
        str, typer.Option("--pass", metavar="NAME[>=X]", help="Reward that counts as passed; without a name the total.")
    ] = ">=1",
    attempt: Annotated[
        int | None, typer.Option(help="This attempt instead of the newest of each step.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every step or task on a line of its own.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow a run that is being recorded, or will be, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, always every step or task.")] = False,
) -> None:
    """Say what was rewarded, how long, how often it failed, and what became of it.

    A long run is shown in stretches of steps, each counted over all of its
    rollouts; --all, --last and --step show single steps.

    pass@k is the mean over groups of 1 - C(n-c, k) / C(n, k), with c of n
    scored rollouts passed; groups with fewer than k are left out. `flat` counts
    groups whose scored rollouts all have the same total reward (as float32):
    they carry no signal. Means leave out what was not scored and what is no
    number, and say how many; nothing is taken for 0.

    Rewards, lengths, groups and `cut` are of rollouts, the last tries that came
    to their end. Of all tries are sampled tokens, tok/s, errors, lag and what
    became of them: in --json `tries`, `sampled`, `tokens_per_second`, `errors`,
    `versions`, `lag`, `coverage` and `dropped`.

        rolltape stats demo-run
        rolltape stats demo-run --by task --pass 'correct>=1'
        rolltape stats runs/first --watch

    Exit code: 0 shown, 2 not readable or bad usage.
    """
    if watch and as_json:
        raise BadInput("--watch shows tables; call `rolltape stats --json` again for new figures.")
    rule = PassRule.parse(passed)
    choice = {"steps": step or None, "rule": rule, "last": last, "attempt": attempt}
    if watch:
        with suppress(KeyboardInterrupt):
            _wait(run)
            _watch(_Asked(run, split or [], evaluations, by, everything, choice))
        return
    asked = _Asked(run, split or [], evaluations, by, everything, choice)
    with progress("reading, files") as tell:
        found = asked.look(tell)
    if as_json:
        body = [one.to_dict(tasks=by == "task") for one in found]
        print_json({"path": run, "run": asked.opened.run_id, "splits": body})
    else:
        out.print(asked.shown(found))


class _Asked:
    """What was asked for, and the run as it was when last looked at."""

    def __init__(
        self, path: str, splits: Sequence[str], evaluations: bool, by: str, everything: bool, choice: Mapping[str, Any]
    ) -> None:
        self.path, self.splits, self.evaluations = path, splits, evaluations
        self.by, self.everything, self.choice = by, everything, choice
        self.cache: dict[str, Any] = {}
        self.opened = open_run(path)

    def look(self, told: Callable[[int, int], None] | None = None) -> list[Stats]:
        """Statistics of each split as they are now; only files that are new are read."""
        self.opened = run = open_run(self.path)
        splits = chosen_splits(run, self.splits, self.evaluations)
        if not run.splits():
            splits = ["train"]  # nothing yet: which evaluations there will be is not known
        return [stats(run, split, progress=told, cache=self.cache, **self.choice) for split in splits]

    def shown(self, found: Sequence[Stats]) -> RenderableType:
        """The tables, as they fit the screen."""
        return Group(*(part for one in found for part in self._shown(one)))

    def _shown(self, one: Stats) -> Iterator[RenderableType]:
        rows = max(8, out.height - _REST) if out.is_terminal else _ROWS
        rows = len(one.rollouts.tasks) + len(one.steps) if self.everything else rows
        yield Text(printable(f"{self.path}  {heading(one)}\n"))
        yield render(one, width=out.width, rows=rows, by_task=self.by == "task")


# -- following a run


def _wait(path: str) -> None:
    """Until there is a run, which a trainer may make an hour after it was started."""
    said = False
    while True:
        try:
            open_run(path)
            return
        except RunNotFound as error:
            if Path(path).is_file():
                raise
            if not said:
                err.print(
                    f"{error} Waiting for it; Ctrl-C ends.", style="dim", markup=False, highlight=False, soft_wrap=True
                )
            said = True
        time.sleep(SECONDS)


def _watch(asked: _Asked) -> None:
    """Show the run again whenever something was committed."""
    if out.is_terminal:
        with Live(console=out, auto_refresh=False) as live:
            for shown, status in _frames(asked):
                live.update(_screen(shown, status), refresh=True)
    else:
        for shown, status in _frames(asked):
            out.print(Group(shown, status))


def _screen(shown: RenderableType, status: Text) -> RenderableType:
    """As much of a frame as the terminal has lines for, and how much is left out. The status is always there."""
    lines = out.render_lines(shown, pad=False)
    room = out.height - len(out.render_lines(status))
    if len(lines) <= room:
        return Group(shown, status)
    kept = [segment for line in lines[: room - 1] for segment in (*line, Segment.line())]
    left = f"… {counted(len(lines) - room + 1, 'line')} left out: in a taller terminal, or without --watch"
    return Group(Segments(kept), Text(shortened(left, out.width), style="dim"), status)


def _frames(asked: _Asked) -> Iterator[tuple[RenderableType, Text]]:
    """What to show: again whenever something was committed, and on a terminal also to say what is not committed yet."""
    seen: list[AnyPath] | None = None
    found: list[Stats] = []
    while True:
        commits = listed(asked.opened.paths.commits, "*/*.json")
        changed = commits != seen
        if changed:
            seen, found = commits, asked.look()
        if changed or out.is_terminal:
            yield asked.shown(found), Text(printable(_recording(_journals(asked.opened))))
        time.sleep(SECONDS)


def _journals(run: Run) -> list[tuple[Path, int, float]]:
    """(journal, bytes, time of its last change) of each journal."""
    found = []
    for path in sorted(run.paths.journals.glob("*.journal")):
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((path, status.st_size, status.st_mtime))
    return found


def _recording(journals: Sequence[tuple[Path, int, float]]) -> str:
    """Whether somebody records, and what is not committed yet."""
    alive = [j for j in journals if is_locked(j[0])]
    waiting = sum(j[1] for j in journals)
    if not alive:
        left = f"; a journal of {size(waiting)} is left: `rolltape recover`" if waiting else ""
        return f"\nnobody records{left}; Ctrl-C ends"
    age = max(0.0, time.time() - max(j[2] for j in alive))
    writers = f"{len(alive)} writers are" if len(alive) > 1 else "recording"
    return f"\n{writers}: {size(waiting)} not committed yet, the last of it {duration(age)} ago; Ctrl-C ends"
