"""Long runs: attempts that step back, counts that add up exactly, and memory that stays where it is."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from record_build import LONG, Record, at, checked, counts, emitted, lifelike, record_step, records_of, trace, unsynced

from rolltape.record.recorder import Recorder, StoreOptions
from rolltape.record.writing.recover import recover
from rolltape.replay import open_run
from rolltape.schema import Context, Group, Outcome, Step, encoding
from rolltape.schema.paths import folder_of


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    unsynced(monkeypatch)


# -- attempts


def test_restarts_that_step_back_supersede_and_never_delete(tmp_path: Path) -> None:
    """Attempt 0 records steps 0 to 7; 1 begins at 5, 2 at 3, 3 at 7."""
    recorded = {0: range(8), 1: range(5, 9), 2: range(3, 7), 3: range(7, 10)}
    for attempt, steps in recorded.items():
        recorder = Recorder.open(tmp_path, resume=True, start_step=steps.start)
        assert recorder.attempt == attempt
        for step in steps:
            record_step(recorder, step, [f"{attempt}.{step}.{i}" for i in range(3)])
        recorder.close()
    run = open_run(tmp_path)
    newest = {0: 0, 1: 0, 2: 0, 3: 2, 4: 2, 5: 2, 6: 2, 7: 3, 8: 3, 9: 3}
    assert {c.part.step: c.part.attempt for c in run.commits()} == newest
    assert run.table(columns=["trace_id"]).column(0).to_pylist() == [
        f"{attempt}.{step}.{i}" for step, attempt in newest.items() for i in range(3)
    ]
    for attempt, steps in recorded.items():
        old = run.table(attempt=attempt, columns=["trace_id"]).column(0).to_pylist()
        assert old == [f"{attempt}.{step}.{i}" for step in steps for i in range(3)]
    superseded = {(c.part.attempt, c.part.step) for c in run.all_commits if run.superseded(c.part)}
    everything = {(attempt, step) for attempt, steps in recorded.items() for step in steps}
    assert superseded == everything - {(attempt, step) for step, attempt in newest.items()}
    assert len(records_of(run)) == 3 * len(everything)
    assert counts(run) == {"started": 57, "emitted": 57, "lost": 0}
    assert checked(tmp_path).counts == {"started": 30, "emitted": 30, "lost": 0}


def test_an_attempt_that_recorded_nothing_yet_takes_back_what_it_will_record(tmp_path: Path) -> None:
    first = Recorder.open(tmp_path)
    for step in range(4):
        record_step(first, step, [f"old{step}"])
    first.close()
    second = Recorder.open(tmp_path, resume=True, start_step=2)
    assert {c.part.step for c in open_run(tmp_path).commits()} == {0, 1}
    second.close()


def test_an_attempt_whose_file_is_damaged_still_supersedes_from_its_first_step_on(tmp_path: Path) -> None:
    first = Recorder.open(tmp_path)
    for step in range(4):
        record_step(first, step, [f"old{step}"])
    first.close()
    second = Recorder.open(tmp_path, resume=True, start_step=2)
    record_step(second, 2, ["new2"])
    second.close()
    path = tmp_path / "attempts" / "1.json"
    path.write_bytes(path.read_bytes().replace(b'"start_step": 2', b'"start_step": 9'))
    run = open_run(tmp_path)
    assert run.table(columns=["trace_id"]).column(0).to_pylist() == ["old0", "old1", "new2"]


# -- a soak


@dataclass
class Ledger:
    """What a test knows to have done, by part: the truth that the recorder's counts are held against."""

    rng: random.Random
    parts: dict[tuple[str, int, int], Counter[str]] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def step(self, recorder: Recorder, split: str, step: int, *, end: bool = True) -> None:
        """Record a step of four groups of four: errors, retries, cancelled and lost tries, group rewards, filters."""
        said: Counter[str] = Counter()
        outcomes: list[Outcome] = []
        groups: list[Group] = []
        for index in range(4 * step, 4 * step + 4):
            last = [self._rollout(recorder, split, step, index, i, said, outcomes) for i in range(4)]
            whole = [r for r in last if r is not None]
            fate = "incomplete_group"
            if len(whole) == 4:
                fate = self.rng.choice(["emitted"] * 7 + ["filtered", "leftover", "failed_check"])
                if self.rng.random() < 0.4:
                    self._score(recorder, split, step, index, whole)
                if index % 2 == 0 and split == "train":
                    groups.append(Group.from_records(whole, group_index=index, expected_size=4, split=split, step=step))
            outcomes += [Outcome(trace_id=r["id"], disposition="eval" if split == "eval" else fate) for r in whole]
        said.update(o.disposition if end else "interrupted" for o in outcomes)
        said["lost"] = said["started"] - len(outcomes)
        self.parts[folder_of(split, None), step, recorder.attempt] = said
        if end:
            done = recorder.commit_now(split, step, groups=groups, outcomes=outcomes, record=Step(cursor=step))
            assert done.error is None
            assert +Counter(done.step.counts) == +said

    def _rollout(
        self,
        recorder: Recorder,
        split: str,
        step: int,
        group: int,
        rollout: int,
        said: Counter[str],
        outcomes: list[Outcome],
    ) -> Record | None:
        """The last record of a rollout that ended well."""
        for number in range(3):
            recorder.started(split, step)
            said["started"] += 1
            what = self.rng.choices(["lost", "cancelled", "error", "well"], [2, 2, 5, 91])[0]
            if what == "lost":
                return None
            name = f"t{next(self.names):06}"
            record = lifelike(self.rng, name) if group % 2 else trace(name, tokens=self.rng.randrange(1, 400))
            if what == "error":
                record["errors"] = [{"type": "ProviderError", "message": "503", "traceback": None}]
            place = Context(split=split, step=step, group_index=group, rollout_index=rollout, try_number=number)
            assert recorder.add(record, place)
            if what == "well":
                return record
            if what == "cancelled":
                outcomes.append(Outcome(trace_id=name, disposition="cancelled"))
                return None
            outcomes.append(Outcome(trace_id=name, disposition="retried" if number < 2 else "error"))
        return None

    def _score(self, recorder: Recorder, split: str, step: int, group: int, whole: list[Record]) -> None:
        """Record a group again with its group rewards."""
        for i, record in enumerate(whole):
            record["rewards"] = {**record["rewards"], "fastest": float(i == 0)}
            recorder.add(record, Context(split=split, step=step, group_index=group, rollout_index=i))


