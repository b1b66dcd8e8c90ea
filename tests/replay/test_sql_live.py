"""Queries over a run that is being recorded: journals beside commits, every trace once, at any moment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replay_build import turn

from rolltape.record.recorder import Recorder
from rolltape.record.writing.recover import recover
from rolltape.replay import open_run
from rolltape.replay.sql import live
from rolltape.replay.sql.connection import ask
from rolltape.schema import Context, Outcome, Step
from rolltape.schema.paths import RunPaths

COUNTS = "SELECT count(*), count(DISTINCT trace_id), count(*) FILTER (journaled), count(disposition) FROM traces"
"""Traces, different ones, those of a journal, those of which the outcome is known."""


class Recording:
    """A recorder with a run of its own."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.recorder = Recorder.open(root, model="m", taskset="x", **options)

    def add(self, step: int, *ids: str, **fields: Any) -> None:
        """Record traces of a step."""
        for id in ids:
            assert self.recorder.add(turn(id, **fields), Context(step=step))

    def commit(self, step: int, *ids: str) -> None:
        """End a step and wait until it is committed."""
        outcomes = [Outcome(trace_id=id, disposition="emitted") for id in ids]
        assert self.recorder.commit_now("train", step, groups=[], outcomes=outcomes, record=Step()).commit is not None

    def ask(self, query: str = COUNTS, **selection: Any) -> list[tuple[Any, ...]]:
        """An answer over commits and journals."""
        return open_run(self.root).sql(query, **{"live": True, **selection}).fetchall()


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    made = Recording(tmp_path / "run")
    yield made
    made.recorder.close()


def test_rows_of_a_journal_are_read_when_they_are_asked_for(recording: Recording) -> None:
    recording.add(0, "a", "b")
    assert recording.ask() == [(2, 2, 2, 0)]
    assert recording.ask(live=False) == [(0, 0, 0, 0)]
    recording.commit(0, "a", "b")
    recording.add(1, "c")
    assert recording.ask() == [(3, 3, 1, 2)]
    rows = (
        "SELECT trace_id, step, attempt, writer, superseded, reward, len(token_ids), journaled FROM traces ORDER BY 1"
    )
    assert recording.ask(rows) == [
        ("a", 0, 0, "main", False, 1.0, 6, False),
        ("b", 0, 0, "main", False, 1.0, 6, False),
        ("c", 1, 0, "main", False, 1.0, 6, True),
    ]
    assert recording.ask("SELECT step, count(*) FROM nodes GROUP BY 1 ORDER BY 1") == [(0, 4), (1, 2)]
    assert recording.ask("SELECT trace_id, value FROM rewards ORDER BY 1") == [("a", 1.0), ("b", 1.0), ("c", 1.0)]


def test_a_trace_that_was_recorded_again_counts_as_it_was_last(recording: Recording) -> None:
    """Its group's scores came in."""
    recording.add(0, "a", reward=0.0)
    recording.add(0, "a", reward=0.75)
    assert recording.ask("SELECT trace_id, reward FROM traces") == [("a", 0.75)]


def test_what_is_left_out_is_said(recording: Recording) -> None:
    recording.add(0, "a")
    [note] = ask(open_run(recording.root), COUNTS).notes
    assert note == "run: what its journals hold is left out, for it is not committed yet; --live reads it too."
    assert ask(open_run(recording.root), COUNTS, live=True).notes == []
    recording.commit(0, "a")
    assert ask(open_run(recording.root), COUNTS).notes == []


def test_evaluations_at_work_are_found_by_their_split(recording: Recording) -> None:
    recording.add(0, "a")
    recording.recorder.add(turn("e"), Context(split="eval", eval_name="golf", step=0))
    query = "SELECT split, eval_name, trace_id FROM traces ORDER BY trace_id"
    assert recording.ask(query) == [("train", None, "a")]
    assert recording.ask(query, split="eval-golf") == [("eval", "golf", "e")]
    assert recording.ask(query, split=None) == [("train", None, "a"), ("eval", "golf", "e")]


def test_a_step_that_is_committed_while_a_query_is_asked_counts_once(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading the journal and reading the commits, and the journal emptied by then."""
    recording.add(0, "a", "b")
    reopen = live.open_run

    def later(path: Any) -> Any:
        recording.commit(0, "a", "b")
        return reopen(path)

    monkeypatch.setattr(live, "open_run", later)
    assert recording.ask() == [(2, 2, 0, 2)]


def test_no_trace_is_missed_or_counted_twice_while_steps_are_recorded(recording: Recording) -> None:
    known: list[str] = []
    ended = threading.Event()
    seen: list[tuple[int, tuple[Any, ...]]] = []

    def work() -> None:
        try:
            for step in range(6):
                ids = [f"{step}-{i}" for i in range(5)]
                for id in ids:
                    recording.add(step, id)
                    known.append(id)
                recording.commit(step, *ids)
        finally:
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not ended.is_set():
        before = len(known)
        seen.append((before, recording.ask()[0]))
    thread.join()
    assert recording.ask() == [(30, 30, 0, 30)]
    assert len(seen) > 1
    for before, (traces, different, _, _) in seen:
        assert traces == different >= before


def test_an_unfinished_last_frame_is_no_fault_and_damage_is_named(
    recording: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    recording.add(0, "a", "b", "c")
    recording.recorder.close()
    journal = RunPaths(recording.root).journal(0, "main")
    data = journal.read_bytes()
    journal.write_bytes(data[:-20])
    assert recording.ask("SELECT trace_id FROM traces ORDER BY 1") == [("a",), ("b",)]
    assert not caplog.records
    journal.write_bytes(data[:100] + b"\xff" + data[101:])
    with caplog.at_level(logging.WARNING):
        assert recording.ask("SELECT trace_id FROM traces ORDER BY 1") == [("b",), ("c",)]
    assert "corruption of" in caplog.text
    [note] = ask(open_run(recording.root), COUNTS, live=True).notes
    assert "0.main.journal: corruption of" in note


def test_the_journal_of_a_dead_writer_is_read_until_it_is_settled(recording: Recording) -> None:
    recording.add(0, "a")
    recording.recorder.close()
    assert recording.ask() == [(1, 1, 1, 0)]
    recover(recording.root)
    assert recording.ask() == [(1, 1, 0, 1)]


def test_a_newer_attempt_hides_what_older_ones_journaled_and_committed(recording: Recording) -> None:
    recording.add(0, "a0")
    recording.commit(0, "a0")
    recording.add(1, "a1")
    recording.commit(1, "a1")
    recording.recorder.close()
    again = Recording(recording.root, resume=True, start_step=1)
    try:
        again.add(1, "b1")
        query = "SELECT trace_id, attempt, superseded, journaled FROM traces ORDER BY trace_id"
        assert again.ask(query) == [("a0", 0, False, False), ("b1", 1, False, True)]
        assert again.ask(query, all_attempts=True) == [
            ("a0", 0, False, False),
            ("a1", 0, True, False),
            ("b1", 1, False, True),
        ]
        assert again.ask(query, attempt=1) == [("b1", 1, False, True)]
    finally:
        again.recorder.close()
