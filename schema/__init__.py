"""The file format: four records, the way into and out of Arrow, the places of a run on disk."""

from rolltape.schema.decoding import decode, to_trace
from rolltape.schema.errors import (
    BadInput,
    CheckFailed,
    Damaged,
    MissingExtra,
    RolltapeError,
    RunConflict,
    RunNotFound,
    Unreachable,
    UnsupportedVersion,
)
from rolltape.schema.fields import DISPOSITIONS, GROUP, OUTCOME, RECORDS, ROW, SCHEMA_VERSION, STEP, TRACE
from rolltape.schema.parquet import read_parquet, write_parquet
from rolltape.schema.records import Context, Group, Outcome, RewardSum, Step, Turn
from rolltape.schema.table import encode, with_outcomes

__all__ = [
    "DISPOSITIONS",
    "GROUP",
    "OUTCOME",
    "RECORDS",
    "ROW",
    "SCHEMA_VERSION",
    "STEP",
    "TRACE",
    "BadInput",
    "CheckFailed",
    "Context",
    "Damaged",
    "Group",
    "MissingExtra",
    "Outcome",
    "RewardSum",
    "RolltapeError",
    "RunConflict",
    "RunNotFound",
    "Step",
    "Turn",
    "Unreachable",
    "UnsupportedVersion",
    "decode",
    "encode",
    "read_parquet",
    "to_trace",
    "with_outcomes",
    "write_parquet",
]
