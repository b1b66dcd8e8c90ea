"""Miles' filter of groups whose rewards are all equal, by a float32 standard deviation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def check_reward_nonzero_std(args: Any, samples: list[Any], **_: Any) -> Any:
    rewards = np.array([sample.get_reward_value(args) for sample in samples], np.float32)
    mean = np.float32(rewards.astype(np.float64).mean())
    return SimpleNamespace(keep=bool(np.sqrt(((rewards - mean) ** 2).mean()) > 0), reason="zero_std")
