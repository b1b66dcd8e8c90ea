"""Traces, recorders and runs for the tests of recording."""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.record.recorder import Committed, Recorder
from rolltape.replay.run import Run, open_run
from rolltape.replay.verification.verify import Verification, verify
from rolltape.schema import Context, Group, Outcome, Step, decode
from rolltape.schema.encoding import Row
from rolltape.schema.fields import TRACE

Record = dict[str, Any]

TRACES = Path(__file__).parents[1] / "data" / "traces"
LONG = os.environ.get("ROLLTAPE_LONG_TESTS") == "1"
"""Whether the long variants run: more kills, flips and steps."""


@cache
def _recorded() -> list[tuple[str, Record]]:
    found = []
    for path in sorted(TRACES.glob("*/**/*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                read = json.loads(line)
                place = f"{path.relative_to(TRACES)}:{number}"
                found += [(place, trace) for trace in read.get("traces", [read]) if "nodes" in trace]
    return found


def recorded(release: str = "") -> list[tuple[str, Record]]:
    """(place, record) of every recorded trace, or of one release's."""
    return [(place, copy.deepcopy(r)) for place, r in _recorded() if place.startswith(release)]


def trace(id: str, tokens: int = 3, text: str = "an answer", **fields: Any) -> Record:
    """A trace of one turn with `tokens` sampled tokens."""
    span = {"start": 0.0, "end": 0.0}
    common = {"timestamp": 1.0, "usage": None}
    question = {
        "parent": None,
        "message": {"role": "user", "content": "a question"},
        "sampled": False,
        "token_ids": [1, 2],
        "mask": [False, False],
        "is_content": [True, True],
        "logprobs": [],
        "finish_reason": None,
    }
    reply = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
    answer = {
        "parent": 0,
        "message": reply | {"provider_state": None},
        "sampled": True,
        "token_ids": [(7 * i) % 50_000 for i in range(tokens)],
        "mask": [True] * tokens,
        "is_content": [True] * tokens,
        "logprobs": [-0.5] * tokens,
        "finish_reason": "stop",
    }
    return {
        "id": id,
        "task": {"type": "ProbeTask", "data": {"idx": 0, "name": None, "prompt": "a question"}},
        "runtime": None,
        "nodes": [question | common, answer | common],
        "rewards": {"ok": 1.0},
        "metrics": {},
        "info": {},
        "extra_usage": [],
        "is_completed": True,
        "stop_condition": "agent_completed",
        "errors": [],
        "timing": {"start": 0.0, "setup": span, "generation": span, "finalize": span, "scoring": span},
    } | fields


def lifelike(rng: random.Random, id: str) -> Record:
    """A recorded trace of Verifiers 0.2.0 (tools, forks, errors, unicode …) under another id."""
    found: Record = copy.deepcopy(rng.choice(recorded_of_today()))
    found["id"] = id
    return found


@cache
def recorded_of_today() -> list[Record]:
    """Records of Verifiers 0.2.0, the release that is recorded live."""
    return [r for place, r in recorded("0.2.0") if "written_by" not in place]


def at(step: int = 0, **place: Any) -> Context:
    return Context(step=step, **place)


def emitted(*traces: str) -> list[Outcome]:
    return [Outcome(trace_id=t, disposition="emitted") for t in traces]


def commit(
    recorder: Recorder, step: int, outcomes: Sequence[Outcome], groups: Sequence[Group] = (), **rest: Any
) -> Committed:
    split = rest.pop("split", "train")
    return recorder.commit_now(split, step, groups=groups, outcomes=outcomes, record=Step(), **rest)


def record_step(recorder: Recorder, step: int, names: Iterable[str], **fields: Any) -> Committed:
    """A whole step of small traces, all emitted."""
    names = list(names)
    for i, name in enumerate(names):
        recorder.started("train", step)
        recorder.add(trace(name, **fields), at(step, rollout_index=i))
    return commit(recorder, step, emitted(*names))


def records_of(run: Run | Path) -> dict[str, Record]:
    """Every record of every part of a run, superseded ones too, by trace id. Fails where a trace stands twice."""
    run = run if isinstance(run, Run) else open_run(run)
    found: dict[str, Record] = {}
    for part in run.all_commits:
        for table in run.part_batches(part):
            for record in decode(table.select(TRACE.arrow.names)):
                assert record["id"] not in found, f"trace {record['id']} stands twice"
                found[record["id"]] = record
    return found


def dispositions(run: Run | Path) -> dict[str, str]:
    """What became of every trace of every part."""
    run = run if isinstance(run, Run) else open_run(run)
    columns = ["trace_id", "disposition"]
    tables = [t for part in run.all_commits for t in run.part_batches(part, columns)]
    return {r["trace_id"]: r["disposition"] for t in tables for r in t.to_pylist()}


def counts(run: Run | Path) -> Counter[str]:
    """Counts over every part; what started is accounted for in each."""
    run = run if isinstance(run, Run) else open_run(run)
    total: Counter[str] = Counter()
    for part in run.all_commits:
        said = dict(part.step.counts)
        assert said.pop("started") == sum(said.values()), part.step.counts
        total.update(part.step.counts)
    return total


def checked(path: Path) -> Verification:
    """The verification of a run that must be clean but for tries that were lost."""
    result = verify(open_run(path))
    found = [f"{f.code}: {f}" for f in result.findings if f.code != "lost"]
    assert not found, "\n".join(found)
    return result


def same(a: Any, b: Any) -> bool:
    """Equal, NaN equal to NaN, 1 not equal to 1.0 or True, lone surrogates as they are."""
    return repr(a) == repr(b)


def assert_same_row(found: Row, expected: Row, extra: Any) -> None:
    """Bit for bit. `extra`: what the row's `extra` reads as after it was packed."""
    assert found.values.keys() == expected.values.keys()
    assert all(same(found.values[k], v) for k, v in expected.values.items())
    assert found.nodes.keys() == expected.nodes.keys()
    assert all(same(found.nodes[k], v) for k, v in expected.nodes.items())
    for name in ("ids", "sampled", "content", "logprobs", "known"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, np.ascontiguousarray(b).tobytes()), name
    assert same(found.extra, extra)


def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without fsync, which takes most of the time of a test that writes many small files."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
