"""From traces to Samples.

    trace ─► branches ─► Sample: group_index, index     the group record and the order of rollouts
                                 prompt, label          the task row
                                 tokens                 token ids of the branch's nodes
                                 response_length        from the first trainable token to the end
                                 loss_mask              1 where the model sampled the token and this branch trains it
                                 rollout_log_probs      log-prob of those tokens, 0.0 where loss_mask is 0
                                 response               text of the branch's last sampled message
                                 reward                 total, or with reward_key all named ones and the total
                                 status                 failed (error), truncated, completed
                                 routing_key            trace id
                                 metadata.verifiers     branch, task, rewards, metrics, stop condition, error

`convert` reads trace and group records and nothing else, so the same rows give the same Samples, live or offline. The
mapping is that of Miles' own Verifiers adapter; `finish` in `outcomes.py` adds what the trainer did afterwards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.replay.branches import Branch, sibling_branches
from rolltape.replay.checks import check_view, rounded
from rolltape.replay.checks.findings import Finding
from rolltape.replay.checks.groups import Member, Shared, check_group, members, needed_size, repeated
from rolltape.replay.options import ConvertOptions
from rolltape.replay.sample import Sample, Status
from rolltape.replay.view import COLUMNS, View, views
from rolltape.schema.errors import CheckFailed
from rolltape.schema.records import Group
from rolltape.schema.table import needs

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int8], npt.NDArray[np.float32]]
"""Token ids, loss mask and log-probs of one Sample."""

SampleGroup = list[Sample] | list[list[Sample]]
"""The Samples of a group: one a rollout (`reject`), or a list of siblings a rollout (`siblings`), uniformly."""


@dataclass(frozen=True)
class Conversion:
    """What conversion gave."""

    groups: list[SampleGroup]
    """Groups that may be trained, in the order of their records."""
    findings: list[Finding]
    dropped: dict[str, tuple[str, str]]
    """(disposition, reason) of each trace that became no Sample, by trace id."""
    records: list[Group] = field(default_factory=list)
    """The group records as converted: `first_sample_index` filled in where it was None."""


def convert(
    traces: pa.Table, groups: Sequence[Group], options: ConvertOptions | None = None, *, start: int = 0
) -> Conversion:
    """Check `traces` and `groups` and make Samples of what is sound.

    `traces`: rows of the trace record (at least `view.COLUMNS`), in any order and chunking. `groups`: the records of the
    groups wanted, in order. A group without a recorded first sample index is numbered on from `start` or the group before
    it. A trace that fails costs its group; nothing else stops. Raises CheckFailed where `options.strict` is set and a
    check fails, BadInput where `traces` lacks columns.
    """
    needs(traces, COLUMNS, "convert")
    options = options or ConvertOptions()
    wanted = {t for g in groups for t in g.trace_ids}
    rows: dict[str, _Row] = {}
    batches: list[_Rows] = []
    findings, parts = repeated(traces), list(views(traces))
    for view in parts:
        findings.extend(f for f in check_view(view, options) if f.trace_id in wanted)
        batches.append(_Rows(view, options))
        rows.update(batches[-1].by_id())
    bad = {f.trace_id: f for f in reversed(findings) if f.severity == "error"}
    known, shared = members(parts), Shared.among(groups)
    result = Conversion([], findings, {})
    for group in groups:
        group = group if group.first_sample_index is not None else replace(group, first_sample_index=start)
        found = [f for f in check_group(group, known, options, shared) if f.trace_id not in bad]
        findings.extend(found)
        bad.update((f.trace_id, f) for f in found if f.severity == "error" and f.trace_id is not None)
        samples = _group(group, rows, bad, found, options, result.dropped)
        result.records.append(group)
        start = max(start, (group.first_sample_index or 0) + sum(map(len, samples)))
        if samples:
            result.groups.append(samples if options.branch_policy == "siblings" else [s for [s] in samples])
    for batch in batches:
        batch.fill()
    findings.extend(_temperatures(traces, result))
    findings.extend(rounded(traces))
    return result


def convert_alone(
    traces: pa.Table, options: ConvertOptions | None = None
) -> tuple[dict[str, list[Sample]], list[Finding]]:
    """Samples of each trace for itself, by trace id, and the findings: for evaluations, and for a look at one trace.

    No group can cost a trace here, and no number is given. A trace that ended in an error becomes samples of status
    `failed` where it has something sampled. What fails a check, or has nothing to train, is left out. Raises BadInput where
    `traces` lacks columns.
    """
    needs(traces, COLUMNS, "convert_alone")
    options = options or ConvertOptions()
    made: dict[str, list[Sample]] = {}
    findings = repeated(traces)
    for view in views(traces):
        findings.extend(check_view(view, options))
        bad = {f.trace_id for f in findings if f.severity == "error"}
        rows = _Rows(view, options)
        made.update((t, row.samples()) for t, row in rows.by_id().items() if t not in bad)
        rows.fill()
    sound = {t: kept for t, samples in made.items() if (kept := [s for s in samples if any(s.loss_mask or ())])}
    return sound, findings


def _group(
    group: Group,
    rows: Mapping[str, _Row],
    bad: Mapping[str | None, Finding],
    found: Sequence[Finding],
    options: ConvertOptions,
    dropped: dict[str, tuple[str, str]],
) -> list[list[Sample]]:
    """Samples of a group, a list a rollout; empty where the group cannot be trained, with the reasons in `dropped`."""
    lost = {t: why for t in group.trace_ids if (why := _unsound(t, rows, bad))}
    group_error = next((f for f in found if f.severity == "error" and f.trace_id is None), None)
    if options.strict:
        _raise(next((bad[t] for t in group.trace_ids if lost.get(t, ("",))[0] == "failed_check"), group_error))
    needed = needed_size(group, options)
    sound = [t for t in group.trace_ids if t not in lost]
    enough = group_error is None and len(sound) >= max(1, needed)
    made = {t: rows[t].samples() for t in sound} if enough else {}
    lost.update((t, ("empty", _NOTHING_LEFT)) for t, samples in made.items() if not samples)
    sound = [t for t in sound if t not in lost]
    dropped.update(lost)
    if enough and len(sound) >= max(1, needed):
        return _number(group, [made[t] for t in sound], options)
    reason = group_error.message if group_error else _short(group, lost, needed)
    short = group_error is None or group_error.code == "group_size"
    dropped.update((t, ("incomplete_group" if short else "failed_check", reason)) for t in sound)
    return []


_NOTHING_LEFT = "no branch has a token to train: its replies were asked for again, and the last answers are empty"


def _unsound(trace: str, rows: Mapping[str, _Row], bad: Mapping[str | None, Finding]) -> tuple[str, str] | None:
    """(disposition, reason) of a trace that cannot be trained: its error first, then emptiness, then a failed check."""
    row = rows.get(trace)
    if row is None:
        return "failed_check", "the trace is not among the rows"
    if row.error is not None:
        return "error", f"{row.error[0]}: {row.error[1]}"
    failed = bad.get(trace)
    if failed is None:
        return None
    if failed.code in ("no_trainable_token", "no_tokens"):
        return "empty", failed.message
    return "failed_check", f"{failed.code}: {failed.message}"


def _short(group: Group, lost: Mapping[str, tuple[str, str]], needed: int) -> str:
    kinds = Counter(disposition for disposition, _ in lost.values())
    why = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "rollouts are missing"
    sound = len(group.trace_ids) - len(lost)
    return f"group {group.group_index} has {sound} of {needed} sound rollouts ({why})"


def _raise(failed: Finding | None) -> None:
    if failed is not None:
        raise CheckFailed(f"{failed} (strict is set, so nothing of this batch was converted)")


def _number(group: Group, rollouts: list[list[Sample]], options: ConvertOptions) -> list[list[Sample]]:
    """Give the Samples of a group their numbers: consecutive over the group, siblings under their first one's."""
    index = group.first_sample_index or 0
    for siblings in rollouts:
        first = index
        for sample in siblings:
            sample.group_index, sample.index = group.group_index, index
            sample.rollout_id = first if options.branch_policy == "siblings" else None
            index += 1
    return rollouts


