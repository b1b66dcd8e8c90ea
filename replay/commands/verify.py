"""`rolltape verify`: is a run as it was written, and with --retokenize and --logprobs: would it come out the same today?"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rolltape.replay.options import BranchPolicy
from rolltape.replay.printing.console import out, print_json, progress, say_error, table
from rolltape.replay.printing.findings import lines
from rolltape.replay.printing.fitting import left_out, no_room
from rolltape.replay.printing.words import counted
from rolltape.replay.tokenizer import HELP, quiet
from rolltape.schema.errors import BadInput, MissingExtra

RENDERING, SCORING = "Rendering again (--retokenize)", "Log-probs again (--logprobs)"

Check = Callable[[Any], Any]
"""Looks at an opened run; what it gives has `findings`, `compared` (0 where nothing was checked) and `to_dict`."""


def verify_command(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    expect: Annotated[
        Path | None, typer.Option(help="TOML of expectations: branches, group_size, group_reward_sum …")
    ] = None,
    branch_policy: Annotated[
        BranchPolicy | None,
        typer.Option(help="Convert like this instead of as recorded: siblings trains every branch."),
    ] = None,
    retokenize: Annotated[
        bool,
        typer.Option("--retokenize", help="Render the messages again, compare the ids.", rich_help_panel=RENDERING),
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help=f"{HELP} (default: the recorded one).", rich_help_panel=RENDERING)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model whose renderer to take where none is recorded.", rich_help_panel=RENDERING),
    ] = None,
    renderer: Annotated[
        str | None, typer.Option(help="Renderer, such as qwen3, where none is recorded.", rich_help_panel=RENDERING)
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking", help="Its switch, where it is not recorded.", rich_help_panel=RENDERING
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="JSON list of tool schemas, where they are not recorded.", rich_help_panel=RENDERING),
    ] = None,
    logprobs: Annotated[
        str | None,
        typer.Option(
            "--logprobs",
            metavar="URL",
            help="Score the tokens on this SGLang engine, compare log-probs.",
            rich_help_panel=SCORING,
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of traces where none is recorded.", rich_help_panel=SCORING)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", rich_help_panel=SCORING)] = 32,
    lora: Annotated[str | None, typer.Option(help="Adapter to score with.", rich_help_panel=SCORING)] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With either: only so many traces of each step, spread over it.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="With either: drift, forks and what could not be scored are findings.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every finding on a line of its own, not the first few of each code.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables; it lists every finding.")
    ] = False,
) -> None:
    r"""Check a run: bytes, counts, rows, groups, and whether it still converts to the Samples of the live run.

    Exit code: 0 clean (warnings are shown) or nothing committed yet, 1 findings, 2 not readable, bad usage, or --retokenize
    or --logprobs had nothing to compare. A journal that a dead writer left in a run without a committed step is a finding:
    `rolltape recover` settles it.

    An expectations file, for a taskset whose `fastest` takes 0.5 once a group:

        group_size = 4
        \[group_reward_sum]
        fastest = 0.5

    For example:

        rolltape verify runs/first --expect expect.toml
        rolltape verify runs/first --retokenize --tokenizer Qwen/Qwen3-8B \\
            --logprobs http://127.0.0.1:30000
    """
    from rolltape.replay.run import open_run
    from rolltape.replay.verification.expect import load_expectations
    from rolltape.replay.verification.verify import verify

    rendering = {"tokenizer": tokenizer, "model": model, "renderer": renderer, "thinking": thinking, "tools": tools}
    scoring = {"temperature": temperature, "lora": lora}
    _check_options(retokenize, rendering, logprobs, scoring, limit, strict)
    checks = {}
    if retokenize:
        checks["retokenize"] = _retokenize(rendering, limit, strict)
    if logprobs is not None:
        checks["logprobs"] = _recompute(logprobs, scoring, concurrency, limit, strict)
    expected = None if expect is None else load_expectations(expect)
    opened = open_run(run)
    with progress("verifying, files") as tell:
        result = verify(opened, expected, tell, branch_policy=branch_policy)
    more = {name: check(opened) for name, check in checks.items()}
    result = replace(result, findings=[*result.findings, *(f for found in more.values() for f in found.findings)])
    nothing = " ".join(_nothing(name, found, limit) for name, found in more.items() if not found.compared)
    if as_json:
        said = {name: found.to_dict() for name, found in more.items()}
        said |= {"error": nothing} if nothing else {}
        clean = result.clean and all(found.compared for found in more.values())
        print_json({"path": run, "run": opened.run_id, **result.to_dict(), "clean": clean, **said})
    else:
        print_verification(run, result, more, everything=everything)
    if nothing:
        say_error(BadInput(nothing))
        raise typer.Exit(2)
    raise typer.Exit(1 if result.errors else 0)


def _nothing(name: str, found: Any, limit: int | None) -> str:
    """Why a check compared nothing, and what to do."""
    reasons = [*_noted(found.notes), *(["its findings say why"] if found.findings else [])]
    why = "; ".join(reasons) or "there is no trace"
    more = "" if limit is None else ", look at more traces (--limit)"
    return f"--{name} compared nothing: {why}. Give what is missing{more}, or leave --{name} out."


def _check_options(
    retokenize: bool,
    rendering: Mapping[str, Any],
    logprobs: str | None,
    scoring: Mapping[str, Any],
    limit: int | None,
    strict: bool,
) -> None:
    """Raise BadInput for an option of a check that is not asked for."""
    of_both = {"limit": limit, "strict": strict or None}
    for asked, name, options in (
        (retokenize, "--retokenize", rendering),
        (logprobs is not None, "--logprobs", scoring),
        (retokenize or logprobs is not None, "--retokenize or --logprobs", of_both),
    ):
        given = [option for option, value in options.items() if value is not None]
        if given and not asked:
            raise BadInput(f"--{given[0]} says how {name} is done, which is not asked for; add it, or leave this out.")


# -- what needs the extra


def _live(option: str, module: str) -> Any:
    """A module that checks again. Raises MissingExtra, naming the option, where what it needs is not installed."""
    quiet()
    versions = importlib.import_module("rolltape.record.versions")
    try:
        versions.check_live()
    except MissingExtra as error:
        raise MissingExtra(f"`rolltape verify {option}` needs the extra 'live': {error}") from error
    return importlib.import_module(f"rolltape.record.rechecking.{module}")


def _retokenize(given: Mapping[str, Any], limit: int | None, strict: bool) -> Check:
    """What renders a run again. Raises BadInput for options that cannot be."""
    module, settings = _live("--retokenize", "retokenize"), _live("--retokenize", "renderings")
    options = settings.RetokenizeOptions(
        tokenizer=given["tokenizer"],
        model=given["model"],
        renderer=settings.RendererSettings(given["renderer"], given["thinking"]),
        tools=given["tools"],
        limit=limit,
        strict=strict,
    )

    def check(run: Any) -> Any:
        with progress("rendering again, traces") as tell:
            return module.retokenize(run, options, tell)

    return check


def _recompute(engine: str, given: Mapping[str, Any], concurrency: int, limit: int | None, strict: bool) -> Check:
    """What scores the tokens of a run again. Raises BadInput for options that cannot be."""
    module = _live("--logprobs", "logprobs")
    options = module.LogprobOptions(engine=engine, concurrency=concurrency, limit=limit, strict=strict, **given)

    def check(run: Any) -> Any:
        with progress("scoring again, traces") as tell:
            return module.recompute(run, options, tell)

    return check


# -- printing


def print_verification(
    path: str, result: Any, more: Mapping[str, Any] | None = None, *, everything: bool = False
) -> None:
    """A verification as a line of counts, its findings, what was checked beyond it, and a verdict."""
    what = [counted(result.files, "file"), counted(result.traces, "trace"), counted(result.tokens, "stored token")]
    what += [counted(result.annotations, "annotation")] if result.annotations else []
    _say(f"{path}: {', '.join(what)}; {_converted(result)}")
    if any(result.counts.values()):
        _say("tries: " + ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in result.counts.items() if n))
    if lost := sorted(result.left_out.items(), key=lambda item: -item[1]):
        why = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in lost)
        total = sum(result.left_out.values())
        _say(f"{counted(total, 'trace')} {'gives' if total == 1 else 'give'} no Sample: {why}")
    for line, severity in lines(result.findings, everything):
        _say(line, style="red" if severity == "error" else "yellow")
    for note in result.notes:
        _say(f"note: {note}")
    checked = {name: found for name, found in (more or {}).items() if found.compared}
    for name, found in checked.items():
        {"retokenize": _print_retokenized, "logprobs": _print_recomputed}[name](found.to_dict())
    warnings = len(result.findings) - len(result.errors)
    verdict = [counted(len(result.errors), "finding")] if result.errors else []
    verdict += ["clean"] if result.clean and len(checked) == len(more or {}) else []
    verdict += [counted(warnings, "warning")] if warnings else []
    if not result.parts and not any(f.code == "commit" for f in result.findings):
        verdict.insert(0, "nothing was checked: no step is committed")
    if verdict:
        _say(", ".join(verdict), style="red" if result.errors else "green" if result.parts else "yellow")


def _converted(result: Any) -> str:
    """What converting the rows again gave, and what it was compared with."""
    samples = counted(result.samples, "Sample")
    other = f"{counted(result.not_compared, 'batch', 'batches')} not compared, being of another branch policy"
    if result.digests:
        batches = counted(result.digests, "batch", "batches")
        compared = f"{batches} converted again and compared with recorded digests, {samples}"
        return f"{compared}; {other}" if result.not_compared else compared
    if result.not_compared:
        return f"{samples}; {other}"
    if result.imported:
        return f"{samples}; imported, so there is no batch of a live run to compare them with"
    return f"{samples}; no batch was recorded to compare them with" if result.samples else "nothing to convert"


_VERDICTS = {
    "same": "as recorded",
    "drift": "what nobody sampled comes out not_compared: another tokenizer, template or setting",
    "rewritten": "a reply that the template writes not_compared than the model did",
    "noncanonical": "sampled ids that their own text is not tokenised into",
    "unknown": "holds tool schemas that are not recorded",
}


def _print_retokenized(said: Mapping[str, Any]) -> None:
    counts = said["counts"]
    out.print()
    nodes = [(name, counts[name], meaning) for name, meaning in _VERDICTS.items() if counts.get(name)]
    _say(
        "Rendered again: "
        + ", ".join(
            (
                counted(counts.get("traces", 0), "trace"),
                counted(counts.get("branches", 0), "branch", "branches"),
                counted(counts.get("nodes", 0), "node"),
                counted(counts.get("tokens", 0), "token"),
            )
        )
    )
    out.print(table("", ("nodes", "count", "meaning"), nodes, right=("count",), fold=("meaning",), dense=True))
    _say(f"tokenizer: {', '.join(said['tokenizers']) or 'none was needed'}")
    forks = [f"{n} {name.removeprefix('forks ')}" for name, n in counts.items() if name.startswith("forks") and n]
    _say(f"forks: {', '.join(forks) or 'none'}")
    _print_notes(said["notes"])


def _print_recomputed(said: Mapping[str, Any]) -> None:
    steps = [(f"{s['split']} {s['step']}", *_gap(s)) for s in said["steps"]]
    out.print()
    counts = said["counts"]
    _say(
        f"Log-probs of {counted(counts.get('traces', 0), 'trace')} by "
        f"{counted(counts.get('requests', 0), 'request')}: recomputed - recorded; k3 "
        "estimates KL(recorded || recomputed)"
    )
    total = [("all", *_gap(said["total"]))]
    _print_gaps("step", [*steps, *total])
    out.print()
    _print_gaps("tokens before", [(f"from {p['from']:,}", *_gap(p)) for p in said["positions"]])
    for worst in said["worst"][:3]:
        place = f"step {worst['step']}, trace {worst['trace_id']}, node {worst['node']}, token {worst['position']}"
        _say(f"far apart: {place}: recorded {worst['recorded']:.6g}, recomputed {worst['recomputed']:.6g}")
    versions = said["weight_versions"]
    if versions["engine"] and set(versions["engine"]) != set(versions["recorded"]):
        then, now = (", ".join(sorted(versions[k])) or "none" for k in ("recorded", "engine"))
        _say(f"weight versions: recorded {then}; the engine's {now}")
    _print_notes(said["notes"])


_GAPS = ("tokens", "mean |difference|", "largest", "mean difference", "k3")


def _print_gaps(head: str, rows: Sequence[Sequence[str]]) -> None:
    cells = {name: [row[i] for row in rows] for i, name in enumerate((head, *_GAPS))}
    gone = left_out(cells, out.width, ("mean difference", "largest"))
    out.print(table("", list(cells), list(zip(*cells.values(), strict=True)), right=_GAPS, dense=True))
    if gone:
        _say(no_room(gone))


def _gap(gap: Mapping[str, Any]) -> Sequence[str]:
    numbers = (gap[name] for name in ("mean_absolute", "max_absolute", "mean", "k3"))
    return f"{gap['tokens']:,}", *("–" if number is None else f"{number:.3g}" for number in numbers)


def _print_notes(notes: Mapping[str, int]) -> None:
    for note in _noted(notes):
        _say(note)


def _noted(notes: Mapping[str, int]) -> Iterator[str]:
    for note, count in notes.items():
        head, _, rest = note.partition(" ")
        many = head in ("traces", "files")
        yield f"{counted(count, head[:-1])} {rest}" if many else f"{note} ({counted(count, 'trace')})"


def _say(line: str, style: str | None = None) -> None:
    out.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
