"""Known ways in which replaying what was recorded goes wrong: other releases, torn files, other orders, readers at work."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay_build import Record, by_task, put_attempt, put_run, put_step, recorded, reply, said, trace, turn
from typer.testing import CliRunner

from rolltape.replay import ConvertOptions, convert, flatten, open_run
from rolltape.replay.cli import app
from rolltape.replay.replayed import replay
from rolltape.replay.verification.verify import verify
from rolltape.schema import Group, RolltapeError, encode
from rolltape.schema.paths import Part, RunPaths

RELEASES = ("0.2.1", "0.3.0", "0.4.0")
LIVE = ("verifiers", "renderers", "transformers", "torch", "miles", "sglang", "ray", "aiohttp", "pydantic", "openai")


def of_release(name: str, release: str) -> list[Record]:
    return [trace for line in recorded(name, release) for trace in line.get("traces", [line])]


def numbered(records: list[Record], first: int) -> list[Group]:
    """Groups by task whose indices begin at `first`: no two of a run share one."""
    return [replace(g, group_index=g.group_index + first) for g in by_task(records)]


# -- releases


@pytest.mark.parametrize("name", ["single_turn", "multi_branch"])
def test_finish_reasons_and_usage_of_a_turn_are_the_same_in_every_shape_a_release_gives_them(name: str) -> None:
    columns = ["node_finish_reason", "node_prompt_tokens", "node_completion_tokens", "reward", "num_sampled"]
    rows = [encode(of_release(name, release)).select(columns).to_pylist() for release in RELEASES]
    assert rows[0] == rows[1] == rows[2]
    assert all("stop" in row["node_finish_reason"] for row in rows[0])


def test_steps_of_several_releases_lie_in_one_run_and_are_read_without_any_of_them(tmp_path: Path) -> None:
    put_run(tmp_path / "run")
    for step, release in enumerate(("0.2.0", *RELEASES)):
        records = of_release("single_turn", release)
        put_step(tmp_path / "run", step, records, groups=numbered(records, 100 * step), first=100 * step)
    program = f"""
import socket, sys

def refuse(*_, **__):
    raise AssertionError("a replay opened a connection")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
sys.modules.update(dict.fromkeys({LIVE!r}))
from rolltape.replay import open_run
from rolltape.replay.replayed import replay
from rolltape.replay.exports.samples import write_samples
from rolltape.replay.verification.verify import verify

run = open_run(sys.argv[1])
assert not verify(run).errors
assert [v.state for part in replay(run) for v in part.verdicts()] == ["same"] * 8
print(*(file.samples for file in write_samples(run, sys.argv[1] + "-{{rollout_id}}.jsonl")))
print(*run.sql("SELECT count(finish_reason), count(completion_tokens) FROM nodes GROUP BY step ORDER BY step").fetchall())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    samples, counts = done.stdout.splitlines()
    assert samples == "8 4 4 4"
    assert counts == "(8, 8) (4, 4) (4, 4) (4, 4)"


def test_samples_are_written_as_plain_values_that_need_no_class_of_ours(tmp_path: Path) -> None:
    put_run(tmp_path / "run")
    put_step(tmp_path / "run", 0, [turn("a")])
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "run"), "--out", str(tmp_path / "samples.jsonl")])
    assert done.exit_code == 0
    [sample] = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert (sample["status"], sample["tokens"], sample["loss_mask"]) == ("completed", [1, 2, 3, 4, 5, 6], [1, 1, 1])


# -- torn files


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("name", ["run.json", "attempts/0.json", "commits/train/00000000.0.main.json"])
def test_a_small_file_that_was_torn_is_named_and_never_a_traceback(tmp_path: Path, name: str, part: float) -> None:
    put_run(tmp_path)
    for step in (0, 1):
        put_step(tmp_path, step, [turn(f"t{step}")], first=step)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[: int(len(file.read_bytes()) * part)])
    for command in (["verify", str(tmp_path)], ["convert", str(tmp_path), "--out", f"{tmp_path}-{{rollout_id}}.jsonl"]):
        result = CliRunner().invoke(app, command)
        assert result.exception is None or isinstance(result.exception, (SystemExit, RolltapeError))
        if command[0] == "verify":
            assert name in result.output + str(result.exception)
    if name != "run.json":
        assert open_run(tmp_path).table("train", 1).num_rows == 1


