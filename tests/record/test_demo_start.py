"""`rolltape demo --write`: from the demo to an environment of one's own."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.demo.start import Start
from rolltape.record.demo.template import PlumTask
from rolltape.record.engine import DemoEngine
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput, RunConflict

ROLLTAPE = [sys.executable, "-m", "rolltape.replay.cli"]


def rolltape(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, alone = [*ROLLTAPE, *arguments], {name: value for name, value in os.environ.items() if name != "UV"}
    return subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=False, timeout=120)


def test_what_it_writes_is_recorded_by_the_commands_it_names(tmp_path: Path) -> None:
    written = rolltape(tmp_path, "demo", "--write", "my-env", "--json")
    assert written.returncode == 0, written.stderr
    said = json.loads(written.stdout)
    assert (said["config"], said["taskset"]) == ("my-env/config.toml", "my-env/my_env.py")
    engine, record, stats = said["next"]
    assert engine == "rolltape engine"
    with DemoEngine(policy=DemoPolicy()).serve_in_thread() as served:
        done = rolltape(tmp_path, *shlex.split(record.replace("http://127.0.0.1:30000", served.url))[1:])
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "runs" / "mine")
    assert run.info["taskset"] == "my-env"
    rows = run.table("train", columns=["disposition", "rewards", "num_turns"]).to_pylist(maps_as_pydicts="strict")
    assert {row["disposition"] for row in rows} == {"emitted"}
    assert {name for row in rows for name in row["rewards"]} == {"correct", "quickest"}
    assert {row["rewards"]["correct"] for row in rows} == {0.0, 1.0}
    assert {row["rewards"]["quickest"] for row in rows} == {0.0, 0.5}
    assert max(row["num_turns"] for row in rows) == 2
    assert "quickest" in rolltape(tmp_path, *shlex.split(stats)[1:]).stdout


def test_nothing_is_written_over_and_the_folder_must_make_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Start(tmp_path / "one").write()
    (tmp_path / "one" / "one.py").write_text("mine", encoding="utf-8")
    (tmp_path / "one" / "config.toml").unlink()
    with pytest.raises(RunConflict, match=r"one\.py is there already"):
        Start(tmp_path / "one").write()
    assert (tmp_path / "one" / "one.py").read_text(encoding="utf-8") == "mine"
    with pytest.raises(BadInput, match="there is a module 'json' already"):
        Start(tmp_path / "json").write()
    with pytest.raises(BadInput, match="'9 lives' is no name of a module"):
        Start(tmp_path / "9 lives").write()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Start(Path(".")).write()
    assert (tmp_path / "here" / "here.py").is_file()


def test_the_template_s_group_reward_takes_rollouts_that_failed() -> None:
    traces = [SimpleNamespace(num_turns=n, rewards=rewards) for n, rewards in ((1, {}), (3, {"correct": 1.0}))]
    assert asyncio.run(PlumTask.quickest(None, traces)) == [0.0, 1.0]
