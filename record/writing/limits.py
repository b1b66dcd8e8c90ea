"""Rows that Parquet can hold: one column of one row takes less than 2 GiB, whatever a tool printed.

Parquet refuses a value of 2 GiB or more, and a page of 2^31 bytes, into which all texts of one row's list column go. A row
beyond that would keep its whole step from being written, so its longest texts are cut, and the row says so in `problems`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolltape.schema.encoding import Row
from rolltape.schema.fields import TEXT, TRACE

LARGEST_COLUMN = 2_000_000_000
"""Bytes of one column in one row."""

_TEXTS = [f for f in TRACE.fields if f.type == TEXT and f.shape in ("scalar", "node", "error")]
_JSON = frozenset(
    ("task", "runtime", "info", "extra_usage", "agent", "tools", "calls", "node_parts", "node_tool_calls")
)
"""Columns that hold JSON, of which a cut piece would be none."""


def fit(row: Row) -> Row:
    """`row`, its texts cut in place to what Parquet holds where they are longer. Cuts are named in its `problems`."""
    if 4 * row.nbytes <= LARGEST_COLUMN and not row.values.get("error_types"):
        return row
    problems: list[str] = []
    for field in _TEXTS:
        columns: dict[str, Any] = row.nodes if field.shape == "node" else row.values
        value = columns.get(field.name)
        texts = [value] if isinstance(value, str) else value or []
        if 4 * sum(len(t) for t in texts if t) > LARGEST_COLUMN:  # four bytes a character at most
            as_json = field.name in _JSON or row.values.get(f"{field.name}_is_json") is True
            cut = _cut(field.name, texts, as_json, problems)
            columns[field.name] = cut[0] if isinstance(value, str) else cut
    if problems:
        del row.nbytes  # it was asked before
        row.values["problems"] = [*(row.values.get("problems") or ()), *problems]
    return row


def drop_extra(row: Row, size: int) -> None:
    """Leave out what no column holds exactly, where it is too large itself."""
    row.extra = {}
    told = f"extra: {size:,} bytes are more than a Parquet value holds and were left out"
    row.values["problems"] = [*(row.values.get("problems") or ()), told]


def _cut(name: str, texts: Sequence[str | None], as_json: bool, problems: list[str]) -> list[str | None]:
    sizes = [0 if t is None else _size(t) for t in texts]
    most = _most(sizes)
    result: list[str | None] = []
    for i, (text, size) in enumerate(zip(texts, sizes, strict=True)):
        if text is None or size <= most:
            result.append(text)
            continue
        place = name if len(texts) == 1 else f"{name}[{i}]"
        if as_json:
            problems.append(f"{place}: {size:,} bytes of JSON are more than a Parquet value holds and were left out")
            result.append(None)
        else:
            problems.append(f"{place}: {size:,} bytes are more than a Parquet value holds; cut to {most:,}")
            result.append(text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore"))
    return result


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _most(sizes: Sequence[int]) -> int:
    """The largest size that, as a limit to each, keeps the sum within LARGEST_COLUMN."""
    left, waiting = LARGEST_COLUMN, sorted(sizes)
    for i, size in enumerate(waiting):
        share = left // (len(waiting) - i)
        if size > share:
            return share
        left -= size
    return LARGEST_COLUMN


__all__ = ["LARGEST_COLUMN", "drop_extra", "fit"]
