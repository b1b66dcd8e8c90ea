"""Re-scoring a run: what would other rewards have given? A new run of the same traces with new scores.

    RUN ─► a part at a time: groups ─► Trace objects ─► signals (`scoring.py`) ─► new scores, old ones beside them
                                   └─► rows with new scores ─► checks, conversion ─► RUN2, committed a part at a time

A row of the new run differs from the recorded one in its scores, in what scoring leaves on a trace (info, usage and
errors of judges, times of scoring), and in its outcome: the batch is converted again, with the step's own options.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.record.config import load_config
from rolltape.record.rescoring import bounded
from rolltape.record.rescoring.plan import RescoreOptions, chosen, refuse_out
from rolltape.record.rescoring.rescored import Changes, changes, write_rescored
from rolltape.record.rescoring.rows import NOT_LAST, Member, New, Unit, units
from rolltape.record.rescoring.scoring import Scorer
from rolltape.record.rescoring.step import regrouped, settle, with_scores
from rolltape.record.secrets import Secrets
from rolltape.record.writing.folder import enter, installed_versions, next_attempt
from rolltape.replay.outcomes import read_outcomes
from rolltape.replay.run import Run, open_run
from rolltape.replay.whole import naming
from rolltape.schema import jsontext
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, CheckFailed, RunConflict
from rolltape.schema.fields import ROW
from rolltape.schema.parquet import put_once, write_parquet
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.storage import AnyPath, listed, place
from rolltape.schema.table import with_outcomes

__all__ = ["RescoreOptions", "Rescored", "rescore"]

Progress = Callable[[int, int], None]
_STAMPED = ("rolltape", "verifiers", "renderers")


@dataclass
class Rescored:
    """What re-scoring a run gave."""

    run: str
    """Id of the new run."""
    source: str
    signals: list[dict[str, Any]]
    """Signals of the taskset: kind, name, weight, and why one is unscorable."""
    steps: int = 0
    """Parts scored by this call."""
    resumed: int = 0
    """Parts that were there already."""
    notes: Counter[str] = field(default_factory=Counter)
    """What else there is to know, and of how many traces or groups."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Traces that could not be scored: step, trace, signal, what was raised."""
    changes: Changes | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        own = {k: v for k, v in self.__dict__.items() if k != "changes"}
        return {**own, "notes": dict(self.notes), **({} if self.changes is None else self.changes.to_dict())}


def rescore(
    source: str | AnyPath,
    config: str | Path,
    out: str | AnyPath,
    options: RescoreOptions | None = None,
    progress: Progress | None = None,
) -> Rescored:
    """Score the traces of the run at `source` by the taskset of the EnvConfig `config` into a new run at `out`.

    `progress` is called with traces done and traces in all. Raises BadInput where the taskset does not load, has no
    signal, or scores other task rows than the recorded ones; RunConflict where `out` holds something else; CheckFailed
    where no trace of a step can be scored, or, with `strict`, one cannot. Steps that are committed by then stay.
    """
    options = options or RescoreOptions()
    run = open_run(source)
    commits = chosen(run, options)
    refuse_out(run, out, options)
    environment = load_config(config)
    scorer = Scorer(environment)
    result = Rescored("", run.run_id, _signals(scorer, run, commits))
    _check_rows(scorer, run, commits, options, result)
    with naming(place(out)):
        target = _target(run, out, environment, options, result)
    secrets = Secrets().knowing(environment)
    job = _Job(run, target, scorer, options, secrets, result, progress, sum(c.file.rows for c in commits))
    with naming(target.paths.root):
        for commit in commits:
            job.part(commit)
    result.failures.sort(key=lambda f: (f["split"], f["step"], f["trace_id"], f["signal"]))
    result.changes = changes(target.paths, [c.part for c in job.written])
    return result


# -- before anything is scored


def _task_rows(run: Run, commits: Sequence[Commit]) -> Iterator[tuple[Commit, str, str | None, str | None, int]]:
    """(commit, first trace id, task type, task row as JSON, traces) of each different row of each row group."""
    for commit in commits:
        for table in run.part_batches(commit, ("trace_id", "task_type", "task")):
            found: dict[tuple[str | None, str | None], list[str]] = {}
            columns = (table.column(name).to_pylist() for name in ("trace_id", "task_type", "task"))
            for trace, kind, text in zip(*columns, strict=True):
                found.setdefault((kind, text), []).append(trace)
            for (kind, text), traces in found.items():
                yield commit, traces[0], kind, text, len(traces)


