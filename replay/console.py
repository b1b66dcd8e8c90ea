"""How commands print: one console for results, one for everything else, JSON where it is asked for."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

out = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)
"""Results, on standard output."""
err = Console(stderr=True)
"""Progress and errors, on standard error."""


def print_json(value: Any) -> None:
    """Print `value` as JSON that every reader takes: NaN and infinities become text."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str] = ()) -> Table:
    """A table; columns named in `right` hold numbers. Cells are text, never markup."""
    result = Table(title=escape(title), title_justify="left", show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column in right else "left"
        result.add_column(escape(column), justify=justify, overflow="fold", no_wrap=i == 0)
    for row in rows:
        result.add_row(*("" if cell is None else escape(str(cell)) for cell in row))
    return result


@contextmanager
def progress(what: str) -> Iterator[Any]:
    """A progress bar while something long runs, where standard error is a terminal; yields a function of (done, total)."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)
