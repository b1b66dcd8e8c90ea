"""The journal: what is written reads back bit for bit, and what is damaged is named and never read."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from record_build import assert_same_row, recorded, same, trace

from rolltape.record.writing.journal import Fault, Journal, Record, claim, is_alive, pack_record, read_journal, scan
from rolltape.schema import Context, Turn, frames
from rolltape.schema.encoding import row_of
from rolltape.schema.errors import BadInput, Damaged
from rolltape.schema.jsontext import pack_extra, unpack_extra

# -- frames


@pytest.mark.parametrize("size", [0, 1, 7, 64, 4096, 100_003])
def test_checksums_are_those_of_zlib_whoever_makes_them(size: int) -> None:
    data = random.Random(size).randbytes(size)
    third = size // 3
    expected = zlib.crc32(struct.pack("<Q", size) + data)
    assert frames.checksum(size, [data[:third], memoryview(data)[third:]]) == expected


@pytest.mark.parametrize("size", [0, 1, 300, 1000, frames.SHORT - 500, frames.SHORT, 3 * frames.SHORT])
def test_what_is_stored_is_a_zstd_frame_as_any_other(size: int) -> None:
    frame = pack_record("note", {"text": "\u00e9x" * (size // 3)})
    payload = memoryview(frame)[frames.HEAD_BYTES :]
    length = int.from_bytes(payload[:8], "little")
    assert len(payload) == 8 + length
    data = zstandard.ZstdDecompressor().decompress(payload[8:])
    assert zstandard.get_frame_parameters(payload[8:]).content_size == len(data)
    assert (len(data) < length) == (len(data) < frames.SHORT)
    assert frames.unpack_frame(frame).data == {"text": "\u00e9x" * (size // 3)}


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        1e16,
        2**70,
        -(2**200),
        True,
        None,
        '\u2028\x00"\\é😀',
        "\ud800",
        {"\udfff": []},
    ],
    ids=ascii,
)
def test_values_read_back_whoever_wrote_their_json(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frames.pydantic_json is not None
    first = pack_record("trace", {"value": value, "nan": math.nan}, row_of(trace("a", 3)))
    monkeypatch.setattr(frames, "pydantic_json", None)
    for frame in (first, pack_record("trace", {"value": value, "nan": math.nan}, row_of(trace("a", 3)))):
        found = frames.unpack_frame(frame).data
        assert math.isnan(found.pop("nan"))
        assert repr(found) == repr({"value": value})


def packed(*names: str, tokens: int = 3) -> list[bytes]:
    return [pack_record("trace", {"n": i}, row_of(trace(name, tokens))) for i, name in enumerate(names)]


def found(data: bytes) -> list[Record | Fault]:
    return list(scan(memoryview(data)))


def names(items: list[Record | Fault]) -> list[str]:
    """Trace ids and kinds of faults, in order."""
    return [i.kind if isinstance(i, Fault) else i.row.values["trace_id"] if i.row else i.kind for i in items]


def test_every_recorded_trace_of_every_release_reads_back_bit_for_bit() -> None:
    turns = (Turn(weight_version="7", latency=0.25), Turn(finish_reason="stop"))
    context = Context(run="r", step=3, group_index=2, rollout_index=1, sampling={"top_p": 0.9}, turns=turns)
    expected = [(place, row_of(r, context)) for place, r in recorded()]
    assert len(expected) > 150
    assert any(row.extra for _, row in expected)
    data = b"".join(pack_record("trace", {"place": place}, row) for place, row in expected)
    back = found(data)
    assert [r.data for r in back if isinstance(r, Record)] == [{"place": place} for place, _ in expected]
    for item, (_, row) in zip(back, expected, strict=True):
        assert isinstance(item, Record)
        assert item.row is not None
        assert_same_row(item.row, row, unpack_extra(pack_extra(row.extra)) if row.extra else {})


@pytest.mark.parametrize("text", ["\ud800", "a\ud800\udc00b", "\udc00\ud800", "e\u0301\u2028\x00\U0001f600" * 99])
def test_any_text_reads_back(text: str) -> None:
    row = row_of(trace("t", text=text * 3, info={text: [text]}, task={"type": text, "data": {"prompt": text}}))
    [back] = found(pack_record("trace", {"split": text, "eval_name": [text]}, row))
    assert isinstance(back, Record)
    assert back.row is not None
    assert same(back.data, {"split": text, "eval_name": [text]})
    assert_same_row(back.row, row, unpack_extra(pack_extra(row.extra)))


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": []},
        {"nodes": [trace("x")["nodes"][1] | {"logprobs": []}]},
        {"nodes": [trace("x")["nodes"][1] | {"is_content": []}]},
        {"nodes": [trace("x")["nodes"][1] | {"mask": [True, False, True], "logprobs": [-1.0, float("nan")]}]},
        {"nodes": [trace("x")["nodes"][1] | {"token_ids": [0, 2**31 - 1, -(2**31)]}]},
        {"rewards": {"a": float("nan"), "b": -0.0}, "metrics": {"m": None}},
        {"info": {"long": "x" * 5000, "n": 2**70}},
    ],
    ids=["no nodes", "no logprobs", "content unknown", "some known", "wide ids", "numbers", "info"],
)
def test_rows_of_any_shape_read_back(fields: dict[str, Any]) -> None:
    row = row_of(trace("t", **fields))
    [back] = found(pack_record("trace", {}, row))
    assert isinstance(back, Record)
    assert back.row is not None
    assert_same_row(back.row, row, unpack_extra(pack_extra(row.extra)) if row.extra else {})


def test_records_that_are_no_traces_carry_values_and_arrays() -> None:
    arrays = [np.array([0.1, np.nan, -np.inf], np.float32), np.zeros(0, np.float32), np.arange(1000, dtype=np.float32)]
    [back] = found(pack_record("outcome", {"x": [1, None, float("nan"), 10**30]}, arrays=arrays))
    assert isinstance(back, Record)
    assert (back.kind, back.row) == ("outcome", None)
    assert same(back.data, {"x": [1, None, float("nan"), 10**30]})
    assert [a.tobytes() for a in back.arrays] == [a.tobytes() for a in arrays]


def test_a_record_larger_than_a_frame_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LARGEST", 1000)
    with pytest.raises(BadInput, match=r"a trace record of \d+ bytes; a journal frame holds at most 1000"):
        pack_record("trace", {}, row_of(trace("t", tokens=1000)))
    assert pack_record("started", {"n": 1})


# -- damage


def test_a_tail_that_is_cut_at_any_byte_is_torn_and_everything_before_it_is_kept() -> None:
    first, second, last = packed("a", "b", "c")
    for cut in range(len(last)):
        items = found(first + second + last[:cut])
        assert names(items) == ["a", "b", *(["torn tail"] if cut else [])]
        if cut:
            assert items[-1] == Fault("torn tail", len(first + second), cut)


def test_any_flipped_bit_of_a_frame_costs_that_frame_only() -> None:
    first, middle, last = packed("a", "b", "c")
    for byte in range(len(middle)):
        damaged = bytearray(middle)
        damaged[byte] ^= 1 << byte % 8
        items = found(first + damaged + last)
        assert names(items) == ["a", "corruption", "c"]
        assert items[1] == Fault("corruption", len(first), len(middle))


def test_a_flipped_bit_of_the_last_frame_is_named() -> None:
    first, last = packed("a", "b")
    for byte in range(len(last)):
        damaged = bytearray(last)
        damaged[byte] ^= 1 << byte % 8
        kinds = names(found(first + damaged))
        assert kinds[0] == "a"
        assert kinds[1:] in (["corruption"], ["torn tail"])


def with_magic_inside(name: str) -> bytes:
    """A frame whose token ids spell a frame's magic, twice, and once a whole other frame."""
    inner = pack_record("started", {"n": 1})
    inner += b"\0" * (-len(inner) % 4)
    ids = np.frombuffer(frames.MAGIC * 2 + inner, "<i4").tolist()
    lists = {"token_ids": ids, "mask": [True] * len(ids), "is_content": [], "logprobs": [-1.0] * len(ids)}
    return pack_record("trace", {}, row_of(trace(name, nodes=[trace("x")["nodes"][1] | lists])))


