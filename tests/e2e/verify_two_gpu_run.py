"""A run of Miles on two GPUs, end to end: prepare, train, and check what was recorded.

    python tests/e2e/verify_two_gpu_run.py all --folder /somewhere/with/room
    python tests/e2e/verify_two_gpu_run.py verify --folder /somewhere/with/room

`prepare` and `run` go through `rolltape launch`; code-golf-v1 must be installed beside Miles. `verify` needs torch for
Miles' own .pt files, and reads nothing else of Miles.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rolltape.replay.batches import batches
from rolltape.replay.run import Run, open_run
from rolltape.replay.verification.expect import parse_expectations
from rolltape.replay.verification.verify import verify as verify_run

STEPS, GROUPS, ROLLOUTS = 3, 3, 4
REWARDS = {"correct", "fastest", "most_concise"}
COMPARED = (
    "group_index",
    "index",
    "tokens",
    "response",
    "response_length",
    "reward",
    "loss_mask",
    "rollout_log_probs",
    "weight_versions",
    "status",
    "remove_sample",
    "routing_key",
)
"""Fields that the recording and Miles' dump must agree in, beside `metadata["verifiers"]`."""


class WrongRun(AssertionError):
    """The run is not what it should be; the message lists everything found."""


def verify(folder: Path, dumps: str, *, steps: int = STEPS) -> dict[str, int]:
    """Check the run in `folder`, and the dumped Samples in `dumps`, a pattern with `{rollout_id}` (.pt or .jsonl).

    Returns counts of what was seen. Raises WrongRun.
    """
    run, problems, counts = open_run(folder), [], Counter[str]()
    recorded_steps = sorted({step.step for step in run.steps("train")})
    if recorded_steps != list(range(steps)):
        problems.append(f"steps {recorded_steps} are recorded, expected 0 to {steps - 1}")
    problems += [str(found) for found in verify_run(run, EXPECTATIONS).errors]
    for step in recorded_steps:
        recorded = _recorded(run, step)
        dumped = load_samples(Path(dumps.format(rollout_id=step)))
        for source, samples in (("Parquet", recorded), ("the dump", dumped)):
            problems += [f"step {step}, {source}: {problem}" for problem in step_problems(samples)]
        problems += [f"step {step}: {problem}" for problem in differences(recorded, dumped)]
        counts.update(sample["status"] for sample in recorded)
        counts["samples"] += len(recorded)
        counts["passed"] += sum(_verifiers(sample).get("metrics", {}).get("passed") == 1.0 for sample in recorded)
    for name, meaning in (("completed", "is completed"), ("passed", "passed its tests")):
        if not counts[name]:
            problems.append(f"no rollout of the whole run {meaning}")
    if problems:
        raise WrongRun("\n".join(problems))
    return dict(counts)


EXPECTATIONS = parse_expectations(
    {"branches": 1, "group_size": ROLLOUTS, "reward_names": sorted(REWARDS), "group_reward_sum": {"fastest": 0.5}},
    "expectations",
)


def step_problems(samples: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the samples of one step."""
    sizes = Counter(sample["group_index"] for sample in samples)
    problems = []
    if sorted(sizes.values()) != [ROLLOUTS] * GROUPS:
        problems.append(f"groups have {dict(sizes)} samples, expected {GROUPS} of {ROLLOUTS}")
    problems += [f"sample {sample['index']}: {problem}" for sample in samples for problem in _sample_problems(sample)]
    for group in sizes:
        total = sum(_reward(sample, "fastest") for sample in samples if sample["group_index"] == group)
        if not math.isclose(total, 0.5, abs_tol=1e-6):
            problems.append(f"group {group}: `fastest` sums to {total}, expected 0.5")
    return problems


def _sample_problems(sample: dict[str, Any]) -> Iterator[str]:
    told, length = _verifiers(sample), sample["response_length"]
    metrics, logprobs = told.get("metrics") or {}, sample["rollout_log_probs"] or []
    if sample["status"] not in ("completed", "truncated"):
        yield f"its status is {sample['status']}"
    if not _finite(sample["reward"]):
        yield f"its reward is {sample['reward']!r}"
    if not (len(logprobs) == len(sample["loss_mask"] or []) == length > 0):
        yield f"{len(logprobs)} log-probs and {len(sample['loss_mask'] or [])} mask values for a response of {length} tokens"
    if not all(_finite(value) for value in logprobs):
        yield "a log-prob is not finite"
    if set(told.get("rewards") or {}) != REWARDS:
        yield f"its rewards are {sorted(told.get('rewards') or {})}, expected {sorted(REWARDS)}"
    if metrics.get("passed") not in (0.0, 1.0):
        yield f"`passed` is {metrics.get('passed')!r}"
    if not _finite(metrics.get("latency")):
        yield f"`latency` is {metrics.get('latency')!r}"
    if told.get("error") is not None:
        yield f"its metadata holds the error {told['error']!r}"


def differences(recorded: Sequence[dict[str, Any]], dumped: Sequence[dict[str, Any]]) -> list[str]:
    """Where the recording and the dump of one step disagree."""
    if len(recorded) != len(dumped):
        return [f"{len(recorded)} samples are recorded and {len(dumped)} dumped"]
    found = []
    for ours, theirs in zip(recorded, dumped, strict=True):
        names = [name for name in COMPARED if ours[name] != theirs.get(name)]
        names += ["metadata"] if _verifiers(ours) != _verifiers(theirs) else []
        if names:
            found.append(f"sample {ours['index']}: {', '.join(names)} differ between Parquet and the dump")
    return found


def load_samples(path: Path) -> list[dict[str, Any]]:
    """The Samples of a .pt file as Miles dumps it, or of a .jsonl file of `rolltape convert`.

    A .pt file is a pickle and can run code: load only what your own run wrote.
    """
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    import torch

    samples: list[dict[str, Any]] = torch.load(path, weights_only=False)["samples"]
    return samples


def _recorded(run: Run, step: int) -> list[dict[str, Any]]:
    return [sample.to_dict() for batch in batches(run, step) for sample in batch.samples]


def _verifiers(sample: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = sample["metadata"].get("verifiers", {})
    return told


def _reward(sample: dict[str, Any], name: str) -> float:
    value = (_verifiers(sample).get("rewards") or {}).get(name)
    return float(value) if _finite(value) else math.nan


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# -- on two GPUs


def launch_command(folder: Path, *more: str) -> list[str]:
    """The launcher's command line for the smoke run, with Miles' own dump beside the recording."""
    paths = ["--run", str(folder / "run"), "--models", str(folder / "models")]
    dump = ["--", "--dump-details", str(folder / "dump")]
    return [sys.executable, "-m", "rolltape.replay.cli", "launch", "--taskset", "code-golf-v1", *paths, *more, *dump]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A run of Miles on two GPUs, end to end.")
    parser.add_argument("what", choices=("dry-run", "run", "verify", "all"))
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint, the run and the dump")
    parser.add_argument("--skip-prepare", action="store_true", help="the checkpoint is there and converted")
    given = parser.parse_args()
    folder = given.folder.absolute()
    more = ["--skip-prepare"] if given.skip_prepare else []
    if given.what == "dry-run":
        subprocess.run(launch_command(folder, "--dry-run", "--no-check", *more), check=True)
    if given.what in ("run", "all"):
        subprocess.run(launch_command(folder, *more), check=True)
    if given.what in ("verify", "all"):
        print(verify(folder / "run", str(folder / "dump" / "rollout_data" / "{rollout_id}.pt")))


if __name__ == "__main__":
    main()
