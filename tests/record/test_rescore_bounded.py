"""Re-scoring with scoring functions that hang: each is given up after the config's timeout, by name, and the run goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record_build import checked, dispositions, trace
from rescore_build import record_run, taskset

from rolltape.record.rescoring.rescore import Rescored, rescore
from rolltape.replay.run import open_run

PROBE = """
import asyncio, re, signal, threading, time

import verifiers.v1 as vf


class ProbeTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def ok(self, trace):
        return 1.0
"""
LIMIT = "[timeout]\nscoring = 0.2\n"


def probes(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, settings: str = LIMIT) -> Path:
    return taskset(folder, monkeypatch, PROBE + body, "ProbeTask", settings)


def rewards(run: Path) -> dict[str, Any]:
    rows = open_run(run).table(columns=["trace_id", "rewards"]).to_pylist(maps_as_pydicts="strict")
    return {row["trace_id"]: row["rewards"] for row in rows}


def failures(result: Rescored) -> list[tuple[str, str, str]]:
    return [(f["trace_id"], f["signal"], f["error"]) for f in result.failures]


BLOCKED = "not done within 0.2 s, which it blocked"
HANGS = {
    "sleeps": ("async def odd(self, trace):", "time.sleep(60)", BLOCKED),
    "sleeps in a plain function": ("def odd(self, trace):", "time.sleep(60)", BLOCKED),
    "computes": ("async def odd(self, trace):", "while True: pass", BLOCKED),
    "backtracks": ("async def odd(self, trace):", "re.match('(a+)+$', 'a' * 40 + 'b')", BLOCKED),
    "waits for a lock": ("async def odd(self, trace):", "a = threading.Lock(); a.acquire(); a.acquire()", BLOCKED),
    "blocks in a task of its own": (
        "async def odd(self, trace):",
        "await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0, time.sleep), self.block())",
        BLOCKED,
    ),
    "blocks after it has waited": ("async def odd(self, trace):", "await asyncio.sleep(0.01); time.sleep(60)", BLOCKED),
    "waits": ("async def odd(self, trace):", "await asyncio.sleep(60)", "not done within 0.2 s"),
    "waits for a thread": (
        "async def odd(self, trace):",
        "await asyncio.to_thread(time.sleep, 60)",
        "not done within 0.2 s",
    ),
}


@pytest.mark.parametrize(("head", "hang", "error"), HANGS.values(), ids=list(HANGS))
def test_a_reward_that_hangs_is_given_up_and_costs_no_other_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, hang: str, error: str
) -> None:
    body = f"""
    async def block(self):
        await asyncio.sleep(0)
        time.sleep(60)

    @vf.reward
    {head}
        if trace.id == 'b':
            {hang}
        return 0.5
"""
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert failures(result) == [("b", "odd", error)]
    assert rewards(tmp_path / "new") == {i: {"ok": 2.0, "odd": None if i == "b" else 0.5} for i in "abc"}
    assert dispositions(tmp_path / "new") == {"a": "incomplete_group", "b": "error", "c": "emitted"}
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    checked(tmp_path / "new")


@pytest.mark.parametrize(
    ("hang", "error"), [("time.sleep(60)", BLOCKED), ("await asyncio.sleep(60)", "not done within 0.2 s")]
)
def test_a_group_reward_that_hangs_is_given_up_for_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: str, error: str
) -> None:
    body = f"""
    @vf.group_reward
    async def race(self, traces):
        if traces[0].id == 'a':
            {hang}
        return [0.5] * len(traces)
"""
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c"), trace("d")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert failures(result) == [("a", "race", error), ("b", "race", error)]
    assert {i: r["race"] for i, r in rewards(tmp_path / "new").items()} == {"a": None, "b": None, "c": 0.5, "d": 0.5}


def test_a_score_made_of_the_interruption_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward
    async def odd(self, trace):
        try:
            if trace.id == 'b':
                time.sleep(60)
        except BaseException:
            return 0.0
        return 0.5
"""
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    assert failures(result) == [("b", "odd", BLOCKED)]
    assert {i: r["odd"] for i, r in rewards(tmp_path / "new").items()} == {"a": 0.5, "b": None}


def test_one_that_hangs_takes_no_time_from_those_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward
    async def odd(self, trace):
        if trace.id == 'b':
            await asyncio.sleep(0.01)
            time.sleep(60)
        await asyncio.sleep(0.5)
        return 0.5
"""
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")], [trace("c")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body, "[timeout]\nscoring = 2\n"), tmp_path / "new")
    assert [f[0] for f in failures(result)] == ["b"]


def test_a_reward_may_set_an_alarm_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward
    async def odd(self, trace):
        def ring(*_):
            raise KeyError("too hard")
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            time.sleep(60)
        except KeyError:
            return 0.25
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
"""
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body, "[timeout]\nscoring = 30\n"), tmp_path / "new")
    assert result.failures == []
    assert {r["odd"] for r in rewards(tmp_path / "new").values()} == {0.25}


def test_a_thread_that_hangs_does_not_keep_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward
    async def odd(self, trace):
        if trace.id == 'b':
            thread = threading.Thread(target=time.sleep, args=(600,))
            thread.start()
            thread.join()
        return 0.5
"""
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")]]])
    config = probes(tmp_path, monkeypatch, body)
    command = [sys.executable, "-m", "rolltape.replay.cli", "rescore", str(run), "--config", str(config)]
    command += ["--out", str(tmp_path / "new"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert [f["error"] for f in json.loads(done.stdout)["failures"]] == [BLOCKED]


def test_nor_where_the_command_fails() -> None:
    source = """
import threading, time
from rolltape.record.rescoring.bounded import threads_left_behind
from rolltape.schema.errors import BadInput
with threads_left_behind():
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise BadInput("Something is wrong.")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "Error: Something is wrong.\n")


def test_a_wrong_run_config_or_place_is_told_without_loading_verifiers(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]]])
    record_run(tmp_path / "other", [[[trace("b")]]])
    (tmp_path / "good.toml").write_text('[taskset]\nid = "probes"\n', encoding="utf-8")
    (tmp_path / "old.toml").write_text('id = "probes"\n', encoding="utf-8")
    source = """
import sys
sys.modules["verifiers"] = None
from rolltape.replay.cli import main
for line in sys.stdin:
    sys.argv = ["rolltape", "rescore", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print(ended.code)
"""
    said = {
        f"nowhere --config {tmp_path}/good.toml --out new": "nowhere does not exist",
        f"{run} --config good.toml --out new --step 7": "no step 7 to re-score; recorded: step 0",
        f"{run} --config none.toml --out new": "There is no file none.toml",
        f"{run} --config old.toml --out new": "is a V0 environment",
        f"{run} --config good.toml --out {run}": "is the run itself",
        f"{run} --config good.toml --out {run}/stricter": "lies inside of the run",
        f"{run} --config good.toml --out good.toml": "is a file",
        f"{run} --config good.toml --out other": "is no re-scoring of",
    }
    command = [sys.executable, "-c", source]
    lines = "\n".join(said)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["2"] * len(said), done.stderr
    errors = ["".join(error.splitlines()) for error in done.stderr.split("Error: ")[1:]]
    for error, why in zip(errors, said.values(), strict=True):
        assert why in error
    assert not (tmp_path / "new").exists()
