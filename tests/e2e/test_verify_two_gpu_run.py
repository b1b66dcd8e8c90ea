"""The end-to-end script's check, on a recording of the demo engine whose programs run in the subprocess runtime."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from miles_bench import MilesBench, bench_fixture, flat
from typer.testing import CliRunner

from rolltape.record.engine import write_tokenizer
from rolltape.replay.cli import app
from rolltape.replay.exports.samples import write_samples
from rolltape.replay.run import open_run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import golf_tasks  # noqa: E402
import verify_two_gpu_run as e2e  # noqa: E402

ENVIRONMENT = '[taskset]\nid = "golf_tasks"\n[harness]\nid = "rolltape.record.inprocess"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps under Miles, with what Miles would dump of it."""
    folder = tmp_path_factory.mktemp("golf")
    tokenizer = write_tokenizer(folder / "tokenizer")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for bench in bench_fixture(folder, tokenizer, monkeypatch, policy=golf_tasks.GolfPolicy()):
            _train(bench)
    return folder


def _train(bench: MilesBench) -> None:
    function = bench.function(
        ENVIRONMENT, rollout_batch_size=3, n_samples_per_prompt=4, rollout_max_response_len=512, global_batch_size=12
    )
    for step, output in enumerate(bench.train(function, 0, 1, 2)):
        samples = [sample.to_dict() for sample in flat(output.samples)]
        (bench.folder / f"{step}.jsonl").write_text("\n".join(map(json.dumps, samples)) + "\n")


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[dict[str, Any]]:
    """The dumped samples of a step."""
    return e2e.load_samples(folder / "1.jsonl")


def test_a_run_and_what_miles_dumped_of_it_pass(folder: Path) -> None:
    counts = e2e.verify(folder / "run", str(folder / "{rollout_id}.jsonl"))
    assert counts["samples"] == 36
    assert 0 < counts["passed"] < 36


def test_pt_files_pass_as_well(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed, and .pt files need it: pip install torch")
    write_samples(open_run(folder / "run"), str(tmp_path / "{rollout_id}.pt"))
    assert e2e.verify(folder / "run", str(tmp_path / "{rollout_id}.pt"))["samples"] == 36


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another token": (lambda s: s["tokens"].__setitem__(-1, 0), "tokens differ between Parquet and the dump"),
    "no number": (lambda s: s.update(reward=float("nan")), "its reward is nan"),
    "a log-prob too few": (lambda s: s["rollout_log_probs"].pop(), "log-probs and"),
    "an endless log-prob": (lambda s: s["rollout_log_probs"].__setitem__(0, float("-inf")), "a log-prob is not finite"),
    "another status": (lambda s: s.update(status="aborted"), "its status is aborted"),
    "another reward": (lambda s: s["metadata"]["verifiers"]["rewards"].update(style=1.0), "its rewards are"),
    "half passed": (lambda s: s["metadata"]["verifiers"]["metrics"].update(passed=0.5), "`passed` is 0.5"),
    "no latency": (lambda s: s["metadata"]["verifiers"]["metrics"].pop("latency"), "`latency` is None"),
    "an error": (lambda s: s["metadata"]["verifiers"].update(error="TaskError: no"), "holds the error"),
    "another winner": (lambda s: s["metadata"]["verifiers"]["rewards"].update(fastest=0.25), "`fastest` sums to"),
    "another group": (lambda s: s.update(group_index=99), "expected 3 of 4"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_wrong_is_found(name: str, samples: list[dict[str, Any]]) -> None:
    change, said = CHANGES[name]
    dumped = copy.deepcopy(samples)
    change(dumped[0])
    found = [*e2e.step_problems(dumped), *e2e.differences(samples, dumped)]
    assert any(said in problem for problem in found), found


def test_every_problem_of_a_run_is_listed(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        shutil.copy(folder / f"{number}.jsonl", tmp_path)
    shutil.copy(folder / "0.jsonl", tmp_path / "1.jsonl")
    with pytest.raises(e2e.WrongRun, match=r"step 1: sample 12: group_index, index, tokens.* differ"):
        e2e.verify(folder / "run", str(tmp_path / "{rollout_id}.jsonl"))


def test_a_missing_step_is_found(folder: Path) -> None:
    with pytest.raises(e2e.WrongRun, match="expected 0 to 3"):
        e2e.verify(folder / "run", str(folder / "{rollout_id}.jsonl"), steps=4)


def test_a_run_in_which_nothing_passed_is_not_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = e2e._recorded

    def failing(run: Any, step: int) -> list[dict[str, Any]]:
        samples = recorded(run, step)
        for sample in samples:
            sample["metadata"]["verifiers"]["metrics"]["passed"] = 0.0
        return samples

    monkeypatch.setattr(e2e, "_recorded", failing)
    with pytest.raises(e2e.WrongRun, match="no rollout of the whole run passed"):
        e2e.verify(folder / "run", str(folder / "{rollout_id}.jsonl"))


def test_the_script_launches_the_smoke_run(tmp_path: Path) -> None:
    words = e2e.launch_command(tmp_path, "--dry-run", "--no-check")
    shown = CliRunner().invoke(app, words[3:])
    assert shown.exit_code == 0, shown.output
    assert "--rollout-batch-size 3 " in shown.stdout
    assert f"--dump-details {tmp_path}/dump" in shown.stdout
    assert not list(tmp_path.iterdir())
