"""Recorded runs in Miles: what its replay function serves and refuses, exported files, and the numbers of siblings."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from replay_build import put_attempt, put_run, put_step, reply, said, trace, turn
from typer.testing import CliRunner

from rolltape.replay import ConvertOptions
from rolltape.replay.cli import app
from rolltape.replay.miles import Conversations, ReplayRolloutFn, generate_rollout, model_name, sample_class
from rolltape.schema import encode
from rolltape.schema.errors import BadInput, CheckFailed, RunConflict, RunNotFound, UnsupportedVersion

MILES = {
    "hf_checkpoint": "m",
    "n_samples_per_prompt": 2,
    "reward_key": None,
    "eval_reward_key": None,
    "debug_train_only": True,
}


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**MILES, **changes})


def function(run: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> ReplayRolloutFn:
    monkeypatch.setenv("ROLLTAPE_RUN", str(run))
    return ReplayRolloutFn(SimpleNamespace(args=arguments(**changes), data_source=None))


def served(function: ReplayRolloutFn, step: int, evaluation: bool = False) -> Any:
    return function(SimpleNamespace(rollout_id=step, evaluation=evaluation))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two groups of two."""
    root = put_run(tmp_path / "run")
    for step in range(2):
        records = [turn(f"{step}{i}{j}", float(j), idx=i) for i in range(2) for j in range(2)]
        records = [record | {"id": f"t{step}-{number}"} for number, record in enumerate(records)]
        for number, record in enumerate(records):
            record["task"]["data"]["idx"] = number // 2
        put_step(root, step, records, first=step * 4)
    return root


def test_a_step_is_served_as_miles_samples_with_what_became_of_its_traces(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = served(function(run, monkeypatch), 1)
    assert [[s.index for s in g] for g in output.samples] == [[4, 5], [6, 7]]
    sample = output.samples[0][0]
    assert isinstance(sample, sample_class())
    assert sample.metadata["messages"] == [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ]
    assert output.metrics["rolltape/emitted"] == 4


def test_miles_with_functions_gets_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAPE_RUN", str(run))
    args = arguments()
    assert generate_rollout(args, 0, None).samples[0][0].tokens == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "step", "error", "told"),
    [
        ({}, 7, BadInput, "step 7"),
        ({"n_samples_per_prompt": 4}, 0, BadInput, "--n-samples-per-prompt"),
        ({"hf_checkpoint": "other/model"}, 0, BadInput, "--hf-checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], step: int, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        served(function(run, monkeypatch, **changes), step)


def test_a_run_of_a_newer_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedVersion, match=r"2\.0"):
        function(put_run(tmp_path / "run", schema="2.0"), monkeypatch)


def test_without_a_run_the_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunNotFound):
        function(tmp_path / "nothing", monkeypatch)
    monkeypatch.delenv("ROLLTAPE_RUN")
    with pytest.raises(BadInput, match="ROLLTAPE_RUN"):
        ReplayRolloutFn(SimpleNamespace(args=arguments(), data_source=None))


def test_samples_that_are_no_longer_those_that_trained_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, [turn("a"), turn("b", 0.0)], digest_handed="0" * 64)
    with pytest.raises(CheckFailed, match="handed over"):
        served(function(root, monkeypatch), 0)


def test_a_newer_attempt_is_served_and_older_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, [turn("a"), turn("b", 0.0)])
    put_attempt(root, 1)
    put_step(root, 0, [turn("c"), turn("d", 0.0)], attempt=1)
    output = served(function(root, monkeypatch), 0)
    assert [sample.routing_key for sample in output.samples[0]] == ["c", "d"]


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("/cache/models--Qwen--Qwen3-0.6B/snapshots/abc", "Qwen3-0.6B"),
    ],
)
def test_a_checkpoint_has_one_name_wherever_it_lies(checkpoint: str, name: str) -> None:
    assert model_name(checkpoint) == name


