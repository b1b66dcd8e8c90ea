"""Reading a dump of samples."""

from __future__ import annotations

from typing import Any

from miles.utils.types import Sample


def load_debug_rollout_data(args: Any, rollout_id: int) -> tuple[list[Any], dict[str, Any]]:
    import torch

    payload = torch.load(args.load_debug_rollout_data.format(rollout_id=rollout_id), weights_only=False)
    return [Sample.from_dict(sample) for sample in payload["samples"]], payload.get("metadata") or {}
