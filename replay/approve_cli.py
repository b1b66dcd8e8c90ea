"""`rolltape approve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rolltape.replay.approve import Approval, approve
from rolltape.replay.console import out, print_json, progress, table
from rolltape.replay.folders import need_runs
from rolltape.replay.options import CONVERTER_VERSION, BranchPolicy
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput, RunNotFound
from rolltape.schema.storage import is_url


def approve_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold runs.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split, such as train or eval-NAME; repeatable.")
    ] = None,
    step: Annotated[list[int] | None, typer.Option(help="Only this step; repeatable.")] = None,
    branch_policy: Annotated[
        BranchPolicy | None,
        typer.Option(help="Convert like this instead of as recorded. Kept with the Samples."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Take what today's converter makes of runs as what must come out, and say what changed.

    `pytest --rolltape RUN` compares with it from then on, and names the exact place where something differs. The Samples
    are written to RUN/expected/; the recording is never touched. Commit them beside it.

        rolltape approve tests/data/runs

        rolltape approve runs/mine --step 3 --dry-run

    Exit code: 0 approved; 1 something would change (--dry-run); 2 refused.
    """
    for given in filter(is_url, runs):
        raise BadInput(f"{given} is a URL; approved Samples lie beside a run on this machine: copy it here first.")
    try:
        folders = [run for given in runs for run in need_runs(given)]
    except FileNotFoundError as error:
        raise RunNotFound(str(error)) from None
    approved: dict[Path, list[Approval]] = {}
    with progress("replaying, steps") as tell:
        for folder in dict.fromkeys(folders):
            approved[folder] = approve(
                open_run(folder),
                splits=split or (),
                steps=step or (),
                branch_policy=branch_policy,
                write=not dry_run,
                told=tell,
            )
    changed = sum(a.state != "same" for found in approved.values() for a in found)
    if as_json:
        found = [{"path": str(folder), "parts": [a.to_dict() for a in done]} for folder, done in approved.items()]
        print_json({"converter": CONVERTER_VERSION, "written": not dry_run, "changed": changed, "runs": found})
    else:
        _show(approved, changed, dry_run)
    raise typer.Exit(1 if dry_run and changed else 0)


def _show(approved: Mapping[Path, Sequence[Approval]], changed: int, dry_run: bool) -> None:
    """What is not the same as before, a row a part with its notes, and the sums."""
    rows = [
        (folder, a.part.split, a.part.step, a.part.writer, a.samples, a.state, "\n".join(a.notes))
        for folder, done in approved.items()
        for a in done
        if a.state != "same"
    ]
    if rows:
        names = ("run", "split", "step", "writer", "Samples", "state", "what changed")
        out.print(table("Expected Samples", names, rows, right=("step", "Samples")))
    same = sum(map(len, approved.values())) - changed
    verb = "would change" if dry_run else "written"
    out.print(f"{changed} {verb}, {same} as they were; version {CONVERTER_VERSION} of the converter", highlight=False)
