"""Records traces: rows while a step runs, a Parquet file and its commit when it ends.

    trace ─► encoded off the event loop ─► rows of the step, in memory ─► Parquet ─► commit
                                            └─ `RowStore` is the seam: whatever keeps rows until the commit

The order at a commit is fixed: the file is whole and synced under its name before the commit is put, and without a
commit a file is no data. A recorder that dies leaves at most a file that nobody reads.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.schema.commits import Commit
from rolltape.schema.encoding import Row, record_of, row_of
from rolltape.schema.errors import BadInput, RunConflict
from rolltape.schema.fields import ROW, SCHEMA_VERSION
from rolltape.schema.parquet import ROW_GROUP_BYTES, put_once, write_parquet
from rolltape.schema.paths import Part, RunPaths, check_name
from rolltape.schema.records import Context, Group, Outcome, Step
from rolltape.schema.table import rows_to_table, with_outcomes

StepKey = tuple[str, int, str | None]
"""(split, step, eval name)."""


class RowStore:
    """Rows of the steps that are not committed yet, in memory."""

    def __init__(self) -> None:
        self._rows: dict[StepKey, dict[str, Row]] = {}

    def put(self, key: StepKey, row: Row) -> None:
        """Keep a row; one of the same trace replaces the earlier one."""
        self._rows.setdefault(key, {})[row.values["trace_id"]] = row

    def rows(self, key: StepKey) -> list[Row]:
        """Rows of a step, sorted by group, rollout and try."""
        return sorted(self._rows.get(key, {}).values(), key=_order)

    def drop(self, key: StepKey) -> None:
        """Forget a step once it is committed."""
        self._rows.pop(key, None)


def _order(row: Row) -> tuple[int, int, int, str]:
    v = row.values
    group = v["group_index"]
    return (-1 if group is None else group, v["rollout_index"] or 0, v["try_number"], v["trace_id"])


class Recorder:
    """Writes one run, as one writer of one attempt. Made by `Recorder.open`."""

    def __init__(self, paths: RunPaths, run_id: str, attempt: int, writer: str, versions: Mapping[str, str]) -> None:
        self.paths = paths
        self.run_id = run_id
        self.attempt = attempt
        self.writer = writer
        self.versions = dict(versions)
        self._store = RowStore()
        self._started: Counter[StepKey] = Counter()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: str | None = None,
        tokenizer: str | None = None,
        taskset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        resume: bool = False,
        start_step: int = 0,
        writer: str = "main",
    ) -> Recorder:
        """Open `path` for writing: a new run, or with `resume` a further attempt at the run that is there.

        `start_step` is the first step this attempt records; older attempts' steps from there on are superseded, not deleted.
        `settings` and `versions` are stored with the attempt. Raises RunConflict where the folder holds a run and `resume`
        is not set, where the run is of another model, tokenizer or taskset, or where the folder holds something else.
        """
        check_name(writer, "writer")
        paths = RunPaths(Path(path))
        identity = {"model": model, "tokenizer": tokenizer, "taskset": taskset}
        run_id = _enter(paths, identity, resume)
        versions = {**installed_versions(), **(versions or {})}
        attempt = _next_attempt(paths, start_step, dict(settings or {}), versions)
        return cls(paths, run_id, attempt, writer, versions)

    def started(self, split: str, step: int, n: int = 1, eval_name: str | None = None) -> None:
        """Count `n` tries that begin now."""
        self._started[split, step, eval_name] += n

    async def trace(self, trace: Any, context: Context) -> None:
        """Record an ended try: encoded off the event loop, kept until its step is committed.

        `trace`: a Verifiers Trace or its JSON record, as it is now; later changes to it are not seen. A trace that is
        recorded again (its group scores are in) replaces the earlier row.
        """
        snapshot = trace if isinstance(trace, dict) else record_of(trace)
        row = await asyncio.to_thread(row_of, snapshot, self._placed(context))
        self._store.put(_key(context), row)

    def add(self, trace: Any, context: Context) -> None:
        """`trace` for callers without an event loop."""
        self._store.put(_key(context), row_of(trace, self._placed(context)))

    def _placed(self, context: Context) -> Context:
        return replace(
            context,
            run=self.run_id,
            attempt=self.attempt,
            writer=self.writer,
            verifiers_version=context.verifiers_version or self.versions.get("verifiers"),
        )

    def rows(self, split: str, step: int, eval_name: str | None = None) -> pa.Table:
        """Rows recorded so far for a step, sorted by group, rollout and try: the table that conversion reads."""
        tables = list(_chunks(self._store.rows((split, step, eval_name))))
        return pa.concat_tables(tables) if tables else rows_to_table([])

    async def commit(
        self,
        split: str,
        step: int,
        *,
        groups: Sequence[Group],
        outcomes: Iterable[Outcome],
        record: Step,
        eval_name: str | None = None,
    ) -> Commit:
        """Write the step's Parquet file, then its commit, off the event loop. Returns the commit.

        Counts of started and ended tries are filled into `record`. Raises RunConflict where this writer has committed the
        step in this attempt before; the rows stay in memory whenever it raises.
        """
        return await asyncio.to_thread(
            self.commit_now, split, step, groups=groups, outcomes=list(outcomes), record=record, eval_name=eval_name
        )

    def commit_now(
        self,
        split: str,
        step: int,
        *,
        groups: Sequence[Group],
        outcomes: Iterable[Outcome],
        record: Step,
        eval_name: str | None = None,
    ) -> Commit:
        """`commit` for callers without an event loop."""
        key = (split, step, eval_name)
        rows, ended = self._store.rows(key), list(outcomes)
        part = Part(folder_of(split, eval_name), step, self.attempt, self.writer)
        path = self.paths.commit(part)
        if path.exists():
            raise RunConflict(
                f"{path}: writer {self.writer!r} has committed step {step} of {split!r} in attempt {self.attempt} already; "
                "resume the run to record a step again."
            )
        file = write_parquet(
            self.paths.parquet(part), (with_outcomes(t, ended) for t in _chunks(rows)), _metadata(self.versions)
        )
        commit = Commit(
            part=part,
            file=file,
            groups=sorted(groups, key=lambda g: g.group_index),
            step=self._placed_step(record, key, self._counts(key, rows, ended)),
            sums=_sums(rows),
            fingerprint=ROW.fingerprint,
            written_at=time.time(),
        )
        if not put_once(path, commit.to_bytes()):
            raise RunConflict(
                f"{path}: another process committed this part meanwhile; give each writer a name of its own."
            )
        self._store.drop(key)
        self._started.pop(key, None)
        return commit

    def _placed_step(self, record: Step, key: StepKey, counts: dict[str, int]) -> Step:
        split, step, name = key
        place = {"split": split, "eval_name": name, "step": step, "attempt": self.attempt, "writer": self.writer}
        return Step.from_dict({**record.to_dict(), **place, "counts": counts})

    def _counts(self, key: StepKey, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, int]:
        """Started tries, and ended ones by disposition; `lost` is what started and left no row."""
        known = {r.values["trace_id"] for r in rows}
        said = Counter(o.disposition for o in outcomes if o.trace_id in known)
        started = max(self._started[key], len(rows))
        silent = len(rows) - said.total()
        if silent:
            raise BadInput(
                f"{silent} of {len(rows)} traces of step {key[1]} have no outcome; every recorded trace needs one."
            )
        return {"started": started, **dict(sorted(said.items())), "lost": started - len(rows)}

    def close(self) -> None:
        """End the recorder. Rows of uncommitted steps are gone with it."""
        self._store = RowStore()


def _key(context: Context) -> StepKey:
    return context.split, context.step, context.eval_name


def folder_of(split: str, eval_name: str | None) -> str:
    """The folder of a split: `train`, `eval`, or `eval-<name>` with what no file name takes replaced."""
    if eval_name is None:
        return split
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in eval_name)
    return f"{split}-{safe}"


def _chunks(rows: Sequence[Row]) -> Iterator[pa.Table]:
    """Tables of at most ROW_GROUP_BYTES, or of one row."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        if chunk and size + row.nbytes > ROW_GROUP_BYTES:
            yield rows_to_table(chunk)
            chunk, size = [], 0
        chunk.append(row)
        size += row.nbytes
    if chunk:
        yield rows_to_table(chunk)


