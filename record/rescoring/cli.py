"""`rolltape rescore`: what would other rewards have given?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rolltape.replay.printing.console import err, out, print_json, progress, table
from rolltape.replay.printing.words import counted

if TYPE_CHECKING:
    from rolltape.record.rescoring.rescore import Rescored

SHOWN = 10
"""Rows of the tables of groups and traces, and kinds of failures, that are printed; --json has more."""


def rescore(
    run: Annotated[str, typer.Argument(help="Folder of the recorded run.", show_default=False)],
    config: Annotated[
        Path, typer.Option(help="Verifiers' EnvConfig as TOML: the taskset to score by.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--out", help="Folder of the new run.", show_default=False)],
    keep: Annotated[
        bool,
        typer.Option(
            "--keep-unscorable", help="Keep the recorded scores of signals that cannot be scored offline, not null."
        ),
    ] = False,
    concurrency: Annotated[int, typer.Option(help="Traces scored at once.")] = 64,
    step: Annotated[list[int] | None, typer.Option(help="Only this step; repeatable.", show_default=False)] = None,
    split: Annotated[
        str | None, typer.Option(help="Only this split, such as train or eval-NAME.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a re-scoring into --out that was cut short.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Stop at the first trace that cannot be scored, and do not write its step; refuse traces that a task class of "
            "another name made.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Score recorded traces again by a taskset's rewards, metrics, judges and group rewards, into a new run.

    Nothing is sampled: the same traces get new scores, and group rewards compare whole recorded groups. What needs the
    runtime of the live rollout (a sandbox, its files) is named, and null unless --keep-unscorable. Old scores stand beside
    new ones in OUT/rescored/, and both runs join by trace_id. Each step is committed by itself.

    Exit code: 0 scored; 1 some traces could not be scored, or lack a total reward as their group could not be compared; 2
    refused, or stopped by --strict.

    For example:

        rolltape rescore runs/first --config env.toml --out runs/stricter
    """
    from rolltape.record.rescoring.plan import RescoreOptions, look_first
    from rolltape.record.versions import check_live

    options = RescoreOptions(
        keep=keep, concurrency=concurrency, steps=tuple(step or ()), split=split, resume=resume, strict=strict
    )
    look_first(run, config, to, options)
    check_live()
    from rolltape.record.rescoring.bounded import threads_left_behind
    from rolltape.record.rescoring.rescore import rescore as score_again

    with threads_left_behind():
        try:
            with progress("re-scoring, traces") as tell:
                result = score_again(run, config, to, options, tell)
        except KeyboardInterrupt:
            err.print(f"Stopped. The steps that were done are in {to}; --resume goes on.", markup=False, soft_wrap=True)
            raise typer.Exit(130) from None
        if as_json:
            print_json({"path": to, **result.to_dict()})
        else:
            print_rescored(run, to, result)
        raise typer.Exit(1 if _lost(result) else 0)


def _lost(result: Rescored) -> bool:
    """Whether some trace could not be scored, now or in a part that was there before."""
    changes = result.changes
    return bool(result.failures or (changes and (changes.counts["failed"] or changes.missing)))


def print_rescored(run: str, to: str, result: Rescored) -> None:
    """A re-scoring as tables: what changed by name, the groups and traces that changed most, and what could not be scored."""
    assert result.changes is not None
    counts = result.changes.counts
    resumed = f" ({result.resumed} of them before)" if result.resumed else ""
    _say(
        f"{run} → {to}: {counted(result.steps + result.resumed, 'part')}{resumed}, {counted(counts['traces'], 'trace')}; total "
        f"reward: {counts['scored']} scored, {counts['failed']} failed, {counts['skipped']} skipped, "
        f"{counts['untouched']} untouched; {counts['changed']} changed"
    )
    for line in _named(result.signals):
        _say(line)
    for note, count in result.notes.items():
        _say(f"{count} {note}")
    if odd := sum(name["no_number"] for name in result.changes.names if name["kind"] == "total"):
        _say(f"{counted(odd, 'trace')} with a total reward that is NaN or infinite: in no mean, and not to be trained")
    out.print()
    columns = ("name", "weight", "old mean", "n old", "new mean", "n new", "traces", "changed", "new scores")
    rows = [(name["split"], *_row(name)) for name in result.changes.names]
    _print_table(result, f"Old ({run}) and new ({to}) scores, weighted", columns, rows, right=columns[1:-1])
    _say(
        "n: rollouts of the mean, those that came to their end, then and now, with a finite score; changed, new scores: of all "
        "traces"
    )
    _print_changes(result)
    _print_skipped(result.changes.skipped)
    _print_failures(result.failures)


