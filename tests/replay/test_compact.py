"""Merging small files: no row changes, each step can be read on its own, and a kill at any moment does no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from replay_build import group, put_attempt, put_run, put_step, turn
from typer.testing import CliRunner

from rolltape.replay import open_run
from rolltape.replay.batches import batches
from rolltape.replay.cli import app
from rolltape.replay.housekeeping import rewrite
from rolltape.replay.housekeeping.compact import MOST_PARTS, compact, plan
from rolltape.replay.housekeeping.rewrite import same_rows, units
from rolltape.replay.listing.runs import look_at
from rolltape.replay.run import Run
from rolltape.replay.verification.verify import verify
from rolltape.schema import BadInput, Damaged, RunConflict, UnsupportedVersion, decode
from rolltape.schema.commits import Commit
from rolltape.schema.fields import TRACE
from rolltape.schema.paths import Part, RunPaths, check_name, part_of
from rolltape.schema.rewrites import row_groups_of
from rolltape.schema.storage import place

KILL_POINTS = Path(__file__).parent / "kill_points.py"


def steps(root: Path, numbers: range, attempt: int = 0, size: int = 2, **more: Any) -> None:
    """Steps of one group each."""
    for step in numbers:
        records = [turn(f"{attempt}-{step}-{i}", reward=float(i), idx=step) for i in range(size)]
        put_step(root, step, records, groups=[group(records, step)], first=step * size, attempt=attempt, **more)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six steps, the last two recorded again; an evaluation; a second writer in step 0."""
    root = put_run(tmp_path / "run")
    steps(root, range(6))
    records = [turn("other", idx=90)]
    put_step(root, 0, records, groups=[group(records, 90)], writer="other", first=9000)
    records = [turn("held out", idx=7)]
    put_step(root, 3, records, split="eval", fates={"held out": "eval"}, batch=None, digest_handed=None)
    put_attempt(root, 1, start_step=4)
    steps(root, range(4, 7), attempt=1)
    return root


def rows(run: Run, **which: Any) -> pa.Table:
    return run.table("train", **which).combine_chunks()


def files(root: Path, folder: str = "traces") -> set[str]:
    return {str(p.relative_to(root / folder)) for p in (root / folder).rglob("*") if p.is_file()}


def test_files_of_consecutive_steps_and_writers_become_one(root: Path) -> None:
    before = files(root)
    done = compact(open_run(root))
    assert [(m.split, m.attempt, m.first_step, m.last_step, m.files, m.rows) for m in done.merged] == [
        ("train", 0, 0, 3, 5, 9),
        ("train", 1, 4, 6, 3, 6),
    ]
    assert done.skipped == []
    assert before < files(root), "the files that were merged stay"
    assert sorted(Path(m.into or "").name.split("-")[0] for m in done.merged) == [
        "00000000.0.rewrite",
        "00000004.1.rewrite",
    ]
    assert all(m.bytes_after is not None and m.bytes_after < m.bytes_before for m in done.merged)


def test_nothing_that_can_be_read_changes(root: Path) -> None:
    before = open_run(root)
    table, groups, records, commits = rows(before), before.groups("train"), before.steps("train"), before.all_commits
    compact(before)
    after = open_run(root)
    assert same_rows(rows(after), table)
    assert (after.groups("train"), after.steps("train"), after.all_commits) == (groups, records, commits)
    assert decode(rows(after).select(TRACE.arrow.names)) == decode(table.select(TRACE.arrow.names))
    for step in range(7):
        assert same_rows(rows(after, steps=step), rows(before, steps=step))
    for attempt in (0, 1):
        assert same_rows(rows(after, attempt=attempt), rows(before, attempt=attempt))
    assert after.table("eval") == before.table("eval")
    assert [b.groups for b in batches(after, 2)] == [b.groups for b in batches(before, 2)]
    assert after.sql("select sum(reward), count(*), max(step) from traces").fetchall() == [(8.0, 15, 6)]
    everything = "select step, attempt, writer, trace_id, superseded from traces order by all"
    old = before.sql(everything, all_attempts=True).fetchall()
    assert after.sql(everything, all_attempts=True).fetchall() == old
    assert after.sql("select trace_id from traces where step = 1 order by 1").fetchall() == [("0-1-0",), ("0-1-1",)]
    assert (look_at(root, "x").state, look_at(root, "x").traces) == ("settled", 16)


