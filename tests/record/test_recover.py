"""Dying between any two things that happen at a commit, and again while that is settled: nothing is lost or doubled."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_children import DIED
from fault_server import Children
from record_build import (
    LONG,
    at,
    checked,
    commit,
    counts,
    dispositions,
    emitted,
    record_step,
    records_of,
    same,
    trace,
    unsynced,
)

from rolltape.record.recorder import Recorder
from rolltape.record.writing.folder import one_at_a_time
from rolltape.record.writing.journal import Journal, Record, pack_record, read_journal
from rolltape.record.writing.recover import Recovered, recover
from rolltape.replay import open_run
from rolltape.replay.cli import main
from rolltape.schema import Context, Group, Outcome, RunNotFound, Step, Turn
from rolltape.schema.encoding import row_of
from rolltape.schema.errors import Damaged
from rolltape.schema.frames import HEAD_BYTES
from rolltape.schema.paths import Part, RunPaths, folder_of

APPEND = "rolltape.record.writing.journal:Journal.append"
FRAMES = [*("started", "trace") * 3, "trace", "group", "outcome", "step", "started", "trace"]
"""What `record_two_steps` journals, in order; the last two after the commit of step 0."""


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as server:
        yield server


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    unsynced(monkeypatch)


def acknowledged(told: Path) -> set[str]:
    return set(told.read_text().split()) if told.exists() else set()


def moments() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every moment at which a recording can die, by name."""
    for i, kind in enumerate(FRAMES, 1):
        yield f"before frame {i}, {kind}", {"where": APPEND, "call": i, "when": "before"}
        yield f"after half of frame {i}, {kind}", {"where": APPEND, "call": i, "when": "half"}
    yield from commit_moments()
    clear = "rolltape.record.writing.journal:Journal.clear"
    yield "before the journal is emptied", {"where": clear, "call": 1, "when": "before"}
    yield "after the journal is emptied", {"where": clear, "call": 1, "when": "after"}