def _named(signals: Sequence[Mapping[str, Any]]) -> list[str]:
    """The signals that cannot be scored offline, as a line."""
    unscorable = [f"{s['name']} ({s['kind']})" for s in signals if s["unscorable"]]
    return [f"cannot be scored without the runtime: {', '.join(unscorable)}"] if unscorable else []


def _row(name: Mapping[str, Any]) -> tuple[Any, ...]:
    became = ", ".join(f"{n} {status}" for status, n in name["statuses"].items())
    became += f" (of them {name['no_number']} NaN or infinite)" if name["no_number"] else ""
    label = "total reward" if name["kind"] == "total" else name["name"]
    label += " (metric)" if name["kind"] == "metric" else ""
    weights = ", ".join(f"{w:g}" for w in name["weights"] or ())
    means = (_number(name["old_mean"]), name["old_n"], _number(name["new_mean"]), name["new_n"])
    return label, weights, *means, name["traces"], name["changed"], became


def _print_table(
    result: Rescored, title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]], *, right: Sequence[str]
) -> None:
    """A table of `rows` whose first item is the split, which is a column where there is more than one."""
    assert result.changes is not None
    if len(result.changes.splits) > 1:
        columns = ("split", *columns)
    else:
        rows = [row[1:] for row in rows]
    out.print(table(title, columns, rows, right=right))


def _print_changes(result: Rescored) -> None:
    assert result.changes is not None
    columns = ("step", "group", "task", "reward", "old sum", "new sum", "new - old")
    if result.changes.groups:
        out.print()
        title = f"Group sums that changed most ({len(result.changes.groups)} changed)"
        groups = [(*_place(g), g["name"], *_numbers(g)) for g in result.changes.groups[:SHOWN]]
        _print_table(result, title, columns, groups, right=("step", "group", *columns[4:]))
    columns = ("step", "group", "task", "trace", "old total", "new total", "new - old")
    if result.changes.traces:
        out.print()
        traces = [(*_place(t), t["trace_id"], *_numbers(t)) for t in result.changes.traces[:SHOWN]]
        _print_table(result, "Traces that changed most", columns, traces, right=("step", "group", *columns[4:]))


def _place(change: Mapping[str, Any]) -> tuple[Any, ...]:
    return change["split"], change["step"], change["group_index"], change["task_name"]


def _numbers(change: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_number(change[name]) for name in ("old", "new", "difference"))


def _print_skipped(skipped: Sequence[Mapping[str, Any]]) -> None:
    """A line for each reason why totals were skipped, the commonest first."""
    for kind in skipped[:SHOWN]:
        traces, missing = kind["traces"], kind["missing"]
        due = "" if not missing else " that should have one" if missing == traces else f" ({missing} should have one)"
        _say(f"no total reward: {counted(traces, 'trace')}{due}, {kind['reason']}")
    if len(skipped) > SHOWN:
        _say(f"… and {len(skipped) - SHOWN} more reasons; --json lists them")


def _print_failures(failures: Sequence[Mapping[str, Any]]) -> None:
    """A line for each signal and what it raised."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for failed in failures:
        alike.setdefault((failed["signal"], failed["error"]), []).append(failed)
    for (signal, error), mine in list(alike.items())[:SHOWN]:
        others = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
        _say(f"not scored: trace {mine[0]['trace_id']} (step {mine[0]['step']}){others}, {signal}: {error}")
    if len(alike) > SHOWN:
        _say(f"… and {len(alike) - SHOWN} more kinds of failures; --json lists them")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)
