"""`rolltape launch` on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rolltape.record.launching.options import LaunchOptions
from rolltape.record.versions import check_live
from rolltape.replay.printing.console import err, out, print_json
from rolltape.replay.tokenizer import HELP
from rolltape.schema.errors import MissingExtra
from rolltape.schema.storage import place

if TYPE_CHECKING:
    from rolltape.record.launching.launch import Plan

MODEL, SIZES, ACTORS = "Model and folders", "Sizes", "Miles"


def launch_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [-- MILES' ARGUMENTS]",
            help="Verifiers' EnvConfig as a .toml file, then, behind --, further arguments for Miles, such as --lr 2e-6.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[str, typer.Option(help="Folder to record into, or a URL.")] = "runs/miles",
    taskset: Annotated[
        str | None, typer.Option(help="Id of a taskset, instead of CONFIG; an EnvConfig is written beside the run.")
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="rolltape's own TOML, for ROLLTAPE_CONFIG.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and the files; run nothing.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Load the environment and its tasks first.")] = True,
    model: Annotated[str, typer.Option(help="Model id on the hub.", rich_help_panel=MODEL)] = LaunchOptions.model,
    model_type: Annotated[
        str, typer.Option(help="Miles' name of the architecture.", rich_help_panel=MODEL)
    ] = LaunchOptions.model_type,
    models: Annotated[
        Path, typer.Option(help="Folder for the checkpoint and its conversion.", rich_help_panel=MODEL)
    ] = LaunchOptions.models,
    checkpoint: Annotated[Path | None, typer.Option(help="The checkpoint's folder.", rich_help_panel=MODEL)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help=f"{HELP} (default: the model id).", rich_help_panel=MODEL)
    ] = None,
    ref_load: Annotated[
        Path | None, typer.Option(help="The converted checkpoint's folder.", rich_help_panel=MODEL)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder of training checkpoints (default: beside --run).", rich_help_panel=MODEL)
    ] = None,
    megatron: Annotated[
        str | None, typer.Option(help="Folder of Megatron-LM (default: Miles' own).", rich_help_panel=MODEL)
    ] = None,
    skip_prepare: Annotated[
        bool, typer.Option("--skip-prepare", help="The checkpoint is there and converted.", rich_help_panel=MODEL)
    ] = False,
    gpus: Annotated[int, typer.Option(help="GPUs of a node.", rich_help_panel=SIZES)] = LaunchOptions.gpus,
    steps: Annotated[int, typer.Option(help="Training steps.", rich_help_panel=SIZES)] = LaunchOptions.steps,
    groups: Annotated[int, typer.Option(help="Tasks per step.", rich_help_panel=SIZES)] = LaunchOptions.groups,
    rollouts: Annotated[int, typer.Option(help="Rollouts per task.", rich_help_panel=SIZES)] = LaunchOptions.rollouts,
    over_sampling: Annotated[
        int | None, typer.Option(help="Tasks started at once (default: --groups).", rich_help_panel=SIZES)
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples per update (default: a whole step).", rich_help_panel=SIZES)
    ] = None,
    max_response: Annotated[
        int, typer.Option(help="Tokens per model turn.", rich_help_panel=SIZES)
    ] = LaunchOptions.max_response,
    max_context: Annotated[
        int, typer.Option(help="Tokens of prompt and reply.", rich_help_panel=SIZES)
    ] = LaunchOptions.max_context,
    temperature: Annotated[float, typer.Option(rich_help_panel=SIZES)] = LaunchOptions.temperature,
    eval_every: Annotated[
        int | None, typer.Option(help="Evaluate the whole taskset every N steps.", rich_help_panel=SIZES)
    ] = None,
    eval_rollouts: Annotated[
        int, typer.Option(help="Rollouts per task of an evaluation.", rich_help_panel=SIZES)
    ] = LaunchOptions.eval_rollouts,
    env: Annotated[
        list[str] | None, typer.Option(help="Variable for the actors, NAME=VALUE; repeatable.", rich_help_panel=ACTORS)
    ] = None,
    pythonpath: Annotated[
        list[Path] | None, typer.Option(help="Folder the actors import from; repeatable.", rich_help_panel=ACTORS)
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave one of the preset options away, such as colocate; repeatable.", rich_help_panel=ACTORS
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Train with Miles on a Verifiers environment, recording every rollout.

    Downloads and converts the checkpoint, then runs Miles' training through Miles' own helpers, which first end every Ray
    and SGLang process of this machine. The presets are a smoke run on two GPUs; arguments behind -- replace them.

    Exit code: 0 trained, or printed; 2 refused.

    For example:

        rolltape launch --taskset code-golf-v1 --run runs/golf --dry-run
    """
    given = dict(locals())
    try:
        from rolltape.record.launching.launch import launch, plan_launch
    except ImportError:
        check_live()  # names the package that is missing
        raise
    config, extra = _split(list(arguments or []))
    chosen = {name: given[name] for name in LaunchOptions.__dataclass_fields__ if name in given}
    for name in ("env", "pythonpath", "without"):
        chosen[name] = tuple(given[name] or ())
    plan = plan_launch(LaunchOptions(**{**chosen, "run": place(run), "config": config, "extra": extra}))
    if dry_run:
        print_json(plan.to_dict()) if as_json else _show(plan)
        return
    launch(plan)


def _split(words: list[str]) -> tuple[Path | None, tuple[str, ...]]:
    """The config, where the first word is no option, and Miles' arguments."""
    if words and not words[0].startswith("-"):
        return Path(words[0]), tuple(words[1:])
    return None, tuple(words)


def _show(plan: Plan) -> None:
    """The plan as shell text that can be read, and mostly pasted."""
    for path, text in plan.files.items():
        _say(f"# would write {path}", *(f"#   {line}" for line in text.splitlines()))
    if not plan.options.skip_prepare:
        _say("# prepare", plan.download, f"# {plan.to_dict()['prepare'][1]}, by Miles")
    _say(
        "# variables of the actors", *(f"export {name}={shlex.quote(value)}" for name, value in plan.variables.items())
    )
    _say(f"# train; Miles adds the model arguments of {plan.options.model_type} and submits this as a Ray job")
    words = [
        " ".join(map(shlex.quote, [name, *values])) + (" \\" if number < len(plan.arguments) else "")
        for number, (name, values) in enumerate(plan.arguments.items(), 1)
    ]
    _say("python3 train.py \\", *(f"    {word}" for word in words))
    from rolltape.record.launching.launch import command_helpers

    notes: list[Any] = list(plan.problems)
    try:
        command_helpers()
    except MissingExtra as error:
        notes.append(error)
    for note in notes:
        err.print(f"Note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _say(*lines: str) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
