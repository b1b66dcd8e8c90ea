"""`rolltape compact`: merge the small files of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from rolltape.replay.housekeeping.compact import TARGET, Compacted, Merged, compact
from rolltape.replay.printing.console import out, print_json, progress, table
from rolltape.replay.printing.words import counted, size
from rolltape.replay.run import open_run


def compact_command(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    megabytes: Annotated[int, typer.Option("--size", metavar="MB", min=1, help="Size of a merged file.")] = TARGET
    // 10**6,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be merged; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Merge small files of consecutive steps into files of about 100 MB. No row is changed.

    Each file is checked against its commit before, and the new one is read back and compared
    with them before it counts. The files that were merged stay, and no longer count, until
    `rolltape prune RUN --replaced` removes them. Safe while the run is recorded or read, safe
    to be killed, and to be called again.

    Parts that a newer attempt took back, and files of half the size and more, stay as they are.

        rolltape compact runs/first
        rolltape compact s3://bucket/runs/first --dry-run

    Exit code: 0 merged, or nothing to merge; 1 a file could not be merged and is named; 2 refused.
    """
    opened = open_run(run)
    with progress("merging, files") as tell:
        done = compact(opened, megabytes * 10**6, dry_run=dry_run, told=tell)
    if as_json:
        print_json({"path": run, "run": opened.run_id, "dry_run": dry_run, **done.to_dict()})
    else:
        _show(run, done, dry_run)
    raise typer.Exit(1 if done.skipped else 0)


def _show(run: str, done: Compacted, dry_run: bool) -> None:
    if done.merged:
        columns = ("split", "attempt", "steps", "files", "traces", "before", "after")
        title = f"{run}: {'would be merged' if dry_run else 'merged'}"
        out.print(table(title, columns, [_row(m) for m in done.merged], right=columns[1:]))
    for why in done.skipped:
        out.print(f"left as it is: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
    if not done.merged:
        said = "nothing was merged" if done.skipped else "nothing to merge"
    elif dry_run:
        said = "nothing was written; the same without --dry-run merges them"
    else:
        files, before = sum(m.files for m in done.merged), sum(m.bytes_before for m in done.merged)
        old = f"{counted(files, 'file')} ({size(before)})"
        said = f"no longer counted: {old}; `rolltape prune {run} --replaced` says what it would remove"
    out.print(f"{said}.", markup=False, highlight=False, soft_wrap=True)


def _row(merged: Merged) -> tuple[object, ...]:
    first, last = merged.first_step, merged.last_step
    return (
        merged.split,
        merged.attempt,
        first if first == last else f"{first} to {last}",
        merged.files,
        f"{merged.rows:,}",
        size(merged.bytes_before),
        size(merged.bytes_after),
    )
