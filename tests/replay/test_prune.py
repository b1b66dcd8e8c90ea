"""Removing what is no longer wanted: what goes, what stays, what can be proved afterwards, and a kill at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from replay_build import group, put_attempt, put_run, put_step, turn
from typer.testing import CliRunner

from rolltape.replay import open_run
from rolltape.replay.batches import batches
from rolltape.replay.cli import app
from rolltape.replay.housekeeping.compact import compact
from rolltape.replay.housekeeping.prune import Item, Wish, plan, prune
from rolltape.replay.housekeeping.pruned import CONTENT, TOKENS, spans
from rolltape.replay.housekeeping.rewrite import alone, same_rows
from rolltape.replay.run import Run
from rolltape.replay.verification.expect import Expectations
from rolltape.replay.verification.verify import verify
from rolltape.schema import ROW, BadInput, Damaged, RunConflict, decode
from rolltape.schema.scores import SCORES
from rolltape.schema.storage import place

KILL_POINTS = Path(__file__).parent / "kill_points.py"


def steps(root: Path, numbers: range, attempt: int = 0, size: int = 2) -> None:
    """Steps of one group each."""
    for step in numbers:
        records = [turn(f"{attempt}-{step}-{i}", reward=float(i), idx=step) for i in range(size)]
        put_step(root, step, records, groups=[group(records, step)], first=step * size, attempt=attempt)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five steps; of the last two, one was recorded again by a second attempt, and one was not yet."""
    root = put_run(tmp_path / "run")
    steps(root, range(5))
    put_attempt(root, 1, start_step=3)
    steps(root, range(3, 4), attempt=1)
    return root


def rows(run: Run, **which: Any) -> pa.Table:
    return run.table("train", **which).combine_chunks()


def files(root: Path) -> set[str]:
    return {
        str(p.relative_to(root))
        for p in root.rglob("*")
        if p.is_file() and p.parent.parent.name in ("traces", "commits")
    }


def without(table: pa.Table, names: frozenset[str]) -> pa.Table:
    """`table` with null in the columns of `names`."""
    for name in names & set(table.column_names):
        i = table.column_names.index(name)
        table = table.set_column(i, table.schema.field(i), pa.nulls(table.num_rows, table.schema.field(i).type))
    return table


# -- taken back


def test_parts_that_were_recorded_again_go(root: Path) -> None:
    before, expected = files(root), rows(open_run(root))
    done = prune(open_run(root), Wish(superseded=True))
    assert before - files(root) == {"traces/train/00000003.0.main.parquet", "commits/train/00000003.0.main.json"}
    assert done.removed == 2
    [item] = done.plan.items
    assert (item.what, item.files, item.rows) == ("train, attempt 0: step 3, recorded again since", 1, 2)
    assert done.plan.kept == ["step 4 of older attempts: kept, for no newer attempt has recorded them again yet."]
    run = open_run(root)
    assert same_rows(rows(run), expected)
    assert [c.part.step for c in run.all_commits] == [0, 1, 2, 3, 4]
    assert run.table("train", steps=4, attempt=0).num_rows == 2
    with pytest.raises(BadInput, match="step 3 of 'train' was dropped by `rolltape prune`"):
        run.table("train", steps=3, attempt=0)


def test_verify_says_what_nothing_can_be_said_of_any_more(root: Path) -> None:
    prune(open_run(root), Wish(superseded=True))
    result = verify(open_run(root))
    assert result.findings == []
    assert result.notes == [
        "train: 1 part that newer attempts took back, pruned (2 traces of step 3, attempt 0); nothing can be said of them "
        "any more."
    ]
    assert prune(open_run(root), Wish(superseded=True)).removed == 0