@pytest.mark.timeout(3600 if LONG else 180)
def test_counts_are_exact_in_every_step_and_memory_stays_flat_over_a_long_run(tmp_path: Path) -> None:
    steps, restarts = (200, {60: 5, 110: 3, 150: 7}) if LONG else (45, {22: 5, 30: 3, 38: 7})
    ledger = Ledger(random.Random(7))
    options = StoreOptions(fsync="never", keep_bytes=100_000)
    recorder = Recorder.open(tmp_path, store=options)
    memory: list[int] = []
    journals: list[int] = []
    step = 0
    while step < steps:
        if step in restarts:
            ledger.step(recorder, "train", step, end=False)
            recorder.close()
            step -= restarts.pop(step)
            recorder = Recorder.open(tmp_path, resume=True, start_step=step, store=options)
            assert len(recorder.recovered.committed) == 1
        ledger.step(recorder, "train", step)
        if step % 10 == 0:
            ledger.step(recorder, "eval", step)
        journals.append(sum(f.stat().st_size for f in recorder.paths.journals.glob("*")))
        step += 1
        if step == 20 and not tracemalloc.is_tracing():
            tracemalloc.start()
        if step > 20:
            gc.collect()
            memory.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert recorder.close().lost == 0
    assert max(memory[2:]) - memory[1] < 1_500_000
    assert max(journals) == 0, "the journal is emptied after each step"
    run = open_run(tmp_path)
    assert run.attempts.keys() == {0, 1, 2, 3}
    found = {(c.part.split, c.part.step, c.part.attempt): +Counter(c.step.counts) for c in run.all_commits}
    assert found == {key: +said for key, said in ledger.parts.items()}
    total = counts(run)
    assert +total == sum(ledger.parts.values(), Counter())
    assert total["started"] == sum(n for name, n in total.items() if name != "started")
    assert total["interrupted"] > 0
    assert total["started"] - total["lost"] == len(records_of(run))
    checked(tmp_path)
    assert not recover(tmp_path).anything


