"""A long run on disk, made quickly: the rollouts of a few steps, encoded once, are written as many steps.

Every step is a file and a commit as a recorder leaves them, with steps, groups and trace ids of its own, rewards that rise, a
reward that only later steps have, token columns and text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rollouts import Record, Shape, make_records

from rolltape.schema import ROW, Context, Group, Outcome, Step, encode, with_outcomes, write_parquet
from rolltape.schema.commits import Commit
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import Part, RunPaths

CHUNK = 64
"""Rows of a row group: about what the recorder puts into one."""


@dataclass
class LongRun:
    """`steps` steps of `traces` rollouts each."""

    shape: Shape
    steps: int
    traces: int
    distinct: int = 2
    """Different sets of rollouts."""
    records: list[list[Record]] = field(init=False)

    def __post_init__(self) -> None:
        groups = self.traces // self.shape.rollouts
        self.records = [make_records(self.shape, groups, seed=seed) for seed in range(self.distinct)]

    def rewards(self, step: int, index: int) -> dict[str, float | None]:
        """The rewards of one rollout: `correct` rises over the run, `brevity` is null for some and comes in halfway."""
        chance = np.random.default_rng([step, index])
        rewards: dict[str, float | None] = {
            "correct": float(chance.random() < 0.2 + 0.6 * step / self.steps),
            "format": 0.1,
        }
        if 2 * step >= self.steps:
            rewards["brevity"] = None if index % 7 == 0 else float(chance.random())
        return rewards

    def trace_id(self, step: int, index: int) -> str:
        """The id of one rollout."""
        return f"{step:016x}{index:016x}"

    def write(self, root: Path) -> int:
        """Write the run; returns the bytes of its Parquet files."""
        info = {"run": "long", "schema": "1.0", "model": "m", "tokenizer": "m", "taskset": "x", "created_at": 0.0}
        put_once(RunPaths(root).run, json.dumps(info).encode())
        attempt = {"attempt": 0, "start_step": 0, "settings": {}, "versions": {}, "started_at": 1.0}
        put_once(RunPaths(root).attempt(0), json.dumps(attempt).encode())
        tables = [self._table(records) for records in self.records]
        return sum(self._write_step(RunPaths(root), step, tables[step % self.distinct]) for step in range(self.steps))

    def _table(self, records: list[Record]) -> pa.Table:
        size = self.shape.rollouts
        contexts = [Context(run="long", group_index=i // size, rollout_index=i % size) for i in range(len(records))]
        return with_outcomes(
            encode(records, contexts), [Outcome(trace_id=r["id"], disposition="emitted") for r in records]
        )

    def _write_step(self, paths: RunPaths, step: int, table: pa.Table) -> int:
        size, count = self.shape.rollouts, self.traces // self.shape.rollouts
        ids = [self.trace_id(step, i) for i in range(self.traces)]
        rewards = [self.rewards(step, i) for i in range(self.traces)]
        for name, values in {
            "step": [step] * self.traces,
            "trace_id": ids,
            "group_index": [step * count + i // size for i in range(self.traces)],
            "reward": [sum(v for v in r.values() if v is not None) for r in rewards],
            "rewards": [list(r.items()) for r in rewards],
        }.items():
            column = pa.array(values, ROW.by_name[name].arrow_type)
            table = table.set_column(table.schema.get_field_index(name), ROW.arrow.field(name), column)
        part = Part("train", step, 0, "main")
        file = write_parquet(paths.parquet(part), [table.slice(i, CHUNK) for i in range(0, self.traces, CHUNK)])
        groups = [
            Group.from_records(
                [{"id": ids[i], "rewards": rewards[i]} for i in range(g * size, (g + 1) * size)],
                group_index=step * count + g,
                expected_size=size,
                step=step,
                first_sample_index=step * self.traces + g * size,
            )
            for g in range(count)
        ]
        batch = tuple(range(step * self.traces, (step + 1) * self.traces))
        record = Step(step=step, batch=batch, counts={"started": self.traces, "emitted": self.traces, "lost": 0})
        commit = Commit(part=part, file=file, groups=groups, step=record, fingerprint=ROW.fingerprint, written_at=1.0)
        put_once(paths.commit(part), commit.to_bytes())
        return file.bytes

    def write_jsonl(self, path: Path, steps: int) -> int:
        """Write the first steps as one file of traces as Verifiers writes them, the step beside them; returns its bytes."""
        with path.open("w", encoding="utf-8") as file:
            for step in range(steps):
                file.writelines(self._lines(step))
        return path.stat().st_size

    def _lines(self, step: int) -> Iterator[str]:
        for i, record in enumerate(self.records[step % self.distinct]):
            said: dict[str, Any] = {**record, "id": self.trace_id(step, i), "rewards": self.rewards(step, i)}
            yield json.dumps({"step": step, **said}, separators=(",", ":"), ensure_ascii=False) + "\n"
