"""Findings as people see them: some of each code, the rest counted, all of them on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replay_build import put_run, put_step, turn

from rolltape.replay import Finding
from rolltape.replay.printing.findings import lines

Cli = Callable[..., tuple[int, str, str]]


def many(code: str, n: int, **rest: Any) -> list[Finding]:
    return [Finding(code=code, message=f"{i} of {n}", step=i // 4, trace_id=f"t{i // 2}", **rest) for i in range(n)]


def test_a_few_findings_of_a_code_are_all_shown() -> None:
    findings = many("a", 5) + many("b", 1)
    assert [line for line, _ in lines(findings)] == [str(f) for f in findings]


def test_of_many_findings_some_are_shown_and_all_are_counted() -> None:
    shown = [line for line, _ in lines(many("a", 40))]
    assert shown[0] == "error a: 40 in all, of 20 traces in steps 0–9 (`rolltape verify --all` lists each)"
    assert shown[1:] == [f"  such as step 0, trace t{i // 2}: {i} of 40" for i in range(3)]


def test_what_several_say_alike_is_said_once_and_of_each_with_its_numbers() -> None:
    advice = "and this is what to do about it, in a sentence that nobody wants to read again for every trace of a run"
    findings = [Finding(code="a", message=f"{i} branches; {advice}", step=0, trace_id=f"t{i}") for i in range(9)]
    shown = [line for line, _ in lines(findings)]
    assert shown[1] == f"  such as step 0, trace t0: 0 branches; {advice}"
    assert [line[:38] for line in shown[2:]] == [f"  such as step 0, trace t{i}: {i} branches" for i in (1, 2)]
    assert all(len(line) < 130 and line.endswith("…") for line in shown[2:])
    assert [line for line, _ in lines(findings, everything=True)] == [str(f) for f in findings]


def test_of_several_wordings_each_is_shown() -> None:
    other = Finding(code="a", message="something else", step=7)
    shown = [line for line, _ in lines([*many("a", 40), other])]
    assert "  such as step 7: something else" in shown
    assert len(shown) == 4


def test_every_finding_is_a_line_on_request() -> None:
    findings = many("a", 40)
    assert [line for line, _ in lines(findings, everything=True)] == [str(f) for f in findings]


def test_errors_come_before_warnings() -> None:
    findings = [*many("w", 7, severity="warning"), *many("e", 1)]
    assert [severity for _, severity in lines(findings)] == ["error", *["warning"] * 4]


def test_a_message_is_one_line_whatever_it_holds() -> None:
    [(line, _)] = lines([Finding(code="a", message="one\nclean\x1b[2K")])
    assert line == "error a (run): one\\nclean\\x1b[2K"


def test_verify_merges_findings_and_lists_them_on_request_and_as_json(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    for step in range(4):
        records = [turn(id=f"{step}-{i}", idx=i, reward=float("nan")) for i in range(8)]
        put_step(tmp_path, step, records, fates={r["id"]: "emitted" for r in records}, digest_converted=None)
    code, out, _ = rolltape("verify", tmp_path)
    assert code == 1
    assert "error reward_value: 32 in all, of 32 traces in steps 0–3 (`rolltape verify --all` lists each)" in out
    assert sum("is nan" in line for line in out.splitlines()) == 3
    assert "findings" in out.splitlines()[-1]
    _, out, _ = rolltape("verify", tmp_path, "--all")
    assert sum("reward_value" in line for line in out.splitlines()) == 32
    _, out, _ = rolltape("verify", tmp_path, "--json")
    assert sum(f["code"] == "reward_value" for f in json.loads(out)["findings"]) == 32
