"""Writing and reading the Parquet files of a run.

Encodings are measured choices: token ids and log-probs BYTE_STREAM_SPLIT, masks RLE, pages of 8 MiB with checksums, zstd 1
but for token ids, which zstd 3 makes 2 % smaller in the same time (text 7 %, but at 20 % of the time a file takes).
No statistics on float columns, because NaN makes pruning by min and max wrong. Readers here verify page checksums, which
DuckDB and plain pyarrow do not: of 60 flipped bits they read 55 to 57 as data.

Files appear whole or not at all: written under a temporary name in the same folder, synced, renamed. A crash can leave
the temporary file behind, whose name no reader matches.

Descriptions of the columns are not repeated in every file, where they would take 17 kB: `rolltape schema` prints them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.schema.errors import BadInput, Damaged, Unreachable
from rolltape.schema.fields import ROW, SCHEMA_VERSION, TRACE, Field, check_version
from rolltape.schema.scores import PACKED, pack_scores
from rolltape.schema.storage import AnyPath, StorePath, is_silence
from rolltape.schema.table import needs, with_outcomes

ROW_GROUP_BYTES = 128 << 20
"""Upper bound of one row group in memory."""
PAGE_BYTES = 8 << 20
HASH_BYTES = 256 << 10
"""Bytes that are handed to the hashing thread at once."""

_NOT_KNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.EMLINK, *_NOT_KNOWN)
_SPLIT = ("token_ids", "logprobs", "recomputed_logprobs")
_RUNS = ("sampled", "is_content")
_REQUIRED = ("token_ids", "sampled")
"""Columns whose lists hold no null: files say so, which spares them a level of each token (3 of 23 ms of reading 600,000)."""
_DICTIONARY = [
    *("run", "split", "eval_name", "writer", "layout", "verifiers_version", "task_type", "task_key", "task_name"),
    *("task", "task_prompt", "task_label", "stop_condition", "model", "tokenizer", "sampling", "renderer", "runtime"),
    *("disposition", "node_role.list.element", "node_finish_reason.list.element", "turn_weight_version.list.element"),
]
_STATISTICS = [
    *("run", "split", "eval_name", "step", "attempt", "writer", "group_index", "rollout_index", "try_number"),
    *("trace_id", "task_idx", "task_key", "task_name", "stop_condition", "is_truncated", "disposition"),
]


@dataclass(frozen=True)
class Written:
    """A Parquet file as it was written."""

    rows: int
    bytes: int
    sha256: str
    scores: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    """The small columns of its rows, for its commit (see `rolltape.schema.scores`)."""


_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What only writing fails with."""


@contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Name `path` where writing fails with an error that says no file: those of pyarrow and of open files do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _WRITING:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


