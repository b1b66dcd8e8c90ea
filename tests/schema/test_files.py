"""Files that appear whole or not at all, under a name that one writer gets, with damage that is found."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from schema_records import record, recorded

from rolltape.schema import (
    ROW,
    TRACE,
    BadInput,
    Damaged,
    Group,
    Outcome,
    RolltapeError,
    Step,
    UnsupportedVersion,
    decode,
    encode,
    parquet,
)
from rolltape.schema.commits import Commit
from rolltape.schema.parquet import Written, put_bytes, put_once, read_batches, read_parquet, write_parquet
from rolltape.schema.paths import Part, RunPaths, check_name, part_of
from rolltape.schema.table import empty, with_outcomes

PART = Part("train", 3, 0, "main")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


# -- whole or not at all


def test_an_exception_between_two_tables_leaves_no_file_and_the_old_one_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [encode([record(id="old")])])
    before = path.read_bytes()

    def tables() -> Iterator[pa.Table]:
        yield encode([record(id="new")])
        raise KeyError("halfway")

    with pytest.raises(KeyError, match="halfway"):
        write_parquet(path, tables())
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.parquet"]
    with pytest.raises(KeyError, match="halfway"):
        write_parquet(tmp_path / "b.parquet", tables())
    assert names(tmp_path) == ["a.parquet"]


class FullDisk:
    """Takes some bytes, then has no space left; like a real one it still has bytes to flush when it is closed."""

    def __init__(self, file: Any, space: int) -> None:
        self.file, self.space = file, space

    def write(self, data: Any) -> int:
        self.space -= memoryview(data).nbytes
        if self.space < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(data))

    def close(self) -> None:
        self.file.close()
        if self.space < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_full_disk_leaves_no_file_and_the_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [encode([record(id="old")])])
    before = path.read_bytes()
    table = encode([record(id=f"t{i}", info={"text": random.Random(i).randbytes(20_000).hex()}) for i in range(150)])
    size = write_parquet(tmp_path / "b.parquet", [table]).bytes
    (tmp_path / "b.parquet").unlink()
    opened = parquet.HashingFile.__init__

    def on_a_full_disk(self: Any, path: Path) -> None:
        opened(self, path)
        self.file = FullDisk(self.file, int(part * size))

    monkeypatch.setattr(parquet.HashingFile, "__init__", on_a_full_disk)
    for write in (lambda: write_parquet(path, [table]), lambda: put_bytes(path, bytes(size))):
        with pytest.raises(OSError, match="No space left") as raised:
            write()
        assert raised.value.filename == str(path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.parquet"]


LIMITED = """
import resource, sys
from pathlib import Path
from rolltape.schema import encode
from rolltape.schema.parquet import put_bytes, put_once, write_parquet
folder = Path(sys.argv[1])
table = encode([{"id": str(i), "info": {"text": "%032x" % (i * 7919 ** 9)}} for i in range(300)])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for write in (
    lambda: write_parquet(folder / "a.parquet", [table]),
    lambda: put_bytes(folder / "a.json", bytes(9000)),
    lambda: put_once(folder / "b.json", bytes(9000)),
):
    try:
        write()
    except OSError as error:
        print(error.errno, Path(error.filename).name)
