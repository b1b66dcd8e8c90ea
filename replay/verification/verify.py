"""Verifying a run: are the bytes the ones that were written, do the rows add up, do they still convert to the same Samples?

Findings about a trace that was not emitted are not counted again, nor those of a group none of whose traces was: their
dispositions say what became of them, and the rows keep why. Of an evaluation, which trains nothing, only what is wrong with
the recording counts. Where a run has no dispositions (it was imported), every finding counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyarrow as pa

from rolltape.replay.checks import check
from rolltape.replay.checks.findings import Finding, Severity
from rolltape.replay.checks.groups import check_groups, members
from rolltape.replay.contents import Held
from rolltape.replay.convert import Conversion, convert, flatten
from rolltape.replay.digest import digest
from rolltape.replay.housekeeping.pruned import notes_of
from rolltape.replay.housekeeping.rewrite import same_rows
from rolltape.replay.listing.runs import is_locked
from rolltape.replay.options import BranchPolicy, ConvertOptions, Expectations
from rolltape.replay.outcomes import finish, read_outcomes
from rolltape.replay.printing.words import counted
from rolltape.replay.run import Run
from rolltape.replay.verification.annotations import check_annotations
from rolltape.replay.verification.steps import missing
from rolltape.replay.view import COLUMNS, views
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged, OtherRun, RolltapeError, Unreachable
from rolltape.schema.fields import OUTCOME
from rolltape.schema.paths import Part, part_of
from rolltape.schema.scores import SCORES
from rolltape.schema.sealed import unseal
from rolltape.schema.storage import AnyPath, listed, sha256_of

_COLUMNS = [*dict.fromkeys([*COLUMNS, *OUTCOME.arrow.names, "extra", *SCORES])]
_OF_TRAINING = ("branches", "no_trainable_token", "no_tokens", "image", "group_size")
"""Findings that say a trace or group cannot be trained, not that it was recorded wrongly."""


@dataclass(frozen=True)
class Verification:
    """What verifying a run gave."""

    findings: list[Finding]
    parts: int
    """Steps, each writer's and attempt's for itself."""
    traces: int
    tokens: int
    counts: dict[str, int]
    """Tries started, and ended by disposition, over the newest attempt of each step."""
    digests: int
    """Parts whose converted and handed batches were made again and compared."""
    notes: list[str] = field(default_factory=list)
    """What can no longer be proved because it was pruned, and what takes room without counting: sentences."""
    files: int = 0
    """Files that rows were read from; several parts lie in one after a compaction."""
    samples: int = 0
    """That the rows of training convert to, before anything that hooks of the trainer did."""
    not_compared: int = 0
    """Parts that were converted with another branch policy than they were recorded with, so that no batch compares."""
    imported: bool = False
    """Whether the rows were imported, so that there is no batch of a live run to compare with."""
    annotations: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Traces of training that give no Sample, by why, where nothing was recorded of what became of them."""

    @property
    def errors(self) -> list[Finding]:
        """Findings that are no warnings."""
        return [f for f in self.findings if f.severity == "error"]

    @property
    def clean(self) -> bool:
        """Whether something was checked, and nothing found."""
        return bool(self.parts) and not self.errors

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        against = "recorded" if self.digests else None
        findings = [f.to_dict() for f in self.findings]
        return {**self.__dict__, "findings": findings, "against": against, "clean": self.clean}


def verify(
    run: Run,
    expect: Expectations | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    branch_policy: BranchPolicy | None = None,
) -> Verification:
    """Check every file and every row of `run`, superseded attempts included, and convert the newest again.

    `expect` is checked on the newest attempt of each step. `progress` is called with parts done and parts in all.
    `branch_policy`: convert like this instead of as recorded; steps that were recorded with another one are not compared with
    the batches of the live run then.
    """
    findings = [
        Finding(code="commit", message=str(e), split=_evaluation(p), step=p.step, file=str(run.paths.commit(p)))
        for p, e in run.broken
    ]
    findings += _attempt_files(run)
    broken = {p for p, _ in run.broken}
    commits = run.all_commits
    newest = run.newest({c.part for c in commits} | broken)
    traces = tokens = digests = samples = not_compared = 0
    counts: Counter[str] = Counter()
    looked: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    seen: dict[Any, Part] = {}
    files: dict[AnyPath, str | None] = {}
    for i, commit in enumerate(commits):
        part = _Part(run, commit, _Again(expect or Expectations(), branch_policy), files)
        findings += (replace(found, split=_evaluation(commit.part)) for found in part.check(commit.part in newest))
        if commit.part in newest:
            traces, tokens, digests = traces + part.rows, tokens + part.tokens, digests + part.digests
            samples, not_compared = samples + part.samples, not_compared + part.not_compared
            counts.update(commit.step.counts)
            looked.update(part.looked)
            left_out.update(part.left_out)
            findings += _twice(part, seen)
        if progress is not None:
            progress(i + 1, len(commits))
    annotations, wrong = check_annotations(run)
    findings += _unmet(expect or Expectations(), looked)
    findings += missing(run, newest) + _orphans(run) + _journals(run, bool(commits or broken)) + wrong
    return Verification(
        findings,
        len(commits),
        traces,
        tokens,
        dict(counts),
        digests,
        notes_of(run),
        files=len(files),
        samples=samples,
        not_compared=not_compared,
        imported=bool(run.info.get("imported")),
        annotations=annotations,
        left_out=dict(left_out),
    )


