"""Approving what the converter of today makes of a run: the expected Samples are written again, and what changed is told.

Nothing but the files below `expected/` is written. A recording that is damaged is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from rolltape.replay import options as here
from rolltape.replay.convert import SampleGroup, flatten
from rolltape.replay.digest import digest
from rolltape.replay.options import BranchPolicy, ConvertOptions
from rolltape.replay.replayed import Replayed, replay_part
from rolltape.replay.run import Run
from rolltape.replay.verification.compare import Comparison, compare
from rolltape.replay.verification.expected import (
    Expected,
    approved_parts,
    read_expected,
    read_sums,
    write_expected,
    write_sums,
)
from rolltape.replay.verification.verify import check_file
from rolltape.replay.whole import naming
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged, RolltapeError, Unreachable
from rolltape.schema.paths import Part
from rolltape.schema.storage import sha256_of

State = Literal["same", "new", "changed", "settings", "removed"]
"""`settings`: the same Samples, made by another version of the converter or with other options."""

_REPLACED = "What was approved before is damaged or gone, and is replaced"


@dataclass(frozen=True, kw_only=True)
class Approval:
    """What approving one part of a run did."""

    part: Part
    state: State
    samples: int = 0
    without_samples: int = 0
    """Traces that gave no Sample: they failed, were tried again, or their group was left out."""
    notes: tuple[str, ...] = ()
    """What changed, in sentences."""
    comparison: Comparison | None = None
    """Where Samples had been approved before, and others come out now."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        part = {name: getattr(self.part, name) for name in ("split", "step", "attempt", "writer")}
        rest = {k: v for k, v in self.__dict__.items() if k not in ("part", "comparison")}
        return {**part, **rest, "comparison": self.comparison and self.comparison.to_dict()}


def approve(
    run: Run,
    *,
    splits: Sequence[str] = (),
    steps: Sequence[int] = (),
    branch_policy: BranchPolicy | None = None,
    write: bool = True,
    told: Callable[[int, int], None] | None = None,
) -> list[Approval]:
    """Take what the converter makes of `run` today as expected, and say how it differs from what was expected before.

    `splits`, `steps`: only these; none means all. `branch_policy`: instead of the recorded one; it is kept with the Samples.
    With `write` False nothing is written. Raises Damaged where a recorded file is not the one that was committed, BadInput
    where a step was not recorded, or where its rows cannot be converted.
    """
    commits = _chosen(run, splits, steps)
    for commit in commits:
        check_file(run.held(commit))  # before anything is written
    sums, damaged = _sums(run)
    result = []
    for done, commit in enumerate(commits, 1):
        result.append(_approve(run, commit, branch_policy, sums.get(commit.part), damaged, write))
        if told is not None:
            told(done, len(commits))
    if not steps:
        result += _left_over(run, {c.part for c in commits}, splits, sums, write)
    if write:
        _keep_sums(run, sums, result)
    return result


def _sums(run: Run) -> tuple[Mapping[Part, str], tuple[str, ...]]:
    """(sha256 of what was approved before, what is wrong with the file that keeps them)."""
    try:
        return read_sums(run.paths), ()
    except Damaged as error:
        return {}, (f"{_REPLACED}: {error}",)


def _keep_sums(run: Run, before: Mapping[Part, str], approved: Sequence[Approval]) -> None:
    sums = {part: sum_ for part, sum_ in before.items() if part not in {a.part for a in approved}}
    sums |= {a.part: sha256_of(run.paths.expected(a.part)) for a in approved if a.state != "removed"}
    if sums != before:
        with naming(run.paths.sums):
            write_sums(run.paths, sums)


def _chosen(run: Run, splits: Sequence[str], steps: Sequence[int]) -> list[Commit]:
    unknown = sorted(set(splits) - set(run.splits()))
    if unknown:
        raise BadInput(
            f"{run.paths.root}: no split {unknown[0]!r} was recorded; recorded are {', '.join(run.splits())}."
        )
    commits = [commit for split in (splits or run.splits()) for commit in run.commits(split)]
    found = {commit.part.step for commit in commits}
    missing = sorted(set(steps) - found)
    if missing or not commits:
        what = f"step {missing[0]} was not recorded" if missing else "no step was recorded"
        raise BadInput(f"{run.paths.root}: {what}; there is nothing to approve.")
    return [commit for commit in commits if not steps or commit.part.step in steps]


