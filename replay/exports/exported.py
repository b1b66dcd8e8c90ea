"""What a run holds, in other people's forms: `rolltape export`.

- `verifiers`: the lines of the release that each trace came from (`verifiers.py`)
- `hf`: conversations for Hugging Face datasets (`hf.py`)
- `samples`: Samples as the trainer got them (`samples.py`)

Rows are read a row group at a time; files appear whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Format = Literal["verifiers", "samples", "hf"]
Told = Callable[[int, int], None]
"""Called with traces written and traces in all."""


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export."""

    path: Path
    traces: int
    lines: int
    """Lines or rows: Episodes may hold several traces, and a trace with several branches is several conversations."""
    left_out: Mapping[str, int] | None = None
    """Of Samples: traces that gave none, by what became of them; None in other forms."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        left_out = {} if self.left_out is None else {"left_out": dict(self.left_out)}
        return {"path": str(self.path), "traces": self.traces, "lines": self.lines, **left_out}


@dataclass
class Exported:
    """What an export wrote, and what it could not keep."""

    files: list[ExportedFile] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    """What was changed or is special, and for how many traces."""
    configs: list[Path] = field(default_factory=list)
    """Configurations written beside the files."""
    next: list[str] = field(default_factory=list)
    """What to do with them: sentences."""
    warnings: list[str] = field(default_factory=list)
    """What is to be known of all that was written: sentences."""

    def note(self, sentence: str, count: int = 1) -> None:
        """Add `count` traces to those that `sentence` is about."""
        if count:
            self.notes[sentence] = self.notes.get(sentence, 0) + count

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        configs = [str(path) for path in self.configs]
        return {
            "files": [file.to_dict() for file in self.files],
            "notes": dict(self.notes),
            "configs": configs,
            "next": list(self.next),
            "warnings": list(self.warnings),
        }