def commit_moments() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that `recover` has too."""
    file, put = "rolltape.schema.parquet:HashingFile", "rolltape.record.writing.parts:put_once"
    yield "in the middle of the file", {"where": f"{file}.write", "call": 9, "when": "before"}
    yield "before the file has its name", {"where": f"{file}.publish", "call": 1, "when": "before"}
    yield "between file and commit", {"where": put, "call": 1, "when": "before"}
    yield "after the commit", {"where": put, "call": 1, "when": "after"}


def expect_settled(root: Path, told: set[str], begun: bool, ended: bool = True) -> None:
    """Each trace that was acknowledged is there once; outcomes are kept where the commit had begun."""
    found = dispositions(root)
    records = records_of(root)
    assert told <= found.keys() <= set("abcd")
    assert records.keys() == found.keys()
    assert {n for n in records if records[n] != trace(n, rewards={"ok": 1.0 if n in "ad" else 0.0})} <= {"a"}
    for name, disposition in found.items():
        kept = {"a": "emitted", "b": "emitted", "c": "filtered"}.get(name, "interrupted") if begun else "interrupted"
        assert disposition == kept, name
    total = counts(root)
    assert total["started"] - total["lost"] == len(found)
    result = checked(root)
    assert result.traces == len(found)
    if begun:
        [row] = [r for t in open_run(root).batches() for r in t.to_pylist() if r["trace_id"] == "c"]
        assert (row["reason"], row["handed_reward"]) == ("flat", '{"x":0.5}')
        [first, *_] = open_run(root).all_commits
        assert (first.step.cursor, first.part.step, [g.trace_ids for g in first.groups]) == (
            7 if ended else None,
            0,
            [("a", "b", "c")],
        )
        assert records["a"] == trace("a")


@pytest.mark.parametrize("death", [pytest.param(d, id=name) for name, d in moments()])
def test_a_recording_that_dies_leaves_what_recover_settles(
    tmp_path: Path, children: Children, death: dict[str, Any]
) -> None:
    root, told = tmp_path / "run", tmp_path / "told"
    assert children.run("record_two_steps", root=str(root), acks=str(told), **death) == DIED
    first = recover(root)
    at_frame = death["call"] if death["where"] == APPEND else len(FRAMES)
    began, ended = (at_frame > FRAMES.index(kind) + 1 for kind in ("outcome", "step"))
    expect_settled(root, acknowledged(told), began, ended)
    half = death["when"] == "half"
    assert [f.split(": ")[1].split()[0] for f in first.faults] == (["torn"] if half else [])
    again = recover(root)
    assert not again.anything
    assert not list(root.rglob(".*.tmp"))


def leftovers(children: Children, folder: Path, **death: Any) -> set[str]:
    """A run whose writer died after its last trace, or where `death` says; what was acknowledged."""
    ended = children.run("record_two_steps", root=str(folder / "run"), acks=str(folder / "told"), **death)
    assert ended == (DIED if death else 0)
    return acknowledged(folder / "told")


def recovery_moments() -> Iterator[tuple[str, dict[str, Any]]]:
    for step in (1, 2):
        for name, death in commit_moments():
            yield f"{name} of step {step - 1}", {**death, "call": death["call"] if "write" in death["where"] else step}
    unlink = {"where": "rolltape.record.writing.recover:Path.unlink", "when": "before"}
    yield "before the journal is removed", {**unlink, "call": 3}


@pytest.mark.parametrize("death", [pytest.param(d, id=name) for name, d in recovery_moments()])
def test_a_recovery_that_dies_is_done_again(tmp_path: Path, children: Children, death: dict[str, Any]) -> None:
    """The writer had died between file and commit of step 0; the journal is put back to before, so that two are left."""
    told = leftovers(children, tmp_path, where="rolltape.record.writing.parts:put_once", call=1, when="before")
    root = tmp_path / "run"
    [journal] = (root / "journal").glob("*.journal")
    with journal.open("ab") as file:
        file.write(pack_record("started", {"split": "train", "step": 1, "eval_name": None, "n": 2}))
        head = {"split": "train", "step": 1, "eval_name": None}
        context = at(1, group_index=1, run=open_run(root).run_id)
        file.write(pack_record("trace", head, row_of(trace("d"), context)))
    assert children.run("recover_once", root=str(root), **death) in (DIED, 0)
    recover(root)
    expect_settled(root, told | {"d"}, begun=True)
    assert not recover(root).anything
    assert not list(root.rglob("*.journal"))
    assert not (root / "discarded").exists()


def test_a_recovery_that_dies_is_done_again_by_who_opens_the_run(tmp_path: Path, children: Children) -> None:
    told = leftovers(children, tmp_path)
    put = {"where": "rolltape.record.writing.parts:put_once", "call": 1, "when": "after"}
    assert children.run("recover_once", root=str(tmp_path / "run"), **put) == DIED
    recorder = Recorder.open(tmp_path / "run", resume=True, start_step=2)
    assert recorder.attempt == 1
    expect_settled(tmp_path / "run", told, begun=True)
    record_step(recorder, 2, ["e"])
    recorder.close()
    assert records_of(tmp_path / "run").keys() == set("abcde")
    checked(tmp_path / "run")


# -- power loss


def test_a_journal_that_lost_its_end_to_a_power_cut_gives_every_frame_before_it(
    tmp_path: Path, children: Children
) -> None:
    """Pages that were not synced read as zeros, from any byte on."""
    death = {"where": "rolltape.record.writing.parts:write_parquet", "call": 1, "when": "before"}
    leftovers(children, tmp_path, **death)
    source = tmp_path / "run"
    [journal] = (source / "journal").glob("*.journal")
    data = journal.read_bytes()
    whole = [r for r in read_journal(journal) if isinstance(r, Record)]
    assert [r.kind for r in whole] == FRAMES[:10]
    rng = random.Random(5)
    places = {len(data), 0, *(r.offset for r in whole), *(r.offset + HEAD_BYTES for r in whole)}
    places |= {rng.randrange(len(data)) for _ in range(400 if LONG else 20)}
    for cut in sorted(places):
        root = tmp_path / f"cut{cut}"
        shutil.copytree(source, root)
        (root / "journal" / journal.name).write_bytes(data[:cut] + bytes(len(data) - cut))
        kept = [r for r in whole if r.offset + r.bytes <= cut]
        result = recover(root)
        traces = {r.row.values["trace_id"] for r in kept if r.row is not None}
        assert records_of(root).keys() == traces
        begun = any(r.kind == "outcome" for r in kept)
        assert {d == "interrupted" for d in dispositions(root).values()} <= {not begun}
        assert bool(result.faults) == (cut < len(data))
        assert counts(root)["started"] == sum(r.data.get("n", 0) for r in kept)
        checked(root)
        assert not recover(root).anything
        shutil.rmtree(root)


# -- what is settled how


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A run with step 0 committed, and a journal of nobody's with step 1, not ended: a, b started, a recorded."""
    recorder = Recorder.open(tmp_path / "run")
    record_step(recorder, 0, ["x"])
    recorder.close()
    journal = Journal(RunPaths(tmp_path / "run").journal(0, "gone"))
    journal.append(pack_record("started", place(n=2)))
    journal.append(trace_frame(tmp_path / "run", "a"))
    journal.close()
    return tmp_path / "run"


