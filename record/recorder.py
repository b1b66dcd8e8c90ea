"""Records traces: each is journaled when its try ends; a step becomes a Parquet file and a commit when it ends.

    trace ─► masked, encoded off the event loop ─► journal ─► acknowledged ─► its Sample may go on
                                                      └─ at the step's end ─► Parquet ─► commit ─► journal emptied

The order at a commit is fixed: outcomes, groups and the step are journaled, the file is whole and synced under its name,
the commit is put, the journal is emptied. Whatever a writer that dies in between leaves is settled by `recover`.

Recording never stops training. Every wait is bounded; what cannot be written stays in memory, is tried again in the
background, counts as not durable, and where memory for it runs out as lost. `strict` raises instead.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.record.journal import is_alive
from rolltape.record.parts import chunks, write_part
from rolltape.record.recover import Recovered, recover
from rolltape.record.secrets import Secrets
from rolltape.record.store import Entry, JournalStore, StepKey, StoreOptions, WriterThread
from rolltape.replay.run import open_run
from rolltape.schema.commits import Commit
from rolltape.schema.encoding import record_of, row_of
from rolltape.schema.errors import BadInput, RolltapeError, RunConflict
from rolltape.schema.fields import SCHEMA_VERSION
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import Part, RunPaths, check_name, folder_of
from rolltape.schema.records import Context, Group, Outcome, Step
from rolltape.schema.table import rows_to_table

logger = logging.getLogger(__name__)

__all__ = ["Committed", "NotRecorded", "Recorder", "StoreOptions", "folder_of", "installed_versions"]


class NotRecorded(RolltapeError, OSError):
    """Something could not be written, and `strict` is set."""


@dataclass(frozen=True)
class Committed:
    """What a commit gave."""

    step: Step
    """The step record with its counts."""
    commit: Commit | None
    """None where the part is not on disk yet; it is tried again in the background."""
    error: str | None = None
    """Why it is not."""


@dataclass(frozen=True)
class RecorderStatus:
    """How recording goes, for people and metrics."""

    not_durable: int
    """Traces whose Sample went on before the journal had them."""
    pending_steps: int
    """Steps that ended and are not on disk."""
    lost: int
    """Traces given up because memory for what cannot be written ran out."""
    error: str | None
    """What is wrong at the moment."""


@dataclass
class _Pending:
    """A step that ended and is not on disk."""

    key: StepKey
    part: Part
    outcomes: list[Outcome]
    groups: Sequence[Group]
    step: Step
    done: bool = False


class Recorder:
    """Writes one run, as one writer of one attempt. Made by `Recorder.open`."""

    def __init__(
        self,
        paths: RunPaths,
        run_id: str,
        attempt: int,
        writer: str,
        versions: Mapping[str, str],
        *,
        store: StoreOptions,
        secrets: Secrets,
        strict: bool,
        recovered: Recovered,
    ) -> None:
        self.paths, self.run_id, self.attempt, self.writer = paths, run_id, attempt, writer
        self.versions = dict(versions)
        self.options, self.secrets, self.strict = store, secrets, strict
        self.recovered = recovered
        """What opening the run settled."""
        self._thread = WriterThread(f"rolltape-{writer}", self._retry, store.retry_seconds)
        journal = paths.journal(attempt, writer) if store.journal else None
        self._store = JournalStore(journal, store, self._thread)
        self._store.begin()
        self._started: Counter[StepKey] = Counter()
        self._late: Counter[StepKey] = Counter()
        self._ended: set[StepKey] = set()
        self._pending: list[_Pending] = []
        self._lost = 0
        self._not_durable = 0

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
        store: StoreOptions | None = None,
        secrets: Secrets | None = None,
        strict: bool = False,
    ) -> Recorder:
        """Open `path` for writing: a new run, or with `resume` a further attempt at the run that is there.

        `start_step` is the first step this attempt records; older attempts' steps from there on are superseded, not deleted.
        While another writer records into the folder, this one joins its attempt. Leftovers of writers that died are settled
        first (see `recover`). `settings` and `versions` are stored with the attempt, secrets in them masked.

        Raises RunConflict where the folder holds a run and `resume` is not set, where the run is of another model, tokenizer
        or taskset, where a living writer has this name, or where the folder holds something else.
        """
        check_name(writer, "writer")
        rows_to_table([])  # pyarrow imports pandas at its first array, for seconds; not while episodes run
        secrets = secrets or Secrets()
        paths = RunPaths(Path(path))
        run_id = _enter(paths, {"model": model, "tokenizer": tokenizer, "taskset": taskset}, resume)
        versions = {**installed_versions(), **(versions or {})}
        with _one_at_a_time(paths):
            recovered = recover(paths.root)
            attempt = _joined_attempt(paths, writer)
            if attempt is None:
                attempt = _next_attempt(paths, start_step, secrets.mask(dict(settings or {})), versions)
            return cls(
                paths,
                run_id,
                attempt,
                writer,
                versions,
                store=store or StoreOptions(),
                secrets=secrets,
                strict=strict,
                recovered=recovered,
            )

    # -- while a step runs

    def started(self, split: str, step: int, n: int = 1, eval_name: str | None = None) -> None:
        """Count `n` tries that begin now."""
        self._started[split, step, eval_name] += n
        self._store.note("started", {"split": split, "step": step, "eval_name": eval_name, "n": n})

    async def trace(self, trace: Any, context: Context) -> bool:
        """Record an ended try; whether the journal has it. Waits at most `ack_seconds` for that.

        `trace`: a Verifiers Trace or its JSON record, as it is now; later changes to it are not seen. A trace that is
        recorded again (its group scores are in) replaces the earlier row. Raises BadInput where it is no trace or its step
        has ended, and NotRecorded where `strict` is set and the journal cannot be written.
        """
        snapshot = trace if isinstance(trace, dict) else record_of(trace)
        key = self._open_key(context)
        done = await asyncio.to_thread(self._put, key, snapshot, context)
        if done.done():
            return self._acknowledged(key, done.result())
        try:
            durable = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), self.options.ack_seconds)
        except TimeoutError:
            durable = False
        return self._acknowledged(key, durable)

    def add(self, trace: Any, context: Context) -> bool:
        """`trace` for callers without an event loop."""
        key = self._open_key(context)
        done = self._put(key, trace if isinstance(trace, dict) else record_of(trace), context)
        try:
            durable = done.result(self.options.ack_seconds)
        except FutureTimeout:
            durable = False
        return self._acknowledged(key, durable)

    def _open_key(self, context: Context) -> StepKey:
        key = (context.split, context.step, context.eval_name)
        if key in self._ended:
            raise BadInput(f"step {context.step} of {context.split!r} has ended; its traces can no longer be recorded.")
        return key

    def _put(self, key: StepKey, snapshot: dict[str, Any], context: Context) -> Future[bool]:
        placed = replace(
            context,
            run=self.run_id,
            attempt=self.attempt,
            writer=self.writer,
            verifiers_version=context.verifiers_version or self.versions.get("verifiers"),
        )
        row = row_of(self.secrets.mask_record(snapshot), placed)
        return self._store.put(key, row, {"split": key[0], "step": key[1], "eval_name": key[2]})

    def _acknowledged(self, key: StepKey, durable: bool) -> bool:
        if durable or not self.options.journal:
            return durable
        if self.strict:
            raise NotRecorded(
                f"a trace of step {key[1]} is not in the journal: {self._store.error or 'no answer in time'}."
            )
        self._not_durable += 1
        self._late[key] += 1
        return False

    def rows(
        self, split: str, step: int, eval_name: str | None = None, *, traces: Container[str] | None = None
    ) -> pa.Table:
        """Rows recorded so far for a step, sorted by group, rollout and try: the table that conversion reads.

        `traces`: only those of these ids.
        """
        entries = self._store.entries((split, step, eval_name))
        wanted = entries if traces is None else [e for e in entries if e.trace_id in traces]
        tables = list(chunks(map(self._store.row, wanted)))
        return pa.concat_tables(tables) if tables else rows_to_table([])

    @property
    def status(self) -> RecorderStatus:
        """How recording goes."""
        return RecorderStatus(self._not_durable, len(self._pending), self._lost, self._store.error)

    # -- when a step ends

    async def commit(
        self,
        split: str,
        step: int,
        *,
        groups: Sequence[Group],
        outcomes: Iterable[Outcome],
        record: Step,
        eval_name: str | None = None,
    ) -> Committed:
        """Write the step's Parquet file, then its commit, off the event loop. Waits at most `commit_seconds`.

        Counts of started and ended tries are filled into `record`. A part that cannot be written stays in memory and in the
        journal and is tried again in the background. Raises RunConflict where this writer has committed the step in this
        attempt before, BadInput where a recorded trace has no outcome, NotRecorded where `strict` is set and it fails.
        """
        pending, done = self._end((split, step, eval_name), groups, list(outcomes), record)
        try:
            commit = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), self.options.commit_seconds)
        except TimeoutError:
            return self._uncommitted(pending, f"no answer within {self.options.commit_seconds} s")
        except OSError as error:
            return self._uncommitted(pending, str(error))
        return Committed(pending.step, commit)

    def commit_now(
        self,
        split: str,
        step: int,
        *,
        groups: Sequence[Group],
        outcomes: Iterable[Outcome],
        record: Step,
        eval_name: str | None = None,
    ) -> Committed:
        """`commit` for callers without an event loop."""
        pending, done = self._end((split, step, eval_name), groups, list(outcomes), record)
        try:
            return Committed(pending.step, done.result(self.options.commit_seconds))
        except FutureTimeout:
            return self._uncommitted(pending, f"no answer within {self.options.commit_seconds} s")
        except OSError as error:
            return self._uncommitted(pending, str(error))

    def _end(
        self, key: StepKey, groups: Sequence[Group], outcomes: list[Outcome], record: Step
    ) -> tuple[_Pending, Future[Commit]]:
        """Close a step and hand it to the writing thread."""
        part = Part(folder_of(key[0], key[2]), key[1], self.attempt, self.writer)
        if key in self._ended or self.paths.commit(part).exists():
            raise RunConflict(
                f"{self.paths.commit(part)}: writer {self.writer!r} has committed step {key[1]} of {key[0]!r} in attempt "
                f"{self.attempt} already; resume the run to record a step again."
            )
        counts = self._counts(key, self._store.entries(key), outcomes)
        place = {"split": key[0], "eval_name": key[2], "step": key[1], "attempt": self.attempt, "writer": self.writer}
        step = Step.from_dict({**record.to_dict(), **place, "counts": counts})
        pending = _Pending(key, part, outcomes, groups, step)
        self._journal_end(pending)
        self._ended.add(key)
        self._pending.append(pending)
        return pending, self._thread.submit(lambda: self._write(pending))

    def _counts(self, key: StepKey, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> dict[str, int]:
        """Started tries, and ended ones by disposition; `lost` is what started and left no row."""
        known = {e.trace_id for e in entries}
        said = Counter(o.disposition for o in outcomes if o.trace_id in known)
        silent = len(entries) - said.total()
        if silent:
            raise BadInput(
                f"{silent} of {len(entries)} traces of step {key[1]} have no outcome; every recorded trace needs one."
            )
        started = max(self._started[key], len(entries))
        return {"started": started, **dict(sorted(said.items())), "lost": started - len(entries)}

    def _journal_end(self, pending: _Pending) -> None:
        """Journal what is known of a step when it ends, so that a crash from here on leaves the whole of it."""
        split, step, name = pending.key
        place = {"split": split, "step": step, "eval_name": name}
        for group in pending.groups:
            self._store.note("group", {**place, "group": group.to_dict()})
        self._store.note("outcome", {**place, "outcomes": [_outcome_dict(o) for o in pending.outcomes]})
        self._store.note("step", {**place, "record": pending.step.to_dict()})

    def _write(self, pending: _Pending) -> Commit:
        """Write and commit a part. In the writing thread."""
        if self._late[pending.key]:
            logger.warning(
                "step %d: %d traces went on before they were journaled", pending.key[1], self._late[pending.key]
            )
        commit = write_part(
            self.paths,
            pending.part,
            self._store.rows(pending.key),
            outcomes=pending.outcomes,
            groups=pending.groups,
            step=pending.step,
            versions=self.versions,
            sums={"not_durable": self._late[pending.key], "lost_before": self._lost},
        )
        self._forget(pending)
        return commit

    def _forget(self, pending: _Pending) -> None:
        pending.done = True
        self._store.drop(pending.key)
        self._pending = [p for p in self._pending if p is not pending]
        for counter in (self._started, self._late):
            counter.pop(pending.key, None)

    def _uncommitted(self, pending: _Pending, why: str) -> Committed:
        message = f"step {pending.key[1]} of {pending.key[0]!r} is not on disk: {why}"
        if self.strict:
            raise NotRecorded(message + ".")
        logger.warning("%s; it is tried again in the background", message)
        return Committed(pending.step, None, message)

    def _retry(self) -> None:
        """Try again what could not be written. In the writing thread."""
        self._store.retry()
        for pending in list(self._pending):
            if pending.done:
                continue
            try:
                self._write(pending)
            except (OSError, RolltapeError) as error:
                self._store.error = str(error)
                self._bound_memory()
                return

    def _bound_memory(self) -> None:
        """Give up the oldest steps where rows that cannot be written take more than `queue_bytes`."""
        sizes = [(p, sum(e.bytes for e in self._store.entries(p.key) if e.row is not None)) for p in self._pending]
        total = sum(size for _, size in sizes)
        for pending, size in sizes:
            if total <= self.options.queue_bytes:
                return
            lost = len(self._store.entries(pending.key))
            logger.error("step %d: %d traces are lost, for nothing could be written", pending.key[1], lost)
            self._lost += lost
            self._forget(pending)
            total -= size

    def close(self, seconds: float | None = None) -> RecorderStatus:
        """End the recorder, after what is queued and one more try of what failed; waits at most `seconds`.

        Rows of steps that did not end stay in the journal, for `recover`.
        """
        limit = self.options.commit_seconds if seconds is None else seconds
        self._thread.submit(self._retry)
        self._thread.submit(self._store.close)
        self._thread.stop(limit)
        return self.status


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        **outcome.__dict__,
        "remove_sample": None if outcome.remove_sample is None else list(outcome.remove_sample),
        "logprobs": None if outcome.logprobs is None else outcome.logprobs.tolist(),
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


def _enter(paths: RunPaths, identity: Mapping[str, str | None], resume: bool) -> str:
    """The id of the run at `paths`: of a new one, or of the one that is resumed."""
    fresh = {
        "run": uuid.uuid4().hex,
        "schema": ".".join(map(str, SCHEMA_VERSION)),
        **identity,
        "created_at": time.time(),
    }
    if not paths.run.exists():
        if paths.root.exists() and not paths.root.is_dir():
            raise RunConflict(f"{paths.root} is a file; a run is a folder, choose a new one.")
        found = paths.root.iterdir() if paths.root.is_dir() else ()
        strangers = sorted(p.name for p in found if p.suffix != ".tmp")  # another writer may be entering as well
        if strangers:
            raise RunConflict(
                f"{paths.root} is not empty ({', '.join(strangers[:5])}) and holds no run.json; choose a new folder."
            )
        if put_once(paths.run, (json.dumps(fresh, indent=1) + "\n").encode()):
            return str(fresh["run"])
    run = open_run(paths.root)
    if not resume:
        raise RunConflict(
            f"{paths.root} holds run {run.run_id} already; choose a new folder, or go on with it by --resume."
        )
    then = run.info
    other = {k: (then.get(k), v) for k, v in identity.items() if v is not None and then.get(k) not in (None, v)}
    if other:
        told = "; ".join(f"{k} {old!r} then, {new!r} now" for k, (old, new) in other.items())
        raise RunConflict(f"{paths.root} holds a run of something else ({told}); two runs are not mixed in one folder.")
    return run.run_id


@contextmanager
def _one_at_a_time(paths: RunPaths) -> Iterator[None]:
    """Let one process at a time open the run for writing, so that writers that start together share an attempt."""
    with paths.run.open("rb") as file:
        with suppress(OSError):  # a file system without locks; writers there should not start at the same moment
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _joined_attempt(paths: RunPaths, writer: str) -> int | None:
    """The attempt that living writers record; None where there is none. Raises RunConflict where one has our name."""
    alive = []
    for file in paths.journals.glob("*.journal"):
        number, _, name = file.stem.partition(".")
        if number.isdigit() and is_alive(file):
            alive.append((int(number), name))
    if any(name == writer for _, name in alive):
        raise RunConflict(
            f"writer {writer!r} records into {paths.root} at this moment; give this one another name, or end the other."
        )
    return max((number for number, _ in alive), default=None)


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
