"""Training and evaluation under Miles: batches, faults, hooks, resuming, and replays that give the same batches."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from miles_bench import (
    OWN,
    TASKSET,
    MilesBench,
    Policy,
    bench_fixture,
    environment,
    fates,
    faulty,
    flat,
    is_clean,
    miles_args,
    postprocessed,
    reasons,
    shown,
)

from rolltape.record.engine import write_tokenizer
from rolltape.record.engine.faults import Switch
from rolltape.record.miles import (
    RolloutsStopped,
    VerifiersRolloutFn,
    generate_rollout,
    trace_to_sample,
    trace_to_samples,
)
from rolltape.schema import decode
from rolltape.schema.errors import CheckFailed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MilesBench]:
    yield from bench_fixture(tmp_path, tokenizer, monkeypatch, policy=Policy())


# -- batches


def test_batches_are_groups_in_task_order_recorded_and_replayed_as_they_were(bench: MilesBench) -> None:
    outputs = bench.train(bench.function(rollout_batch_size=4), 0, 1, 2)
    for output in outputs:
        assert [len(group) for group in output.samples] == [3, 3, 3, 3]
        indices = [group[0].group_index for group in output.samples]
        assert indices == sorted(indices)
        for sample in flat(output.samples):
            sample.validate()
            assert sample.status.value in ("completed", "truncated")
            assert len(sample.rollout_log_probs) == len(sample.loss_mask) == sample.response_length
            assert sample.metadata["messages"][-1]["role"] == "assistant"
            assert len(sample.weight_versions) == len(
                [m for m in sample.metadata["messages"] if m["role"] == "assistant"]
            )
            assert sample.prefix_cache_info.to_dict()["total_prompt_tokens"] > 0
    metrics = outputs[0].metrics
    assert metrics["rolltape/emitted"] == 12
    assert {"verifiers/reward_mean", "verifiers/error_rate", "rolltape/not_durable", "rolltape/lost"} <= metrics.keys()
    assert is_clean(bench.recorded())
    assert [shown(again.samples) for again in bench.replay(0, 1, 2)] == [shown(output.samples) for output in outputs]


def test_miles_takes_the_batch_and_normalises_within_its_groups(bench: MilesBench) -> None:
    [output] = bench.train(bench.function(), 0)
    samples, data = postprocessed(output.samples)
    assert len(samples) == 6
    for group in (data["rewards"][:3], data["rewards"][3:]):
        assert math.isclose(sum(group), 0.0, abs_tol=1e-4)
    assert data["rollout_mask_sums"] == [sum(sample.loss_mask) for sample in samples]


def test_the_environment_keeps_serving_from_step_to_step(bench: MilesBench) -> None:
    function, served = bench.function(), []
    serving = function.parts.environment.serving

    def counted() -> Any:
        served.append(1)
        return serving()

    function.parts.environment.serving = counted
    bench.train(function, 0, 1)
    assert served == [1]


def test_deterministic_inference_gives_every_rollout_its_seed(bench: MilesBench) -> None:
    bench.train(bench.function(sglang_enable_deterministic_inference=True), 0)
    first = [sample.tokens for sample in flat(bench.replay(0)[0].samples)]
    bench.restart()
    again = bench.train(bench.function(sglang_enable_deterministic_inference=True), 0)
    assert [sample.tokens for sample in flat(again[0].samples)] == first


def test_miles_may_call_a_function_instead_of_a_class(bench: MilesBench) -> None:
    bench.variables()
    args = bench.args(eval_interval=1)
    bench.start_engines(args)
    first = generate_rollout(args, 0, "data source")
    second = generate_rollout(args, 1, "data source")
    evaluated = generate_rollout(args, 1, "data source", evaluation=True)
    assert [len(output.samples) for output in (first, second)] == [2, 2]
    assert "rolltape.record.demo" in evaluated.data
    assert [step.cursor for step in bench.recorded().steps()] == [2, 4]


def test_the_class_is_of_miles_base_class_where_there_is_one() -> None:
    import miles.rollout.base_types as base_types

    base = getattr(base_types, "BaseRolloutFn", object)
    assert issubclass(VerifiersRolloutFn, base)
    assert callable(VerifiersRolloutFn.save)
    assert callable(VerifiersRolloutFn.load)


# -- faults of the engine and the environment


def test_a_conversation_of_several_turns_asks_only_what_the_engine_knows(bench: MilesBench) -> None:
    """The engine answers an unknown sampling key with HTTP 500; Verifiers adds one on a bridged turn."""
    [output] = bench.train(bench.function(rollout_batch_size=3), 0)
    assert any(len(sample.weight_versions) > 1 for sample in flat(output.samples))
    rows = bench.recorded().table("train", columns=["error_types"]).column("error_types").to_pylist()
    assert not any("ProviderError" in types for types in rows)


def test_a_forked_trace_costs_its_group_and_nothing_else(bench: MilesBench) -> None:
    """Every other task thinks, and so forks at the user's turn."""
    name = bench.module(
        TASKSET.format(score="return 1.0", tasks=4, prompt="?").replace('"? %d" % i', '("Think." if i % 2 else "?")')
    )
    text = f'[taskset]\nid = "{name}"\n[harness]\nid = "rolltape.record.inprocess"\nuser = "{name}:user"\n'
    own = OWN.replace("thinking = false", "thinking = true")
    [output] = bench.train(bench.function(text, own, rollout_max_response_len=64), 0)
    run = bench.recorded()
    dropped = run.table("train", columns=["task_idx", "disposition", "reason"]).to_pylist()
    forked = [row for row in dropped if row["disposition"] == "failed_check"]
    assert forked
    assert all("branches" in row["reason"] for row in forked)
    assert len(output.samples) == 2
    assert output.metrics["rollout/dynamic_filter/drop_failed_check"] >= 1
    assert is_clean(run)


