"""What `rolltape launch` is told, the presets of its smoke run, and what extra arguments may not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rolltape.schema.storage import AnyPath

LEGACY_VARIABLE = "MILES_USE_LEGACY_ROLLOUT_V1"
"""`1`: Miles calls a rollout function; else it makes an object of a rollout class."""
OLDER_VARIABLE = "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"
"""The opposite choice in Miles before August 2026: `1` means the class. Forwarded where it is set."""

TUNING: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "GRPO": {
        "--advantage-estimator": ("grpo",),
        "--balance-data": (),
        "--entropy-coef": ("0.0",),
        "--eps-clip": ("0.2",),
        "--eps-clip-high": ("0.28",),
    },
    "optimizer": {
        "--optimizer": ("adam",),
        "--lr": ("1e-6",),
        "--lr-decay-style": ("constant",),
        "--weight-decay": ("0.1",),
        "--adam-beta1": ("0.9",),
        "--adam-beta2": ("0.98",),
    },
    "performance": {
        "--tensor-model-parallel-size": ("1",),
        "--pipeline-model-parallel-size": ("1",),
        "--context-parallel-size": ("1",),
        "--use-dynamic-batch-size": (),
        "--max-tokens-per-gpu": ("4096",),
        "--no-gradient-accumulation-fusion": (),
        "--attention-backend": ("flash",),
        "--actor-num-nodes": ("1",),
        "--colocate": (),
    },
    "engine": {
        "--rollout-num-gpus-per-engine": ("1",),
        "--sglang-mem-fraction-static": ("0.6",),
        "--sglang-enable-metrics": (),
    },
    "checkpoints": {"--save-interval": ("1000",)},
}
"""Options of Miles with the smoke run's values. An extra argument of the same name takes the place of one of them."""

OWNED = {
    "--rollout-function-path": f"it is chosen by {LEGACY_VARIABLE}",
    "--eval-function-path": "evaluation is the rollout function's",
    "--custom-generate-function-path": "the environment's harness generates",
    "--disable-rollout-global-dataset": "it is always set",
    "--rollout-global-dataset": "the taskset gives the tasks",
    "--data-source-path": "the taskset gives the tasks",
    "--prompt-data": "the taskset gives the tasks",
    "--eval-prompt-data": "evaluation covers the taskset; use --eval-every",
    "--eval-config": "evaluation covers the taskset; use --eval-every",
    "--num-epoch": "without Miles' prompt data there are no epochs; use --steps",
    "--load-debug-rollout-data": "it replaces the rollouts; see the guide for replaying",
    "--debug-train-only": "it starts no engine; see the guide for replaying",
}
"""Options that the integration sets or replaces, and why an extra argument may not."""

RENAMED = {
    "--hf-checkpoint": "--checkpoint",
    "--sglang-tokenizer-path": "--tokenizer",
    "--ref-load": "--ref-load, before the --",
    "--save": "--save, before the --",
    "--num-rollout": "--steps",
    "--rollout-batch-size": "--groups",
    "--n-samples-per-prompt": "--rollouts",
    "--over-sampling-batch-size": "--over-sampling",
    "--global-batch-size": "--global-batch-size, before the --",
    "--rollout-max-response-len": "--max-response",
    "--rollout-max-context-len": "--max-context",
    "--rollout-temperature": "--temperature",
    "--eval-interval": "--eval-every",
    "--n-samples-per-eval-prompt": "--eval-rollouts",
    "--actor-num-gpus-per-node": "--gpus",
}
"""Options of Miles that the launcher has an option for."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to train, where, and how. Lengths are in tokens; paths are made absolute, for actors have folders of their own."""

    run: AnyPath
    """The folder to record into, or a place in an object store."""
    config: Path | None = None
    """Verifiers' EnvConfig; or `taskset`."""
    taskset: str | None = None
    """Id of a taskset, for which an EnvConfig is written."""
    settings: Path | None = None
    """rolltape's own TOML (ROLLTAPE_CONFIG)."""

    model: str = "Qwen/Qwen3-0.6B"
    """Model id on the Hugging Face hub."""
    model_type: str = "qwen3-0.6B"
    """Miles' name of the architecture, a file in its `scripts/models`."""
    models: Path = Path("models")
    """Folder for the checkpoint as downloaded and as converted."""
    checkpoint: Path | None = None
    """None: the model's name in `models`."""
    tokenizer: str | None = None
    """None: the model id, by which the renderer is chosen."""
    ref_load: Path | None = None
    """Converted checkpoint; None: the model's name and `_torch_dist` in `models`."""
    save: Path | None = None
    """Folder of training checkpoints; None: beside the run."""
    megatron: str | None = None
    """Folder of Megatron-LM; None takes Miles' own default."""
    skip_prepare: bool = False

    gpus: int = 2
    steps: int = 3
    groups: int = 3
    rollouts: int = 4
    over_sampling: int | None = None
    """None: `groups`."""
    global_batch_size: int | None = None
    """None: `groups` × `rollouts`."""
    max_response: int = 512
    max_context: int = 2048
    temperature: float = 0.8
    eval_every: int | None = None
    eval_rollouts: int = 2

    env: tuple[str, ...] = ()
    """Further variables for the actors, `NAME=VALUE`."""
    pythonpath: tuple[Path, ...] = ()
    """Folders that the actors import from, such as one with a taskset."""
    without: tuple[str, ...] = ()
    """Names of tuning options to leave away."""
    extra: tuple[str, ...] = ()
    """Further arguments for Miles."""
    check: bool = True
    """Load the environment first, to refuse what its rollouts could only fail at."""


def checkpoint_of(options: LaunchOptions) -> Path:
    """Folder of the checkpoint as downloaded."""
    return (options.checkpoint or options.models / options.model.rpartition("/")[2]).absolute()


def ref_load_of(options: LaunchOptions) -> Path:
    """Folder of the checkpoint as converted."""
    return (options.ref_load or options.models / f"{options.model.rpartition('/')[2]}_torch_dist").absolute()
