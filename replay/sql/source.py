"""Which rows a query sees: the parts that commits name, as Arrow data that DuckDB reads no more of than it needs.

Every file comes with what its commit says of it (run, split, step, attempt, writer, whether it is superseded), so a query for
some steps opens the files of those steps only. Page checksums are verified. Files of other schema versions are read beside
ours: columns they lack are null, columns they add come last.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from rolltape.replay.contents import Held
from rolltape.replay.run import Run
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged
from rolltape.schema.fields import GROUP, ROW, STEP, check_version
from rolltape.schema.paths import Part
from rolltape.schema.storage import sizes

PLAIN = pa.schema([f.remove_metadata() for f in ROW.arrow])
KNOWN = pa.schema(
    [("_run", pa.string()), ("_run_id", pa.string()), ("_superseded", pa.bool_()), ("_journaled", pa.bool_())]
)
ENTRIES = {"rewards": "_rewards", "metrics": "_metrics"}
"""MAP columns, and what their entries are called."""
_ENTRY = pa.list_(pa.struct([("key", pa.string()), ("value", pa.float64())]))
FORMAT = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
_OF_STEP = pa.schema(
    [
        *KNOWN,
        *(f.remove_metadata() for f in STEP.arrow),
        *(pa.field(n, pa.int64()) for n in ("rows", "bytes", "tokens", "sampled_tokens")),
        pa.field("committed_at", pa.float64()),
    ]
)
_OF_GROUP = pa.schema(
    [*KNOWN, ("attempt", pa.int32()), ("writer", pa.string()), *(f.remove_metadata() for f in GROUP.arrow)]
)


@dataclass(frozen=True)
class Selection:
    """Which of the recorded rows a query sees."""

    split: str | Sequence[str] | None = "train"
    """`train`, `eval`, `eval-<name>`, several of them, or None for all."""
    attempt: int | None = None
    """Only what this attempt recorded; None takes the newest of each step."""
    all_attempts: bool = False
    """Also what newer attempts took back, with `superseded` set."""
    live: bool = False
    """Also what journals hold and no commit does."""

    def __post_init__(self) -> None:
        if self.all_attempts and self.attempt is not None:
            raise BadInput("one attempt and all attempts were asked for; choose one of the two.")

    def splits(self, runs: Iterable[Run], others: Iterable[str] = ()) -> list[str]:
        """The splits to read, of those that `runs` have committed and of `others`.

        Raises BadInput where there is none of that name.
        """
        have = sorted({*others, *(s for run in runs for s in run.splits())}, key=lambda s: (s != "train", s))
        if self.split is None:
            return have
        wanted = [self.split] if isinstance(self.split, str) else list(self.split)
        missing = [s for s in wanted if s not in have and s != "train"]
        if missing:
            raise BadInput(f"split {missing[0]!r} was not recorded; recorded are {', '.join(have) or 'none'}.")
        return wanted

    def superseded(self, run: Run, part: Part) -> bool | None:
        """Whether a newer attempt took the part back; None where it is not to be read."""
        if self.attempt not in (None, part.attempt):
            return None
        taken = run.superseded(part)
        return taken if self.all_attempts or self.attempt is not None or not taken else None


@dataclass(frozen=True)
class Chosen:
    """A committed part that a query sees."""

    label: str
    """What the column `run` says."""
    run: Run
    commit: Commit
    superseded: bool


def labelled(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by a name: its folder's, with as much of the path before it as tells the runs apart.

    Raises BadInput where one run is given twice.
    """
    places = [str(run.paths.root.absolute()) for run in runs]
    parts = [tuple(p for p in place.split("/") if p) for place in places]
    for place in places:
        if places.count(place) > 1:
            raise BadInput(f"{place} is given twice; each run may be queried once.")
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return dict(zip(names, runs, strict=True))
    return dict(zip(places, runs, strict=True))


def chosen(runs: Mapping[str, Run], splits: Iterable[str], selection: Selection) -> list[Chosen]:
    """The committed parts that a query sees, in order of run, split, step and writer.

    Raises Damaged where a commit among them cannot be read.
    """
    splits = list(splits)
    return [
        Chosen(label, run, c, s)
        for label, run in runs.items()
        for split in splits
        for c, s in _commits(run, split, selection)
    ]


