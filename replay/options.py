"""Options of checks and conversion: one owner for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from rolltape.schema.errors import BadInput

BranchPolicy = Literal["reject", "siblings"]

CONVERTER_VERSION = 1
"""Part of every digest: raised whenever the same rows would give other Samples."""


@dataclass(frozen=True)
class Expectations:
    """What the user knows of a run beforehand. None or an empty mapping means nothing is expected."""

    branches: int | None = None
    """Branches of every trace that ended without an error."""
    group_size: int | None = None
    """Traces in every group."""
    group_reward_sum: Mapping[str, float] = field(default_factory=dict)
    """Sum of the contributions per group, by reward name."""
    sampled_tokens: tuple[int, int] | None = None
    """Least and most sampled tokens of a trace."""
    reward_names: tuple[str, ...] | None = None
    """Names that every scored trace carries, and no other."""


@dataclass(frozen=True)
class ConvertOptions:
    """How traces become Samples."""

    branch_policy: BranchPolicy = "reject"
    """`reject`: a trace with several branches costs its group. `siblings`: each leaf becomes a Sample of one rollout."""
    min_group_size: int | None = None
    """Least traces a group without group rewards goes on with; None asks for the full size."""
    strict: bool = False
    """Raise CheckFailed at the first group lost to a failed check, instead of dropping it."""
    reward_key: str | None = None
    """With a name, a Sample's reward is a mapping of all named rewards plus the total under `reward`."""
    vocab_size: int | None = None
    """Token ids must be below it; None asks only for ids of 0 and more."""
    unscored: Literal["refuse", "allow"] = "refuse"
    """Whether a trace without any reward may be emitted (with reward None, for a trainer that scores it)."""
    expect: Expectations = field(default_factory=Expectations)

    def __post_init__(self) -> None:
        if self.branch_policy not in ("reject", "siblings"):
            raise BadInput(f"branch_policy {self.branch_policy!r}: expected 'reject' or 'siblings'.")
        if self.unscored not in ("refuse", "allow"):
            raise BadInput(f"unscored {self.unscored!r}: expected 'refuse' or 'allow'.")
        if self.min_group_size is not None and self.min_group_size < 1:
            raise BadInput(f"min_group_size {self.min_group_size}: expected 1 or more.")

    def with_branches(self, policy: BranchPolicy | None) -> ConvertOptions:
        """The same with another branch policy; None keeps it."""
        return self if policy is None else replace(self, branch_policy=policy)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as stored in a step record."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ConvertOptions:
        """The inverse of `to_dict`. Raises BadInput for an option this version does not know."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise BadInput(f"conversion options {unknown} are unknown here; known are {sorted(known)}.")
        expect = dict(data.get("expect") or {})
        for name in ("sampled_tokens", "reward_names"):
            if expect.get(name) is not None:
                expect[name] = tuple(expect[name])
        return cls(**{**data, "expect": Expectations(**expect)})