"""


def test_a_write_that_the_system_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real refusal: the process may not write more than 4 kB to a file."""
    (tmp_path / "a.json").write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    files = ("a.parquet", "a.json", "b.json")
    assert done.stdout.splitlines() == [f"{errno.EFBIG} {name}" for name in files], done.stderr
    assert done.stderr == ""
    assert names(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"old"


def test_a_file_is_what_its_writer_says_it_is(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.parquet"
    written = write_parquet(
        path, [encode([record(id="a")]), encode([record(id="b"), record(id="c")])], {"verifiers": "0.2.0"}
    )
    data = path.read_bytes()
    assert written == Written(rows=3, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    assert pq.ParquetFile(path).metadata.num_row_groups == 2
    assert pq.read_schema(path).metadata[b"rolltape.verifiers"] == b"0.2.0"
    assert pq.read_schema(path).metadata[b"rolltape.fingerprint"].decode() == ROW.fingerprint


def test_a_put_replaces_what_was_there(tmp_path: Path) -> None:
    put_bytes(tmp_path / "a" / "x.json", b"one")
    put_bytes(tmp_path / "a" / "x.json", b"two")
    assert (tmp_path / "a" / "x.json").read_bytes() == b"two"
    assert names(tmp_path) == ["x.json"]


# -- one winner


def put_by_many(path: Path, number: int) -> bool:
    return put_once(path, f"writer {number}".encode() * 1000)


def test_of_many_threads_that_put_once_exactly_one_wins(tmp_path: Path) -> None:
    gate = threading.Barrier(16)

    def run(number: int) -> bool:
        gate.wait()
        return put_by_many(tmp_path / "x.json", number)

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(run, range(16)))
    assert won.count(True) == 1
    assert (tmp_path / "x.json").read_bytes() == f"writer {won.index(True)}".encode() * 1000
    assert names(tmp_path) == ["x.json"]


RACE = """
import sys
from pathlib import Path
from rolltape.schema.parquet import put_once
folder, name = Path(sys.argv[1]), sys.argv[2]
(folder / "ready" / name).touch()
while len(list((folder / "ready").iterdir())) < 2:
    pass
won = [f"{i}.json" for i in range(40) if put_once(folder / f"{i}.json", name.encode() * 1000)]
print(*won)
"""


def test_of_many_processes_that_put_once_exactly_one_wins(tmp_path: Path) -> None:
    """Each process walks through the same 40 names; together they are told of 40 wins."""
    (tmp_path / "ready").mkdir()
    writers = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), n], stdout=subprocess.PIPE) for n in "ab"]
    won = [name for w in writers for name in w.communicate()[0].decode().split()]
    assert [w.returncode for w in writers] == [0, 0]
    assert sorted(won) == names(tmp_path)[:-2] == sorted(f"{i}.json" for i in range(40))
    assert all(len(set((tmp_path / name).read_text())) == 1 for name in won), "a file is of one writer"


def test_a_second_put_once_changes_nothing(tmp_path: Path) -> None:
    assert put_once(tmp_path / "x.json", b"first")
    assert not put_once(tmp_path / "x.json", b"second")
    assert (tmp_path / "x.json").read_bytes() == b"first"


