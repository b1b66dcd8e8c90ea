"""`rolltape diff`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rolltape.replay.console import out, print_json, progress, table
from rolltape.replay.diff import By, Change, Diff, Rows
from rolltape.replay.diff_bounds import Bound, Verdict
from rolltape.replay.diff_side import Side, read_side
from rolltape.replay.run import open_run
from rolltape.replay.words import MISSING, shortened
from rolltape.schema.errors import BadInput

_BESIDE = ("reward", "error_rate", "truncated_rate", "sampled_tokens")
"""Quantities whose change stands beside the one a table is about."""
_FOLDED = 8
"""Most settings of one side alone that get a line each: a run scored again, or imported, knows few of those of a live one."""
_SHORT = {"error_rate": "errors", "truncated_rate": "cut off", "sampled_tokens": "sampled", "reward": "reward"}


def diff(
    a: Annotated[str, typer.Argument(help="Folder or URL of the run to compare with.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Folder or URL of the run that is compared.", metavar="B")],
    by: Annotated[By, typer.Option(help="What to compare one by one.")] = "task",
    of: Annotated[str, typer.Option(help="Quantity of the table by task or step.")] = "reward",
    top: Annotated[int, typer.Option(help="Tasks or steps to show, those that changed most; 0 for all.", min=0)] = 20,
    step: Annotated[list[int] | None, typer.Option(help="Only this step; repeatable.", show_default=False)] = None,
    split: Annotated[str, typer.Option(help="Split to compare: train, eval, eval-NAME.")] = "train",
    max_drop: Annotated[
        list[str] | None,
        typer.Option(help="NAME=NUMBER: fail where a quantity drops by more; repeatable.", show_default=False),
    ] = None,
    max_rise: Annotated[
        list[str] | None,
        typer.Option(help="NAME=NUMBER: fail where a quantity rises by more; repeatable.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare two runs: settings, coverage, rewards, metrics, lengths, errors and truncation, over all and by task or step.

    Compared are the last tries of each rollout, of the newest attempts; those that failed or were cancelled are in no
    mean but error_rate. A change is B - A, with its standard error.

    Bounds make a gate for CI. NUMBER is absolute, or with % a share of A's value; names are those of the table:

        rolltape diff runs/main runs/branch --max-drop reward=0.05
        rolltape diff runs/main runs/branch --max-rise tokens=10%

    Exit code: 0 compared, 1 a bound does not hold, 2 refused.
    """
    bounds = [Bound.parse("drop", text) for text in max_drop or ()]
    bounds += [Bound.parse("rise", text) for text in max_rise or ()]
    with progress("reading, files") as tell:
        first = read_side(open_run(a), split, step, tell)
        second = read_side(open_run(b), split, step, lambda n: tell(len(first.commits) + n))
    found = Diff(first, second)
    verdicts = [bound.judge(found.quantities) for bound in bounds]
    if of not in found.quantities or (by != "none" and of not in first.quantities and of not in second.quantities):
        names = ", ".join(dict.fromkeys([*first.quantities, *second.quantities]))
        raise BadInput(f"--of {of}: no such quantity of a rollout; there are {names}.")
    if as_json:
        print_json({**found.to_dict(by), "bounds": [v.to_dict() for v in verdicts]})
    else:
        print_diff(found, by, of, top)
        _print_verdicts(verdicts)
    raise typer.Exit(0 if all(v.holds for v in verdicts) else 1)


