"""Findings as lines for people: a few of each code one by one, the rest counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rolltape.replay.console import printable
from rolltape.replay.findings import Finding
from rolltape.replay.words import alike, of_steps

SHOWN = 5
"""Findings of one code that are all shown."""
EXAMPLES = 3
"""Of more than that these many are, of each wording first."""


def lines(findings: Sequence[Finding], everything: bool = False) -> Iterator[tuple[str, str]]:
    """(line, severity) of findings in order of their codes, errors first; with `everything` a line each."""
    kinds: dict[tuple[bool, str], list[Finding]] = {}
    for found in findings:
        kinds.setdefault((found.severity != "error", found.code), []).append(found)
    for key in sorted(kinds, key=lambda k: k[0]):
        kind = kinds[key]
        whole = everything or len(kind) <= SHOWN
        for found in kind if whole else _examples(kind):
            yield printable(str(found), one_line=True), found.severity
        if not whole:
            yield _rest(kind), kind[0].severity


def _examples(kind: Sequence[Finding]) -> list[Finding]:
    """A few findings, of as many wordings as there are."""
    wordings = {merged.example for merged in alike(dict.fromkeys((f.message for f in kind), 1), EXAMPLES)}
    chosen = [next(f for f in kind if f.message == wording) for wording in wordings]
    chosen += [f for f in kind if f not in chosen][: EXAMPLES - len(chosen)]
    return sorted(chosen, key=kind.index)


def _rest(kind: Sequence[Finding]) -> str:
    """How many there are in all, and where."""
    steps = sorted({f.step for f in kind if f.step is not None})
    traces = len({f.trace_id for f in kind if f.trace_id is not None})
    where = [f"of {traces} traces"] if traces else []
    where += [f"in {of_steps(steps)}"] if steps else []
    first = kind[0]
    return (
        f"{first.severity} {first.code}: {len(kind)} in all{' ' + ' '.join(where) if where else ''} (--all lists each)"
    )
