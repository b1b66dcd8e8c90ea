"""`rolltape launch`: the Miles training command of a Verifiers environment, made, checked and run.

    options ─► plan (arguments, variables, files, commands) ─► problems? ─► files ─► prepare ─► Miles' `execute_train`

What Miles or its rollout actor would refuse only when engines and trainer are up is refused here. The defaults are those
of a smoke run on two GPUs.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolltape.record.config import env_config, load_config, load_environment, load_tasks, read_toml, refuse_v0
from rolltape.record.launching.options import (
    LEGACY_VARIABLE,
    OLDER_VARIABLE,
    OWNED,
    RENAMED,
    TUNING,
    LaunchOptions,
    checkpoint_of,
    ref_load_of,
)
from rolltape.record.miles.hooks import Hooks
from rolltape.record.miles.options import CONFIG_VARIABLE, OWN_VARIABLE, MilesOptions
from rolltape.record.versions import check_live
from rolltape.replay.miles import RUN_VARIABLE
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput, MissingExtra, RunConflict
from rolltape.schema.jsontext import read_json
from rolltape.schema.storage import STATE_VARIABLE, StorePath

ROLLOUT_CLASS = "rolltape.record.miles.VerifiersRolloutFn"
ROLLOUT_FUNCTION = "rolltape.record.miles.generate_rollout"
HELPERS = "miles.utils.external_utils.command_utils"
EVAL_NAME = "verifiers-taskset"
OF_STORES = (
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    STATE_VARIABLE,
)
"""Variables that are forwarded where the run lies in an object store. Keys are not: they would stand in the command."""
"""Name in the placeholder that Miles wants beside --eval-interval; nothing opens it."""

Arguments = dict[str, tuple[str, ...]]
"""Options of Miles' command line, in order, each with its values; a flag has none."""


@dataclass(frozen=True)
class Plan:
    """What a launch would do."""

    options: LaunchOptions
    arguments: Arguments
    variables: dict[str, str]
    """Forwarded to the actors."""
    files: dict[Path, str]
    """Written before anything runs."""
    megatron: str | None
    """Folder of Megatron-LM; None where Miles is not there to tell its default."""
    problems: list[str] = field(default_factory=list)
    """What is missing on this machine."""

    @property
    def checkpoint(self) -> Path:
        return checkpoint_of(self.options)

    @property
    def ref_load(self) -> Path:
        return ref_load_of(self.options)

    @property
    def words(self) -> list[str]:
        """Miles' arguments as words."""
        return [word for name, values in self.arguments.items() for word in (name, *values)]

    @property
    def train_args(self) -> str:
        """Miles' arguments, quoted for a shell."""
        return shlex.join(self.words)

    @property
    def download(self) -> str:
        """The command that fetches the checkpoint."""
        return shlex.join(["hf", "download", self.options.model, "--local-dir", str(self.checkpoint)])

    @property
    def conversion(self) -> dict[str, Any]:
        """Arguments of Miles' `convert_checkpoint`."""
        name = self.ref_load.name.removesuffix("_torch_dist")
        given = {
            "model_name": name,
            "megatron_model_type": self.options.model_type,
            "num_gpus_per_node": self.options.gpus,
            "dir_dst": str(self.ref_load.parent),
            "hf_checkpoint": str(self.checkpoint),
        }
        return given | ({"megatron_path": self.megatron} if self.megatron else {})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        prepare = [] if self.options.skip_prepare else [self.download, f"convert_checkpoint({told(self.conversion)})"]
        return {
            "prepare": prepare,
            "command": ["python3", "train.py", f"<model arguments of {self.options.model_type}>", *self.words],
            "variables": self.variables,
            "files": {str(path): text for path, text in self.files.items()},
            "problems": self.problems,
        }


def plan_launch(options: LaunchOptions, environ: Mapping[str, str] = os.environ) -> Plan:
    """What a launch with `options` would do. Raises BadInput, or what `check` finds, naming the option."""
    files: dict[Path, str] = {}
    config = _config(options, files)
    megatron = options.megatron or default_megatron()
    given = _given_variables(options.env)
    legacy = _legacy({**environ, **given})
    extra = parse(options.extra)
    _refuse_conflicts(extra)
    arguments = _arguments(options, config, ROLLOUT_FUNCTION if legacy else ROLLOUT_CLASS, extra)
    variables = _variables(options, config, megatron, environ, given)
    args = namespace(arguments)
    _check_sizes(args, options)
    made = MilesOptions.from_args(args, variables)
    if options.check:
        _check_environment(options, made)
    return Plan(options, arguments, variables, files, megatron, _problems(options, config, files))


