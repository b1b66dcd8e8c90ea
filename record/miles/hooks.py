"""What a Miles user hangs onto a batch: reward models, filters, recomputed log-probs; and what they changed.

Hooks get Miles' own Samples, never the converted ones, so that the difference can be told afterwards. What an outcome can
hold of it (reward, `remove_sample`, log-probs, order) is recorded, and a replay hands over the same batch.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from rolltape.record.miles.options import MilesOptions
from rolltape.replay.checks.groups import signal
from rolltape.replay.miles import MESSAGES, RECOMPUTED
from rolltape.replay.sample import Sample
from rolltape.schema import jsontext
from rolltape.schema.errors import BadInput

NONZERO_STD = "check_reward_nonzero_std"
"""Miles' filter of groups without a spread of rewards. It goes by a float32 standard deviation, which is 6e-8 and not 0
for seven rewards of 0.7; `check_reward_spread` takes its place."""


def check_reward_spread(args: Namespace, samples: Sequence[Any], **_: Any) -> Any:
    """A dynamic filter that keeps groups whose rewards differ, by their spread: at most 1e-6 is none."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = signal(rewards) == "varied"
    return SimpleNamespace(
        keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1) if rewards else 'none'}"
    )


class Hooks:
    """The functions that Miles' arguments name, loaded before anything runs."""

    def __init__(self, options: MilesOptions) -> None:
        """Load them. Raises BadInput naming the option whose function is not there."""
        args = options.args
        self.args, self.options = args, options
        self.dynamic_filter = _load(args, "dynamic_sampling_filter_path")
        if self.dynamic_filter is not None and _is_miles(self.dynamic_filter, NONZERO_STD):
            self.dynamic_filter = check_reward_spread
        self.sample_filter = _load(args, "rollout_sample_filter_path")
        self.all_samples = _load(args, "rollout_all_samples_process_path")
        _load(args, "custom_rm_path")
        self._recompute = _recompute_function() if getattr(args, "recompute_logprobs_via_prefill", False) else None

    async def reward(self, group: Sequence[Any]) -> None:
        """Score a group of training samples by Miles' reward models, one reward a rollout, given to all its samples.

        Of several samples of one rollout the last is scored. Raises BadInput where a reward is missing.
        """
        if not self.options.miles_rewards:
            return
        rollouts = [item if isinstance(item, list) else [item] for item in group]
        scored = [siblings[-1] for siblings in rollouts]
        hub = _reward_hub()
        if getattr(self.args, "group_rm", False):
            rewards = await hub.batched_async_rm(self.args, scored)
        else:
            rewards = await asyncio.gather(*(hub.async_rm(self.args, sample) for sample in scored))
        if rewards is None or len(rewards) != len(scored):
            found = "nothing" if rewards is None else f"{len(rewards)} rewards"
            raise BadInput(f"the reward model gave {found} for {len(scored)} samples; expected one for each.")
        for siblings, reward in zip(rollouts, rewards, strict=True):
            if reward is None:
                raise BadInput("the reward model gave None for a sample; expected a number, or a mapping of them.")
            for sample in siblings:
                sample.reward = plain_reward(reward)

    async def eval_reward(self, sample: Any, args: Namespace) -> float:
        """The reward of one evaluation sample by Miles' reward model; `args` are evaluation's."""
        sample.reward = plain_reward(await _reward_hub().async_rm(self.args, sample))
        return float(sample.get_reward_value(args))

    def keep(self, samples: Sequence[Any]) -> tuple[bool, str | None]:
        """What the dynamic filter says of a group's samples: whether it is kept, and why not."""
        if self.dynamic_filter is None:
            return True, None
        output = self.dynamic_filter(self.args, list(samples))
        if hasattr(output, "keep"):
            return bool(output.keep), output.reason
        return bool(output), None

    async def finish(self, data: list[Any], everything: list[Any], data_source: Any, url: str) -> None:
        """The hooks on a whole batch, in Miles' order: the sample filter, all samples, recomputed log-probs."""
        if self.sample_filter is not None:
            self.sample_filter(self.args, data)
        if self.all_samples is not None:
            self.all_samples(self.args, everything, data_source)
        if self._recompute is not None:
            sampling = {
                "temperature": self.args.rollout_temperature,
                "top_p": self.args.rollout_top_p,
                "top_k": self.args.rollout_top_k,
                "max_new_tokens": self.args.rollout_max_response_len,
            }
            await self._recompute(self.args, list(flat(data)), url=f"{url}/generate", sampling_params=sampling)


