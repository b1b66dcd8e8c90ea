"""How a live run records: its options, signals, several writers, what a killed one leaves, what cannot be written."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rolltape.record.cli import record, summary_text
from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine, Fault, Faults, write_tokenizer
from rolltape.record.engine.faults import Switch
from rolltape.record.live import LiveOptions, LiveSummary, run_live
from rolltape.record.progress import Quiet, StepNews, TraceNews
from rolltape.record.recorder import Recorder, StoreOptions
from rolltape.record.transport import SGLangTransport
from rolltape.record.writing.recover import recover
from rolltape.record.writing.resume import LANE, first_index
from rolltape.replay.run import Run, open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema.errors import BadInput

DEMO = '[taskset]\nid = "rolltape.record.demo"\n'

STUBBORN = """
import asyncio
import verifiers.v1 as vf
from rolltape.record.inprocess import InProcessHarness

class Asked(vf.Task):
    async def finalize(self, trace) -> None:
        if self.data.idx % 2:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await asyncio.sleep(600)

    @vf.reward
    async def there(self, trace) -> float:
        return 1.0

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=i, prompt="?"), self.config.task) for i in range(4)]

class Plain(InProcessHarness):
    pass

__all__ = ["Asks", "Plain"]
"""

app = typer.Typer(add_completion=False)
app.command()(record)


@dataclass
class Heard(Quiet):
    """A display that remembers, and calls `on_trace` with the number of traces so far."""

    on_trace: Callable[[int], None] = lambda _: None
    notes: list[str] = field(default_factory=list)
    steps: list[StepNews] = field(default_factory=list)
    traces: int = 0

    def note(self, message: str) -> None:
        self.notes.append(message)

    def trace(self, news: TraceNews) -> None:  # noqa: ARG002
        self.traces += 1
        self.on_trace(self.traces)

    def step_ended(self, news: StepNews) -> None:
        self.steps.append(news)


@dataclass
class Place:
    """An engine, an environment, and the folder of a run."""

    engine: DemoEngine
    folder: Path
    tokenizer: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def slow(self, seconds: float) -> None:
        self.engine.faults = Faults({Fault.LATENCY: Switch(1.0)}, latency=seconds)

    def environment(self, source: str = DEMO) -> Path:
        path = self.folder / "env.toml"
        path.write_text(source)
        return path

    def options(self, **changes: Any) -> LiveOptions:
        given = {"config": self.environment(), "run": self.run, "engine": self.engine.url, "model": "demo"}
        given |= {"tokenizer": str(self.tokenizer), "renderer": "qwen3", "enable_thinking": False, "max_response": 256}
        return LiveOptions(**{**given, "renderer_pool": 1, **changes})

    def live(self, heard: Heard | None = None, **changes: Any) -> LiveSummary:
        return asyncio.run(run_live(self.options(**changes), progress=heard or Heard()))

    def arguments(self, *more: str, config: Path | None = None) -> list[str]:
        given = [str(config or self.environment()), "--run", str(self.run), "--engine", self.engine.url]
        given += ["--model", "demo", "--tokenizer", str(self.tokenizer), "--renderer", "qwen3", "--no-thinking"]
        return [*given, "--max-response", "256", "--renderer-pool", "1", *more]

    def start(self, *more: str, config: Path | None = None) -> subprocess.Popen[str]:
        """`rolltape record` as a process of its own."""
        command = [sys.executable, "-m", "rolltape.record.cli", *self.arguments(*more, config=config)]
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def journaled(self) -> int:
        """Bytes in journals."""
        return sum(file.stat().st_size for file in (self.run / "journal").glob("*.journal"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def place(tmp_path: Path, tokenizer: Path) -> Iterator[Place]:
    with DemoEngine(tokenizer_dir=tokenizer, policy=DemoPolicy()).serve_in_thread() as engine:
        yield Place(engine, tmp_path, tokenizer)


def until(condition: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = 90.0) -> None:
    """Wait for a condition; fails where the process ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def clean(path: Path) -> Run:
    """The run at `path`, which verifies without a finding."""
    run = open_run(path)
    assert [str(finding) for finding in verify(run).findings] == []
    return run


def total(run: Run) -> dict[str, int]:
    counts: dict[str, int] = {}
    for step in run.steps():
        for name, count in step.counts.items():
            counts[name] = counts.get(name, 0) + count
    return {name: count for name, count in counts.items() if count}


# Options