def test_a_magic_inside_a_payload_is_not_the_beginning_of_a_frame() -> None:
    first, last = packed("a", "c")
    middle = with_magic_inside("b")
    assert middle.count(frames.MAGIC) == 4
    assert names(found(first + middle + last)) == ["a", "b", "c"]


def test_a_frame_inside_a_damaged_payload_is_not_read() -> None:
    first, last = packed("a", "c")
    for place in (-1, -40, 300):
        middle = bytearray(with_magic_inside("b"))
        middle[place] ^= 1
        assert names(found(first + middle + last)) == ["a", "corruption", "c"]
        assert names(found(first + middle)) == ["a", "corruption"]


def test_reading_goes_on_behind_a_damaged_length_with_a_magic_inside() -> None:
    first, last = packed("a", "c")
    ids = np.frombuffer(frames.MAGIC * 3, "<i4").tolist()
    lists = {"token_ids": ids, "mask": [True] * 6, "is_content": [], "logprobs": [-1.0] * 6}
    middle = bytearray(pack_record("trace", {}, row_of(trace("b", nodes=[trace("x")["nodes"][1] | lists]))))
    middle[8] ^= 1
    assert names(found(first + middle + last)) == ["a", "corruption", "c"]


@pytest.mark.parametrize("size", [0, 1, 10**4, 1 << 31, 1 << 60, (1 << 64) - 1])
def test_a_damaged_length_does_not_lead_reading_astray(size: int) -> None:
    first, middle, last = packed("a", "b", "c")
    head = len(frames.MAGIC)
    damaged = middle[:head] + struct.pack("<Q", size) + middle[head + 8 :]
    assert names(found(first + damaged + last)) == ["a", "corruption", "c"]
    kinds = names(found(first + damaged))
    assert kinds[0] == "a"
    assert kinds[1:] in (["torn tail"], ["corruption"])


