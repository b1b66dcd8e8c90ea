"""An answer: a relation, which is computed when it is fetched, and what DuckDB says where that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from rolltape.schema.errors import BadInput, Damaged, RolltapeError, Unreachable
from rolltape.schema.storage import is_silence

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
_AGAIN = 0.1
"""Seconds after which a query that still runs is interrupted again."""


@dataclass(frozen=True)
class Answer:
    """An answer, and what it leaves out."""

    connection: duckdb.DuckDBPyConnection
    relation: duckdb.DuckDBPyRelation
    notes: list[str]
    """Sentences: other splits, superseded steps, rows in journals, faults."""

    def table(self) -> pa.Table:
        """All of the answer. Raises BadInput where the query fails on the way, Damaged where a file does not read back."""
        return self.fetched(self.relation.to_arrow_table)

    def fetched(self, fetch: Callable[[], T]) -> T:
        """What `fetch` fetches of the relation, until Ctrl-C. Raises what `table` raises."""
        with Said("cannot be read", OSError):
            return stoppable(self.connection, fetch)


def stoppable(connection: duckdb.DuckDBPyConnection, work: Callable[[], T]) -> T:
    """What `work` returns, which asks `connection`; Ctrl-C stops it, and is raised as KeyboardInterrupt.

    Python hears of Ctrl-C when DuckDB returns, which it does at the end of a query: so another thread waits for it.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rolltape-query", daemon=True).start()
    try:
        return result.result()
    except KeyboardInterrupt:
        while not result.done():  # a query that is about to begin does not know of an interrupt before it
            connection.interrupt()
            wait([result], _AGAIN)
        raise


class Said:
    """Errors of a query that come up while its answer is read, and values that a form has no place for, as ours."""

    def __init__(self, what: str, *errors: type[Exception]) -> None:
        self.what, self.errors = what, (pa.ArrowException, TypeError, OverflowError, *errors)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        import duckdb

        if isinstance(error, duckdb.Error):
            raise failure(error) from error
        if isinstance(error, self.errors):
            raise BadInput(f"the answer {self.what} ({error}); CAST(… AS VARCHAR) makes text of a value.") from error


def failure(error: duckdb.Error) -> RolltapeError:
    """What DuckDB says of a query, as an error of ours: BadInput, Damaged where a file does not read back, Unreachable."""
    import duckdb

    said = str(error).strip()
    if is_silence(error):
        return Unreachable(f"the run could not be fetched ({said}).")
    if "'files' failed" in said or "page integrity" in said:
        return Damaged(f"a file of the run does not read back ({said}); `rolltape verify` names it.")
    if isinstance(error, duckdb.PermissionException):
        return BadInput(f"the query wants what it may not have: it reads the views, and nothing is written ({said}).")
    names = isinstance(error, (duckdb.CatalogException, duckdb.BinderException))
    return BadInput(f"{said}{chr(10) + '`rolltape sql --schema` prints the views and their columns.' if names else ''}")