def test_the_options_of_the_recorder_are_those_of_the_run_and_default_to_its_own(place: Place) -> None:
    assert place.options().store() == StoreOptions()
    changed = place.options(
        journal=False, fsync="never", fsync_seconds=9, ack_seconds=0.5, commit_seconds=3, queue_bytes=7
    )
    assert changed.store() == StoreOptions(False, "never", 9, ack_seconds=0.5, commit_seconds=3, queue_bytes=7)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fsync": "sometimes"}, "fsync is 'sometimes'; expected always, interval or never"),
        ({"writer": "a/b"}, "writer 'a/b'"),
        ({"ack_seconds": -1.0}, "ack_seconds is -1.0"),
        ({"queue_bytes": 0}, "queue_bytes is 0"),
        ({"mask": ("(",)}, "'(' is no regular expression"),
    ],
)
def test_an_option_no_recorder_can_have_is_refused(place: Place, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        place.options(**changes)
    assert says in str(caught.value)


def test_what_is_given_on_the_command_line_reaches_the_recorder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    real = Recorder.open

    def opened(*arguments: Any, **options: Any) -> Recorder:
        seen.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(Recorder, "open", opened)
    given = [
        "--writer",
        "b",
        "--fsync",
        "always",
        "--ack-seconds",
        "2",
        "--queue-bytes",
        "1000000",
        "--commit-seconds",
        "9",
    ]
    given += ["--mask", "plum", "--mask", "pe.r", "--strict", "--groups", "1", "--rollouts", "2", "--quiet"]
    result = CliRunner().invoke(app, place.arguments(*given))
    assert result.exit_code == 0, result.output
    (options,) = seen
    assert (options["writer"], options["strict"]) == ("b", True)
    assert options["store"] == StoreOptions(fsync="always", ack_seconds=2, queue_bytes=1_000_000, commit_seconds=9)
    assert options["secrets"].patterns == ("plum", "pe.r")
    settings = clean(place.run).attempts[0].settings
    assert (settings["writer"], settings["mask"]) == ("b", ["***", "***"])


def test_without_a_journal_steps_are_recorded_all_the_same(place: Place) -> None:
    summary = place.live(journal=False)
    assert (summary.exit_code, summary.recording and summary.recording.not_durable) == (0, 0)
    assert total(clean(place.run))["emitted"] == 16


def test_strict_ends_at_a_full_journal_and_still_writes_the_step(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rolltape.record.writing.journal.Journal.append", full)
    heard = Heard()
    summary = place.live(heard, strict=True)
    assert (summary.stopped, summary.exit_code, len(summary.steps)) == ("strict", 1, 1)
    assert all(
        re.fullmatch(r"Trace \w{32}: a trace of step 0 is not in the journal: .*No space .*", n) for n in heard.notes
    )
    assert "Traceback" not in caplog.text
    counts = total(clean(place.run))
    assert counts["started"] == 16 == sum(counts.values()) - counts["started"]


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_in_order_with_what_had_ended(place: Place, number: signal.Signals, code: int) -> None:
    place.slow(0.1)
    heard = Heard(on_trace=lambda traces: os.kill(os.getpid(), number) if traces == 6 else None)
    summary = place.live(heard, steps=50, concurrency=7)
    assert summary.exit_code == code
    run = clean(place.run)
    counts = total(run)
    assert counts.pop("started") == sum(counts.values())
    assert counts["cancelled"] >= 1
    assert counts.keys() <= {"emitted", "error", "cancelled", "incomplete_group"}
    rows = run.table(columns=["disposition", "reason"]).to_pylist()
    cut = [row["reason"] for row in rows if row["disposition"] == "incomplete_group"]
    assert set(cut) <= {"the run was stopped before its group had ended"}
    assert list((place.run / "journal").iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_second_signal_aborts_and_what_had_ended_is_recovered(
    place: Place, number: signal.Signals, code: int
) -> None:
    (place.folder / "stubborn.py").write_text(STUBBORN)
    config = place.environment('[taskset]\nid = "stubborn"\n')
    process = place.start("--steps", "3", "--rollouts", "2", "--quiet", config=config)
    until(lambda: place.engine.requests["/generate"] >= 8, process)
    size = -1
    while place.journaled() != size:  # until what can end has ended
        size = place.journaled()
        time.sleep(0.5)
    process.send_signal(number)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (out, err)
    recover(place.run)
    counts = total(open_run(place.run))
    assert counts["interrupted"] >= 4
    assert not verify(open_run(place.run)).errors


def test_a_second_signal_while_connections_are_closed_changes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def close(self: SGLangTransport) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await real(self)

    real = SGLangTransport.close
    monkeypatch.setattr(SGLangTransport, "close", close)
    heard = Heard(on_trace=lambda traces: os.kill(os.getpid(), signal.SIGINT) if traces == 2 else None)
    summary = place.live(heard, steps=50, concurrency=2)
    gc.collect()
    assert (summary.exit_code, len(summary.steps)) == (130, 1)
    assert "Unclosed" not in caplog.text
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_signal_after_the_run_costs_no_summary(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio.BaseEventLoop, "shutdown_asyncgens", interrupted)
    result = CliRunner().invoke(app, place.arguments("--steps", "1", "--groups", "1", "--quiet"))
    assert (result.exit_code, "The run is in" in result.output) == (0, True)


# Several writers


def test_two_processes_record_into_one_folder_at_once(place: Place) -> None:
    place.slow(0.5)
    writers = {name: place.start("--resume", "--writer", name, "--steps", "3", "--json") for name in ("a", "b")}
    until(lambda: len(list((place.run / "journal").glob("*.journal"))) == 2, writers["a"])
    place.slow(0.0)
    said = {name: process.communicate(timeout=120) for name, process in writers.items()}
    assert {name: process.returncode for name, process in writers.items()} == {"a": 0, "b": 0}, said
    run = clean(place.run)
    assert [(c.part.step, c.part.attempt, c.part.writer) for c in run.commits()] == [
        (step, 0, writer) for step in range(3) for writer in ("a", "b")
    ]
    for name, lane in (("a", first_index("a")), ("b", first_index("b"))):
        mine = [commit for commit in run.commits() if commit.part.writer == name]
        assert [g.group_index for c in mine for g in c.groups] == list(range(lane, lane + 12))
        assert [i for c in mine for i in c.step.batch or ()] == list(range(lane, lane + 44))
        assert [c.step.cursor for c in mine] == [4, 8, 12]
        assert json.loads(said[name][0])["counts"]["started"] == 48

    # Each goes on behind everything, in its own lane and at its own place; a third after everybody's place.
    assert place.live(resume=True, writer="b", groups=2).exit_code == 0
    assert place.live(resume=True, writer="c", groups=2).exit_code == 0
    later = [commit for commit in clean(place.run).commits() if commit.part.step > 2]
    assert [(c.part.step, c.part.attempt, c.part.writer, c.step.cursor) for c in later] == [
        (3, 1, "b", 14),
        (4, 2, "c", 16),
    ]
    assert later[0].groups[0].group_index == first_index("b") + 12
    assert later[1].groups[0].group_index == first_index("c")


def test_a_second_writer_of_one_name_is_refused(place: Place) -> None:
    with_name = Recorder.open(
        place.run, model="demo", tokenizer=str(place.tokenizer), taskset="rolltape.record.demo", writer="b"
    )
    try:
        result = CliRunner().invoke(app, place.arguments("--resume", "--writer", "b"))
    finally:
        with_name.close()
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"Error: writer 'b' records into {place.run} at this moment; give this one another name"
    )


def test_the_lanes_of_writers_lie_apart() -> None:
    names = ["main", *"abcdefgh", "eval", "node-1", "node-2", "10.0.0.1"]
    firsts = [first_index(name) for name in names]
    assert firsts[0] == 0
    assert len(set(firsts)) == len(names)
    assert all(first % LANE == 0 and first < 2**53 for first in firsts)


def test_writers_that_would_number_alike_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.live(groups=1, writer="a")
    monkeypatch.setattr("rolltape.record.writing.resume.LANES", 2)
    with pytest.raises(BadInput, match="'a' and 'b' would number their groups alike"):
        place.live(groups=1, writer="b", resume=True)


# What is left behind, and what cannot be written


def test_a_killed_run_is_continued_after_what_it_left(place: Place) -> None:
    place.live(groups=2)
    place.slow(0.2)
    process = place.start("--resume", "--groups", "2", "--steps", "9", "--concurrency", "3", "--quiet")
    until(lambda: place.journaled() > 4000, process)
    process.kill()
    process.communicate()
    place.slow(0.0)
    heard = Heard()
    summary = place.live(heard, groups=2, resume=True)
    assert summary.exit_code == 0
    (note,) = heard.notes
    assert note.startswith("An earlier recording had not ended well: ")
    assert "journaled traces are committed now" in note
    run = open_run(place.run)
    assert not verify(run).errors
    steps = run.steps()
    assert [(s.step, s.attempt, s.cursor) for s in steps] == [(0, 0, 2), (1, 1, None), (2, 2, 4)]
    groups = [set(run.table(steps=step, columns=["group_index"]).column(0).to_pylist()) for step in range(3)]
    assert groups[1]
    assert not groups[1] & groups[2]
    assert set(run.table(steps=2, columns=["task_idx"]).column(0).to_pylist()) == {2, 3}


def test_a_step_that_cannot_be_written_is_told_everywhere_and_recovered_later(place: Place) -> None:
    def block(_: int) -> None:
        if not (place.run / "traces").exists():
            (place.run / "traces").write_text("in the way")

    heard = Heard(on_trace=block)
    summary = place.live(heard, commit_seconds=2.0)
    assert summary.exit_code == 1
    assert summary.recording is not None
    assert (summary.recording.pending_steps, summary.recording.lost) == (1, 0)
    assert "not on disk" in ((heard.steps[0].recording and heard.steps[0].recording.error) or "")
    assert summary.to_dict()["recording"]["pending_steps"] == 1
    assert f"1 step not on disk ({summary.recording.error}); `rolltape recover {place.run}`" in summary_text(summary)
    (place.run / "traces").unlink()
    recover(place.run)
    assert total(clean(place.run))["emitted"] == 16