def _evaluation(part: Part) -> str | None:
    """The split of a part, where it is not training's."""
    return None if part.split == "train" else part.split


@dataclass(frozen=True)
class _Again:
    """How parts are converted again."""

    expect: Expectations
    branch_policy: BranchPolicy | None

    def options(self, commit: Commit) -> ConvertOptions:
        """The options of a part. Raises BadInput for an option this version does not know."""
        recorded = ConvertOptions.from_dict(commit.step.options)
        return replace(recorded.with_branches(self.branch_policy), strict=False)

    def differs(self, commit: Commit) -> bool:
        """Whether a part is converted otherwise than it was."""
        return self.branch_policy not in (None, ConvertOptions.from_dict(commit.step.options).branch_policy)


class _Part:
    """Checks of one committed part."""

    def __init__(self, run: Run, commit: Commit, again: _Again, files: dict[AnyPath, str | None]) -> None:
        """`files`: what is wrong with the bytes of each file that was looked at; several parts can share one."""
        self.run, self.commit, self.again, self.files = run, commit, again, files
        self.held = run.held(commit)
        self.path = self.held.path
        self.rows = self.tokens = self.digests = self.samples = self.not_compared = 0
        self.trace_ids: list[str] = []
        self.left_out: Counter[str] = Counter()
        """Traces that give no Sample, by why, where their rows do not say what became of them."""
        self.looked: dict[str, int] = {}
        """Traces or groups that each expectation was held against."""

    def check(self, newest: bool) -> Iterator[Finding]:
        """Findings of the part; rows are converted only where the part is the newest of its step."""
        if self.path in self.files:
            if self.files[self.path] is not None:  # said already
                return
        else:
            self.files[self.path] = wrong = _wrong_bytes(self.held)
            if wrong is not None:
                yield self._finding("file", wrong)
                return
        try:
            tables = list(self.run.part_batches(self.commit, _COLUMNS))
        except Unreachable:
            raise
        except OtherRun as error:
            yield self._finding("other_run", str(error), expected=self.run.run_id)
            return
        except (RolltapeError, OSError) as error:
            yield self._finding("file", str(error))
            return
        table = pa.concat_tables(tables) if tables else None
        self.rows = 0 if table is None else table.num_rows
        if self.rows != self.commit.file.rows:
            yield self._finding("rows", f"{counted(self.rows, 'row')}, but {self.commit.file.rows:,} were committed")
        elif table is not None:
            yield from self._scores(table)
        yield from self._coverage(table)
        if table is not None:
            self.trace_ids = table.column("trace_id").to_pylist()
            self.tokens = sum(table.column("num_tokens").to_pylist())
            if newest and self.held.pruned:
                yield from self._groups(table)
            elif newest:
                yield from self._convert(table)

    def _scores(self, table: pa.Table) -> Iterator[Finding]:
        """Whether the scores that the commit repeats are those of the rows."""
        if self.commit.file.scores is None:
            return
        other = [name for name in SCORES - set(self.held.pruned) if not self._is_said(name, table.select([name]))]
        if other:
            yield self._finding("scores", f"the commit's {', '.join(sorted(other))} are not those of the rows")

    def _is_said(self, name: str, column: pa.Table) -> bool:
        try:
            return same_rows(pa.table({name: self.commit.score(name)}), column)
        except KeyError:  # of an earlier version, which had no such column
            return True
        except ValueError:
            return False

    def _coverage(self, table: pa.Table | None) -> Iterator[Finding]:
        counts = dict(self.commit.step.counts)
        if not counts:
            return
        started = counts.pop("started", 0)
        if started != sum(counts.values()):
            yield self._finding(
                "coverage",
                f"{counted(started, 'try', 'tries')} started, but {sum(counts.values())} are accounted for ({_listed(counts)})",
            )
        lost = counts.pop("lost", 0)
        if lost:
            yield self._finding(
                "lost", f"{counted(lost, 'try', 'tries')} started and left no trace", severity="warning", found=lost
            )
        said = Counter([] if table is None else table.column("disposition").to_pylist())
        if dict(said) != {k: v for k, v in counts.items() if v}:
            yield self._finding(
                "coverage",
                f"the commit counts {_listed(counts)}; its rows say {_listed(said)}",
                expected=counts,
                found=dict(said),
            )

    def _convert(self, table: pa.Table) -> Iterator[Finding]:
        """Convert again, compare digests, and look whether expectations hold."""
        try:
            options = self.again.options(self.commit)
            conversion = convert(table, self.commit.groups, options)
        except (RolltapeError, TypeError) as error:
            yield self._finding("convert", str(error))
            return
        if self.commit.part.split == "train":
            self.samples = sum(len(flatten(group)) for group in conversion.groups)
            if table.column("disposition").null_count == table.num_rows:
                self.left_out = Counter(why for why, _ in conversion.dropped.values())
        yield from self._unsettled(table, conversion.findings)
        if self.again.expect != Expectations():
            final = {None, *(t for group in self.commit.groups for t in group.trace_ids)}
            found = check(table, replace(options, expect=self.again.expect), self.commit.groups)
            yield from (f for f in found if f.code.startswith("expected_") and f.trace_id in final)
            self._look(table, tokens=True)
        if not self.again.differs(self.commit):
            yield from self._digests(table, conversion)
        elif self.commit.step.digest_converted is not None:
            self.not_compared = 1

    def _groups(self, table: pa.Table) -> Iterator[Finding]:
        """What can be checked where tokens were pruned: the groups and their rewards."""
        try:
            options = replace(self.again.options(self.commit), expect=self.again.expect)
        except (RolltapeError, TypeError) as error:
            yield self._finding("convert", str(error))
            return
        yield from self._unsettled(table, check_groups(table, self.commit.groups, options))
        self._look(table, tokens=False)

    def _look(self, table: pa.Table, tokens: bool) -> None:
        """Count what expectations were held against; those of a trace need its `tokens`."""
        known = members(views(table))
        groups = [[known[t] for t in g.trace_ids if t in known] for g in self.commit.groups]
        whole = sum(not any(m.failed for m in group) for group in groups)
        sound = sum(not m.failed for group in groups for m in group) if tokens else 0
        self.looked = {"group_size": len(groups), "group_reward_sum": whole}
        self.looked |= dict.fromkeys(("branches", "sampled_tokens", "reward_names"), sound)

    def _unsettled(self, table: pa.Table, findings: Sequence[Finding]) -> Iterator[Finding]:
        """Those of `findings` that no disposition has settled."""
        said = zip(table.column("trace_id").to_pylist(), table.column("disposition").to_pylist(), strict=True)
        traces = {t for t, d in said if d not in (None, "emitted", "eval")} | self._lost(table)
        groups = {g.group_index for g in self.commit.groups if traces.issuperset(g.trace_ids)}
        trains = self.commit.part.split == "train"
        for found in findings:
            settled = found.trace_id in traces if found.trace_id is not None else found.group_index in groups
            if not settled and (trains or found.code not in _OF_TRAINING):
                yield found

    def _lost(self, table: pa.Table) -> set[str]:
        """Traces of groups that have no row, where the commit counts at least as many as lost."""
        rows = set(table.column("trace_id").to_pylist())
        missing = {t for group in self.commit.groups for t in group.trace_ids if t not in rows}
        return missing if len(missing) <= self.commit.step.counts.get("lost", 0) else set()

    def _digests(self, table: pa.Table, conversion: Conversion) -> Iterator[Finding]:
        step = self.commit.step
        if step.digest_converted is None:
            return
        self.digests = 1
        found = digest(conversion.groups)
        if found != step.digest_converted:
            message = "the rows no longer convert to the Samples of the live run"
            yield self._finding("digest_converted", message, expected=step.digest_converted, found=found)
        if step.digest_handed is None:
            return
        try:
            batch = finish(conversion.groups, read_outcomes(table), step)
        except BadInput as error:
            yield self._finding("digest_handed", str(error))
            return
        self.samples = sum(len(flatten(group)) for group in batch)
        if digest(batch) != step.digest_handed:
            message = "conversion and outcomes no longer give the batch that was handed over"
            yield self._finding("digest_handed", message, expected=step.digest_handed, found=digest(batch))

    def _finding(self, code: str, message: str, **rest: Any) -> Finding:
        return Finding(code=code, message=message, step=self.commit.part.step, file=str(self.path), **rest)