def test_a_compacted_run_verifies_and_its_digests_hold(root: Path) -> None:
    before = verify(open_run(root))
    compact(open_run(root))
    after = verify(open_run(root))
    assert before.findings == after.findings == []
    assert (after.parts, after.traces, after.digests) == (before.parts, before.traces, before.digests)
    assert [n.split(" (")[0] for n in after.notes] == ["8 files"]


def test_only_the_row_groups_of_a_step_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compact(open_run(root))
    run = open_run(root)
    read: list[int] = []
    real = rewrite.read_batches.__globals__["pq"].ParquetFile.read_row_group

    def watched(self: Any, i: int, **rest: Any) -> pa.Table:
        read.append(i)
        return real(self, i, **rest)

    monkeypatch.setattr("pyarrow.parquet.ParquetFile.read_row_group", watched)
    assert run.table("train", steps=2)["step"].to_pylist() == [2, 2]
    assert len(read) == 1


def test_a_run_that_goes_on_is_compacted_again(root: Path) -> None:
    compact(open_run(root))
    assert compact(open_run(root)).merged == []
    steps(root, range(7, 9), attempt=1)
    expected = rows(open_run(root))
    done = compact(open_run(root))
    assert [(m.first_step, m.last_step, m.files) for m in done.merged] == [(4, 8, 3)]
    run = open_run(root)
    assert same_rows(rows(run), expected)
    assert verify(run).findings == []
    assert len(run.contents.rewrites) == 2
    second = next(r for r in run.contents.rewrites if r.part.step == 4)
    assert len(second.replaces) == 6, "the first file, and what that one stood for"


