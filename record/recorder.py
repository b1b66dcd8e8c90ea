"""Records traces: each is journaled when its try ends; a step becomes a Parquet file and a commit when it ends.

    trace ─► masked, encoded off the event loop ─► journal ─► acknowledged ─► its Sample may go on
                                                      └─ at the step's end ─► Parquet ─► commit ─► journal emptied

The order at a commit is fixed: outcomes, groups and the step are journaled, the file is whole and synced under its name,
the commit is put, the journal is emptied. Whatever a writer that dies in between leaves is settled by `recover`.

Recording never stops training. Three threads do the work: one encodes, one writes the journal, one writes Parquet files. Every
wait for them is bounded; what cannot be written stays in memory, is tried again in the background, counts as not durable,
and where memory for it runs out as lost. `strict` raises instead.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock, Thread
from typing import Any, cast

import pyarrow as pa

from rolltape.record.secrets import Secrets
from rolltape.record.writing.encoder import Encoder
from rolltape.record.writing.folder import Home, enter, installed_versions, joined_attempt, next_attempt, one_at_a_time
from rolltape.record.writing.parts import chunks, counted, sound_outcome, sound_record, write_part
from rolltape.record.writing.recover import Recovered, outcome_record, settle
from rolltape.record.writing.resume import after_everything, continued
from rolltape.record.writing.store import Entry, JournalStore, StepKey, StoreOptions, place_of
from rolltape.record.writing.worker import Worker
from rolltape.replay.run import open_run
from rolltape.schema import jsontext
from rolltape.schema.commits import Commit
from rolltape.schema.encoding import row_of
from rolltape.schema.errors import BadInput, RolltapeError, RunConflict
from rolltape.schema.paths import Part, RunPaths, check_name, folder_of
from rolltape.schema.records import Context, Group, Outcome, Step
from rolltape.schema.snapshots import record_of
from rolltape.schema.storage import AnyPath, place
from rolltape.schema.table import rows_to_table

logger = logging.getLogger(__name__)

__all__ = ["Committed", "NotDurable", "NotRecorded", "Recorder", "StoreOptions", "folder_of"]

_LONGEST_PAUSE = 60.0
_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotRecorded(RolltapeError, OSError):
    """Something could not be written, and `strict` is set."""


class NotDurable(NotRecorded):
    """A trace is kept, but the journal does not have it in time; the step's end still writes it if it can."""


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
    """Traces that are neither on disk nor in memory any more: given up because memory for them ran out, or unreadable."""
    error: str | None
    """What is wrong at the moment."""


