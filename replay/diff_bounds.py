"""Bounds on a comparison, for CI: how far a quantity may drop or rise from A to B."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rolltape.replay.diff import Change
from rolltape.schema.errors import BadInput

_ROUNDING = 1e-12
"""Relative slack: 1.0 - 0.95 is more than 0.05 in floating point."""


@dataclass(frozen=True)
class Bound:
    """The largest drop or rise of a quantity."""

    kind: Literal["drop", "rise"]
    quantity: str
    bound: float
    relative: bool = False
    """Whether `bound` is a share of A's value."""

    @classmethod
    def parse(cls, kind: Literal["drop", "rise"], text: str) -> Bound:
        """`NAME=NUMBER` or `NAME=NUMBER%`; a name may hold '=' itself. Raises BadInput."""
        name, equals, number = text.rpartition("=")
        relative = number.endswith("%")
        try:
            bound = float(number.removesuffix("%")) / (100 if relative else 1)
        except ValueError:
            bound = math.nan
        if not (equals and name.strip() and 0 <= bound < math.inf):
            raise BadInput(f"--max-{kind} {text!r}: expected NAME=NUMBER, such as reward=0.05 or tokens=10%.")
        return cls(kind, name.strip(), bound, relative)

    def judge(self, quantities: Mapping[str, Change]) -> Verdict:
        """Whether the bound holds. A quantity without a value on a side cannot be judged, which is not holding.

        Raises BadInput for a quantity that neither side knows.
        """
        if self.quantity not in quantities:
            near = difflib.get_close_matches(self.quantity, quantities, 1)
            hint = f"did you mean {near[0]!r}? There are" if near else "there are"
            raise BadInput(f"--max-{self.kind} {self.quantity}: no such quantity; {hint} {', '.join(quantities)}.")
        found = quantities[self.quantity]
        if found.change is None or found.a.mean is None:
            where = " and ".join(n for n, mean in (("A", found.a.mean), ("B", found.b.mean)) if mean is None)
            return Verdict(self, False, found.change, f"{self.quantity} cannot be judged: no value in {where}")
        moved = -found.change if self.kind == "drop" else found.change
        most = self.bound * (abs(found.a.mean) if self.relative else 1.0)
        holds = moved <= most + _ROUNDING * max(abs(found.a.mean), 1.0)
        verb = {"drop": "dropped", "rise": "rose"}[self.kind] if moved > 0 else f"did not {self.kind}"
        by = f" by {moved:.4g}" if moved > 0 else ""
        allowed = f"{self.bound:.4g}" if not self.relative else f"{100 * self.bound:.4g}% of A, {most:.4g}"
        values = f"{found.a.mean:.4g} in A, {found.b.mean:.4g} in B"
        wild = [f"{mean.not_finite} of {side}" for side, mean in (("A", found.a), ("B", found.b)) if mean.not_finite]
        values += f"; in no mean, being no finite numbers: {', '.join(wild)}" if wild else ""
        return Verdict(self, holds, found.change, f"{self.quantity} {verb}{by} ({values}); allowed are {allowed}")


@dataclass(frozen=True)
class Verdict:
    """A bound, judged."""

    bound: Bound
    holds: bool
    change: float | None
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self.bound), "holds": self.holds, "change": self.change, "message": self.message}