class HashingFile:
    """A binary file on the way to a name it takes only when whole, with its hash, which another thread takes meanwhile."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self.path = path
        self.temporary = _temporary(path)
        self.file: BinaryIO = self.temporary.open("wb")
        self.bytes = 0
        self.closed = False
        self._hasher = ThreadPoolExecutor(1)
        self._sha256 = hashlib.sha256()
        self._not_hashed: list[memoryview] = []
        self._hash_at = HASH_BYTES

    def write(self, data: Any) -> int:
        """Write `data`, which must not change afterwards."""
        view = memoryview(data)
        self._not_hashed.append(view)
        self.bytes += view.nbytes
        if self.bytes >= self._hash_at:
            self._hasher.submit(self._hash, self._not_hashed)
            self._not_hashed, self._hash_at = [], self.bytes + HASH_BYTES
        with naming(self.path):
            return self.file.write(view)

    def _hash(self, parts: list[memoryview]) -> None:
        for part in parts:
            self._sha256.update(part)

    def tell(self) -> int:
        """Bytes written."""
        return self.bytes

    def flush(self) -> None:
        """Hand buffered bytes to the system."""
        with naming(self.path):
            self.file.flush()

    def close(self) -> None:
        """Nothing: `publish` or `discard` end the file."""

    def writable(self) -> bool:
        """True."""
        return True

    def publish(self) -> str:
        """Sync the file and give it its name. Returns its sha256."""
        self.flush()
        with self._hasher as other, naming(self.path):
            hashed = other.submit(self._hash, self._not_hashed)
            os.fsync(self.file.fileno())
        hashed.result()
        self.file.close()
        self.temporary.replace(self.path)
        sync_folder(self.path.parent)
        return self._sha256.hexdigest()

    def discard(self) -> None:
        """Remove what was written."""
        self._hasher.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):  # closing writes what is buffered, and the disk may be full
            self.file.close()
        self.temporary.unlink(missing_ok=True)


def put_bytes(path: AnyPath, data: bytes) -> None:
    """Write a small file whole or not at all."""
    if isinstance(path, StorePath):
        return path.put(data)
    file = HashingFile(path)
    try:
        file.write(data)
        file.publish()
    except BaseException:
        file.discard()
        raise


def put_once(path: AnyPath, data: bytes) -> bool:
    """Write a file that must not exist yet; False where it does. Of several writers exactly one gets True (see `storage`)."""
    if isinstance(path, StorePath):
        return path.put_once(data)
    make_folder(path.parent)
    temporary = _temporary(path)
    try:
        with naming(path), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        name_once(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _temporary(path: Path) -> Path:
    """A name beside `path` that no other writer has, not even another thread, and that no reader takes for a file of ours."""
    return path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def name_once(temporary: Path, path: Path) -> None:
    """Give a file a name that no other has. Raises FileExistsError where one has.

    By a hard link, which fails where the name is taken; where a file system has none, by looking first.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(path)) from None
        temporary.rename(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and sync the names of the new ones: a power cut takes the files with the folder."""
    new = list(itertools.takewhile(lambda p: not p.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(new):
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder, where its file system does that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_NOT_KNOWN):
            raise
    finally:
        os.close(descriptor)


def write_parquet(
    path: str | AnyPath, tables: pa.Table | Iterable[pa.Table], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write `tables`, or a single one, as one file, a row group each unless it is larger than ROW_GROUP_BYTES.

    `tables` hold rows (see `with_outcomes`) or traces alone (see `encode`), whose outcomes are then null. Nothing appears at
    `path` before everything is written and synced. Returns rows, bytes, sha256 and scores. Raises BadInput for tables of other
    columns.
    """
    tables = (tables,) if isinstance(tables, pa.Table) else tables
    if isinstance(path, StorePath):
        with path.staged() as file:
            written = write_parquet(file, tables, metadata)
            path.upload(file)
        return written
    sink = HashingFile(Path(path))
    scores: list[pa.Table] = []
    try:
        with pq.ParquetWriter(sink, _STORED.with_metadata(file_metadata(metadata)), **_options()) as writer:
            for table in tables:
                for batch in _bounded(_rows(table)):
                    rows = _with_lists(batch, nulls=False)
                    writer.write_table(rows, row_group_size=max(1, rows.num_rows))
                    scores.append(batch.select(PACKED))
        sha256 = sink.publish()
    except BaseException:
        sink.discard()
        raise
    return Written(sum(t.num_rows for t in scores), sink.bytes, sha256, pack_scores(scores))


def _rows(table: pa.Table) -> pa.Table:
    """`table` as rows of the columns of a file, in their order. Raises BadInput where it holds others, or of other types."""
    if isinstance(table, pa.Table) and table.schema.equals(TRACE.arrow):
        return with_outcomes(table, [])
    if isinstance(table, pa.Table) and table.schema.equals(_PLAIN):
        return table  # a cast, even to the same types, costs 10 us a column
    needs(table, TRACE.by_name, "write_parquet")
    if unknown := [name for name in table.column_names if name not in ROW.by_name]:
        raise BadInput(
            f"write_parquet was given a table with the column {unknown[0]}, which no row has; drop it, or keep columns of your "
            "own beside the run with `rolltape annotate`."
        )
    try:
        if "disposition" not in table.column_names:
            table = with_outcomes(table, [])
        needs(table, ROW.by_name, "write_parquet")
        return table.select(_PLAIN.names).cast(_PLAIN)
    except pa.ArrowException as error:
        raise BadInput(
            f"write_parquet was given a table whose columns have other types than rows ({error}); `rolltape schema` lists them."
        ) from error


def file_metadata(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Key-value metadata of every file: schema version, fingerprint, and what the caller adds."""
    return {
        "rolltape.schema": ".".join(map(str, SCHEMA_VERSION)),
        "rolltape.fingerprint": ROW.fingerprint,
        **{f"rolltape.{k}": v for k, v in (more or {}).items()},
    }


def _options() -> dict[str, Any]:
    encodings = {f"{n}.list.element": "BYTE_STREAM_SPLIT" for n in _SPLIT}
    encodings |= {f"{n}.list.element": "RLE" for n in _RUNS}
    return {
        "compression": "zstd",
        "compression_level": {"token_ids.list.element": 3},  # all others 1, which is Arrow's default for zstd
        "use_dictionary": _DICTIONARY,
        "column_encoding": encodings,
        "write_statistics": _STATISTICS,
        "data_page_size": PAGE_BYTES,
        "write_page_checksum": True,
        "version": "2.6",
    }


def _with_lists(table: pa.Table, *, nulls: bool) -> pa.Table:
    """`table` with the type that the lists of _REQUIRED have in files, or (`nulls`) in memory; without copying them."""
    for name in _REQUIRED:
        at = table.schema.get_field_index(name)
        if at < 0 or table.schema.field(at).type.value_field.nullable == nulls:
            continue
        column, type_ = table.column(at), _list_type(name, nulls=nulls)
        if not nulls and any(chunk.flatten().null_count for chunk in column.chunks):  # which a cast does not mind
            raise BadInput(f"a list in the column {name} holds a null, where every token has a value.")
        table = table.set_column(at, table.schema.field(at).with_type(type_), column.cast(type_))
    return table


def _list_type(name: str, *, nulls: bool) -> pa.ListType:
    return pa.list_(pa.field("element", ROW.by_name[name].type, nulls))


def _types_of(field: Field) -> tuple[pa.DataType, ...]:
    """The types that a column has in files: those of _REQUIRED held lists with nulls once."""
    return (field.arrow_type, *([_list_type(field.name, nulls=False)] if field.name in _REQUIRED else ()))


_PLAIN = pa.schema([f.remove_metadata() for f in ROW.arrow])
_STORED = pa.schema([f.with_type(_list_type(f.name, nulls=False)) if f.name in _REQUIRED else f for f in _PLAIN])
"""The columns of a file."""


def _bounded(table: pa.Table) -> Iterator[pa.Table]:
    """`table` in pieces of at most ROW_GROUP_BYTES, or of one row: halved until they are, as rows differ in size."""
    if table.num_rows <= 1 or table.nbytes <= ROW_GROUP_BYTES:
        if table.num_rows:
            yield table
        return
    half = table.num_rows // 2
    yield from _bounded(table.slice(0, half))
    yield from _bounded(table.slice(half))


def read_parquet(path: str | AnyPath, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a file of a run, verifying its page checksums.

    Of `columns` those are read that the file has. Raises UnsupportedVersion for a newer major schema, Damaged where bytes are
    not what was written, and BadInput where `columns` is a single text.
    """
    refuse_text(columns)
    tables = list(read_batches(path, columns))
    return pa.concat_tables(tables) if tables else _projected(path, columns)


def refuse_text(columns: Sequence[str] | None) -> None:
    """Raise BadInput where `columns` is one text, whose letters would be taken for the names."""
    if isinstance(columns, (str, bytes)):
        raise BadInput(f"columns is the single text {columns!r}: expected a list of names; write [{columns!r}].")


def read_batches(
    path: str | AnyPath,
    columns: Sequence[str] | None = None,
    row_groups: Iterable[int] | None = None,
    footer: pq.FileMetaData | None = None,
) -> Iterator[pa.Table]:
    """The row groups of a file, or those chosen by number, one table each. `footer`: the file's, where it was read before."""
    file = open_parquet(path, footer)
    wanted = None if columns is None else list(columns)
    if wanted is not None and not ROW.by_name.keys() >= set(wanted):  # those of the row are there: see open_parquet
        names = set(file.schema_arrow.names)
        wanted = [c for c in wanted if c in names]
    for i in range(file.num_row_groups) if row_groups is None else row_groups:
        try:
            yield _with_lists(file.read_row_group(i, columns=wanted), nulls=True)
        except (OSError, pa.ArrowException) as error:
            if is_silence(error):
                raise Unreachable(f"{path}: row group {i} could not be fetched ({error}).") from error
            raise Damaged(
                f"{path}: row group {i} does not read back ({error}); its bytes are not what was written. "
                "Restore the file from a copy; `rolltape verify` lists every damaged file of a run."
            ) from error


def _projected(path: str | AnyPath, columns: Sequence[str] | None) -> pa.Table:
    schema = open_parquet(path).schema_arrow
    names = schema.names if columns is None else [c for c in columns if c in schema.names]
    return _with_lists(pa.schema([schema.field(n) for n in names]).empty_table(), nulls=True)


def open_parquet(path: str | AnyPath, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a file of a run for verified reading.

    Raises UnsupportedVersion for a newer major schema and Damaged where the file is cut short or lacks a column.
    """
    try:
        source, remote = (path.open(), True) if isinstance(path, StorePath) else (path, False)
        file = pq.ParquetFile(
            source, metadata=footer, page_checksum_verification=True, memory_map=False, pre_buffer=remote
        )
        schema = file.schema_arrow
        found = (schema.metadata or {}).get(b"rolltape.schema")
        columns = dict(zip(schema.names, schema.types, strict=True))
        version = found.decode() if found else None
    except (FileNotFoundError, Unreachable):
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        if is_silence(error):
            raise Unreachable(f"{path}: the file could not be fetched ({error}).") from error
        raise Damaged(
            f"{path}: no readable Parquet file ({error}); it was cut short or overwritten. Restore it from a copy."
        ) from error
    check_version(version, str(path))
    lacking = [] if schema.equals(_STORED) else [f.name for f in ROW.fields if columns.get(f.name) not in _types_of(f)]
    if lacking:
        raise Damaged(
            f"{path}: not the columns of schema {version} ({', '.join(lacking[:3])} missing or of another type); the end of "
            "the file was overwritten. Restore it from a copy."
        )
    return file