def place(step: int = 1, **more: Any) -> dict[str, Any]:
    return {"split": "train", "step": step, "eval_name": None, **more}


def trace_frame(root: Path, name: str, step: int = 1, **fields: Any) -> bytes:
    context = Context(run=open_run(root).run_id, step=step, writer="gone")
    return pack_record("trace", place(step), row_of(trace(name, **fields), context))


def lines(result: Recovered) -> dict[str, Any]:
    return {k: v for k, v in result.to_dict().items() if v}


def test_a_run_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"holds no run\.json, so "):
        recover(tmp_path)


def test_a_step_that_did_not_end_is_committed_as_interrupted(dead: Path) -> None:
    result = recover(dead)
    assert result.committed == [{"part": "00000001.0.gone", "split": "train", "traces": 1, "lost": 1}]
    assert dispositions(dead) == {"x": "emitted", "a": "interrupted"}
    [row] = open_run(dead).table(steps=1).to_pylist()
    assert row["reason"] == "the process ended before the step did"
    assert open_run(dead).steps(steps=1)[0].counts == {"started": 2, "interrupted": 1, "lost": 1}
    assert open_run(dead).all_commits[-1].sums["recovered"] is True
    checked(dead)


def test_a_journal_of_a_living_writer_is_left_alone_with_the_files_it_is_writing(dead: Path) -> None:
    living = Journal(RunPaths(dead).journal(1, "living"))
    living.append(trace_frame(dead, "b"))
    half = RunPaths(dead).parquet(Part("train", 1, 1, "living"))
    half.write_bytes(b"PAR1")
    result = recover(dead)
    assert result.alive == [str(living.path)]
    assert [c["part"] for c in result.committed] == ["00000001.0.gone"]
    assert half.exists()
    assert living.in_place()
    assert records_of(dead).keys() == {"x", "a"}
    living.close()


def test_a_second_recovery_at_the_same_time_waits_for_the_first(dead: Path, children: Children) -> None:
    processes = [children.start("recover_once", root=str(dead)) for _ in range(4)]
    assert [children.wait(p) for p in processes] == [0] * 4
    assert records_of(dead).keys() == {"x", "a"}
    assert not recover(dead).anything
    checked(dead)


def test_a_recovery_waits_while_somebody_opens_the_run(dead: Path, children: Children) -> None:
    """Else it could take a file for an orphan that a writer, which it has not seen, is about to commit."""
    with one_at_a_time(RunPaths(dead)):
        process = children.start("recover_once", root=str(dead))
        time.sleep(0.2)
        assert RunPaths(dead).journal(0, "gone").exists()
    assert children.wait(process) == 0
    assert not RunPaths(dead).journal(0, "gone").exists()