def test_a_part_without_rows_keeps_its_place(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    steps(root, range(2))
    put_step(root, 2, [], groups=[])
    steps(root, range(3, 4))
    compact(open_run(root))
    run = open_run(root)
    assert [len(run.held(c).row_groups or ()) for c in run.all_commits] == [1, 1, 0, 1]
    assert run.table("train", steps=2).num_rows == 0
    assert run.table("train", steps=3)["trace_id"].to_pylist() == ["0-3-0", "0-3-1"]
    assert verify(run).findings == []


def test_values_are_compared_bit_by_bit(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    other_nan = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0]
    values = [float("nan"), float(other_nan), -0.0, float("inf")]
    for step, value in enumerate(values):
        records = [turn(f"{step}", reward=value, idx=step)]
        put_step(root, step, records, groups=[group(records, step)], first=step)
    before = rows(open_run(root))
    compact(open_run(root))
    after = rows(open_run(root))
    assert same_rows(after, before)
    bits = [np.asarray(t["reward"]).view(np.uint64).tolist() for t in (before, after)]
    assert bits[0] == bits[1]
    assert bits[0][1] == 0x7FF8000000000123
    i = before.column_names.index("reward")
    for changed in (np.array([0.0, *values[1:]]), np.array([values[0], values[0], 0.0, values[3]])):
        assert not same_rows(before, before.set_column(i, "reward", pa.array(changed)))
    assert not same_rows(before, before.slice(1))
    nested = before.column_names.index("logprobs")
    other = pa.array(
        [[None] * 3 + [-0.25, -0.5, -0.75]] * 3 + [[None] * 3 + [-0.25, -0.5, -0.5]], pa.list_(pa.float32())
    )
    assert not same_rows(before, before.set_column(nested, before.schema.field(nested), other))


# -- what is merged


def test_a_target_and_a_number_of_parts_bound_a_file(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    steps(root, range(9), size=1)
    run = open_run(root)
    [unit, *_] = units(run)
    small = unit.file.bytes
    assert [len(batch) for batch in plan(run, small * 3 + 10)] == [4, 4]
    assert plan(run, small) == [], "half of the target and more stays as it is"
    assert [len(batch) for batch in plan(run)] == [9]
    assert MOST_PARTS == 128
    with pytest.raises(BadInput, match="expected 1 or more"):
        plan(run, 0)


def test_parts_that_were_taken_back_are_left_for_prune(root: Path) -> None:
    run = open_run(root)
    superseded = {run.held(c).path.stem for c in run.all_commits if run.superseded(c.part)}
    assert superseded == {"00000004.0.main", "00000005.0.main"}
    compact(run)
    assert {s for r in open_run(root).contents.rewrites for s in r.replaces}.isdisjoint(superseded)


def test_a_damaged_file_is_named_and_left_alone(root: Path) -> None:
    path = root / "traces" / "train" / "00000002.0.main.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(bytes(data))
    done = compact(open_run(root))
    assert [m.first_step for m in done.merged] == [4]
    assert [str(path) in why for why in done.skipped] == [True]
    assert [f.code for f in verify(open_run(root)).findings] == ["file"]
    result = CliRunner().invoke(app, ["compact", str(root)])
    assert result.exit_code == 1
    assert f"left as it is: {path}" in result.output


def test_a_pipe_in_place_of_a_file_is_named_and_not_read(root: Path) -> None:
    path = root / "traces" / "train" / "00000002.0.main.parquet"
    path.unlink()
    os.mkfifo(path)
    done = compact(open_run(root))
    assert [m.first_step for m in done.merged] == [4]
    assert [f"{path}: 0 bytes, but " in why for why in done.skipped] == [True]
    path.unlink()
    assert ["is missing" in why for why in compact(open_run(root)).skipped] == [True]


def test_a_file_that_does_not_read_back_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, table = files(root), rows(open_run(root))
    monkeypatch.setattr(rewrite, "same_rows", lambda _a, _b: False)
    done = compact(open_run(root))
    assert (len(done.merged), len(done.skipped)) == (0, 2)
    assert "do not read back" in done.skipped[0]
    assert files(root) == before
    assert same_rows(rows(open_run(root)), table)


def test_row_groups_that_hold_two_parts_are_refused() -> None:
    assert row_groups_of([2, 0, 3], [2, 1, 2], "x") == [range(1), range(1, 1), range(1, 3)]
    for lengths in ([3, 2], [2, 3, 1], [2]):
        with pytest.raises(Damaged, match=r"x: it"):
            row_groups_of([2, 0, 3], lengths, "x")


# -- at any moment


def test_a_kill_at_any_moment_leaves_a_run_that_reads_right_and_can_be_compacted(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    steps(root, range(3), size=1)
    expected = rows(open_run(root))
    (tmp_path / "killed").mkdir()
    subprocess.run([sys.executable, str(KILL_POINTS), str(root), str(tmp_path / "killed"), "compact"], check=True)
    copies = sorted((tmp_path / "killed").iterdir(), key=lambda p: int(p.name))
    assert len(copies) > 6
    seen = []
    for copy in copies:
        run = open_run(copy)
        assert same_rows(rows(run), expected), copy
        assert {f.code for f in verify(run).findings} <= {"uncommitted"}
        seen.append(len(run.contents.rewrites))
        compact(run)
        again = open_run(copy)
        assert len(again.contents.rewrites) == 1
        assert same_rows(rows(again), expected)
        assert verify(again).findings == []
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_a_reader_at_work_is_not_disturbed(root: Path) -> None:
    reader = open_run(root)
    batches_ = reader.batches("train")
    first = next(batches_)
    compact(open_run(root))
    found = pa.concat_tables([first, *batches_]).combine_chunks()
    assert same_rows(found, rows(open_run(root)))
    for path in (root / "traces" / "train").glob("*.main.parquet"):  # as prune does
        path.unlink()
        (root / "commits" / "train" / f"{path.stem}.json").unlink()
    assert same_rows(rows(reader), found.filter(pa.array([True] * found.num_rows)))


def test_one_process_at_a_time_compacts(root: Path) -> None:
    run = open_run(root)
    with rewrite.alone(run), pytest.raises(RunConflict, match="compacted or pruned at this moment"):
        compact(run)


def test_a_part_in_two_rewritten_files_is_read_once(root: Path) -> None:
    """As two machines leave it that compact a run in an object store at once."""
    expected = rows(open_run(root))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rolltape.replay.housekeeping.rewrite.rewrite_part",
            lambda _parts, _work: Part("train", 0, 0, "rewrite-00000003-ffffffff"),
        )
        rewrite.rewrite(open_run(root), rewrite.Task(units=plan(open_run(root))[0]))
    stale = open_run(root)
    for name in ("commits", "traces"):
        [mine] = (root / name / "train").glob("*ffffffff*")
        mine.rename(mine.with_name("hidden"))
    compact(open_run(root))
    for name, ending in (("commits", "json"), ("traces", "parquet")):
        (root / name / "train" / "hidden").rename(
            root / name / "train" / f"00000000.0.rewrite-00000003-ffffffff.{ending}"
        )
    run = open_run(root)
    assert len(run.contents.rewrites) == 3
    assert same_rows(rows(run), expected)
    assert same_rows(rows(stale), expected)
    assert verify(run).findings == []


def test_a_part_that_is_put_again_after_it_was_rewritten_is_not_read_twice(root: Path) -> None:
    """As a writer does that was not told its commit had arrived."""
    commit, file = (
        root / n / "train" / f"00000001.0.main.{e}" for n, e in (("commits", "json"), ("traces", "parquet"))
    )
    kept = commit.read_bytes(), file.read_bytes()
    compact(open_run(root))
    expected = rows(open_run(root))
    commit.unlink()
    file.unlink()
    assert same_rows(rows(open_run(root)), expected)
    commit.write_bytes(kept[0])
    file.write_bytes(kept[1])
    assert same_rows(rows(open_run(root)), expected)


# -- damage and versions


def test_a_rewrite_that_cannot_be_read_is_refused_for_the_steps_it_may_hold(root: Path) -> None:
    compact(open_run(root))
    [path] = (root / "commits" / "train").glob("00000000.0.rewrite-*")
    path.write_bytes(path.read_bytes().replace(b'"rows"', b'"rowz"', 1))
    run = open_run(root)
    with pytest.raises(Damaged, match="checksum does not fit"):
        run.table("train")
    with pytest.raises(Damaged):
        run.table("train", steps=3)
    assert run.table("train", steps=5).num_rows == 2
    assert run.table("train", attempt=1).num_rows == 6
    assert [f.code for f in verify(run).errors] == ["commit"]


def test_bytes_of_a_rewritten_file_that_changed_are_found_once(root: Path) -> None:
    compact(open_run(root))
    [path] = (root / "traces" / "train").glob("00000000.0.rewrite-*")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))
    found = verify(open_run(root)).errors
    assert [(f.code, f.file) for f in found] == [("file", str(path))]
    path.unlink()
    assert [f.code for f in verify(open_run(root)).errors] == ["file"]
    assert look_at(root, "x").state == "damaged"


