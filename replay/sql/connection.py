"""Answering: a DuckDB in memory that holds the views, and can reach neither a file nor the network.

A query gets rows through Arrow, not by a path, so there is nothing that COPY, ATTACH, INSTALL or a table function could open.
What is no question is refused before it is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolltape.replay.sql import source
from rolltape.replay.sql.declare import quoted
from rolltape.replay.sql.source import Selection
from rolltape.replay.sql.views import VIEWS
from rolltape.schema.errors import BadInput

if TYPE_CHECKING:
    import duckdb

    from rolltape.replay.run import Run


def sql(
    runs: Run | Sequence[Run],
    query: str,
    *,
    parameters: Sequence[Any] | Mapping[str, Any] | None = None,
    **selection: Any,
) -> duckdb.DuckDBPyRelation:
    """Ask one or several runs a question; the answer is a DuckDB relation.

    A relation is computed when it is fetched: `.fetchall()`, `.to_arrow_table()`, `.df()`, `.pl()`, or printed. `parameters`
    fill `?` or `$name`. `selection`: the fields of `Selection`.
    Raises BadInput for what is no query or asks for more than reading, Damaged where a commit or file is not whole.
    """
    import duckdb

    connection = connect(runs, samples=bool(re.search(r"\bsamples\b", query, re.IGNORECASE)), **selection)
    check_query(connection, query)
    try:
        relation = connection.sql(query, params=parameters)
    except duckdb.Error as error:
        raise BadInput(refusal(error)) from error
    if relation is None:
        raise BadInput("the query has no result; expected a SELECT.")
    return relation


def connect(
    runs: Run | Sequence[Run], *, samples: bool = True, locked: bool = True, **selection: Any
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection that holds the views, for notebooks and many questions.

    It sees the runs as they are now. `samples`: fill the view `samples` too, which converts steps again whose traces may
    have several branches. `locked`: keep queries from files and network; without it tables of your own can be joined.
    Raises what `sql` raises.
    """
    import duckdb

    from rolltape.replay.sql.handed import handed

    opened = _list(runs)
    chosen = source.chosen(opened, Selection(**selection))
    connection = duckdb.connect(config={"python_enable_replacements": str(not locked).lower()})
    connection.register("_rows", source.rows(chosen))
    connection.register("_steps", source.steps(chosen))
    connection.register("_groups", source.groups(chosen))
    connection.register("_samples", handed(chosen if samples else []))
    for view in VIEWS.values():
        connection.execute(f"CREATE TEMP VIEW {quoted(view.name)} AS {view.sql}")
    if locked:
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    return connection


def _list(runs: Any) -> list[Run]:
    opened = list(runs) if isinstance(runs, Sequence) else [runs]
    if not opened:
        raise BadInput("no run was given; expected at least one.")
    return opened


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
            f"{kind} is refused: a recorded run is only read. Expected a query (SELECT, FROM, WITH, PIVOT, DESCRIBE, SUMMARIZE "
            "or EXPLAIN); --out FILE writes its result."
        )


def refusal(error: duckdb.Error) -> str:
    """What DuckDB says of a query, as a sentence."""
    import duckdb

    said = str(error).strip()
    if isinstance(error, duckdb.PermissionException):
        return (
            f"the query wants what it may not have: it reads the views and nothing else, and writes nothing ({said})."
        )
    hint = (
        " `rolltape sql --schema` prints the views."
        if isinstance(error, (duckdb.CatalogException, duckdb.BinderException))
        else ""
    )
    return f"{said}{'' if said.endswith('.') else '.'}{hint}"


__all__ = ["check_query", "connect", "refusal", "sql"]
