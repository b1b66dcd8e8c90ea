"""Which imported traces are one group, and imports into a run that was imported before."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from replay_build import Record, put_run, put_step, turn

from rolltape.replay import open_run
from rolltape.replay.imports import run as import_run
from rolltape.replay.imports import steps as import_steps
from rolltape.replay.imports.groups import GroupBy
from rolltape.replay.imports.importer import Imported, import_files
from rolltape.replay.verification.verify import verify
from rolltape.schema import decode
from rolltape.schema.errors import BadInput, RunConflict
from rolltape.schema.paths import Part, RunPaths


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def groups(folder: Path, *records: Any, by: GroupBy = "auto") -> list[tuple[str, ...]]:
    """The groups that an import of `records` gives."""
    import_files(write(folder / "traces.jsonl", *records), folder / "run", group_by=by)
    return [g.trace_ids for g in open_run(folder / "run").groups()]


def episode(*traces: Record, id: str = "e", **changes: Any) -> Record:
    return {
        "id": id,
        "env": {"id": "x"},
        "task": traces[0]["task"],
        "ok": True,
        "errors": [],
        "traces": [*traces],
    } | changes


def of(agent: str, trained: bool = True) -> Record:
    return {"agent": {"config": {}, "name": agent, "trainable": trained}}


# -- tasks


def test_traces_of_one_task_are_one_group_wherever_they_stand(tmp_path: Path) -> None:
    records = [turn(id=f"{i}{g}", idx=g) for i in range(3) for g in (7, 4)]
    done = import_files(write(tmp_path / "traces.jsonl", *records), tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert done.groups == 2
    assert [(g.group_index, g.task_index, g.trace_ids) for g in run.groups()] == [
        (0, 7, ("07", "17", "27")),
        (1, 4, ("04", "14", "24")),
    ]
    assert [g.expected_size for g in run.groups()] == [3, 3]
    assert [r["id"] for r in decode(run.table())] == ["07", "17", "27", "04", "14", "24"]


def test_tasks_of_two_kinds_or_without_an_index_are_groups_of_their_own(tmp_path: Path) -> None:
    records = [turn(id=i) for i in "abcde"]
    records[1]["task"]["type"] = "OtherTask"
    for record, prompt in zip(records[2:], ("one", "two", "one"), strict=True):
        record["task"]["data"] = {"prompt": prompt}
    assert groups(tmp_path, *records) == [("a",), ("b",), ("c", "e"), ("d",)]


def test_a_task_is_known_by_its_key_where_it_has_one(tmp_path: Path) -> None:
    records = [turn(id=i) for i in "abc"]
    for record, key in zip(records, ("k1", "k2", "k1"), strict=True):
        record["task"]["key"] = key
    assert groups(tmp_path, *records) == [("a", "c"), ("b",)]
    assert [g.task_key for g in open_run(tmp_path / "run").groups()] == ["k1", "k2"]


# -- auto, episode, run, task


def test_an_episodes_group_comes_first(tmp_path: Path) -> None:
    lines = [episode(turn(id=i, idx=0), id=i, group={"id": g}) for i, g in (("a", "g1"), ("b", "g2"), ("c", "g1"))]
    assert groups(tmp_path, *lines) == [("a", "c"), ("b",)]


def test_a_training_step_of_a_run_keeps_groups_of_one_task_apart(tmp_path: Path) -> None:
    on_trace = [turn(id=f"t{i}", run={"type": "train", "id": "r", "step": i % 2}) for i in range(4)]
    work = [{"type": "train", "id": "r", "work": {"type": "train", "step": s}} for s in (0, 5)]
    on_episode = [episode(turn(id=f"e{i}"), id=str(i), run=w) for i, w in enumerate(work)]
    assert groups(tmp_path, *on_trace, *on_episode) == [("t0", "t2", "e0"), ("t1", "t3"), ("e1",)]


def test_a_resumed_evaluation_has_two_ids_and_its_tasks_one_group(tmp_path: Path) -> None:
    records = [turn(id=i, run={"type": "eval", "id": run, "step": None}) for i, run in (("a", "r1"), ("b", "r2"))]
    assert groups(tmp_path, *records) == [("a", "b")]
    (tmp_path / "by run").mkdir()
    assert groups(tmp_path / "by run", *records, by="run") == [("a",), ("b",)]


@pytest.mark.parametrize(("by", "expected"), [("auto", 2), ("run", 2), ("task", 1)])
def test_two_files_that_name_no_run_are_two_runs_unless_tasks_are_asked_for(
    tmp_path: Path, by: GroupBy, expected: int
) -> None:
    files = [write(tmp_path / f"{name}.jsonl", turn(id=name)) for name in "ab"]
    assert import_files(files, tmp_path / "run", group_by=by).groups == expected


def test_by_episode_each_episode_without_a_group_is_one(tmp_path: Path) -> None:
    lines = [episode(turn(id=f"{e}{i}") | of("solver"), turn(id=f"{e}{i}x") | of("solver"), id=f"{e}{i}")
             for e in "ab" for i in range(2)]  # fmt: skip
    assert groups(tmp_path, *lines, turn(id="alone"), by="episode") == [
        *(("a0", "a0x"), ("a1", "a1x"), ("b0", "b0x"), ("b1", "b1x")),
        ("alone",),
    ]


def test_agents_are_never_mixed_and_those_not_trained_are_in_no_group(tmp_path: Path) -> None:
    lines = [
        episode(turn(id=f"s{i}") | of("solver"), turn(id=f"c{i}") | of("critic"), turn(id=f"j{i}") | of("judge", False))
        for i in range(2)
    ]
    done = import_files(write(tmp_path / "traces.jsonl", *lines), tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert [g.trace_ids for g in run.groups()] == [("s0", "s1"), ("c0", "c1")]
    assert (done.traces, done.untrained, run.table().num_rows) == (6, 2, 6)
    assert verify(run).findings == []


def test_odd_runs_groups_and_agents_cost_nothing(tmp_path: Path) -> None:
    odd = [
        turn(id="a", run=3, agent="x"),
        turn(id="b", run=[], agent={"config": 3}),
        episode(turn(id="c", agent={"config": {"client": []}}), group={"id": 3}, run={"work": 7}),
        episode(turn(id="d"), group=[], run=None),
    ]
    import_files(write(tmp_path / "traces.jsonl", *odd), tmp_path / "run")
    assert sorted(r["id"] for r in decode(open_run(tmp_path / "run").table())) == ["a", "b", "c", "d"]


# -- importing again


def again(folder: Path, *records: Any, **options: Any) -> Imported:
    return import_files(write(folder / "traces.jsonl", *records), folder / "run", **options)


def state(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_importing_a_file_twice_adds_nothing(tmp_path: Path) -> None:
    records = [turn(id=str(i), idx=i % 2) for i in range(6)]
    first = again(tmp_path, *records)
    before = state(tmp_path / "run")
    done = again(tmp_path, *records)
    assert (done.traces, done.known, done.repeated, done.lines, done.clean) == (0, 6, 6, 6, True)
    assert done.run == first.run
    assert state(tmp_path / "run") == before


def test_an_id_that_is_no_valid_text_is_known_again(tmp_path: Path) -> None:
    again(tmp_path, turn(id="half \ud800"), turn(id="b"))
    assert again(tmp_path, turn(id="half \ud800"), turn(id="b")).known == 2
    assert [r["id"] for r in decode(open_run(tmp_path / "run").table())] == ["half \ud800", "b"]


def test_only_what_is_new_is_added_as_further_steps(tmp_path: Path) -> None:
    again(tmp_path, *[turn(id=f"a{i}", idx=0) for i in range(2)])
    done = again(tmp_path, *[turn(id=f"a{i}", idx=0) for i in range(2)], *[turn(id=f"b{i}", idx=1) for i in range(2)])
    run = open_run(tmp_path / "run")
    assert (done.traces, done.known, done.joined, done.steps) == (2, 2, 0, 1)
    assert [(g.step, g.group_index, g.trace_ids) for g in run.groups()] == [(0, 0, ("a0", "a1")), (1, 1, ("b0", "b1"))]
    assert [(a.number, a.start_step) for a in run.attempts.values()] == [(0, 0), (1, 1)]
    assert verify(run).findings == []


def test_a_file_that_grew_adds_to_the_groups_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_steps, "STEP_BYTES", 10_000)  # of two or three traces
    records = [turn(id=f"{g}-{i}", idx=g, info={"pad": "x" * 3000}) for g in range(4) for i in range(3)]
    late = records[7]
    again(tmp_path, *[r for r in records if r is not late])
    before = open_run(tmp_path / "run")
    old = {c.part: c.file.sha256 for c in before.commits()}
    assert [c.part.step for c in before.commits()] == [0, 1, 2, 3]
    done = again(tmp_path, *records, turn(id="new", idx=9))
    run = open_run(tmp_path / "run")
    assert (done.traces, done.joined, done.groups) == (2, 1, 2)
    assert [g.trace_ids for g in run.groups()] == [
        *(("0-0", "0-1", "0-2"), ("1-0", "1-1", "1-2"), ("2-0", "2-2", "2-1"), ("3-0", "3-1", "3-2")),
        ("new",),
    ]
    assert [g.expected_size for g in run.groups()] == [3, 3, 3, 3, 1]
    assert [g.group_index for g in run.groups()] == [0, 1, 2, 3, 4]
    back = {r["id"]: r for r in decode(run.table())}
    assert json.dumps([back[r["id"]] for r in records]) == json.dumps(records)
    assert [c.part.attempt for c in run.commits()][:3] == [0, 0, 1]
    assert {c.part: c.file.sha256 for c in run.all_commits if c.part.attempt == 0} == old
    assert verify(run).findings == []
    table = run.table()
    assert table.column("rollout_index").to_pylist() == [0, 1, 2] * 4 + [0]
    assert set(table.column("run").to_pylist()) == {run.run_id}
    assert again(tmp_path, *records).traces == 0


def test_a_group_is_not_joined_where_another_rule_made_it(tmp_path: Path) -> None:
    again(tmp_path, turn(id="a"))
    assert again(tmp_path, turn(id="b"), group_by="task").joined == 0
    assert [g.trace_ids for g in open_run(tmp_path / "run").groups()] == [("a",), ("b",)]


def test_other_files_are_added_to_the_run_too(tmp_path: Path) -> None:
    again(tmp_path, turn(id="a"))
    done = import_files([write(tmp_path / "more.jsonl", turn(id="b"), turn(id="a"))], tmp_path / "run")
    assert (done.traces, done.known, done.clean) == (1, 1, True)
    settings = [a.settings["imported"] for a in open_run(tmp_path / "run").attempts.values()]
    assert [[Path(f["file"]).name for f in files] for files in settings] == [["traces.jsonl"], ["more.jsonl"]]


# -- what is refused


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "traces.jsonl", turn())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RunConflict, match="is not empty; choose a new folder"):
        import_files(tmp_path / "traces.jsonl", tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]
    with pytest.raises(RunConflict, match="is a file; choose a new folder"):
        import_files(tmp_path / "traces.jsonl", tmp_path / "traces.jsonl")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert again(tmp_path, turn()).traces == 1


def test_a_recorded_run_is_left_alone(tmp_path: Path) -> None:
    put_run(tmp_path / "run")
    put_step(tmp_path / "run", 0, [turn()])
    before = state(tmp_path / "run")
    with pytest.raises(RunConflict, match="is a recorded run, and only imported ones take more"):
        again(tmp_path, turn(id="new"))
    assert state(tmp_path / "run") == before


def test_two_imports_do_not_write_at_once(tmp_path: Path) -> None:
    again(tmp_path, turn(id="a"))
    descriptor = os.open(tmp_path / "run", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(RunConflict, match="another import is at work there"):
            again(tmp_path, turn(id="b"))
    finally:
        os.close(descriptor)
    assert again(tmp_path, turn(id="b")).traces == 1


def test_a_damaged_run_takes_nothing_more(tmp_path: Path) -> None:
    again(tmp_path, turn(id="a"))
    commit = Path(str(RunPaths(tmp_path / "run").commit(Part("train", 0, 0, "import"))))
    commit.write_bytes(commit.read_bytes()[:-20])
    with pytest.raises(OSError, match="no readable commit"):
        again(tmp_path, turn(id="b"))


# -- what goes wrong on the way


def test_a_failed_import_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again(tmp_path, turn(id="a"))
    before = state(tmp_path / "run")
    with pytest.raises(BadInput):
        import_files(write(tmp_path / "traces.jsonl", turn(id="b"), 3), tmp_path / "run", strict=True)
    monkeypatch.setattr(import_run, "put_once", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        again(tmp_path, turn(id="b"))
    monkeypatch.undo()
    assert state(tmp_path / "run") == before
    assert again(tmp_path, turn(id="b")).traces == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_import_that_fails_while_it_commits_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(import_steps, "STEP_BYTES", 1)
    again(tmp_path, *[turn(id=f"{g}", idx=g) for g in range(3)])
    before, puts = state(tmp_path / "run"), iter(range(9))

    def put_once(path: Path, data: bytes) -> bool:
        if next(puts) == failing:
            raise OSError(28, "No space left on device")
        return import_run_put_once(path, data)

    import_run_put_once = import_run.put_once
    monkeypatch.setattr(import_run, "put_once", put_once)
    with pytest.raises(OSError, match="No space"):
        again(tmp_path, turn(id="new", idx=1))
    monkeypatch.setattr(import_run, "put_once", import_run_put_once)
    assert state(tmp_path / "run") == before
    assert again(tmp_path, turn(id="new", idx=1)).joined == 1
    run = open_run(tmp_path / "run")
    assert [g.trace_ids for g in run.groups()] == [("0",), ("1", "new"), ("2",)]
    assert verify(run).findings == []


def test_a_failed_first_import_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_steps, "Step", None)  # after the file of the step was written
    with pytest.raises(TypeError):
        again(tmp_path, turn(id="a"))
    assert not (tmp_path / "run").exists()


def test_after_an_import_that_was_killed_what_it_had_is_kept_and_it_is_just_imported_again(tmp_path: Path) -> None:
    again(tmp_path, turn(id="a"))
    before = state(tmp_path / "run")
    write(tmp_path / "traces.jsonl", *[turn(id=i) for i in "ab"])
    script = (
        "import os, sys\n"
        "from rolltape.replay.imports import importer, run\n"
        "run.put_once = lambda *_: os.kill(os.getpid(), 9)\n"
        "importer.import_files(sys.argv[1], sys.argv[2])\n"
    )
    for place in ("run", "new"):
        ran = subprocess.run([sys.executable, "-c", script, tmp_path / "traces.jsonl", tmp_path / place], check=False)
        assert ran.returncode == -9
    now = state(tmp_path / "run")
    assert {k: v for k, v in now.items() if k in before} == before
    assert [r["id"] for r in decode(open_run(tmp_path / "run").table())] == ["a"]
    done = import_files(tmp_path / "traces.jsonl", tmp_path / "run")
    assert (done.traces, done.joined) == (1, 1)
    assert verify(open_run(tmp_path / "run")).findings == []
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")] == []
    assert (tmp_path / "new" / "traces").exists()
    assert import_files(tmp_path / "traces.jsonl", tmp_path / "new").traces == 2
    assert verify(open_run(tmp_path / "new")).findings == []


def test_files_without_a_run_that_no_killed_import_left_are_not_touched(tmp_path: Path) -> None:
    again(tmp_path, turn(id="a"))
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run" / ".import-killed").mkdir()
    (tmp_path / "run" / "traces" / "train" / "00000001.0.main.parquet").write_bytes(b"recorded")
    before = state(tmp_path / "run")
    with pytest.raises(RunConflict, match=re.escape("holds an import that was cut short, and no run")):
        again(tmp_path, turn(id="a"))
    assert state(tmp_path / "run") == before


def test_what_another_import_committed_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks."""
    put_once = import_run.put_once

    def late(path: Path, data: bytes) -> bool:
        put_once(path, b"theirs")
        return put_once(path, data)

    monkeypatch.setattr(import_run, "put_once", late)
    with pytest.raises(RunConflict, match="another import wrote step 0"):
        again(tmp_path, turn(id="a"))
    assert [p.read_bytes() for p in (tmp_path / "run" / "commits").rglob("*.json")] == [b"theirs"]
    assert len(list((tmp_path / "run" / "traces").rglob("*.parquet"))) == 1


def test_a_full_disk_is_named_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "Error writing bytes to file")

    monkeypatch.setattr(import_run, "put_once", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        again(tmp_path, turn(id="a"))
    assert raised.value.filename == str(tmp_path / "run")
