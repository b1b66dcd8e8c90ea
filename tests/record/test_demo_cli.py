"""`rolltape demo` as a program."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine
from rolltape.replay.run import open_run

ROLLTAPE = [sys.executable, "-m", "rolltape.replay.cli"]


def rolltape(folder: Path, *arguments: str, uv: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "UV"} | ({"UV": "uv"} if uv else {})
    return subprocess.run(
        [*ROLLTAPE, *arguments], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(folder: Path) -> dict[str, Any]:
    done = rolltape(folder, "demo", "--json")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_three_steps_of_sixteen_traces_are_recorded_and_verified(shown: dict[str, Any]) -> None:
    assert [step["traces"] for step in shown["record"]["steps"]] == [16, 16, 16]
    assert shown["record"]["counts"] == {"started": 48, "emitted": 44, "error": 4}
    assert shown["verify"]["clean"] is True
    assert shown["verify"]["digests"] == 3


def test_the_next_commands_work(folder: Path, shown: dict[str, Any]) -> None:
    verify, query, record = shown["next"]
    assert verify.startswith("rolltape verify")
    assert rolltape(folder, *shlex.split(verify)[1:]).returncode == 0
    assert "torn-5" in rolltape(folder, *shlex.split(query)[1:]).stdout
    with DemoEngine(policy=DemoPolicy()).serve_in_thread() as engine:
        more = rolltape(folder, *shlex.split(record.replace("http://127.0.0.1:30000", engine.url))[1:])
    assert more.returncode == 0, more.stderr
    assert "16 emitted" in more.stdout


def test_other_numbers_are_expected_in_vain(folder: Path, shown: dict[str, Any]) -> None:
    assert shown["verify"]["clean"]
    (folder / "wrong.toml").write_text("[group_reward_sum]\nfastest = 0.4\n")
    assert rolltape(folder, "verify", "demo-run", "--expect", "wrong.toml").returncode == 1


def test_an_earlier_run_is_kept_unless_it_may_be_replaced_and_equal_seeds_record_the_same(
    folder: Path, shown: dict[str, Any]
) -> None:
    before = (folder / "demo-run" / "run.json").read_bytes()
    kept = rolltape(folder, "demo")
    assert kept.returncode == 2
    assert "--overwrite" in kept.stderr
    assert (folder / "demo-run" / "run.json").read_bytes() == before
    replaced = rolltape(folder, "demo", "--overwrite", uv=True)
    assert replaced.returncode == 0, replaced.stderr
    for said in ("What was recorded", "4 error", "48 started, 44 emitted, 4 error", "clean", "uv run rolltape verify"):
        assert said in replaced.stdout
    assert json.loads((folder / "demo-run" / "run.json").read_bytes())["run"] != shown["record"]["run_id"]
    rows = open_run(folder / "demo-run").table("train", columns=["step", "num_sampled", "is_truncated"]).to_pylist()
    tokens = [sum(row["num_sampled"] for row in rows if row["step"] == step) for step in range(3)]
    assert tokens == [step["tokens"] for step in shown["record"]["steps"]]
    assert any(row["is_truncated"] for row in rows)
