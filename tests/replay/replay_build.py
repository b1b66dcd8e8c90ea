"""Small builders of Verifiers 0.2.0 records, so that a test shows the trace it is about, and readers of the recorded ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.replay import (
    Conversion,
    ConvertOptions,
    Finding,
    Sample,
    convert,
    digest,
    finish,
    flatten,
    outcomes_of,
)
from rolltape.schema import ROW, Context, Group, Outcome, Step, encode, with_outcomes, write_parquet
from rolltape.schema.commits import Commit
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import Part, RunPaths

TRACES = Path(__file__).parents[1] / "data" / "traces"
"""Recorded traces of several Verifiers releases, with the facts expected of each."""

Record = dict[str, Any]


def said(
    parent: int | None, ids: Sequence[int], text: str = "a question", role: str = "user", **changes: Any
) -> Record:
    """A message that no model produced, with its token ids."""
    message = {"role": role, "content": text}
    if role == "tool":
        message = {"role": role, "tool_call_id": "call-1", "content": text, "name": None}
    elif role == "assistant":
        message = {"role": role, "content": text, "reasoning_content": None, "tool_calls": None, "provider_state": None}
    return _node(parent, message, list(ids), [False] * len(ids), []) | changes


def reply(
    parent: int | None,
    scaffold: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float] | None = None,
    text: str = "an answer",
    finish: str | None = "stop",
    prompt: int | None = None,
    completion: int | None = None,
    **changes: Any,
) -> Record:
    """A message the model sampled: template tokens it was given, then its own, each with a log-prob.

    `prompt` and `completion` are the lengths the engine reported; without `prompt` no usage is recorded.
    """
    message = {
        "role": "assistant",
        "content": text,
        "reasoning_content": None,
        "tool_calls": None,
        "provider_state": None,
    }
    values = [-0.25 * (i + 1) for i in range(len(sampled))] if logprobs is None else list(logprobs)
    mask = [False] * len(scaffold) + [True] * len(sampled)
    node = _node(parent, message, [*scaffold, *sampled], mask, values)
    node |= {"sampled": True, "finish_reason": finish}
    if prompt is not None:
        node["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": len(sampled) if completion is None else completion,
            "cached_input_tokens": None,
            "reasoning_tokens": None,
            "cost": None,
        }
    return node | changes


def _node(parent: int | None, message: Record, ids: list[int], mask: list[bool], logprobs: list[float]) -> Record:
    return {
        "parent": parent,
        "message": message,
        "sampled": False,
        "timestamp": 1000.0,
        "token_ids": ids,
        "mask": mask,
        "is_content": [True] * len(ids),
        "logprobs": logprobs,
        "finish_reason": None,
        "usage": None,
    }


def trace(
    *nodes: Record,
    id: str = "t",
    idx: int = 0,
    rewards: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    errors: Iterable[str] = (),
    stop: str | None = "agent_completed",
    prompt: Any = "a question",
    data: Record | None = None,
    **changes: Any,
) -> Record:
    """A trace record. `rewards` default to one of 1.0; `errors` are "Type: message"."""
    span = {"start": 0.0, "end": 0.0}
    return {
        "id": id,
        "task": {"type": "ProbeTask", "data": {"idx": idx, "name": None, "prompt": prompt, **(data or {})}},
        "runtime": None,
        "nodes": [dict(n) for n in nodes],
        "rewards": {"ok": 1.0} if rewards is None else rewards,
        "metrics": metrics or {},
        "info": {},
        "extra_usage": [],
        "is_completed": True,
        "stop_condition": stop,
        "errors": [{"type": e.split(": ")[0], "message": e.split(": ", 1)[-1], "traceback": None} for e in errors],
        "timing": {"start": 0.0, "setup": span, "generation": span, "finalize": span, "scoring": span},
    } | changes


def turn(id: str = "t", reward: float | None = 1.0, **changes: Any) -> Record:
    """A sound trace of one turn: two prompt tokens, one of the template, three sampled."""
    rewards = {} if reward is None else {"ok": reward}
    return trace(said(None, [1, 2]), reply(0, [3], [4, 5, 6]), **{"id": id, "rewards": rewards, **changes})


def group(records: Sequence[Record], index: int = 0, size: int | None = None, **rest: Any) -> Group:
    """The group record of `records`; `size` rollouts were asked for, by default as many as there are."""
    return Group.from_records(records, group_index=index, expected_size=len(records) if size is None else size, **rest)


def by_task(records: Sequence[Record]) -> list[Group]:
    """One group a task index, in order of first appearance."""
    tasks: dict[int, list[Record]] = {}
    for record in records:
        tasks.setdefault(record["task"]["data"]["idx"], []).append(record)
    return [group(members, i) for i, members in enumerate(tasks.values())]


def each_alone(records: Sequence[Record]) -> list[Group]:
    """A group for every trace."""
    return [group([record], i) for i, record in enumerate(records)]


def converted(
    records: Sequence[Record],
    groups: Sequence[Group] | None = None,
    contexts: Sequence[Context] | None = None,
    **options: Any,
) -> Conversion:
    """Encode and convert `records`, by default as one group."""
    return convert(encode(records, contexts), [group(records)] if groups is None else groups, ConvertOptions(**options))


def samples(conversion: Conversion) -> list[Sample]:
    """Every Sample of a conversion, in order."""
    return [s for g in conversion.groups for s in flatten(g)]


def codes(findings: Iterable[Finding], severity: str | None = None) -> list[str]:
    """Codes of `findings`, in order; only those of one severity where it is given."""
    return [f.code for f in findings if severity in (None, f.severity)]


def trained_ids(sample: Sample) -> list[int]:
    """Token ids that a Sample trains."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return [t for t, m in zip(response, sample.loss_mask or [], strict=True) if m]


