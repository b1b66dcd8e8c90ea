"""`rolltape approve`: what the converter makes today is what is expected from then on, and what changed is said."""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_build import converted, group, put_attempt, put_run, put_step, reply, said, samples, trace, turn
from typer.testing import CliRunner

from rolltape.replay import ConvertOptions, Sample, Status, digest, open_run, options
from rolltape.replay.cli import app
from rolltape.replay.exports.samples import write_samples
from rolltape.replay.replayed import replay
from rolltape.replay.verification.approve import approve
from rolltape.replay.verification.compare import compare
from rolltape.replay.verification.expected import read_expected
from rolltape.schema import BadInput, Damaged
from rolltape.schema.paths import Part, RunPaths

converting = sys.modules["rolltape.replay.convert"]
FIRST = Part("train", 0, 0, "main")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of two steps and an evaluation."""
    root = put_run(tmp_path / "run")
    for step in (0, 1):
        put_step(root, step, [turn(f"a{step}", 0.5), turn(f"b{step}", 1.0)], first=10 * step)
    put_step(root, 1, [turn("c", 1.0)], split="eval-math", digest_converted=None, digest_handed=None)
    return root


def halve(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = converting._Rows._reward
    monkeypatch.setattr(converting._Rows, "_reward", lambda self, i: reward(self, i) / 2)


def recording(root: Path) -> dict[str, str]:
    """Every file of a run but the expected Samples."""
    files = [p for p in root.rglob("*") if p.is_file() and "expected" not in p.parts]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def states(root: Path, **rest: Any) -> list[tuple[str, int, str]]:
    return [(a.part.split, a.part.step, a.state) for a in approve(open_run(root), **rest)]


# -- approving


def test_approving_is_told_for_each_step_and_again_it_changes_nothing(root: Path) -> None:
    places = [("train", 0), ("train", 1), ("eval-math", 1)]
    assert states(root) == [(*place, "new") for place in places]
    files = {p: p.read_bytes() for p in (root / "expected").rglob("*.parquet")}
    assert states(root) == [(*place, "same") for place in places]
    assert len(files) == 3
    for path in files:
        path.unlink()
    approve(open_run(root))
    assert {p: p.read_bytes() for p in files} == files


def test_a_change_of_conversion_is_shown_then_approved_and_the_recording_stays_as_it_was(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recording(root)
    approve(open_run(root))
    halve(monkeypatch)
    [first, second, third] = approve(open_run(root), write=False)
    assert [a.state for a in (first, second, third)] == ["changed"] * 3
    assert first.comparison is not None
    assert first.notes[:2] == (
        "group 0, trace a0, branch 0: reward: expected 0.5, now 0.25",
        "2 of 2 Samples differ (reward 2).",
    )
    assert "The converter's version is 1, as before" in first.notes[2]
    assert states(root) == [("train", 0, "changed"), ("train", 1, "changed"), ("eval-math", 1, "changed")]
    assert {state for _, _, state in states(root)} == {"same"}
    assert recording(root) == before
    assert all(v.state == "same" for part in replay(open_run(root)) for v in part.verdicts())


def test_samples_that_are_not_those_of_the_live_run_are_told_when_they_are_approved_for_the_first_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halve(monkeypatch)
    train, _, evaluation = approve(open_run(root))
    assert train.state == "changed"
    assert train.notes == ("These are not the Samples of the live run, and its digest cannot say where they differ.",)
    assert evaluation.notes == ("The recording holds no digest to compare them with.",)


def test_the_version_of_the_converter_is_part_of_what_is_approved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    approve(open_run(root))
    for module in (options, sys.modules["rolltape.replay.digest"]):
        monkeypatch.setattr(module, "CONVERTER_VERSION", 2)
    first, *_ = approve(open_run(root))
    assert first.state == "settings"
    assert first.notes == ("The same Samples, with converter 1 then and 2 now.",)
    head = read_expected(RunPaths(root).expected(FIRST))
    assert head is not None
    assert head.converter == 2
    halve(monkeypatch)
    for module in (options, sys.modules["rolltape.replay.digest"]):
        monkeypatch.setattr(module, "CONVERTER_VERSION", 3)
    first, *_ = approve(open_run(root))
    assert (first.state, len(first.notes)) == ("changed", 2)


def test_another_branch_policy_is_kept_with_the_samples(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    forked = trace(
        said(None, [1]), reply(0, [2], [3]), said(1, [4], "a"), reply(2, [], [5]), said(1, [6], "b"), reply(4, [], [7])
    )
    put_step(root, 0, [forked], digest_converted=None, digest_handed=None)
    assert [a.samples for a in approve(open_run(root))] == [0]
    assert [a.samples for a in approve(open_run(root), branch_policy="siblings")] == [2]
    assert [(a.samples, a.state) for a in approve(open_run(root))] == [(2, "same")]
    [part] = replay(open_run(root))
    assert part.options.branch_policy == "siblings"
    assert [v.state for v in part.verdicts()] == ["same"]


def test_another_branch_policy_leaves_out_the_batch_that_was_handed_over_of_other_samples(root: Path) -> None:
    first, *_ = approve(open_run(root), branch_policy="siblings")
    assert first.samples == 2
    head = read_expected(RunPaths(root).expected(FIRST))
    assert head is not None
    assert head.digests.keys() == {"converted"}
    assert all(v.state == "same" for part in replay(open_run(root)) for v in part.verdicts())


def test_only_what_is_asked_for_is_approved(root: Path) -> None:
    assert states(root, steps=[0]) == [("train", 0, "new")]
    assert states(root, splits=["eval-math"]) == [("eval-math", 1, "new")]
    assert states(root, steps=[1]) == [("train", 1, "new"), ("eval-math", 1, "same")]


def test_expectations_of_steps_that_were_recorded_again_are_removed(root: Path) -> None:
    approve(open_run(root))
    put_attempt(root, 1, start_step=1)
    put_step(root, 1, [turn("d", 1.0)], attempt=1)
    assert states(root, splits=["train"]) == [("train", 0, "same"), ("train", 1, "new"), ("train", 1, "removed")]
    assert not RunPaths(root).expected(Part("train", 1, 0, "main")).exists()
    assert "train/00000001.0.main.parquet" not in RunPaths(root).sums.read_text()
    assert RunPaths(root).expected(Part("eval-math", 1, 0, "main")).exists()


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_expectations_that_are_damaged_are_replaced_and_named(root: Path, cut: int) -> None:
    approve(open_run(root))
    path = RunPaths(root).expected(FIRST)
    path.write_bytes(path.read_bytes()[:cut])
    assert [a.state for a in approve(open_run(root), write=False)] == ["changed", "same", "same"]
    first, *others = approve(open_run(root))
    assert first.state == "changed"
    assert first.notes[0].startswith("What was approved before is damaged or gone, and is replaced: ")
    assert "give --branch-policy" in first.notes[1]
    assert {a.state for a in others} == {"same"}
    assert {a.state for a in approve(open_run(root))} == {"same"}


def test_expectations_that_are_gone_are_named_and_written_again(root: Path) -> None:
    approve(open_run(root))
    path = RunPaths(root).expected(FIRST)
    whole = path.read_bytes()
    path.unlink()
    [first, *_] = approve(open_run(root), write=False)
    assert (first.state, path.exists()) == ("changed", False)
    assert f"{path}: not as it was approved (the file is gone)" in first.notes[0]
    assert states(root) == [("train", 0, "changed"), ("train", 1, "same"), ("eval-math", 1, "same")]
    assert path.read_bytes() == whole


def test_the_sums_of_what_was_approved_are_kept_and_those_of_earlier_runs_added(root: Path) -> None:
    approve(open_run(root), steps=[0])
    sums = RunPaths(root).sums
    assert [line[64:] for line in sums.read_text().splitlines()] == ["  train/00000000.0.main.parquet"]
    approve(open_run(root))
    whole = sums.read_text()
    for line in whole.splitlines():
        sum_, name = line.split("  ")
        assert hashlib.sha256((sums.parent / name).read_bytes()).hexdigest() == sum_
    assert len(whole.splitlines()) == 3
    sums.unlink()
    assert {a.state for a in approve(open_run(root), write=False)} == {"same"}
    assert not sums.exists()
    assert {state for *_, state in states(root)} == {"same"}
    assert sums.read_text() == whole
    sums.write_text("?")
    assert {a.state for a in approve(open_run(root), write=False)} == {"settings"}
    [first, *_] = approve(open_run(root))
    assert f"{sums}: not as it was approved (line 1 is no sha256 and name of a file)" in first.notes[0]
    assert sums.read_text() == whole


def test_a_damaged_recording_is_not_approved(root: Path) -> None:
    path = RunPaths(root).parquet(Part("train", 1, 0, "main"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Damaged, match="committed; restore"):
        approve(open_run(root))
    assert not (root / "expected").exists()


def test_a_full_disk_is_named_with_the_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes to file")

    monkeypatch.setattr("rolltape.replay.verification.approve.write_expected", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        approve(open_run(root))
    assert raised.value.filename == str(RunPaths(root).expected(FIRST))


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"steps": [7]}, "step 7 was not recorded"), ({"splits": ["test"]}, "no split 'test' was recorded; recorded are")],
)
def test_what_was_not_recorded_cannot_be_approved(root: Path, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        approve(open_run(root), **asked)


def test_an_empty_step_is_approved_as_such(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, [])
    assert states(root) == [("train", 0, "new")]
    [part] = replay(open_run(root))
    assert (part.samples, [v.state for v in part.verdicts()]) == ([], ["same", "same"])


# -- the command


def test_the_command_prints_what_changed_and_writes_unless_it_is_a_dry_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CliRunner()
    dry = run.invoke(app, ["approve", str(root.parent), "--dry-run"])
    assert (dry.exit_code, (root / "expected").exists()) == (1, False)
    assert "3 would change, 0 as they were" in dry.output
    assert dry.output.endswith("5 Samples\n")
    assert run.invoke(app, ["approve", str(root)]).exit_code == 0
    halve(monkeypatch)
    done = run.invoke(app, ["approve", str(root), "--step", "0", "--json"])
    assert done.exit_code == 0
    [part] = json.loads(done.output)["runs"][0]["parts"]
    assert part["comparison"]["first"] == {
        "field": "reward",
        "group_index": 0,
        "trace_id": "a0",
        "branch": 0,
        "expected": 0.5,
        "now": 0.25,
    }
    again = run.invoke(app, ["approve", str(root), "--step", "0", "--dry-run"])
    assert (again.exit_code, "0 would change, 1 as they were" in again.output) == (0, True)


def test_the_command_says_how_many_traces_gave_no_sample() -> None:
    demo = Path(__file__).parents[1] / "data/runs/demo"
    done = CliRunner().invoke(app, ["approve", str(demo), "--dry-run"])
    assert (done.exit_code, done.output.splitlines()[-1]) == (
        0,
        "44 Samples; 4 traces gave none (`rolltape verify` says why)",
    )


def test_a_folder_without_runs_is_refused_by_the_command(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "holds no recorded run"), (tmp_path / "x", "does not exist")):
        result = CliRunner().invoke(app, ["approve", str(path)])
        assert why in str(result.exception)


# -- where two batches differ


BATCH = [
    turn("a", metrics={"turns": 2.0, "a b": 1.0}),
    trace(said(None, [1]), reply(0, [2], [3, 4]), said(1, [5]), reply(2, [6], [7, 8]), id="b"),
]


def batch() -> list[Sample]:
    return samples(converted(BATCH))


def first(now: list[Sample]) -> tuple[str, str | None, int | None, Any, Any]:
    found = compare([batch()], [now])
    assert found is not None
    place = found.first
    return place.field, place.trace_id, place.position, place.expected, place.now


CHANGES: list[tuple[dict[str, Any], tuple[str, int | None]]] = [
    ({"tokens": [1, 2, 3, 5, 6, 7, 8]}, ("tokens", 3)),
    ({"tokens": [1, 2, 3, 4, 5, 6, 7]}, ("tokens", 7)),
    ({"loss_mask": [1, 1, 0, 0, 1, 0]}, ("loss_mask", 5)),
    ({"loss_mask": None}, ("loss_mask", 0)),
    ({"rollout_log_probs": [-0.25, -0.5, 0.0, 0.0, -0.25, float("nan")]}, ("rollout_log_probs", 5)),
    ({"reward": None}, ("reward", None)),
    ({"reward": {"ok": 1.0}}, ("reward", None)),
    ({"status": Status.TRUNCATED}, ("status", None)),
    ({"response": "an Answer"}, ("response", None)),
    ({"response": "x" * 90}, ("response", 0)),
    ({"metadata": {"verifiers": {"branch_index": 0}}}, ("metadata.verifiers.metrics", None)),
    ({"weight_versions": ["7"]}, ("weight_versions[0]", None)),
    ({"prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 0}}, ("prefix_cache_info.cached_tokens", None)),
    ({"remove_sample": True}, ("remove_sample", None)),
    ({"index": 5}, ("index", None)),
]


@pytest.mark.parametrize(("change", "place"), CHANGES)
def test_a_change_of_any_field_is_named_with_its_place(change: dict[str, Any], place: tuple[str, int | None]) -> None:
    a, b = batch()
    field, trace_id, position, *_ = first([a, replace(b, **change)])
    assert ((field, position), trace_id) == (place, "b")


def test_what_a_trainer_would_see_alike_is_no_difference() -> None:
    a, b = batch()
    none = replace(b, rollout_log_probs=[float("nan")] * 6)
    assert compare([[a, b]], [batch()]) is None
    assert compare([[none]], [[replace(none, rollout_log_probs=[float("nan")] * 6)]]) is None
    assert compare([], []) is None


def test_missing_added_and_swapped_samples_are_named() -> None:
    a, b = batch()
    assert first([b])[:2] == ("sample", "a")
    assert first([a, b, replace(a, routing_key="c")])[:2] == ("sample", "c")
    assert first([b, a])[:3] == ("order", "a", 0)
    assert str(compare([[a, b]], [[a]])).count("nothing")
    nested = compare([[a], [b]], [[a, b]])
    assert nested is not None
    assert (nested.first.field, nested.first.position, nested.samples) == ("nesting", 0, 0)


def test_names_that_need_it_are_quoted_in_a_path() -> None:
    a, b = batch()
    said = a.metadata["verifiers"]
    other = replace(a, metadata={"verifiers": {**said, "metrics": {"turns": 2.0, "a b": 2.0}}})
    assert first([other, b]) == ('metadata.verifiers.metrics["a b"]', "a", None, 1.0, 2.0)


@given(st.data())
def test_batches_differ_exactly_where_their_digests_do(data: st.DataObject) -> None:
    a, b = batch()
    changes = st.sampled_from([{}, *(change for change, _ in CHANGES)])
    now = [replace(a, **data.draw(changes)), replace(b, **data.draw(changes))]
    now = data.draw(st.sampled_from([now, now[::-1], now[:1]]))
    assert (compare([[a, b]], [now]) is None) == (digest([[a, b]]) == digest([now]))


def test_a_long_text_is_shown_around_the_place() -> None:
    long = replace(batch()[0], response="x" * 500 + "\x1b[31m" + "y" * 500)
    found = compare([[long]], [[replace(long, response=long.response.replace("y", "z"))]])
    assert found is not None
    assert str(found.first) == (
        'group 0, trace a, branch 0: response at position 505: expected …"'
        + "x" * 25
        + "\\u001b[31m"
        + "y" * 30
        + '"…, now …"'
        + "x" * 25
        + "\\u001b[31m"
        + "z" * 30
        + '"…'
    )


def test_a_step_record_of_groups_alone_still_compares(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    records = [turn("a"), turn("b")]
    put_step(root, 0, records, groups=[group(records, 3)], options=ConvertOptions(branch_policy="siblings"))
    approve(open_run(root))
    [part] = replay(open_run(root))
    assert part.expected is not None
    assert part.expected.batch("handed") == part.groups
    assert [s.group_index for s in part.samples] == [3, 3]


def test_a_step_without_any_row_is_written_as_an_empty_file_of_samples(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, [])
    [file] = write_samples(open_run(root), str(tmp_path / "samples.jsonl"))
    assert (file.samples, file.path.read_text()) == (0, "")
