"""Bringing traces that somebody already has: Verifiers' files of any release into a run.

    files ─► blocks of lines ─► rows, in files of their own ─► groups ─► steps: a Parquet file and a commit each
             sources            lines                         here       run, steps

Memory holds a block and its rows for each process, a piece of each step that is being written, and about 100 bytes for each
trace and 400 for each group. What a run has already is not taken again; traces that belong to one of its groups are added to
that group.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from rolltape.replay.imports.groups import GROUP_BY, GroupBy
from rolltape.replay.imports.jobs import jobs_for, workers
from rolltape.replay.imports.lines import Found, Taken, Taker
from rolltape.replay.imports.run import Target, target_at
from rolltape.replay.imports.sources import Block, Cut, Source, blocks, find_sources
from rolltape.replay.imports.steps import Members
from rolltape.replay.printing.words import counted
from rolltape.schema.errors import BadInput

Told = Callable[[Literal["reading", "writing"], int, int | None], None]
"""Called with what is done of how much: megabytes read (of None where a pipe's length is not known), steps written."""

Kind = Literal["skipped", "repeated"]

MOST_NAMED = 1000
"""Lines that are named; more are only counted."""
UNKNOWN_RELEASE = "0.2.0"
"""Records name their release from 0.2.1 on."""


@dataclass(frozen=True)
class Left:
    """A line, or a trace in it, that was left out."""

    file: str
    line: int
    trace: str | None
    kind: Kind
    """`skipped`: holds no trace that can be taken. `repeated`: the trace had come before in these files."""
    why: str

    def __str__(self) -> str:
        return f"line {self.line} {'skipped' if self.kind == 'skipped' else 'left out'}: {self.why}"


@dataclass
class Imported:
    """What an import did. Every line is one of `imported`, `skipped`, `repeated` and `blank`."""

    run: str
    files: int = 0
    """Files that were read."""
    lines: int = 0
    imported: int = 0
    """Lines of which at least one trace was added."""
    skipped: int = 0
    """Lines that hold no trace that can be taken."""
    repeated: int = 0
    """Lines whose traces had all come before, in these files or in the run."""
    blank: int = 0
    traces: int = 0
    """Traces added."""
    known: int = 0
    """Traces that the run had already."""
    groups: int = 0
    """Groups of the traces added."""
    joined: int = 0
    """Those of them that the run had already."""
    steps: int = 0
    """Steps written."""
    tokens: int = 0
    """Tokens of the traces added."""
    releases: dict[str, int] = field(default_factory=dict)
    """Traces added by release of Verifiers."""
    rounded: int = 0
    """Traces added whose log-probs were rounded."""
    mixed: int = 0
    """Groups of the traces added whose tasks ask different things."""
    untrained: int = 0
    """Traces added of agents that are not trained: rows, and in no group."""
    cut: list[str] = field(default_factory=list)
    """Compressed files that end, or are damaged, before their end."""
    unread: list[str] = field(default_factory=list)
    """Configurations beside the files that could not be read."""
    left: list[Left] = field(default_factory=list)
    """What was left out, at most MOST_NAMED."""
    unnamed: int = 0
    """How much more was left out."""

    @property
    def clean(self) -> bool:
        """Whether every line was imported, or was in the run already."""
        return not (self.left or self.cut)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def import_files(
    files: str | Path | Sequence[str | Path],
    run: str | Path,
    *,
    group_by: GroupBy = "auto",
    strict: bool = False,
    jobs: int | None = 1,
    told: Told = lambda *_: None,
) -> Imported:
    """Import files of Verifiers (see `find_sources`) into a new run at `run`, or into one that was imported before.

    `group_by`: which traces are one group (see `groups`). `jobs`: processes, None for one a core where the files are
    large; more than 1 only from a program that may be imported again, as `multiprocessing` asks for. A line that holds no trace
    is skipped and named; with `strict` it raises BadInput, and nothing is imported. Raises BadInput where a file cannot be read
    or no trace is found, RunConflict where `run` holds something else, or another import is at work, and BrokenImport where one
    of the processes was killed.
    """
    if group_by not in GROUP_BY:
        raise BadInput(f"group_by {group_by!r}: expected one of {', '.join(GROUP_BY)}.")
    if jobs is not None and jobs < 1:
        raise BadInput(f"jobs {jobs}: expected 1 or more.")
    sources = find_sources([files] if isinstance(files, (str, Path)) else files)
    jobs = jobs_for(sources) if jobs is None else jobs
    with target_at(run) as (target, folder), workers(jobs) as work:
        unread = [source.unread for source in sources if source.unread]
        result = Imported(target.run_id, len(sources), unread=unread)
        reader = _Reader(sources, target, result, strict=strict)
        taker = Taker(folder, sources, group_by, target.known, target.run_id)
        for taken in work.take(taker, reader.blocks(told)):
            reader.add(taken)
        reader.finish()
        if result.traces:
            plans = target.plan(reader.members, reader.files, folder)
            for commit in work.write(plans):
                target.stage(commit, folder)
                result.steps += 1
                told("writing", result.steps, len(plans))
            target.commit(sources, group_by, reader.model)
    return result


class _Reader:
    """Puts together what the blocks hold: every trace once, in its group."""

    def __init__(self, sources: Sequence[Source], target: Target, result: Imported, *, strict: bool) -> None:
        self.sources, self.target, self.result, self.strict = sources, target, result, strict
        self.seen: set[str] = set()
        self.members: dict[bytes, Members] = {}
        self.files: dict[int, Path] = {}
        self.cuts: deque[tuple[int, str]] = deque()
        self.lines = [0] * len(sources)
        self.releases: Counter[str] = Counter()
        self.models: set[str | None] = set()

    @property
    def model(self) -> str | None:
        """The model that sampled every trace, where it is one."""
        return next(iter(self.models)) if len(self.models) == 1 else None

    def blocks(self, told: Told) -> Iterator[Block]:
        """The blocks of all sources, in order."""
        sizes = [source.bytes for source in self.sources]
        total = None if None in sizes else sum(size or 0 for size in sizes) >> 20
        before = 0
        for number, source in enumerate(self.sources):
            try:
                for block in blocks(number, source):
                    yield block
                    told("reading", before + block.read >> 20, total)
            except Cut as cut:
                self.cuts.append((number, str(cut)))
            before += sizes[number] or 0

    def add(self, taken: Taken) -> None:
        """Count what a block holds, and place its traces."""
        result, source = self.result, taken.source
        left: list[tuple[int, str | None, Kind, str]] = [
            (line, trace, "skipped", why) for line, trace, why in taken.skipped
        ]
        added: set[int] = set()
        for found in taken.found:
            if found.trace_id in self.seen:
                left.append((found.line, found.trace_id, "repeated", f"trace {found.trace_id} had come before"))
            elif self._place(found):
                added.add(found.line)
        for line, trace, kind, why in sorted(left, key=itemgetter(0)):
            self._leave(Left(self.sources[source].name, self.lines[source] + line, trace, kind, why))
        skipped = {line for line, _, _ in taken.skipped}
        told = skipped | {found.line for found in taken.found}
        result.lines += taken.lines
        result.blank += taken.blank
        result.imported += len(added)
        result.skipped += len(skipped - added)
        result.repeated += len(told - skipped - added)
        self.lines[source] += taken.lines
        if taken.file is not None:
            self.files[len(self.files)] = taken.file

    def _place(self, found: Found) -> bool:
        """Put a trace into its group; False where the run has it already."""
        result = self.result
        self.seen.add(found.trace_id)
        if found.row < 0:
            result.known += 1
            return False
        group = self.members.get(found.group)
        if group is None:
            group = Members(self.target.index_of(found.group), found.group, trained=found.trained)
            self.members[found.group] = group
        group.add(len(self.files), found.row, found.bytes, found.tokens, found.rollouts)
        group.asks(found.prompt)
        result.traces += 1
        result.tokens += found.tokens
        result.rounded += found.rounded
        result.untrained += not found.trained
        self.releases[found.release or UNKNOWN_RELEASE] += 1
        self.models.add(found.model)
        return True

    def _leave(self, left: Left) -> None:
        if self.strict and left.kind == "skipped":
            raise BadInput(f"{left.file}: line {left.line}: {left.why} (strict is set, so nothing was imported).")
        if len(self.result.left) < MOST_NAMED:
            self.result.left.append(left)
        else:
            self.result.unnamed += 1

    def finish(self) -> None:
        """Sum up. Raises BadInput where nothing was found, or strict is set and a file was cut."""
        result, names = self.result, ", ".join(source.name for source in self.sources)
        for source, why in self.cuts:
            sentence = f"{self.sources[source].name}: line {self.lines[source]} is the last that was read; {why}"
            if self.strict:
                raise BadInput(f"{sentence} (strict is set, so nothing was imported).")
            result.cut.append(sentence)
        if not self.seen:
            first = next((left for left in result.left), None)
            why = f"; line {first.line}: {first.why}" if first else f"; {result.cut[0]}" if result.cut else ""
            raise BadInput(f"{names}: {counted(result.lines, 'line')} and no Verifiers trace among them{why}.")
        result.groups = len(self.members)
        result.mixed = sum(group.mixed for group in self.members.values())
        result.joined = sum(self.target.has(group.index) for group in self.members.values())
        result.releases = dict(sorted(self.releases.items()))
