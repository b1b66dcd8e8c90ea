"""Recorded runs in Miles: its own Samples, and a rollout function that trains from a recording without engines.

    python train.py … --debug-train-only --rollout-function-path rolltape.replay.miles.ReplayRolloutFn

with ROLLTAPE_RUN naming the run. Unlike `--load-debug-rollout-data`, the batches go through Miles' filtering, trimming
and metrics as live ones do. Miles is imported only where it is there; Verifiers never.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from rolltape.replay.batches import Batch, Evaluated, batches, evaluated, read_part
from rolltape.replay.branches import leaves, path_to
from rolltape.replay.convert import SampleGroup
from rolltape.replay.options import ConvertOptions
from rolltape.replay.outcomes import read_outcomes
from rolltape.replay.run import Run, open_run
from rolltape.replay.sample import Sample
from rolltape.schema.errors import BadInput
from rolltape.schema.records import Step

RUN_VARIABLE = "ROLLTAPE_RUN"
MESSAGES = "messages"
"""Metadata key under which Miles' dashboard looks for the conversation."""
RECOMPUTED = "rollout_log_probs_source"
"""Metadata key under which Miles says that log-probs were recomputed."""


@functools.cache
def base_types() -> Any:
    """Miles' `rollout.base_types`, or a stand-in with its two outputs where Miles cannot be imported."""
    try:
        from miles.rollout import base_types as found
    except ImportError:
        return SimpleNamespace(RolloutFnTrainOutput=_output("samples"), RolloutFnEvalOutput=_output("data"))
    return found


def _output(first: str) -> Callable[..., Any]:
    def made(**values: Any) -> Any:
        return SimpleNamespace(**{first: None, "metrics": None, **values})

    return made


ROLLOUT_BASE: type = getattr(base_types(), "BaseRolloutFn", object)
"""The class Miles wants rollout functions to be of; `object` in revisions that want none."""


@functools.cache
def sample_class() -> Any:
    """Miles' Sample where it can be imported, else ours."""
    try:
        from miles.utils.types import Sample as found
    except ImportError:
        return Sample
    return found


def has_rollout_id() -> bool:
    """Whether this Miles' Sample knows `rollout_id`, without which samples of one rollout count as several."""
    return "rollout_id" in sample_class().__dataclass_fields__


def to_miles(sample: Sample) -> Any:
    """A Miles Sample with the fields of `sample`; nothing that a hook might change is shared with it."""
    cls = sample_class()
    values = {name: copy.copy(value) for name, value in sample.to_dict().items()}
    values["metadata"], values["reward"] = copy.deepcopy(sample.metadata), copy.deepcopy(sample.reward)
    return cls(**{**values, "status": sample.status}) if cls is Sample else cls.from_dict(values)


def nested(group: SampleGroup, change: Callable[[Sample], Any]) -> list[Any]:
    """`group` with every Sample replaced, in its own nesting."""
    return [[change(s) for s in item] if isinstance(item, list) else change(item) for item in group]


def require_rollout_id(groups: Iterable[SampleGroup]) -> None:
    """Raise BadInput for samples that share a rollout where Miles' Sample cannot say so."""
    if not has_rollout_id() and any(isinstance(item, list) for group in groups for item in group):
        raise BadInput(
            "the batch holds several samples of one rollout (branch policy siblings), and this Miles' Sample has no "
            "rollout_id: it would count them as rollouts of their own. Use a newer Miles, or branch policy reject."
        )


# -- what Miles shows beside a sample


class Conversations:
    """The messages of the traces of a table, by trace and branch."""

    _COLUMNS = ("node_parent", "node_role", "node_content", "node_parts", "node_reasoning", "node_tool_calls")
    _MORE = ("node_tool_call_id", "node_name")

    def __init__(self, table: pa.Table) -> None:
        rows = table.select(["trace_id", *self._COLUMNS, *self._MORE]).to_pylist()
        self._rows = {row["trace_id"]: row for row in rows}

    def messages(self, trace: str, branch: int = 0) -> list[dict[str, Any]]:
        """The conversation along one branch, in OpenAI's shape; empty where the trace is not there."""
        row = self._rows.get(trace)
        if row is None or not row["node_parent"]:
            return []
        parents = [-1 if parent is None else parent for parent in row["node_parent"]]
        return [_message(row, node) for node in path_to(leaves(parents)[branch], parents)]

    def tell(self, sample: Any) -> None:
        """Put the conversation of a Miles Sample into its metadata."""
        branch = sample.metadata.get("verifiers", {}).get("branch_index", 0)
        sample.metadata[MESSAGES] = self.messages(sample.routing_key, branch)


def _message(row: Mapping[str, Any], node: int) -> dict[str, Any]:
    parts, calls = row["node_parts"][node], row["node_tool_calls"][node]
    values = {
        "role": row["node_role"][node],
        "content": json.loads(parts) if parts is not None else row["node_content"][node] or "",
        "reasoning_content": row["node_reasoning"][node],
        "tool_calls": [_tool_call(call) for call in json.loads(calls)] if calls is not None else None,
        "tool_call_id": row["node_tool_call_id"][node],
        "name": row["node_name"][node],
    }
    return {key: value for key, value in values.items() if value is not None}


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or "function" in call:
        return call
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def count_metrics(step: Step) -> dict[str, float]:
    """What became of a step's tries, as Miles logs it."""
    counts = dict(step.counts)
    started, lost = counts.pop("started", 0), counts.pop("lost", 0)
    return {
        "rolltape/recorded": float(started - lost),
        "rolltape/emitted": float(counts.pop("emitted", 0)),
        "rolltape/lost": float(lost),
        **{f"rolltape/dropped/{name}": float(count) for name, count in counts.items() if name != "eval" and count},
    }


