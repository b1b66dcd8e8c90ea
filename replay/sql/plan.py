"""What a query needs: DuckDB's own plan tells, whatever way the query names it (a star, a struct, a join, a pivot)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolltape.replay.sql.source import ENTRIES
from rolltape.schema.fields import ROW

if TYPE_CHECKING:
    import duckdb

_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
_MAPS = {entry: name for name, entry in ENTRIES.items()}
_DYNAMIC = ("query", "query_table")
"""Functions that take a table's name as text, which may be put together."""
_LISTING = re.compile(
    r"\b(show|describe|information_schema|sqlite_master|sqlite_schema|(duckdb|pg|pragma)_\w+)\b", re.I
)
"""Words of questions about what views there are."""


@dataclass(frozen=True)
class Needed:
    """Columns of the rows that a query reads, and those it filters by."""

    columns: frozenset[str]
    filters: frozenset[str]


def needed(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None
) -> Needed | None:
    """The columns of the rows that the query would read now; None where the plan does not tell.

    The plan of a PIVOT depends on the rows: where there are none it reads nothing of what is pivoted.
    """
    import duckdb

    try:
        if any(s.type.name == "MULTI" for s in connection.extract_statements(query)):
            return None
        found = connection.execute(f"EXPLAIN (FORMAT json) {query}", parameters).fetchall()
        scans = [scan for _, text in found for scan in _scans(json.loads(text))]
    except (duckdb.Error, ValueError, KeyError, TypeError, RecursionError):
        return None
    columns: set[str] = set()
    filters: set[str] = set()
    for scan in scans:
        if "Projections" not in scan:
            return None
        projected = scan["Projections"]
        projected = [projected] if isinstance(projected, str) else projected
        columns.update(_MAPS.get(name, name) for name in projected)
        conditions = scan.get("Filters", ())
        for condition in [conditions] if isinstance(conditions, str) else conditions:
            filters.update(name.replace('""', '"') for name in _QUOTED.findall(condition))
    return Needed(frozenset((columns | filters) & ROW.by_name.keys()), frozenset(filters & ROW.by_name.keys()))


def _scans(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """What a plan says of its scans of Arrow data."""
    for node in nodes:
        if "ARROW_SCAN" in node["name"]:
            yield node["extra_info"]
        yield from _scans(node["children"])


def mentions(query: str, *names: str) -> bool:
    """Whether the query may be about one of these views."""
    return any(re.search(rf"\b{name}\b", query, re.IGNORECASE) for name in (*names, *_DYNAMIC))


def lists(query: str) -> bool:
    """Whether the query may be about what views there are."""
    return _LISTING.search(query) is not None
