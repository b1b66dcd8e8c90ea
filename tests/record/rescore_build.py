"""Runs to score again, and tasksets to do it by."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from record_build import TRACES, Record

from rolltape.record.recorder import Recorder
from rolltape.record.rescoring.rescore import Rescored
from rolltape.replay.run import open_run
from rolltape.schema import Context, Group, Outcome, Step

GOLF = TRACES / "0.2.0" / "group_rewards.jsonl"
_NUMBERS = itertools.count()

GOLF_TASK = """
import re

import verifiers.v1 as vf


def code(trace):
    found = re.findall(r"```python\\n(.*?)```", trace.last_reply, re.DOTALL)
    return found[-1] if found else ""


def race(places):
    return [float(place == min(places)) for place in places]


class GolfData(vf.TaskData):
    expected: str


class {task}(vf.Task[GolfData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace):
        return trace.metrics["passed"]

    @vf.group_reward(weight={fastest})
    async def fastest(self, traces):
        return race([t.metrics["latency"] for t in traces])

    @vf.group_reward(weight=0.5)
    async def most_concise(self, traces):
        return race([len(code(t)) for t in traces])
"""


def golf(fastest: float = 0.5, task: str = "CodeGolfTask") -> str:
    """The source of a taskset that scores as code-golf-v1 did when `GOLF` was recorded."""
    return GOLF_TASK.replace("{fastest}", str(fastest)).replace("{task}", task)


def taskset(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, task: str, settings: str = "") -> Path:
    """A config file that names a new package with `source` in it and a Taskset of the class `task`.

    The package is importable until the test ends, also by programs that it starts.
    """
    name = f"probe_taskset_{next(_NUMBERS)}"
    package = folder / "packages"
    package.mkdir(exist_ok=True)
    taskset = f"\n\nclass Probes(vf.Taskset[{task}, vf.TasksetConfig]):\n    pass\n\n\n__all__ = ['Probes']\n"
    (package / f"{name}.py").write_text(source + taskset, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(package), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(package))
    config = folder / f"{name}.toml"
    config.write_text(f'[taskset]\nid = "{name}"\n{settings}', encoding="utf-8")
    return config


def record_run(path: Path, steps: Sequence[Sequence[Sequence[Record]]], **group: Any) -> Path:
    """A run of steps of groups of records, each emitted unless it has an error."""
    recorder = Recorder.open(path, model="m", taskset="probes")
    numbers = itertools.count()
    for step, groups in enumerate(steps):
        made = []
        for records in groups:
            index = next(numbers)
            for i, record in enumerate(records):
                recorder.started("train", step)
                recorder.add(record, Context(step=step, group_index=index, rollout_index=i))
            fields = {"expected_size": len(records), **group}
            made.append(Group.from_records(records, group_index=index, step=step, **fields))
        traces = [record for records in groups for record in records]
        outcomes = [Outcome(trace_id=r["id"], disposition="error" if r["errors"] else "emitted") for r in traces]
        recorder.commit_now("train", step, groups=made, outcomes=outcomes, record=Step())
    recorder.close()
    return path


def golf_run(path: Path) -> Path:
    """The recorded code golf: three groups of four."""
    with GOLF.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return record_run(path, [[records[:4], records[4:8], records[8:]]], group_reward_names=("fastest", "most_concise"))


DEMO = TRACES.parent / "runs" / "demo"
"""The recorded demo. Not to be written to."""


def demo_config(folder: Path) -> Path:
    """The environment that the demo was recorded with."""
    config = folder / "demo.toml"
    config.write_text('[taskset]\nid = "rolltape.record.demo"\nseed = 0\n', encoding="utf-8")
    return config


PROBE = """
import asyncio

import verifiers.v1 as vf


class ProbeTask(vf.Task[vf.TaskData]):
"""
OK = """
    @vf.reward(weight=2.0)
    async def ok(self, trace):
        return 1.0
"""
ROLLTAPE = [sys.executable, "-m", "rolltape.replay.cli"]


def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, settings: str = "") -> Path:
    """A config whose task class scores plain task rows by the methods in `body`."""
    return taskset(tmp_path, monkeypatch, PROBE + body, "ProbeTask", settings)


def names(result: Rescored, kind: str = "reward") -> dict[str, dict[str, Any]]:
    assert result.changes is not None
    return {row["name"]: row for row in result.changes.names if row["kind"] == kind}


def rewards(run: Path) -> dict[str, dict[str, float | None]]:
    table = open_run(run).table(columns=["trace_id", "rewards"])
    rows = table.to_pylist(maps_as_pydicts="strict")
    return {row["trace_id"]: row["rewards"] for row in rows}


def totals(run: Path) -> dict[str, float | None]:
    return {row["trace_id"]: row["reward"] for row in open_run(run).table(columns=["trace_id", "reward"]).to_pylist()}


def group_sums(run: Path) -> list[dict[str, float | None]]:
    return [{name: s.sum for name, s in group.rewards.items()} for group in open_run(run).groups()]


SOMETIMES = """
    @vf.metric
    async def length(self, trace):
        return len(trace.last_reply)

    @vf.reward(weight=0.5)
    async def sometimes(self, trace):
        if trace.id == "b":
            raise ValueError("no verdict")
        return 1.0

    @vf.reward(weight=2.0)
    async def ok(self, trace):
        return 1.0
"""


def cells(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