def _signals(scorer: Scorer, run: Run, commits: Sequence[Commit]) -> list[dict[str, Any]]:
    """The signals as the first task has them. Raises BadInput where there is none, or its row is not the taskset's."""
    for commit, trace, _, text, _ in _task_rows(run, commits):
        signals = scorer.signals(_task(scorer, commit, trace, text))
        if not signals:
            raise BadInput(
                f"{scorer.task_class.__name__} of {scorer.config.taskset.id!r} has no reward, metric or judge; there is "
                "nothing to score by."
            )
        return [
            {
                "kind": s.kind,
                "name": s.name,
                "weight": s.weight if s.is_reward else None,
                "unscorable": "it needs the runtime" if s.needs_runtime else None,
            }
            for s in signals
        ]
    raise BadInput(f"{run.paths.root} holds no trace; there is nothing to re-score.")


def _check_rows(scorer: Scorer, run: Run, commits: Sequence[Commit], options: RescoreOptions, result: Rescored) -> None:
    """Raise BadInput unless every task row is one of the taskset's."""
    name = scorer.task_class.__name__
    others: Counter[str] = Counter()
    for commit, trace, kind, text, count in _task_rows(run, commits):
        _task(scorer, commit, trace, text)
        if kind != name:
            others[str(kind)] += count
    for other, count in others.items():
        if options.strict:
            raise BadInput(
                f"{count} traces were made by the task class {other!r}, and {scorer.config.taskset.id!r} scores by {name!r}. "
                "Without --strict they are scored all the same, as their rows fit."
            )
        result.notes[f"traces made by the task class {other!r} and scored by {name!r}, whose rows fit"] += count


def _task(scorer: Scorer, commit: Commit, trace: str, text: str | None) -> Any:
    place = f"trace {trace} (step {commit.part.step} of {commit.part.split!r})"
    if text is None:
        raise BadInput(f"{place} holds no task row, so it cannot be scored again.")
    try:
        return scorer.task(text, jsontext.from_json(text))
    except BadInput as error:
        raise BadInput(
            f"{place} cannot be scored by {scorer.config.taskset.id!r}: {error}. Name in --config the taskset that the "
            "run was recorded with, or one whose task rows hold the same fields."
        ) from error


# -- the new run


@dataclass(frozen=True)
class _Target:
    """The run that is written."""

    paths: RunPaths
    run_id: str
    attempt: int
    versions: Mapping[str, str]

    def part(self, part: Part) -> Part:
        """Where a part of the recorded run goes."""
        return replace(part, attempt=self.attempt)


def _target(run: Run, out: str | AnyPath, environment: Any, options: RescoreOptions, result: Rescored) -> _Target:
    """Enter the folder of the new run. Raises RunConflict where that is another config's."""
    root = place(out)
    config = environment.model_dump(mode="json", exclude_none=True)
    known = jsontext.to_json({"environment": config, "keep": options.keep})[0]
    identity = {
        "model": run.info.get("model"),
        "tokenizer": run.info.get("tokenizer"),
        "taskset": environment.taskset.id,
        "rescored_from": run.run_id,
        "rescored_by": hashlib.sha256(known.encode()).hexdigest()[:16],
    }
    result.run = enter(RunPaths(root), identity, options.resume)
    paths, versions = RunPaths.of(root, result.run), installed_versions()
    if not paths.attempt(0).exists() and not listed(paths.commits, "*/*.json"):  # else it was there, and is lost
        settings = {"rescored": str(run.paths.root), "keep": options.keep, "environment": Secrets().mask(config)}
        next_attempt(paths, 0, settings, versions)
    return _Target(paths, result.run, 0, versions)