def test_a_part_that_was_merged_and_then_taken_back_goes_out_of_its_file(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    steps(root, range(4))
    compact(open_run(root))
    put_attempt(root, 1, start_step=2)
    steps(root, range(2, 4), attempt=1)
    expected = rows(open_run(root))
    done = prune(open_run(root), Wish(superseded=True))
    assert {i.what.split(": ")[1] for i in done.plan.items} == {
        "steps 2 to 3, recorded again since",
        "files behind these that were rewritten",
    }
    run = open_run(root)
    assert same_rows(rows(run), expected)
    assert [(c.part.step, c.part.attempt) for c in run.all_commits] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    [made] = run.contents.rewrites
    assert made.file is not None
    assert made.file.rows == 4
    assert verify(run).findings == []
    assert sum(f.startswith("traces/") for f in files(root)) == 3


def test_what_a_missing_newer_recording_stands_for_is_not_removed(root: Path) -> None:
    before = files(root)
    (root / "traces" / "train" / "00000003.1.main.parquet").unlink()
    with pytest.raises(Damaged, match="is missing"):
        prune(open_run(root), Wish(superseded=True))
    assert len(before - files(root)) == 1


# -- merged


def test_files_that_were_merged_go(root: Path) -> None:
    expected = rows(open_run(root))
    compact(open_run(root))
    planned = plan(open_run(root), Wish(replaced=True))
    done = prune(open_run(root), Wish(replaced=True))
    assert done.plan.items == planned.items
    assert done.removed == sum(i.files for i in planned.items) == 6
    assert done.bytes_before - done.bytes_after == sum(i.bytes for i in planned.items)
    run = open_run(root)
    assert same_rows(rows(run), expected)
    result = verify(run)
    assert (result.findings, result.notes, result.digests) == ([], [], 4)
    assert "00000000.0.main" not in {p.stem for p in (root / "traces" / "train").iterdir()}


def test_files_stay_while_the_one_that_stands_for_them_is_not_whole(root: Path) -> None:
    compact(open_run(root))
    [path] = (root / "traces" / "train").glob("*rewrite*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    before = files(root)
    done = prune(open_run(root), Wish(replaced=True))
    assert files(root) == before
    assert "is not what was committed, so the files it stands for are kept" in done.skipped[0]
    path.unlink()
    os.mkfifo(path)  # reading it would not end
    assert prune(open_run(root), Wish(replaced=True)).skipped == done.skipped
    assert CliRunner().invoke(app, ["prune", str(root), "--replaced", "--yes"]).exit_code == 1


def test_what_a_killed_compaction_left_goes(root: Path) -> None:
    compact(open_run(root))
    [commit] = (root / "commits" / "train").glob("*rewrite*")
    commit.unlink()
    assert [f.code for f in verify(open_run(root)).findings] == ["uncommitted"]
    done = prune(open_run(root), Wish(replaced=True))
    assert [i.what for i in done.plan.items] == ["what a compaction left that was killed"]
    assert done.removed == 1
    assert verify(open_run(root)).findings == []


# -- columns


def test_token_columns_go_and_everything_else_stays(root: Path) -> None:
    before = rows(open_run(root))
    done = prune(open_run(root), Wish(tokens=True, before=2))
    [item] = done.plan.items
    assert item.what == "train, attempt 0: token ids, masks and log-probs of steps 0 to 1"
    assert (item.files, item.rows) == (2, 4)
    assert item.bytes > 0
    run = open_run(root)
    assert same_rows(rows(run, steps=[0, 1]), without(before.slice(0, 4), TOKENS))
    assert same_rows(rows(run, steps=[2, 3]), before.slice(4))
    assert {f for f in files(root) if "00000000.0.main" in f or "00000001.0.main" in f} == set()
    assert run.sql("select sum(reward), count(*) from traces where step < 2").fetchall() == [(2.0, 4)]


def test_content_goes_and_the_scores_stay(root: Path) -> None:
    before = rows(open_run(root))
    prune(open_run(root), Wish(before=3))
    run = open_run(root)
    after = rows(run)
    assert same_rows(after.slice(0, 6), without(before.slice(0, 6), CONTENT))
    assert same_rows(after.slice(6), before.slice(6))
    for name in ("trace_id", "task_idx", "reward", "rewards", "metrics", "num_tokens", "disposition", "stop_condition"):
        assert after[name] == before[name]
    assert after["node_content"].slice(0, 6).null_count == 6
    assert [g.rewards for g in run.groups("train")] == [g.rewards for g in open_run(root).groups("train")]


def test_scores_are_the_columns_that_take_a_few_bytes() -> None:
    assert {f.name for f in ROW.fields} - CONTENT == SCORES
    assert {"token_ids", "sampled", "is_content", "logprobs", "recomputed_logprobs"} == TOKENS
    assert TOKENS < CONTENT


@pytest.mark.parametrize("wish", [Wish(tokens=True), Wish(before=9)])
def test_verify_says_what_can_no_longer_be_proved(root: Path, wish: Wish) -> None:
    assert verify(open_run(root)).digests == 4
    prune(open_run(root), wish)
    result = verify(open_run(root))
    assert (result.findings, result.digests, result.parts, result.traces) == ([], 0, 6, 8)
    what = "token ids, masks and log-probs" if wish.tokens else "everything but the scores"
    assert result.notes == [
        f"train: {what} of steps 0 to 4 were pruned; that the rows are what the model sampled, and that they convert to the "
        "Samples that trained, can no longer be proved."
    ]


def test_verify_still_checks_the_groups_of_pruned_steps(root: Path) -> None:
    prune(open_run(root), Wish(tokens=True))
    found = verify(open_run(root), Expectations(group_reward_sum={"ok": 2.0}, group_size=2)).errors
    assert {f.code for f in found} == {"expected_group_reward_sum"}
    assert len(found) == 4


def test_what_was_pruned_is_not_converted(root: Path, tmp_path: Path) -> None:
    prune(open_run(root), Wish(tokens=True, before=1))
    run = open_run(root)
    assert len(batches(run, 1)) == 1
    with pytest.raises(BadInput, match="the tokens of step 0 of 'train' were pruned"):
        batches(run, 0)
    words = ["convert", str(root), "--out", str(tmp_path / "s.jsonl"), "--step", "0"]
    assert isinstance(CliRunner().invoke(app, words).exception, BadInput)
    assert not (tmp_path / "s.jsonl").exists()


def test_steps_are_pruned_further_and_merged_again(root: Path) -> None:
    before = rows(open_run(root))
    prune(open_run(root), Wish(tokens=True, before=1))
    prune(open_run(root), Wish(tokens=True, before=2))
    assert prune(open_run(root), Wish(tokens=True, before=2)).plan.items == []
    compact(open_run(root))
    prune(open_run(root), Wish(before=1, replaced=True))
    run = open_run(root)
    expected = [
        without(before.slice(0, 2), CONTENT),
        without(before.slice(2, 2), TOKENS),
        before.slice(4),
    ]
    assert same_rows(rows(run), pa.concat_tables(expected).combine_chunks())
    assert [set(run.held(c).pruned) for c in run.commits("train")] == [CONTENT, TOKENS, set(), set()]
    result = verify(run)
    assert (result.findings, len(result.notes)) == ([], 2)


def test_only_the_splits_that_are_named_are_touched(root: Path) -> None:
    records = [turn("held out", idx=7)]
    put_step(root, 0, records, split="eval", fates={"held out": "eval"}, batch=None, digest_handed=None)
    before = open_run(root).table("eval")
    prune(open_run(root), Wish(tokens=True, splits=("train",)))
    run = open_run(root)
    assert run.table("eval") == before
    assert run.table("train")["token_ids"].null_count == 8
    prune(open_run(root), Wish(tokens=True))
    assert open_run(root).table("eval")["token_ids"].null_count == 1


def test_a_damaged_file_keeps_its_columns_and_is_named(root: Path) -> None:
    path = root / "traces" / "train" / "00000001.0.main.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(bytes(data))
    before = files(root)
    done = prune(open_run(root), Wish(tokens=True, before=2))
    assert str(path) in done.skipped[0]
    assert files(root) == before


# -- care


def test_nothing_happens_without_yes(root: Path) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["prune", str(root), *words])

    before = files(root)
    for words in ((), ("--superseded",), ("--tokens", "--before", "2"), ("--before", "2", "--dry-run")):
        result = call(*words)
        assert result.exit_code == 0, result.output
        assert call(*words, "--json").exit_code == 0
    assert files(root) == before
    assert "nothing was removed; the same with --yes does it." in call("--superseded").output
    assert set(json.loads(call("--json").output)["would_free"]) == {"--superseded", "--replaced", "--tokens"}
    assert call("--replaced").output == "nothing to remove.\n"


def test_the_overview_counts_each_byte_once(root: Path) -> None:
    compact(open_run(root))
    freed = json.loads(CliRunner().invoke(app, ["prune", str(root), "--json"]).output)["would_free"]
    everything = plan(open_run(root), Wish(superseded=True, replaced=True, tokens=True))
    assert sum(freed.values()) == sum(i.bytes for i in everything.items)
    assert freed["--replaced"] == sum(i.bytes for i in plan(open_run(root), Wish(replaced=True)).items) > 0
    assert 0 < freed["--tokens"] < freed["--replaced"]
    printed = CliRunner().invoke(app, ["prune", str(root)]).output
    assert "each byte is counted once, for the first option that frees it" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--yes",), "--yes does what other options say"),
        (("--tokens", "--yes", "--dry-run"), "exclude each other"),
        (("--tokens", "--split", "evil"), "split 'evil' was not recorded; recorded are train"),
    ],
)
def test_what_makes_no_sense_is_refused(root: Path, words: tuple[str, ...], says: str) -> None:
    error = CliRunner().invoke(app, ["prune", str(root), *words]).exception
    assert isinstance(error, BadInput)
    assert says in str(error)
    with pytest.raises(BadInput, match="nothing was chosen"):
        prune(open_run(root), Wish())


