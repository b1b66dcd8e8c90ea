"""SQL over recorded runs: views of what was committed, on DuckDB, read-only.

    sql(run, "SELECT step, name, avg(value) FROM rewards WHERE ended GROUP BY ALL ORDER BY ALL")

`views` declares what there is (`rolltape sql --schema` prints it), `source` finds the rows, `connection` answers.
"""

from __future__ import annotations

from rolltape.replay.sql.connection import connect, sql
from rolltape.replay.sql.declare import Column, Example, View
from rolltape.replay.sql.source import Selection
from rolltape.replay.sql.views import VIEWS

__all__ = ["VIEWS", "Column", "Example", "Selection", "View", "connect", "sql"]