@dataclass(eq=False)
class _Pending:
    """A step that ended and is not on disk."""

    key: StepKey
    part: Part
    outcomes: list[Outcome]
    groups: Sequence[Group]
    step: Step
    rows: int
    """Recorded when it ended."""
    late: int
    """Not in the journal before their Samples went on."""
    commit: Commit | None = None
    noted: Future[bool] | None = None
    """Whether the journal has how it ended."""
    given_up: int = 0
    """Of its rows, for want of memory."""
    failed: bool = False
    """Whether it could not be written, or not in time."""
    tries: int = 0
    due: float = 0.0
    """When it is tried again, by the monotonic clock."""
    tried: set[bytes] = field(default_factory=set)


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
        self._process = os.getpid()
        self._home = Home(paths, attempt)
        self._store = JournalStore(paths.journal(attempt, writer), store, self._home.check_journal)
        self._lock = RLock()  # close() may be called by a signal handler, in the middle of anything
        self._started: Counter[StepKey] = Counter()
        self._late: dict[StepKey, set[str]] = {}
        self._groups: dict[str, int] = {}
        self._pending: list[_Pending] = []
        self._made: tuple[list[Entry], pa.Table] | None = None
        """Rows of a step that are one table, and the table."""
        self._clean: dict[str, tuple[Any, Secrets]] = {}
        """Settings by name in which these secrets found nothing."""
        self._draining = False
        self._lost = 0
        self._not_durable = 0
        self._error: str | None = None
        self._commits = Worker(f"rolltape-commit-{writer}", self._retry, store.retry_seconds)
        self._encoder = Encoder(f"rolltape-encode-{writer}", self._store.worker, self._store.write)

    @classmethod
    def open(
        cls,
        path: str | AnyPath,
        *,
        model: str | None = None,
        tokenizer: str | None = None,
        taskset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        resume: bool = False,
        start_step: int | None = 0,
        writer: str = "main",
        store: StoreOptions | None = None,
        secrets: Secrets | None = None,
        strict: bool = False,
        state: str | Path | None = None,
    ) -> Recorder:
        """Open `path` for writing: a new run, or with `resume` a further attempt at the run that is there.

        Of a URL such as `s3://bucket/run` the journal is kept below `state` on this machine (see `rolltape.schema.storage`).

        `start_step` is the first step this attempt records; older attempts' steps from there on are superseded, not deleted.
        None: the step behind everything that is recorded, so that nothing is superseded.
        While another writer records into the folder, this one joins its attempt. Leftovers of writers that died are settled
        first (see `recover`). `settings` and `versions` are stored with the attempt, secrets in them masked, and wherever else
        they turn up (see `know`).

        Raises RunConflict where the folder holds a run and `resume` is not set, where the run is of another model, tokenizer
        or taskset, where a living writer has this name, or where the folder holds something else; NotRecorded where the
        folder cannot be written to.
        """
        check_name(writer, "writer")
        rows_to_table([])  # pyarrow imports pandas at its first array, for seconds; not while episodes run
        secrets = (secrets or Secrets()).knowing(settings or {})
        paths = RunPaths(place(path, state))
        versions = {**installed_versions(), **(versions or {})}
        identity = {"model": model, "tokenizer": tokenizer, "taskset": taskset}
        try:
            run_id = enter(paths, identity, resume)
            paths = RunPaths.of(paths.root, run_id)
            with one_at_a_time(paths):
                recovered = settle(paths)
                for fault in recovered.faults:
                    logger.warning("left by an earlier writer: %s", fault)
                attempt = joined_attempt(paths, writer)
                if attempt is None:
                    if start_step is None:
                        start_step = after_everything(open_run(paths.root))
                    attempt = next_attempt(paths, start_step, secrets.mask(dict(settings or {})), versions)
                made = partial(cls, paths, run_id, attempt, writer, versions, store=store or StoreOptions())
                return made(secrets=secrets, strict=strict, recovered=recovered)
        except RolltapeError:
            raise
        except OSError as error:
            raise NotRecorded(f"{paths.root} cannot be written to: {error}.") from error

    def know(self, *configs: Any) -> None:
        """Mask from now on, wherever they turn up, the secrets that `configs` hold: pydantic models, such as Verifiers'
        EnvConfig with the variables it forwards, or JSON values."""
        with self._lock:
            self.secrets = self.secrets.knowing(*configs)

    def next_group(self, split: str, eval_name: str | None = None, n: int = 1) -> int:
        """The first of `n` group indices that nobody else gets: groups of a split are numbered on from step to step, from
        attempt to attempt, and by each writer in a lane of its own."""
        folder = folder_of(split, eval_name)
        if folder not in self._groups:  # read without the lock: a disk may hang
            found = continued(open_run(self.paths.root), folder, self.writer)[1].next_group_index
            self._groups.setdefault(folder, found)
        with self._lock:
            first = self._groups[folder]
            self._groups[folder] += n
            return first

    # -- while a step runs

    def started(self, split: str, step: int, n: int = 1, eval_name: str | None = None) -> None:
        """Count `n` tries that begin now."""
        key = (split, step, eval_name)
        with self._lock:
            self._started[key] += n
        self._store.started(key, n)

    async def trace(self, trace: Any, context: Context) -> bool:
        """Record an ended try; whether the journal has it. Waits at most `ack_seconds` for that.

        `trace`: a Verifiers Trace or its JSON record, which is not to change before this returns. A trace that is
        recorded again (its group scores are in) replaces the earlier row. Raises BadInput where it is no trace or its step
        has ended, and NotRecorded where `strict` is set and the journal cannot be written.
        """
        key, problems = self._key(context), list[str]()
        try:
            snapshot = trace if isinstance(trace, dict) else record_of(trace, problems)
            put = partial(self._put, key, snapshot, context, problems)
            entry = await self._encoder.put(put, self.options.ack_seconds)
        except Exception as error:
            return self._unrecorded(trace, error)
        return self._acknowledged(key, entry)

    def add(self, trace: Any, context: Context) -> bool:
        """`trace` for callers without an event loop."""
        key, problems = self._key(context), list[str]()
        try:
            snapshot = trace if isinstance(trace, dict) else record_of(trace, problems)
            put = partial(self._put, key, snapshot, context, problems)
            entry = put() if self._encoder.idle else self._encoder.run(put).result()
        except Exception as error:
            return self._unrecorded(trace, error)
        self._store.worker.wait(self._store.write([entry]), self.options.ack_seconds)
        return self._acknowledged(key, entry)

    def _key(self, context: Context) -> StepKey:
        if os.getpid() != self._process:
            raise BadInput(
                f"the recorder was opened in process {self._process}, and this one was forked from it; open one here, as a "
                "writer with a name of its own."
            )
        if self._store.closed:
            raise BadInput("the recorder is closed; open the run again to go on.")
        return context.split, context.step, context.eval_name

    def _put(self, key: StepKey, snapshot: dict[str, Any], context: Context, problems: list[str]) -> Entry:
        placed = replace(
            context,
            run=self.run_id,
            attempt=self.attempt,
            writer=self.writer,
            verifiers_version=context.verifiers_version or self.versions.get("verifiers"),
            model=context.model and self.secrets.text(context.model),
            sampling=self._settings("sampling", context.sampling, problems),
            renderer=self._settings("renderer", context.renderer, problems),
        )
        row = row_of(self._masked(snapshot, problems), placed, problems)
        return self._store.put(key, row, place_of(key))

    def _settings(self, name: str, given: Mapping[str, Any] | None, problems: list[str]) -> Mapping[str, Any] | None:
        """Settings with secrets masked. Those of one run are mostly the same, and looked through once."""
        if given is None or self._clean.get(name) == (given, self.secrets):
            return given
        try:
            masked: Mapping[str, Any] = self.secrets.mask(given)
        except RecursionError:  # nested too deeply, or without end
            return cast("Mapping[str, Any]", self.secrets.mask(jsontext.plain(given, name, problems)))
        if masked is given:
            with suppress(Exception):  # what cannot be copied is looked through each time
                self._clean[name] = (copy.deepcopy(given), self.secrets)
        return masked

    def _masked(self, record: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        try:
            return self.secrets.mask_record(record)
        except RecursionError:  # nested too deeply, or without end
            flat = {k: jsontext.plain(v, k, problems) for k, v in record.items() if k != "nodes"}
            return self.secrets.mask_record({k: flat.get(k, v) for k, v in record.items()})

    def _unrecorded(self, trace: Any, error: Exception) -> bool:
        """A trace that could not be taken apart is lost, and stops nobody."""
        if isinstance(error, BadInput):
            raise error
        name = trace.get("id") if isinstance(trace, dict) else getattr(trace, "id", None)
        logger.exception("trace %s could not be recorded", name, exc_info=error)
        with self._lock:
            self._lost += 1
        if self.strict:
            raise NotRecorded(f"trace {name} could not be recorded: {type(error).__name__}: {error}") from error
        return False

    def _acknowledged(self, key: StepKey, entry: Entry) -> bool:
        if entry.place is not None or self._store.latest(key, entry).place is not None:
            return True
        if not self.options.journal:
            return False
        if self.strict:
            why = self._store.error or f"no answer within {self.options.ack_seconds} s"
            raise NotDurable(f"a trace of step {key[1]} is not in the journal: {why}.")
        with self._lock:
            late = self._late.setdefault(key, set())
            self._not_durable += entry.trace_id not in late
            late.add(entry.trace_id)
        return False

    def rows(
        self, split: str, step: int, eval_name: str | None = None, *, traces: Container[str] | None = None
    ) -> pa.Table:
        """Rows recorded so far for a step, sorted by group, rollout and try: the table that conversion reads.

        `traces`: only those of these ids; the others are not read.
        """
        entries = self._store.entries((split, step, eval_name))
        wanted = entries if traces is None else [e for e in entries if e.trace_id in traces]
        tables = list(self._tables(wanted))
        if len(tables) == 1 and tables[0].num_rows == len(entries):
            self._made = entries, tables[0]
        return pa.concat_tables(tables) if tables else rows_to_table([])

    def _tables(self, entries: list[Entry]) -> Iterator[pa.Table]:
        """Tables of these rows, in their order. Of a short step the one that conversion has just read."""
        made, self._made = self._made, None
        if made is not None and made[0] == entries:
            return iter([made[1]])
        return chunks(row for entry in entries if (row := self._store.row(entry)) is not None)

    @property
    def status(self) -> RecorderStatus:
        """How recording goes."""
        with self._lock:
            lost = self._lost + sum(p.given_up for p in self._pending)
            return RecorderStatus(self._not_durable, len(self._pending), lost, self._store.error or self._error)

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
        end = partial(self._end, (split, step, eval_name), list(groups), list(outcomes), record)
        pending, done = await asyncio.wrap_future(self._encoder.run(end))
        await self._commits.arrived(done, self.options.commit_seconds)
        return self._committed(pending, done)

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
        end = partial(self._end, (split, step, eval_name), list(groups), list(outcomes), record)
        pending, done = self._encoder.run(end).result()
        self._commits.wait(done, self.options.commit_seconds)
        return self._committed(pending, done)

    def _end(
        self, key: StepKey, groups: Sequence[Group], outcomes: list[Outcome], record: Step
    ) -> tuple[_Pending, Future[Commit]]:
        """Close a step and hand it to the thread that commits."""
        part = Part(folder_of(key[0], key[2]), key[1], self.attempt, self.writer)
        traces = self._store.end(key)
        if traces is None:
            raise RunConflict(
                f"{self.paths.commit(part)}: writer {self.writer!r} has committed step {key[1]} of {key[0]!r} in attempt "
                f"{self.attempt} already; resume the run to record a step again."
            )
        silent = len(set(traces) - {o.trace_id for o in outcomes})
        if silent:
            self._store.end(key, False)
            raise BadInput(
                f"{silent} of {len(traces)} traces of step {key[1]} have no outcome; every recorded trace needs one."
            )
        outcomes = [replace(o, reason=self.secrets.text(o.reason)) if o.reason else o for o in outcomes]
        with self._lock:
            started, late = self._started.pop(key, 0), len(self._late.pop(key, ()))
        place = {**place_of(key), "attempt": self.attempt, "writer": self.writer, "counts": {"started": started}}
        step = counted(replace(sound_record(record), **place), outcomes, traces)
        pending = _Pending(key, part, outcomes, groups, step, len(traces), late)
        with suppress(Exception):  # it is tried again when the part is written
            self._journal_end(pending)
        with self._lock:
            self._pending.append(pending)
        return pending, self._commits.submit(partial(self._commit, pending))

    def _committed(self, pending: _Pending, done: Future[Commit]) -> Committed:
        """What became of a step within the time that may be waited for it."""
        error = done.exception() if done.done() else TimeoutError(f"no answer within {self.options.commit_seconds} s")
        if error is None:
            commit = done.result()
            return Committed(commit.step, commit)
        if isinstance(error, RunConflict):
            raise error
        pending.failed = True
        self._bound_memory()
        message = f"step {pending.key[1]} of {pending.key[0]!r} is not on disk: {error}"
        if self.strict:
            raise NotRecorded(message + ".") from error
        logger.warning("%s; it is tried again in the background", message)
        return Committed(pending.step, None, message)

    # -- in the thread that commits

    def _commit(self, pending: _Pending) -> Commit:
        """Write and commit a part, unless that is done."""
        if pending.commit is not None:
            return pending.commit
        try:
            noted = pending.noted or self._journal_end(pending)
            if not pending.tries:
                self._store.worker.wait(noted, self.options.ack_seconds)
            self._home.check()
            pending.commit = self._write(pending)
        except RunConflict:
            self._forget(pending, self._store.leave(pending.key))
            raise
        except Exception as error:
            pending.failed, pending.tries = True, pending.tries + 1
            pending.due = time.monotonic() + min(self.options.retry_seconds * 2**pending.tries, _LONGEST_PAUSE)
            self._error = f"step {pending.key[1]} of {pending.key[0]!r}: {error}"
            raise
        self._error = None
        self._forget(pending, pending.rows - pending.commit.file.rows)
        self._store.worker.wait(self._store.drop(pending.key), self.options.ack_seconds)
        return pending.commit

    def _journal_end(self, pending: _Pending) -> Future[bool]:
        """Journal what is known of a step when it ends, so that a crash from here on leaves the whole of it."""
        key, place = pending.key, place_of(pending.key)
        pending.outcomes = [sound_outcome(o) for o in pending.outcomes]
        pending.groups = [sound_record(g) for g in pending.groups]
        for group in pending.groups:
            self._store.note("group", {**place, "group": group.to_dict()}, key, hurry=False)
        said, arrays = outcome_record(pending.outcomes)
        self._store.note("outcome", {**place, "outcomes": said}, key, arrays, hurry=False)
        pending.noted = self._store.note("step", {**place, "record": pending.step.to_dict()}, key)
        return pending.noted

    def _write(self, pending: _Pending) -> Commit:
        if pending.late:
            logger.warning("step %d: %d traces went on before they were journaled", pending.key[1], pending.late)
        return write_part(
            self.paths,
            pending.part,
            self._tables(self._store.entries(pending.key)),
            outcomes=pending.outcomes,
            groups=pending.groups,
            step=pending.step,
            versions=self.versions,
            sums={"not_durable": pending.late, "lost_before": self._lost},
            tried=pending.tried,
        )

    def _forget(self, pending: _Pending, lost: int) -> None:
        with self._lock:
            self._pending = [p for p in self._pending if p is not pending]
            self._lost += lost

    def _retry(self, everything: bool = False) -> None:
        """Try again what could not be written and is due, until something fails; what fits a full disk may be smaller."""
        now = time.monotonic()
        for pending in list(self._pending):
            if not (everything or (pending.failed and pending.due <= now)):
                continue
            try:
                self._commit(pending)
            except Exception as error:
                self._bound_memory()
                if not (isinstance(error, OSError) and error.errno in _SPACE):
                    return

    def _bound_memory(self) -> None:
        """Give up rows of the oldest steps where those that cannot be written take more than `queue_bytes`."""
        over = self._store.memory() - self.options.queue_bytes
        for pending in list(self._pending):
            if over <= 0:
                return
            over -= self._store.memory(pending.key) if pending.failed else 0
            if not pending.failed or not (lost := self._store.give_up(pending.key)):
                continue
            logger.error("step %d: %d traces are lost, for nothing could be written", pending.key[1], lost)
            left = {entry.trace_id for entry in self._store.entries(pending.key)}
            with self._lock:
                pending.given_up += lost
                pending.outcomes = [o for o in pending.outcomes if o.trace_id in left]

    def _drain(self, limit: float) -> None:
        """Have what was handed over taken apart and journaled. In a thread: who was interrupted may hold a lock of it."""
        with self._lock:
            if self._draining:
                return
            self._draining = True
        stop = Thread(target=self._encoder.stop, args=(limit - time.monotonic(),), daemon=True)
        try:
            stop.start()
        except RuntimeError:  # the interpreter ends, and its own end has waited for the encoder
            return
        stop.join(max(0.0, limit - time.monotonic()))

    def close(self, seconds: float | None = None) -> RecorderStatus:
        """End the recorder, after what is queued and one more try of what failed; waits at most `seconds`.

        Rows of steps that did not end stay in the journal, for `recover`; those that are in memory only are lost.
        """
        limit = time.monotonic() + (self.options.commit_seconds if seconds is None else seconds)
        self._drain(limit)
        self._commits.submit(partial(self._retry, True))
        self._commits.stop(limit - time.monotonic())
        self._store.close(max(0.0, limit - time.monotonic()))
        with self._lock:
            self._lost += self._store.forget_memory()
        return self.status