def evaluation_output(name: str, rollouts: Sequence[Evaluated], samples: list[Any], metrics: Mapping[str, Any]) -> Any:
    """Miles' output of an evaluation called `name`."""
    data = {
        "rewards": [rollout.reward for rollout in rollouts],
        "truncated": [rollout.truncated for rollout in rollouts],
        "samples": samples,
    }
    return base_types().RolloutFnEvalOutput(data={name: data}, metrics=dict(metrics))


# -- the rollout function


class ReplayRolloutFn(ROLLOUT_BASE):
    """Serves recorded steps by their rollout id. Made and called by Miles.

    Raises BadInput at construction for a run of another model or without ROLLTAPE_RUN, UnsupportedVersion for a newer
    schema; at a call for a step that was not recorded or whose groups have another size.
    """

    def __init__(self, input: Any) -> None:
        self.args = input.args
        folder = os.environ.get(RUN_VARIABLE)
        if not folder:
            raise BadInput(f"no run to replay: set {RUN_VARIABLE} to its folder, and forward it to the rollout actor.")
        self.run = open_run(folder)
        _same_model(self.run, getattr(self.args, "hf_checkpoint", None))

    def __call__(self, input: Any) -> Any:
        """The recorded output for `input.rollout_id`."""
        return self._evaluation(input.rollout_id) if input.evaluation else self._training(input.rollout_id)

    def save(self, rollout_id: int | None = None) -> None:
        """Nothing to save: a recording does not change."""

    def load(self, rollout_id: int | None = None) -> None:
        """Nothing to load: a step is found by its number."""

    def _training(self, rollout_id: int) -> Any:
        found = batches(self.run, rollout_id)
        self._check_size(found)
        require_rollout_id(group for batch in found for group in batch.groups)
        samples = [group for batch in found for group in _recorded(batch)]
        if not samples:
            raise BadInput(
                f"step {rollout_id} of {self.run.paths.root} handed no sample over; there is nothing to train."
            )
        metrics: dict[str, float] = {}
        for batch in found:
            for name, value in count_metrics(batch.step).items():
                metrics[name] = metrics.get(name, 0.0) + value
        return base_types().RolloutFnTrainOutput(samples=samples, metrics=metrics)

    def _check_size(self, found: Sequence[Batch]) -> None:
        wanted = getattr(self.args, "n_samples_per_prompt", None)
        for commit in self.run.commits("train", {batch.step.step for batch in found}):
            sizes = sorted({group.expected_size for group in commit.groups})
            if wanted is not None and sizes not in ([], [wanted]):
                raise BadInput(
                    f"step {commit.step.step} was recorded with {', '.join(map(str, sizes))} rollouts per task, and "
                    f"--n-samples-per-prompt is {wanted}; set it to {sizes[0]}."
                )

    def _evaluation(self, rollout_id: int) -> Any:
        for split in self.run.splits():
            if split == "train":
                continue
            for commit in self.run.commits(split):
                if commit.step.step == rollout_id:
                    return self._evaluated(commit)
        raise BadInput(f"no evaluation {rollout_id} was recorded in {self.run.paths.root}.")

    def _evaluated(self, commit: Any) -> Any:
        table, options = read_part(self.run, commit), ConvertOptions.from_dict(commit.step.options)
        key = getattr(self.args, "eval_reward_key", None) or getattr(self.args, "reward_key", None)
        handed = {o.trace_id: o.handed_reward for o in read_outcomes(table) if o.handed_reward is not None}
        rollouts = [
            Evaluated(r.trace_id, handed.get(r.trace_id, r.reward), r.failed, r.truncated, r.samples)
            for r in evaluated(table, commit.groups, options, None if handed else key)
        ]
        samples = [to_miles(sample) for rollout in rollouts for sample in rollout.samples]
        return evaluation_output(commit.step.eval_name or "eval", rollouts, samples, count_metrics(commit.step))


def _recorded(batch: Batch) -> list[list[Any]]:
    """The groups of a batch as Miles' Samples."""
    conversations = Conversations(batch.table)
    recomputed = {o.trace_id for o in read_outcomes(batch.table) if o.logprobs is not None}

    def made(sample: Sample) -> Any:
        result = to_miles(sample)
        conversations.tell(result)
        if sample.routing_key in recomputed:
            result.metadata[RECOMPUTED] = "sglang_prefill_recompute"
        return result

    return [nested(group, made) for group in batch.groups]


def _same_model(run: Run, checkpoint: str | None) -> None:
    recorded = run.info.get("model")
    if recorded and checkpoint and model_name(recorded) != model_name(checkpoint):
        raise BadInput(
            f"{run.paths.root} was recorded with the model {recorded!r}, and --hf-checkpoint is {checkpoint!r}: its tokens "
            "and log-probs are those of another model."
        )


def model_name(checkpoint: str) -> str:
    """What a checkpoint is called, wherever it lies: the last part of its id or path, also of a hub cache folder."""
    parts = PurePath(checkpoint).parts
    cached = [part for part in parts if part.startswith("models--")]
    return cached[-1].rpartition("--")[2] if cached else parts[-1] if parts else checkpoint


_KEPT: list[tuple[Any, ReplayRolloutFn]] = []


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`ReplayRolloutFn` as a function, for Miles with MILES_USE_LEGACY_ROLLOUT_V1=1."""
    function = next((kept for known, kept in _KEPT if known is args), None)
    if function is None:
        function = ReplayRolloutFn(SimpleNamespace(args=args, data_source=data_source))
        _KEPT.append((args, function))
    return function(SimpleNamespace(rollout_id=rollout_id, evaluation=evaluation))