def launch(plan: Plan) -> None:
    """Write the files, prepare, and train through Miles' own command helpers; returns when training has ended.

    Raises MissingExtra where Miles cannot be imported, BadInput where the plan has problems.
    """
    helpers = command_helpers()
    if plan.problems:
        raise BadInput(" ".join(plan.problems))
    for path, text in plan.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if not plan.options.skip_prepare:
        helpers.exec_command_cpu(plan.download)
        helpers.convert_checkpoint(**plan.conversion)
    helpers.execute_train(
        train_args=plan.train_args,
        num_gpus_per_node=plan.options.gpus,
        megatron_model_type=plan.options.model_type,
        extra_env_vars=plan.variables,
        **({"megatron_path": plan.megatron} if plan.megatron else {}),
    )


def command_helpers() -> Any:
    """Miles' module of command helpers. Raises MissingExtra where it cannot be imported."""
    try:
        return importlib.import_module(HELPERS)
    except ImportError as error:
        raise MissingExtra(
            f"Miles cannot be imported here ({error}), so only --dry-run works: run this in Miles' own Python, or put its "
            "checkout on PYTHONPATH."
        ) from error


def default_megatron() -> str | None:
    """Where Miles' helpers look for Megatron-LM; None without Miles."""
    try:
        found = inspect.signature(command_helpers().execute_train).parameters.get("megatron_path")
    except MissingExtra:
        return None
    return None if found is None or found.default is inspect.Parameter.empty else str(found.default)


# -- arguments


def parse(words: Sequence[str]) -> Arguments:
    """Words of a command line as options with their values. Raises BadInput for a word before the first option."""
    found: Arguments = {}
    name = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            found[name] = (value,) if equals else ()
        elif name is None:
            raise BadInput(f"{word!r} belongs to no option; extra arguments are Miles' own, such as --lr 2e-6.")
        else:
            found[name] = (*found[name], word)
    return found


def namespace(arguments: Arguments) -> Namespace:
    """Arguments as Miles would have them, as far as the rollout function reads them."""
    values: dict[str, Any] = {
        "rollout_seed": 42,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "eval_interval": None,
        "n_samples_per_eval_prompt": 1,
        "rollout_global_dataset": True,
    }
    for name, given in arguments.items():
        attribute = name.removeprefix("--").replace("-", "_")
        values[attribute] = True if not given else _value(given[0]) if len(given) == 1 else [_value(v) for v in given]
    if values.pop("disable_rollout_global_dataset", False):
        values["rollout_global_dataset"] = False
    if values.get("colocate"):
        values["rollout_num_gpus"] = values["actor_num_gpus_per_node"] * values.get("actor_num_nodes", 1)
    return Namespace(**values)


