"""`rolltape export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rolltape.replay.chosen import chosen_commits
from rolltape.replay.exports.exported import Exported, ExportedFile, Format
from rolltape.replay.exports.hf import write_hf
from rolltape.replay.exports.samples import Written, write_samples
from rolltape.replay.exports.verifiers import write_verifiers
from rolltape.replay.options import BranchPolicy
from rolltape.replay.printing.console import err, out, print_json, progress
from rolltape.replay.printing.words import counted
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput


def export(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    form: Annotated[Format, typer.Option("--format", help="What to write.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            "--out",
            help="File to write; its ending must fit the format. `{release}` (verifiers) or `{rollout_id}` (samples) in its "
            "name makes a file each.",
            show_default=False,
        ),
    ],
    step: Annotated[list[int] | None, typer.Option(help="Only this step; repeatable.", show_default=False)] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; repeatable. Default: train.", show_default=False)
    ] = None,
    evaluations: Annotated[bool, typer.Option("--eval", help="Also the evaluations.", show_default=False)] = False,
    branch_policy: Annotated[
        BranchPolicy | None, typer.Option(help="With --format samples: convert like this instead of as recorded.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write what a run holds in other people's forms. Every try of the newest attempts is written, also failed ones.

    [bold]verifiers[/bold]: traces.jsonl as the Verifiers release writes it that made the traces, for its reader and `replay`.
    .jsonl, .jsonl.gz, .jsonl.zst.

    [bold]hf[/bold]: a Parquet file of conversations for Hugging Face datasets: messages, reward, task, tools, a row a branch.

    [bold]samples[/bold]: training Samples, as `rolltape convert` writes them: .jsonl, .parquet, .pt.

    Examples:

        rolltape export demo-run --format verifiers --out out/traces.jsonl
        rolltape export demo-run --format hf --out chats.parquet --step 0

    Exit code: 0 written, 2 refused.
    """
    if branch_policy is not None and form != "samples":
        raise BadInput(f"--branch-policy says how Samples are made; --format {form} writes none. Leave it out.")
    opened = open_run(run)
    with progress("exporting") as tell:
        if form == "samples":
            _only_training(split)
            files = write_samples(
                opened,
                to,
                steps=step or None,
                evaluations=evaluations,
                branch_policy=branch_policy,
                overwrite=overwrite,
            )
            result, said = _samples(files), [file.line(run) for file in files]
        else:
            commits = chosen_commits(opened, split or (), step, evaluations)
            if form == "hf":
                result = write_hf(opened, commits, Path(to), overwrite=overwrite, told=tell)
            else:
                result = write_verifiers(opened, commits, to, overwrite=overwrite, told=tell)
    if as_json:
        print_json({"path": run, "run": opened.run_id, "format": form, **result.to_dict()})
        return
    if form != "samples":
        unit = {"verifiers": "line", "hf": "conversation"}[form]
        said = [f"{f.path}: {counted(f.lines, unit)} of {counted(f.traces, 'trace')}" for f in result.files]
    for sentence in said:
        out.print(sentence, markup=False, highlight=False, soft_wrap=True)
    for path in result.configs:
        out.print(f"{path}: the environment", markup=False, highlight=False, soft_wrap=True)
    for sentence in result.next:
        out.print(sentence, markup=False, highlight=False, soft_wrap=True)
    for warning in dict.fromkeys(result.warnings):
        err.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for sentence, count in result.notes.items():
        out.print(
            f"{counted(count, 'trace')}: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )


def _only_training(splits: Sequence[str] | None) -> None:
    other = [s for s in splits or () if s != "train"]
    if other:
        raise BadInput(f"--split {other[0]}: Samples are those of training; --eval adds the evaluations' to them.")


def _samples(files: Sequence[Written]) -> Exported:
    found = Exported([ExportedFile(f.path, f.samples, f.samples, f.left_out) for f in files])
    found.warnings += [warning for f in files for warning in f.warnings]
    return found
