"""Writing one part of a run: its Parquet file, then its commit. Used by the recorder and by `recover`.

Rows are streamed: at most one row group is in memory beside what the caller holds. The commit counts what the file holds,
not what was meant to be in it: a row that cannot be read or written is lost, and costs nothing but itself.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema import jsontext
from rolltape.schema.commits import Commit
from rolltape.schema.encoding import Row
from rolltape.schema.errors import RunConflict
from rolltape.schema.fields import ROW
from rolltape.schema.parquet import put_once, write_parquet
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.records import Group, Outcome, Step
from rolltape.schema.table import chunked, rows_to_table, with_outcomes

logger = logging.getLogger(__name__)

Record = TypeVar("Record", Group, Step)

CHUNK_BYTES = 6 << 20
"""Rows of a row group in memory, roughly. Writing takes eight times that; row groups of 64 MiB are 1 % smaller on disk."""


_SUMS = {"tokens": "num_tokens", "sampled_tokens": "num_sampled", "turns": "num_turns"}
"""Sums of a commit, and the columns they are of."""


@dataclass
class _Tally:
    """What went into a part."""

    traces: list[str] = field(default_factory=list)
    sums: Counter[str] = field(default_factory=Counter)
    """Tokens, sampled tokens and turns."""

    def counted(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """`tables` as they are, counted."""
        for table in tables:
            self.traces += table.column("trace_id").to_pylist()
            for name, column in _SUMS.items():
                self.sums[name] += pc.sum(table.column(column)).as_py() or 0
            yield table


def write_part(
    paths: RunPaths,
    part: Part,
    tables: Iterable[pa.Table],
    *,
    outcomes: Sequence[Outcome],
    groups: Sequence[Group],
    step: Step,
    versions: Mapping[str, str],
    sums: Mapping[str, Any] | None = None,
    tried: set[bytes] | None = None,
) -> Commit:
    """Write a part and commit it. `tables` (see `chunks`) come in the order of the file; `step.counts` are of the step's end.

    `tried` collects the commits of failed calls: one of them on disk is this part's own. Raises RunConflict where the part
    was committed before, OSError where it cannot be written; then nothing is committed.
    """
    tried = set() if tried is None else tried
    done = _committed(paths, part, tried)
    if done is not None:
        return done
    tally = _Tally()
    sound = [sound_outcome(o) for o in outcomes]
    file = write_parquet(
        paths.parquet(part),
        (with_outcomes(table, sound) for table in tally.counted(tables)),
        {name: versions[name] for name in ("rolltape", "verifiers", "renderers") if name in versions},
    )
    commit = Commit(
        part=part,
        file=file,
        groups=sorted(groups, key=lambda g: g.group_index),
        step=counted(step, sound, tally.traces),
        sums={**{name: tally.sums[name] for name in _SUMS}, **(sums or {})},
        fingerprint=ROW.fingerprint,
        written_at=time.time(),
    )
    data = commit.to_bytes()
    tried.add(data)
    if not put_once(paths.commit(part), data):
        raise _conflict(paths, part)
    return commit


def _committed(paths: RunPaths, part: Part, tried: set[bytes]) -> Commit | None:
    """The part's commit, where one of `tried` reached the disk although it was said to have failed."""
    path = paths.commit(part)
    if not path.exists():
        return None
    if path.read_bytes() not in tried:
        raise _conflict(paths, part)
    return Commit.read(path)


def _conflict(paths: RunPaths, part: Part) -> RunConflict:
    return RunConflict(
        f"{paths.commit(part)}: writer {part.writer!r} has committed step {part.step} of {part.split!r} in attempt "
        f"{part.attempt} already; resume the run to record a step again, and give each writer a name of its own."
    )


def counted(step: Step, outcomes: Sequence[Outcome], traces: Sequence[str]) -> Step:
    """`step` with the counts of the traces that are there: started tries, ended ones by disposition, and the lost rest.

    Where traces that were there when the step ended are lost, its digests are left out: no replay can make them again.
    """
    by_trace = {o.trace_id: o.disposition for o in outcomes}
    said = Counter(by_trace[t] for t in traces if t in by_trace)
    before = {k: n for k, n in step.counts.items() if k not in ("started", "lost")}
    started = max(step.counts.get("started", 0), len(traces), sum(before.values()))
    step = replace(step, counts={"started": started, **dict(sorted(said.items())), "lost": started - said.total()})
    if said.total() < sum(before.values()):
        step = replace(step, digest_converted=None, digest_handed=None)
    return step


def sound_outcome(outcome: Outcome) -> Outcome:
    """`outcome` as it can be written: valid text, JSON values, arrays of the right kind. What a hook gave may be anything."""
    reason, reward = outcome.reason, outcome.handed_reward
    try:
        json.dumps(reward)
    except (TypeError, ValueError, RecursionError):
        reward = jsontext.plain(reward, "", [])
    return replace(
        outcome,
        reason=None if reason is None else jsontext.clean_text(str(reason))[0],
        handed_reward=reward,
        remove_sample=None if outcome.remove_sample is None else tuple(map(bool, outcome.remove_sample)),
        logprobs=None if outcome.logprobs is None else np.asarray(outcome.logprobs, np.float32),
    )


def sound_record(record: Record) -> Record:
    """A group or step record with JSON values only."""
    data = record.to_dict()
    try:
        json.dumps(data)
    except (TypeError, ValueError, RecursionError):
        return type(record).from_dict(jsontext.plain(data, "", []))
    return record


def chunks(rows: Iterable[Row]) -> Iterator[pa.Table]:
    """Tables of about CHUNK_BYTES, or of one row. A row that no table can be made of is left out, with a log entry."""
    for chunk in chunked(rows, CHUNK_BYTES):
        table = _table(chunk)
        chunk.clear()
        yield table
        del table
        pa.default_memory_pool().release_unused()  # it keeps several times of what is in use


def _table(rows: list[Row]) -> pa.Table:
    try:
        return rows_to_table(rows)
    except MemoryError:
        raise
    except Exception:
        if len(rows) == 1:
            logger.exception("trace %s cannot be written", rows[0].values["trace_id"])
            return rows_to_table([])
        return pa.concat_tables([_table([row]) for row in rows]).combine_chunks()
