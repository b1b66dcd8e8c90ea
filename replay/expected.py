"""Samples that a recorded step must give: what `rolltape approve` writes, and what replay in CI compares with.

A digest in a step's commit says that a batch differs; only the Samples themselves say where. They lie in the run's folder
under `expected/`, a Parquet file a part, beside the recording and never in it: a row a Sample, token ids, masks and log-probs
as lists, every other field of the digest as JSON text. The file says which converter made it, of which recording.

The same Samples give the same bytes, so that approving again changes nothing in a version control.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.replay.convert import SampleGroup
from rolltape.replay.digest import DIGEST_FIELDS, canonical, digest
from rolltape.replay.sample import Sample, Status
from rolltape.schema.errors import Damaged, Unreachable, UnsupportedVersion
from rolltape.schema.parquet import PAGE_BYTES, put_bytes
from rolltape.schema.storage import AnyPath

FORMAT = 1
"""Version of these files. Another one is refused."""
_HEAD = b"rolltape.expected"
_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("group", pa.int32()),
        ("rollout", pa.int32()),  # null in a flat group
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("rollout_log_probs", pa.list_(pa.float32())),
        *((name, pa.string()) for name in DIGEST_FIELDS),
    ]
)


@dataclass(frozen=True)
class Expected:
    """The head of a file of expected Samples."""

    path: AnyPath
    recording: str
    """sha256 of the Parquet file whose rows they were made of."""
    converter: int
    """Version of the converter that made them."""
    rolltape: str
    """Version of the package."""
    options: Mapping[str, Any]
    """How they were made."""
    digests: Mapping[str, str]
    """By stage, with the converter's version in it."""

    def batch(self, stage: str) -> list[SampleGroup]:
        """The Samples of a stage. Raises Damaged where they are not the ones that were approved."""
        try:
            rows = [row for row in _open(self.path).read().to_pylist() if row["stage"] == stage]
            groups = _groups(rows)
        except Unreachable:
            raise
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise _damaged(self.path, str(error)) from error
        if digest(groups, self.converter) != self.digests.get(stage):
            raise _damaged(self.path, "its Samples do not fit its digest")
        return groups


def read_expected(path: AnyPath) -> Expected | None:
    """The head of a file of expected Samples; None where there is none.

    Raises Damaged where it cannot be read, UnsupportedVersion where a newer rolltape wrote it.
    """
    try:
        head = json.loads((_open(path).schema_arrow.metadata or {})[_HEAD])
        found = head["format"]
    except FileNotFoundError:
        return None
    except Unreachable:
        raise
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    if found != FORMAT:
        raise UnsupportedVersion(
            f"{path}: expected Samples of format {found}; this rolltape knows format {FORMAT}. Upgrade rolltape, or approve "
            "the run again with this one."
        )
    return Expected(path, head["recording"], head["converter"], head["rolltape"], head["options"], head["digests"])


def write_expected(expected: Expected, stages: Mapping[str, Sequence[SampleGroup]]) -> None:
    """Write the Samples of each stage to the file that `expected` heads. It appears whole, or stays as it was."""
    head = {"format": FORMAT, **{k: v for k, v in expected.__dict__.items() if k != "path"}}
    rows = [row for stage, groups in stages.items() for row in _rows(stage, groups)]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in _SCHEMA]
    schema = _SCHEMA.with_metadata({_HEAD: canonical(head)})
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(columns, schema=schema),
        sink,
        compression="zstd",
        use_dictionary=False,  # a stage repeats the one before, which zstd sees in plain values only
        write_statistics=False,
        data_page_size=PAGE_BYTES,
        write_page_checksum=True,
    )
    put_bytes(expected.path, sink.getvalue().to_pybytes())


def _open(path: AnyPath) -> pq.ParquetFile:
    return pq.ParquetFile(pa.BufferReader(path.read_bytes()), page_checksum_verification=True)


def _rows(stage: str, groups: Sequence[SampleGroup]) -> list[dict[str, Any]]:
    nested: list[list[Any]] = [list(group) for group in groups]
    return [
        {
            "stage": stage,
            "group": i,
            "rollout": j if isinstance(item, list) else None,
            "tokens": sample.tokens,
            "loss_mask": sample.loss_mask or [],
            "rollout_log_probs": sample.rollout_log_probs or [],
            **{name: canonical(getattr(sample, name)) for name in DIGEST_FIELDS if name != "status"},
            "status": canonical(sample.status.value),
        }
        for i, group in enumerate(nested)
        for j, item in enumerate(group)
        for sample in (item if isinstance(item, list) else [item])
    ]


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[SampleGroup]:
    groups: list[list[Any]] = []
    for row in rows:
        if row["group"] == len(groups):
            groups.append([])
        if row["rollout"] is None:
            groups[-1].append(_sample(row))
            continue
        if row["rollout"] == len(groups[-1]):
            groups[-1].append([])
        groups[-1][-1].append(_sample(row))
    return groups


def _sample(row: Mapping[str, Any]) -> Sample:
    values = {name: json.loads(row[name]) for name in DIGEST_FIELDS}
    arrays = {name: row[name] for name in ("tokens", "loss_mask", "rollout_log_probs")}
    return Sample(**{**values, **arrays, "status": Status(values["status"])})


def _damaged(path: AnyPath, why: str) -> Damaged:
    return Damaged(
        f"{path}: no readable file of expected Samples ({why}); restore it from a copy, or write it again with "
        "`rolltape approve` on the last revision known to be good."
    )
