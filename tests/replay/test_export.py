"""`rolltape export`: what is chosen, what is refused, and that files appear whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_build import group, put_attempt, put_run, put_step, turn

from rolltape.replay import open_run
from rolltape.replay.chosen import chosen_commits
from rolltape.replay.exports.samples import write_samples
from rolltape.replay.exports.verifiers import write_verifiers
from rolltape.replay.whole import whole_file
from rolltape.schema.errors import BadInput, Damaged, RunConflict

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 0 and 1 of training, of step 1 a second attempt, and an evaluation at step 1."""
    root = put_run(tmp_path / "run")
    put_step(root, 0, [turn(id="a"), turn(id="b")])
    put_step(root, 1, [turn(id="old")])
    put_attempt(root, 1, start_step=1)
    put_step(root, 1, [turn(id="c"), turn(id="torn", errors=["TaskError: no"], rewards={})], attempt=1)
    put_step(root, 1, [turn(id="e")], split="eval", fates={"e": "eval"}, attempt=1)
    return root


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_every_try_of_the_newest_attempts_of_training_is_written(run: Path, tmp_path: Path, rolltape: Call) -> None:
    out = tmp_path / "out" / "x.jsonl"
    code, printed, _ = rolltape("export", run, "--format", "verifiers", "--out", out)
    assert (code, printed) == (0, f"{out}: 4 lines of 4 traces\n")
    assert ids(out) == ["a", "b", "c", "torn"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "0"], ["a", "b"]),
        (["--step", "1", "--step", "0"], ["a", "b", "c", "torn"]),
        (["--eval"], ["a", "b", "c", "torn", "e"]),
        (["--eval", "--step", "0"], ["a", "b"]),
        (["--split", "eval"], ["e"]),
        (["--split", "eval", "--split", "train", "--step", "1"], ["e", "c", "torn"]),
    ],
)
def test_steps_and_splits_are_chosen(
    run: Path, tmp_path: Path, rolltape: Call, words: list[str], expected: list[str]
) -> None:
    code, _, _ = rolltape("export", run, "--format", "verifiers", "--out", tmp_path / "x.jsonl", *words)
    assert code == 0
    assert ids(tmp_path / "x.jsonl") == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "7"], "step 7 of 'train' was not recorded"),
        (["--split", "test"], "no split 'test' was recorded; recorded are 'train', 'eval'"),
        (["--format", "hf"], "conversations go to a file that ends in .parquet"),
        (["--format", "samples", "--split", "eval"], "--eval adds the evaluations"),
        (["--format", "samples"], "has no {rollout_id}, and there are 2 steps"),
        (["--out", "x.txt"], "Verifiers' lines go to a file that ends in .jsonl"),
        (["--out", "{step}.jsonl"], "the only field is {release}"),
        (["--out", "{release.jsonl"], "is no pattern"),
        (["--out", "{release:.1}.jsonl"], "formats a field"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(
    run: Path, tmp_path: Path, rolltape: Call, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, error = rolltape("export", run, "--format", "verifiers", "--out", "x.jsonl", *words)
    assert (code, printed) == (2, "")
    assert said in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_run_without_training_says_which_splits_it_has(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    with pytest.raises(BadInput, match=r"nothing was recorded in 'train'\.$"):
        chosen_commits(open_run(root))
    put_step(root, 0, [turn()], split="eval", fates={"t": "eval"})
    with pytest.raises(BadInput, match=r"Recorded are 'eval': choose with --split"):
        chosen_commits(open_run(root))
    assert [c.part.split for c in chosen_commits(open_run(root), evaluations=True)] == ["eval"]


def test_a_file_that_is_there_stays_unless_overwrite_is_set(run: Path, tmp_path: Path, rolltape: Call) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("mine")
    code, _, error = rolltape("export", run, "--format", "verifiers", "--out", out)
    assert (code, out.read_text()) == (2, "mine")
    assert "exists; choose another name, or set --overwrite" in error
    assert rolltape("export", run, "--format", "verifiers", "--out", out, "--overwrite")[0] == 0
    assert ids(out) == ["a", "b", "c", "torn"]


def test_nothing_is_written_into_the_run_or_over_a_folder(run: Path, tmp_path: Path) -> None:
    opened = open_run(run)
    commits = chosen_commits(opened)
    with pytest.raises(BadInput, match="lies inside the run"):
        write_verifiers(opened, commits, str(run / "traces" / "x.jsonl"))
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        write_verifiers(opened, commits, str(tmp_path / "x.jsonl"), overwrite=True)
    with pytest.raises(RunConflict, match="exists"):
        write_samples(opened, str(_touched(tmp_path / "y.jsonl")), steps=[0])


def _touched(path: Path) -> Path:
    path.touch()
    return path


def test_a_damaged_step_leaves_the_file_that_was_there_and_nothing_else(run: Path, tmp_path: Path) -> None:
    opened = open_run(run)
    file = run / "traces" / "train" / "00000001.1.main.parquet"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    out = tmp_path / "out" / "x.jsonl"
    out.parent.mkdir()
    out.write_text("mine")
    with pytest.raises(Damaged, match=r"00000001\.1\.main\.parquet"):
        write_verifiers(opened, chosen_commits(opened), str(out), overwrite=True)
    assert [p.name for p in out.parent.iterdir()] == ["x.jsonl"]
    assert out.read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "new" / "x") as part:
            part.write_text("half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write()
    assert list((tmp_path / "new").iterdir()) == []


def test_json_names_files_and_notes(run: Path, tmp_path: Path, rolltape: Call) -> None:
    code, printed, _ = rolltape("export", run, "--format", "hf", "--out", tmp_path / "x.parquet", "--json")
    report = json.loads(printed)
    assert (code, report["run"], report["format"]) == (0, "r1", "hf")
    assert report["files"] == [{"path": str(tmp_path / "x.parquet"), "traces": 4, "lines": 4}]


def test_samples_are_those_of_convert(run: Path, tmp_path: Path, rolltape: Call) -> None:
    rolltape("convert", run, "--out", tmp_path / "c-{rollout_id}.jsonl", "--eval")
    code, printed, _ = rolltape(
        "export", run, "--format", "samples", "--out", tmp_path / "x-{rollout_id}.jsonl", "--eval"
    )
    assert code == 0
    assert printed.splitlines()[0] == f"{tmp_path / 'x-0.jsonl'}: 2 samples"
    for name in ("0", "1", "eval_1"):
        assert (tmp_path / f"x-{name}.jsonl").read_bytes() == (tmp_path / f"c-{name}.jsonl").read_bytes()


def test_a_run_of_evaluations_only_says_how_they_are_converted(tmp_path: Path, rolltape: Call) -> None:
    root = put_run(tmp_path / "evaluated")
    put_step(root, 0, [turn(id="e")], split="eval", fates={"e": "eval"})
    out = tmp_path / "x-{rollout_id}.jsonl"
    for command in (("convert", root), ("export", root, "--format", "samples")):
        code, _, said = rolltape(*command, "--out", out)
        assert code == 2
        assert "the run holds evaluations only, and no step of training to convert; add --eval" in said
    assert rolltape("convert", root, "--out", out, "--eval")[0] == 0
    assert (tmp_path / "x-eval_0.jsonl").exists()


def test_a_run_of_no_step_at_all_is_not_said_to_hold_evaluations(tmp_path: Path, rolltape: Call) -> None:
    _, _, said = rolltape("convert", put_run(tmp_path / "empty"), "--out", tmp_path / "x-{rollout_id}.jsonl")
    assert "the run holds no step to convert; record one first" in said


def test_traces_of_an_evaluation_that_give_no_sample_are_counted(tmp_path: Path, rolltape: Call) -> None:
    root = put_run(tmp_path / "evaluated")
    failed = turn(id="failed", errors=["TaskError: no"], rewards={}, nodes=[])
    again = turn(id="again", errors=["TaskError: no"], rewards={})
    fates = {"sound": "eval", "failed": "eval", "again": "retried"}
    sound = turn(id="sound")
    put_step(root, 0, [sound, failed, again], split="eval", groups=[group([sound, failed])], fates=fates)
    code, out, _ = rolltape("convert", root, "--eval", "--out", tmp_path / "{rollout_id}.jsonl")
    assert code == 0
    assert "eval_0.jsonl: 1 sample; 2 traces gave none: 1 error, 1 retried" in " ".join(out.split())
