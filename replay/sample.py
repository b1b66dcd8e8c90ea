"""The Sample that conversion makes: field for field Miles' `Sample`, without Miles.

Names, defaults and the shape of `to_dict` follow `miles.utils.types.Sample` (v0.1.0).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class Status(Enum):
    """How a rollout ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One training sample. `tokens` holds prompt and response; lists over the response have `response_length` items."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: Any = None
    reward_spec: Any = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: dict[str, int] = field(
        default_factory=lambda: {
            "spec_accept_token_num": 0,
            "spec_draft_token_num": 0,
            "spec_verify_ct": 0,
            "completion_token_num": 0,
        }
    )
    prefix_cache_info: dict[str, int] = field(default_factory=lambda: {"cached_tokens": 0, "total_prompt_tokens": 0})

    def to_dict(self) -> dict[str, Any]:
        """The fields, in order, with the status as its value."""
        return {**self.__dict__, "status": self.status.value}


FIELDS = tuple(f.name for f in fields(Sample))
"""Field names in order."""
