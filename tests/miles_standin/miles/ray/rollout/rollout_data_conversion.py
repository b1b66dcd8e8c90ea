# ruff: noqa: ARG001
"""What Miles does with the groups of a rollout function: flattened, and trimmed where no sample has a rollout id."""

from __future__ import annotations

import itertools
from typing import Any


def postprocess_rollout_data(
    args: Any, data: list[Any], train_parallel_config: Any
) -> tuple[list[Any], dict[str, Any]]:
    while isinstance(data[0], list):
        data = list(itertools.chain.from_iterable(data))
    shared = any(sample.rollout_id is not None for sample in data)
    if not args.disable_rollout_trim_samples and not shared:
        data = data[: len(data) // args.global_batch_size * args.global_batch_size]
    return data, {}
