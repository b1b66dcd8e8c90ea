"""`rolltape approve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from rolltape.replay.listing.folders import need_runs
from rolltape.replay.listing.runs import runs_in_store
from rolltape.replay.options import CONVERTER_VERSION, BranchPolicy
from rolltape.replay.printing.console import out, print_json, progress, table
from rolltape.replay.printing.words import counted
from rolltape.replay.run import open_run
from rolltape.replay.verification.approve import Approval, approve
from rolltape.schema.errors import RunNotFound
from rolltape.schema.storage import AnyPath, StorePath, place


def approve_command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders or URLs of runs, or of what holds runs.")
    ],
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
    folders = [run for given in runs for run in _runs(place(given))]
    approved: dict[AnyPath, list[Approval]] = {}
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


def _runs(where: AnyPath) -> list[AnyPath]:
    """The run at a place, or those below it. Raises RunNotFound where there is none."""
    if isinstance(where, StorePath):
        found: list[AnyPath] = [*runs_in_store(where)]
        if not found:
            raise RunNotFound(f"{where} holds no recorded run; give the URL of a run, or of what holds runs.")
        return found
    try:
        return [*need_runs(where)]
    except FileNotFoundError as error:
        raise RunNotFound(str(error)) from None


def _show(approved: Mapping[AnyPath, Sequence[Approval]], changed: int, dry_run: bool) -> None:
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
    parts = [a for done in approved.values() for a in done]
    samples, without_samples, same = (
        sum(a.samples for a in parts),
        sum(a.without_samples for a in parts),
        len(parts) - changed,
    )
    verb = "would change" if dry_run else "written"
    out.print(f"{changed} {verb}, {same} as they were; version {CONVERTER_VERSION} of the converter", highlight=False)
    none = f"; {counted(without_samples, 'trace')} gave none (`rolltape verify` says why)" if without_samples else ""
    out.print(f"{counted(samples, 'Sample')}{none}", highlight=False)
