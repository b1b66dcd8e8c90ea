"""How commands print: one console for results, one for everything else, JSON where it is asked for.

What a recorded trace says is foreign text: it may hold escape sequences that recolour a terminal, retitle it, or write over
what stands there. No control character of it reaches the terminal through these consoles: each is shown as an escape.
"""

from __future__ import annotations

import codecs
import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.box import HEAVY_HEAD, Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but for tab and newline
    "\u2028\u2029\u202a-\u202e\u2066-\u2069"  # line separators; what turns the direction of the text around it
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves of characters, which no output takes; invisible tags
)


def printable(text: str, *, one_line: bool = False) -> str:
    r"""`text` with every character that could do something to a terminal shown as an escape, such as \x1b.

    Newlines and tabs stay, or with `one_line` become \n and \t.
    """
    text = _UNPRINTABLE.sub(_escape, text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if one_line else text


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@contextmanager
def _naming(stream: str) -> Iterator[None]:
    """Let an error of writing, of a full disk perhaps, name the stream that could not be written."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = stream
        raise


class SafeConsole(Console):
    """A rich Console through which no control character of a text gets: see `printable`. Emoji codes stay as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"emoji": False, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does; an error of writing names the stream."""
        with _naming("standard error" if self.stderr else "standard output"):
            super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as rich text, measured as it will be printed."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of anything that can be printed. Rich's own control codes are segments of another kind, and stay."""
        for segment in super().render(renderable, options):
            sound = segment.control or not _UNPRINTABLE.search(segment.text)
            yield segment if sound else Segment(printable(segment.text), segment.style)


DENSE = Box("    \n    \n ─  \n    \n    \n    \n    \n    \n")
"""A line below the head, and nothing between columns but two spaces."""


class SafeFormatter(logging.Formatter):
    """A log format that lets no control character through."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return printable(super().format(record))


out = SafeConsole(soft_wrap=False, width=None if sys.stdout and sys.stdout.isatty() else 160)
"""Results, on standard output."""
err = SafeConsole(stderr=True)
"""Progress and errors, on standard error."""


def sentence(error: BaseException) -> str:
    """What an error says; of a file, which one it is."""
    named = isinstance(error, OSError) and error.filename and error.strerror
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and named else str(error)


def say_error(error: Exception) -> None:
    """One sentence on standard error."""
    err.print(f"Error: {sentence(error)}", style="red", markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print `value` as JSON that every reader takes: NaN and infinities become text.

    Where standard output is not UTF-8, what is no ASCII is escaped.
    """
    text = json_text(value, ascii_only=codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8")
    with _naming("standard output"):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def json_text(value: Any, indent: int | None = 2, *, ascii_only: bool = False) -> str:
    """`value` as such JSON."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=ascii_only, default=str)
    return _UNPRINTABLE.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right: Sequence[str] = (),
    *,
    cut: Sequence[str] = (),
    fold: Sequence[str] = (),
    dense: bool = False,
) -> Table:
    """A table; columns named in `right` hold numbers. Cells are text, never markup; None is an empty cell.

    Where it is too wide, texts are folded. With `cut` or `fold` only the columns named there give way, those of `cut` by
    losing their ends. `dense`: without lines between columns.
    """
    result = Table(
        title=Text(printable(title)) if title else None,
        title_justify="left",
        box=DENSE if dense else HEAVY_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0) if dense else (0, 1),
    )
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column in right else "left"
        gives = column in (*cut, *fold)
        fixed = not gives and (i == 0 or column in right or bool(cut or fold))
        result.add_column(Text(printable(column)), justify=justify, overflow="fold", no_wrap=fixed)
    for row in rows:
        result.add_row(*(_cell(value, column in cut) for value, column in zip(row, columns, strict=True)))
    return result


def _cell(value: Any, cut: bool) -> Text:
    if value is None or isinstance(value, Text):
        return value or Text()
    return Text(printable(str(value)), overflow="ellipsis" if cut else None, no_wrap=True if cut else None)


@contextmanager
def progress(what: str) -> Iterator[Any]:
    """A progress bar while something long runs, where standard error is a terminal; yields a function of (done, total)."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)
