"""`rolltape diff`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from rolltape.replay.diff import By, Change, Diff, Rows
from rolltape.replay.diff_bounds import Bound, Verdict
from rolltape.replay.diff_side import Side, read_side
from rolltape.replay.printing.console import out, print_json, progress, table
from rolltape.replay.printing.fitting import left_out, no_room
from rolltape.replay.printing.words import MISSING, counted, shortened
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput

_BESIDE = ("reward", "error_rate", "truncated_rate", "sampled_tokens")
"""Quantities whose change stands beside the one a table is about."""
_FOLDED = 8
"""Most settings of one side alone that get a line each: a run scored again, or imported, knows few of those of a live one.
More are counted, and named with --all."""
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
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also what is equal, every task or step, and names of settings that one run alone has."
        ),
    ] = False,
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
        print_diff(found, by, of, top, everything)
        _print_verdicts(verdicts)
    raise typer.Exit(0 if all(v.holds for v in verdicts) else 1)


def print_diff(found: Diff, by: By, of: str, top: int, everything: bool = False) -> None:
    """A comparison as tables of what differs, and lines of what does not; with `everything` all as tables."""
    for letter, side in (("A", found.a), ("B", found.b)):
        out.print(_head(letter, side), markup=False, highlight=False, soft_wrap=True)
    for note in found.notes:
        out.print(note, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    if found.same and not everything:
        out.print("no difference: settings, coverage and every quantity are equal", style="green")
        return
    _print_settings(found, everything)
    _print_counts(found, everything)
    _print_quantities(found, everything)
    if by != "none":
        _print_rows(found, found.tasks if by == "task" else found.steps, of, top, everything)


def _head(letter: str, side: Side) -> str:
    totals = side.totals
    known = ", ".join(value for value in side.identity.values() if value)
    return (
        f"{letter}  {side.name}: {side.split}, {counted(totals['steps'], 'step')}, {counted(totals['rollouts'], 'rollout')} in "
        f"{counted(totals['groups'], 'group')}{f'; {known}' if known else ''}"
    )


def _print_settings(found: Diff, everything: bool) -> None:
    if not found.settings:
        out.print("\nsettings: no difference")
        return
    alone = {side: [k for k, v in found.settings.items() if v[side] and not v[1 - side]] for side in (0, 1)}
    folded = {k for names in alone.values() if len(names) > _FOLDED for k in names}
    rows = [(key, *(_values(v) for v in values)) for key, values in found.settings.items() if key not in folded]
    out.print()
    if rows:
        out.print(table("Settings that differ", ("setting", "A", "B"), rows, fold=("setting", "A", "B"), dense=True))
    for side, names in alone.items():
        if folded.issuperset(names) and names:
            more = f"--json has their values): {', '.join(names)}" if everything else "--all names them)"
            out.print(f"{counted(len(names), 'setting')} of {'AB'[side]} only ({more}", markup=False, highlight=False)


def _values(values: Sequence[str]) -> str:
    return shortened(", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else ""), 60) or MISSING


def _print_counts(found: Diff, everything: bool) -> None:
    """What became of the tries, and how much there is."""
    counts = {name.replace("_", " "): pair for name, pair in found.coverage.items()}
    counts |= {f"{name.replace('_', ' ')} in all": found.totals[name] for name in ("tokens", "sampled_tokens")}
    shown = {name: pair for name, pair in counts.items() if everything or pair[0] != pair[1]}
    if shown:
        shown = {"started": counts["started"], **shown}
        all_a, all_b = counts["started"]
        cells = [
            (name, f"{a:,}", f"{b:,}", f"{b - a:+,}" if b != a else "0", *_shares(name, a, b, all_a, all_b))
            for name, (a, b) in shown.items()
        ]
        _print_table("Tries, by what became of them", ("A", "B", "change", "share A", "share B"), cells, [_SHARES])
    _print_same("tries", {name: f"{a:,}" for name, (a, _) in counts.items() if name not in shown and a})


_SHARES = ("share A", "share B")


def _shares(name: str, a: int, b: int, all_a: int, all_b: int) -> tuple[str, str]:
    return ("", "") if name.endswith("in all") else (_share(a, all_a), _share(b, all_b))


def _print_same(what: str, values: Mapping[str, str]) -> None:
    """What is equal in both runs."""
    if values:
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        out.print(f"{what}, the same in both: {text}", style="dim", markup=False, highlight=False)


def _print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], spare: Sequence[Any], first: str = ""
) -> None:
    """A table of figures as wide as there is room; `first` is the head of the column of names."""
    cells = {name: [row[i] for row in rows] for i, name in enumerate((first, *columns))}
    cells = {name: column for name, column in cells.items() if name == first or any(column)}
    gone = left_out(cells, out.width, spare, {first: 14})
    right = [name for name in cells if name != first]
    out.print()
    out.print(table(title, list(cells), list(zip(*cells.values(), strict=True)), right, fold=(first,), dense=True))
    if gone:
        out.print(no_room(gone), style="dim", markup=False, highlight=False)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole and part else MISSING


def _print_quantities(found: Diff, everything: bool) -> None:
    columns: tuple[str, ...] = ("A", "B", "change", "±", "n A", "n B", "null A", "null B", "not finite")
    wild = any(c.a.not_finite or c.b.not_finite for c in found.quantities.values())
    columns = columns if wild else columns[:-1]
    rows = []
    for name, c in found.quantities.items():
        if everything or not _is_equal(c):
            null = (c.a.unscored or "", c.b.unscored or "", f"{c.a.not_finite} / {c.b.not_finite}")
            rows.append((name, *_change(c), f"{c.a.n:,}", f"{c.b.n:,}", *(null if wild else null[:-1])))
    if rows:
        title = "Means over rollouts; ± is the standard error of the change"
        _print_table(title, columns, rows, [("n A", "n B"), "±", ("null A", "null B")])
        if any(failed := found.totals["failed"]):
            text = "failed and cancelled rollouts, {:,} of A and {:,} of B, are in no mean but error_rate".format(
                *failed
            )
            out.print(text, style="dim", markup=False, highlight=False)
    same = {name: _number(c.a.mean) for name, c in found.quantities.items() if _is_equal(c) and not everything}
    _print_same("means", same)


def _is_equal(c: Change) -> bool:
    """Whether both means are the same, whatever they are of: of how many rollouts more failed, error_rate says."""
    a, b = ((m.mean is None, m.unscored, m.not_finite) for m in (c.a, c.b))
    return a == b and not c.change


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


def _print_rows(found: Diff, rows: Rows, of: str, top: int, everything: bool) -> None:
    if not rows.rows:
        out.print(f"\nno {rows.by} is in both runs ({len(rows.only_a)} only in A, {len(rows.only_b)} only in B)")
        return
    changed = rows.by_size(of)
    shown = list(rows.rows) if everything else changed[: top or None]
    if rows.by == "step":
        shown.sort(key=lambda row: int(row.name))
    beside = [name for name in _BESIDE if name != of and name in rows.rows[0].changes]
    cells = [
        (
            row.name,
            row.changes[of].a.n,
            row.changes[of].b.n,
            *_change(row.changes[of]),
            *(_signed(change) if (change := row.changes[name].change) else "" for name in beside),
        )
        for row in shown
    ]
    right = ("n A", "n B", "A", "B", "change", "±", *(_SHORT[name] for name in beside))
    if shown:
        spare = [*(_SHORT[name] for name in reversed(beside)), ("n A", "n B"), "±"]
        _print_table(f"{of} by {rows.by}", right, cells, spare, rows.by)
    else:
        out.print()
    for line in _about(found, rows, of, len(shown), len(changed)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _about(found: Diff, rows: Rows, of: str, shown: int, changed: int) -> list[str]:
    """What the table does not say."""
    lines = [f"{of} changed in {changed:,} of {counted(len(rows.rows), rows.by)} that both runs have"]
    if shown < changed:
        lines[0] += f"; shown are the {counted(shown, 'largest change')} (--top 0 shows all)"
    unknown = sum(row.changes[of].change is None for row in rows.rows)
    if unknown:
        lines.append(f"{counted(unknown, rows.by)} without {of} in one of the runs")
    if rows.by == "task":
        paired = found.paired(of)
        if paired.change is not None:
            noise = MISSING if paired.se is None else _number(paired.se)
            lines.append(f"mean change over {counted(paired.tasks, 'task')}: {_signed(paired.change)} ± {noise}")
        if any(rows.unnamed):
            a, b = rows.unnamed
            lines.append(f"{counted(a, 'rollout')} of A and {b:,} of B: their tasks have no key, index or name")
    if rows.only_a or rows.only_b:
        lines.append(f"only in A: {counted(len(rows.only_a), rows.by)}; only in B: {len(rows.only_b):,}")
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