def test_a_reader_of_schema_1_is_refused(root: Path) -> None:
    """It takes the rewrite for the commit of its first step, and would otherwise read steps twice, or not at all."""
    compact(open_run(root))
    [path] = (root / "commits" / "train").glob("00000000.0.rewrite-*")
    part = part_of(path)
    assert part is not None
    assert (part.split, part.step, part.attempt) == ("train", 0, 0)
    with pytest.raises(
        UnsupportedVersion, match=r"schema version 2.0 was found, this rolltape knows 1.0; install a newer"
    ):
        Commit.read(path)


def test_a_writer_may_not_be_named_like_a_rewritten_file() -> None:
    with pytest.raises(BadInput, match="rewritten files"):
        check_name("rewrite-00000003-ffffffff", "writer")
    assert check_name("rewrite-mine", "writer")


# -- in a store, and the command


def test_a_run_in_a_store_is_compacted(root: Path, bucket: str) -> None:
    url = f"{bucket}/runs/one"
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        target: Any = place(f"{url}/{file.relative_to(root)}")
        target.put(file.read_bytes())
    expected = rows(open_run(root))
    done = compact(open_run(url))
    assert len(done.merged) == 2
    run = open_run(url)
    assert same_rows(rows(run), expected)
    assert rows(run, steps=2)["trace_id"].to_pylist() == ["0-2-0", "0-2-1"]
    assert verify(run).findings == []
    assert run.sql("select count(*) from traces where step = 6").fetchall() == [(2,)]
    assert not any(RunPaths.of(run.paths.root, run.run_id).here.parent.rglob("*.tmp"))


def test_the_command_says_what_it_did(root: Path) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["compact", str(root), *words])

    before = files(root)
    planned = call("--dry-run")
    assert planned.exit_code == 0
    assert "would be merged" in planned.output
    assert files(root) == before
    assert json.loads(call("--dry-run", "--json").output)["merged"][0]["into"] is None
    done = call()
    assert done.exit_code == 0
    assert "8 files" in done.output
    assert call().output == "nothing to merge.\n"
    assert call("--size", "0").exit_code == 2
    assert isinstance(CliRunner().invoke(app, ["compact", str(root) + "-not"]).exception, FileNotFoundError)


def test_a_file_that_goes_while_it_is_being_opened_is_found_where_it_went(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_run(root)
    expected = reader.table("train", steps=1)
    compact(open_run(root))
    path = root / "traces" / "train" / "00000001.0.main.parquet"
    real = Run.there

    def pruned_after_a_look(self: Run, commit: Commit) -> Any:
        held = real(self, commit)
        if held.path == path:
            path.unlink()
        return held

    monkeypatch.setattr(Run, "there", pruned_after_a_look)
    assert reader.table("train", steps=1) == expected
    assert not path.exists()
