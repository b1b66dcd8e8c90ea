"""`rolltape annotate`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from rolltape.replay.annotations import KEYS, Annotation, annotate, annotations_of
from rolltape.replay.printing.console import out, print_json, table
from rolltape.replay.run import Run, open_run
from rolltape.schema.errors import BadInput


def annotate_command(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    name: Annotated[
        str | None, typer.Argument(help="Name of the annotation: small letters, digits, '_'.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Argument(help="A .parquet, .csv or .jsonl file.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Put it in place of the one of that name.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print the annotations that the run has.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Add columns to recorded traces: log-probs of the trainer, advantages, labels. The recording is not touched.

    For example:

        rolltape annotate demo-run labels labels.csv
        rolltape annotate demo-run trainer logprobs.parquet
        rolltape annotate demo-run --list
        rolltape sql demo-run "SELECT label, avg(reward) FROM traces
            JOIN annotation_labels USING (run, trace_id)
            WHERE ended GROUP BY label"

    The file's column trace_id, alone or with node or position (of a token in
    its trace, from 0), says what a row is about; every other column is added.
    A list of a trace has one item for each of its tokens, sampled tokens,
    nodes or turns, or for each token from the first sampled one on. Traces may
    be missing; unknown ones, keys that come twice and lists of another length
    are refused, and nothing is written then.

    Exit code: 0 added, 2 refused or bad usage.
    """
    opened = open_run(run)
    if list_:
        if name is not None:
            raise BadInput("--list takes a run alone; leave the name away.")
        _print_list(opened, as_json)
        return
    if name is None or file is None:
        raise BadInput("a name and a file are needed: rolltape annotate RUN NAME FILE; --list prints what there is.")
    made = annotate(opened, name, file, overwrite=overwrite)
    if as_json:
        print_json({"run": opened.run_id, **made.to_dict()})
        return
    out.print(
        f"annotation_{made.name}: {_counted(made.written.rows, 'row')} about {_counted(made.traces, 'trace')}, by "
        f"{' and '.join(KEYS[made.level])}",
        highlight=False,
    )
    for column in made.columns:
        over = "" if column.given is None else f", a list over {_GIVEN[column.given]}"
        out.print(f"  {column.name} {column.type}{over}", markup=False, highlight=False, soft_wrap=True)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


_GIVEN = {
    "tokens": "all tokens",
    "sampled": "sampled tokens",
    "response": "the tokens from the first sampled one on",
    "nodes": "nodes",
    "turns": "turns",
}


def _print_list(run: Run, as_json: bool) -> None:
    found = annotations_of(run)
    if as_json:
        print_json({"run": run.run_id, "annotations": [a.to_dict() for a in found.values()]})
    elif not found:
        out.print("no annotations", highlight=False)
    else:
        out.print(table("", ("view", "by", "columns", "traces", "rows", "added"), [_row(a) for a in found.values()]))


def _row(annotation: Annotation) -> tuple[object, ...]:
    when = datetime.fromtimestamp(annotation.created_at, UTC)
    columns = ", ".join(c.name for c in annotation.columns)
    by = ", ".join(KEYS[annotation.level])
    return (
        f"annotation_{annotation.name}",
        by,
        columns,
        annotation.traces,
        annotation.written.rows,
        f"{when:%Y-%m-%d %H:%M} UTC",
    )