def test_an_environment_that_always_fails_ends_the_run_with_its_last_error(bench: MilesBench) -> None:
    text = environment(bench, score='raise ValueError("the judge is away")')
    function = bench.function(text, OWN + "max_failed_groups = 3\n", rollout_max_response_len=8)
    with pytest.raises(RolloutsStopped, match="the judge is away"):
        bench.train(function, 0)
    counts = bench.recorded().steps()[0].counts
    assert counts["started"] <= 5 * 3
    assert counts["error"] >= 9
    assert sum(value for name, value in counts.items() if name != "started") == counts["started"]


def test_a_request_that_cannot_be_served_ends_the_run_with_the_setting_to_change(bench: MilesBench) -> None:
    function = bench.function(own=OWN.replace("renderer = 'qwen3'\nthinking = false\n", ""))
    with pytest.raises(RolloutsStopped, match=r"tools.*--renderer"):
        bench.train(function, 0)


def test_a_status_that_no_waiting_changes_is_on_the_trace_and_was_asked_once(bench: MilesBench) -> None:
    bench.engine.faults = faulty(http_403=Switch(1.0, 1))
    bench.train(bench.function(), 0)
    assert bench.engine.requests["fault:http_403"] == 1
    assert any("403" in reason for reason in reasons(bench.recorded()))


@pytest.mark.parametrize(
    ("fault", "disposition", "told"),
    [
        ("abort_partial", "error", "aborted"),
        ("finish_null", "error", "finish_reason"),
        ("finish_unknown", "error", "banana"),
        ("logprobs_absent", "error", "output_token_logprobs"),
        ("logprob_null", "error", "log-prob"),
        ("empty_completion", "empty", "trainable"),
    ],
)
def test_a_reply_that_cannot_be_trained_is_recorded_as_what_it_is(
    bench: MilesBench, fault: str, disposition: str, told: str
) -> None:
    bench.engine.faults = faulty(**{fault: Switch(1.0, 1)})
    text = environment(bench)
    [output] = bench.train(bench.function(text, rollout_max_response_len=8), 0)
    run = bench.recorded()
    assert fates(run)[disposition] == 1
    assert fates(run)["incomplete_group"] >= 1
    assert any(told in reason for reason in reasons(run))
    assert all(sample.response_length for sample in flat(output.samples))
    assert sum(fates(run).values()) == run.steps()[0].counts["started"] - run.steps()[0].counts["lost"]


def test_leftovers_and_cancelled_rollouts_are_recorded(bench: MilesBench) -> None:
    [output] = bench.train(bench.function(rollout_batch_size=1, over_sampling_batch_size=6), 0)
    run = bench.recorded()
    [step] = run.steps()
    assert len(output.samples) == 1
    assert step.counts["emitted"] == 3
    assert step.counts["started"] == sum(value for name, value in step.counts.items() if name != "started")
    assert set(fates(run)) <= {"emitted", "leftover", "cancelled", "error", "incomplete_group"}
    assert fates(run)["leftover"] + fates(run)["cancelled"] > 0
    assert not fates(run)["cancelled"] or bench.engine.requests["/abort_request"] > 0
    assert step.cursor == 6
    assert is_clean(run)


