"""Samples that a recorded step must give: what `rolltape approve` writes, and what replay in CI compares with.

A digest in a step's commit says that a batch differs; only the Samples themselves say where. They lie in the run's folder
under `expected/`, a Parquet file a part, beside the recording and never in it: a row a Sample, token ids, masks and log-probs
as lists, every other field of the digest as JSON text. The file says which converter made it, of which recording.

The same Samples give the same bytes, so that approving again changes nothing in a version control. `expected/SHA256SUMS` keeps
the sha256 of each file, so that one that was changed or removed since is found; of a file that is not in it, which an earlier
rolltape approved, the rows are held against its digests instead.
"""

from __future__ import annotations

import hashlib
import json
import re
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
from rolltape.schema.paths import Part, RunPaths, part_of
from rolltape.schema.storage import AnyPath, listed

FORMAT = 1
"""Version of these files. Another one is refused."""
_HEAD = b"rolltape.expected"
_HEAD_TYPES = {"recording": str, "converter": int, "rolltape": str, "options": dict, "digests": dict}
_SUM = re.compile(r"([0-9a-f]{64})  ([^/]+/[^/]+\.parquet)")
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
            table = _open(self.path.read_bytes()).read()
            if lost := [name for name in _SCHEMA.names if name not in table.column_names]:
                raise _damaged(self.path, f"it has no column {lost[0]!r}")
            groups = _groups([row for row in table.to_pylist() if row["stage"] == stage])
        except (Unreachable, Damaged):
            raise
        except (OSError, pa.ArrowException, ValueError) as error:
            raise _damaged(self.path, str(error)) from error
        except (LookupError, TypeError) as error:
            raise _damaged(self.path, "its rows are no batch of Samples") from error
        if digest(groups, self.converter) != self.digests.get(stage):
            raise _damaged(self.path, "its Samples do not fit its digest")
        return groups


def read_expected(path: AnyPath, kept: str | None = None) -> Expected | None:
    """The head of a file of expected Samples; None where there is none, and none was approved.

    `kept`: the sha256 it had when it was approved (`read_sums`); without it the rows are read. Raises Damaged where it is not
    the file that was approved, or does not give its own digests, UnsupportedVersion where a newer rolltape wrote it.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        if kept is None:
            return None
        raise _damaged(path, "the file is gone") from None
    except Unreachable:
        raise
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if kept is not None and (found := hashlib.sha256(raw).hexdigest()) != kept:
        raise _damaged(path, f"its sha256 is {found[:12]}…, but {kept[:12]}… was approved")
    head = _head(raw, path)
    expected = Expected(path, *(head[name] for name in _HEAD_TYPES))
    for stage in expected.digests if kept is None else ():
        expected.batch(stage)
    return expected


def _head(raw: bytes, path: AnyPath) -> dict[str, Any]:
    try:
        text = (_open(raw).schema_arrow.metadata or {}).get(_HEAD)
        head = None if text is None else json.loads(text)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(head, dict) or "format" not in head:
        raise _damaged(path, "it does not say which format it has")
    if head["format"] != FORMAT:
        raise UnsupportedVersion(
            f"{path}: expected Samples of format {head['format']}; this rolltape knows format {FORMAT}. Upgrade rolltape, or "
            "approve the run again with this one."
        )
    if wrong := [name for name, kind in _HEAD_TYPES.items() if not isinstance(head.get(name), kind)]:
        raise _damaged(path, f"its head holds no {wrong[0]!r}")
    return head


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


def read_sums(paths: RunPaths) -> dict[Part, str]:
    """sha256 of the expected Samples of each part; empty where none was kept. Raises Damaged."""
    try:
        lines = paths.sums.read_bytes().decode().splitlines()
    except FileNotFoundError:
        return {}
    except Unreachable:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(paths.sums, str(error), paths.root) from error
    sums = {}
    for number, line in enumerate(lines, 1):
        found = _SUM.fullmatch(line)
        part = None if found is None else part_of(paths.sums.parent / found[2])
        if found is None or part is None:
            raise _damaged(paths.sums, f"line {number} is no sha256 and name of a file", paths.root)
        sums[part] = found[1]
    return sums


def write_sums(paths: RunPaths, sums: Mapping[Part, str]) -> None:
    """Write them, a line a file. The file appears whole, or stays as it was."""
    lines = (f"{sums[part]}  {part.split}/{part.stem}.parquet\n" for part in sorted(sums))
    put_bytes(paths.sums, "".join(lines).encode())


def approved_parts(paths: RunPaths, sums: Mapping[Part, str]) -> set[Part]:
    """Parts whose Samples were approved: those with a file, and those whose file is gone."""
    found = map(part_of, listed(paths.sums.parent, "*/*.parquet"))
    return {part for part in found if part is not None} | sums.keys()


def _open(raw: bytes) -> pq.ParquetFile:
    return pq.ParquetFile(pa.BufferReader(raw), page_checksum_verification=True)


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


def _damaged(path: AnyPath, why: str, run: AnyPath | None = None) -> Damaged:
    return Damaged(
        f"{path}: not as it was approved ({why}); restore it from version control, or if the change is "
        f"meant: `rolltape approve {run or path.parent.parent.parent}`."
    )
