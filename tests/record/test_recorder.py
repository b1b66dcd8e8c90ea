"""Recording steps: what is kept, in which order it reaches the disk, and who may write where."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolltape.record.recorder import Committed, Recorder
from rolltape.record.writing.folder import next_attempt
from rolltape.replay import open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema import Context, Group, Outcome, RunConflict, Step, Turn, decode, to_trace
from rolltape.schema.encoding import Row
from rolltape.schema.errors import BadInput, Damaged, UnsupportedVersion
from rolltape.schema.paths import Part, RunPaths

Record = dict[str, Any]


def record(id: str, idx: int = 0, reward: float = 1.0, tokens: int = 3) -> Record:
    """A trace of one turn with `tokens` sampled tokens."""
    span = {"start": 0.0, "end": 0.0}
    common = {"timestamp": 1.0, "usage": None}
    question = {
        "parent": None,
        "message": {"role": "user", "content": "a question"},
        "sampled": False,
        "token_ids": [1, 2],
        "mask": [False, False],
        "is_content": [True, True],
        "logprobs": [],
        "finish_reason": None,
    }
    answer = {
        "parent": 0,
        "message": {
            "role": "assistant",
            "content": "an answer",
            "reasoning_content": None,
            "tool_calls": None,
            "provider_state": None,
        },
        "sampled": True,
        "token_ids": list(range(tokens)),
        "mask": [True] * tokens,
        "is_content": [True] * tokens,
        "logprobs": [-0.5] * tokens,
        "finish_reason": "stop",
    }
    return {
        "id": id,
        "task": {"type": "ProbeTask", "data": {"idx": idx, "name": None, "prompt": "a question"}},
        "runtime": None,
        "nodes": [question | common, answer | common],
        "rewards": {"ok": reward},
        "metrics": {},
        "info": {},
        "extra_usage": [],
        "is_completed": True,
        "stop_condition": "agent_completed",
        "errors": [],
        "timing": {"start": 0.0, "setup": span, "generation": span, "finalize": span, "scoring": span},
    }


def at(step: int = 0, **place: Any) -> Context:
    return Context(step=step, **place)


def emitted(*traces: str) -> list[Outcome]:
    return [Outcome(trace_id=t, disposition="emitted") for t in traces]


def commit(
    recorder: Recorder, step: int, outcomes: Sequence[Outcome], groups: Sequence[Group] = (), **rest: Any
) -> Committed:
    split = rest.pop("split", "train")
    return recorder.commit_now(split, step, groups=groups, outcomes=outcomes, record=Step(), **rest)


def trace_ids(root: Path, split: str = "train") -> list[str]:
    return list(open_run(root).table(split).column("trace_id").to_pylist())


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    opened = Recorder.open(tmp_path / "run", model="m", tokenizer="t", taskset="x", settings={"steps": 3})
    yield opened
    opened.close()


def test_a_committed_step_is_read_back_as_it_was_recorded(recorder: Recorder) -> None:
    records = [record("a"), record("b", reward=0.0)]
    groups = [Group.from_records(records, group_index=0, expected_size=2)]
    recorder.started("train", 0, 2)
    turns = (Turn(weight_version="7", completion_tokens=3),)
    for i, r in enumerate(records):
        recorder.add(r, at(group_index=0, rollout_index=i, model="m", turns=turns))
    done = commit(recorder, 0, emitted("a", "b"), groups, eval_name=None)
    assert done.error is None
    assert done.step.counts == {"started": 2, "emitted": 2, "lost": 0}
    run = open_run(recorder.paths.root)
    table = run.table()
    assert decode(table) == records
    [row, _] = table.to_pylist(maps_as_pydicts="strict")
    assert (row["run"], row["attempt"], row["writer"]) == (recorder.run_id, 0, "main")
    assert (row["group_index"], row["rollout_index"], row["disposition"]) == (0, 0, "emitted")
    assert row["turn_weight_version"] == ["7"]
    assert run.groups() == groups
    assert run.info["model"] == "m"
    assert run.attempts[0].settings["steps"] == 3
    assert verify(run).findings == []


def test_the_recorder_fills_in_the_place_of_the_step(recorder: Recorder) -> None:
    recorder.add(record("a"), at(3, split="eval", eval_name="math"))
    step = replace(Step(cursor=9), split="train", step=77, writer="nobody")
    done = recorder.commit_now("eval", 3, groups=[], outcomes=emitted("a"), record=step, eval_name="math")
    assert (done.step.split, done.step.eval_name, done.step.step) == ("eval", "math", 3)
    assert (done.step.writer, done.step.attempt, done.step.cursor) == ("main", 0, 9)
    assert trace_ids(recorder.paths.root, "eval-math") == ["a"]


# -- rows of a step


def test_rows_come_by_group_rollout_and_try_whatever_ended_first(recorder: Recorder) -> None:
    places = {"d": (1, 0, 0), "b": (0, 1, 0), "c": (0, 1, 1), "a": (0, 0, 0), "e": (1, 2, 0)}
    for id, (group, rollout, number) in places.items():
        recorder.add(record(id), at(group_index=group, rollout_index=rollout, try_number=number))
    assert recorder.rows("train", 0).column("trace_id").to_pylist() == list("abcde")
    commit(recorder, 0, emitted(*"abcde"))
    assert trace_ids(recorder.paths.root) == list("abcde")


def test_a_trace_that_is_recorded_again_replaces_its_row(recorder: Recorder) -> None:
    recorder.add(record("a", reward=0.0), at())
    recorder.add(record("b"), at())
    recorder.add(record("a", reward=0.5), at())
    assert recorder.rows("train", 0).column("reward").to_pylist() == [0.5, 1.0]
    commit(recorder, 0, emitted("a", "b"))
    assert open_run(recorder.paths.root).table().column("reward").to_pylist() == [0.5, 1.0]


@pytest.mark.parametrize("later", ["nothing", "again", "one more", "another step"])
def test_a_file_holds_what_was_recorded_after_its_rows_were_converted_too(recorder: Recorder, later: str) -> None:
    recorder.add(record("a", reward=1.0), at(group_index=0))
    recorder.add(record("b", reward=1.0), at(group_index=1))
    converted = recorder.rows("train", 0)
    expected = {"a": 1.0, "b": 1.0}
    if later == "again":
        recorder.add(record("a", reward=0.25), at(group_index=0))
        expected["a"] = 0.25
    elif later == "one more":
        recorder.add(record("c", reward=0.5), at(group_index=2))
        expected["c"] = 0.5
    elif later == "another step":
        recorder.add(record("z"), at(step=1))
        recorder.rows("train", 1)
    commit(recorder, 0, emitted(*expected))
    table = open_run(recorder.paths.root).table()
    assert dict(zip(table["trace_id"].to_pylist(), table["reward"].to_pylist(), strict=True)) == expected
    same = table.select(converted.column_names).slice(0, 2).equals(converted)
    assert same == (later != "again")


def test_steps_splits_and_evaluations_are_kept_apart(recorder: Recorder) -> None:
    places = [at(0), at(1), at(0, split="eval"), at(0, split="eval", eval_name="math")]
    for id, place in zip("abcd", places, strict=True):
        recorder.add(record(id), place)
    assert recorder.rows("train", 1).column("trace_id").to_pylist() == ["b"]
    assert recorder.rows("eval", 0, "math").column("trace_id").to_pylist() == ["d"]
    assert recorder.rows("train", 2).num_rows == 0
    commit(recorder, 0, emitted("a"))
    assert recorder.rows("train", 1).num_rows == 1


def test_what_happens_to_a_trace_after_it_was_recorded_is_not_seen(recorder: Recorder) -> None:
    async def go() -> None:
        late = to_trace(record("a"))
        await recorder.trace(late, at())
        late.nodes.append(copy.deepcopy(late.nodes[1]))
        late.nodes[0].token_ids.append(99)
        late.nodes[1].logprobs[0] = -9.0
        late.rewards["ok"] = 0.0
        late.info["late"] = True
        plain = record("b")
        await recorder.trace(plain, at())
        plain["nodes"][0]["token_ids"].append(99)
        plain["rewards"]["ok"] = 0.0

    asyncio.run(go())
    expected = [r | {"task": {**r["task"]}} for r in (record("a"), record("b"))]
    found = decode(recorder.rows("train", 0))
    assert [r["nodes"] for r in found] == [r["nodes"] for r in expected]
    assert [r["rewards"] for r in found] == [{"ok": 1.0}, {"ok": 1.0}]
    assert [r["info"] for r in found] == [{}, {}]


def test_many_traces_that_end_at_once_are_all_recorded_bit_for_bit(recorder: Recorder) -> None:
    """With fields no column holds, so that every thread compresses at the same time."""
    names = [f"{i:03}" for i in range(200)]
    records = [record(name, tokens=2000) | {"later": [name] * 20_000} for name in names]

    async def go() -> None:
        await asyncio.gather(
            *(recorder.trace(r, at(group_index=i // 8, rollout_index=i % 8)) for i, r in enumerate(records))
        )
        await recorder.commit("train", 0, groups=[], outcomes=emitted(*names), record=Step())

    asyncio.run(go())
    assert decode(open_run(recorder.paths.root).table()) == records


def test_something_that_is_no_trace_is_refused(recorder: Recorder) -> None:
    with pytest.raises(BadInput, match="is no trace"):
        recorder.add(object(), at())
    assert recorder.rows("train", 0).num_rows == 0


# -- counts


def test_started_tries_are_those_that_ended_by_disposition_and_the_lost_ones(recorder: Recorder) -> None:
    recorder.started("train", 0, 4)
    recorder.started("train", 0)
    recorder.started("train", 1, 9)
    for id in "abc":
        recorder.add(record(id), at())
    outcomes = [*emitted("a"), Outcome(trace_id="b", disposition="error"), Outcome(trace_id="c", disposition="error")]
    done = commit(recorder, 0, [*outcomes, Outcome(trace_id="unknown", disposition="filtered")])
    assert done.step.counts == {"started": 5, "emitted": 1, "error": 2, "lost": 2}
    assert [f.code for f in verify(open_run(recorder.paths.root)).findings] == ["lost", "journal"]


def test_tries_that_nobody_announced_still_count_as_started(recorder: Recorder) -> None:
    recorder.add(record("a"), at())
    assert commit(recorder, 0, emitted("a")).step.counts == {"started": 1, "emitted": 1, "lost": 0}


def test_a_recorded_trace_without_an_outcome_is_refused_and_nothing_is_lost(recorder: Recorder) -> None:
    recorder.add(record("a"), at())
    recorder.add(record("b"), at())
    with pytest.raises(BadInput, match="1 of 2 traces of step 0 have no outcome"):
        commit(recorder, 0, emitted("a"))
    assert recorder.rows("train", 0).num_rows == 2
    commit(recorder, 0, emitted("a", "b"))
    assert trace_ids(recorder.paths.root) == ["a", "b"]


def test_a_step_without_any_trace_can_be_committed(recorder: Recorder) -> None:
    recorder.started("train", 0, 2)
    assert commit(recorder, 0, []).step.counts == {"started": 2, "lost": 2}
    assert trace_ids(recorder.paths.root) == []


# -- the order in which things reach the disk


def test_without_its_commit_a_step_is_on_disk_but_no_data_and_follows_later(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "run")
    recorder.add(record("a"), at())
    (tmp_path / "run" / "commits").write_text("in the way")
    done = commit(recorder, 0, emitted("a"))
    assert done.commit is None
    assert done.error is not None
    assert RunPaths(tmp_path / "run").parquet(Part("train", 0, 0, "main")).exists()
    (tmp_path / "run" / "commits").unlink()
    assert trace_ids(tmp_path / "run") == []
    recorder.close()
    assert trace_ids(tmp_path / "run") == ["a"]


def test_without_its_file_a_step_is_never_committed(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "run")
    recorder.add(record("a"), at())
    (tmp_path / "run" / "traces").write_text("in the way")
    assert commit(recorder, 0, emitted("a")).commit is None
    assert not (tmp_path / "run" / "commits").exists()
    (tmp_path / "run" / "traces").unlink()
    recorder.close()
    assert trace_ids(tmp_path / "run") == ["a"]


def test_a_step_is_committed_once(recorder: Recorder) -> None:
    recorder.add(record("a"), at())
    commit(recorder, 0, emitted("a"))
    with pytest.raises(RunConflict, match="writer 'main' has committed step 0 of 'train' in attempt 0 already"):
        commit(recorder, 0, [])
    with pytest.raises(BadInput, match="step 0 of 'train' has ended"):
        recorder.add(record("b"), at())
    assert trace_ids(recorder.paths.root) == ["a"]


def test_no_temporary_file_is_left(recorder: Recorder) -> None:
    for step in range(3):
        recorder.add(record(f"a{step}"), at(step))
        commit(recorder, step, emitted(f"a{step}"))
    names = [p.name for p in recorder.paths.root.rglob("*") if p.is_file()]
    assert [n for n in names if n.endswith(".tmp")] == []


def test_large_steps_are_written_in_row_groups_of_bounded_size(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltape.record.writing.parts.CHUNK_BYTES", 40_000)
    for i in range(10):
        recorder.add(record(f"{i}", tokens=1000), at(rollout_index=i))
    commit(recorder, 0, emitted(*map(str, range(10))))
    batches = list(open_run(recorder.paths.root).batches(columns=["trace_id"]))
    assert len(batches) > 2
    assert max(b.num_rows for b in batches) <= 4
    assert [t for b in batches for t in b.column("trace_id").to_pylist()] == [str(i) for i in range(10)]


def test_two_hundred_steps_leave_no_row_in_memory_and_no_growing_journal(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "run")
    sizes = []
    for step in range(200):
        recorder.started("train", step, 2)
        for i in range(2):
            recorder.add(record(f"{step}.{i}", tokens=50), at(step))
        commit(recorder, step, emitted(f"{step}.0", f"{step}.1"))
        sizes.append(sum(f.stat().st_size for f in recorder.paths.journals.glob("*")))
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, Row) and o.values["run"] == recorder.run_id]
    assert max(sizes[100:]) <= max(sizes[:100])
    recorder.close()
    assert len(open_run(tmp_path / "run").all_commits) == 200


# -- who may write where


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunConflict, match=r"is not empty \(thesis\.tex\) and holds no run\.json; choose a new folder"):
        Recorder.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunConflict, match="is a file"):
        Recorder.open(tmp_path / "run")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    Recorder.open(tmp_path).close()
    assert open_run(tmp_path).attempts.keys() == {0}


def test_a_run_is_gone_on_with_only_where_that_is_asked_for(tmp_path: Path) -> None:
    first = Recorder.open(tmp_path)
    first.close()
    with pytest.raises(RunConflict, match=f"holds run {first.run_id} already; choose a new folder"):
        Recorder.open(tmp_path)
    again = Recorder.open(tmp_path, resume=True, start_step=4, settings={"seed": 5})
    again.close()
    assert (again.run_id, again.attempt) == (first.run_id, 1)
    attempts = open_run(tmp_path).attempts
    assert (attempts[1].start_step, attempts[1].settings["seed"]) == (4, 5)


@pytest.mark.parametrize("left", ["commits", "traces"])
def test_an_attempt_whose_file_is_gone_keeps_its_number(tmp_path: Path, left: str) -> None:
    first = Recorder.open(tmp_path)
    first.add(record("old"), at(0))
    commit(first, 0, emitted("old"))
    first.close()
    paths = RunPaths(tmp_path)
    paths.attempt(0).unlink()
    assert next_attempt_of(tmp_path) == 1
    assert [f.message for f in verify(open_run(tmp_path)).errors] == [
        f"{paths.attempt(0)} is missing, though commits name attempt 0; its settings are lost"
    ]
    paths.attempt(1).unlink()
    shutil.rmtree(paths.traces if left == "commits" else paths.commits)
    assert next_attempt(paths, 1, {}, {}) == 1


def next_attempt_of(root: Path) -> int:
    """The attempt that a recorder goes on with behind everything."""
    recorder = Recorder.open(root, resume=True, start_step=None)
    recorder.close()
    return recorder.attempt


def test_a_folder_is_the_same_tokenizer_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("one")
    Recorder.open("run", model="m", tokenizer="one", taskset="t").close()
    for same in (str(tmp_path / "one"), "link", "./one/"):
        Recorder.open("run", model="m", tokenizer=same, taskset="t", resume=True).close()
    for other in ("two", "gone"):
        with pytest.raises(RunConflict, match=f"tokenizer 'one' then, '{other}' now"):
            Recorder.open("run", model="m", tokenizer=other, taskset="t", resume=True)


def test_a_tokenizer_that_was_moved_is_the_same_behind_a_link(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    Recorder.open(tmp_path / "run", tokenizer=str(old)).close()
    old.rename(new)
    with pytest.raises(RunConflict, match=r"where a folder was moved: by a link"):
        Recorder.open(tmp_path / "run", tokenizer=str(new), resume=True)
    old.symlink_to(new)
    Recorder.open(tmp_path / "run", tokenizer=str(new), resume=True).close()


@pytest.mark.parametrize("name", ["model", "tokenizer", "taskset"])
def test_two_different_runs_are_not_mixed_in_one_folder(tmp_path: Path, name: str) -> None:
    identity = {"model": "m", "tokenizer": "t", "taskset": "x"}
    Recorder.open(tmp_path, **identity).close()  # type: ignore[arg-type]
    Recorder.open(tmp_path, resume=True, **identity).close()  # type: ignore[arg-type]
    with pytest.raises(RunConflict, match=rf"{name} '{identity[name]}' then, 'other' now"):
        Recorder.open(tmp_path, resume=True, **{**identity, name: "other"})  # type: ignore[arg-type]
    assert open_run(tmp_path).attempts.keys() == {0, 1}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", Damaged),
        ("[]", Damaged),
        ('{"run": "r", "schema": "2.0"}', UnsupportedVersion),
        ('{"schema": "1.0"}', Damaged),
    ],
)
def test_a_run_that_cannot_be_understood_is_not_written_to(tmp_path: Path, text: str, error: type[Exception]) -> None:
    (tmp_path / "run.json").write_text(text)
    for resume in (True, False):
        with pytest.raises(error, match=r"run\.json"):
            Recorder.open(tmp_path, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "k=v", "../up", "-x", "é", "x" * 65])
def test_a_writer_s_name_is_one_that_files_can_carry(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="expected 1 to 64 letters"):
        Recorder.open(tmp_path / "run", writer=name)
    assert not (tmp_path / "run").exists()


def test_a_step_recorded_again_from_an_earlier_one_on_replaces_what_it_took_back(tmp_path: Path) -> None:
    first = Recorder.open(tmp_path)
    for step in range(4):
        first.add(record(f"old{step}"), at(step))
        commit(first, step, emitted(f"old{step}"))
    first.close()
    second = Recorder.open(tmp_path, resume=True, start_step=2)
    second.add(record("new2"), at(2))
    commit(second, 2, emitted("new2"))
    second.close()
    assert trace_ids(tmp_path) == ["old0", "old1", "new2"]
    assert verify(open_run(tmp_path)).findings == []


WRITER = """
import sys
from rolltape.record.recorder import Recorder
from rolltape.schema import Context, Outcome, Step
root, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
recorder = Recorder.open(root, writer=name, resume=True)
print(recorder.attempt, flush=True)
sys.stdin.readline()
nodes = []
for step in range(steps):
    for i in range(5):
        trace = {"id": f"{name}.{step}.{i}", "task": {"type": "T", "data": {"idx": 0}}, "nodes": [], "rewards": {}}
        recorder.add(trace, Context(step=step, rollout_index=i))
    outcomes = [Outcome(trace_id=f"{name}.{step}.{i}", disposition="empty") for i in range(5)]
    recorder.commit_now("train", step, groups=[], outcomes=outcomes, record=Step())
