"""A digest of Samples: equal exactly where a trainer would see the same batch.

Over a fixed list of fields: token ids as int32, the mask as bytes, log-probs as float32, everything else as canonical
JSON, with nesting and order of the batch and the converter's version. Little-endian throughout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltape.replay.convert import SampleGroup
from rolltape.replay.options import CONVERTER_VERSION
from rolltape.replay.sample import Sample

DIGEST_FIELDS = (
    "group_index",
    "index",
    "rollout_id",
    "prompt",
    "response",
    "response_length",
    "label",
    "reward",
    "status",
    "remove_sample",
    "weight_versions",
    "routing_key",
    "metadata",
    "non_generation_time",
    "prefix_cache_info",
)
"""Fields that enter as JSON, in order; `tokens`, `loss_mask` and `rollout_log_probs` enter as arrays before them."""

canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr).encode
"""A value as the one JSON text that stands for it."""


def digest(groups: Sequence[SampleGroup], version: int | None = None) -> str:
    """sha256 (64 hex digits) of a batch, made by the converter of `version`; None is the one of today."""
    sha = hashlib.sha256(f"rolltape converter {CONVERTER_VERSION if version is None else version}\n".encode())
    for group in groups:
        sha.update(f"group {len(group)}\n".encode())
        for item in group:
            if isinstance(item, list):
                sha.update(f"rollout {len(item)}\n".encode())
            for sample in item if isinstance(item, list) else [item]:
                for part in sample_parts(sample):
                    sha.update(len(part).to_bytes(8, "little"))
                    sha.update(part)
    return sha.hexdigest()


def sample_parts(sample: Sample) -> tuple[bytes, ...]:
    """What of a Sample enters its digest."""
    fields: dict[str, Any] = {name: getattr(sample, name) for name in DIGEST_FIELDS}
    fields["status"] = sample.status.value
    return (
        np.asarray(sample.tokens, "<i4").tobytes(),
        bytes(sample.loss_mask or ()),
        np.asarray(sample.rollout_log_probs or (), "<f4").tobytes(),
        canonical(fields).encode(),
    )
