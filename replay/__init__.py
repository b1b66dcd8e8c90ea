"""Reads recorded runs, checks them, and turns traces into Samples."""

from rolltape.replay.checks import check
from rolltape.replay.convert import Conversion, convert, flatten
from rolltape.replay.digest import digest
from rolltape.replay.findings import Finding
from rolltape.replay.options import ConvertOptions, Expectations
from rolltape.replay.outcomes import finish, outcomes_of, read_outcomes
from rolltape.replay.run import Run, open_run
from rolltape.replay.sample import Sample, Status

__all__ = [
    "Conversion",
    "ConvertOptions",
    "Expectations",
    "Finding",
    "Run",
    "Sample",
    "Status",
    "check",
    "convert",
    "digest",
    "finish",
    "flatten",
    "open_run",
    "outcomes_of",
    "read_outcomes",
]
