# ruff: noqa: ARG001
"""Rewards by group and rollout, and the trainable tokens of whole rollouts, as Miles documents them."""

from __future__ import annotations

from typing import Any

import numpy as np


def convert_samples_to_train_data(
    args: Any, samples: list[Any], metadata: Any, custom_convert: Any, custom_reward: Any
) -> dict[str, Any]:
    keys = [(s.group_index, s.index if s.rollout_id is None else s.rollout_id) for s in samples]
    rewards = dict.fromkeys(keys, 0.0)
    for key, sample in zip(keys, samples, strict=True):
        rewards[key] = sample.get_reward_value(args)
    groups: dict[int, list[tuple[int, int]]] = {}
    for key in rewards:
        groups.setdefault(key[0], []).append(key)
    normal: dict[tuple[int, int], float] = {}
    for members in groups.values():
        values = np.array([rewards[key] for key in members], np.float32)
        centred = values - values.mean()
        spread = values.std(ddof=1) if len(values) > 1 and args.grpo_std_normalization else 0.0
        centred = centred / (spread + 1e-6) if spread > 0 else centred
        normal.update(zip(members, centred.tolist(), strict=True))
    masks = [[0] * s.response_length if s.remove_sample else s.loss_mask for s in samples]
    sums: dict[int, int] = {}
    for key, mask in zip(keys, masks, strict=True):
        sums[key[1]] = sums.get(key[1], 0) + sum(mask)
    return {
        "tokens": [s.tokens for s in samples],
        "rewards": [normal[key] for key in keys],
        "raw_reward": [rewards[key] for key in keys],
        "loss_masks": masks,
        "rollout_mask_sums": [sums[key[1]] for key in keys],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
        "sample_indices": [s.index for s in samples],
    }