def test_equal_rewards_are_no_spread_whatever_their_float32_deviation(bench: MilesBench) -> None:
    """Miles' filter takes 6e-8, the deviation of seven rewards of 0.7, for a difference."""
    text = environment(bench, score="return 0.7 if self.data.idx % 2 else float(trace.id[-1] > '7')", tasks=6)
    path = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    function = bench.function(
        text,
        dynamic_sampling_filter_path=path,
        n_samples_per_prompt=7,
        rollout_batch_size=1,
        rollout_max_response_len=8,
    )
    [output] = bench.train(function, 0)
    assert len({sample.reward for sample in flat(output.samples)}) > 1
    flat_group = next(flat(output.samples)).from_dict(next(flat(output.samples)).to_dict() | {"reward": 0.7})
    assert not function.parts.hooks.keep([flat_group] * 7)[0]


def test_a_reward_named_reward_is_not_overwritten_by_the_total(bench: MilesBench) -> None:
    name = bench.module(TASKSET.format(score="return 1.0", tasks=2, prompt="?").replace("there", "reward"))
    text = f'[taskset]\nid = "{name}"\n[harness]\nid = "rolltape.record.inprocess"\n'
    function = bench.function(text, OWN + "max_failed_groups = 2\n", reward_key="reward", rollout_max_response_len=8)
    with pytest.raises(RolloutsStopped, match="itself named 'reward'"):
        bench.train(function, 0)


def test_structured_rewards_carry_the_key_that_miles_looks_for(bench: MilesBench) -> None:
    [output] = bench.train(bench.function(reward_key="correct"), 0)
    for sample in flat(output.samples):
        assert sample.get_reward_value(miles_args(reward_key="correct")) == sample.reward["correct"]
        assert math.isclose(sample.reward["reward"], sum(v for k, v in sample.reward.items() if k != "reward"))


def test_renderers_without_what_verifiers_imports_are_refused(
    bench: MilesBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.12" if name == "renderers" else real(name))
    with pytest.raises(RuntimeError, match=r"renderers.*0\.1\.11"):
        bench.function()


# -- one trace


def test_a_trace_becomes_samples_for_those_who_ask(bench: MilesBench) -> None:
    bench.train(bench.function(reward_key=None), 0)
    records = decode(bench.recorded().table("train"))
    sound = next(record for record in records if not record["errors"])
    sample = trace_to_sample(miles_args(), sound, group_index=3, index=9)
    assert (sample.group_index, sample.index, sample.routing_key) == (3, 9, sound["id"])
    assert sample.metadata["verifiers"]["task_index"] == sound["task"]["data"]["idx"]
    failed = {**sound, "errors": [{"type": "ProviderError", "message": "gone", "traceback": None}]}
    [sample] = trace_to_samples(miles_args(), failed, group_index=0, index_start=0)
    assert (sample.status.value, sample.metadata["verifiers"]["error"]["type"]) == ("failed", "ProviderError")
    assert trace_to_samples(miles_args(), {**failed, "nodes": []}, group_index=0, index_start=0) == []
    forked = {**sound, "nodes": [*sound["nodes"], {**sound["nodes"][-1], "parent": 0, "usage": None}]}
    with pytest.raises(CheckFailed, match="branches"):
        trace_to_samples(miles_args(), forked, group_index=0, index_start=0)


def test_a_sampled_token_without_a_log_prob_is_refused(bench: MilesBench) -> None:
    bench.train(bench.function(), 0)
    record = next(record for record in decode(bench.recorded().table("train")) if not record["errors"])
    node = next(node for node in record["nodes"] if node["sampled"])
    node["logprobs"] = []
    with pytest.raises(CheckFailed, match="log-prob"):
        trace_to_samples(miles_args(), record, group_index=0, index_start=0)


def test_a_base_class_that_miles_asks_for_is_taken() -> None:
    code = (
        "from miles.rollout import base_types\n"
        "base_types.BaseRolloutFn = type('BaseRolloutFn', (), {})\n"
        "from rolltape.record.miles import VerifiersRolloutFn\n"
        "from rolltape.replay.miles import ReplayRolloutFn\n"
        "print([issubclass(f, base_types.BaseRolloutFn) for f in (VerifiersRolloutFn, ReplayRolloutFn)])\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environ)
    assert done.stdout.strip().splitlines()[-1:] == ["[True, True]"], done.stderr
