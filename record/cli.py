"""`rolltape record`: live rollouts from the command line."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rolltape.record.options import LiveOptions
from rolltape.record.progress import for_output, recording_trouble
from rolltape.replay.printing.console import SafeFormatter, print_json, printable
from rolltape.replay.printing.words import alike, counted
from rolltape.replay.tokenizer import HELP
from rolltape.schema.errors import RolltapeError
from rolltape.schema.paths import RunPaths
from rolltape.schema.storage import place

WHAT, SAMPLING, RENDERER, SAMPLES, ENGINE = "What to run", "Sampling", "Renderer", "Samples", "Engine and failures"
RECORDING = "Recording"


def record(
    config: Annotated[Path, typer.Argument(help="The environment: Verifiers' EnvConfig as a .toml file.")],
    run: Annotated[
        str, typer.Option(help="Folder of the run, made if it is not there; or s3://bucket/run.", show_default=False)
    ],
    engine: Annotated[str, typer.Option(help="Address of an SGLang server or router, such as http://127.0.0.1:30000.")],
    model: Annotated[str, typer.Option(help="The engine's model: an id, or the folder of a checkpoint.")],
    tokenizer: Annotated[str | None, typer.Option(help=f"{HELP}, where it is not the model's.")] = None,
    rollouts: Annotated[int, typer.Option(help="Rollouts per task.", rich_help_panel=WHAT)] = LiveOptions.rollouts,
    groups: Annotated[
        int, typer.Option(help="Tasks per training step, taken from the taskset in turn.", rich_help_panel=WHAT)
    ] = LiveOptions.groups,
    steps: Annotated[
        int, typer.Option(help="Steps to record; with --resume, so many more.", rich_help_panel=WHAT)
    ] = LiveOptions.steps,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on after the last step of the run in --run, where it is there.", rich_help_panel=WHAT
        ),
    ] = False,
    concurrency: Annotated[int, typer.Option(help="Rollouts at once.", rich_help_panel=WHAT)] = LiveOptions.concurrency,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Evaluate: every task, no training samples.", rich_help_panel=WHAT)
    ] = False,
    eval_name: Annotated[
        str | None, typer.Option(help="Name of the evaluation (default: the taskset).", rich_help_panel=WHAT)
    ] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle the tasks once.", rich_help_panel=WHAT)] = False,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.", rich_help_panel=WHAT)] = 0,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Send a sampling seed per rollout, from --seed on.", rich_help_panel=WHAT),
    ] = False,
    temperature: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = LiveOptions.temperature,
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = LiveOptions.top_p,
    top_k: Annotated[int, typer.Option(help="-1: all tokens.", rich_help_panel=SAMPLING)] = LiveOptions.top_k,
    max_response: Annotated[int, typer.Option(help="Tokens sampled per model turn.", rich_help_panel=SAMPLING)] = 4096,
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and reply together.", rich_help_panel=SAMPLING)
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(help="Tokens of a rollout's first prompt.", rich_help_panel=SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text to stop at; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Token to stop at, beside the renderer's.", rich_help_panel=SAMPLING)
    ] = None,
    renderer: Annotated[
        str | None, typer.Option(help="Renderer, such as qwen3 (default: by the model).", rich_help_panel=RENDERER)
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="The template's switch.", rich_help_panel=RENDERER)
    ] = None,
    thinking_retention: Annotated[
        str | None,
        typer.Option(
            help="tool_cycle, or all: keep earlier reasoning, so that a conversation stays one branch.",
            rich_help_panel=RENDERER,
        ),
    ] = None,
    renderer_pool: Annotated[
        int | None, typer.Option(help="Tokenizers to load (default: by the cores).", rich_help_panel=RENDERER)
    ] = None,
    branch_policy: Annotated[
        str, typer.Option(help="reject traces with several branches, or make them siblings.", rich_help_panel=SAMPLES)
    ] = LiveOptions.branch_policy,
    min_group_size: Annotated[
        int | None, typer.Option(help="Rollouts a group may shrink to (default: none lost).", rich_help_panel=SAMPLES)
    ] = None,
    writer: Annotated[
        str,
        typer.Option(
            help="Name of this writer; several processes may record into one folder.", rich_help_panel=RECORDING
        ),
    ] = LiveOptions.writer,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Local folder for the journal of a run in an object store (default: $ROLLTAPE_STATE).",
            rich_help_panel=RECORDING,
        ),
    ] = None,
    journal: Annotated[
        bool,
        typer.Option(
            "--journal/--no-journal",
            help="Write each trace when it ends. Without, a killed process loses its step.",
            rich_help_panel=RECORDING,
        ),
    ] = LiveOptions.journal,
    fsync: Annotated[
        str, typer.Option(help="Sync the journal to disk: always, interval or never.", rich_help_panel=RECORDING)
    ] = LiveOptions.fsync,
    fsync_seconds: Annotated[
        float, typer.Option(help="The interval.", rich_help_panel=RECORDING)
    ] = LiveOptions.fsync_seconds,
    ack_seconds: Annotated[
        float, typer.Option(help="Longest wait for a trace to reach the journal.", rich_help_panel=RECORDING)
    ] = LiveOptions.ack_seconds,
    commit_seconds: Annotated[
        float, typer.Option(help="Longest wait for a step to be committed.", rich_help_panel=RECORDING)
    ] = LiveOptions.commit_seconds,
    queue_bytes: Annotated[
        int, typer.Option(help="Memory for what cannot be written at the moment.", rich_help_panel=RECORDING)
    ] = LiveOptions.queue_bytes,
    mask: Annotated[
        list[str] | None,
        typer.Option(help="Mask what this regular expression finds, too; repeatable.", rich_help_panel=RECORDING),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="End the run at the first finding or recording failure.", rich_help_panel=RECORDING
        ),
    ] = False,
    rollout_retries: Annotated[
        int | None, typer.Option(help="Retries of a rollout (default: the config's).", rich_help_panel=ENGINE)
    ] = None,
    max_failed_groups: Annotated[
        int, typer.Option(help="Groups failing one after the other before giving up.", rich_help_panel=ENGINE)
    ] = LiveOptions.max_failed_groups,
    request_attempts: Annotated[
        int, typer.Option(help="Tries of one engine request.", rich_help_panel=ENGINE)
    ] = LiveOptions.request_attempts,
    retry_seconds: Annotated[
        float, typer.Option(help="Seconds in which they start.", rich_help_panel=ENGINE)
    ] = LiveOptions.retry_seconds,
    request_seconds: Annotated[
        float, typer.Option(help="Seconds to wait for one reply.", rich_help_panel=ENGINE)
    ] = 1800.0,
    routing_key: Annotated[
        bool, typer.Option("--routing-key", help="Send the trace id as X-SMG-Routing-Key.", rich_help_panel=ENGINE)
    ] = False,
    lora: Annotated[str | None, typer.Option(help="Adapter to sample with.", rich_help_panel=ENGINE)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Run episodes of a Verifiers environment on an SGLang engine and record every trace.

    Tasks are taken from the taskset in turn; each gets --rollouts rollouts, scored as a group. A step is committed when
    its groups have ended. Ctrl-C cancels what runs and commits what has ended; a second Ctrl-C aborts.

    Exit code: 0 recorded as asked; 1 ended early, nothing could be emitted, or a trace was not recorded; 2 refused
    before any episode; 130 interrupted; 143 terminated.

    For example:

        rolltape record env.toml --run runs/one --steps 3 \\
            --engine http://127.0.0.1:30000 --model Qwen/Qwen3-0.6B
    """
    given = dict(locals())
    renamed = {
        "eval": evaluate,
        "enable_thinking": thinking,
        "stop": tuple(stop or ()),
        "stop_token_ids": tuple(stop_token_id or ()),
        "mask": tuple(mask or ()),
    }
    try:
        options = LiveOptions(**{name: given[name] for name in LiveOptions.names() if name in given} | renamed)
        summary = run_with(options, quiet=quiet)
    except RolltapeError as error:
        typer.echo(printable(f"Error: {error}"), err=True)
        raise typer.Exit(2) from error
    if as_json:
        print_json(summary.to_dict())
    else:
        typer.echo(printable(summary_text(summary)))
    raise typer.Exit(summary.exit_code)