@dataclass
class _Job:
    """Re-scores part after part."""

    run: Run
    target: _Target
    scorer: Scorer
    options: RescoreOptions
    secrets: Secrets
    result: Rescored
    progress: Progress | None
    total: int
    done: int = 0
    written: list[Commit] = field(default_factory=list)
    next_sample: dict[tuple[str, str], int] = field(default_factory=dict)

    def part(self, commit: Commit) -> None:
        """Score and commit one part, unless it is committed already."""
        mine = self.target.part(commit.part)
        lane = (mine.split, mine.writer)
        path = self.target.paths.commit(mine)
        if path.exists():
            there = Commit.read(path)
            self.result.resumed += 1
            self._tell(commit.file.rows)
        else:
            there = self._scored(commit, mine, self.next_sample.get(lane, 0))
            self.result.steps += 1
        self.written.append(there)
        self.next_sample[lane] = max(self.next_sample.get(lane, 0), there.step.next_sample_index or 0)

    def _tell(self, traces: int) -> None:
        self.done += traces
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _scored(self, commit: Commit, mine: Part, start: int) -> Commit:
        """Score a part and write it. Samples are numbered from `start`, or from where they were."""
        batches = list(self.run.part_batches(commit))
        new = bounded.run(self._all(batches, commit))
        self._check(new, commit)
        tables = [with_scores(batch, new, self.target.run_id, mine.attempt) for batch in batches]
        names = tuple(s["name"] for s in self.result.signals if s["kind"] == "group reward")
        groups = [regrouped(group, new, names) for group in commit.groups]
        firsts = [g.first_sample_index for g in commit.groups if g.first_sample_index is not None]
        outcomes = [o for batch in batches for o in read_outcomes(batch)]
        if hooked := sum(o.handed_reward is not None for o in outcomes):
            self.result.notes["rewards left out that a hook of the trainer had made of the old ones"] += hooked
        made = settle(tables, groups, outcomes, commit.step, max(start, min(firsts, default=0)), new)
        write_rescored(self.target.paths, mine, (row for item in new.values() for row in item.beside))
        file = write_parquet(
            self.target.paths.parquet(mine),
            (with_outcomes(table, made.outcomes) for table in tables),
            {name: self.target.versions[name] for name in _STAMPED if name in self.target.versions},
        )
        written = Commit(
            part=mine,
            file=file,
            groups=sorted(made.groups, key=lambda g: g.group_index),
            step=replace(made.step, attempt=mine.attempt),
            sums=commit.sums,
            fingerprint=ROW.fingerprint,
            written_at=time.time(),
        )
        if not put_once(self.target.paths.commit(mine), written.to_bytes()):
            raise RunConflict(
                f"{self.target.paths.commit(mine)} was written meanwhile; let one process re-score a run."
            )
        return written

    def _check(self, new: Mapping[str, New], commit: Commit) -> None:
        """Raise CheckFailed where nothing could be scored, or with `strict` where something could not."""
        attempted = sum(item.attempted for item in new.values())
        failed = sum(item.failed for item in new.values())
        missing = {t: item.missing for t, item in new.items() if item.missing is not None}
        lost = failed + len(missing) if self.options.strict else failed
        if lost and (self.options.strict or failed == attempted):
            raise CheckFailed(
                f"{lost} of {attempted} traces of step {commit.part.step} ({commit.part.split}) could not be scored; "
                f"{self._first(failed, missing)}. Nothing of this step was written; steps before it are committed, and "
                "--resume goes on from here."
            )

    def _first(self, failed: int, missing: Mapping[str, str | None]) -> str:
        """A trace that could not be scored, and why."""
        if failed:
            one = self.result.failures[-1]
            return f"trace {one['trace_id']}: {one['signal']}: {one['error']}"
        trace, why = next(iter(missing.items()))
        return f"trace {trace} has no total reward, {why}"

    # -- scoring the groups of a part

    async def _all(self, batches: Sequence[pa.Table], commit: Commit) -> dict[str, New]:
        """Every trace of a part, group by group, as many at once as `concurrency` allows."""
        new: dict[str, New] = {}
        room = asyncio.Semaphore(self.options.concurrency)

        async def one(unit: Unit, taken: int) -> None:
            try:
                new.update(await self._unit(unit, commit))
                self._tell(unit.table.num_rows)
            finally:
                for _ in range(taken):
                    room.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                for unit in units(batches, commit.groups):
                    taken = min(unit.table.num_rows, self.options.concurrency)
                    for _ in range(taken):
                        await room.acquire()
                    tasks.create_task(one(unit, taken))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return new

    async def _unit(self, unit: Unit, commit: Commit) -> dict[str, New]:
        """The traces of one group, or one that belongs to none."""
        members = unit.members(self.scorer)
        await asyncio.gather(*(self.scorer.score(m.scored) for m in members if m.scored and m.untouched is None))
        await self._group(unit, members)
        for member in members:
            if member.untouched is not None:
                self.result.notes[f"traces not scored: {member.untouched}"] += 1
            place = {"step": commit.part.step, "split": commit.part.split, "trace_id": member.trace_id}
            for signal, error in member.failures.items():
                self.result.failures.append({**place, "signal": signal, "error": self.secrets.text(error)})
        place = {"split": commit.part.split, "step": commit.part.step}
        return {m.trace_id: m.new(place, self.options.keep, self.secrets) for m in members}

    async def _group(self, unit: Unit, members: Sequence[Member]) -> None:
        """Group rewards, where the task has them and the whole group is there and sound; else why not."""
        if not any(s["kind"] == "group reward" for s in self.result.signals):
            return
        group, why = unit.whole(members)
        if why is None:
            await self.scorer.score_group([m.scored for m in group if m.scored is not None])
        elif why.kind is not None:
            self.result.notes[f"groups without group rewards, {why.kind}"] += 1
        for member in members:
            other = None if member in group else NOT_LAST
            member.ungrouped = why if why is not None and member.last else other