def _commits(run: Run, split: str, selection: Selection) -> Iterator[tuple[Commit, bool]]:
    if split not in run.splits() or (selection.attempt is not None and selection.attempt not in run.attempt_numbers):
        return  # another of the runs has them
    if not selection.all_attempts:
        for commit in run.commits(split, attempt=selection.attempt):
            yield commit, selection.attempt is not None and run.superseded(commit.part)
        return
    for part, error in run.broken:
        if part.split == split:
            raise error
    newest = {c.part for c in run.commits(split)}
    for commit in run.all_commits:
        if commit.part.split == split:
            yield commit, commit.part not in newest


# -- rows


def schema_of(parts: Sequence[Chosen]) -> pa.Schema:
    """The columns of rows: ours, what is known of a part, and what files of later versions add."""
    return pa.unify_schemas([PLAIN, KNOWN, *_other_schemas(parts)])


def rows(parts: Sequence[Chosen], schema: pa.Schema) -> list[ds.Dataset]:
    """The rows of `parts`, every column. Raises Damaged where a file is missing or not the one that was committed."""
    return [dataset(list(of), schema) for _, of in itertools.groupby(parts, lambda p: p.label)]


def in_memory(table: pa.Table, schema: pa.Schema) -> ds.Dataset:
    """`table` as rows; columns it lacks are null. Its MAP columns come as lists of entries too, where `schema` has them."""
    for name, listed_ in ENTRIES.items():
        if name in table.column_names and listed_ in schema.names:
            table = table.append_column(listed_, table.column(name).cast(_ENTRY))
    return ds.InMemoryDataset(table).replace_schema(schema)


def taken_apart(schema: pa.Schema) -> pa.Schema:
    """`schema` with MAP columns as lists of entries too: DuckDB checks every key of an Arrow MAP, for six times as long."""
    return pa.schema([*schema, *(pa.field(name, _ENTRY) for name in ENTRIES.values())])


def union(datasets: Sequence[ds.Dataset], schema: pa.Schema) -> ds.Dataset:
    """Several sets of rows as one."""
    if not datasets:
        return ds.InMemoryDataset(schema.empty_table())
    return datasets[0] if len(datasets) == 1 else ds.UnionDataset(schema, list(datasets))


def dataset(parts: Sequence[Chosen], schema: pa.Schema) -> ds.Dataset:
    """The files of parts of one run."""
    held = found(parts)
    files = located(parts[0].run.paths.root)[0]
    known_ = {part.superseded: _expression(_constants(part), KNOWN) for part in parts}
    fragments = [_fragment(of, known_[of[0][0].superseded]) for of in _by_file(held)]
    return ds.FileSystemDataset(fragments, schema, FORMAT, files)


def _by_file(held: Iterable[tuple[Chosen, Held]]) -> Iterable[list[tuple[Chosen, Held]]]:
    """Parts by the file that their rows lie in, those of one file together where the same is known of them but the step."""
    found: dict[Any, list[tuple[Chosen, Held]]] = {}
    for part, where in held:
        found.setdefault((where.path, part.superseded), []).append((part, where))
    return found.values()


def _fragment(held: Sequence[tuple[Chosen, Held]], known_: pc.Expression) -> ds.Fragment:
    """The rows of parts that lie in one file: of these steps, as is known without opening it."""
    files, name = located(held[0][1].path)
    steps_ = [part.commit.step.step for part, _ in held]
    step, first, last = pc.field("step"), min(steps_), max(steps_)
    said = step == first if first == last else (step >= first) & (step <= last)
    groups = None if held[0][1].row_groups is None else [i for _, h in held for i in h.row_groups or ()]
    return FORMAT.make_fragment(name, files, known_ & said, groups)


def located(path: Any) -> tuple[fs.FileSystem, str]:
    """The file system that Arrow reads a path through, and the path's name in it."""
    if isinstance(path, Path):
        return _LOCAL, str(path.absolute())
    return path.files, path.key


_LOCAL = fs.LocalFileSystem()


def _expression(values: Mapping[str, Any], schema: pa.Schema) -> pc.Expression:
    """That these columns have these values."""
    result = pc.scalar(True)
    for name, value in values.items():
        result &= pc.field(name) == pa.scalar(value, schema.field(name).type)
    return result


def _constants(part: Chosen) -> dict[str, Any]:
    return {"_run": part.label, "_run_id": part.run.run_id, "_superseded": part.superseded, "_journaled": False}