def test_what_a_commit_holds_already_is_not_committed_again(dead: Path) -> None:
    recover(dead)
    journal = Journal(RunPaths(dead).journal(0, "gone"))
    journal.append(trace_frame(dead, "a"))
    journal.close()
    result = recover(dead)
    assert (result.known, result.committed) == (1, [])
    assert records_of(dead).keys() == {"x", "a"}


def test_what_came_late_for_a_committed_step_becomes_a_part_of_its_own_once(dead: Path, children: Children) -> None:
    recover(dead)
    for name in ("b", "c"):
        journal = Journal(RunPaths(dead).journal(0, "gone"))
        journal.append(trace_frame(dead, "a"))
        journal.append(trace_frame(dead, name))
        journal.close()
        put = {"where": "rolltape.record.writing.parts:put_once", "call": 1, "when": "after"}
        assert children.run("recover_once", root=str(dead), **put) == DIED
        recover(dead)
    writers = [c.part.writer for c in open_run(dead).commits(steps=1)]
    assert writers == ["gone", "gone-late1", "gone-late2"]
    assert records_of(dead).keys() == set("xabc")
    assert counts(dead)["interrupted"] == 3
    checked(dead)


def test_a_writer_whose_name_begins_with_another_s_keeps_its_own_steps(dead: Path) -> None:
    for name in ("gone-b", "gone-later"):
        journal = Journal(RunPaths(dead).journal(0, name))
        journal.append(trace_frame(dead, name))
        journal.close()
    recover(dead)
    assert records_of(dead).keys() == {"x", "a", "gone-b", "gone-later"}
    assert {c.part.writer for c in open_run(dead).commits(steps=1)} == {"gone", "gone-b", "gone-later"}


def test_the_last_record_of_a_trace_counts(dead: Path) -> None:
    path = RunPaths(dead).journal(0, "gone")
    with path.open("ab") as file:
        file.write(trace_frame(dead, "a", rewards={"ok": 0.25}))
    recover(dead)
    assert records_of(dead)["a"]["rewards"] == {"ok": 0.25}


def test_rows_from_before_their_group_was_scored_are_not_taken_for_the_last_ones(dead: Path) -> None:
    scored = [trace(name, rewards={"ok": 0.25, "first": float(name == "a")}) for name in "abcd"]
    groups = [Group.from_records(scored[i : i + 2], group_index=i, expected_size=2, step=1) for i in (0, 2)]
    with RunPaths(dead).journal(0, "gone").open("ab") as file:
        for name in "abcd":
            file.write(trace_frame(dead, name, rewards={"ok": 0.25}))
        for name in "bcd":  # what came later of a did not fit
            file.write(trace_frame(dead, name, rewards={"ok": 0.25, "first": 0.0}))
        for group in groups:
            file.write(pack_record("group", place(group=group.to_dict())))
    [fault] = recover(dead).faults
    assert "1.0.gone: 1 trace as it was before the group rewards" in fault
    rows = {r["trace_id"]: r for r in open_run(dead).table(steps=1).to_pylist()}
    assert {name: row["reward"] for name, row in rows.items()} == {"a": None, "b": 0.25, "c": 0.25, "d": 0.25}
    assert rows["b"]["problems"] is None
    assert "could not be written" in rows["a"]["problems"][0]
    assert recover(dead).faults == []


def test_a_damaged_journal_is_kept_beside_and_what_reads_back_is_committed(dead: Path) -> None:
    path = RunPaths(dead).journal(0, "gone")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data + trace_frame(dead, "b"))
    result = recover(dead)
    [fault] = result.faults
    assert fault.startswith(f"{path}: corruption of ")
    assert records_of(dead).keys() == {"x", "b"}
    [kept] = path.parent.glob("*.damaged")
    assert kept.read_bytes() == data + trace_frame(dead, "b")
    assert open_run(dead).steps(steps=1)[0].counts == {"started": 2, "interrupted": 1, "lost": 1}
    assert not recover(dead).anything


