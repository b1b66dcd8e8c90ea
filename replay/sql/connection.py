"""Answering: a DuckDB in memory that holds the views, and can reach neither a file nor the network.

A query gets rows through Arrow, not by a path, so there is nothing that COPY, ATTACH, INSTALL or a table function could open.
What is no question is refused before it is run.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds

from rolltape.replay.sql import plan, source
from rolltape.replay.sql.added import add_annotations
from rolltape.replay.sql.answer import Answer, failure, stoppable
from rolltape.replay.sql.declare import HIDDEN, hide, quoted
from rolltape.replay.sql.handed import handed
from rolltape.replay.sql.live import journaled, rows_of
from rolltape.replay.sql.scores import Scores
from rolltape.replay.sql.source import Chosen, Selection
from rolltape.replay.sql.views import VIEWS
from rolltape.schema.errors import BadInput
from rolltape.schema.scores import SCORES
from rolltape.schema.table import uncollected

if TYPE_CHECKING:
    import duckdb

    from rolltape.replay.run import Run

Parameters = Sequence[Any] | Mapping[str, Any]

logger = logging.getLogger(__name__)

FEW = 16
"""Files that are read whole sooner than it takes to tell which of them a query wants."""


def sql(
    runs: Run | Sequence[Run], query: str, *, parameters: Parameters | None = None, **selection: Any
) -> duckdb.DuckDBPyRelation:
    """Ask one or several runs a question; the answer is a DuckDB relation.

    A relation is computed when it is fetched: `.fetchall()`, `.to_arrow_table()`, `.df()`, `.pl()`, or printed. `parameters`
    fill `?` or `$name`. `selection`: the fields of `Selection`.
    Raises BadInput for what is no query or asks for more than reading, Damaged where a commit or file is not whole.
    """
    return ask(runs, query, parameters=parameters, **selection).relation


def ask(runs: Run | Sequence[Run], query: str, *, parameters: Parameters | None = None, **selection: Any) -> Answer:
    """`sql`, and what its answer leaves out."""
    with uncollected():
        return _ask(runs, query, parameters, Selection(**selection))


def _ask(runs: Run | Sequence[Run], query: str, parameters: Parameters | None, selection: Selection) -> Answer:
    import duckdb

    asked = Asked.about(runs, selection)
    named = [name for name in VIEWS if plan.mentions(query, name)]
    try:
        try:
            answer = _answer(asked, query, parameters, VIEWS if plan.lists(query) else named, named)
        except (duckdb.CatalogException, duckdb.BinderException):
            _answer(asked, query, parameters, VIEWS, ())  # says by which names there are that one is not there
            answer = _answer(asked, query, parameters, VIEWS, VIEWS)
    except duckdb.Error as error:
        raise failure(error) from error
    if answer.relation is None:
        raise BadInput("the query has no result; expected a SELECT.")
    return answer


def _answer(
    asked: Asked, query: str, parameters: Parameters | None, views: Collection[str], filled: Collection[str]
) -> Answer:
    """The answer, of a connection that has these views only: making all of them takes as long as most answers."""
    connection = asked.connection(views, filled)
    check_query(connection, query)
    if "annotation_" in query.lower() or plan.mentions(query) or plan.lists(query):
        add_annotations(connection, asked.runs)
    asked.fill(connection, query, parameters)
    relation = stoppable(connection, lambda: connection.sql(query, params=parameters))  # runs some, such as PIVOT
    return Answer(connection, relation, asked.notes)


def connect(runs: Run | Sequence[Run], *, locked: bool = True, **selection: Any) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection that holds the views, for notebooks and tools that ask by themselves.

    It sees the runs as they are now, and opens their files for every question; `sql` takes scores from commits and is faster.
    `locked`: keep queries from files and network; without it tables of your own can be joined. Raises what `sql` raises.
    """
    asked = Asked.about(runs, Selection(**selection))
    connection = asked.connection(VIEWS, VIEWS, own=not locked)
    add_annotations(connection, asked.runs)
    _from_files(connection, asked.every_column())
    return connection