# -- memory and the event loop


def test_a_step_is_written_with_few_of_its_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltape.record.writing import parts

    monkeypatch.setattr(parts, "CHUNK_BYTES", 40_000)
    recorder = Recorder.open(tmp_path / "run", store=StoreOptions(keep_bytes=0))
    names = [f"{i:03}" for i in range(200)]
    for i, name in enumerate(names):
        recorder.add(trace(name, tokens=1000), at(0, rollout_index=i))
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0
    real = recorder._store.row

    def row(entry: Any) -> Any:
        nonlocal most
        found = _Counted(real(entry))
        alive.add(found)
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(recorder._store, "row", row)
    done = recorder.commit_now("train", 0, groups=[], outcomes=emitted(*names), record=Step())
    assert done.commit is not None
    recorder.close()
    assert most <= 12
    assert len(records_of(tmp_path / "run")) == 200


class _Counted:
    """A row that can be counted."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)


def test_large_traces_are_taken_apart_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltape.record import recorder as module

    threads: list[threading.Thread] = []

    def row_of(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return encoding.row_of(*args)

    monkeypatch.setattr(module, "row_of", row_of)
    recorder = Recorder.open(tmp_path / "run")

    async def go() -> None:
        records = [trace(f"t{i}", tokens=8000) for i in range(16)]
        assert all(await asyncio.gather(*(recorder.trace(r, at(0)) for r in records)))

    asyncio.run(go())
    recorder.close()
    assert len(threads) == 16
    assert threading.main_thread() not in threads


MEMORY = """
import gc, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from record_build import at, commit, emitted, trace
from rolltape.record.recorder import Recorder
from rolltape.record.recorder import StoreOptions

root, traces, tokens = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = np.random.default_rng(0)
words = ["".join(w) for w in rng.choice(list("etaoinshrdlu"), (5000, 6))]

def record(i):
    made = trace(f"t{i:05}", tokens, text=" ".join(rng.choice(words, tokens * 2 // 3)))
    made["nodes"][1]["token_ids"] = rng.zipf(1.2, tokens).clip(0, 150_000).tolist()
    made["nodes"][1]["logprobs"] = (-rng.gamma(0.25, 1.2, tokens)).astype("f4").tolist()
    return made

def resident(what):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(what))

warm = Recorder.open(root / "warm")
warm.add(record(0), at(0))
commit(warm, 0, emitted("t00000"))
warm.close()
gc.collect()
before = resident("VmRSS")
recorder = Recorder.open(root / "run", store=StoreOptions(fsync="never"))
for i in range(traces):
    recorder.add(record(i), at(0, group_index=i // 16, rollout_index=i % 16))
gc.collect()
journaled = next((root / "run" / "journal").glob("*.journal")).stat().st_size
recorded = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
commit(recorder, 0, emitted(*(f"t{i:05}" for i in range(traces))))
print(json.dumps({"journaled": journaled, "recorded": recorded - before, "peak": resident("VmHWM") - before}))
"""


@pytest.mark.skipif(not LONG, reason="records 10 million tokens")
def test_a_large_step_commits_in_less_memory_than_its_journal_takes(tmp_path: Path) -> None:
    words = [sys.executable, "-c", MEMORY, str(Path(__file__).parent), str(tmp_path), "512", "20000"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    print({name: f"{size / 2**20:.0f} MiB" for name, size in found.items()})
    assert found["peak"] < 1.3 * found["journaled"]
