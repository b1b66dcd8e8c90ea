"""What a person reads of a live run."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from rolltape.record.progress import Lines, Quiet, StepNews, Tally, Terminal, TraceNews, for_output, step_line
from rolltape.record.recorder import RecorderStatus


def news(**changes: object) -> TraceNews:
    return TraceNews(**{"tokens": 10, "reward": 1.0, "error": None, **changes})  # type: ignore[arg-type]


def test_a_step_in_one_line_says_why_traces_were_dropped() -> None:
    counts = {"emitted": 12, "error": 3, "incomplete_group": 1, "cancelled": 0}
    step = StepNews("train", 2, 16, 12, 12, 4000, 0.5, 2.0, counts)
    assert step_line(step) == (
        "train step 2: 16 traces, 4,000 tokens (2,000/s), reward 0.500, 12 emitted; 3 error, 1 incomplete_group"
    )


def test_what_is_not_on_disk_stands_in_the_line_of_a_step() -> None:
    step = StepNews("train", 2, 4, 4, 4, 40, 0.5, 2.0, {"emitted": 4}, RecorderStatus(0, 0, 0, None))
    assert step_line(step).endswith("4 emitted")
    told = step_line(replace(step, recording=RecorderStatus(3, 1, 2, "disk full")))
    assert told.endswith("; 3 traces not durable in time, 1 step not on disk, 2 traces lost (disk full)")
    tally = Tally()
    tally.add(news(durable=False))
    assert str(tally).endswith("0 errors, 1 not durable")


def test_tries_that_are_run_again_count_as_retries_and_not_as_traces() -> None:
    tally = Tally()
    for each in (news(reward=None, error="E: x", retried=True), news(), news(reward=0.0)):
        tally.add(each)
    assert (tally.traces, tally.tokens, tally.errors, tally.retries, tally.reward) == (2, 30, 1, 1, 0.5)
    assert "reward so far 0.500, 1 error, 1 retried" in str(tally)


def test_lines_go_to_a_log_and_hold_no_markup() -> None:
    out = io.StringIO()
    lines = Lines(Console(file=out, width=200), seconds=0.0)
    lines.step_started("train", 6, 1, 3, 16)
    lines.trace(news())
    lines.note("[bold]as it is[/bold]")
    lines.close()
    assert "train step 6, 1 of 3: 1/16 traces" in out.getvalue()
    assert "[bold]as it is[/bold]" in out.getvalue()


def test_bars_are_drawn_on_a_terminal_and_end_cleanly() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=120, force_terminal=True))
    terminal.note("so far")
    assert "loading environment and tokenizer" in out.getvalue()
    assert "?" not in out.getvalue().replace("\x1b[?25l", "")
    for number, step in ((1, 6), (2, 7)):
        terminal.step_started("train", step, number, 2, 1)
        terminal.trace(news())
        terminal.step_ended(StepNews("train", step, 1, 1, 1, 10, 1.0, 1.0, {"emitted": 1}))
    terminal.close()
    assert "train step 7, 2 of 2" in out.getvalue()
    assert "train step 7: 1 trace," in out.getvalue()


def test_the_display_suits_the_output() -> None:
    assert isinstance(for_output(quiet=True), Quiet)
    assert isinstance(for_output(), Lines)  # tests have no terminal
