"""Which steps of training are not there. Attempts say from which step on they record; what is gone behind the last step cannot
be known."""

from __future__ import annotations

from rolltape.replay.checks.findings import Finding
from rolltape.replay.listing.runs import is_locked
from rolltape.replay.run import Run
from rolltape.schema.paths import Part


def missing(run: Run, newest: set[Part]) -> list[Finding]:
    """Findings of what is not there of training. Evaluations may skip steps. `newest`: parts that count."""
    return [
        Finding(code="missing_step", message=f"step {s} was not committed, but later ones were", step=s)
        for s in _missing_steps(run, newest)
    ]


def _missing_steps(run: Run, newest: set[Part]) -> list[int]:
    """Steps without a part, from the first that an attempt was to record to the last that was recorded."""
    steps = {p.step for p in newest if p.split == "train"}
    return sorted(set(range(min(steps | _starts(run)), max(steps))) - steps) if steps else []


def _starts(run: Run) -> set[int]:
    """First steps of the attempts that recorded training and have ended. A run that was re-scored has the steps asked for."""
    if "rescored_from" in run.info:
        return set()
    parts = [c.part for c in run.all_commits] + [p for p, _ in run.broken] + [d.part for d in run.contents.dropped]
    ended = {p.attempt for p in parts if p.split == "train"} - _journaled(run)
    return {run.attempts[number].start_step for number in ended if number in run.attempts}


def _journaled(run: Run) -> set[int]:
    """Attempts whose journals may hold what is not committed: of writers at work, or of writers that died."""
    found = (p for p in run.paths.journals.glob("*.journal") if p.stat().st_size or is_locked(p))
    return {int(p.name.split(".")[0]) for p in found if p.name.split(".")[0].isdigit()}