def test_zeros_at_the_end_are_neither_a_clean_end_nor_data() -> None:
    first, last = packed("a", "b")
    items = found(first + last + bytes(4096))
    assert names(items) == ["a", "b", "zeros"]
    assert items[-1] == Fault("zeros", len(first + last), 4096)
    assert str(items[-1]) == f"zeros of 4096 bytes at byte {len(first + last)}"


def test_a_frame_whose_end_is_zeros_is_named() -> None:
    first, last = packed("a", "b")
    for cut in range(1, len(last)):
        if any(last[cut:]):
            assert names(found(first + last[:cut] + bytes(len(last) - cut))) == ["a", "corruption"]


def test_zeros_in_the_middle_are_passed_over() -> None:
    first, last = packed("a", "b")
    assert names(found(first + bytes(70_000) + last)) == ["a", "zeros", "b"]


@pytest.mark.parametrize("text", [b"", b"\0", b"x", b"PAR1" * 100, frames.MAGIC, frames.MAGIC * 4])
def test_what_is_no_journal_gives_no_record(text: bytes) -> None:
    assert all(isinstance(item, Fault) for item in found(text))
    assert len(found(text)) == bool(text)


def test_random_bytes_between_frames_cost_no_frame() -> None:
    rng = random.Random(3)
    whole = packed(*"abcdefgh")
    junk = [rng.randbytes(rng.randrange(1, 300)) for _ in whole]
    kinds = names(found(b"".join(j + w for j, w in zip(junk, whole, strict=True))))
    assert kinds == [k for name in "abcdefgh" for k in ("corruption", name)]


# -- the file


def read_back(path: Path) -> list[str]:
    return names(list(read_journal(path)))


def test_appended_frames_are_in_the_file_and_read_at_their_offsets(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "er" / "0.main.journal")
    places = [journal.append(frame) for frame in packed(*"abc")]
    assert read_back(journal.path) == ["a", "b", "c"]
    assert [journal.read(place).row.values["trace_id"] for place in places] == ["a", "b", "c"]  # type: ignore[union-attr]
    with pytest.raises(Damaged, match=rf"journal: the record at byte {places[1] + 1} does not read back"):
        journal.read(places[1] + 1)
    journal.clear()
    assert read_back(journal.path) == []
    journal.append(packed("d")[0])
    assert read_back(journal.path) == ["d"]
    journal.close()
    assert journal.path.exists()