def run_with(options: LiveOptions, *, quiet: bool = False) -> Any:
    """`run_live` in an event loop of its own, with the display that suits standard error."""
    from rolltape.record.config import read_config
    from rolltape.record.versions import check_live
    from rolltape.record.writing.folder import expect_free

    check_live()
    read_config(options.config)  # what is wrong there is said before the imports, which take seconds
    if not options.resume:
        try:
            expect_free(RunPaths(place(options.run, options.state)))
        except RolltapeError:
            raise
        except OSError:  # told when the run is opened
            pass
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    progress = for_output(quiet=quiet)
    summary = None

    async def main() -> None:
        nonlocal summary
        summary = await run_live(options, progress=progress)

    try:
        from rolltape.record.live import run_live

        asyncio.run(main())
    except KeyboardInterrupt:
        if summary is None:  # else only the event loop was left to be closed
            raise
    finally:
        progress.close()
    return summary


def summary_text(summary: Any) -> str:
    """The end of a run in a few lines."""
    counts = ", ".join(f"{count} {name}" for name, count in summary.counts.items() if count)
    lines = [f"{counted(len(summary.steps), 'step')} in {summary.seconds:.1f} s: {counts or 'nothing recorded'}."]
    lines += [f"  {reason}" for reason in alike(summary.reasons, 8)]
    if summary.untaught:
        lines.append(summary.untaught)
    if summary.unversioned:
        turns = counted(summary.unversioned, "turn")
        lines.append(
            f"The engine named no weight version with {turns}, so lag and drift by weight version cannot be asked of this run."
        )
    if summary.recording_failures:
        lines.append(f"{counted(summary.recording_failures, 'trace')} could not be recorded.")
    if summary.unwritten:
        lines.append(summary.unwritten)
    elif trouble := recording_trouble(summary.recording):
        lines.append(f"Recording: {trouble}.")
    if summary.stopped:
        lines.append(f"Ended early ({summary.stopped}): {summary.message or 'no more is known'}")
    lines.append(f"The run is in {summary.run} (id {summary.run_id}).")
    return "\n".join(lines)


def main() -> None:
    """`python -m rolltape.record.cli`."""
    typer.run(record)


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[func-returns-value]
