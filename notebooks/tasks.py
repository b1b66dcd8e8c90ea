"""The tasks of a run for the notebooks: the same ones as in `rolltape stats --by task` and `rolltape diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltape.replay.tasks import COLUMNS, Task, are_keyed, identity_of, labels, same, task_of

if TYPE_CHECKING:
    import duckdb


def add_task(con: duckdb.DuckDBPyConnection, traces: str = "traces") -> None:
    """Make the view `rollouts_by_task`: the rows of the view `rollouts` with the column `of_task`, one text a task.

    It is null where a row says neither key, index nor name. Which tasks there are is looked up now, in `traces`.
    """
    names = ", ".join(COLUMNS)
    rows = con.execute(f"SELECT DISTINCT {names} FROM {traces} ORDER BY ALL").fetchall()
    kinds = [task_of(*row) for row in rows]
    keyed = are_keyed(kinds)
    found, places = same(kinds, keyed)
    called = dict(zip(found, labels(found, _called), strict=True))
    texts = [called[found[i]] if identity_of(found[i], keyed) is not None else None for i in places]
    con.execute(f"CREATE TEMP TABLE rollouts_tasks AS SELECT {names}, '' AS of_task FROM {traces} LIMIT 0")
    columns = [list(column) for column in zip(*rows, strict=True)]
    if rows:
        con.execute(f"INSERT INTO rollouts_tasks SELECT {', '.join(['unnest(?)'] * 5)}", [*columns, texts])
    on = " AND ".join(f"r.{name} IS NOT DISTINCT FROM t.{name}" for name in COLUMNS)
    con.execute(
        f"CREATE TEMP VIEW rollouts_by_task AS SELECT r.*, t.of_task FROM rollouts r JOIN rollouts_tasks t ON {on}"
    )


def _called(task: Task) -> str:
    return f"task {task.name}" if task.name == str(task.index) else str(task.name)