def _listed(counts: Mapping[Any, int]) -> str:
    """Counts for a sentence."""
    return (
        ", ".join(f"{n:,} {(name or 'of no outcome').replace('_', ' ')}" for name, n in counts.items() if n) or "none"
    )


def check_file(held: Held) -> None:
    """Raise Damaged unless the file's size and sha256 are those committed."""
    path, file = held.path, held.file
    held.check_size()
    found = sha256_of(path)
    if found != file.sha256:
        raise Damaged(
            f"{path}: its sha256 is {found[:12]}…, but {file.sha256[:12]}… was committed; restore the file from a copy."
        )


def _wrong_bytes(held: Held) -> str | None:
    """What is wrong with the bytes of a file."""
    try:
        check_file(held)
    except Unreachable:
        raise
    except (RolltapeError, OSError) as error:
        return str(error)
    return None


def _twice(part: _Part, seen: dict[Any, Part]) -> Iterator[Finding]:
    """Traces that stand in two parts of the newest steps, and group indices of a split that do."""
    place = part.commit.part
    for trace in part.trace_ids:
        other = seen.setdefault(trace, place)
        if other != place:
            message = f"the trace is in step {other.step} of {other.split!r} (writer {other.writer!r}) as well"
            yield part._finding("trace_twice", message, trace_id=trace, expected=1, found=2)
    for group in part.commit.groups:
        other = seen.setdefault((place.split, group.group_index), place)
        if other != place:
            message = (
                f"group index {group.group_index} is that of a group in step {other.step} (writer {other.writer!r}) too"
            )
            yield part._finding("group_twice", message, group_index=group.group_index)