def _sums(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "tokens": sum(r.values["num_tokens"] for r in rows),
        "sampled_tokens": sum(r.values["num_sampled"] for r in rows),
        "turns": sum(r.values["num_turns"] for r in rows),
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide what a recording holds, where they are installed."""
    found = {}
    for name in ("rolltape", "verifiers", "renderers", "transformers", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _metadata(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: versions[name] for name in ("rolltape", "verifiers", "renderers") if name in versions}


def _enter(paths: RunPaths, identity: Mapping[str, str | None], resume: bool) -> str:
    """The id of the run at `paths`: of a new one, or of the one that is resumed."""
    fresh = {
        "run": uuid.uuid4().hex,
        "schema": ".".join(map(str, SCHEMA_VERSION)),
        **identity,
        "created_at": time.time(),
    }
    if not paths.run.exists():
        strangers = sorted(p.name for p in paths.root.iterdir()) if paths.root.is_dir() else []
        if strangers:
            raise RunConflict(
                f"{paths.root} is not empty ({', '.join(strangers[:5])}) and holds no run.json; choose a new folder."
            )
        if put_once(paths.run, (json.dumps(fresh, indent=1) + "\n").encode()):
            return str(fresh["run"])
    found = json.loads(paths.run.read_bytes())
    if not resume:
        raise RunConflict(
            f"{paths.root} holds run {found['run']} already; choose a new folder, or go on with it by --resume."
        )
    other = {k: (found.get(k), v) for k, v in identity.items() if v is not None and found.get(k) not in (None, v)}
    if other:
        told = "; ".join(f"{k} {then!r} then, {now!r} now" for k, (then, now) in other.items())
        raise RunConflict(f"{paths.root} holds a run of something else ({told}); two runs are not mixed in one folder.")
    return str(found["run"])


def _next_attempt(paths: RunPaths, start_step: int, settings: dict[str, Any], versions: Mapping[str, str]) -> int:
    """Claim the next attempt number by putting its file."""
    taken = [int(p.stem) for p in paths.attempts.glob("*.json") if p.stem.isdigit()]
    number = max(taken, default=-1) + 1
    while True:
        body = {
            "attempt": number,
            "start_step": start_step,
            "started_at": time.time(),
            "process": os.getpid(),
            "versions": dict(versions),
            "settings": settings,
        }
        if put_once(paths.attempt(number), (json.dumps(body, indent=1, default=str) + "\n").encode()):
            return number
        number += 1


__all__ = ["Recorder", "RowStore", "folder_of", "installed_versions"]
