"""`rolltape recover`: settle what a writer that died left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolltape.record.writing.recover import Recovered
from rolltape.replay.printing.console import out, print_json
from rolltape.replay.printing.words import counted


def recover(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    state: Annotated[
        Path | None, typer.Option(help="Local folder of the journals of a run in an object store.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Commit what a killed recording left in its journal, and name what cannot be read.

    Opening a run for recording does the same first. A journal whose writer lives is left alone; nothing is deleted that is
    not committed elsewhere. Safe to call at any time, and again. Of a run in an object store, the journals of this machine
    are settled: call it where the run was recorded.

    For example:

        rolltape recover runs/first

    Exit code: 0 settled, or nothing to settle; 1 something could not be read or settled and is named; 2 refused.
    """
    from rolltape.record.writing.recover import recover as settle

    found = settle(run, state)
    if as_json:
        print_json({"path": str(run), **found.to_dict()})
    else:
        for line in lines(found):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if found.faults else 0)


def lines(found: Recovered) -> list[str]:
    """What was found, for people."""
    result = [f"left alone, its writer lives: {journal}" for journal in found.alive]
    for part in found.committed:
        lost = f", {part['lost']} lost" if part["lost"] else ""
        result.append(f"committed {part['split']} {part['part']}: {counted(part['traces'], 'trace')}{lost}")
    if found.known:
        result.append(f"{found.known} journaled traces were committed already")
    result += [f"problem: {fault}" for fault in found.faults]
    result += [f"moved aside, for no journal explains it: {file}" for file in found.discarded]
    result += [f"removed: {file}" for file in found.removed]
    return result or ["nothing to settle"]
