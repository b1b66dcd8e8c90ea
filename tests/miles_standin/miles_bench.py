"""Rollout functions under Miles, for tests: its arguments, the demo engine, tasksets, and replays of what was recorded."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput

from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine, Fault, Faults
from rolltape.record.engine.faults import Switch
from rolltape.record.miles import VerifiersRolloutFn
from rolltape.record.miles.room import close_recorders
from rolltape.replay.miles import ReplayRolloutFn
from rolltape.replay.run import Run, open_run
from rolltape.replay.verification import verify as verifying

DEMO = '[taskset]\nid = "rolltape.record.demo"\n[harness]\nid = "rolltape.record.demo"\n'
OWN = "renderer = 'qwen3'\nthinking = false\nrenderer_pool = 1\nretry_seconds = 5.0\n"
_numbers = itertools.count()


def miles_args(**changes: Any) -> Namespace:
    """Miles' arguments as a small run has them."""
    values: dict[str, Any] = {
        "hf_checkpoint": "demo",
        "sglang_tokenizer_path": None,
        "sglang_router_ip": None,
        "sglang_router_port": None,
        "sglang_model_routers": None,
        "sglang_router_policy": None,
        "sglang_server_concurrency": 64,
        "sglang_enable_deterministic_inference": False,
        "use_miles_router": False,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "rollout_global_dataset": False,
        "partial_rollout": False,
        "multimodal_keys": None,
        "chat_template_path": None,
        "apply_chat_template_kwargs": {},
        "use_opd": False,
        "use_rollout_routing_replay": False,
        "use_rollout_indexer_replay": False,
        "multi_lora": False,
        "multi_lora_n_adapters": 0,
        "fully_async": False,
        "eval_num_gpus": 0,
        "lora_rank": 0,
        "lora_adapter_path": None,
        "num_rollout": 3,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": None,
        "n_samples_per_prompt": 3,
        "n_samples_per_eval_prompt": 2,
        "rollout_shuffle": False,
        "rollout_seed": 42,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 256,
        "rollout_max_context_len": None,
        "rollout_max_prompt_len": None,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "eval_interval": None,
        "eval_temperature": None,
        "eval_top_p": None,
        "eval_top_k": None,
        "eval_max_response_len": None,
        "eval_max_context_len": None,
        "eval_max_prompt_len": None,
        "eval_min_new_tokens": None,
        "reward_key": None,
        "eval_reward_key": None,
        "rm_type": None,
        "custom_rm_path": None,
        "group_rm": False,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "recompute_logprobs_via_prefill": False,
        "train_backend": "megatron",
        "use_dynamic_batch_size": False,
        "use_dynamic_global_batch_size": False,
        # what Miles does with a batch
        "global_batch_size": 6,
        "disable_rollout_trim_samples": False,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "debug_train_only": False,
    }
    return Namespace(**{**values, **changes})