def test_threads_that_write_one_name_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    tables = [encode([record(id=f"writer {n}", info={"text": f"{n}" * 50_000})]) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        sums = {w.sha256 for w in pool.map(lambda table: write_parquet(path, [table]), tables)}
    assert len(sums) == 4
    assert hashlib.sha256(path.read_bytes()).hexdigest() in sums
    assert decode(read_parquet(path))[0]["id"].startswith("writer ")
    assert names(tmp_path) == ["a.parquet"]


# -- row groups


def test_row_groups_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One large row among small ones: a bound on the mean would not hold."""
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 60_000)
    sizes = [200, 90_000, *[3_000] * 40, 70_000, 10]
    records = [record(id=f"t{i}", info={"text": "x" * n}) for i, n in enumerate(sizes)]
    write_parquet(tmp_path / "a.parquet", [encode(records)])
    groups = list(read_batches(tmp_path / "a.parquet"))
    assert all(g.nbytes <= 60_000 or g.num_rows == 1 for g in groups)
    assert 4 < len(groups) < 20, "bounded, not one group a row"
    assert [t for g in groups for t in decode(g)] == records


def test_texts_larger_than_a_row_group_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 10_000)
    records = [record(id=f"t{i}", info={"text": f"{i}" * 100_000}) for i in range(5)]
    write_parquet(tmp_path / "a.parquet", [encode(records)])
    assert decode(read_parquet(tmp_path / "a.parquet")) == records


def test_many_small_traces_share_row_groups(tmp_path: Path) -> None:
    once = write_parquet(tmp_path / "a.parquet", [encode([record(id=f"t{i}") for i in range(2_000)])])
    assert pq.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups == 1
    assert once.rows == 2_000


def test_a_file_without_rows_has_every_column(tmp_path: Path) -> None:
    assert write_parquet(tmp_path / "a.parquet", []).rows == 0
    assert write_parquet(tmp_path / "b.parquet", [encode([])]).rows == 0
    for name in ("a.parquet", "b.parquet"):
        table = read_parquet(tmp_path / name)
        assert table.schema.equals(ROW.arrow)
        assert decode(table) == []


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [encode([record()])])
    assert read_parquet(tmp_path / "a.parquet", ["reward", "trace_id"]).to_pylist() == [
        {"reward": 1.0, "trace_id": "t0"}
    ]
    write_parquet(tmp_path / "b.parquet", [])
    assert read_parquet(tmp_path / "b.parquet", ["reward"]).schema.names == ["reward"]


def test_files_whose_lists_may_hold_nulls_are_read_beside_those_that_hold_none(tmp_path: Path) -> None:
    """Files of before say of every list that it may; the rows are the same, for us, for pyarrow and for DuckDB."""
    now, before = tmp_path / "now.parquet", tmp_path / "before.parquet"
    table = with_outcomes(encode([record(id=f"t{i}") for i in range(3)]), [])
    write_parquet(now, [table])
    metadata = pq.read_schema(now).metadata
    pq.write_table(table.replace_schema_metadata(metadata), before)
    assert pq.read_schema(now).field("token_ids").type.value_field.nullable is False
    assert pq.read_schema(before).field("token_ids").type.value_field.nullable is True
    assert read_parquet(now).equals(read_parquet(before))
    assert read_parquet(now).schema.equals(ROW.arrow)
    both = duckdb.sql(f"SELECT token_ids, sampled FROM read_parquet(['{before}', '{now}'])").fetchall()
    assert both == 2 * list(zip(*(table[name].to_pylist() for name in ("token_ids", "sampled")), strict=True))


@pytest.mark.parametrize("name", ["token_ids", "sampled"])
def test_a_null_amid_token_ids_or_flags_is_refused(tmp_path: Path, name: str) -> None:
    table = encode([record(), record(id="t1")])
    values = table.column(name).to_pylist()
    values[1][0] = None
    place = table.schema.get_field_index(name)
    table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    with pytest.raises(BadInput, match=f"the column {name} holds a null"):
        write_parquet(tmp_path / "a.parquet", [table])
    assert names(tmp_path) == []


def test_rows_without_lists_keep_none(tmp_path: Path) -> None:
    """As rows have whose contents were pruned, also in a slice of a table."""
    table = with_outcomes(encode([record(id=f"t{i}") for i in range(4)]), [])
    for name in ("token_ids", "sampled"):
        values = [None if i % 2 else v for i, v in enumerate(table.column(name).to_pylist())]
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    write_parquet(tmp_path / "a.parquet", [table.slice(0, 1), table.slice(1, 3)])
    assert read_parquet(tmp_path / "a.parquet").equals(table)


# -- damage


def flipped(data: bytes, rng: random.Random, start: int, end: int) -> bytes:
    place = rng.randrange(start, end)
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def test_a_flipped_bit_is_never_read_as_other_data(tmp_path: Path) -> None:
    """300 flips anywhere in the file: it is refused with a sentence, or reads as the same records (descriptions, padding)."""
    path, rng = tmp_path / "a.parquet", random.Random(0)
    records = recorded("0.2.0/reasoning.jsonl")
    written = write_parquet(path, [encode(records)])
    data, good, found = path.read_bytes(), read_parquet(path), 0
    for _ in range(300):
        damaged = flipped(data, rng, 0, len(data))
        assert hashlib.sha256(damaged).hexdigest() != written.sha256
        path.write_bytes(damaged)
        try:
            table = read_parquet(path)
        except RolltapeError:
            found += 1
            continue
        assert table.equals(good)
    assert found > 150


def test_a_flipped_bit_in_a_page_is_named_as_damage(tmp_path: Path) -> None:
    """The bytes of the token ids, all flips: none is read, which DuckDB and plain pyarrow would do."""
    path, rng = tmp_path / "a.parquet", random.Random(1)
    write_parquet(path, [encode(recorded("0.2.0/reasoning.jsonl"))])
    data = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    column = next(c for i in range(group.num_columns) if (c := group.column(i)).path_in_schema.startswith("token_ids"))
    end = column.data_page_offset + column.total_compressed_size
    for _ in range(60):
        path.write_bytes(flipped(data, rng, end - 500, end))
        with pytest.raises(Damaged, match=r"a\.parquet: row group 0 does not read back"):
            read_parquet(path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -8, -9])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [encode([record()])])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Damaged, match=r"a\.parquet: no readable Parquet file"):
        read_parquet(path)


def test_a_file_that_is_not_there_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "a.parquet")


# -- versions


def rewritten(path: Path, version: bytes | None, extra: pa.Field | None = None) -> None:
    """The file at `path` as a writer of another schema version would have left it."""
    table = pq.read_table(path)
    if extra is not None:
        table = table.append_column(extra, pa.nulls(table.num_rows, extra.type))
    meta = {k: v for k, v in table.schema.metadata.items() if k != b"rolltape.schema"}
    pq.write_table(
        table.replace_schema_metadata(meta | ({} if version is None else {b"rolltape.schema": version})), path
    )


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (b"2.0", r"a\.parquet: schema version 2\.0 was found, this rolltape knows 1\.0; install a newer rolltape"),
        (b"0.9", r"schema version 0\.9 was found, this rolltape knows 1\.0; export it with the rolltape that wrote it"),
        (b"two", r"schema version 'two' is not a version; was it written by rolltape\? Known is 1\.0"),
        (None, r"schema version None is not a version; was it written by rolltape\?"),
    ],
)
def test_another_major_version_is_refused_with_a_sentence(tmp_path: Path, version: bytes | None, sentence: str) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [encode([record()])])
    rewritten(path, version)
    with pytest.raises(UnsupportedVersion, match=sentence):
        read_parquet(path)


def test_a_newer_minor_version_with_a_further_column_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [encode([record()])])
    rewritten(path, b"1.7", pa.field("advantage", pa.list_(pa.float32())))
    table = read_parquet(path)
    assert table.column("advantage").to_pylist() == [None]
    assert decode(table) == [record()]


def test_a_file_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [encode([record()])])
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["reward"]), path)
    with pytest.raises(Damaged, match=r"a\.parquet: not the columns of schema 1\.0 \(reward missing"):
        read_parquet(path)


# -- commits


def commit(**changes: Any) -> Commit:
    group = Group.from_records([record(id="a"), record(id="b")], group_index=7, expected_size=2, first_sample_index=40)
    values: dict[str, Any] = {
        "part": PART,
        "file": Written(rows=2, bytes=1234, sha256="ab" * 32),
        "groups": [group],
        "step": Step(step=3, cursor=12, batch=(40, 41), counts={"started": 2, "emitted": 2}, options={"strict": False}),
        "sums": {"tokens": 10},
        "fingerprint": ROW.fingerprint,
        "written_at": 1700000000.25,
    }
    return Commit(**(values | changes))


def test_a_commit_comes_back_as_it_was_put(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(commit().to_bytes())
    assert Commit.read(path) == commit()


def test_a_flipped_bit_anywhere_in_a_commit_is_found(tmp_path: Path) -> None:
    path, data = tmp_path / "c.json", commit().to_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        with pytest.raises((Damaged, UnsupportedVersion), match=r"c\.json: "):
            Commit.read(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"7", b'"x"', b"{}", b'{"checksum": 1}', b"\xff"])
def test_what_is_no_commit_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises((Damaged, UnsupportedVersion), match=r"c\.json: "):
        Commit.read(tmp_path / "c.json")


def test_every_cut_of_a_commit_is_found(tmp_path: Path) -> None:
    path, data = tmp_path / "c.json", commit().to_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(Damaged, match=r"c\.json: "):
            Commit.read(path)


def test_a_commit_of_a_newer_major_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    body = json.loads(commit().to_bytes())
    (tmp_path / "c.json").write_text(json.dumps(body | {"schema": "2.0"}))
    with pytest.raises(
        UnsupportedVersion, match=r"c\.json: schema version 2\.0 was found, .* install a newer rolltape"
    ):
        Commit.read(tmp_path / "c.json")


def test_nan_and_odd_names_survive_a_commit(tmp_path: Path) -> None:
    rewards = {"a.b": float("inf"), 'q"': float("nan"), "\u2028": -0.0, "ü": 1e300}
    group = Group.from_records([record(rewards=rewards)], group_index=0, expected_size=1)
    (tmp_path / "c.json").write_bytes(commit(groups=[group]).to_bytes())
    assert repr(Commit.read(tmp_path / "c.json").groups) == repr([group])


# -- names and places


@pytest.mark.parametrize("name", ["main", "a", "A-1_b", "7", "x" * 64])
def test_plain_names_are_taken(name: str) -> None:
    assert check_name(name, "writer") == name


@pytest.mark.parametrize(
    "name", ["", "step=1", "a/b", "..", ".", "a.b", "-a", "_a", "a b", "ä", "a\n", "x" * 65, "a\\b"]
)
def test_names_that_would_be_more_than_a_name_are_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(BadInput, match=r"writer .*: expected 1 to 64 letters, digits"):
        check_name(name, "writer")


@pytest.mark.parametrize("step", [0, 3, 12_345_678, 123_456_789_012])
def test_the_part_of_a_file_is_read_from_its_name(step: int) -> None:
    part = Part("eval-math", step, 12, "node_1-a")
    paths = RunPaths(Path("run"))
    assert part_of(paths.parquet(part)) == part
    assert part_of(paths.commit(part)) == part
    assert part_of(paths.journal(12, "node_1-a")) is None


def test_step_10_comes_after_step_2() -> None:
    paths = RunPaths(Path("run"))
    steps = [10, 2, 1_000, 99_999_999, 0]
    by_name = sorted(steps, key=lambda s: paths.parquet(replace(PART, step=s)).name)
    assert by_name == sorted(steps)


@pytest.mark.parametrize(
    "name",
    [".00000003.0.main.parquet.7.ab12.tmp", "3.0.main.parquet", "00000003.main.parquet", "x", "00000003.0.a=b.json"],
)
def test_names_of_other_files_are_no_parts(name: str) -> None:
    assert part_of(Path("run/traces/train") / name) is None


# -- outcomes beside traces


def test_outcomes_go_to_their_traces(tmp_path: Path) -> None:
    traces = encode([record(id="a"), record(id="b"), record(id="c")])
    outcomes = [
        Outcome(
            trace_id="c",
            disposition="emitted",
            handed_reward=0.5,
            remove_sample=(True, False),
            logprobs=np.array([-0.5, np.nan], np.float32),
        ),
        Outcome(trace_id="a", disposition="error", reason="ProviderError: \ud800"),
    ]
    write_parquet(tmp_path / "a.parquet", [with_outcomes(traces, outcomes)])
    rows = read_parquet(tmp_path / "a.parquet").select(
        ["trace_id", "disposition", "reason", "handed_reward", "remove_sample", "recomputed_logprobs"]
    )
    first, second, third = (tuple(row.values()) for row in rows.to_pylist())
    assert first == ("a", "error", "ProviderError: \ufffd", None, None, None)
    assert second == ("b", None, None, None, None, None)
    assert third[:5] == ("c", "emitted", None, "0.5", [True, False])
    assert repr(third[5]) == "[-0.5, nan]"


@pytest.mark.parametrize(
    ("reward", "text"),
    [(1, "1"), (True, "true"), ({"a": 0.5}, '{"a":0.5}'), (np.float32(0.5), "0.5"), (np.array([1, 2]), "[1,2]")],
)
def test_a_handed_reward_of_any_type_is_kept_as_json(reward: Any, text: str) -> None:
    table = with_outcomes(encode([record()]), [Outcome(trace_id="t0", disposition="emitted", handed_reward=reward)])
    assert table["handed_reward"].to_pylist() == [text]


def test_an_empty_table_has_the_columns_of_its_record() -> None:
    assert empty(ROW).schema.equals(ROW.arrow)
    assert encode([]).schema.equals(TRACE.arrow, check_metadata=True)
