"""`rolltape show`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from rolltape.replay.chosen import chosen_splits
from rolltape.replay.printing.console import err, out, print_json
from rolltape.replay.printing.traces import Look, render_list, render_trace
from rolltape.replay.run import Run, open_run
from rolltape.replay.show.list import Wanted, choose
from rolltape.replay.show.lookup import find
from rolltape.replay.show.trace import read_trace
from rolltape.replay.tokenizer import HELP, decoder, located
from rolltape.schema.errors import BadInput, MissingExtra

LIST = "The list"


def show_command(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    trace: Annotated[
        str | None, typer.Argument(help="First characters of a trace's id; without it, traces are listed.")
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option(help="Only this step, by default the last one; repeatable.", show_default=False)
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Recorded split, by default train if there is one; repeatable.", show_default=False),
    ] = None,
    evaluations: Annotated[bool, typer.Option("--eval", help="Also the evaluations.")] = False,
    attempt: Annotated[
        int | None, typer.Option(help="This attempt instead of the newest of each step.", show_default=False)
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Its name, key or index; repeatable.", rich_help_panel=LIST)
    ] = None,
    outcome: Annotated[
        list[str] | None,
        typer.Option(
            help="What became of it: error, failed_check, incomplete_group …, or dropped for all but emitted; repeatable.",
            rich_help_panel=LIST,
        ),
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Only with an error.", rich_help_panel=LIST)] = False,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="A condition on columns of the view traces (rolltape sql --schema traces).",
            rich_help_panel=LIST,
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="reward, turns, sampled or tokens, smallest first; -reward …: largest first.",
            rich_help_panel=LIST,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many.", rich_help_panel=LIST)] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also token ids.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also token ids with their log-probs.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help=f"{HELP} (default: the recorded one): tokens as text.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Long texts, all tokens and tracebacks whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a trace said and what became of it, or list the traces of a step.

    A trace is found by the first characters of its id, in every split and step
    unless some are named; those of superseded attempts come last. Only the row
    group that holds it is read.

    Traces are listed of the last step, or of every step where --task, --outcome,
    --errors or --where say which; --step names others.

    With tokens, sampled ones are coloured by the probability they were sampled
    with; those below 10 % stand in ‹ ›, with their probability.

        rolltape show demo-run
        rolltape show demo-run da3f --logprobs --tokenizer Qwen/Qwen3-8B
        rolltape show demo-run --outcome dropped
        rolltape show demo-run --where 'reward < 1' --sort reward --limit 5

    Exit code: 0 shown, 2 no such trace, not readable or bad usage.
    """
    wanted = Wanted(task or (), outcome or (), errors, where, sort, limit)
    opened = open_run(run)
    if trace is None:
        if tokens or logprobs or tokenizer:
            raise BadInput("--tokens, --logprobs and --tokenizer are about one trace: name it behind the run.")
        splits = chosen_splits(opened, split or [], evaluations)
        (_json if as_json else _list)(opened, run, step, splits, wanted, attempt)
        return
    if wanted != Wanted((), ()):
        raise BadInput(
            "--task, --outcome, --errors, --where, --sort and --limit are about the list: leave the trace out."
        )
    splits = chosen_splits(opened, split or [], evaluations) if split else []
    place = find(opened, trace, splits=splits, steps=step or None, attempt=attempt)
    with_tokens = tokens or logprobs or tokenizer is not None
    given = None if tokenizer is None else decoder(located(tokenizer))
    found = read_trace(opened, place, tokens=with_tokens)
    if as_json:
        print_json({"path": run, **found.to_dict()})
        return
    text_of, said = (given, "") if given or not with_tokens else _recorded(opened, found.row["tokenizer"])
    out.print(render_trace(found, run, Look(full, with_tokens, logprobs, text_of)))
    if said:
        err.print(said, style="dim", markup=False, highlight=False, soft_wrap=True)


def _recorded(run: Run, named: str | None) -> tuple[Callable[[int], str] | None, str]:
    """What gives the text of tokens by the recorded tokenizer, where this machine has it, and a line on that."""
    try:
        where = located(named or "", run.paths.root, ask=False)
        return decoder(where), f"tokens as text by the recorded tokenizer, {where}"
    except (BadInput, MissingExtra):
        recorded = f"the recorded one, {named}, is not here" if named else "none is recorded"
        return None, f"--tokenizer shows tokens as text, by a folder or hub id; {recorded}"


def _list(
    run: Run, path: str, steps: Sequence[int] | None, splits: Sequence[str], wanted: Wanted, attempt: int | None
) -> None:
    """Print the traces of steps, of each split the last one unless steps are named or only some traces are wanted."""
    found = list(choose(run, splits, steps, wanted, attempt))
    if not found:
        out.print(f"{path}: nothing is committed yet.", markup=False, highlight=False)
    for i, one in enumerate(found):
        out.print(*(["\n"] if i else []), render_list(path, one, wanted, out.width), sep="")


def _json(
    run: Run, path: str, steps: Sequence[int] | None, splits: Sequence[str], wanted: Wanted, attempt: int | None
) -> None:
    found = list(choose(run, splits, steps, wanted, attempt))
    traces = [{"split": one.split, **row} for one in found for row in one.rows]
    counts = {"found": sum(one.found for one in found), "of": sum(one.total for one in found)}
    print_json({"path": path, "run": run.run_id, **counts, "traces": traces})