def _approve(
    run: Run, commit: Commit, branch_policy: BranchPolicy | None, kept: str | None, damaged: Sequence[str], write: bool
) -> Approval:
    """`kept`: the sha256 of its file when it was approved. `damaged`: what is to be said whatever the Samples are."""
    path, notes = run.paths.expected(commit.part), [*damaged]
    try:
        before = read_expected(path, kept)
    except Unreachable:
        raise
    except RolltapeError as error:
        before = None
        notes.append(f"{_REPLACED}: {error}")
        if branch_policy is None:
            notes.append("It is converted as it was recorded; give --branch-policy if it was approved with another.")
    options = None if branch_policy is None else _options(commit, before, branch_policy)
    again = replay_part(run, commit, before, options)
    stages = dict(again.stages())
    now = Expected(
        path=path,
        recording=commit.file.sha256,
        converter=here.CONVERTER_VERSION,
        rolltape=_version(),
        options=again.options.to_dict(),
        digests={stage: digest(groups) for stage, groups in stages.items()},
    )
    if before is None:
        state, comparison = _against_the_recording(again, notes), None
    else:
        state, comparison = _against_the_approved(before, now, stages, notes)
    if write and state != "same":
        with naming(path):
            write_expected(now, stages)
    samples = [sample for group in [*stages.values()][-1] for sample in flatten(group)]
    without_samples = again.table.num_rows - len({sample.routing_key for sample in samples})
    return Approval(
        part=commit.part,
        state=state,
        samples=len(samples),
        without_samples=without_samples,
        notes=tuple(notes),
        comparison=comparison,
    )


def _against_the_recording(again: Replayed, notes: list[str]) -> State:
    """Without Samples approved before: against the digests of the live run, if it took any."""
    verdicts = list(again.verdicts())
    if any(verdict.state == "differs" for verdict in verdicts):
        notes.append("These are not the Samples of the live run, and its digest cannot say where they differ.")
        return "changed"
    if all(verdict.state == "unknown" for verdict in verdicts):
        notes.append("The recording holds no digest to compare them with.")
    return "changed" if any(note.startswith(_REPLACED) for note in notes) else "new"


def _against_the_approved(
    before: Expected, now: Expected, stages: dict[str, list[SampleGroup]], notes: list[str]
) -> tuple[State, Comparison | None]:
    if before.recording != now.recording:
        notes.append("What was approved before is of another recording of this step.")
    for stage, groups in stages.items():
        if digest(groups, before.converter) == before.digests.get(stage):
            continue
        expected = before.batch(stage) if stage in before.digests else []
        if found := compare(expected, groups):
            notes += [f"{found.first}", f"{found.summary}."]
            if before.converter == now.converter and before.options == now.options:
                notes.append(
                    f"The converter's version is {now.converter}, as before: where its code was changed, raise "
                    "CONVERTER_VERSION in replay/options.py, so that older recordings can say why they differ."
                )
            return "changed", found
    for name in ("converter", "options"):
        if getattr(before, name) != getattr(now, name):
            notes.append(f"The same Samples, with {name} {getattr(before, name)} then and {getattr(now, name)} now.")
    return ("settings" if notes else "same"), None


def _options(commit: Commit, before: Expected | None, branch_policy: BranchPolicy) -> ConvertOptions:
    return ConvertOptions.from_dict(commit.step.options if before is None else before.options).with_branches(
        branch_policy
    )


def _left_over(
    run: Run, parts: set[Part], splits: Sequence[str], sums: Mapping[Part, str], write: bool
) -> Iterator[Approval]:
    """Expected Samples of parts that are not read any more: superseded, or gone."""
    for part in sorted(approved_parts(run.paths, sums)):
        if part not in parts and (not splits or part.split in splits):
            if write:
                run.paths.expected(part).unlink(missing_ok=True)
            yield Approval(
                part=part, state="removed", notes=("The recording holds this step no more, or a newer one.",)
            )


def _version() -> str:
    try:
        return version("rolltape")
    except PackageNotFoundError:
        return "unknown"
