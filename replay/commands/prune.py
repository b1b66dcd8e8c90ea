"""`rolltape prune`: remove what is no longer wanted of a run; scores stay."""

from __future__ import annotations

from typing import Annotated

import typer

from rolltape.replay.housekeeping.prune import Plan, Pruned, Wish, plan, prune
from rolltape.replay.printing.console import out, print_json, progress, table
from rolltape.replay.printing.words import counted, size
from rolltape.replay.run import Run, open_run
from rolltape.schema.errors import BadInput


def prune_command(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Steps of older attempts that were recorded again since.")
    ] = False,
    replaced: Annotated[
        bool, typer.Option("--replaced", help="Files that `rolltape compact` merged into larger ones.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids, masks and log-probs; texts and scores stay.")
    ] = False,
    before: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            min=0,
            help="Of steps before this one everything but the scores; with --tokens only their tokens.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Split whose tokens or steps go; repeatable (default: all).", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, as without --yes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Remove what is no longer wanted. Says what would go, and does it with --yes only.

    Scores stay: who was asked what, rewards and metrics, lengths, how each trace ended and what
    became of it. What stands for removed files is written, read back and committed first. Steps
    that were pruned can no longer be converted or proved, and `rolltape verify` says so.

    The attempt that is being recorded is left alone. Of a run in an object store only the writers
    of this machine are known: prune it where it is recorded, or when nobody does.

        rolltape prune runs/first                    # what options would free
        rolltape prune runs/first --superseded --replaced --yes
        rolltape prune runs/first --tokens --before 400 --yes
        rolltape prune runs/first --before 400 --yes      # all but the scores

    Exit code: 0 done, or said what would be done; 1 something could not be removed and is named; 2 refused.
    """
    if yes and dry_run:
        raise BadInput("--yes and --dry-run exclude each other.")
    wish = Wish(superseded=superseded, replaced=replaced, tokens=tokens, before=before, splits=tuple(split or ()))
    opened = open_run(run)
    _check_splits(opened, wish)
    if not wish.anything:
        if yes:
            raise BadInput(
                "--yes does what other options say: add --superseded, --replaced, --tokens or --before STEP."
            )
        return _overview(run, opened, as_json)
    if not yes:
        found = plan(opened, wish)
        if as_json:
            return print_json({"path": run, "run": opened.run_id, "done": False, **found.to_dict()})
        _show(run, found)
        return _say("nothing was removed; the same with --yes does it." if found.items else "nothing to remove.")
    with progress("pruning, files") as tell:
        done = prune(opened, wish, tell)
    if as_json:
        print_json({"path": run, "run": opened.run_id, "done": True, **done.to_dict()})
    else:
        _show(run, done.plan)
        _told(done)
    raise typer.Exit(1 if done.skipped else 0)


def _check_splits(run: Run, wish: Wish) -> None:
    unknown = [s for s in wish.splits if s not in run.splits()]
    if unknown:
        raise BadInput(f"split {unknown[0]!r} was not recorded; recorded are {', '.join(run.splits()) or 'none'}.")


def _overview(run: str, opened: Run, as_json: bool) -> None:
    """What the options would free: each byte counted once, for the first option that frees it."""
    found = plan(opened, Wish(superseded=True, replaced=True, tokens=True))
    items = {
        name: [i for i in found.items if i.option == option]
        for name, option in (("--superseded", "superseded"), ("--replaced", "replaced"), ("--tokens", "columns"))
    }
    freed = {name: sum(item.bytes for item in those) for name, those in items.items()}
    if as_json:
        print_json({"path": run, "run": opened.run_id, "done": False, "would_free": freed})
        return
    rows = [(name, sum(i.files for i in those), size(freed[name])) for name, those in items.items()]
    _say(f"{run}: what each option would free")
    out.print(table("", ("option", "files", "bytes"), rows, right=("files", "bytes")))
    if freed["--tokens"] and (freed["--superseded"] or freed["--replaced"]):
        _say(
            "each byte is counted once, for the first option that frees it; --tokens alone also removes what its files replace"
        )
    _say(*found.kept)


def _show(run: str, found: Plan) -> None:
    columns = ("what", "files", "traces", "bytes")
    rows = [(i.what, i.files, "" if i.rows is None else f"{i.rows:,}", size(i.bytes)) for i in found.items]
    if rows:
        out.print(table(f"{run}: what goes", columns, rows, right=columns[1:]))
    _say(*found.kept)


def _told(done: Pruned) -> None:
    for why in done.skipped:
        out.print(f"left as it is: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
    if done.plan.items:
        before, after = size(done.bytes_before), size(done.bytes_after)
        _say(f"{counted(done.removed, 'file')} removed; the run took {before} and takes {after}.")
    else:
        _say("nothing to remove.")


def _say(*lines: str) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
