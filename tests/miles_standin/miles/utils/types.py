"""Miles' Sample, as far as tests look at it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


@dataclass
class Counts:
    """A group of counters that a Sample keeps."""

    values: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, int]:
        return dict(self.values)


@dataclass
class Sample:
    """One training sample."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: Counts = field(default_factory=Counts)
    prefix_cache_info: Counts = field(default_factory=Counts)

    def to_dict(self) -> dict[str, Any]:
        counts = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return {**self.__dict__, "status": self.status.value, **counts}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        known = {f.name for f in fields(Sample)}
        sample = Sample(**{key: value for key, value in data.items() if key in known})
        sample.status = Sample.Status(data["status"])
        sample.spec_info = Counts(dict(data.get("spec_info") or {}))
        sample.prefix_cache_info = Counts(dict(data.get("prefix_cache_info") or {}))
        for key in data.keys() - known:
            setattr(sample, key, data[key])
        return sample

    def get_reward_value(self, args: Namespace) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward

    def validate(self) -> None:
        assert 0 <= self.response_length <= len(self.tokens)
        assert self.loss_mask is None or len(self.loss_mask) == self.response_length
        assert self.rollout_log_probs is None or len(self.rollout_log_probs) == self.response_length