@dataclass
class MilesBench:
    """An engine, a folder for runs, and what Miles would do."""

    engine: DemoEngine
    folder: Path
    tokenizer: Path
    monkeypatch: pytest.MonkeyPatch
    functions: list[VerifiersRolloutFn] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def function(self, environment: str = DEMO, own: str = OWN, **changes: Any) -> VerifiersRolloutFn:
        """A rollout function as Miles makes it; the router's address is set afterwards, as Miles does."""
        self.variables(environment, own)
        args = self.args(**changes)
        function = VerifiersRolloutFn(RolloutFnConstructorInput(args=args, data_source="the data source"))
        self.start_engines(args)
        self.functions.append(function)
        return function

    def args(self, **changes: Any) -> Namespace:
        return miles_args(**{"sglang_tokenizer_path": str(self.tokenizer), **changes})

    def variables(self, environment: str = DEMO, own: str = OWN) -> None:
        number = next(_numbers)
        for name, text, variable in (
            ("env", environment, "VERIFIERS_CONFIG"),
            ("own", own, "ROLLTAPE_CONFIG"),
        ):
            path = self.folder / f"{name}{number}.toml"
            path.write_text(text)
            self.monkeypatch.setenv(variable, str(path))
        self.monkeypatch.setenv("ROLLTAPE_RUN", str(self.run_folder))

    def start_engines(self, args: Namespace) -> None:
        """What Miles does once its engines are up."""
        args.sglang_router_ip, port = self.engine.url.removeprefix("http://").split(":")
        args.sglang_router_port = int(port)

    def train(self, function: VerifiersRolloutFn, *steps: int) -> list[Any]:
        """The outputs of training calls, one after the other."""

        async def all_steps() -> list[Any]:
            try:
                return [await function(RolloutFnTrainInput(rollout_id=step)) for step in steps]
            finally:
                await function.close()

        return asyncio.run(all_steps())

    def evaluate(self, function: VerifiersRolloutFn, *steps: int) -> list[Any]:
        """The outputs of evaluation calls."""

        async def all_steps() -> list[Any]:
            try:
                return [await function(RolloutFnEvalInput(rollout_id=step)) for step in steps]
            finally:
                await function.close()

        return asyncio.run(all_steps())

    def restart(self) -> None:
        """What a new process would find: no recorder of this one."""
        close_recorders()

    def recorded(self) -> Run:
        return open_run(self.run_folder)

    def replay(self, *steps: int, **changes: Any) -> list[Any]:
        """The outputs of a replay, through Miles' own call."""
        compatibility = importlib.import_module("miles.rollout.inference_rollout.compatibility")
        made = RolloutFnConstructorInput(args=self.args(debug_train_only=True, **changes), data_source=None)
        function = compatibility.load_rollout_function(made, "rolltape.replay.miles.ReplayRolloutFn")
        assert isinstance(function, ReplayRolloutFn)
        inputs = (RolloutFnTrainInput(rollout_id=step) for step in steps)
        return [compatibility.call_rollout_function(function, one) for one in inputs]

    def module(self, source: str) -> str:
        """The name of a new module."""
        name = f"miles_case_{next(_numbers)}"
        (self.folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name


def faulty(**switches: float | Switch) -> Faults:
    """Faults by name, with their probabilities."""
    made = {name: value if isinstance(value, Switch) else Switch(value) for name, value in switches.items()}
    return Faults({Fault.named(name): switch for name, switch in made.items()})


def flat(items: Any) -> Iterator[Any]:
    """The samples of nested lists."""
    for item in items:
        if isinstance(item, list):
            yield from flat(item)
        else:
            yield item


def shown(samples: Any) -> Any:
    """Samples as nested lists of plain values, to be compared."""
    if isinstance(samples, list):
        return [shown(item) for item in samples]
    return samples.to_dict()


def bench_fixture(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, **engine: Any
) -> Iterator[MilesBench]:
    """A bench for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with DemoEngine(tokenizer_dir=tokenizer, **engine).serve_in_thread() as served:
        yield MilesBench(served, tmp_path, tokenizer, monkeypatch)
    close_recorders()


def postprocessed(batch: Any, **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    """What Miles makes of a batch: its samples, trimmed, and its train data."""
    conversion = importlib.import_module("miles.ray.rollout.rollout_data_conversion")
    train = importlib.import_module("miles.ray.rollout.train_data_conversion")
    args = miles_args(**changes)
    samples, metadata = conversion.postprocess_rollout_data(args, batch, train_parallel_config={"dp_size": 1})
    return samples, train.convert_samples_to_train_data(args, samples, metadata, None, None)


class Policy(DemoPolicy):
    """The demo's policy, which also thinks where it is asked to."""

    def candidates(self, prompt_text: str) -> Any:
        if "Think." in prompt_text:
            return [(1.0, "Let me see.\n</think>\n\nIt is 42."), (1.0, "<think>\nLet me see.\n</think>\n\nIt is 42.")]
        return super().candidates(prompt_text)


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
