"""From the rows of a recorded group to new ones: which traces are scored, and what of their rows changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rolltape.record.rescoring.scoring import Score, Scored, Scorer
from rolltape.record.retrace import COLUMNS
from rolltape.record.secrets import Secrets
from rolltape.schema import jsontext
from rolltape.schema.decoding import decode
from rolltape.schema.encoding import row_of
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import TRACE
from rolltape.schema.records import Group

CHANGED = (
    *("reward", "rewards", "scores", "weights", "metrics", "info", "extra_usage", "error_types", "error_messages"),
    *("error_tracebacks", "scoring_start", "scoring_end", "problems", "extra"),
)
"""Columns of a row that re-scoring may change, beside run, attempt and the outcome."""
SETTLED = ("retried", "cancelled", "interrupted", "filtered", "leftover")
"""Dispositions that other scores do not change."""
NO_GROUP = "the trace is in no group record"
"""Why there are no group rewards where the group was not scored when it was recorded."""
_LIGHT = list(dict.fromkeys((*COLUMNS, *CHANGED)))


@dataclass
class New:
    """What re-scoring gives for one trace."""

    columns: dict[str, Any] | None
    """Values of CHANGED; None where the row stays as it is."""
    rewards: dict[str, float | None]
    """Weighted contributions, as they enter the group's sums."""
    beside: list[dict[str, Any]]
    """Old scores beside new (see `rescored.SCHEMA`)."""
    attempted: bool
    failed: bool
    incomplete: str | None = None
    """Why the trace has no group rewards, where the taskset has some."""
    missing: str | None = None
    """Why there is no total, where its rollout came to its end and each reward by itself could be scored."""


@dataclass(frozen=True)
class Ungrouped:
    """Why there are no group rewards."""

    reason: str
    """Of this group."""
    kind: str | None = None
    """Of all groups like it; None where there is no group."""
    general: str | None = None
    """The reason without what is particular to this group; None where nothing is."""

    @property
    def alike(self) -> str:
        """The reason in words that are the same for all groups like it."""
        return self.general or self.reason


NOT_LAST = Ungrouped("the trace is not the last try of its rollout")


@dataclass(frozen=True)
class Unit:
    """Rows that are scored together: those of a group record with all their tries, or one that belongs to none."""

    table: pa.Table
    group: Group | None

    def members(self, scorer: Scorer) -> list[Member]:
        """The traces, made ready to be scored."""
        records = decode(self.table.select(TRACE.arrow.names))
        rows = self.table.select(_LIGHT).to_pylist(maps_as_pydicts="strict")
        members = [Member(record, row, _why_not(row), self.group) for record, row in zip(records, rows, strict=True)]
        for member in members:
            member.open(scorer)
        return members

    def whole(self, members: Sequence[Member]) -> tuple[list[Member], Ungrouped | None]:
        """The group's last tries in rollout order, and why group rewards cannot be given: None where they can."""
        if self.group is None:
            return [], Ungrouped(NO_GROUP)
        by_id = {m.trace_id: m for m in members}
        group = [by_id[t] for t in self.group.trace_ids if t in by_id]
        wanted = max(self.group.expected_size, len(self.group.trace_ids))
        if len(group) < wanted:
            reason = f"{len(group)} of {wanted} rollouts of group {self.group.group_index} are there"
            return group, Ungrouped(reason, "for they are not whole", "its group is not whole")
        failed = next((m for m in group if m.failures or m.scored is None), None)
        if failed is not None:
            reason = f"trace {failed.trace_id} of group {self.group.group_index} could not be scored"
            like = "a trace of its group could not be scored"
            return group, Ungrouped(reason, "for a trace of each could not be scored", like)
        return group, None


def units(batches: Sequence[pa.Table], groups: Sequence[Group]) -> Iterator[Unit]:
    """The rows of a part, group by group. Rows lie sorted by group; only slices are made, nothing is copied before its turn."""
    slices: dict[int | None, list[pa.Table]] = {}
    known = {group.group_index: group for group in groups}
    for batch in batches:
        indices = batch.column("group_index").to_pylist()
        start = 0
        for i in range(1, len(indices) + 1):
            if i == len(indices) or indices[i] != indices[start]:
                slices.setdefault(indices[start], []).append(batch.slice(start, i - start))
                start = i
    for index, parts in slices.items():
        table = pa.concat_tables(parts)
        group = None if index is None else known.get(index)
        if group is not None:
            yield Unit(table, group)
        else:
            yield from (Unit(table.slice(i, 1), None) for i in range(table.num_rows))


