"""Annotations as views: `annotation_<name>`, with the column `run` before their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow.dataset as ds

from rolltape.replay.annotations import KEYS, Annotation, annotations_of, located
from rolltape.replay.sql import source
from rolltape.replay.sql.declare import HIDDEN, Column, View, hide, quoted
from rolltape.schema.storage import AnyPath

if TYPE_CHECKING:
    import duckdb

    from rolltape.replay.run import Run

PREFIX = "annotation_"


def add_annotations(connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Run]) -> None:
    """Make a view of every annotation of `runs`; of one that several runs have, over all of them.

    Raises Damaged where a record or file is not whole.
    """
    found: dict[str, list[str]] = {}
    for number, (label, run) in enumerate(runs.items()):
        for name, annotation in annotations_of(run).items():
            table = f"_{PREFIX}{name}_{number}"
            hide(connection, table, _dataset(located(run, annotation)))
            said = label.replace("'", "''")
            found.setdefault(name, []).append(f"SELECT '{said}' AS run, * FROM {HIDDEN}.{quoted(table)}")
    for name, queries in found.items():
        connection.execute(f"CREATE TEMP VIEW {PREFIX}{name} AS {' UNION ALL BY NAME '.join(queries)}")


def _dataset(path: AnyPath) -> ds.Dataset:
    files, name = source.located(path)
    return ds.dataset(name, filesystem=files, format=source.FORMAT)


def described(annotation: Annotation) -> View:
    """What the view of an annotation holds, for people."""
    what = {"trace": "a trace", "node": "a node", "token": "a token"}[annotation.level]
    keys = {
        "trace_id": Column("trace_id", "VARCHAR", "the trace"),
        "node": Column("node", "BIGINT", "index of the node in its trace (see nodes)"),
        "position": Column("position", "BIGINT", "place of the token in its trace (see tokens)"),
    }
    return View(
        f"{PREFIX}{annotation.name}",
        f"What was added later about {what}; traces that nothing was said of have no row. Join USING (run, "
        f"{', '.join(KEYS[annotation.level])}).",
        (
            Column("run", "VARCHAR", "as in the other views"),
            *(keys[k] for k in KEYS[annotation.level]),
            *(Column(c.name, c.type, _OVER[c.over]) for c in annotation.columns),
        ),
        "",
    )


_OVER = {
    None: "as it was given",
    "tokens": "a list over the tokens of the trace, as traces.logprobs is; null where nothing was given",
    "nodes": "a list over the nodes of the trace, as traces.node_role is; null where nothing was given",
}
