"""`rolltape import` as a user types it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replay_build import TRACES, put_run, put_step, turn

from rolltape.replay import cli

Run = Callable[..., tuple[int, str, str]]
ROUNDED = TRACES / "0.4.0" / "written_by_verifiers" / "single_turn.jsonl"


@pytest.fixture
def rolltape(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command as the console script does; exit code, standard output, standard error."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rolltape", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_lines_that_hold_no_trace_are_named_with_exit_code_1(rolltape: Run, tmp_path: Path) -> None:
    lines = [json.dumps(turn(id="a")), "{", json.dumps(turn(id="a"))]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    code, out, _ = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run")
    assert code == 1
    assert "line 2 skipped: no JSON" in out
    assert "line 3 left out: trace a had come before" in out
    assert out.endswith("3 lines: 1 imported, 1 skipped, 1 repeated\n")
    code, out, _ = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "other", "--json")
    report = json.loads(out)
    assert (code, report["traces"], report["lines"], report["repeated"]) == (1, 1, 3, 1)
    assert [(left["line"], left["kind"], left["trace"]) for left in report["left"]] == [
        (2, "skipped", None),
        (3, "repeated", "a"),
    ]


def test_of_several_files_the_one_with_the_line_is_named_though_it_is_the_only_one(
    rolltape: Run, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(turn(id="a")))
    code, out, _ = rolltape("import", tmp_path / "one.jsonl", tmp_path / "two.jsonl", "--run", tmp_path / "run")
    assert code == 1
    assert f"{tmp_path / 'two.jsonl'}, line 1 left out: trace a had come before" in out.splitlines()


def test_groups_of_several_prompts_are_told(rolltape: Run, tmp_path: Path) -> None:
    code, out, _ = rolltape("import", TRACES / "0.2.0" / "unicode.jsonl", "--run", tmp_path / "a")
    assert (code, "1 group with several prompts" in out) == (0, True)
    code, out, _ = rolltape("import", TRACES / "0.2.0" / "group_rewards.jsonl", "--run", tmp_path / "b")
    assert (code, "several prompts" in out) == (0, False)


def test_of_many_lines_left_out_a_few_are_shown(rolltape: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join([json.dumps(turn()), *["{"] * 30]))
    code, out, _ = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run")
    assert code == 1
    assert out.count("skipped: no JSON") == 20
    assert "and 10 more; --json names 30 of them" in out


def test_importing_again_says_that_nothing_is_new(rolltape: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(turn(id="a")))
    rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run")
    code, out, _ = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run")
    assert (code, out) == (0, f"nothing new → {tmp_path / 'run'}\nthere already: 1 trace\n")
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(turn(id=i)) for i in "ab"))
    code, out, _ = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run")
    assert code == 0
    assert out.splitlines()[1] == "there already: 1 trace; 1 group got more"


def test_strict_refuses_with_the_first_bad_line(rolltape: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join([json.dumps(turn()), "{"]))
    code, out, err = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run", "--strict")
    assert (code, out) == (2, "")
    assert "t.jsonl: line 2: no JSON" in err
    assert not (tmp_path / "run").exists()


def test_a_recorded_run_takes_no_import(rolltape: Run, tmp_path: Path) -> None:
    put_run(tmp_path / "run")
    put_step(tmp_path / "run", 0, [turn()])
    (tmp_path / "t.jsonl").write_text(json.dumps(turn(id="new")))
    code, _, err = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run")
    assert code == 2
    assert "is a recorded run, and only imported ones take more; choose a new folder" in err


def test_rounded_log_probs_are_told_by_import_verify_and_convert(rolltape: Run, tmp_path: Path) -> None:
    code, out, _ = rolltape("import", ROUNDED, "--run", tmp_path / "run")
    assert code == 0
    assert "4 traces with log-probs that Verifiers rounded to 4 decimals" in out
    code, out, _ = rolltape("verify", tmp_path / "run")
    assert (code, out.count("logprobs_rounded"), out.splitlines()[-1]) == (0, 1, "clean, 1 warning")
    assert "4 traces, the first 1dacfe9e233d41b88f6be1f95f6a2453, with log-probs that Verifiers rounded to 4" in out
    code, _, err = rolltape("convert", tmp_path / "run", "--out", tmp_path / "s.jsonl")
    assert (code, err.count("logprobs_rounded")) == (0, 1)
    code, out, _ = rolltape("convert", tmp_path / "run", "--out", tmp_path / "s2.jsonl", "--json")
    assert [len(file["warnings"]) for file in json.loads(out)["files"]] == [1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--group-by", "colour"), "group-by"),
        (("--jobs", "0"), "jobs 0: expected 1 or more"),
        (("--jobs", "many"), "jobs"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    rolltape: Run, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(turn()))
    code, _, err = rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run", *words)
    assert code == 2
    assert says in err
