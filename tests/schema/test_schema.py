"""The schema is pinned: what is printed, what is exported, what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import rolltape.schema
from rolltape.replay.cli import app
from rolltape.schema import (
    GROUP,
    OUTCOME,
    RECORDS,
    ROW,
    SCHEMA_VERSION,
    STEP,
    TRACE,
    RolltapeError,
    UnsupportedVersion,
    errors,
)
from rolltape.schema.fields import Field, Record, check_version

GOLDEN = Path(__file__).parent / "golden_schema.json"


def printed() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["schema", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_the_schema_is_the_golden_one() -> None:
    """A change of a name, type or meaning changes files: bump SCHEMA_VERSION where it must, then write the file anew:

    rolltape schema --json > tests/schema/golden_schema.json
    """
    assert printed() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_the_fingerprint_of_a_row_is_pinned_with_the_version() -> None:
    """It is written into every file, and files of one fingerprint are read as one table."""
    assert (SCHEMA_VERSION, ROW.fingerprint) == ((1, 0), "ea1e0f38a45cfca0")
    assert printed()["fingerprint"] == ROW.fingerprint


def test_the_fingerprint_says_exactly_what_decides_whether_files_fit_together() -> None:
    field = Field("a", pa.int32(), "d", "s")
    base = Record("r", "d", (field, replace(field, name="b")))
    same = [
        replace(base, name="q", description="other"),
        replace(base, fields=(replace(field, description="x"), base.fields[1])),
    ]
    assert {r.fingerprint for r in same} == {base.fingerprint}
    others = [
        replace(field, name="c"),
        replace(field, type=pa.int64()),
        replace(field, nullable=False),
        replace(field, shape="token"),
    ]
    changed = [replace(base, fields=(f, base.fields[1])) for f in others] + [replace(base, fields=base.fields[::-1])]
    assert len({base.fingerprint, *(r.fingerprint for r in changed)}) == 6


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_every_field_says_what_it_is_and_where_it_comes_from(record: Record) -> None:
    assert record.description
    for field in record.fields:
        assert field.description.strip(), field.name
        assert field.source in {"rolltape", "Verifiers trace", "engine reply", "trainer", "live traces"}, field.name
        found = record.arrow.field(field.name)
        assert found.metadata[b"description"].decode() == field.description
        assert found.type == field.arrow_type
    assert len(record.by_name) == len(record.fields), "two fields share a name"


def test_times_and_counts_have_a_unit() -> None:
    for field in (*ROW.fields, *GROUP.fields, *STEP.fields):
        if field.name.endswith(("_start", "_end", "_at", "timestamp")):
            assert field.unit == "s since epoch", field.name
        if "logprobs" in field.name and field.shape == "token":
            assert field.unit == "nats", field.name


def test_a_row_is_a_trace_and_its_outcome() -> None:
    assert ROW.fields == TRACE.fields + OUTCOME.fields
    assert all(f.nullable for f in ROW.fields), "a minor version adds nullable columns only"


def test_token_columns_have_one_length_and_small_types() -> None:
    types = {f.name: f.type for f in TRACE.fields if f.shape == "token"}
    assert types == {"token_ids": pa.int32(), "sampled": pa.bool_(), "is_content": pa.bool_(), "logprobs": pa.float32()}


def test_no_column_is_a_list_of_structs() -> None:
    """Readers prune top-level columns only, and a new field of a struct changes the type of the old column."""
    for record in RECORDS:
        assert not any(pa.types.is_struct(f.type) or pa.types.is_nested(f.type) for f in record.fields)


def test_the_printed_forms_name_every_field() -> None:
    for option in ([], ["--arrow"]):
        output = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["schema", *option]).output
        missing = [f.name for f in ROW.fields if f.name not in output]
        assert missing == []


# -- versions


@pytest.mark.parametrize("found", ["1.0", "1.7", "1"])
def test_every_minor_version_of_a_known_major_one_is_accepted(found: str) -> None:
    check_version(found, "x")


@pytest.mark.parametrize("found", ["2.0", "0.1", "", None, "x.1", "-1.0"])
def test_other_versions_are_refused_with_a_sentence_that_names_the_file(found: str | None) -> None:
    with pytest.raises(UnsupportedVersion, match=r"^a/b\.parquet: schema version .*(1\.0)"):
        check_version(found, "a/b.parquet")


# -- the public surface


def test_the_exported_names_are_pinned() -> None:
    assert set(rolltape.schema.__all__) == {
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
    }
    assert all(hasattr(rolltape.schema, name) for name in rolltape.schema.__all__)


def test_every_error_is_ours_and_one_of_the_standard_library() -> None:
    expected = {
        "BadInput": ValueError,
        "CheckFailed": ValueError,
        "Damaged": OSError,
        "MissingExtra": ImportError,
        "OtherRun": OSError,
        "RunConflict": FileExistsError,
        "RunNotFound": FileNotFoundError,
        "Unreachable": ConnectionError,
        "UnsupportedVersion": RuntimeError,
    }
    found = {n: e for n, e in vars(errors).items() if isinstance(e, type) and e is not RolltapeError}
    assert found.keys() == expected.keys()
    for name, error in found.items():
        assert issubclass(error, RolltapeError)
        assert issubclass(error, expected[name])


HEAVY = (
    "verifiers",
    "renderers",
    "transformers",
    "tokenizers",
    "torch",
    "aiohttp",
    "pydantic",
    "openai",
    "mcp",
    "miles",
)
IMPORTS = """
import sys
import rolltape.schema, rolltape.replay
from rolltape.replay import *
rolltape.schema.decode(rolltape.schema.encode([{"id": "a", "info": {"x": 1}}]))
print(*sorted({".".join(m.split(".")[:2]) if m.startswith("rolltape.") else m.split(".")[0] for m in sys.modules}))
"""


def test_schema_and_replay_import_no_part_of_the_live_side() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded >= {"rolltape.schema", "rolltape.replay", "pyarrow"}
    assert loaded & {"rolltape.record", *HEAVY} == set()