def test_the_replay_side_of_miles_needs_no_verifiers() -> None:
    code = "import sys, rolltape.replay.miles, rolltape.replay.exports.samples; print('verifiers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_conversation_shows_reasoning_and_tool_calls_as_openai_does() -> None:
    record = trace(
        said(None, [1, 2]), reply(0, [3], [4]), said(1, [5], "42", role="tool"), reply(2, [6], [7], text="42.")
    )
    call = {"id": "call-1", "name": "add", "arguments": "{}"}
    record["nodes"][1]["message"] |= {"reasoning_content": "hm", "tool_calls": [call], "content": None}
    told = Conversations(encode([record])).messages("t")
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "assistant"]
    assert told[1]["reasoning_content"] == "hm"
    assert told[1]["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ]
    assert told[2]["tool_call_id"] == "call-1"
    assert Conversations(encode([record])).messages("unknown") == []


# -- siblings


def branches() -> list[dict[str, Any]]:
    """Two prompts of three rollouts; the second rollout is two samples. Trainable: A 4, B 3 and 5, C 2, D E F 4."""

    def one(id: str, idx: int, reward: float, length: int) -> dict[str, Any]:
        return trace(said(None, [1, 2]), reply(0, [3], [9] * length), id=id, idx=idx, rewards={"ok": reward})

    forked = trace(
        *(said(None, [1, 2]), reply(0, [3], [9] * 3), said(None, [1, 2, 8], "again"), reply(2, [3], [9] * 5)),
        id="B",
        rewards={"ok": 0.0},
    )
    return [
        one("A", 0, 1.0, 4),
        forked,
        one("C", 0, 0.0, 2),
        *(one(x, 1, r, 4) for x, r in (("D", 1.0), ("E", 1.0), ("F", 0.0))),
    ]


def test_miles_gives_siblings_one_reward_and_one_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, branches(), options=ConvertOptions(branch_policy="siblings"))
    output = served(function(root, monkeypatch, n_samples_per_prompt=3), 0)
    conversion = importlib.import_module("miles.ray.rollout.rollout_data_conversion")
    train = importlib.import_module("miles.ray.rollout.train_data_conversion")
    args = arguments(
        n_samples_per_prompt=3,
        rollout_batch_size=2,
        global_batch_size=6,
        disable_rollout_trim_samples=False,
        use_dynamic_global_batch_size=False,
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
    )
    samples, metadata = conversion.postprocess_rollout_data(args, output.samples, train_parallel_config={"dp_size": 1})
    data = train.convert_samples_to_train_data(args, samples, metadata, None, None)
    assert data["rewards"] == pytest.approx([1.1547, -0.5773, -0.5773, -0.5773, 0.5773, 0.5773, -1.1547], abs=1e-4)
    assert data["rollout_mask_sums"] == [4, 8, 8, 2, 4, 4, 4]
    for sample in samples:
        sample.validate()


def test_siblings_are_refused_where_miles_samples_know_no_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, branches(), options=ConvertOptions(branch_policy="siblings"))
    monkeypatch.setattr("rolltape.replay.miles.has_rollout_id", lambda: False)
    with pytest.raises(BadInput, match="rollout_id"):
        served(function(root, monkeypatch, n_samples_per_prompt=3), 0)


# -- files


def convert(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments], catch_exceptions=False)


def test_samples_are_written_as_json_lines_and_as_parquet(run: Path, tmp_path: Path) -> None:
    for ending in ("jsonl", "parquet"):
        done = convert(str(run), "--out", f"{tmp_path}/out/{{rollout_id}}.{ending}", "--json")
        assert [file["samples"] for file in json.loads(done.stdout)["files"]] == [4, 4]
    lines = [json.loads(line) for line in (tmp_path / "out" / "1.jsonl").read_text().splitlines()]
    rows = pq.read_table(tmp_path / "out" / "1.parquet").to_pylist()
    assert [line["index"] for line in lines] == [row["index"] for row in rows] == [4, 5, 6, 7]
    for line, row in zip(lines, rows, strict=True):
        assert json.loads(row["reward"]) == line["reward"]
        assert json.loads(row["metadata"]) == line["metadata"]
        same = ("tokens", "loss_mask", "rollout_log_probs", "response", "status", "routing_key", "weight_versions")
        assert {name: row[name] for name in same} == {name: line[name] for name in same}
    assert not list((tmp_path / "out").glob(".*"))