def _temperatures(traces: pa.Table, result: Conversion) -> Iterator[Finding]:
    """Temperatures mixed within a batch: log-probs of different temperatures do not compare."""
    emitted = {s.routing_key for g in result.groups for s in flatten(g)}
    texts = zip(traces.column("trace_id").to_pylist(), traces.column("sampling").to_pylist(), strict=True)
    settings = {text for trace, text in texts if trace in emitted}
    found = {None if t is None else json.loads(t).get("temperature") for t in settings}
    if len(found) > 1:
        shown = sorted("unknown" if t is None else str(t) for t in found)
        yield Finding(
            code="temperature",
            severity="warning",
            message=f"the batch mixes sampling temperatures ({', '.join(shown)})",
            expected=1,
            found=shown,
        )


def flatten(group: SampleGroup) -> list[Sample]:
    """The Samples of a group, whether it is nested or not."""
    return [s for item in group for s in (item if isinstance(item, list) else [item])]


@dataclass(frozen=True)
class _Row:
    """One trace of a view, not yet made into Samples."""

    rows: _Rows
    i: int

    @property
    def error(self) -> tuple[str, str] | None:
        """(type, message) of the last error."""
        types = self.rows.error_types[self.i]
        return (types[-1], self.rows.error_messages[self.i][-1]) if types else None

    def samples(self) -> list[Sample]:
        """One Sample, or one for each branch that has something to train."""
        return self.rows.samples(self.i)


