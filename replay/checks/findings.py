"""What a check found: code, severity, place, what was expected, what was there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding. An error keeps its trace, and so its group, from becoming Samples; a warning does not."""

    code: str
    severity: Severity = "error"
    message: str
    """A sentence: what was found, and what to do where something can be done."""
    split: str | None = None
    """Evaluation, such as `eval-aime`, whose step it is; None of training."""
    step: int | None = None
    group_index: int | None = None
    trace_id: str | None = None
    node: int | None = None
    """Index of the node in its trace."""
    position: int | None = None
    """Index of the token in its node."""
    file: str | None = None
    expected: Any = None
    found: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values without the fields that say nothing."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    def but(self, message: str) -> Finding:
        """The same finding in other words."""
        return replace(self, message=message)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, short: bool = False) -> str:
        """A line: severity, code, place and message; `short` without the first two, which a line before it says."""
        step = f"{self.step} of {self.split}" if self.split and self.step is not None else self.step
        place = [
            f"{name} {value}"
            for name, value in (
                ("step", step),
                ("group", self.group_index),
                ("trace", self.trace_id),
                ("node", self.node),
                ("token", self.position),
            )
            if value is not None
        ]
        where = ", ".join(place) or self.file or "run"
        message = (
            self.message.removeprefix(f"{where}:").removeprefix(where).lstrip() if self.file == where else self.message
        )
        return f"{where}: {message}" if short else f"{self.severity} {self.code} ({where}): {message}"
