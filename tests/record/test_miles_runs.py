"""Hooks, resuming, evaluation and several branches under Miles: what changes a batch, and that a replay has it too."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from miles_bench import (
    HOOKS,
    OWN,
    MilesBench,
    Policy,
    bench_fixture,
    environment,
    fates,
    faulty,
    flat,
    is_clean,
    postprocessed,
    reasons,
    shown,
    tasks_of,
)

from rolltape.record.engine import write_tokenizer
from rolltape.record.miles import (
    RolloutsStopped,
)
from rolltape.schema.errors import BadInput


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MilesBench]:
    yield from bench_fixture(tmp_path, tokenizer, monkeypatch, policy=Policy())


# -- hooks


def test_what_hooks_change_is_handed_over_again_by_a_replay(bench: MilesBench) -> None:
    name = bench.module(HOOKS)
    function = bench.function(
        reward_key="score",
        custom_rm_path=f"{name}.score",
        dynamic_sampling_filter_path=f"{name}.odd_groups",
        rollout_sample_filter_path=f"{name}.remove_first",
        rollout_all_samples_process_path=f"{name}.everything",
    )
    [output] = bench.train(function, 0)
    groups = [group[0].group_index for group in output.samples]
    assert groups == sorted(groups, reverse=True)
    assert all(index % 2 for index in groups)
    assert [sample.remove_sample for sample in flat(output.samples)].count(True) == 1
    assert {sample.reward["score"] for sample in flat(output.samples)} == {0.0, 1.0, 2.0}
    run = bench.recorded()
    assert fates(run)["filtered"] >= 3
    assert is_clean(run)
    [again] = bench.replay(0)
    assert shown(again.samples) == shown(output.samples)
    module = __import__(name)
    assert module.seen[0][0] >= 3
    assert module.seen[0][1] == "the data source"


def test_log_probs_that_miles_recomputes_are_those_of_the_replay(
    bench: MilesBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    module = importlib.import_module("miles.rollout.generate_utils.prefill_logprobs")

    async def recompute(args: Any, samples: list[Any], *, url: str, sampling_params: Any) -> None:
        assert args.recompute_logprobs_via_prefill
        assert url.endswith("/generate")
        assert sampling_params["max_new_tokens"] == args.rollout_max_response_len
        for sample in samples:
            sample.rollout_log_probs = [-0.1 * (token % 7) - 0.3 for token in sample.tokens[-sample.response_length :]]
            sample.metadata["rollout_log_probs_source"] = "sglang_prefill_recompute"

    monkeypatch.setattr(module, "recompute_samples_rollout_logprobs_via_prefill", recompute)
    [output] = bench.train(bench.function(recompute_logprobs_via_prefill=True), 0)
    [again] = bench.replay(0)
    assert shown(again.samples) == shown(output.samples)
    sample = next(flat(again.samples))
    assert math.isclose(
        sample.rollout_log_probs[0], -0.1 * (sample.tokens[-sample.response_length] % 7) - 0.3, rel_tol=1e-6
    )
    assert is_clean(bench.recorded())


def test_a_reward_for_whole_groups_is_taken_in_training(bench: MilesBench) -> None:
    name = bench.module(HOOKS)
    [output] = bench.train(bench.function(group_rm=True, custom_rm_path=f"{name}.score_all"), 0)
    assert [[sample.reward for sample in group] for group in output.samples] == [[0.0, 1.0, 2.0]] * 2
    with pytest.raises(BadInput, match="--group-rm"):
        bench.evaluate(bench.functions[0], 0)


def test_a_hook_that_raises_ends_the_step_and_what_was_sampled_is_recorded(bench: MilesBench) -> None:
    name = bench.module("def broken(args, groups):\n    raise KeyError('no such group')\n")
    function = bench.function(rollout_sample_filter_path=f"{name}.broken")
    with pytest.raises(KeyError, match="no such group"):
        bench.train(function, 0)
    run = bench.recorded()
    assert fates(run)["emitted"] == 0
    assert any("no such group" in reason for reason in reasons(run))
    assert is_clean(run)


def test_a_function_that_is_not_there_is_refused_with_its_option(bench: MilesBench) -> None:
    with pytest.raises(BadInput, match="--dynamic-sampling-filter-path"):
        bench.function(dynamic_sampling_filter_path="json.no_such_function")


# -- resuming


def test_a_run_resumed_at_an_earlier_step_goes_on_after_the_one_before(bench: MilesBench) -> None:
    text = environment(bench, tasks=50)
    options = {"rollout_max_response_len": 8, "over_sampling_batch_size": 3}
    bench.train(bench.function(text, **options), 0, 1, 2, 3)
    first = {step: tasks_of(bench.recorded(), step) for step in range(4)}
    bench.restart()
    bench.train(bench.function(text, **options), 2, 3)
    run = bench.recorded()
    again = {step: tasks_of(run, step) for step in range(4)}
    assert again[2][0] == first[2][0] == first[1][-1] + 1
    walked = [task for step in range(4) for task in again[step]]
    assert walked == list(range(len(walked)))
    assert [step.attempt for step in run.steps()] == [0, 0, 1, 1]
    indices = [index for step in run.steps() for index in step.batch or ()]
    assert len(indices) == len(set(indices))


def test_a_step_that_follows_none_that_was_recorded_begins_at_step_times_batch_size(bench: MilesBench) -> None:
    text = environment(bench, tasks=50)
    bench.train(bench.function(text, rollout_max_response_len=8), 7)
    assert tasks_of(bench.recorded(), 7) == [14, 15]


def test_a_checkpoint_that_is_loaded_restores_the_counters(bench: MilesBench) -> None:
    text = environment(bench, tasks=50)
    function = bench.function(text, rollout_max_response_len=8)
    bench.train(function, 0, 1, 2)
    function.load(0)
    bench.train(function, 1)
    assert tasks_of(bench.recorded(), 1) == [2, 3]


def test_another_model_is_not_recorded_into_the_same_run(bench: MilesBench) -> None:
    bench.train(bench.function(), 0)
    bench.restart()
    with pytest.raises(FileExistsError, match="another"):
        bench.train(bench.function(hf_checkpoint="another"), 1)


# -- evaluation


def test_an_evaluation_covers_every_task_and_a_failure_costs_itself(bench: MilesBench) -> None:
    text = environment(
        bench, score='if self.data.idx == 2: raise ValueError("gone")\n        return self.data.idx / 10'
    )
    function = bench.function(text, rollout_max_response_len=8, eval_max_response_len=4, eval_temperature=0.5)
    [output] = bench.evaluate(function, 0)
    [(_, data)] = output.data.items()
    assert data["rewards"] == [0.0, 0.0, 0.1, 0.1, None, None, 0.3, 0.3, 0.4, 0.4]
    assert all(sample.response_length <= 4 for sample in data["samples"])
    assert len(data["truncated"]) == 10
    run = bench.recorded()
    [split] = run.splits()
    settings = run.table(split, columns=["sampling"]).column("sampling").to_pylist()
    assert all('"temperature": 0.5' in text or '"temperature":0.5' in text for text in settings)
    assert fates(run, split) == {"eval": 8, "error": 2}
    assert is_clean(run)


def test_an_evaluation_of_nothing_but_failures_tells_the_last_error(bench: MilesBench) -> None:
    bench.engine.faults = faulty(http_403=1.0)
    with pytest.raises(RolloutsStopped, match="403"):
        bench.evaluate(bench.function(environment(bench), rollout_max_response_len=8), 0)


def test_miles_rewards_and_keys_are_taken_in_evaluation(bench: MilesBench) -> None:
    name = bench.module(HOOKS)
    function = bench.function(
        environment(bench, tasks=2), custom_rm_path=f"{name}.score", eval_reward_key="score", rollout_max_response_len=8
    )
    [output] = bench.evaluate(function, 0)
    [(_, data)] = output.data.items()
    assert data["rewards"] == [0.0, 1.0, 2.0, 0.0]


def test_a_reward_key_that_names_nothing_is_refused_with_the_names_there_are(bench: MilesBench) -> None:
    function = bench.function(environment(bench, tasks=2), eval_reward_key="score", rollout_max_response_len=8)
    with pytest.raises(BadInput, match=r"'score'.*there"):
        bench.evaluate(function, 0)


def test_one_rollout_id_can_be_evaluated_before_and_after_its_training(bench: MilesBench) -> None:
    text = environment(bench, tasks=2)
    function = bench.function(text, rollout_max_response_len=8, eval_interval=1)
    bench.evaluate(function, 0)
    bench.train(function, 0)
    bench.evaluate(function, 0)
    run = bench.recorded()
    assert len(run.splits()) == 3
    assert {step.attempt for split in run.splits() for step in run.steps(split)} == {0}


# -- several branches


def test_siblings_go_to_miles_as_one_rollout(bench: MilesBench) -> None:
    text = environment(bench, prompt="Think.", user=True, score="return float(trace.id[-1] > '7')")
    own = OWN.replace("thinking = false", "thinking = true") + "branch_policy = 'siblings'\n"
    function = bench.function(text, own, use_dynamic_batch_size=True)
    [output] = bench.train(function, 0)
    samples, data = postprocessed(output.samples, use_dynamic_batch_size=True)
    by_rollout: dict[int, list[Any]] = {}
    for sample in samples:
        sample.validate()
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    assert len(by_rollout) == 6
    assert any(len(siblings) > 1 for siblings in by_rollout.values())
    for rollout, siblings in by_rollout.items():
        assert rollout == siblings[0].index
        assert len({sample.reward for sample in siblings}) == 1
        trainable = sum(sum(sample.loss_mask) for sample in siblings)
        assert {data["rollout_mask_sums"][samples.index(sample)] for sample in siblings} == {trainable}
    assert is_clean(bench.recorded())
    [again] = bench.replay(0)
    assert shown(again.samples) == shown(output.samples)


# -- long runs

STEPS = 200 if os.environ.get("ROLLTAPE_LONG_TESTS") else 20


@pytest.mark.timeout(3600 if STEPS > 20 else 180)
def test_a_long_run_with_faults_that_steps_back_twice_replays_the_same_batches(bench: MilesBench) -> None:
    name = bench.module(HOOKS)
    bench.engine.faults = faulty(
        abort_partial=0.01, http_500=0.01, finish_null=0.01, logprob_nan=0.01, empty_completion=0.01
    )
    options = {
        "custom_rm_path": f"{name}.score",
        "reward_key": "score",
        "rollout_sample_filter_path": f"{name}.remove_first",
        "over_sampling_batch_size": 3,
        "num_rollout": STEPS,
    }
    outputs: dict[int, Any] = {}
    for start, end in ((0, STEPS // 2), (STEPS // 2 - 3, STEPS - 4), (STEPS - 6, STEPS)):
        steps = range(start, end)
        outputs.update(zip(steps, bench.train(bench.function(**options), *steps), strict=True))
        bench.restart()
    run = bench.recorded()
    assert [step.step for step in run.steps()] == list(range(STEPS))
    assert is_clean(run)
    for step in range(STEPS):
        [again] = bench.replay(step, reward_key="score")
        assert shown(again.samples) == shown(outputs[step].samples), f"step {step}"
    walked = [task for step in range(STEPS) for task in tasks_of(run, step)]
    assert walked == [place % 12 for place in range(len(walked))]


def test_replays_go_through_miles_own_call(bench: MilesBench) -> None:
    [output] = bench.train(bench.function(), 0)
    [again] = bench.replay(0)
    _, data = postprocessed(again.samples)
    _, then = postprocessed(output.samples)
    assert data["rewards"] == then["rewards"]
