"""Every option of a run under Miles: Miles' arguments, the three variables, and one TOML of our own.

What cannot be honoured is refused here, before an engine starts, with the name of the option.

    VERIFIERS_CONFIG   the environment: Verifiers' EnvConfig as TOML
    ROLLTAPE_RUN       the folder of the run
    ROLLTAPE_CONFIG    optional TOML, with the names of `rolltape record`'s options and the tables below
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rolltape.record.client import RendererSettings
from rolltape.record.config import read_toml
from rolltape.record.options import LiveOptions
from rolltape.record.recorder import StoreOptions
from rolltape.record.sampling import Limits, SamplingDefaults
from rolltape.replay.miles import RUN_VARIABLE, has_rollout_id
from rolltape.replay.options import ConvertOptions, Expectations
from rolltape.replay.tokenizer import vocabulary_size
from rolltape.replay.verification.expect import parse_expectations
from rolltape.schema.errors import BadInput

CONFIG_VARIABLE = "VERIFIERS_CONFIG"
OWN_VARIABLE = "ROLLTAPE_CONFIG"

LORA_NAME = "miles_lora"
"""Name under which Miles loads its one adapter into the engines."""

OF_MILES = {
    "config": CONFIG_VARIABLE,
    "run": RUN_VARIABLE,
    "engine": "Miles' own router",
    "model": "--hf-checkpoint",
    "tokenizer": "--sglang-tokenizer-path",
    "rollouts": "--n-samples-per-prompt",
    "groups": "--rollout-batch-size",
    "steps": "--num-rollout",
    "resume": "Miles' checkpoints (a run is always continued)",
    "eval": "--eval-interval",
    "shuffle": "--rollout-shuffle",
    "seed": "--rollout-seed",
    "deterministic": "--sglang-enable-deterministic-inference",
    "temperature": "--rollout-temperature",
    "top_p": "--rollout-top-p",
    "top_k": "--rollout-top-k",
    "max_response": "--rollout-max-response-len",
    "max_context": "--rollout-max-context-len",
    "max_prompt": "--rollout-max-prompt-len",
    "stop": "--rollout-stop",
    "stop_token_ids": "--rollout-stop-token-ids",
    "routing_key": "--sglang-router-policy",
    "lora": "--lora-rank",
}
"""Options of `rolltape record` that Miles decides, and by what."""

SHORT = {"thinking": "enable_thinking", "group_size": "min_group_size"}
"""Further names in ROLLTAPE_CONFIG, and the options they mean."""

EVAL_OVERRIDES = (
    ("eval_temperature", "rollout_temperature"),
    ("eval_top_p", "rollout_top_p"),
    ("eval_top_k", "rollout_top_k"),
    ("eval_max_response_len", "rollout_max_response_len"),
    ("eval_max_context_len", "rollout_max_context_len"),
)
"""Evaluation's arguments that replace training's where they are set."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(LiveOptions):
    """A live run's options, and the sampling settings that only Miles has."""

    min_tokens: int | None = None
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template (--apply-chat-template-kwargs)."""

    def sampling(self) -> dict[str, Any]:
        """As `LiveOptions.sampling`, with what Miles adds."""
        settings = super().sampling()
        if self.min_tokens is not None:
            settings["min_tokens"] = self.min_tokens
        if self.chat_template:
            settings["extra_body"] = {"chat_template_kwargs": dict(self.chat_template)}
        return settings


@dataclass(frozen=True)
class MilesOptions:
    """What a run under Miles was told. Made by `from_args`, which refuses what cannot work."""

    args: Namespace
    """Miles' arguments; its router's address is read from them at each request."""
    config: str
    run: str
    own: Mapping[str, Any]
    """Options of ROLLTAPE_CONFIG, under the names of LiveOptions."""
    expect: Expectations = field(default_factory=Expectations)
    store: StoreOptions = field(default_factory=StoreOptions)
    messages: bool = True
    """Tell Miles' dashboard each sample's conversation."""
    http: str = "miles"
    """Whose HTTP client asks the engines: `miles` or `own`."""

    @classmethod
    def from_args(cls, args: Namespace, environ: Mapping[str, str] = os.environ) -> MilesOptions:
        """Read `args` and the variables. Raises BadInput, naming every option that cannot be honoured."""
        config, run = environ.get(CONFIG_VARIABLE), environ.get(RUN_VARIABLE)
        if not config:
            raise BadInput(
                f"{CONFIG_VARIABLE} is not set; let it name Verifiers' EnvConfig (a .toml file), and forward it to the "
                "rollout actor."
            )
        if not run:
            raise BadInput(f"{RUN_VARIABLE} is not set; let it name the folder to record into, and forward it as well.")
        own = environ.get(OWN_VARIABLE)
        options = cls(args=args, config=config, run=run, **(_read_own(own) if own else {"own": {}}))
        problems = [*_refused(args), *options._siblings_problems()]
        if problems:
            raise BadInput(" ".join(problems))
        options.rollouts(evaluation=False)
        if getattr(args, "eval_interval", None) is not None:
            options.rollouts(evaluation=True)
        return options

    # -- what the parts of a run are made with

    def rollouts(self, *, evaluation: bool) -> RolloutOptions:
        """The options of training's or of evaluation's rollouts. Raises BadInput for values no run can have."""
        args = eval_args(self.args) if evaluation else self.args
        top_k = getattr(args, "rollout_top_k", None)
        given = {
            "config": self.config,
            "run": self.run,
            "engine": "http://miles-router",
            "model": args.hf_checkpoint,
            "tokenizer": getattr(args, "sglang_tokenizer_path", None),
            "rollouts": args.n_samples_per_eval_prompt if evaluation else args.n_samples_per_prompt,
            "groups": args.rollout_batch_size,
            "concurrency": self.capacity,
            "shuffle": bool(getattr(args, "rollout_shuffle", False)),
            "seed": args.rollout_seed,
            "deterministic": bool(getattr(args, "sglang_enable_deterministic_inference", False)),
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": -1 if top_k is None else top_k,
            "min_tokens": getattr(args, "rollout_min_new_tokens", None),
            "chat_template": dict(getattr(args, "apply_chat_template_kwargs", None) or {}),
            "max_response": args.rollout_max_response_len,
            "max_context": getattr(args, "rollout_max_context_len", None),
            "max_prompt": getattr(args, "rollout_max_prompt_len", None),
            "stop": self.defaults.stop,
            "stop_token_ids": self.defaults.stop_token_ids,
            "routing_key": self.routing_key,
            "lora": self.lora,
        }
        own = dict(self.own)
        if evaluation:
            own.pop("min_group_size", None)
        return RolloutOptions(**{**given, **own})

    def limits(self, *, evaluation: bool) -> Limits:
        """The length limits of training's or of evaluation's requests."""
        return limits_of(eval_args(self.args) if evaluation else self.args)

    @property
    def defaults(self) -> SamplingDefaults:
        """Settings that every engine request carries."""
        return defaults_of(self.args)

    @property
    def renderer(self) -> RendererSettings:
        """The renderer's settings."""
        own = self.own
        return RendererSettings(own.get("renderer"), own.get("enable_thinking"), own.get("thinking_retention"))

    def conversion(self, *, evaluation: bool = False) -> ConvertOptions:
        """How traces become Samples. Rewards that Miles' own models give are not looked for in the trace."""
        theirs = self.miles_rewards
        return ConvertOptions(
            branch_policy=self.own.get("branch_policy", "reject"),
            min_group_size=None if evaluation else self.own.get("min_group_size"),
            strict=bool(self.own.get("strict", False)) and not evaluation,
            reward_key=None if theirs or evaluation else getattr(self.args, "reward_key", None),
            vocab_size=vocabulary_size(self.args.hf_checkpoint),
            unscored="allow" if theirs or evaluation else "refuse",
            expect=Expectations() if evaluation else self.expect,
        )

    # -- single facts

    @property
    def capacity(self) -> int:
        """Requests the engines take at once: --sglang-server-concurrency for each of them."""
        engines = getattr(self.args, "rollout_num_gpus", None) or 1
        per_engine = getattr(self.args, "rollout_num_gpus_per_engine", None) or 1
        each = getattr(self.args, "sglang_server_concurrency", None) or 512
        return max(1, each * max(1, engines // per_engine))

    @property
    def over_sampling(self) -> int:
        """Groups started at once where fewer than the batch are at hand."""
        return getattr(self.args, "over_sampling_batch_size", None) or int(self.args.rollout_batch_size)

    @property
    def miles_rewards(self) -> bool:
        """Whether Miles' reward models score the samples."""
        args = self.args
        named = getattr(args, "custom_rm_path", None) is not None or bool(getattr(args, "rm_type", None))
        return named or bool(getattr(args, "group_rm", False))

    @property
    def routing_key(self) -> bool:
        """Whether the router keeps a rollout on one engine by a key."""
        return routes_by_key(self.args)

    @property
    def lora(self) -> str | None:
        """The adapter to sample with."""
        return lora_of(self.args)

    def check_group_rewards(self, names: Sequence[str]) -> None:
        """Raise BadInput where rewards that compare rollouts (`names`) would have nothing to compare."""
        args, told = self.args, ", ".join(names)
        trains = getattr(args, "num_rollout", None) != 0
        if trains and args.n_samples_per_prompt < 2:
            raise BadInput(
                f"The taskset compares the rollouts of a task (@group_reward {told}), and --n-samples-per-prompt is "
                f"{args.n_samples_per_prompt}; set it to 2 or more."
            )
        if getattr(args, "eval_interval", None) is not None and args.n_samples_per_eval_prompt < 2:
            raise BadInput(
                f"The taskset compares the rollouts of a task (@group_reward {told}), and --n-samples-per-eval-prompt is "
                f"{args.n_samples_per_eval_prompt}; set it to 2 or more, or leave --eval-interval away."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the settings of an attempt."""
        plain = (str, int, float, bool, list, type(None))
        given = {name: value for name, value in vars(self.args).items() if isinstance(value, plain)}
        own = {"config": self.config, "run": self.run, **self.own, "messages": self.messages, "http": self.http}
        return {"miles": given, "rolltape": own}

    def _siblings_problems(self) -> list[str]:
        """Why batches with several samples per rollout would not train here."""
        if self.own.get("branch_policy", "reject") != "siblings":
            return []
        args = self.args
        found = {
            "this Miles' Sample has no rollout_id": not has_rollout_id(),
            "--train-backend is not megatron": getattr(args, "train_backend", "megatron") != "megatron",
            "--use-dynamic-batch-size is not set": not getattr(args, "use_dynamic_batch_size", False),
            "--use-dynamic-global-batch-size is set": bool(getattr(args, "use_dynamic_global_batch_size", False)),
        }
        wrong = [name for name, is_so in found.items() if is_so]
        if not wrong:
            return []
        return [f'branch_policy = "siblings" cannot be trained: {", ".join(wrong)}. Change that, or use "reject".']


def eval_args(args: Namespace) -> Namespace:
    """Miles' arguments as evaluation takes them: its own ones where they are set, and no limit on the prompt but its own."""
    result = Namespace(**vars(args))
    for mine, training in EVAL_OVERRIDES:
        if (value := getattr(args, mine, None)) is not None:
            setattr(result, training, value)
    result.rollout_max_prompt_len = getattr(args, "eval_max_prompt_len", None)
    result.rollout_min_new_tokens = getattr(args, "eval_min_new_tokens", None)
    result.reward_key = getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
    return result


def limits_of(args: Namespace) -> Limits:
    """The length limits among Miles' arguments."""
    names = ("rollout_max_response_len", "rollout_max_context_len", "rollout_max_prompt_len")
    return Limits(*(getattr(args, name, None) for name in names))


def defaults_of(args: Namespace) -> SamplingDefaults:
    """The stops among Miles' arguments."""
    return SamplingDefaults(
        tuple(_listed(getattr(args, "rollout_stop", None))),
        tuple(_listed(getattr(args, "rollout_stop_token_ids", None))),
        bool(getattr(args, "rollout_skip_special_tokens", False)),
    )


def lora_of(args: Namespace) -> str | None:
    """The adapter that Miles' arguments sample with."""
    rank, path = getattr(args, "lora_rank", 0) or 0, getattr(args, "lora_adapter_path", None)
    return LORA_NAME if (rank > 0 or path is not None) and not getattr(args, "lora_train_only", False) else None


def routes_by_key(args: Namespace) -> bool:
    """Whether the router of Miles' arguments keeps requests with one key on one engine."""
    return getattr(args, "sglang_router_policy", None) in ("consistent_hashing", "manual")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


_NOT_HONOURED = {
    "partial_rollout": ("--partial-rollout", "an episode cannot go on from the middle; leave it away"),
    "multimodal_keys": ("--multimodal-keys", "samples are text only; leave it away"),
    "chat_template_path": (
        "--chat-template-path",
        "renderers take no template of their own; use the checkpoint's, with --apply-chat-template-kwargs",
    ),
    "use_opd": ("--use-opd", "a teacher's log-probs are not asked for; leave it away"),
    "use_rollout_routing_replay": ("--use-rollout-routing-replay", "routed experts are not kept; leave it away"),
    "use_rollout_indexer_replay": ("--use-rollout-indexer-replay", "indexer choices are not kept; leave it away"),
    "multi_lora": ("multi-LoRA", "episodes sample with one adapter; use --lora-rank"),
    "multi_lora_n_adapters": ("--multi-lora-n-adapters", "episodes sample with one adapter; use --lora-rank"),
    "fully_async": ("--fully-async", "it takes no rollout function of others; leave it away"),
    "eval_num_gpus": (
        "--eval-num-gpus",
        "evaluation beside training on engines of its own is not supported; let it share the training engines",
    ),
}
"""Arguments that are refused where they are set: their option, why, and what to do."""


def _refused(args: Namespace) -> list[str]:
    """A sentence for each option that cannot be honoured."""
    found = []
    if getattr(args, "rollout_global_dataset", False):
        found.append(
            "The taskset gives the tasks, and Miles' prompt data would go unused: set --disable-rollout-global-dataset."
        )
    for name, (option, why) in _NOT_HONOURED.items():
        value = getattr(args, name, None)
        if value is not None and value is not False and value != 0 and value != []:
            found.append(f"{option} is not supported: {why}.")
    if getattr(args, "rollout_max_response_len", None) is None:
        found.append(
            "--rollout-max-response-len is not set; nothing would limit a reply. Set it to a number of tokens."
        )
    if getattr(args, "group_rm", False) and getattr(args, "eval_interval", None) is not None:
        found.append("--group-rm scores training only, and --eval-interval is set: leave one of them away.")
    return found


_EXTRAS = ("expect", "journal", "messages", "http")
_STORE = ("fsync", "fsync_seconds", "ack_seconds", "commit_seconds", "queue_bytes")
"""Options of the journal that may stand at the top level, as on the command line, or in the table [journal]."""


def _read_own(path: str) -> dict[str, Any]:
    """Fields of MilesOptions from our TOML. Raises BadInput naming the file and the option."""
    data = {SHORT.get(key.replace("-", "_"), key.replace("-", "_")): value for key, value in read_toml(path).items()}
    known = {f.name for f in fields(LiveOptions)} - set(OF_MILES)
    for name in data:
        if name in OF_MILES:
            raise BadInput(f"{path}: {name} is decided by {OF_MILES[name]}; remove it here.")
        if name not in known and name not in _EXTRAS:
            raise BadInput(f"{path}: {name!r} is no option; known are {', '.join(sorted(known | set(_EXTRAS)))}.")
    result: dict[str, Any] = {"own": {name: value for name, value in data.items() if name in known}}
    if "expect" in data:
        result["expect"] = _expectations(data["expect"], path)
    journal = {name: data[name] for name in _STORE if name in data}
    if "journal" in data or journal:
        table = data.get("journal", {})
        given = {"journal": table} if isinstance(table, bool) else table
        result["store"] = _store({**journal, **given} if isinstance(given, dict) else given, path)
    for name, allowed in (("messages", (True, False)), ("http", ("miles", "own"))):
        if name in data:
            if data[name] not in allowed:
                raise BadInput(f"{path}: {name} is {data[name]!r}; expected {' or '.join(map(repr, allowed))}.")
            result[name] = data[name]
    return result


def _expectations(value: Any, path: str) -> Expectations:
    if isinstance(value, str):
        from rolltape.replay.verification.expect import load_expectations

        return load_expectations(Path(path).parent / value)
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expect is {value!r}; expected a table of expectations, or the name of a file of them.")
    return parse_expectations(value, f"{path}: expect")


def _store(value: Any, path: str) -> StoreOptions:
    known = [f.name for f in fields(StoreOptions)]
    unknown = sorted(set(value) - set(known)) if isinstance(value, dict) else None
    if unknown is None or unknown:
        raise BadInput(f"{path}: journal is {value!r}; expected a table of {', '.join(known)}.")
    return StoreOptions(**value)