def test_single_steps_can_be_asked_for(run: Path, tmp_path: Path) -> None:
    convert(str(run), "--out", f"{tmp_path}/one.jsonl", "--step", "1")
    assert len((tmp_path / "one.jsonl").read_text().splitlines()) == 4


def refuse(error: type[Exception], *arguments: str) -> str:
    with pytest.raises(error) as raised:
        convert(*arguments)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("all.jsonl", "{rollout_id}"),
        ("{step}.jsonl", "only field"),
        ("{rollout_id.jsonl", "pattern"),
        ("{rollout_id}.csv", ".parquet"),
    ],
)
def test_a_pattern_that_cannot_take_every_step_is_refused(run: Path, tmp_path: Path, name: str, told: str) -> None:
    assert told in refuse(BadInput, str(run), "--out", f"{tmp_path}/{name}")


def test_a_file_that_is_there_stays_unless_it_may_be_replaced(run: Path, tmp_path: Path) -> None:
    out = f"{tmp_path}/{{rollout_id}}.jsonl"
    convert(str(run), "--out", out)
    assert "--overwrite" in refuse(RunConflict, str(run), "--out", out)
    assert convert(str(run), "--out", out, "--overwrite").exit_code == 0


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    assert "no step" in refuse(BadInput, str(put_run(tmp_path / "run")), "--out", f"{tmp_path}/{{rollout_id}}.jsonl")


def test_evaluations_are_written_under_their_own_name(run: Path, tmp_path: Path) -> None:
    put_step(run, 1, [turn("e1"), turn("e2", 0.0)], split="eval", eval_name="e")
    convert(str(run), "--out", f"{tmp_path}/{{rollout_id}}.jsonl", "--eval")
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["0.jsonl", "1.jsonl", "eval_1.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "eval_1.jsonl").read_text().splitlines()]
    assert [(line["index"], line["reward"]) for line in lines] == [(0, 1.0), (1, 0.0)]


def test_an_evaluation_is_served_with_none_for_what_failed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = turn("e2", errors=["ValueError: gone"])
    put_step(run, 0, [turn("e1"), failed], split="eval", eval_name="e")
    output = served(function(run, monkeypatch), 0, evaluation=True)
    assert output.data["e"]["rewards"] == [1.0, None]
    with pytest.raises(BadInput, match="no evaluation 5"):
        served(function(run, monkeypatch), 5, evaluation=True)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed; it is an extra of its own (rolltape[torch])")


@pytest.mark.usefixtures("torch")
def test_miles_loads_what_is_written_as_pt(run: Path, tmp_path: Path) -> None:
    convert(str(run), "--out", f"{tmp_path}/{{rollout_id}}.pt")
    debug = importlib.import_module("miles.ray.rollout.debug_data")
    args = arguments(load_debug_rollout_data=f"{tmp_path}/{{rollout_id}}.pt", load_debug_rollout_data_subsample=None)
    samples, metadata = debug.load_debug_rollout_data(args, rollout_id=1)
    assert metadata == {}
    assert [sample.index for sample in samples] == [4, 5, 6, 7]
    assert samples[0].status.value == "completed"
    assert samples[0].prefix_cache_info.to_dict()["cached_tokens"] == 0
    for sample in samples:
        sample.validate()


def test_pt_without_torch_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "rolltape[torch]" in refuse(ImportError, str(run), "--out", f"{tmp_path}/{{rollout_id}}.pt")
