"""`rolltape demo`: three steps of real episodes on the bundled engine, recorded, checked and shown."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rolltape.record.demo.folder import DemoFolder
from rolltape.record.demo.start import Start
from rolltape.replay.printing.console import out, print_json, table
from rolltape.replay.printing.words import alike
from rolltape.schema.errors import BadInput
from rolltape.schema.storage import place

if TYPE_CHECKING:
    from rolltape.record.live import LiveSummary
    from rolltape.record.progress import StepNews
    from rolltape.replay.verification.verify import Verification

STEPS, GROUPS, ROLLOUTS = 3, 4, 4
MODEL = "demo"
MAX_RESPONSE = 256
"""Tokens a turn may have; the task that counts aloud needs more and is cut off."""


def demo(
    run: Annotated[
        str, typer.Option(help="Folder of the run, made if it is not there; or s3://bucket/run.")
    ] = "demo-run",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks and of everything that is sampled.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo run in that folder.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Record nothing; write an environment to start from into this folder: a taskset of one module, and its "
            "config.toml.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Record a small run on a bundled engine: 3 steps of 4 tasks with 4 rollouts, a tool, a user and a race.

    Some answers are wrong, one task ends in errors and one is cut off, so that there is something to see. Nothing is
    downloaded and no GPU is used.

        rolltape demo
        rolltape demo --write my-env

    Exit code: 0 recorded and verified; 1 something did not go as it should; 2 refused.
    """
    if write is not None:
        _start(write, overwrite=overwrite, as_json=as_json)
        return
    began = time.monotonic()
    folder = DemoFolder(place(run))
    summary = _record(folder, seed=seed, overwrite=overwrite, quiet=as_json)
    verification = _verify(folder)
    seconds = time.monotonic() - began
    if as_json:
        print_json(_as_json(folder, summary, verification, seconds))
    else:
        _show(folder, summary, verification, seconds)
    raise typer.Exit(summary.exit_code or int(bool(verification.errors)))


def next_commands(folder: DemoFolder) -> list[tuple[str, str]]:
    """Three things to try next: what it is for, and the command, through uv where the demo was started like that."""
    run, uv = folder.run, _uv()
    query = (
        "SELECT task_name, count(*) AS traces, avg(reward) FILTER (ended) AS reward "
        "FROM traces GROUP BY ALL ORDER BY reward"
    )
    return [
        ("Check the run against what the race must pay", f"{uv}rolltape verify {run} --expect {folder.expectation}"),
        ("Ask the traces with SQL", f'{uv}rolltape sql {run} "{query}"'),
        (
            f"Record more with the engine on its own ({uv}rolltape engine, in another terminal)",
            f"{uv}rolltape record {folder.environment} --run {run}-2 --engine http://127.0.0.1:30000 --model {MODEL} "
            f"--tokenizer {folder.tokenizer} --renderer qwen3 --no-thinking --max-response {MAX_RESPONSE}",
        ),
    ]


def start_commands(folder: Path) -> list[tuple[str, str]]:
    """What to do with a written environment: what it is for, and the command."""
    start, uv = Start(folder), _uv()
    config, tokenizer = (shlex.quote(str(path)) for path in (start.config, start.tokenizer))
    return [
        ("An engine that knows the question of this taskset, in another terminal", f"{uv}rolltape engine"),
        (
            "Record two steps of four tasks with four rollouts",
            f"{uv}rolltape record {config} --run runs/mine --engine http://127.0.0.1:30000 --model {MODEL} "
            f"--tokenizer {tokenizer} --renderer qwen3 --no-thinking --max-response {MAX_RESPONSE} "
            f"--groups {GROUPS} --rollouts {ROLLOUTS} --steps 2",
        ),
        ("What came of it", f"{uv}rolltape stats runs/mine"),
    ]


def _uv() -> str:
    return "uv run " if os.environ.get("UV") else ""


