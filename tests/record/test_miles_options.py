"""What a run under Miles is told, and what it refuses before an engine starts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from miles_bench import miles_args

from rolltape.record.miles import MilesOptions
from rolltape.record.miles.options import eval_args
from rolltape.schema.errors import BadInput

ENVIRON = {"VERIFIERS_CONFIG": "env.toml", "ROLLTAPE_RUN": "runs/mine"}


def options(environ: dict[str, str] | None = None, **changes: Any) -> MilesOptions:
    return MilesOptions.from_args(miles_args(**changes), {**ENVIRON, **(environ or {})})


def own(folder: Path, text: str) -> dict[str, str]:
    path = folder / "own.toml"
    path.write_text(text)
    return {"ROLLTAPE_CONFIG": str(path)}


def test_a_usual_command_line_is_taken() -> None:
    rollouts = options(rollout_temperature=0.8, rollout_max_context_len=2048).rollouts(evaluation=False)
    assert (rollouts.rollouts, rollouts.groups, rollouts.max_context) == (3, 2, 2048)
    assert rollouts.sampling() == {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_tokens": 256}


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"rollout_global_dataset": True}, "--disable-rollout-global-dataset"),
        ({"partial_rollout": True}, "--partial-rollout"),
        ({"multimodal_keys": {"image": "images"}}, "--multimodal-keys"),
        ({"chat_template_path": "template.jinja"}, "--chat-template-path"),
        ({"use_opd": True}, "--use-opd"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay"),
        ({"use_rollout_indexer_replay": True}, "--use-rollout-indexer-replay"),
        ({"rollout_max_response_len": None}, "--rollout-max-response-len"),
        ({"multi_lora": True}, "multi-LoRA"),
        ({"multi_lora_n_adapters": 2}, "--multi-lora-n-adapters"),
        ({"eval_num_gpus": 1}, "--eval-num-gpus"),
        ({"fully_async": True}, "--fully-async"),
        ({"group_rm": True, "eval_interval": 1}, "--group-rm"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_option(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(BadInput, match=option):
        options(**changes)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(BadInput, match=r"--partial-rollout.*--use-opd|--use-opd.*--partial-rollout"):
        options(partial_rollout=True, use_opd=True)


@pytest.mark.parametrize("variable", ["VERIFIERS_CONFIG", "ROLLTAPE_RUN"])
def test_a_missing_variable_is_named(variable: str) -> None:
    environ = {name: value for name, value in ENVIRON.items() if name != variable}
    with pytest.raises(BadInput, match=variable):
        MilesOptions.from_args(miles_args(), environ)


def test_arguments_of_other_revisions_may_be_missing() -> None:
    args = miles_args()
    for name in ("eval_num_gpus", "multi_lora", "fully_async", "use_rollout_indexer_replay", "lora_adapter_path"):
        delattr(args, name)
    assert MilesOptions.from_args(args, ENVIRON).lora is None


def test_our_own_options_have_the_names_of_the_command_line(tmp_path: Path) -> None:
    text = (
        'branch_policy = "reject"\nthinking = false\nthinking-retention = "all"\nrenderer = "qwen3"\nstrict = true\n'
        "group_size = 2\nretry_seconds = 3\nconcurrency = 7\nmessages = false\n"
        "[expect]\nbranches = 1\n[journal]\nack_seconds = 2.0\n"
    )
    found = options(own(tmp_path, text))
    rollouts, conversion = found.rollouts(evaluation=False), found.conversion()
    assert (rollouts.concurrency, rollouts.retry_seconds, found.messages) == (7, 3, False)
    assert found.renderer.to_dict() == {"name": "qwen3", "enable_thinking": False, "thinking_retention": "all"}
    assert (conversion.min_group_size, conversion.strict, conversion.expect.branches) == (2, True, 1)
    assert found.store.ack_seconds == 2.0


def test_options_of_the_journal_may_stand_at_the_top_or_in_its_table(tmp_path: Path) -> None:
    found = options(own(tmp_path, 'fsync = "always"\nack_seconds = 1.0\n[journal]\nack_seconds = 2.0\n')).store
    assert (found.fsync, found.ack_seconds, found.journal) == ("always", 2.0, True)
    assert not options(own(tmp_path, "journal = false\n")).store.journal


def test_patterns_of_secrets_reach_the_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltape.record.miles import room

    given: dict[str, Any] = {}
    monkeypatch.setattr(room.Recorder, "open", lambda _path, **options: given.update(options))
    environ = own(tmp_path, 'mask = ["hunter[0-9]+"]\nwriter = "second"\n') | {"ROLLTAPE_RUN": str(tmp_path / "run")}
    room._opened(options(environ), "some-taskset", 3, {})
    assert given["secrets"].mask({"note": "say hunter2"}) == {"note": "say ***"}
    assert (given["writer"], given["start_step"]) == ("second", 3)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("temperature = 0.5", "--rollout-temperature"),
        ("rollouts = 4", "--n-samples-per-prompt"),
        ("branch_polizy = 'reject'", "branch_polizy"),
        ("branch_policy = 'all'", "branch_policy"),
        ("http = 'curl'", "http"),
        ("[journal]\nnonsense = 1", "journal"),
        ("[expect]\nnonsense = 1", "nonsense"),
        ("group_size = 9", "min_group_size"),
    ],
)
def test_our_own_options_are_checked(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(BadInput, match=found):
        options(own(tmp_path, text))


def test_concurrency_of_episodes_is_apart_from_the_capacity_of_the_engines(tmp_path: Path) -> None:
    changes = {"sglang_server_concurrency": 32, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2}
    assert options(**changes).capacity == options(**changes).rollouts(evaluation=False).concurrency == 128
    found = options(own(tmp_path, "concurrency = 16"), **changes)
    assert (found.capacity, found.rollouts(evaluation=False).concurrency) == (128, 16)


def test_evaluation_has_overrides_and_no_prompt_limit_of_training() -> None:
    args = miles_args(
        rollout_max_prompt_len=32, rollout_max_context_len=64, eval_max_context_len=128, reward_key="score"
    )
    found = eval_args(args)
    assert (found.rollout_max_context_len, found.rollout_max_prompt_len) == (128, None)
    assert (found.rollout_max_response_len, found.reward_key) == (256, "score")
    assert eval_args(Namespace(**{**vars(args), "eval_reward_key": "other"})).reward_key == "other"


def test_the_least_number_of_tokens_and_template_settings_reach_the_sampling() -> None:
    args = {"rollout_min_new_tokens": 3, "rollout_top_k": 20, "apply_chat_template_kwargs": {"enable_thinking": False}}
    sampling = options(**args).rollouts(evaluation=False).sampling()
    assert (sampling["min_tokens"], sampling["top_k"]) == (3, 20)
    assert sampling["extra_body"] == {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"n_samples_per_prompt": 1}, "--n-samples-per-prompt"),
        ({"eval_interval": 1, "n_samples_per_eval_prompt": 1}, "--n-samples-per-eval-prompt"),
        ({"num_rollout": 0, "n_samples_per_prompt": 1}, None),
        ({"n_samples_per_eval_prompt": 1}, None),
    ],
)
def test_rewards_that_compare_rollouts_need_two_of_them(changes: dict[str, Any], option: str | None) -> None:
    found = options(**changes)
    if option is None:
        found.check_group_rewards(["fastest"])
        return
    with pytest.raises(BadInput, match=option):
        found.check_group_rewards(["fastest"])


def test_siblings_are_refused_where_miles_could_not_train_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = own(tmp_path, "branch_policy = 'siblings'")
    good = {"use_dynamic_batch_size": True}
    assert options(siblings, **good).conversion().branch_policy == "siblings"
    for bad in (
        {"use_dynamic_batch_size": False},
        {"train_backend": "fsdp"},
        {"use_dynamic_global_batch_size": True},
        {"multi_lora": True},
    ):
        with pytest.raises(BadInput, match=f"--{next(iter(bad)).replace('_', '-')}|multi-LoRA"):
            options(siblings, **{**good, **bad})
    monkeypatch.setattr("rolltape.record.miles.options.has_rollout_id", lambda: False)
    with pytest.raises(BadInput, match="rollout_id"):
        options(siblings, **good)


def test_an_adapter_is_sampled_with_only_where_rollouts_use_it() -> None:
    assert options(lora_rank=8).lora == "miles_lora"
    assert options(lora_adapter_path="a").lora == "miles_lora"
    assert options(lora_rank=8, lora_train_only=True).lora is None
    assert options().lora is None