def test_the_command_says_what_it_did(root: Path) -> None:
    done = CliRunner().invoke(app, ["prune", str(root), "--superseded", "--tokens", "--yes"])
    assert done.exit_code == 0
    assert "train, attempt 0: step 3, recorded again since" in done.output
    assert "files removed; the run took" in done.output
    again = CliRunner().invoke(app, ["prune", str(root), "--tokens", "--yes", "--json"])
    assert json.loads(again.output)["removed"] == 0


def test_the_attempt_that_is_being_recorded_is_left_alone(root: Path) -> None:
    import fcntl

    journal = root / "journal" / "1.main.journal"
    journal.parent.mkdir()
    journal.write_bytes(b"")
    with journal.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = prune(open_run(root), Wish(tokens=True, superseded=True))
        assert done.plan.kept[0] == "attempt 1 is being recorded: its files are left alone."
        run = open_run(root)
        assert run.table("train", steps=3)["token_ids"].null_count == 0
        assert run.table("train", steps=2)["token_ids"].null_count == 2


def test_a_journal_that_is_to_be_recovered_comes_first(root: Path) -> None:
    journal = root / "journal" / "0.main.journal"
    journal.parent.mkdir()
    journal.write_bytes(b"x" * 1000)
    with pytest.raises(RunConflict, match=r"holds what is not committed.*rolltape recover"):
        prune(open_run(root), Wish(tokens=True))


