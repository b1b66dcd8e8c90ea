"""What a view is made of: its columns with their meaning, its definition, and examples that teach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds

from rolltape.schema.fields import Record

if TYPE_CHECKING:
    import duckdb


HIDDEN = "internal"
"""Schema of the tables that views select from. No list of tables shows it."""


@dataclass(frozen=True)
class Column:
    """One column of a view."""

    name: str
    type: str
    """DuckDB's type."""
    meaning: str
    """What it holds, its unit, and what null means."""
    expression: str = ""
    """SQL over the view's source; the column of the same name where it is empty."""

    @property
    def selected(self) -> str:
        """The column in a SELECT list."""
        return f"{self.expression} AS {quoted(self.name)}" if self.expression else quoted(self.name)

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain JSON values."""
        return {"name": self.name, "type": self.type, "meaning": self.meaning}


@dataclass(frozen=True)
class Example:
    """A question and the query that answers it."""

    question: str
    sql: str

    def to_dict(self) -> dict[str, Any]:
        """The example as plain JSON values."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class View:
    """A view: what a row of it is, its columns, where they come from."""

    name: str
    row: str
    """What one row is, and which rows there are."""
    columns: tuple[Column, ...]
    source: str
    """What follows FROM."""
    examples: tuple[Example, ...] = ()

    def definition(self, more: Sequence[str] = ()) -> str:
        """The view as a query, with `more` columns of its source at the end."""
        return f"SELECT {', '.join([*(c.selected for c in self.columns), *map(quoted, more)])} FROM {self.source}"

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain JSON values."""
        return {
            "name": self.name,
            "row": self.row,
            "columns": [c.to_dict() for c in self.columns],
            "examples": [e.to_dict() for e in self.examples],
        }


def quoted(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def hide(connection: duckdb.DuckDBPyConnection, name: str, rows: pa.Table | ds.Dataset) -> None:
    """Make `rows` the table `name` of the schema that no list of tables shows."""
    connection.execute(f"USE {HIDDEN}")
    connection.from_arrow(rows).create_view(name)
    connection.execute("USE memory.main")


_TYPES = {
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.string(): "VARCHAR",
    pa.large_string(): "VARCHAR",
    pa.large_binary(): "BLOB",
}


def type_of(type_: pa.DataType) -> str:
    """DuckDB's name of an Arrow type."""
    if pa.types.is_map(type_):
        return f"MAP({type_of(type_.key_type)}, {type_of(type_.item_type)})"
    return f"{type_of(type_.value_type)}[]" if pa.types.is_list(type_) else _TYPES[type_]


def columns_of(record: Record, *names: str, **expressions: str) -> tuple[Column, ...]:
    """Columns of the schema as columns of a view: all of `record`, or those named."""
    fields = [record.by_name[n] for n in names] if names else record.fields
    return tuple(
        Column(
            f.name,
            type_of(f.arrow_type),
            f.description + (f" [{f.unit}]" if f.unit else ""),
            expressions.get(f.name, ""),
        )
        for f in fields
    )