# -- order


def test_samples_come_by_step_group_and_rollout_whatever_lies_beside_them_and_wherever_rows_stand() -> None:
    def pictured(id: str, idx: int) -> Record:
        node = said(None, [1, 151655, 2])
        node["message"]["content"] = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
        return trace(node, reply(0, [3], [4]), id=id, idx=idx)

    records = [
        *(turn("a0", idx=0), pictured("a1", 0), turn("a2", idx=0)),
        *(turn("b0", idx=1, errors=["ToolError: gone"]), turn("b1", idx=1), turn("b2", idx=1)),
        *(turn("c0", idx=2), turn("c1", idx=2), pictured("c2", 2)),
    ]
    groups = [replace(g, group_reward_names=()) for g in by_task(records)]
    orders = [records, records[::-1], random.Random(1).sample(records, len(records))]
    made = [
        [
            (s.routing_key, s.group_index, s.index)
            for g in convert(encode(order), groups, ConvertOptions(min_group_size=1)).groups
            for s in flatten(g)
        ]
        for order in orders
    ]
    assert made[0] == made[1] == made[2]
    assert [key for key, *_ in made[0]] == ["a0", "a2", "b1", "b2", "c0", "c1"]
    assert [index for *_, index in made[0]] == sorted(index for *_, index in made[0])


def test_steps_are_replayed_in_the_order_of_their_numbers_also_when_some_were_recorded_again(tmp_path: Path) -> None:
    put_run(tmp_path)
    for step in (0, 1, 2, 10):
        put_step(tmp_path, step, [turn(f"first{step}")], first=step)
    put_attempt(tmp_path, 1, start_step=2)
    for step in (10, 2):
        put_step(tmp_path, step, [turn(f"again{step}")], first=step, attempt=1)
    replayed = [(part.commit.part.step, part.samples[0].routing_key) for part in replay(open_run(tmp_path))]
    assert replayed == [(0, "first0"), (1, "first1"), (2, "again2"), (10, "again10")]


# -- readers and a writer at once


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from replay_build import put_step, turn
from test_cases_versions import numbered

for step in range(1000):
    records = [turn(f"{step}-{i}", idx=i) for i in range(3)]
    put_step(Path(sys.argv[1]), step, records, groups=numbered(records, 3 * step), first=3 * step)
    print(step, flush=True)
    time.sleep(0.02)
"""


def test_readers_see_every_committed_trace_once_while_a_writer_is_at_work_and_after_it_was_killed(
    tmp_path: Path,
) -> None:
    root = put_run(tmp_path / "run")
    command = [sys.executable, "-c", WRITER, str(root), str(Path(__file__).parent)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        for _ in range(6):
            told = int(writer.stdout.readline()) + 1
            seen = look(root)
            assert len(seen) % 3 == 0
            assert len(seen) >= 3 * told
    finally:
        writer.kill()
        writer.communicate()
    seen = look(root)
    steps = len(seen) // 3
    assert sorted(seen) == sorted(f"{step}-{i}" for step, i in itertools.product(range(steps), range(3)))
    assert not verify(open_run(root)).errors


def look(root: Path) -> list[str]:
    """Trace ids as two kinds of readers see them; none twice."""
    run = open_run(root)
    rows: list[Any] = run.table(columns=["trace_id"]).column("trace_id").to_pylist()
    assert sorted(rows) == sorted(trace for (trace,) in run.sql("SELECT trace_id FROM traces").fetchall())
    assert len(set(rows)) == len(rows)
    return rows


def test_a_writer_that_comes_back_supersedes_and_doubles_nothing(tmp_path: Path) -> None:
    put_run(tmp_path)
    for step in range(3):
        put_step(tmp_path, step, [turn(f"{step}")], first=step)
    put_attempt(tmp_path, 1, start_step=0)
    for step in range(3):
        put_step(tmp_path, step, [turn(f"{step} again")], first=step, attempt=1)
    assert look(tmp_path) == ["0 again", "1 again", "2 again"]
    assert RunPaths(tmp_path).parquet(Part("train", 0, 0, "main")).exists()
