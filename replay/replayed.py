"""Recorded steps made again by the converter of today, and whether they are what they were.

    training      rows ─► convert ─► stage `converted` ─► finish ─► stage `handed`
    evaluations   rows ─► each trace alone ─► stage `evaluated`

What a stage must be: the Samples that were approved (see `verification/expected.py`) where there are some, else what the
live run took a digest of, else it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

import pyarrow as pa

from rolltape.replay import options as here
from rolltape.replay.batches import evaluated, read_part
from rolltape.replay.convert import Conversion, SampleGroup, convert, flatten
from rolltape.replay.digest import digest
from rolltape.replay.options import ConvertOptions
from rolltape.replay.outcomes import finish, read_outcomes
from rolltape.replay.run import Run
from rolltape.replay.sample import Sample
from rolltape.replay.verification.compare import NOTHING, Comparison, compare
from rolltape.replay.verification.expected import Expected, read_expected, read_sums
from rolltape.replay.verification.verify import check_file
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput

_STAGES = {
    "converted": "its Samples",
    "handed": "the batch handed over",
    "evaluated": "the Samples of its rollouts",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What replaying gave of one stage of a part."""

    stage: str
    state: Literal["same", "differs", "unknown"]
    message: str = ""
    """Unless the state is `same`: where it differs, or why nothing is known."""
    converter: int | None = None
    """Version of the converter whose Samples are expected, where that is known."""
    comparison: Comparison | None = None
    """Where Samples were approved."""
    against: Literal["approved", "recorded"] | None = None
    """What it was compared with: approved Samples, or the digest that was recorded."""


@dataclass(frozen=True)
class Replayed:
    """One committed part of a run, made again."""

    run: Run
    commit: Commit
    table: pa.Table
    """Its rows."""
    options: ConvertOptions
    expected: Expected | None = None

    @cached_property
    def conversion(self) -> Conversion:
        """What converting its groups gives: Samples, findings, and why traces were dropped."""
        return convert(self.table, self.commit.groups, self.options) if self.table.num_rows else Conversion([], [], {})

    @cached_property
    def groups(self) -> list[SampleGroup]:
        """The Samples as a trainer gets them."""
        return list(self.stages())[-1][1]

    @property
    def samples(self) -> list[Sample]:
        """The same, in order."""
        return [sample for group in self.groups for sample in flatten(group)]

    def stages(self) -> Iterator[tuple[str, list[SampleGroup]]]:
        """Name and Samples of each stage. Raises BadInput where outcomes do not fit what was converted."""
        if self.commit.part.split != "train":
            yield "evaluated", self._evaluated() if self.table.num_rows else []
            return
        yield "converted", self.conversion.groups
        if self.commit.step.digest_handed is not None and self._as_recorded:
            yield "handed", finish(self.conversion.groups, read_outcomes(self.table), self.commit.step)

    @property
    def _as_recorded(self) -> bool:
        """Whether it is converted as it was live: outcomes fit no other Samples."""
        return self.options == replace(ConvertOptions.from_dict(self.commit.step.options), strict=False)

    def _evaluated(self) -> list[SampleGroup]:
        rollouts = evaluated(self.table, self.commit.groups, self.options, None)
        sound = [r.samples for r in rollouts if r.samples]
        return [list(group) for _, group in groupby(sound, key=lambda samples: samples[0].group_index)]

    def verdicts(self) -> Iterator[Verdict]:
        """What each stage gave, up to one that cannot be made."""
        try:
            for stage, groups in self.stages():
                yield self._verdict(stage, groups)
        except BadInput as error:  # outcomes that no longer fit
            yield Verdict(stage="handed", state="differs", message=f"{self}: {error}")

    def _verdict(self, stage: str, groups: list[SampleGroup]) -> Verdict:
        approved = self.expected and self.expected.digests.get(stage)
        if self.expected is not None and approved:
            version = self.expected.converter
            same = digest(groups, version) == approved
            comparison = None if same else compare(self.expected.batch(stage), groups)
            if comparison is None:
                return Verdict(stage=stage, state="same", converter=version, against="approved")
            message = self._difference(stage, comparison, version)
            return Verdict(
                stage=stage,
                state="differs",
                message=message,
                converter=version,
                comparison=comparison,
                against="approved",
            )
        recorded = {"converted": self.commit.step.digest_converted, "handed": self.commit.step.digest_handed}.get(stage)
        if recorded is None:
            return Verdict(stage=stage, state="unknown", message=self._unknown())
        for version in range(here.CONVERTER_VERSION, 0, -1):
            if digest(groups, version) == recorded:
                return Verdict(stage=stage, state="same", converter=version, against="recorded")
        return Verdict(
            stage=stage, state="differs", message=self._digest(stage, recorded, digest(groups)), against="recorded"
        )

    def _difference(self, stage: str, comparison: Comparison, version: int) -> str:
        first = comparison.first
        lines = [f"{self}, {_STAGES[stage]}: {first}", comparison.summary + "."]
        if stage == "converted" and first.now is NOTHING and first.trace_id in self.conversion.dropped:
            lines.append("Now the trace is dropped: {}, {}.".format(*self.conversion.dropped[first.trace_id]))
        now = here.CONVERTER_VERSION
        lines.append(f"Approved with version {version} of the converter, replayed with version {now}.")
        lines.append(f"If the change is meant: rolltape approve {self.run.paths.root}")
        return "\n".join(lines)

    def _digest(self, stage: str, recorded: str, found: str) -> str:
        return (
            f"{self}: {_STAGES[stage]} are no longer those of the live run (sha256 {recorded[:12]}… expected, {found[:12]}… "
            f"now, version {here.CONVERTER_VERSION} of the converter).\nThe recording holds a digest only, which names no "
            f"field. For the exact place: `rolltape approve {self.run.paths.root}` on the last revision that passes, then "
            "replay again on this one."
        )

    def _unknown(self) -> str:
        return (
            f"{self}: nothing to compare with. The recording holds no digest of its Samples, and none were approved: "
            f"`rolltape approve {self.run.paths.root}`, on a revision known to be good."
        )

    def __str__(self) -> str:
        part = self.commit.part
        return f"{self.run.paths.root}, step {part.step} of {part.split}, writer {part.writer}"


def replay(run: Run, split: str = "train", steps: int | Iterable[int] | None = None) -> Iterator[Replayed]:
    """The parts of `split`, or of some of its `steps`, one at a time.

    Raises Damaged where a file is not the one that was committed or approved, BadInput where a step was not recorded or the
    approved Samples are those of another recording.
    """
    sums = read_sums(run.paths)
    for commit in run.commits(split, steps):
        again = replay_part(run, commit, read_expected(run.paths.expected(commit.part), sums.get(commit.part)))
        if again.expected is not None and again.expected.recording != commit.file.sha256:
            raise BadInput(
                f"{again}: the approved Samples are those of another recording of this step "
                f"({again.expected.path}); approve the run again: `rolltape approve {run.paths.root}`."
            )
        yield again


def replay_part(run: Run, commit: Commit, expected: Expected | None, options: ConvertOptions | None = None) -> Replayed:
    """One committed part. `options`: how to convert; None takes those that were approved, else those it was recorded with."""
    held = run.held(commit)
    if held.path not in run.sound:
        check_file(held)
        run.sound.add(held.path)
    if options is None:
        options = ConvertOptions.from_dict(commit.step.options if expected is None else expected.options)
    return Replayed(run, commit, read_part(run, commit), replace(options, strict=False), expected)