def test_an_uncommitted_file_gives_what_its_journal_lost(dead: Path) -> None:
    """Also what only the file says of a trace: place, turns, disposition."""
    recorder = Recorder.open(dead, writer="other", resume=True, start_step=1)
    turns = (Turn(weight_version="7", completion_tokens=3, latency=0.5),)
    recorder.started("train", 1, 2)
    for i, name in enumerate(["b", "c"]):
        recorder.add(trace(name), at(1, group_index=4, rollout_index=i, sampling={"top_p": 0.5}, turns=turns))
    commit(recorder, 1, [*emitted("b"), Outcome(trace_id="c", disposition="filtered", reason="flat")])
    recorder.close()
    part = Part("train", 1, recorder.attempt, "other")
    before = open_run(dead).table(steps=1, attempt=recorder.attempt).to_pylist()
    RunPaths(dead).commit(part).unlink()
    journal = Journal(RunPaths(dead).journal(recorder.attempt, "other"))
    journal.append(pack_record("started", place(n=2)))
    journal.close()
    recover(dead)
    after = open_run(dead).table(steps=1, attempt=recorder.attempt).to_pylist()
    assert after == before
    assert [r["disposition"] for r in after] == ["emitted", "filtered"]
    checked(dead)


def test_an_uncommitted_file_that_cannot_be_read_is_named_and_made_again_from_the_journal(dead: Path) -> None:
    file = RunPaths(dead).parquet(Part("train", 1, 0, "gone"))
    file.write_bytes(b"PAR1 and half of something")
    result = recover(dead)
    [fault] = result.faults
    assert "no readable Parquet file" in fault
    assert records_of(dead).keys() == {"x", "a"}
    checked(dead)


def test_files_that_nothing_explains_are_moved_aside_never_deleted(dead: Path) -> None:
    paths = RunPaths(dead)
    orphan = paths.parquet(Part("train", 7, 0, "main"))
    shutil.copy(paths.parquet(Part("train", 0, 0, "main")), orphan)
    stranger = paths.root / "traces" / "train" / "part-0.parquet"
    for content in (b"one", b"two"):
        stranger.write_bytes(content)
        recover(dead)
    moved = sorted(p.name for p in (dead / "discarded" / "train").iterdir())
    assert len(moved) == 3
    assert {"00000007.0.main.parquet", "part-0.parquet"} < set(moved)
    assert {p.read_bytes() for p in (dead / "discarded").rglob("part-0*")} == {b"one", b"two"}
    assert records_of(dead).keys() == {"x", "a"}
    checked(dead)


def test_temporary_files_of_dead_writers_are_removed(dead: Path) -> None:
    for name in (".a.parquet.4194301.0123abcd.tmp", ".b.json.4194301.0123abcd.tmp"):
        (dead / "traces" / "train" / name).write_bytes(b"half")
    mine = dead / "traces" / "train" / ".notes.tmp"
    mine.write_text("not ours")
    assert len(recover(dead).removed) == 3
    assert list(dead.rglob("*.tmp")) == [mine]


@pytest.mark.parametrize("what", ["commit", "file"])
def test_a_commit_that_cannot_be_read_keeps_its_journal_and_nothing_else(dead: Path, what: str) -> None:
    part = Part("train", 0, 0, "main")
    path = RunPaths(dead).commit(part) if what == "commit" else RunPaths(dead).parquet(part)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    journal = Journal(RunPaths(dead).journal(0, "main"))
    journal.append(trace_frame(dead, "x", step=0))
    journal.append(trace_frame(dead, "y", step=0))
    journal.append(trace_frame(dead, "z", step=3))
    journal.close()
    for _ in range(2):
        result = recover(dead)
        assert any("is kept until the part can be read" in f for f in result.faults)
        assert journal.path.exists()
    recorder = Recorder.open(dead, resume=True, start_step=4)
    record_step(recorder, 4, ["w"])
    recorder.close()
    if what == "commit":
        with pytest.raises(Damaged):
            open_run(dead).table(steps=0)
    path.write_bytes(good)
    assert recover(dead).faults == []
    assert not journal.path.exists()
    assert records_of(dead).keys() == set("xyzaw")


