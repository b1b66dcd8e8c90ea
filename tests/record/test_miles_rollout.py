"""Training and evaluation under Miles: batches, faults, hooks, resuming, and replays that give the same batches."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from miles_bench import OWN, MilesBench, bench_fixture, faulty, flat, miles_args, postprocessed, shown

from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import write_tokenizer
from rolltape.record.engine.faults import Switch
from rolltape.record.miles import (
    RolloutsStopped,
    VerifiersRolloutFn,
    generate_rollout,
    trace_to_sample,
    trace_to_samples,
)
from rolltape.replay import verify as verifying
from rolltape.replay.run import Run
from rolltape.schema import decode
from rolltape.schema.errors import BadInput, CheckFailed


class Policy(DemoPolicy):
    """The demo's policy, which also thinks where it is asked to."""

    def candidates(self, prompt_text: str) -> Any:
        if "Think." in prompt_text:
            return [(1.0, "Let me see.\n</think>\n\nIt is 42."), (1.0, "<think>\nLet me see.\n</think>\n\nIt is 42.")]
        return super().candidates(prompt_text)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MilesBench]:
    yield from bench_fixture(tmp_path, tokenizer, monkeypatch, policy=Policy())


TASKSET = """
import verifiers.v1 as vf

class Asked(vf.Task):
    @vf.reward
    async def there(self, trace) -> float:
        {score}

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=i, prompt="{prompt} %d" % i), self.config.task) for i in range({tasks})]

async def user(task, messages):
    asked = "Think." in messages[0]["content"] and len(messages) < 4
    return [{{"role": "user", "content": "Think. Again."}}] if asked else None

__all__ = ["Asks"]
"""


def environment(
    bench: MilesBench, score: str = "return 1.0", tasks: int = 5, prompt: str = "?", user: bool = False
) -> str:
    """The environment of a new taskset, run inside this process."""
    name = bench.module(TASKSET.format(score=score, tasks=tasks, prompt=prompt))
    more = f'user = "{name}:user"\n' if user else ""
    return f'[taskset]\nid = "{name}"\n[harness]\nid = "rolltape.record.inprocess"\n{more}'


def fates(run: Run, split: str = "train", step: int | None = None) -> Counter[str]:
    return Counter(run.table(split, step, columns=["disposition"]).column("disposition").to_pylist())


def reasons(run: Run, split: str = "train") -> set[str]:
    return {str(reason) for reason in run.table(split, columns=["reason"]).column("reason").to_pylist()}


def tasks_of(run: Run, step: int) -> list[int]:
    """Task indices of a step's groups, also those that were lost, in order."""
    rows = run.table("train", step, columns=["group_index", "task_idx"]).to_pylist()
    return [task for _, task in sorted({(row["group_index"], row["task_idx"]) for row in rows})]


def is_clean(run: Run) -> bool:
    return not verifying.verify(run).errors


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


# -- hooks

HOOKS = """
async def score(args, sample):
    return {"score": float(sample.index % 3), "length": sample.response_length}

async def score_all(args, samples):
    return [float(i) for i, sample in enumerate(samples)]

def odd_groups(args, samples, **_):
    return samples[0].group_index % 2 == 1

def remove_first(args, groups):
    groups[0][0].remove_sample = True
    groups.reverse()

seen = []

def everything(args, groups, data_source):
    seen.append((len(groups), data_source))
"""


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
