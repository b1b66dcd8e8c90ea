"""Traces that `rolltape show` lists: chosen by task, outcome, error or a condition, sorted, the first few."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_build import TRACES, put_run, put_step, turn

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of five traces each, with one of every kind."""
    put_run(tmp_path)
    for step in range(3):
        records = [
            turn(id=f"a{step}", idx=0, reward=0.25 * step, data={"name": "easy"}),
            turn(id=f"b{step}", idx=1, reward=1.0, data={"name": "hard"}),
            turn(id=f"c{step}", idx=2, reward=None, errors=["TaskError: torn"], data={"name": "easy"}),
            turn(id=f"d{step}", idx=3, reward=float("nan"), data={"name": "7"}),
            turn(id=f"e{step}", idx=7, reward=-1.0),
        ]
        put_step(tmp_path, step, records, fates={f"e{step}": "filtered"}, first=10 * step)
    return tmp_path


def chosen(rolltape: Cli, run: Path, *words: str) -> list[str]:
    code, out, err = rolltape("show", run, *words, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["of"] in (5, 15)
    return [trace["trace_id"] for trace in found["traces"]]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ((), "a2 b2 c2 d2 e2"),
        (("--task", "easy"), "a0 c0 a1 c1 a2 c2"),
        (("--task", "7", "--step", "1"), "d1 e1"),
        (("--task", "hard", "--task", "3", "--step", "0"), "b0 d0"),
        (("--errors",), "c0 c1 c2"),
        (("--outcome", "filtered"), "e0 e1 e2"),
        (("--outcome", "failed check", "--outcome", "ERROR", "--step", "2"), "c2 d2"),
        (("--outcome", "dropped", "--step", "0"), "c0 d0 e0"),
        (("--where", "reward >= 0.5 AND NOT isnan(reward)"), "b0 b1 a2 b2"),
        (("--where", "step = 1 -- and a comment", "--task", "hard"), "b1"),
        (("--where", "1 = 1 OR 2 = 2", "--task", "hard", "--step", "0"), "b0"),
        (("--sort", "reward"), "e2 a2 b2 c2 d2"),
        (("--sort", "-reward"), "b2 a2 e2 c2 d2"),
        (("--sort", "reward", "--limit", "2"), "e2 a2"),
        (("--outcome", "emitted", "--sort", "-reward", "--limit", "4"), "b0 b1 b2 a2"),
    ],
)
def test_traces_are_chosen_sorted_and_the_first_few_listed(
    run: Path, rolltape: Cli, words: tuple[str, ...], ids: str
) -> None:
    assert chosen(rolltape, run, *words) == ids.split()


def test_the_head_says_what_was_asked_and_how_many_there_are(run: Path, rolltape: Cli) -> None:
    _, out, _ = rolltape("show", run, "--task", "easy", "--errors", "--limit", "2")
    head, _, columns, _, *lines = out.splitlines()
    assert head == f"{run}  train steps 0–2: 3 of 15 traces (task easy, with an error); the first 2"
    assert columns.split() == ["trace", "step", "group", "task", "reward", "turns", "sampled", "ended", "became"]
    assert [line.split()[:2] for line in lines[:2]] == [["c0", "0"], ["c1", "1"]]
    _, out, _ = rolltape("show", run, "--task", "no such")
    assert out == f"{run}  train steps 0–2: 0 of 15 traces (task no such)\n\n"
    _, out, _ = rolltape("show", run, "--step", "0", "--limit", "1")
    assert out.startswith(f"{run}  train step 0: 5 traces; the first 1\n")


def test_of_an_import_errors_are_found_though_outcomes_are_not_known(tmp_path: Path, rolltape: Cli) -> None:
    rolltape("import", TRACES / "0.2.0" / "errors.jsonl", "--run", tmp_path / "run")
    found = json.loads(rolltape("show", tmp_path / "run", "--errors", "--json")[1])
    assert (found["found"], found["of"]) == (11, 15)
    assert json.loads(rolltape("show", tmp_path / "run", "--outcome", "error", "--json")[1])["found"] == 0
    _, out, _ = rolltape("show", tmp_path / "run", "--outcome", "error")
    assert (
        "no outcome is known of 15 of these 15 traces: they were imported, or their step did not end; --errors" in out
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--outcome", "lost"], "--outcome 'lost': expected one of emitted, "),
        (["--sort", "name"], "--sort 'name': expected reward, turns, sampled, tokens"),
        (["--where", " "], "--where is empty"),
        (["--where", "nope < 1"], 'Referenced column "nope" not found'),
        (["--where", "task_name::INTEGER = 1"], "Could not convert string 'easy' to INT32"),
        (["--where", "error(task_name)"], "Error: "),
        (["--where", "1); DELETE FROM traces; --"], "Error: "),
        (["a0", "--errors"], "are about the list: leave the trace out"),
        (["--task", "easy", "--step", "9"], "step 9 of 'train' was not recorded"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Path, rolltape: Cli, words: list[str], told: str) -> None:
    code, _, err = rolltape("show", run, *words)
    assert code == 2
    assert told in err