def flat(items: Iterable[Any]) -> Iterable[Any]:
    """The samples of lists in lists, in order."""
    for item in items:
        if isinstance(item, list):
            yield from flat(item)
        else:
            yield item


def plain_reward(reward: Any) -> Any:
    """`reward` as JSON holds it: a number, or a mapping; of numpy and tensors the numbers in them."""
    return jsontext.as_json(reward, "reward", [])


# -- what hooks changed

_UNRECORDED = ("tokens", "response", "response_length", "loss_mask", "status", "prompt", "label", "metadata")


@dataclass(frozen=True)
class Changes:
    """What became of the samples of one trace."""

    outcome: Mapping[str, Any]
    """Fields of its Outcome."""
    unrecorded: tuple[str, ...]
    """Sample fields that a hook changed and no outcome holds."""


def changes_of(converted: Sequence[Sample], handed: Sequence[Any]) -> Changes:
    """What hooks changed between the converted Samples of a trace and those handed over, in the same order.

    Rewards and log-probs of `handed` are brought to the form in which they are recorded. Raises BadInput where the samples
    of one rollout were given different rewards.
    """
    outcome: dict[str, Any] = {}
    for sample in handed:
        sample.reward = plain_reward(sample.reward)
    if any(sample.reward != handed[0].reward for sample in handed):
        found = [sample.reward for sample in handed]
        raise BadInput(f"trace {handed[0].routing_key}: its samples were given the rewards {found}; a rollout has one.")
    if handed[0].reward != converted[0].reward:
        outcome["handed_reward"] = handed[0].reward
    removed = tuple(bool(sample.remove_sample) for sample in handed)
    if any(removed):
        outcome["remove_sample"] = removed
    pairs = list(zip(converted, handed, strict=True))
    if any(_other_logprobs(before, after) for before, after in pairs):
        for sample in handed:
            sample.rollout_log_probs = np.asarray(sample.rollout_log_probs, np.float32).tolist()
        outcome["logprobs"] = np.concatenate([np.asarray(s.rollout_log_probs, np.float32) for s in handed])
    return Changes(outcome, tuple(name for name in _UNRECORDED if any(_differs(name, *pair) for pair in pairs)))


def _other_logprobs(before: Sample, after: Any) -> bool:
    return after.rollout_log_probs is not None and before.rollout_log_probs != list(after.rollout_log_probs)


def _differs(name: str, before: Sample, after: Any) -> bool:
    then, now = getattr(before, name), getattr(after, name)
    if name == "status":
        return bool(then.value != now.value)
    if name == "metadata":
        now = {key: value for key, value in now.items() if key not in (MESSAGES, RECOMPUTED)}
    return bool(then != now)


# -- functions by name


def load_function(path: str) -> Any:
    """The function that Miles finds under `path`; its registry is asked where it can be imported."""
    try:
        from miles.utils.misc import load_function as theirs
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
    return theirs(path)


def _load(args: Namespace, name: str) -> Any:
    path = getattr(args, name, None)
    if not path:
        return None
    try:
        return load_function(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"--{name.replace('_', '-')} names {path!r}, which cannot be loaded: {error}.") from error


def _is_miles(function: Any, name: str) -> bool:
    return getattr(function, "__name__", "") == name and (inspect.getmodule(function) or function).__name__.startswith(
        "miles."
    )


def _reward_hub() -> Any:
    try:
        return importlib.import_module("miles.rollout.rm_hub")
    except ImportError as error:
        raise BadInput(
            f"--rm-type and --custom-rm-path need Miles' reward models, which cannot be imported: {error}."
        ) from error


def _recompute_function() -> Any:
    try:
        module = importlib.import_module("miles.rollout.generate_utils.prefill_logprobs")
    except ImportError as error:
        raise BadInput(
            f"--recompute-logprobs-via-prefill needs Miles' own scoring, which cannot be imported: {error}."
        ) from error
    return module.recompute_samples_rollout_logprobs_via_prefill