@dataclass(frozen=True)
class Asked:
    """The rows that are asked about."""

    runs: Mapping[str, Run]
    """By the name that the column `run` says."""
    parts: list[Chosen]
    schema: pa.Schema
    journaled: list[pa.Table] = field(default_factory=list)
    """Rows that are not committed, where they are asked for."""
    notes: list[str] = field(default_factory=list)
    """What was left out."""

    @classmethod
    def about(cls, runs: Run | Sequence[Run], selection: Selection) -> Asked:
        """Find the rows. Raises what `sql` raises."""
        given = list(runs) if isinstance(runs, Sequence) else [runs]
        if not given:
            raise BadInput("no run was given; expected at least one.")
        opened = source.labelled(given)
        found = {label: journaled(run) for label, run in opened.items()} if selection.live else {}
        opened |= {label: f.run for label, f in found.items()}
        splits = selection.splits(opened.values(), (part.split for f in found.values() for part, _ in f.rows))
        parts = source.chosen(opened, splits, selection)
        tables = [t for label, f in found.items() for t in rows_of(f, label, splits, selection)]
        if selection.attempt is not None and not parts and not tables:
            raise BadInput(f"attempt {selection.attempt} recorded nothing of that; see the view steps for what did.")
        faults = [fault for f in found.values() for fault in f.faults]
        for fault in faults:
            logger.warning(fault)
        notes = [*faults, *left_out(opened, splits, parts, selection)]
        schema = source.schema_of(parts)
        return cls(opened, parts, schema, tables, notes)

    def connection(
        self, views: Collection[str], filled: Collection[str], own: bool = False
    ) -> duckdb.DuckDBPyConnection:
        """A connection with these views, over no rows yet; of what commits say, those of `filled` have theirs.

        `own`: not locked.
        """
        import duckdb

        spill = os.path.join(
            tempfile.gettempdir(), f"rolltape-sql-{os.getpid()}"
        )  # by default it is the current folder
        connection = duckdb.connect(config={"python_enable_replacements": str(own).lower(), "temp_directory": spill})
        if not own:
            lock(connection)  # at once: to plan a query is to look at what it names
        connection.execute(f"CREATE SCHEMA {HIDDEN}")
        _from_files(connection, source.union([], self.schema))
        for name, fill in (("steps", source.steps), ("groups", source.groups), ("samples", handed)):
            if name in views:
                hide(connection, name, fill(self.parts if name in filled else []))
        later = [n for n in self.schema.names if n not in source.PLAIN.names and n not in source.KNOWN.names]
        for name in views:
            added = later if name == "traces" else []
            connection.execute(f"CREATE TEMP VIEW {quoted(name)} AS {VIEWS[name].definition(added)}")
        return connection

    def every_column(self) -> ds.Dataset:
        """The rows, read from their files as they are needed."""
        live = [source.in_memory(table, self.schema) for table in self.journaled]
        return source.union([*source.rows(self.parts, self.schema), *live], self.schema)

    def fill(self, connection: duckdb.DuckDBPyConnection, query: str, parameters: Parameters | None) -> None:
        """Give the connection the rows that the query needs: scores where they do, else the files."""
        needed = plan.needed(connection, query, parameters)
        if needed is not None and needed.columns <= SCORES and self.parts:
            scores = Scores(self.parts, needed.columns)
            # a filter by step opens few files, so it is no reason to read them all
            if scores.lacking < FEW or "step" not in needed.filters:
                schema = source.taken_apart(self.schema)
                tables = [scores.table(), *self.journaled]
                rows = source.union([source.in_memory(t, schema) for t in tables], schema)
                hide(connection, "scores", rows)
                connection.execute(f"CREATE OR REPLACE VIEW {HIDDEN}.rows AS SELECT * FROM {HIDDEN}.scores")
                again = plan.needed(connection, query, parameters)
                if again is not None and again.columns <= needed.columns:
                    return
        _from_files(connection, self.every_column())


def _from_files(connection: duckdb.DuckDBPyConnection, rows: ds.Dataset) -> None:
    """Let the views read `rows`."""
    hide(connection, "files", rows)
    entries = ", ".join(f"map_entries({name}) AS {entry}" for name, entry in source.ENTRIES.items())
    connection.execute(f"CREATE OR REPLACE VIEW {HIDDEN}.rows AS SELECT *, {entries} FROM {HIDDEN}.files")


_OWNER = 300
"""Bytes that a journal without a trace may have: it may say whose it is."""


def left_out(
    runs: Mapping[str, Run], splits: Sequence[str], parts: Sequence[Chosen], selection: Selection
) -> Iterator[str]:
    """What a selection leaves out of what is there, a sentence each."""
    for label, run in runs.items():
        others = [s for s in run.splits() if s not in splits]
        if others:
            yield f"{label}: the splits {', '.join(others)} are left out; --eval reads them too, --split chooses."
        chosen = {p.commit.part for p in parts if p.label == label}
        pruned = [h.pruned for part, h in run.contents.moved.items() if h.pruned and part in chosen]
        if pruned:
            names = sorted({name for columns in pruned for name in columns})
            some = ", ".join(names[:4]) + (f" and {len(names) - 4} more columns" if len(names) > 4 else "")
            yield f"{label}: {some} of {_number(pruned, 'part')} were pruned, and are null."
        older = [c for c in run.all_commits if c.part.split in splits and c.part not in chosen]
        if older and selection.attempt is None:
            yield f"{label}: {_number(older, 'part')} that a newer attempt took back: left out; --all-attempts reads such too."
        if not selection.live and any(f.stat().st_size > _OWNER for f in run.paths.journals.glob("*.journal")):
            yield f"{label}: what its journals hold is left out, for it is not committed yet; --live reads it too."


def _number(items: Sequence[Any], what: str) -> str:
    return f"{len(items)} {what}{'s' * (len(items) != 1)}"


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Keep queries from files, network, extensions and settings, for good."""
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def is_statement(text: str) -> bool:
    """Whether `text` is SQL, of whatever kind."""
    import duckdb

    try:
        with duckdb.connect() as connection:
            return bool(connection.extract_statements(text))
    except (duckdb.Error, UnicodeEncodeError):
        return False


def check_query(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Refuse what is not one question. Raises BadInput."""
    import duckdb

    try:
        query.encode()
        statements = connection.extract_statements(query)
    except UnicodeEncodeError as error:
        raise BadInput(f"the query is no UTF-8 text ({error.reason} at character {error.start}).") from error
    except duckdb.Error as error:
        raise failure(error) from error
    if len(statements) != 1:
        comment = " A comment, `-- …`, goes to the end of its line." if not statements and "--" in query else ""
        raise BadInput(
            f"{len(statements)} statements were found; expected one query, such as SELECT count(*) FROM traces.{comment}"
        )
    kind = statements[0].type.name
    if kind not in ("SELECT", "EXPLAIN") and not (kind == "MULTI" and re.search(r"\bpivot\b", query, re.IGNORECASE)):
        raise BadInput(
            f"{kind} is refused: a recorded run is only read. Expected a query (SELECT, FROM, WITH, PIVOT, DESCRIBE, "
            "SUMMARIZE or EXPLAIN)."
        )
