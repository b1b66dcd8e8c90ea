"""`rolltape show`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rolltape.replay.chosen import chosen_splits
from rolltape.replay.console import err, out, print_json
from rolltape.replay.lookup import distinct, find
from rolltape.replay.run import Run, open_run
from rolltape.replay.show import read_trace
from rolltape.replay.show_tables import Look, render_step, render_trace
from rolltape.schema.errors import BadInput, MissingExtra

_COLUMNS = (
    *("trace_id", "group_index", "rollout_index", "try_number", "task_name", "task_key", "task_idx", "reward"),
    *("num_turns", "num_sampled", "stop_condition", "is_truncated", "error_types", "disposition", "reason"),
)


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
    tokens: Annotated[bool, typer.Option("--tokens", help="Also token ids.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also token ids with their log-probs.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or its folder: tokens as text.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Long texts, all tokens and tracebacks whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a trace said and what became of it, or list the traces of a step.

    A trace is found by the first characters of its id, in every split and step
    unless some are named; those of superseded attempts come last. Only the row
    group that holds it is read.

    With tokens, sampled ones are coloured by the probability they were sampled
    with; those below 10 % stand in ‹ ›, with their probability.

        rolltape show demo-run
        rolltape show demo-run da3f --logprobs --tokenizer qwen/tokenizer.json

    Exit code: 0 shown, 2 no such trace, not readable or bad usage.
    """
    opened = open_run(run)
    if trace is None:
        if tokens or logprobs or tokenizer:
            raise BadInput("--tokens, --logprobs and --tokenizer are about one trace: name it behind the run.")
        _list(opened, run, step, chosen_splits(opened, split or [], evaluations), attempt, as_json)
        return
    splits = chosen_splits(opened, split or [], evaluations) if split else []
    place = find(opened, trace, splits=splits, steps=step or None, attempt=attempt)
    text_of = None if tokenizer is None else _decoder(tokenizer)
    wanted = tokens or logprobs or text_of is not None
    found = read_trace(opened, place, tokens=wanted)
    if as_json:
        print_json({"path": run, **found.to_dict()})
    else:
        out.print(render_trace(found, run, Look(full, wanted, logprobs, text_of)))
        if wanted and text_of is None:
            known = found.row["tokenizer"]
            folder = known if known and (Path(known) / "tokenizer.json").is_file() else "FOLDER"
            err.print(f"--tokenizer {folder} shows tokens as text", style="dim", markup=False, highlight=False)


def _list(
    run: Run, path: str, steps: Sequence[int] | None, splits: Sequence[str], attempt: int | None, as_json: bool
) -> None:
    """List the traces of steps, of each split the last one unless steps are named."""
    listed: list[tuple[str, int, list[dict[str, Any]]]] = []
    for split in splits:
        recorded = sorted({c.part.step for c in run.commits(split, attempt=attempt)})
        for step in sorted(set(steps)) if steps else recorded[-1:]:
            table = run.table(split, step, columns=_COLUMNS, attempt=attempt)
            listed.append((split, step, sorted(table.to_pylist(), key=_order)))
    if as_json:
        traces = [{"split": split, "step": step, **row} for split, step, rows in listed for row in rows]
        print_json({"path": path, "run": run.run_id, "traces": traces})
        return
    if not listed:
        out.print(f"{path}: nothing is committed yet.", markup=False, highlight=False)
    for i, (split, step, rows) in enumerate(listed):
        short = distinct([row["trace_id"] for row in rows])
        title = f"{path}  {split} step {step}: {len(rows)} traces"
        out.print(*(["\n"] if i else []), render_step(title, rows, short, out.width), sep="")


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = (row["group_index"], row["rollout_index"], row["try_number"])
    return tuple(-1 if k is None else k for k in keys)


def _decoder(path: Path) -> Callable[[int], str]:
    """A function that gives the text of a token id.

    Raises MissingExtra where the package tokenizers is missing, BadInput where there is no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra(
            "--tokenizer needs the package tokenizers: install rolltape with the extra 'live' (pip install 'rolltape[live]')."
        ) from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"{file} does not exist; expected a tokenizer.json, or a folder that holds one.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise BadInput(f"{file}: no readable tokenizer ({error}).") from error

    def text_of(token: int) -> str:
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        piece = tokenizer.id_to_token(token)
        return text if text and "\ufffd" not in text else f"[{token}]" if piece is None else str(piece)

    return text_of