def test_a_journal_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "0.main.journal"
    path.write_bytes(packed("a")[0])
    with pytest.raises(FileExistsError):
        Journal(path)
    assert read_back(path) == ["a"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def pwrite_that(fails: Callable[[int, bytes], int | OSError]) -> Callable[..., int]:
    """An os.pwrite that writes as many bytes as `fails(call, data)` says, or raises what it gives."""
    real, calls = os.pwrite, iter(range(10**9))

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        answer = fails(next(calls), bytes(data))
        if isinstance(answer, OSError):
            raise answer
        return real(descriptor, bytes(data)[:answer], offset)

    return pwrite


def test_a_write_that_fails_after_some_bytes_leaves_no_fragment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "0.main.journal")
    first, second, third = packed(*"abc")
    journal.append(first)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite_that(lambda call, data: full if call else len(data) // 2))
        with pytest.raises(OSError, match="No space left"):
            journal.append(second)
    assert journal.path.stat().st_size == journal.good == len(first)
    journal.append(third)
    assert read_back(journal.path) == ["a", "c"]


def test_a_fragment_that_cannot_be_cut_back_is_cut_before_the_next_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "0.main.journal")
    first, long, short = packed("a", "b" * 500, "c")
    journal.append(first)
    broken = OSError(errno.EIO, "Input/output error")

    def no_cut(*_: Any) -> None:
        raise broken

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite_that(lambda call, data: broken if call else len(data) - 1))
        patched.setattr(os, "ftruncate", no_cut)
        with pytest.raises(OSError, match="Input/output error"):
            journal.append(long)
    assert read_back(journal.path) == ["a", "torn tail"]
    journal.append(short)
    assert read_back(journal.path) == ["a", "c"]


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "0.main.journal")
    monkeypatch.setattr(os, "pwrite", pwrite_that(lambda _, data: min(len(data), 7)))
    for frame in packed(*"abc"):
        journal.append(frame)
    assert read_back(journal.path) == ["a", "b", "c"]


def test_a_write_that_takes_nothing_and_says_so_without_an_error_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "0.main.journal")
    monkeypatch.setattr(os, "pwrite", pwrite_that(lambda *_: 0))
    with pytest.raises(OSError, match="nothing was written"):
        journal.append(packed("a")[0])


def test_a_frame_that_could_not_be_synced_is_not_kept_as_if_it_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "0.main.journal", fsync="always")
    first, second = packed(*"ab")
    journal.append(first)

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output error"):
            journal.append(second)
    assert read_back(journal.path) == ["a"]
    journal.append(second)
    assert read_back(journal.path) == ["a", "b"]


@pytest.mark.parametrize(
    ("fsync", "seconds", "expected"),
    [("always", 1e9, 20), ("interval", 0.0, 20), ("interval", 1e9, 0), ("never", 0.0, 0)],
)
def test_fsync_as_often_as_the_policy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: Any, seconds: float, expected: int
) -> None:
    journal = Journal(tmp_path / "0.main.journal", fsync=fsync, seconds=seconds)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for frame in packed(*map(str, range(20))):
        journal.append(frame)
    assert len(synced) == expected
    journal.sync_if_due()
    assert len(synced) == expected


def test_the_frames_before_a_pause_are_synced_when_the_interval_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "0.main.journal", seconds=1e9)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    journal.append(packed("a")[0])
    journal.sync_if_due()
    assert synced == []
    journal.seconds = 0.0
    journal.sync_if_due()
    journal.sync_if_due()
    assert len(synced) == 1


def test_no_frame_waits_longer_than_the_interval_and_none_is_synced_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    journal = Journal(tmp_path / "0.main.journal", seconds=5.0)
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(now[0]))
    first, second, third = packed(*"abc")
    for when, act in (
        (200.0, partial(journal.append, first)),
        (204.0, partial(journal.append, second)),
        (204.9, journal.sync_if_due),
        (205.0, journal.sync_if_due),
        (211.0, journal.sync_if_due),
        (212.0, partial(journal.append, third)),
        (213.0, journal.clear),
        (218.0, journal.sync_if_due),
        (219.0, partial(journal.append, first)),
        (224.0, partial(journal.append, second)),
    ):
        now[0] = when
        act()
    assert synced == [205.0, 224.0]