def unnumbered(sample: Sample) -> Sample:
    """`sample` without its place in a batch."""
    return replace(sample, group_index=None, index=None, rollout_id=None)


def recorded(name: str, release: str = "0.2.0") -> list[Record]:
    """The recorded traces of a file, in order. Read line by line: one prompt holds U+2028."""
    with (TRACES / release / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def facts(name: str, release: str = "0.2.0") -> list[Record]:
    """What each trace of a file must show, in the same order."""
    return list(json.loads((TRACES / release / f"{name}.facts.json").read_text(encoding="utf-8")))


SCENARIOS = (
    "errors",
    "forks",
    "group_rewards",
    "multi_branch_compaction",
    "multi_turn_user_sim",
    "reasoning",
    "single_turn",
    "tools",
    "truncated",
    "unicode",
    "zero",
)


# -- runs on disk


def put_run(root: Path, start_step: int = 0, **changes: Any) -> Path:
    """A run without anything recorded, whose first attempt is to record from `start_step` on."""
    info = {"run": "r1", "schema": "1.0", "model": "m", "tokenizer": "m", "taskset": "x", "created_at": 0.0} | changes
    put_once(RunPaths(root).run, json.dumps(info).encode())
    put_attempt(root, 0, start_step)
    return root


def put_attempt(root: Path, number: int, start_step: int = 0) -> None:
    """The file of an attempt that records from `start_step` on."""
    body = {
        "attempt": number,
        "start_step": start_step,
        "settings": {"seed": number},
        "versions": {},
        "started_at": 1.0,
    }
    put_once(RunPaths(root).attempt(number), json.dumps(body).encode())


def put_step(
    root: Path,
    step: int,
    records: Sequence[Record],
    *,
    groups: Sequence[Group] | None = None,
    split: str = "train",
    attempt: int = 0,
    writer: str = "main",
    fates: Mapping[str, str] | None = None,
    options: ConvertOptions | None = None,
    first: int = 0,
    run: str = "r1",
    **changes: Any,
) -> Commit:
    """Record a step as a live run does: convert, hand over, write rows with outcomes, commit.

    `fates` are dispositions of traces that differ from what conversion gives; `changes` are fields of the step record.
    """
    options = options or ConvertOptions()
    table = encode(records, [Context(run=run, split=split, step=step, attempt=attempt, writer=writer)] * len(records))
    placed = [replace(g, split=split, step=step) for g in (by_task(records) if groups is None else groups)]
    conversion = convert(table, placed, options, start=first)
    fates = fates or {}
    outcomes = [replace(o, disposition=fates.get(o.trace_id, o.disposition)) for o in outcomes_of(conversion)]
    outcomes += [
        Outcome(trace_id=t, disposition=d) for t, d in fates.items() if t not in {o.trace_id for o in outcomes}
    ]
    handed = finish(conversion.groups, outcomes)
    counts = Counter(o.disposition for o in outcomes)
    fields = {
        "options": options.to_dict(),
        "batch": tuple(s.index or 0 for g in handed for s in flatten(g)),
        "digest_converted": digest(conversion.groups),
        "digest_handed": digest(handed),
        "counts": {"started": counts.total(), **counts, "lost": 0},
    }
    record = Step(split=split, step=step, attempt=attempt, writer=writer, **{**fields, **changes})
    return put_part(root, Part(split, step, attempt, writer), table, conversion.records, outcomes, record)


def put_part(
    root: Path, part: Part, table: pa.Table, groups: Sequence[Group], outcomes: Sequence[Outcome], record: Step
) -> Commit:
    """Write a part and commit it."""
    file = write_parquet(RunPaths(root).parquet(part), [with_outcomes(table, outcomes)])
    commit = Commit(part=part, file=file, groups=groups, step=record, fingerprint=ROW.fingerprint, written_at=2.0)
    put_once(RunPaths(root).commit(part), commit.to_bytes())
    return commit