def _unmet(expect: Expectations, looked: Mapping[str, int]) -> list[Finding]:
    """Expectations that nothing was held against: they hold as little as those that fail."""
    what = {
        "group_size": "there is no group",
        "group_reward_sum": "there is no group all of whose traces ended without an error",
    }
    none = "there is no trace of a group that ended without an error and has its tokens"
    given = [f.name for f in fields(expect) if getattr(expect, f.name) not in (None, {})]
    return [
        Finding(code="expected_nothing", message=f"{name} was held against nothing: {what.get(name, none)}")
        for name in given
        if not looked.get(name)
    ]


def _journals(run: Run, committed: bool) -> list[Finding]:
    """Journals that hold what is not committed: of writers at work, or of writers that died.

    Where nothing is `committed`, one that nobody writes is an error: there is nothing in the run but what it holds.
    """
    findings = []
    for path in (p for p in sorted(run.paths.journals.glob("*.journal")) if p.stat().st_size):
        settles = f"`rolltape recover {run.paths.root}` settles it"
        severity: Severity = "warning"
        if is_locked(path):
            message = "holds what is not committed yet; its writer is at work"
        elif committed:
            message = f"holds what is not committed, and no writer is seen at work from here; {settles}"
        else:
            severity, message = (
                "error",
                f"holds all that was recorded, no step is committed, and nobody writes; {settles}",
            )
        findings.append(Finding(code="journal", severity=severity, message=f"{path} {message}", file=str(path)))
    return findings


def _orphans(run: Run) -> list[Finding]:
    """Parquet files without a commit: not data, and never read."""
    findings = []
    known = {c.part for c in run.all_commits} | {p for p, _ in run.broken} | {r.part for r in run.contents.rewrites}
    for path in listed(run.paths.traces, "*/*.parquet"):
        part = part_of(path)
        if part is not None and (part.split, part.stem) in run.contents.replaced:
            continue
        if part is None or (part not in known and not run.paths.commit(part).exists()):
            findings.append(
                Finding(
                    code="uncommitted",
                    severity="warning",
                    message=f"{path} has no commit, so it is not read; its writer commits it soon, or died before",
                    file=str(path),
                )
            )
    return findings


def _attempt_files(run: Run) -> list[Finding]:
    """Attempts that commits name and whose file is missing or unreadable."""
    findings = []
    for file in listed(run.paths.attempts, "*.json"):
        try:
            unseal(file.read_bytes(), file)["attempt"]
        except RolltapeError as error:
            findings.append(Finding(code="attempt", message=str(error), file=str(file)))
        except (OSError, KeyError) as error:
            message = f"{file}: no readable attempt ({error}); restore it from a copy"
            findings.append(Finding(code="attempt", message=message, file=str(file)))
    missing = sorted({c.part.attempt for c in run.all_commits} - set(run.attempts))
    for number in missing:
        if not run.paths.attempt(number).exists():
            path = run.paths.attempt(number)
            message = f"{path} is missing, though commits name attempt {number}; its settings are lost"
            findings.append(Finding(code="attempt", message=message, file=str(path)))
    return findings