def test_a_commit_that_cannot_be_read_comes_first(root: Path) -> None:
    path = root / "commits" / "train" / "00000001.0.main.json"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(Damaged):
        plan(open_run(root), Wish(tokens=True))


def test_one_process_at_a_time_prunes(root: Path) -> None:
    run = open_run(root)
    with alone(run), pytest.raises(RunConflict, match="compacted or pruned at this moment"):
        prune(run, Wish(tokens=True))


def test_a_reader_that_had_opened_the_run_is_told_or_served(root: Path) -> None:
    reader, expected = open_run(root), rows(open_run(root))
    compact(open_run(root))
    prune(open_run(root), Wish(replaced=True))
    assert same_rows(rows(reader), expected)
    late = open_run(root)
    assert len(late.all_commits) == 6
    prune(open_run(root), Wish(tokens=True))
    with pytest.raises(Damaged, match="pruned meanwhile"):
        rows(late)


@pytest.mark.parametrize("wishes", [("superseded",), ("tokens",), ("replaced",)])
def test_a_kill_at_any_moment_leaves_a_run_that_reads_right_and_can_be_pruned(
    tmp_path: Path, wishes: tuple[str, ...]
) -> None:
    root = put_run(tmp_path / "run")
    steps(root, range(2), size=1)
    compact(open_run(root))
    put_attempt(root, 1, start_step=1)
    steps(root, range(1, 2), attempt=1, size=1)
    expected = rows(open_run(root))
    (tmp_path / "killed").mkdir()
    command = [sys.executable, str(KILL_POINTS), str(root), str(tmp_path / "killed"), "prune", *wishes]
    subprocess.run(command, check=True)
    copies = sorted((tmp_path / "killed").iterdir(), key=lambda p: int(p.name))
    assert len(copies) > 4
    wish = Wish(**dict.fromkeys(wishes, True))
    allowed = [expected, without(expected, TOKENS)] if wish.tokens else [expected]
    if wish.tokens:
        allowed += [pa.concat_tables([without(expected.slice(0, 1), TOKENS), expected.slice(1)]).combine_chunks()]
    for copy in copies:
        run = open_run(copy)
        found = rows(run)
        assert any(same_rows(found, table) for table in allowed), copy
        assert {f.code for f in verify(run).findings} <= {"uncommitted"}
        prune(run, wish)
        again = open_run(copy)
        assert same_rows(rows(again), without(expected, TOKENS) if wish.tokens else expected)
        assert {f.code for f in verify(again).findings} <= ({"uncommitted"} if not wish.replaced else set())
        assert prune(again, wish).removed == 0


def test_a_run_in_a_store_is_pruned(root: Path, bucket: str) -> None:
    url = f"{bucket}/runs/one"
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        target: Any = place(f"{url}/{file.relative_to(root)}")
        target.put(file.read_bytes())
    compact(open_run(url))
    done = prune(open_run(url), Wish(superseded=True, replaced=True, tokens=True, before=2))
    run = open_run(url)
    before = rows(open_run(root))
    expected = pa.concat_tables([without(before.slice(0, 4), TOKENS), before.slice(4)])
    assert same_rows(rows(run), expected.combine_chunks())
    assert verify(run).findings == []
    assert done.removed > 6


def test_numbers_are_told_in_spans() -> None:
    assert spans([3, 1, 2, 7, 9, 10, 2]) == "1 to 3, 7, 9 to 10"
    assert spans([]) == ""
    assert Item("x", 1, 2) == Item("x", 1, 2, None)


def test_records_are_not_made_of_what_was_pruned(root: Path) -> None:
    before = decode(rows(open_run(root)))
    prune(open_run(root), Wish(tokens=True, before=1))
    run = open_run(root)
    assert decode(rows(run, steps=[1, 2, 3])) == before[2:]
    with pytest.raises(BadInput, match="trace 0-0-0: its column token_ids is null, so it was pruned"):
        decode(rows(run))