def test_a_journal_written_anew_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    old = Journal(tmp_path / "0.main.journal")
    kept = [packed(*"abc")[i] for i in (0, 2)]
    for frame in packed(*"abc"):
        old.append(frame)
    new = Journal(old.path, frames=kept)
    assert read_back(new.path) == ["a", "c"]
    assert [new.read(place).row.values["trace_id"] for place in new.offsets] == ["a", "c"]  # type: ignore[union-attr]
    assert (new.in_place(), old.in_place()) == (True, False)
    assert old.read(0).row is not None
    old.close(remove=True)
    assert is_alive(new.path)
    new.append(packed("d")[0])
    assert read_back(new.path) == ["a", "c", "d"]
    assert [p.name for p in tmp_path.iterdir()] == ["0.main.journal"]


def test_a_journal_that_cannot_be_written_anew_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Journal(tmp_path / "0.main.journal")
    frame = packed("a")[0]
    old.append(frame)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite_that(lambda *_: OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            Journal(old.path, frames=[frame])
    assert old.in_place()
    assert read_back(old.path) == ["a"]
    assert [p.name for p in tmp_path.iterdir()] == ["0.main.journal"]


# -- whose it is

HOLDER = """
import sys
import time
from pathlib import Path
from rolltape.record.writing.journal import Journal, pack_record
journal = Journal(Path(sys.argv[1]))
journal.append(pack_record("started", {"n": 1}))
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_journal_is_alive_as_long_as_its_process(tmp_path: Path) -> None:
    path = tmp_path / "0.main.journal"
    assert not is_alive(path)
    words = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        assert is_alive(path)
        assert claim(path) is None
        writer.kill()
    assert not is_alive(path)
    lock = claim(path)
    assert lock is not None
    assert is_alive(path)
    os.close(lock)
    assert read_back(path) == ["started"]


def test_a_journal_is_alive_until_it_is_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "0.main.journal")
    assert is_alive(journal.path)
    journal.close()
    assert not is_alive(journal.path)
    journal.close(remove=True)
    assert journal.path.exists()


def test_a_journal_has_its_name_only_when_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.main.journal"
    real, seen = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        seen.append(path.exists())
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    Journal(path).close()
    assert seen == [False]


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_a_journal_begins_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks(monkeypatch)
    journal = Journal(tmp_path / "0.main.journal")
    assert is_alive(journal.path)
    states = [journal.empty]
    journal.append(packed("a")[0])
    states.append(journal.empty)
    assert states == [True, False]
    assert read_back(journal.path) == ["writer", "a"]
    journal.clear()
    assert read_back(journal.path) == ["writer"]
    assert is_alive(journal.path)


def test_a_journal_that_could_not_name_its_process_when_it_was_emptied_does_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_locks(monkeypatch)
    journal = Journal(tmp_path / "0.main.journal")
    journal.append(packed("a")[0])
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite_that(lambda *_: OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            journal.clear()
    assert journal.append(packed("b")[0]) == journal.good - len(packed("b")[0])
    assert read_back(journal.path) == ["writer", "b"]
    assert is_alive(journal.path)


@pytest.mark.parametrize("owner", [{"host": "elsewhere", "process": 1}, {"process": 2**22 - 3}])
def test_without_locks_a_journal_of_a_process_that_is_gone_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: dict[str, Any]
) -> None:
    no_locks(monkeypatch)
    path = tmp_path / "0.main.journal"
    path.write_bytes(pack_record("writer", {"host": os.uname().nodename, **owner}))
    assert not is_alive(path)


def test_a_frame_says_nothing_but_what_was_put_into_it() -> None:
    """The text inside is JSON behind zstd: another program can read a journal by the description in `frames`."""
    import zstandard

    frame = pack_record("started", {"split": "train", "n": 2})
    assert frame[:8] == frames.MAGIC
    size, _ = struct.unpack_from("<QI", frame, 8)
    assert size == len(frame) - 20
    (length,) = struct.unpack_from("<Q", frame, 20)
    data = zstandard.ZstdDecompressor().decompress(frame[28 : 28 + length])
    (length,) = struct.unpack_from("<Q", data)
    assert json.loads(data[8 : 8 + length]) == {"kind": "started", "split": "train", "n": 2}