class _Rows:
    """The traces of one view with the columns that Samples are made of."""

    def __init__(self, view: View, options: ConvertOptions) -> None:
        self.view, self.options = view, options
        self.unfilled: list[tuple[Sample, Arrays]] = []
        self.error_types, self.error_messages = view.pylist("error_types"), view.pylist("error_messages")
        names = (
            "task_prompt",
            "task_prompt_is_json",
            "task_label",
            "task_label_is_json",
            "task_idx",
            "reward",
            "rewards",
        )
        for name in (*names, "metrics", "stop_condition", "is_truncated", "turn_weight_version", "turn_cached_tokens"):
            setattr(self, name, view.pylist(name))
        self.latency = view.pylist("turn_latency")
        spans = [view.column(n).fill_null(0.0).to_numpy(zero_copy_only=False) for n in _SPAN]
        self.seconds = np.maximum(spans[1] - spans[0], 0.0).tolist()
        self.mask = view.sampled.view(np.int8)
        self.prompt_tokens = (_filled(view, "node_prompt_tokens") + _filled(view, "node_cached_tokens")).tolist()
        self.node_sampled = view.node_sampled.tolist()

    task_prompt: list[str | None]
    task_prompt_is_json: list[bool | None]
    task_label: list[str | None]
    task_label_is_json: list[bool | None]
    task_idx: list[int | None]
    reward: list[float | None]
    rewards: list[dict[str, float] | None]
    metrics: list[dict[str, float] | None]
    stop_condition: list[str | None]
    is_truncated: list[bool | None]
    turn_weight_version: list[list[str | None] | None]
    turn_cached_tokens: list[list[int | None] | None]

    def by_id(self) -> dict[str, _Row]:
        """The rows by trace id."""
        return {t: _Row(self, i) for i, t in enumerate(self.view.trace_ids)}

    def samples(self, i: int) -> list[Sample]:
        first, end = int(self.view.node_starts[i]), int(self.view.node_starts[i + 1])
        if self.view.linear[i]:
            return [self._linear(i, first, end)]
        parents = self.view.parents[first:end].tolist()
        sampled = self.view.node_sampled[first:end].tolist()
        counts = self.view.node_sampled_tokens[first:end].tolist()
        return [self._branch(i, first, branch) for branch in sibling_branches(parents, sampled, counts)]

    def _linear(self, i: int, first: int, end: int) -> Sample:
        """The one branch of a trace that is a chain: its tokens lie side by side."""
        start, stop = int(self.view.token_starts[i]), int(self.view.token_starts[i + 1])
        sampled = self.view.sampled[start:stop]
        response = start + int(sampled.argmax()) if sampled.any() else stop
        return self._sample(
            i,
            0,
            range(first, end),
            (self.view.ids[start:stop], self.mask[response:stop], self._logprobs(slice(response, stop))),
        )

    def _branch(self, i: int, first: int, branch: Branch) -> Sample:
        """One branch of several: its tokens are gathered node by node."""
        nodes = [first + n for n in branch.nodes]
        starts = self.view.node_token_starts
        spans = [np.arange(starts[n], starts[n + 1]) for n in nodes]
        at = np.concatenate(spans)
        trained = np.repeat([n in branch.trainable for n in branch.nodes], [len(s) for s in spans])
        mask = self.mask[at] * trained
        begin = int(np.argmax(mask))
        values = np.where(mask[begin:] > 0, self._logprobs(at[begin:]), np.float32(0))
        return self._sample(i, branch.index, nodes, (self.view.ids[at], mask[begin:], values))

    def _logprobs(self, tokens: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Log-probs of these tokens of a sound trace, 0 where the model did not sample: there is one exactly where it did."""
        return np.where(self.view.sampled[tokens], self.view.stored_logprobs[tokens], np.float32(0))

    def _sample(self, i: int, branch: int, nodes: Sequence[int], arrays: Arrays) -> Sample:
        """The field mapping. Token ids, mask and log-probs follow later (see `fill`)."""
        turns = [n for n in nodes if self.node_sampled[n]]
        sample = Sample(
            prompt=_prompt(_parsed(self.task_prompt[i], self.task_prompt_is_json[i], "")),
            tokens=[],
            response=self._text(turns[-1]) if turns else "",
            response_length=len(arrays[1]),
            label=_parsed(self.task_label[i], self.task_label_is_json[i], None),
            reward=self._reward(i),
            loss_mask=[],
            weight_versions=self._of_turns(self.turn_weight_version[i], i, turns),
            rollout_log_probs=[],
            status=self._status(i),
            metadata={"verifiers": self._metadata(i, branch)},
            routing_key=self.view.trace_ids[i],
            non_generation_time=self._waiting(i),
            prefix_cache_info={
                "cached_tokens": sum(self._of_turns(self.turn_cached_tokens[i], i, turns)),
                "total_prompt_tokens": sum(self.prompt_tokens[n] for n in turns),
            },
        )
        self.unfilled.append((sample, arrays))
        return sample

    def fill(self) -> None:
        """Make the token lists of the Samples made so far, when everything else is made.

        A pass of the garbage collector over young objects walks over every item of young lists, which would take as long
        as making them; a list that takes the place of another does not bring the next pass nearer.
        """
        for sample, (ids, mask, logprobs) in self.unfilled:
            sample.tokens = ids.tolist()
            sample.loss_mask = list(mask.tobytes())  # twice as fast as `tolist`
            sample.rollout_log_probs = logprobs.tolist()
        self.unfilled.clear()

    def _text(self, node: int) -> str:
        return (self.view.contents[node].as_py() or "").strip()

    def _reward(self, i: int) -> float | dict[str, Any] | None:
        total = self.reward[i]
        return total if self.options.reward_key is None else {**(self.rewards[i] or {}), "reward": total}

    def _status(self, i: int) -> Status:
        if self.error_types[i]:
            return Status.FAILED
        return Status.TRUNCATED if self.is_truncated[i] else Status.COMPLETED

    def _metadata(self, i: int, branch: int) -> dict[str, Any]:
        result = {
            "branch_index": branch,
            "task_index": self.task_idx[i],
            "rewards": dict(self.rewards[i] or {}),
            "metrics": dict(self.metrics[i] or {}),
            "stop_condition": self.stop_condition[i],
        }
        if self.error_types[i]:
            result["error"] = {"type": self.error_types[i][-1], "message": self.error_messages[i][-1]}
        return result

    def _of_turns(self, values: list[Any] | None, i: int, turns: Sequence[int]) -> list[Any]:
        """What the engine said about these turns, where it said something."""
        if values is None:
            return []
        first = int(self.view.node_starts[i])
        end = int(self.view.node_starts[i + 1])
        if len(values) == len(turns):
            return [v for v in values if v is not None]
        everyone = np.flatnonzero(self.view.node_sampled[first:end]) + first
        wanted = set(turns)
        return [v for n, v in zip(everyone.tolist(), values, strict=False) if n in wanted and v is not None]

    def _waiting(self, i: int) -> float:
        """Seconds of the conversation that the engine was not at work; 0 where it said nothing about its own.

        Added up one by one: `sum` rounds otherwise from Python 3.12 on, and a batch is to be the same on every Python.
        """
        known = [x for x in self.latency[i] or () if x is not None]
        return max(0.0, self.seconds[i] - reduce(add, known)) if known else 0.0


_SPAN = ("generation_start", "generation_end")


def _filled(view: View, name: str) -> npt.NDArray[np.int64]:
    """[N] values of a node column, 0 where there is none."""
    values, valid = view.node_numbers(name)
    return np.where(valid, values, 0)


def _prompt(value: Any) -> Any:
    """A prompt as Miles has it: its text, or its messages without the keys that say nothing."""
    return [_without_nulls(m) for m in value] if isinstance(value, list) else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v if k == "provider_state" else _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _parsed(text: str | None, is_json: bool | None, missing: Any) -> Any:
    if text is None:
        return missing
    return json.loads(text) if is_json else text


__all__ = ["Conversion", "Member", "SampleGroup", "convert", "convert_alone", "flatten"]