def _start(folder: Path, *, overwrite: bool, as_json: bool) -> None:
    """Write an environment to start from."""
    if overwrite:
        raise BadInput("--overwrite is about the demo's run; --write replaces nothing, choose a new folder for it.")
    start = Start(folder)
    start.write()
    if as_json:
        files = {name: str(getattr(start, name)) for name in ("config", "taskset", "tokenizer")}
        print_json({**files, "next": [command for _, command in start_commands(folder)]})
        return
    _say(
        f"{start.taskset} is the taskset, {start.config} names it, {start.tokenizer} is for the demo engine. To try it:"
    )
    for purpose, command in start_commands(folder):
        _say("", f"# {purpose}", command)


def _record(folder: DemoFolder, *, seed: int, overwrite: bool, quiet: bool) -> LiveSummary:
    """Prepare the folder, start the engine, run the steps."""
    from rolltape.record.versions import check_live

    check_live()
    folder.prepare(seed=seed, overwrite=overwrite)
    from rolltape.record.cli import run_with
    from rolltape.record.demo.policy import DemoPolicy
    from rolltape.record.engine.server import DemoEngine
    from rolltape.record.options import LiveOptions

    engine = DemoEngine(tokenizer_dir=folder.tokenizer, seed=seed, policy=DemoPolicy())
    with engine.serve_in_thread():
        options = LiveOptions(
            config=folder.environment,
            run=folder.run,
            engine=engine.url,
            model=MODEL,
            tokenizer=str(folder.tokenizer),
            rollouts=ROLLOUTS,
            groups=GROUPS,
            steps=STEPS,
            seed=seed,
            max_response=MAX_RESPONSE,
            renderer="qwen3",
            enable_thinking=False,
        )
        summary: LiveSummary = run_with(options, quiet=quiet)
    return summary


def _verify(folder: DemoFolder) -> Verification:
    """Check what was recorded, with the race's expectation."""
    from rolltape.replay.run import open_run
    from rolltape.replay.verification.expect import load_expectations
    from rolltape.replay.verification.verify import verify

    return verify(open_run(folder.run), load_expectations(folder.expectation))


def _as_json(folder: DemoFolder, summary: LiveSummary, verification: Verification, seconds: float) -> dict[str, Any]:
    return {
        "run": str(folder.run),
        "seconds": seconds,
        "record": summary.to_dict(),
        "verify": verification.to_dict(),
        "next": [command for _, command in next_commands(folder)],
    }


def _show(folder: DemoFolder, summary: LiveSummary, verification: Verification, seconds: float) -> None:
    from rolltape.replay.commands.verify import print_verification

    columns = ("step", "traces", "sampled tokens", "reward", "cut off", "emitted", "dropped, and why")
    cut = _cut_off(folder)
    rows = [_row(step, cut[step.step]) for step in summary.steps]
    out.print(table("What was recorded", columns, rows, right=columns[:-1]))
    lines = [f"  {reason}" for reason in alike(summary.reasons, 5)]
    lines += [f"Ended early: {summary.message}"] if summary.message else []
    _say("", *lines, "")
    print_verification(str(folder.run), verification)
    if summary.unwritten:
        _say("", f"Not everything is on disk: {summary.unwritten}")
        return
    _say("", f"Done in {seconds:.1f} s. The run is in {folder.run}. To try next:")
    for purpose, command in next_commands(folder):
        _say("", f"# {purpose}", command)


def _cut_off(folder: DemoFolder) -> Counter[int]:
    """Traces per step that ended at a limit, as the recorded rows say."""
    from rolltape.replay.run import open_run

    rows = open_run(folder.run).table("train", columns=["step", "is_truncated"])
    steps, truncated = (rows.column(name).to_pylist() for name in ("step", "is_truncated"))
    return Counter(step for step, cut in zip(steps, truncated, strict=True) if cut)


def _row(step: StepNews, cut: int) -> tuple[Any, ...]:
    """A step as a row of the table."""
    dropped = {name: count for name, count in step.counts.items() if count and name not in {"started", "emitted"}}
    why = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(dropped.items()))
    reward = "–" if step.reward is None else f"{step.reward:.3f}"
    return step.step, step.traces, f"{step.tokens:,}", reward, cut, step.emitted, why or "–"


def _say(*lines: str) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
