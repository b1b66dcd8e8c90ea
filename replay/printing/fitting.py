"""Tables that fit a terminal: columns that are wanted least are left out where there is no room, and named."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from rich.cells import cell_len

GAP = 2
"""Characters between two columns of a dense table."""


def left_out(
    columns: MutableMapping[str, Any],
    width: int,
    spare: Sequence[str | Sequence[str]],
    gives: Mapping[str, int] | None = None,
) -> list[str]:
    """Take away columns until the others fit into `width` characters of a dense table; names of those taken.

    `columns`: the cells of each. `spare`: columns, or several that go together, the least wanted first. `gives`: columns that
    may be narrower than their cells, and how narrow.
    """
    gone: list[str] = []
    for names in spare:
        if _width(columns, gives or {}) <= width:
            break
        gone += [n for n in ([names] if isinstance(names, str) else names) if columns.pop(n, None) is not None]
    return gone


def no_room(gone: Sequence[str]) -> str:
    """The sentence that names columns which were left out."""
    return f"no room for {', '.join(gone)}: in a wider terminal, or with --json"


def _width(columns: Mapping[str, Any], gives: Mapping[str, int]) -> int:
    widths = {
        head: max(cell_len("" if c is None else str(c)) for c in (head, *cells)) for head, cells in columns.items()
    }
    return sum(min(w, gives.get(head, w)) for head, w in widths.items()) + GAP * (len(columns) - 1)
