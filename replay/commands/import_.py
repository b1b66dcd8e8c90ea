"""`rolltape import`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from rolltape.replay.imports.groups import GroupBy
from rolltape.replay.imports.importer import Imported, import_files
from rolltape.replay.imports.lines import IS_FAST
from rolltape.replay.printing.console import err, out, print_json, progress
from rolltape.replay.printing.words import counted
from rolltape.schema.errors import install

_MOST_SHOWN = 20
_LONG = 20.0
"""Seconds after which a faster way is worth a word."""


def import_command(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of Verifiers (traces.jsonl, also .zst and .gz), folders of evaluations, or '-'."),
    ],
    run: Annotated[
        str, typer.Option(help="Folder or URL of the run, a new one or an imported one.", show_default=False)
    ],
    group_by: Annotated[GroupBy, typer.Option(help="Which traces are one group.")] = "auto",
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Processes to read with; one a core, at most 8, for files of 256 MB and more.", show_default=False
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first line that holds no trace.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Bring traces that Verifiers wrote into a run: those of 0.2.0 to 0.4.0, without Verifiers.

    For example:

        rolltape import outputs/my-env/1f3a traces.jsonl.zst --run runs/imported

    [bold]--group-by[/bold] says which traces are one group: those of the group of an [bold]episode[/bold],
    of the task in one [bold]run[/bold], of the [bold]task[/bold] whatever the run. [bold]auto[/bold] asks for
    the Episode's group, else the task in one training step, else the task in one file.

    Importing again adds only what is new, also to groups that are there. A line that holds
    no trace is skipped and named, and so is a trace that came before in the same files.

    Exit code: 0 all imported, 1 some left out, 2 refused.
    """
    with ExitStack() as stack:
        bars: dict[str, Any] = {}

        def told(phase: str, done: int, total: int | None) -> None:
            if phase not in bars:
                stack.close()  # one bar at a time
                bars[phase] = stack.enter_context(progress(_PHASES[phase]))
            bars[phase](done, total)

        began = time.monotonic()
        done = import_files(files, run, group_by=group_by, strict=strict, jobs=jobs, told=told)
    if not IS_FAST and time.monotonic() - began > _LONG:
        err.print(f"JSON is read three times as fast with msgspec: {install('fast')}.", markup=False, highlight=False)
    if as_json:
        print_json(done.to_dict() | {"path": run})
    else:
        _print(done, run)
    raise typer.Exit(0 if done.clean else 1)


_PHASES = {"reading": "reading, MB", "writing": "writing, steps"}


def _print(done: Imported, run: str) -> None:
    new = (
        f"{counted(done.traces, 'trace')} in {counted(done.groups, 'group')}, {counted(done.tokens, 'token')}"
        if done.traces
        else "nothing new"
    )
    _say(f"{new} → {run}")
    if len(done.releases) > 1:
        _say("of Verifiers " + ", ".join(f"{release}: {n}" for release, n in done.releases.items()))
    if done.known:
        _say(
            f"there already: {counted(done.known, 'trace')}"
            + (f"; {counted(done.joined, 'group')} got more" if done.joined else "")
        )
    if done.untrained:
        _say(f"{counted(done.untrained, 'trace')} of agents that are not trained: rows, and in no group")
    if done.rounded:
        _say(
            f"{counted(done.rounded, 'trace')} with log-probs that Verifiers rounded to 4 decimals: not those of the engine",
            "yellow",
        )
    if done.mixed:
        _say(
            f"{counted(done.mixed, 'group')} with several prompts: by index or key the task is one, so a trainer would compare "
            "their rewards",
            "yellow",
        )
    for left in done.left[:_MOST_SHOWN]:
        _say(f"{left.file}, {left}" if done.files > 1 else str(left))
    if more := len(done.left) + done.unnamed - _MOST_SHOWN if len(done.left) > _MOST_SHOWN else 0:
        _say(f"and {more} more; --json names {len(done.left)} of them")
    for sentence in done.cut:
        _say(sentence, "red")
    for sentence in done.unread:
        _say(sentence, "yellow")
    if not done.clean:
        parts = {k: getattr(done, k) for k in ("imported", "skipped", "repeated", "blank")}
        _say(f"{counted(done.lines, 'line')}: " + ", ".join(f"{n} {k}" for k, n in parts.items() if n))


def _say(text: str, style: str | None = None) -> None:
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