def _why_not(row: Mapping[str, Any]) -> str | None:
    """Why a trace is not scored again, as it was not scored live; None where it is.

    An error that came while it was scored is no reason: the rollout itself had ended.
    """
    if row["disposition"] == "cancelled" or row["is_completed"] is False:
        return "the rollout was cut short"
    if row["error_types"] and not row["scoring_start"]:
        return "the rollout ended in an error"
    return None


@dataclass(eq=False)
class Member:
    """One trace on its way."""

    record: dict[str, Any]
    columns: dict[str, Any]
    untouched: str | None
    """Why it is not scored again."""
    group: Group | None
    scored: Scored | None = None
    unreadable: str | None = None
    """Why no Trace can be made of it."""
    ungrouped: Ungrouped | None = None
    """Why it has no group rewards, where the taskset has some."""

    @property
    def trace_id(self) -> str:
        """The trace's id."""
        return str(self.columns["trace_id"])

    @property
    def last(self) -> bool:
        """Whether it is the last try of its rollout, and was not cancelled."""
        return self.columns["disposition"] not in ("retried", "cancelled")

    @property
    def _failed_now(self) -> bool:
        """Whether the new row has an error. A group reward's is no trace's own."""
        return self.scored is None or bool(self.scored.errors)

    @property
    def failures(self) -> dict[str, str]:
        """What could not be scored, and why."""
        if self.unreadable is not None:
            return {} if self.untouched is not None else {"trace": self.unreadable}
        return {} if self.scored is None else self.scored.failures

    def open(self, scorer: Scorer) -> None:
        """Make a Trace of the record."""
        try:
            self.scored = scorer.opened(self.record, self.columns, again=self.untouched is None)
        except BadInput as error:
            self.unreadable = str(error)

    def new(self, place: Mapping[str, Any], keep: bool, secrets: Secrets) -> New:
        """What becomes of the row, once everything is scored."""
        rewards, metrics = self._final(keep)
        columns = self._columns(rewards, metrics, secrets)
        total = self.columns["reward"] if columns is None else columns["reward"]
        return New(
            columns,
            {name: score.value for name, score in rewards.items()},
            [_masked(row, secrets) for row in self._beside(place, rewards, metrics, total)],
            self.untouched is None,
            bool(self.failures),
            self._incomplete(secrets),
            self._missing(rewards),
        )

    def _missing(self, rewards: Mapping[str, Score]) -> str | None:
        """Why a total that should be there is not: only what compares the group could not be scored."""
        lacking = {name: score for name, score in rewards.items() if score.value is None}
        if not lacking or self.ungrouped is None or self.failures or self.untouched is not None:
            return None
        if self.columns["disposition"] in SETTLED or any(s.reason != self.ungrouped.reason for s in lacking.values()):
            return None
        return self._without(lacking)

    def _without(self, lacking: Mapping[str, Score]) -> str:
        """What a total lacks and why, in words that are the same for all groups alike."""
        names: dict[str | None, list[str]] = {}
        for name, score in lacking.items():
            grouped = self.ungrouped is not None and score.reason == self.ungrouped.reason
            names.setdefault(self.ungrouped.alike if self.ungrouped and grouped else score.reason, []).append(name)
        return "without " + "; ".join(f"{', '.join(mine)}: {reason}" for reason, mine in names.items())

    def _incomplete(self, secrets: Secrets) -> str | None:
        """Why there are no group rewards: one raised, or the group could not be compared."""
        names = [] if self.scored is None else [s.name for s in self.scored.signals if s.kind == "group reward"]
        raised = next((f"{name}: {self.failures[name]}" for name in names if name in self.failures), None)
        if raised is not None:
            return secrets.text(f"the group reward failed: {raised}")
        return None if self.ungrouped is None else self.ungrouped.reason

    # -- scores

    def _final(self, keep: bool) -> tuple[dict[str, Score], dict[str, Score]]:
        """Scores by name of rewards and metrics, in the recorded order, new names last. Names that are gone are left out."""
        old_rewards, old_metrics = self.columns["rewards"] or {}, self.columns["metrics"] or {}
        if self.scored is None:
            why = self.unreadable
            if self.untouched is not None:
                return _kept(old_rewards), _kept(old_metrics)
            return {n: Score("failed", reason=why) for n in old_rewards}, _kept(old_metrics)
        rewards, metrics = dict(self.scored.rewards), dict(self.scored.metrics)
        compared = [s.name for s in self.scored.signals if s.kind == "group reward"]
        if self.ungrouped is not None:
            due = [n for n in compared if n not in rewards and (self.untouched is None or n in old_rewards)]
            rewards |= {name: Score("skipped", reason=self.ungrouped.reason) for name in due}
        if self.untouched is not None:
            rewards = _kept({n: v for n, v in old_rewards.items() if n not in compared}) | rewards
            return _ordered(rewards, old_rewards), _kept(old_metrics)
        missing = self.scored.unscorable
        mine = {s.name for s in self.scored.signals if s.is_reward}
        rewards |= _unscorable({n: w for n, w in missing.items() if n in mine}, rewards, old_rewards, keep)
        metrics |= _unscorable({n: w for n, w in missing.items() if n not in mine}, metrics, old_metrics, keep)
        left = {n: v for n, v in old_metrics.items() if n not in metrics}
        metrics |= _kept(left, "no signal of the taskset has its name: the rollout left it")
        return _ordered(rewards, old_rewards), _ordered(metrics, old_metrics)

    def _beside(
        self,
        place: Mapping[str, Any],
        rewards: Mapping[str, Score],
        metrics: Mapping[str, Score],
        total: float | None,
    ) -> Iterator[dict[str, Any]]:
        """Old scores beside new, a row a name, and the total."""
        failed = bool(self.columns["error_types"])
        common = {
            **place,
            **{name: self.columns[name] for name in ("group_index", "rollout_index", "trace_id", "task_name")},
            "in_group": self.group is not None and self.trace_id in self.group.trace_ids,
            "ended_then": self.last and not failed,
            "ended_now": self.last and not (failed if self.untouched is not None else self._failed_now),
        }
        for kind, scores in (("reward", rewards), ("metric", metrics)):
            old = self.columns[f"{kind}s"] or {}
            for name, score in scores.items():
                status = "untouched" if self.untouched is not None and score.status == "kept" else score.status
                values = {"old": old.get(name), "new": score.value, "score": score.score, "weight": score.weight}
                reason = self.untouched if status == "untouched" else score.reason
                yield {**common, "kind": kind, "name": name, **values, "status": status, "reason": reason}
            for name in [n for n in old if n not in scores]:
                reason = "the taskset has no signal of that name"
                values = {"old": old[name], "new": None, "score": None, "weight": None}
                yield {**common, "kind": kind, "name": name, **values, "status": "gone", "reason": reason}
        lacking = {name: score for name, score in rewards.items() if score.value is None}
        status, reason = "scored", None
        if self.untouched is not None:
            status, reason = "untouched", self.untouched
        elif self.failures:
            status, reason = "failed", f"without {', '.join(lacking)}" if lacking else None
        elif lacking:
            status, reason = "skipped", self._without(lacking)
        values = {"old": self.columns["reward"], "new": total, "score": None, "weight": None}
        missing = self._missing(rewards) is not None
        told = {"status": status, "reason": reason, "missing": missing}
        yield {**common, "kind": "total", "name": "reward", **values, **told}

    # -- the row

    def _columns(
        self, rewards: Mapping[str, Score], metrics: Mapping[str, Score], secrets: Secrets
    ) -> dict[str, Any] | None:
        """Values of CHANGED; None where the trace is as it was."""
        if self.untouched is not None and all(s.status == "kept" for s in (*rewards.values(), *metrics.values())):
            return None
        row = row_of(self._rerecorded(rewards, metrics, secrets))
        columns = {name: row.values[name] for name in CHANGED if name != "extra"}
        columns["extra"] = jsontext.pack_extra(row.extra) if row.extra else None
        columns["problems"] = [*(self.columns["problems"] or ()), *(row.values["problems"] or ())] or None
        columns["scores"] = {name: score.score for name, score in rewards.items()}
        columns["weights"] = {name: score.weight for name, score in rewards.items()}
        started, ended = self._times()
        return columns | {"scoring_start": started, "scoring_end": ended}

    def _times(self) -> tuple[float | None, float | None]:
        """When the trace was scored; the end is 0 where that failed, as Verifiers has it."""
        if self.untouched is not None:
            return self.columns["scoring_start"], self.columns["scoring_end"]
        return (self.scored.started, self.scored.ended) if self.scored else (self.columns["scoring_start"], 0.0)

    def _rerecorded(
        self, rewards: Mapping[str, Score], metrics: Mapping[str, Score], secrets: Secrets
    ) -> dict[str, Any]:
        """The record with its new scores, in the shape of its own release. What scoring left on it is masked."""
        record = dict(self.record)
        then = record.get("rewards") or {}
        pairs = any(isinstance(value, dict) for value in then.values()) or "ok" in record
        record["rewards"] = {name: _entry(score, then.get(name), pairs) for name, score in rewards.items()}
        record["metrics"] = {name: score.value for name, score in metrics.items()}
        if self.untouched is not None:
            return record
        errors = [{"type": "TaskError", "message": f"re-scoring: {self.unreadable}", "traceback": None}]
        if self.scored is not None:
            errors = self.scored.errors
            record["info"] = secrets.mask_record({"info": dict(self.scored.trace.info)})["info"]
            record["extra_usage"] = [usage.model_dump(mode="json") for usage in self.scored.trace.extra_usage]
        record["errors"] = secrets.mask_record({"errors": errors})["errors"]
        if "ok" in record:
            record["ok"] = not errors
        span = (record.get("timing") or {}).get("scoring")
        if isinstance(span, dict) and span.keys() == {"start", "end"}:
            start, end = self._times()
            record["timing"] = {**record["timing"], "scoring": {"start": start or 0.0, "end": end or 0.0}}
        return record


