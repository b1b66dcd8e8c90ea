"""Writing one part of a run: its Parquet file, then its commit. Used by the recorder and by `recover`.

Rows are streamed: at most one row group is in memory beside what the caller holds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rolltape.schema.commits import Commit
from rolltape.schema.encoding import Row
from rolltape.schema.errors import RunConflict
from rolltape.schema.fields import ROW
from rolltape.schema.parquet import put_once, write_parquet
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.records import Group, Outcome, Step
from rolltape.schema.table import rows_to_table, with_outcomes

CHUNK_BYTES = 128 << 20
"""Rows of a row group in memory, roughly."""


def write_part(
    paths: RunPaths,
    part: Part,
    rows: Iterable[Row],
    *,
    outcomes: Sequence[Outcome],
    groups: Sequence[Group],
    step: Step,
    versions: Mapping[str, str],
    sums: Mapping[str, Any] | None = None,
) -> Commit:
    """Write a part and commit it. `rows` come in the order of the file.

    Raises RunConflict where the part was committed before, OSError where it cannot be written; then nothing is committed.
    """
    tally: Counter[str] = Counter()
    by_trace = {o.trace_id: o for o in outcomes}
    file = write_parquet(
        paths.parquet(part),
        (with_outcomes(t, by_trace.values()) for t in chunks(rows, tally)),
        {name: versions[name] for name in ("rolltape", "verifiers", "renderers") if name in versions},
    )
    commit = Commit(
        part=part,
        file=file,
        groups=sorted(groups, key=lambda g: g.group_index),
        step=step,
        sums={**tally, **(sums or {})},
        fingerprint=ROW.fingerprint,
        written_at=time.time(),
    )
    if not put_once(paths.commit(part), commit.to_bytes()):
        raise RunConflict(
            f"{paths.commit(part)}: this part was committed before; resume the run to record a step again, and give each "
            "writer a name of its own."
        )
    return commit


def chunks(rows: Iterable[Row], tally: Counter[str] | None = None) -> Iterator[pa.Table]:
    """Tables of about CHUNK_BYTES, or of one row. Adds tokens, sampled tokens and turns to `tally`."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        if tally is not None:
            v = row.values
            tally.update(tokens=v["num_tokens"], sampled_tokens=v["num_sampled"], turns=v["num_turns"])
        if chunk and size + row.nbytes > CHUNK_BYTES:
            yield rows_to_table(chunk)
            chunk, size = [], 0
        chunk.append(row)
        size += row.nbytes
    if chunk:
        yield rows_to_table(chunk)