def known(parts: Sequence[Chosen]) -> pa.Table:
    """The columns `_run`, `_run_id`, `_superseded` and `_journaled` of the rows of `parts`."""
    columns: dict[str, list[pa.Array]] = {name: [] for name in KNOWN.names}
    for constants, of in itertools.groupby(parts, _constants):
        rows_ = sum(part.commit.file.rows for part in of)
        for name, value in constants.items():
            columns[name].append(pa.repeat(pa.scalar(value, KNOWN.field(name).type), rows_))
    return pa.table({n: pa.chunked_array(arrays, KNOWN.field(n).type) for n, arrays in columns.items()}, KNOWN)


def with_columns(table: pa.Table, names: Sequence[str], rows: int) -> pa.Table:
    """The columns `names` of `rows` rows in their types; those that a file of an earlier version lacks are null."""
    if table.num_columns and table.num_rows != rows:
        raise pa.ArrowInvalid(f"{table.num_rows} rows where {rows} were committed")
    fields = [PLAIN.field(name) for name in names]
    there = table.column_names
    columns = [table.column(f.name).cast(f.type) if f.name in there else pa.nulls(rows, f.type) for f in fields]
    return pa.table(columns, schema=pa.schema(fields))


def found(parts: Sequence[Chosen]) -> list[tuple[Chosen, Held]]:
    """Parts of one run, and where their rows lie now. Raises Damaged where a file is missing, or not as long as it was."""
    paths = parts[0].run.paths
    if isinstance(paths.root, Path):
        return [(part, part.run.there(part.commit)) for part in parts]
    listed = sizes(paths.traces, "*/*.parquet")
    held = ((part, part.run.held(part.commit)) for part in parts)
    return [(p, h if listed.get(h.path) == h.file.bytes else p.run.there(p.commit)) for p, h in held]


def _other_schemas(parts: Iterable[Chosen]) -> Iterator[pa.Schema]:
    """The columns of files whose commit says that they are not ours: one file of each fingerprint is looked at."""
    first: dict[str, Chosen] = {}
    for part in parts:
        first.setdefault(part.commit.fingerprint, part)
    for fingerprint, part in first.items():
        if fingerprint != ROW.fingerprint:
            yield pa.schema([f.remove_metadata() for f in _schema(part)])


def _schema(part: Chosen) -> pa.Schema:
    """The columns of a part's file. Raises UnsupportedVersion for a newer major version, Damaged where it does not read."""
    path = part.run.held(part.commit).path
    files, name = located(path)
    try:
        with files.open_input_file(name) as file:
            schema = pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise Damaged(f"{path}: no readable Parquet file ({error}); restore it from a copy.") from error
    found = (schema.metadata or {}).get(b"rolltape.schema")
    check_version(found.decode() if found else None, str(path))
    return schema


# -- records


def steps(parts: Sequence[Chosen]) -> pa.Table:
    """The step records of `parts`, one row each."""
    return _table([_step(part) for part in parts], _OF_STEP)


def _step(part: Chosen) -> Mapping[str, Any]:
    commit = part.commit
    return {
        **_constants(part),
        **commit.step.to_dict(),
        "options": _json(commit.step.options),
        "rows": commit.file.rows,
        "bytes": commit.file.bytes,
        "tokens": commit.sums.get("tokens"),
        "sampled_tokens": commit.sums.get("sampled_tokens"),
        "committed_at": commit.written_at,
    }


def groups(parts: Sequence[Chosen]) -> pa.Table:
    """The group records of `parts`, one row each."""
    found = [(p, g) for p in parts for g in sorted(p.commit.groups, key=lambda g: g.group_index)]
    values: dict[str, list[Any]] = {
        **{name: [_constants(p)[name] for p, _ in found] for name in KNOWN.names},
        "attempt": [p.commit.part.attempt for p, _ in found],
        "writer": [p.commit.part.writer for p, _ in found],
        "actual_size": [len(g.trace_ids) for _, g in found],
        "reward_counts": [[(name, r.count) for name, r in g.rewards.items()] for _, g in found],
        "reward_sums": [[(name, r.sum) for name, r in g.rewards.items()] for _, g in found],
    }
    columns = [pa.array(values.get(f.name) or [getattr(g, f.name) for _, g in found], f.type) for f in _OF_GROUP]
    return pa.Table.from_arrays(columns, schema=_OF_GROUP)


def _table(records: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = [pa.array([_cell(r[f.name], f.type) for r in records], f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _cell(value: Any, type_: pa.DataType) -> Any:
    return list(value.items()) if pa.types.is_map(type_) and value is not None else value


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), ensure_ascii=True)