recorder.close()
"""


def start_writer(root: Path, name: str, steps: int = 2) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WRITER, str(root), name, str(steps)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_writers_of_several_processes_share_an_attempt_and_lose_nothing(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    writers = [start_writer(tmp_path / "run", name) for name in names]
    opened = [w.stdout.readline().strip() for w in writers if w.stdout]
    for writer in writers:
        writer.communicate("go\n", timeout=60)
    assert [w.returncode for w in writers] == [0, 0, 0]
    assert opened == ["0", "0", "0"]
    run = open_run(tmp_path / "run")
    assert run.attempts.keys() == {0}
    assert trace_ids(tmp_path / "run") == [f"{n}.{s}.{i}" for s in range(2) for n in names for i in range(5)]
    assert verify(run).errors == []


def test_a_second_living_writer_of_one_name_is_refused(recorder: Recorder) -> None:
    with pytest.raises(RunConflict, match=r"writer 'main' records into .* at this moment"):
        Recorder.open(recorder.paths.root, resume=True, model="m")


def test_the_files_of_a_run_are_plain_json_and_parquet(recorder: Recorder) -> None:
    recorder.add(record("a"), at())
    commit(recorder, 0, emitted("a"))
    root = recorder.paths.root
    assert json.loads((root / "run.json").read_text())["schema"] == "1.0"
    assert json.loads((root / "attempts" / "0.json").read_text())["versions"]["rolltape"]
    body = json.loads((root / "commits" / "train" / "00000000.0.main.json").read_text())
    assert (body["rows"], body["sums"]["tokens"], body["sums"]["sampled_tokens"]) == (1, 5, 3)
    data = (root / "traces" / "train" / "00000000.0.main.parquet").read_bytes()
    assert (data[:4], data[-4:], len(data)) == (b"PAR1", b"PAR1", body["bytes"])
