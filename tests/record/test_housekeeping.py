"""Recording and recovering beside compaction and pruning."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from record_build import at, checked, commit, dispositions, emitted, record_step, records_of, trace

from rolltape.record.recorder import Recorder
from rolltape.record.writing.recover import recover
from rolltape.record.writing.resume import after_everything
from rolltape.replay.housekeeping.compact import compact
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.run import open_run
from rolltape.schema import BadInput, RunConflict


def test_a_run_is_compacted_while_it_is_recorded(tmp_path: Path) -> None:
    root = tmp_path / "run"
    recorder = Recorder.open(root)
    for step in range(4):
        record_step(recorder, step, [f"{step}a", f"{step}b"])
    recorder.started("train", 4)
    recorder.add(trace("4a"), at(4))
    assert len(compact(open_run(root)).merged) == 1
    with pytest.raises(RunConflict, match="committed step 3"):
        record_step(recorder, 3, [])
    commit(recorder, 4, emitted("4a"))
    record_step(recorder, 5, ["5a"])
    recorder.close()
    assert checked(root).traces == 10
    assert len(records_of(open_run(root))) == 10


def test_what_is_being_recorded_is_not_pruned(tmp_path: Path) -> None:
    root = tmp_path / "run"
    recorder = Recorder.open(root)
    record_step(recorder, 0, ["a"])
    recorder.close()
    again = Recorder.open(root, resume=True, start_step=0)
    record_step(again, 0, ["b"])
    done = prune(open_run(root), Wish(superseded=True, tokens=True))
    assert done.plan.kept == ["attempt 1 is being recorded: its files are left alone."]
    assert set(dispositions(root)) == {"b"}
    assert open_run(root).table("train")["token_ids"].null_count == 0
    again.close()
    prune(open_run(root), Wish(tokens=True))
    assert open_run(root).table("train")["token_ids"].null_count == 1


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A run whose writer died after the commit of step 0 and before its journal was emptied; step 0 and 1 are compacted."""
    root = tmp_path / "run"
    recorder = Recorder.open(root)
    for name in "ab":
        recorder.started("train", 0)
        recorder.add(trace(name), at(0))
    journal = root / "journal" / "0.main.journal"
    shutil.copy(journal, tmp_path / "kept")
    commit(recorder, 0, emitted("a", "b"))
    record_step(recorder, 1, ["c"])
    recorder.close()
    assert len(compact(open_run(root)).merged) == 1
    shutil.copy(tmp_path / "kept", journal)
    return root


def test_recovery_knows_what_lies_in_a_rewritten_file(left: Path) -> None:
    with pytest.raises(RunConflict, match="rolltape recover"):
        prune(open_run(left), Wish(replaced=True))
    for folder, ending in (("commits", "json"), ("traces", "parquet")):
        (left / folder / "train" / f"00000000.0.main.{ending}").unlink()
    found = recover(left)
    assert (found.known, found.committed, found.faults) == (2, [], [])
    assert set(records_of(open_run(left))) == {"a", "b", "c"}
    assert prune(open_run(left), Wish(replaced=True)).removed == 2
    checked(left)


def test_what_comes_late_for_a_rewritten_part_becomes_one_of_its_own(left: Path) -> None:
    (left.parent / "other").mkdir()
    shutil.copy(left / "run.json", left.parent / "other")
    recorder = Recorder.open(left.parent / "other", resume=True)
    for name in "abx":
        recorder.add(trace(name), at(0))
    shutil.copy(left.parent / "other" / "journal" / "0.main.journal", left / "journal" / "0.main.journal")
    found = recover(left)
    assert [part["part"] for part in found.committed] == ["00000000.0.main-late1"]
    assert dispositions(left) == {"a": "emitted", "b": "emitted", "c": "emitted", "x": "interrupted"}
    recorder.close()


def test_recovery_waits_for_a_rewrite_that_cannot_be_read(left: Path) -> None:
    [path] = (left / "commits" / "train").glob("*rewrite*")
    data = path.read_bytes()
    path.write_bytes(data[:100])
    found = recover(left)
    assert found.committed == []
    assert "is kept until the part can be read" in found.faults[0]
    path.write_bytes(data)
    assert recover(left).known == 2


def test_recovery_leaves_the_file_of_a_compaction_at_work(left: Path) -> None:
    [commit_] = (left / "commits" / "train").glob("*rewrite*")
    commit_.unlink()
    found = recover(left)
    assert found.discarded == []
    assert compact(open_run(left)).merged


def test_a_writer_goes_on_behind_what_was_pruned(tmp_path: Path) -> None:
    root = tmp_path / "run"
    recorder = Recorder.open(root)
    for step in range(3):
        record_step(recorder, step, [f"{step}"])
    recorder.close()
    prune(open_run(root), Wish(before=2))
    assert after_everything(open_run(root)) == 3
    again = Recorder.open(root, resume=True, start_step=None)
    record_step(again, 3, ["3"])
    again.close()
    assert checked(root).traces == 4


def test_a_writer_is_not_named_like_a_rewritten_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="rewritten files"):
        Recorder.open(tmp_path / "run", writer="rewrite-00000003-01234567")
