"""Old scores beside new: a small Parquet file a part, a row for each name of each trace, and the tables made of them.

    <run>/rescored/<split>/<step>.<attempt>.<writer>.parquet

Only files of committed parts count. SQL joins them by trace id, to the rows of either run.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.schema.parquet import put_bytes
from rolltape.schema.paths import Part, RunPaths

SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("step", pa.int64()),
        ("group_index", pa.int64()),
        ("rollout_index", pa.int32()),
        ("trace_id", pa.string()),
        ("in_group", pa.bool_()),
        ("ended_then", pa.bool_()),
        ("ended_now", pa.bool_()),
        ("task_name", pa.string()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("old", pa.float64()),
        ("new", pa.float64()),
        ("score", pa.float64()),
        ("weight", pa.float64()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("changed", pa.bool_()),
        ("missing", pa.bool_()),
    ]
)
"""`kind`: reward, metric, or total (the sum of the rewards). `in_group`: whether the trace is the last try of its rollout.
`ended_then`, `ended_now`: whether it is one that means are of, by the recording and by the new run: a last try without an error
that was not cancelled, as for `rolltape stats`.
`old`, `new`: weighted contributions, or metrics. `status`: scored, kept, skipped (there is none to be had; of a total: a reward
was), failed, gone (the taskset has no such name any more), or untouched (the rollout had ended in an error).
`missing`: of a total, whether it should be there and is not: the rollout came to its end, and only its group could not be
compared."""


def differs(old: float | None, new: float | None) -> bool:
    """Whether two scores are not the same: one of them null or NaN and the other not, or apart by more than rounding."""
    if old is None or new is None:
        return old is not new
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) != math.isnan(new)
    return old != new and not math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)


def write_rescored(paths: RunPaths, part: Part, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a part's rows, whole or not at all. `changed` is filled in."""
    full = [{**row, "changed": differs(row["old"], row["new"])} for row in rows]
    table = pa.table({name: [row.get(name) for row in full] for name in SCHEMA.names}, SCHEMA)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_statistics=False)  # NaN makes pruning by min and max wrong
    put_bytes(paths.rescored(part), sink.getvalue())


@dataclass(frozen=True)
class Changes:
    """What re-scoring changed."""

    names: list[dict[str, Any]]
    """A row for each reward and metric, and the total, of each split. Means are over the `old_n` and `new_n` rollouts that came
    to their end and have a finite score. All else is of all `traces` that have the name: how many changed, how many scores
    are not null, how many new ones are NaN or infinite (`no_number`), and what became of it (`statuses`, which add up to
    them)."""
    groups: list[dict[str, Any]]
    """Group sums that changed, the largest change first, those from or to NaN or an infinity last. A sum is null unless every
    member was scored."""
    traces: list[dict[str, Any]]
    """Totals that changed, in the same order."""
    counts: dict[str, int]
    """Traces, and by their total: scored, failed, skipped, untouched, which add up to them; changed. Groups whose sums were
    compared."""
    skipped: list[dict[str, Any]]
    """Why totals were skipped, the commonest reason first: of how many `traces`, and how many of those totals are `missing`."""

    @property
    def splits(self) -> list[str]:
        """Splits of which there are scores, `train` first."""
        return list(dict.fromkeys(name["split"] for name in self.names))

    @property
    def missing(self) -> int:
        """Totals that should be there and are not."""
        return sum(reason["missing"] for reason in self.skipped)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(self.__dict__)


_NAMES = """
    with by_status as (select split, kind, name, status, count(*) as n from scores group by all)
    select s.split, s.kind, s.name, count(*) as traces, count(old) as old_scored, count(new) as new_scored,
        count(*) filter (ended_then and isfinite(old)) as old_n, count(*) filter (ended_now and isfinite(new)) as new_n,
        avg(old) filter (ended_then and isfinite(old)) as old_mean,
        avg(new) filter (ended_now and isfinite(new)) as new_mean, count(*) filter (changed) as changed,
        count(*) filter (not isfinite(new)) as no_number,
        list(distinct weight order by weight) filter (weight is not null) as weights,
        (select map(list(b.status order by b.status), list(b.n order by b.status)) from by_status b
            where b.split = s.split and b.kind = s.kind and b.name = s.name) as statuses
    from scores s group by s.split, s.kind, s.name
"""
_LARGEST = """
    case when isfinite(difference) then 0 when difference is null then 1 else 2 end, abs(coalesce(difference, 0)) desc"""
"""The largest change first, then those from or to null, and at last those that are no number."""
_GROUPS = f"""
    select *, new - old as difference from (
        select split, step, group_index, any_value(task_name) as task_name, name, count(*) as traces,
            case when count(old) = count(*) then sum(old) end as old,
            case when count(new) = count(*) then sum(new) end as new, bool_or(changed) as changed
        from scores where kind = 'reward' and in_group group by split, step, group_index, name
    ) where changed order by {_LARGEST}, split, step, group_index, name
"""
_TRACES = f"""
    select split, step, group_index, trace_id, task_name, old, new, new - old as difference, status from scores
    where kind = 'total' and changed order by {_LARGEST}, split, step, trace_id limit ?
"""
_COUNTS = """
    select count(*) as traces, count(*) filter (status = 'scored') as scored, count(*) filter (status = 'failed') as failed,
        count(*) filter (status = 'skipped') as skipped, count(*) filter (status = 'untouched') as untouched,
        count(*) filter (changed) as changed,
        count(distinct (split, step, group_index)) filter (in_group) as groups
    from scores where kind = 'total'
"""
_SKIPPED = """
    select reason, count(*) as traces, count(*) filter (missing) as missing from scores
    where kind = 'total' and status = 'skipped' group by reason order by traces desc, reason
"""


def changes(paths: RunPaths, parts: Sequence[Part], *, most: int = 1000) -> Changes:
    """The tables over the files of the given parts; at most `most` traces."""
    tables = [pq.read_table(io.BytesIO(paths.rescored(part).read_bytes()), schema=SCHEMA) for part in parts]
    with duckdb.connect() as connection:
        connection.register("scores", pa.concat_tables([SCHEMA.empty_table(), *tables]))
        names = _dicts(connection.execute(_NAMES))
        order = {"total": 0, "reward": 1, "metric": 2}
        return Changes(
            sorted(names, key=lambda row: (row["split"] != "train", row["split"], order[row["kind"]], row["name"])),
            _dicts(connection.execute(_GROUPS)),
            _dicts(connection.execute(_TRACES, [most])),
            _dicts(connection.execute(_COUNTS))[0],
            _dicts(connection.execute(_SKIPPED)),
        )


def _dicts(result: Any) -> list[dict[str, Any]]:
    columns = [column[0] for column in result.description]
    return [dict(zip(columns, row, strict=True)) for row in result.fetchall()]