def print_diff(found: Diff, by: By, of: str, top: int) -> None:
    """A comparison as tables; in one line where nothing differs."""
    for letter, side in (("A", found.a), ("B", found.b)):
        out.print(_head(letter, side), markup=False, highlight=False, soft_wrap=True)
    for note in found.notes:
        out.print(note, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    if found.same:
        out.print("no difference: settings, coverage and every quantity are equal", style="green")
        return
    _print_settings(found)
    _print_counts(found)
    _print_quantities(found)
    if by != "none":
        _print_rows(found, found.tasks if by == "task" else found.steps, of, top)


def _head(letter: str, side: Side) -> str:
    totals = side.totals
    known = ", ".join(value for value in side.identity.values() if value)
    return (
        f"{letter}  {side.name}: {side.split}, {totals['steps']} steps, {totals['rollouts']:,} rollouts in "
        f"{totals['groups']:,} groups{f'; {known}' if known else ''}"
    )


def _print_settings(found: Diff) -> None:
    if not found.settings:
        out.print("\nsettings: no difference")
        return
    alone = {side: [k for k, v in found.settings.items() if v[side] and not v[1 - side]] for side in (0, 1)}
    folded = {k for names in alone.values() if len(names) > _FOLDED for k in names}
    rows = [(key, *(_values(v) for v in values)) for key, values in found.settings.items() if key not in folded]
    out.print()
    if rows:
        out.print(table("Settings that differ", ("setting", "A", "B"), rows))
    for side, names in alone.items():
        if folded.issuperset(names) and names:
            text = f"{len(names)} settings are of {'AB'[side]} only (--json has their values): {', '.join(names)}"
            out.print(text, markup=False, highlight=False)


def _values(values: Sequence[str]) -> str:
    return shortened(", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else ""), 60) or MISSING


def _print_counts(found: Diff) -> None:
    """What became of the tries, and how much there is."""
    (all_a, all_b), rows = found.coverage["started"], []
    for name, (a, b) in found.coverage.items():
        rows.append((name, f"{a:,}", f"{b:,}", f"{b - a:+,}" if b != a else "", _share(a, all_a), _share(b, all_b)))
    for name in ("tokens", "sampled_tokens"):
        a, b = found.totals[name]
        rows.append((f"{name.replace('_', ' ')} in all", f"{a:,}", f"{b:,}", f"{b - a:+,}" if b != a else "", "", ""))
    right = ("A", "B", "change", "share A", "share B")
    out.print()
    out.print(table("Tries, by what became of them", ("", *right), rows, right))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole and part else MISSING


def _print_quantities(found: Diff) -> None:
    right = ("A", "B", "change", "±", "n A", "n B", "null A", "null B", "not finite")
    wild = any(c.a.not_finite or c.b.not_finite for c in found.quantities.values())
    columns = right if wild else right[:-1]
    rows = []
    for name, c in found.quantities.items():
        null = (c.a.unscored or "", c.b.unscored or "", f"{c.a.not_finite} / {c.b.not_finite}")
        rows.append((name, *_change(c), f"{c.a.n:,}", f"{c.b.n:,}", *(null if wild else null[:-1])))
    out.print()
    out.print(table("Means over rollouts; ± is the standard error of the change", ("", *columns), rows, columns))
    if any(failed := found.totals["failed"]):
        text = "failed and cancelled rollouts, {:,} of A and {:,} of B, are in no mean but error_rate".format(*failed)
        out.print(text, style="dim", markup=False, highlight=False)


def _change(c: Change) -> tuple[str, str, str, str]:
    return _number(c.a.mean), _number(c.b.mean), _signed(c.change), _number(c.se) if c.change else ""


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _signed(value: float | None) -> str:
    if not value:
        return MISSING if value is None else "0"
    return f"{'+' if value > 0 else '-'}{_number(abs(value))}"


def _print_rows(found: Diff, rows: Rows, of: str, top: int) -> None:
    out.print()
    if not rows.rows:
        out.print(f"no {rows.by} is in both runs ({len(rows.only_a)} only in A, {len(rows.only_b)} only in B)")
        return
    changed = rows.by_size(of)
    shown = changed[: top or None]
    if rows.by == "step":
        shown.sort(key=lambda row: int(row.name))
    beside = [name for name in _BESIDE if name != of and name in rows.rows[0].changes]
    cells = [
        (
            row.name,
            row.a,
            row.b,
            *_change(row.changes[of]),
            *(_signed(change) if (change := row.changes[name].change) else "" for name in beside),
        )
        for row in shown
    ]
    right = ("n A", "n B", "A", "B", "change", "±", *(_SHORT[name] for name in beside))
    if shown:
        out.print(table(f"{of} by {rows.by}", (rows.by, *right), cells, right))
    for line in _about(found, rows, of, len(shown), len(changed)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _about(found: Diff, rows: Rows, of: str, shown: int, changed: int) -> list[str]:
    """What the table does not say."""
    lines = [f"{of} changed in {changed:,} of the {len(rows.rows):,} {rows.by}s that both runs have"]
    if shown < changed:
        lines[0] += f"; shown are the {shown} largest changes (--top 0 shows all)"
    unknown = sum(row.changes[of].change is None for row in rows.rows)
    if unknown:
        lines.append(f"{unknown:,} {rows.by}s have no {of} in one of the runs")
    if rows.by == "task":
        paired = found.paired(of)
        if paired.change is not None:
            noise = MISSING if paired.se is None else _number(paired.se)
            lines.append(f"mean change over {paired.tasks:,} tasks: {_signed(paired.change)} ± {noise}")
        if any(rows.unnamed):
            a, b = rows.unnamed
            lines.append(f"{a:,} rollouts of A and {b:,} of B are of tasks without key, index or name")
    if rows.only_a or rows.only_b:
        lines.append(f"{len(rows.only_a):,} {rows.by}s are only in A, {len(rows.only_b):,} only in B")
    return lines


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    if verdicts:
        out.print()
    for v in verdicts:
        out.print(
            f"{'ok' if v.holds else 'FAILED'}  --max-{v.bound.kind}: {v.message}",
            style="green" if v.holds else "red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