def test_a_disk_that_is_full_keeps_the_journal_for_later(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RunPaths(dead).parquet(Part("train", 1, 0, "gone"))
    file.write_bytes(b"PAR1 and half of something")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rolltape.record.writing.parts.write_parquet", full)
        result = recover(dead)
        assert any("cannot be settled now" in fault for fault in result.faults)
        assert (result.committed, result.discarded) == ([], [])
        assert file.exists(), "the journal explains it"
        Recorder.open(dead, resume=True, start_step=2).close()
    assert len(recover(dead).committed) == 1
    assert records_of(dead).keys() == {"x", "a"}


def test_an_evaluation_is_settled_under_its_name(dead: Path) -> None:
    journal = Journal(RunPaths(dead).journal(0, "gone2"))
    head = {"split": "eval", "step": 1, "eval_name": "math 500"}
    context = Context(run=open_run(dead).run_id, split="eval", eval_name="math 500", step=1, writer="gone2")
    journal.append(pack_record("trace", head, row_of(trace("e"), context)))
    journal.close()
    recover(dead)
    [part] = open_run(dead).commits(folder_of("eval", "math 500"))
    assert (part.step.eval_name, part.step.counts) == ("math 500", {"started": 1, "interrupted": 1, "lost": 0})
    checked(dead)


def test_recomputed_logprobs_and_removals_survive_a_crash(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "run")
    for name in "ab":
        recorder.add(trace(name), at(0))
    outcomes = [
        Outcome(trace_id="a", disposition="emitted", logprobs=np.array([0.1, np.nan, -3.5], np.float32)),
        Outcome(
            trace_id="b", disposition="emitted", remove_sample=(True,), handed_reward=0.5, reason="odd \ud800 text"
        ),
    ]
    copy = tmp_path / "copy"
    real = recorder._write

    def write(pending: Any) -> Any:
        shutil.copytree(tmp_path / "run", copy)
        return real(pending)

    recorder._write = write  # type: ignore[method-assign]
    recorder.commit_now("train", 0, groups=[], outcomes=outcomes, record=Step())
    recorder.close()
    recover(copy)
    expected = open_run(tmp_path / "run").table()
    assert same(open_run(copy).table().to_pylist(), expected.to_pylist())
    columns = ["recomputed_logprobs", "remove_sample", "handed_reward", "reason"]
    a, b = expected.select(columns).to_pylist()
    assert np.array(a["recomputed_logprobs"], np.float32).tobytes() == outcomes[0].logprobs.tobytes()  # type: ignore[union-attr]
    assert (b["remove_sample"], b["handed_reward"], b["reason"]) == ([True], "0.5", "odd \ufffd text")


# -- the command


def rolltape(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["rolltape", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), *capsys.readouterr()


def test_the_command_says_what_it_settled(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = RunPaths(dead).journal(0, "gone")
    assert rolltape(capsys, "recover", str(dead)) == (
        0,
        f"committed train 00000001.0.gone: 1 trace, 1 lost\nremoved: {journal}\n",
        "",
    )
    assert rolltape(capsys, "recover", str(dead)) == (0, "nothing to settle\n", "")


def test_the_command_names_what_it_cannot_read(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = RunPaths(dead).journal(0, "gone")
    journal.write_bytes(journal.read_bytes() + b"junk")
    (dead / "traces" / "train" / "lost.parquet").write_bytes(b"")
    living = Journal(RunPaths(dead).journal(1, "living"))
    code, text, _ = rolltape(capsys, "recover", str(dead))
    assert code == 1
    assert f"left alone, its writer lives: {living.path}" in text
    assert f"problem: {journal}: corruption of 4 bytes at byte" in text
    living.close()
    code, text, _ = rolltape(capsys, "recover", "--json", str(dead))
    assert code == 0
    said = json.loads(text)
    assert said["discarded"] == [str(dead / "discarded" / "train" / "lost.parquet")]
    assert said["committed"] == []


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = rolltape(capsys, "recover", str(tmp_path))
    assert code == 2
    assert "holds no run.json, so " in error
