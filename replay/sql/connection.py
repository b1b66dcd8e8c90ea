"""Answering: a DuckDB in memory that holds the views, and can reach neither a file nor the network.

A query gets rows through Arrow, not by a path, so there is nothing that COPY, ATTACH, INSTALL or a table function could open.
What is no question is refused before it is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds

from rolltape.replay.sql import plan, source
from rolltape.replay.sql.declare import quoted
from rolltape.replay.sql.handed import handed
from rolltape.replay.sql.kept import SMALL, WORTH, Kept
from rolltape.replay.sql.source import Chosen, Selection
from rolltape.replay.sql.views import VIEWS
from rolltape.schema.errors import BadInput

if TYPE_CHECKING:
    import duckdb

    from rolltape.replay.run import Run

Parameters = Sequence[Any] | Mapping[str, Any]


def sql(
    runs: Run | Sequence[Run], query: str, *, parameters: Parameters | None = None, **selection: Any
) -> duckdb.DuckDBPyRelation:
    """Ask one or several runs a question; the answer is a DuckDB relation.

    A relation is computed when it is fetched: `.fetchall()`, `.to_arrow_table()`, `.df()`, `.pl()`, or printed. `parameters`
    fill `?` or `$name`. `selection`: the fields of `Selection`.
    Raises BadInput for what is no query or asks for more than reading, Damaged where a commit or file is not whole.
    """
    import duckdb

    asked = _Asked.of(runs, Selection(**selection))
    connection = asked.connection(*(v for v in ("groups", "steps", "samples") if plan.mentions(query, v)))
    check_query(connection, query)
    asked.fill(connection, query, parameters)
    _lock(connection)
    try:
        relation = connection.sql(query, params=parameters)
    except duckdb.Error as error:
        raise BadInput(refusal(error)) from error
    if relation is None:
        raise BadInput("the query has no result; expected a SELECT.")
    return relation


def connect(runs: Run | Sequence[Run], *, locked: bool = True, **selection: Any) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection that holds the views, for notebooks and tools that ask by themselves.

    It sees the runs as they are now, and opens their files for every question; `sql` keeps small columns and is faster.
    `locked`: keep queries from files and network; without it tables of your own can be joined. Raises what `sql` raises.
    """
    asked = _Asked.of(runs, Selection(**selection))
    connection = asked.connection("groups", "steps", "samples", own=not locked)
    connection.register("_rows", asked.every_column())
    if locked:
        _lock(connection)
    return connection


class _Asked:
    """The rows that are asked about."""

    def __init__(self, parts: list[Chosen]) -> None:
        self.parts = parts
        self.schema = source.schema_of(parts)

    @classmethod
    def of(cls, runs: Any, selection: Selection) -> _Asked:
        opened = list(runs) if isinstance(runs, Sequence) else [runs]
        if not opened:
            raise BadInput("no run was given; expected at least one.")
        return cls(source.chosen(opened, selection))

    def connection(self, *filled: str, own: bool = False) -> duckdb.DuckDBPyConnection:
        """A connection with all views, over no rows yet; those of `filled` have theirs."""
        import duckdb

        connection = duckdb.connect(config={"python_enable_replacements": str(own).lower()})
        connection.register("_rows", source.union([], self.schema))
        for name, fill in (("steps", source.steps), ("groups", source.groups), ("samples", handed)):
            connection.register(f"_{name}", fill(self.parts if name in filled else []))
        for view in VIEWS.values():
            connection.execute(f"CREATE TEMP VIEW {quoted(view.name)} AS {view.sql}")
        return connection

    def every_column(self) -> ds.Dataset:
        """The rows, read from their files as they are needed."""
        return source.union(source.rows(self.parts, self.schema), self.schema)

    def fill(self, connection: duckdb.DuckDBPyConnection, query: str, parameters: Parameters | None) -> None:
        """Give the connection the rows that the query needs: kept columns where they do, else the files."""
        needed = plan.needed(connection, query, parameters)
        if needed is not None and needed.columns <= SMALL and self.parts:
            kept = Kept(self.parts, needed.columns)
            # a filter by step opens few files, so it is no reason to read them all
            if kept.lacking < WORTH or "step" not in needed.filters:
                table = kept.table()
                connection.register("_rows", source.union([source.in_memory(table, self.schema)], self.schema))
                again = plan.needed(connection, query, parameters)
                if again is not None and again.columns <= needed.columns:
                    return
        connection.register("_rows", self.every_column())


def _lock(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def check_query(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Refuse what is not one question. Raises BadInput."""
    import duckdb

    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise BadInput(refusal(error)) from error
    if len(statements) != 1:
        raise BadInput(
            f"{len(statements)} statements were found; expected one query, such as SELECT count(*) FROM traces."
        )
    kind = statements[0].type.name
    if kind not in ("SELECT", "EXPLAIN") and not (kind == "MULTI" and re.search(r"\bpivot\b", query, re.IGNORECASE)):
        raise BadInput(
            f"{kind} is refused: a recorded run is only read. Expected a query (SELECT, FROM, WITH, PIVOT, DESCRIBE, "
            "SUMMARIZE or EXPLAIN)."
        )


def refusal(error: duckdb.Error) -> str:
    """What DuckDB says of a query, as a sentence."""
    import duckdb

    said = str(error).strip()
    if isinstance(error, duckdb.PermissionException):
        return (
            f"the query wants what it may not have: it reads the views and nothing else, and writes nothing ({said})."
        )
    names = isinstance(error, (duckdb.CatalogException, duckdb.BinderException))
    return f"{said}{'' if said.endswith('.') else '.'}{' `rolltape sql --schema` prints the views.' if names else ''}"
