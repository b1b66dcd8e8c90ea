"""What a run holds, in other people's forms: `rolltape export`.

- `verifiers`: the lines of the release that each trace came from (`export_verifiers.py`)
- `hf`: conversations for Hugging Face datasets (`export_hf.py`)
- `samples`: Samples as the trainer got them (`sample_files.py`)

Rows are read a row group at a time; files appear whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput

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


@dataclass
class Exported:
    """What an export wrote, and what it could not keep."""

    files: list[ExportedFile] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    """What was changed or is special, and for how many traces."""
    configs: list[Path] = field(default_factory=list)
    """Configurations written beside the files."""

    def note(self, sentence: str, count: int = 1) -> None:
        """Add `count` traces to those that `sentence` is about."""
        if count:
            self.notes[sentence] = self.notes.get(sentence, 0) + count

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        files = [{"path": str(f.path), "traces": f.traces, "lines": f.lines} for f in self.files]
        return {"files": files, "notes": dict(self.notes), "configs": [str(path) for path in self.configs]}


def chosen_commits(
    run: Run, splits: Sequence[str] = (), steps: Sequence[int] | None = None, evaluations: bool = False
) -> list[Commit]:
    """The newest commits of the chosen splits (`train` by default) and steps, in the run's order.

    `evaluations` adds every evaluation, of those steps where steps are chosen. Raises BadInput where a split or step was not
    recorded, or nothing is left.
    """
    recorded = run.splits()
    unknown = [s for s in splits if s not in recorded]
    if unknown:
        raise BadInput(f"{run.paths.root}: no split {unknown[0]!r} was recorded; recorded are {_listed(recorded)}.")
    named = list(dict.fromkeys(splits)) or ([] if evaluations and "train" not in recorded else ["train"])
    commits = [c for split in named for c in run.commits(split, steps or None)]
    for split in recorded if evaluations else ():
        if split.startswith("eval") and split not in named:
            commits += [c for c in run.commits(split) if not steps or c.part.step in steps]
    if not commits:
        others = f" Recorded are {_listed(recorded)}: choose with --split or --eval." if recorded else ""
        raise BadInput(f"{run.paths.root}: nothing was recorded in {_listed(named)}.{others}")
    return commits


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(n) for n in names) or "no splits"
