"""Findings as lines for people: a few of each code one by one, the rest counted. What several say alike is said once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rolltape.replay.checks.findings import Finding
from rolltape.replay.printing.console import printable
from rolltape.replay.printing.words import alike, counted, of_steps, shortened, wording

SHOWN = 5
"""Findings of one code that are all shown."""
EXAMPLES = 3
"""Of more than that these many are, of each wording first."""
AGAIN = 100
"""Characters of a message that says what one before it said."""


def lines(findings: Sequence[Finding], everything: bool = False) -> Iterator[tuple[str, str]]:
    """(line, severity) of findings in order of their codes, errors first; with `everything` a line each."""
    kinds: dict[tuple[bool, str], list[Finding]] = {}
    for found in findings:
        kinds.setdefault((found.severity != "error", found.code), []).append(found)
    for key in sorted(kinds, key=lambda k: k[0]):
        kind = kinds[key]
        whole = everything or len(kind) <= SHOWN
        if not whole:
            yield _all(kind), kind[0].severity
        said: set[str] | None = None if everything else set()
        for found in kind if whole else _examples(kind):
            yield _line(found, said, "" if whole else "  such as "), found.severity


def _line(found: Finding, said: set[str] | None, head: str) -> str:
    """A finding in a line; where what was `said` is kept, only the beginning of a message that says the same."""
    if said is not None:
        kind = wording(found.message)
        found = found.but(shortened(found.message, AGAIN)) if kind in said else found
        said.add(kind)
    return printable(f"{head}{found.text(short=bool(head))}", one_line=True)


def _examples(kind: Sequence[Finding]) -> list[Finding]:
    """A few findings, of as many wordings as there are."""
    wordings = {merged.example for merged in alike(dict.fromkeys((f.message for f in kind), 1), EXAMPLES)}
    chosen = [next(f for f in kind if f.message == wording) for wording in wordings]
    chosen += [f for f in kind if f not in chosen][: EXAMPLES - len(chosen)]
    return sorted(chosen, key=kind.index)


def _all(kind: Sequence[Finding]) -> str:
    """How many there are, and where."""
    steps = sorted({f.step for f in kind if f.step is not None})
    traces = len({f.trace_id for f in kind if f.trace_id is not None})
    where = f", of {counted(traces, 'trace')}" if traces else ""
    where += f" in {of_steps(steps)}" if steps else ""
    first = kind[0]
    return f"{first.severity} {first.code}: {len(kind):,} in all{where} (`rolltape verify --all` lists each)"