def _entry(score: Score, recorded: Any, pairs: bool) -> Any:
    """A reward as its release records it: the contribution, or from 0.3.0 on score and weight."""
    if score.status == "kept":
        return recorded
    if not pairs or score.value is None:
        return score.value
    weight = 1.0 if score.weight is None else score.weight
    return {"score": score.value if score.score is None else score.score, "weight": weight}


def _masked(row: Mapping[str, Any], secrets: Secrets) -> dict[str, Any]:
    """A row of old beside new whose reason, which may be what a signal raised, holds no secret."""
    return {**row, "reason": None if row["reason"] is None else secrets.text(row["reason"])}


def _kept(old: Mapping[str, float | None], reason: str | None = None) -> dict[str, Score]:
    return {name: Score("kept", value, reason=reason) for name, value in old.items()}


def _unscorable(
    why: Mapping[str, str], scored: Mapping[str, Score], old: Mapping[str, float | None], keep: bool
) -> dict[str, Score]:
    """Scores of signals that cannot be scored offline: the recorded value, or null.

    A signal that gives several scores by name is not in the recording under its own name; then the recorded names that
    nothing else has are taken for its.
    """
    missing = {name: reason for name, reason in why.items() if name not in scored}
    several = [name for name in missing if name not in old]
    left = [name for name in old if name not in scored and name not in missing]
    if several and left:
        reason = missing[several[0]]
        missing = {n: r for n, r in missing.items() if n not in several} | dict.fromkeys(left, reason)
    return {
        name: Score("kept", old[name], reason=reason)
        if keep and old.get(name) is not None
        else Score("skipped", reason=reason)
        for name, reason in missing.items()
    }


def _ordered(scores: Mapping[str, Score], old: Mapping[str, Any]) -> dict[str, Score]:
    """Scores in the order of the recorded names, new ones last: the same scores then add up to the same total."""
    known = {name: scores[name] for name in old if name in scores}
    return known | {name: score for name, score in scores.items() if name not in known}