def _value(text: str) -> Any:
    """A value as it was meant: a number, JSON, or the text."""
    try:
        return read_json(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def _arguments(options: LaunchOptions, config: Path, rollout_function: str, extra: Arguments) -> Arguments:
    given: Arguments = {
        "--hf-checkpoint": (str(checkpoint_of(options)),),
        "--sglang-tokenizer-path": (options.tokenizer or options.model,),
        "--ref-load": (str(ref_load_of(options)),),
        "--save": (str(_beside(options, "checkpoints") if options.save is None else options.save.absolute()),),
        "--rollout-function-path": (rollout_function,),
        "--disable-rollout-global-dataset": (),
        "--num-rollout": (str(options.steps),),
        "--rollout-batch-size": (str(options.groups),),
        "--n-samples-per-prompt": (str(options.rollouts),),
        "--over-sampling-batch-size": (str(options.over_sampling or options.groups),),
        "--global-batch-size": (str(options.global_batch_size or options.groups * options.rollouts),),
        "--rollout-max-response-len": (str(options.max_response),),
        "--rollout-max-context-len": (str(options.max_context),),
        "--rollout-temperature": (str(options.temperature),),
        "--actor-num-gpus-per-node": (str(options.gpus),),
    }
    if options.eval_every is not None:
        given["--eval-interval"] = (str(options.eval_every),)
        given["--n-samples-per-eval-prompt"] = (str(options.eval_rollouts),)
        given["--eval-prompt-data"] = (EVAL_NAME, str(config))
    return {**given, **_tuning(options.without), **extra}


def _tuning(without: Sequence[str]) -> Arguments:
    """The tuning options but those named. Raises BadInput for a name that is none."""
    every = {name: values for part in TUNING.values() for name, values in part.items()}
    for name in without:
        if (option := f"--{name.removeprefix('--')}") not in every:
            raise BadInput(f"--without {name}: there is no such option to leave away; there are {', '.join(every)}.")
        del every[option]
    return every


def _refuse_conflicts(extra: Arguments) -> None:
    """Raise BadInput for arguments that the integration owns, also abbreviated, as Miles' parser would take them."""
    for name in extra:
        owned = next((o for o in OWNED if o == name or (name != "--load" and o.startswith(name))), None)
        if owned is not None:
            told_as = owned if owned == name else f"{name} (that is {owned})"
            raise BadInput(f"{told_as} cannot be an extra argument: {OWNED[owned]}.")
        if name in RENAMED:
            raise BadInput(f"{name} cannot be an extra argument; use the launcher's {RENAMED[name]}.")


# -- variables and files


def _legacy(environ: Mapping[str, str]) -> bool:
    value = environ.get(LEGACY_VARIABLE, "0")
    if value not in ("0", "1"):
        raise BadInput(f"{LEGACY_VARIABLE} is {value!r}; expected 0 or 1.")
    return value == "1"


def _given_variables(env: Sequence[str]) -> dict[str, str]:
    """Variables from `NAME=VALUE`. Raises BadInput for other text and for those that the launcher sets."""
    found = {}
    for text in env:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadInput(f"--env {text!r}: expected NAME=VALUE.")
        others = {CONFIG_VARIABLE: "CONFIG or --taskset", RUN_VARIABLE: "--run", OWN_VARIABLE: "--settings"}
        if (use := {**others, "PYTHONPATH": "--pythonpath"}.get(name)) is not None:
            raise BadInput(f"--env {name} is set by the launcher; use {use}.")
        found[name] = value
    return found


def _variables(
    options: LaunchOptions, config: Path, megatron: str | None, environ: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    inherited = environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [megatron, *(str(path.absolute()) for path in options.pythonpath), *inherited]
    if (checkout := _miles_checkout()) is not None:
        folders.insert(1, checkout)
    path = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    variables = {
        **({"PYTHONPATH": path} if path else {}),
        CONFIG_VARIABLE: str(config),
        RUN_VARIABLE: str(options.run.absolute()),
    }
    if options.settings is not None:
        variables[OWN_VARIABLE] = str(options.settings.absolute())
    forwarded = (LEGACY_VARIABLE, OLDER_VARIABLE, *(OF_STORES if isinstance(options.run, StorePath) else ()))
    variables |= {name: environ[name] for name in forwarded if name in environ}
    return {**variables, **given}


def _miles_checkout() -> str | None:
    try:
        return str(command_helpers().repo_base_dir)
    except (MissingExtra, AttributeError):
        return None


def _config(options: LaunchOptions, files: dict[Path, str]) -> Path:
    """The EnvConfig's path; its text is put into `files` where it is to be written."""
    if (options.config is None) == (options.taskset is None):
        raise BadInput("Expected either CONFIG (Verifiers' EnvConfig as a .toml file) or --taskset ID.")
    if options.config is not None:
        return options.config.absolute()
    path = _beside(options, "env.toml")
    text = f"[taskset]\nid = {json.dumps(options.taskset)}\n"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise RunConflict(f"{path} is there and says something else; give it as CONFIG, or choose another --run.")
    files[path] = text
    return path


def _beside(options: LaunchOptions, name: str) -> Path:
    run = options.run.absolute()
    return Path(f"{run.name}-{name}").absolute() if isinstance(run, StorePath) else run.with_name(f"{run.name}-{name}")


# -- what is refused


def _check_sizes(args: Namespace, options: LaunchOptions) -> None:
    """Raise BadInput for numbers that do not go together."""
    names = ("gpus", "steps", "groups", "rollouts", "max_response", "max_context", "eval_every", "eval_rollouts")
    for name in (*names, "over_sampling", "global_batch_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise BadInput(f"--{name.replace('_', '-')} is {value}; expected 1 or more.")
    batch, per_step = args.global_batch_size, options.groups * options.rollouts
    parallel = [getattr(args, f"{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")]
    trainers = options.gpus * getattr(args, "actor_num_nodes", 1)
    needs = parallel[0] * parallel[1] * parallel[2]
    per_engine = getattr(args, "rollout_num_gpus_per_engine", 1)
    wrong = {
        f"--over-sampling {args.over_sampling_batch_size} is below --groups {options.groups}; it starts at least a batch.": (
            args.over_sampling_batch_size < options.groups
        ),
        f"--global-batch-size {batch} does not divide the {per_step} samples of a step (--groups × --rollouts): Miles would "
        "drop the rest.": per_step % batch != 0,
        f"--max-response {options.max_response} leaves no room for a prompt within --max-context {options.max_context}.": (
            options.max_response >= options.max_context
        ),
        f"{trainers} trainer GPUs cannot be divided into tensor × pipeline × context parallel groups of {needs}.": (
            trainers % needs != 0
        ),
        f"--rollout-num-gpus-per-engine {per_engine} is more than the {trainers} GPUs.": (
            bool(getattr(args, "colocate", False)) and per_engine > trainers
        ),
        "Neither --colocate nor --rollout-num-gpus is set; the engines would have no GPU. Set one of them.": (
            not getattr(args, "colocate", False) and getattr(args, "rollout_num_gpus", None) is None
        ),
        "--use-dynamic-batch-size needs --max-tokens-per-gpu.": (
            getattr(args, "use_dynamic_batch_size", False) and getattr(args, "max_tokens_per_gpu", None) is None
        ),
    }
    if found := [sentence for sentence, is_so in wrong.items() if is_so]:
        raise BadInput(" ".join(found))
    if not options.skip_prepare and not ref_load_of(options).name.endswith("_torch_dist"):
        raise BadInput(
            f"--ref-load {ref_load_of(options)}: Miles' conversion writes to a folder that ends in _torch_dist; name it so, or "
            "set --skip-prepare."
        )


def _check_environment(options: LaunchOptions, made: MilesOptions) -> None:
    """Load the environment, its tasks and the hooks as the rollout actor would. Raises what its parts raise."""
    sys.path[:0] = [str(path.absolute()) for path in options.pythonpath]
    if options.config is not None:
        config = load_config(options.config)
    else:
        check_live()
        config = env_config({"taskset": {"id": options.taskset}}, f"--taskset {options.taskset}")
    tasks = load_tasks(load_environment(config, options.config or "the config"), rollouts=2)
    from verifiers.v1.decorators import discover_decorated

    names = {function.__name__ for task in tasks for function in discover_decorated(task, "group_reward")}
    if names:
        made.check_group_rewards(sorted(names))
    if _miles_checkout() is not None:
        Hooks(made)


def _problems(options: LaunchOptions, config: Path, files: Mapping[Path, str]) -> list[str]:
    """What is missing on this machine, or is of another run."""
    found = []
    if config not in files:
        refuse_v0(read_toml(config), config)
    if options.skip_prepare:
        for path, what in ((checkpoint_of(options), "checkpoint"), (ref_load_of(options), "converted checkpoint")):
            if not path.exists():
                found.append(f"There is no {what} at {path}; leave --skip-prepare away, or name its place.")
    run = options.run.absolute()
    if (run / "run.json").exists():
        recorded = open_run(run).info.get("model")
        if recorded != str(checkpoint_of(options)):
            found.append(f"{run} was recorded with the model {recorded!r}, not {str(checkpoint_of(options))!r}.")
    elif run.is_file():
        found.append(f"{run} is a file; choose another --run.")
    return found


def told(values: Mapping[str, Any]) -> str:
    """Keyword arguments as Python text."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
