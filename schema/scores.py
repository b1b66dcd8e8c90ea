"""Scores: the columns of a few bytes a trace. The commit of a part repeats them, so questions about them open no Parquet file.

Opening a file of 92 columns takes longer than reading a few of them, and a long run has thousands of files; its commits are
read anyway. A commit holds a text a column: an Arrow record batch of that column, the rows in the order of the file, zstd,
base64; "" where every row is null. What is the same in every row of a part (step, attempt) is not repeated. Where a
commit has no scores, as earlier ones have none, its file is to be read.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import pyarrow as pa
import zstandard

from rolltape.schema.fields import ROW, TEXT

SCORES = frozenset(
    f.name
    for f in ROW.fields
    if f.shape in ("name", "sample")
    or f.name in ("error_types", "reason", "handed_reward")
    or (f.shape == "scalar" and f.type not in (TEXT, pa.large_binary()))
)
"""Who, what task, which rewards and metrics, how many, when, how it ended and what became of it."""
OF_PART = ("step", "attempt")
"""Those that are the same in every row of a part. Who wrote a row is not: what comes late is a part of its own."""
PACKED = [name for name in ROW.arrow.names if name in SCORES and name not in OF_PART]
MOST = 4 << 20
"""Characters from which on a commit does without: files that large are few."""

_BATCHES = {name: pa.schema([(name, ROW.by_name[name].arrow_type)]) for name in PACKED}


def pack_scores(tables: Sequence[pa.Table]) -> dict[str, str] | None:
    """The columns PACKED of a file, of which `tables` are the rows, as texts; None where they are too large for a commit."""
    compressor = zstandard.ZstdCompressor(1)
    found = {}
    for name, schema in _BATCHES.items():
        chunks = [chunk for table in tables for chunk in table.column(name).chunks]
        if all(chunk.null_count == len(chunk) for chunk in chunks):
            found[name] = ""
            continue
        values = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        batch = pa.RecordBatch.from_arrays([values.cast(schema[0].type)], schema=schema)
        found[name] = base64.b64encode(compressor.compress(batch.serialize())).decode()
    return found if sum(map(len, found.values())) <= MOST else None


def unpack_scores(scores: Mapping[str, str], name: str, rows: int) -> pa.Array:
    """A column of `rows` rows. Raises KeyError where `scores` lack it, ValueError where its text is none of `pack_scores`."""
    text, schema = scores[name], _BATCHES[name]
    if not isinstance(text, str):
        raise ValueError(f"{name}: no scores, but a {type(text).__name__}")
    if not text:
        return pa.nulls(rows, schema[0].type)
    try:
        values = pa.ipc.read_record_batch(zstandard.ZstdDecompressor().decompress(base64.b64decode(text)), schema)[0]
    except (zstandard.ZstdError, pa.ArrowException, OSError) as error:
        raise ValueError(f"{name}: no scores ({error})") from error
    if len(values) != rows:
        raise ValueError(f"{name}: {len(values)} scores of {rows} rows")
    return values
