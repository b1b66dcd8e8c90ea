"""Bringing Verifiers' files into a run: lines, files and folders, and what is left out."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import zstandard
from replay_build import TRACES, Record, recorded, samples, turn

from rolltape.replay import (
    ConvertOptions,
    convert,
    open_run,
)
from rolltape.replay.imports import importer
from rolltape.replay.imports import lines as import_lines
from rolltape.replay.imports import sources as import_sources
from rolltape.replay.imports import steps as import_steps
from rolltape.replay.imports.importer import Imported, Left, import_files
from rolltape.replay.verification.verify import verify
from rolltape.schema import decode
from rolltape.schema.errors import BadInput


def lines(*items: Any) -> bytes:
    """Records as JSON lines; bytes stand as they are."""
    return b"".join((i if isinstance(i, bytes) else json.dumps(i).encode()) + b"\n" for i in items)


def imported(folder: Path, data: bytes, **options: Any) -> tuple[Imported, list[Record]]:
    """Import a file of `data`; what was done, and the records that can be read back."""
    (folder / "traces.jsonl").write_bytes(data)
    done = import_files(folder / "traces.jsonl", folder / "run", **options)
    return done, decode(open_run(folder / "run").table())


def named(done: Imported, kind: str) -> dict[int, str]:
    """What was left out, by line."""
    return {left.line: left.why for left in done.left if left.kind == kind}


def adds_up(done: Imported) -> bool:
    return done.lines == done.imported + done.skipped + done.repeated + done.blank


# -- what a file holds comes back


@pytest.mark.parametrize("name", ["group_rewards", "forks", "errors", "zero", "written_by_verifiers/errors"])
def test_a_recorded_file_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    done = import_files(TRACES / "0.2.0" / f"{name}.jsonl", tmp_path / "run")
    back = {r["id"]: r for r in decode(open_run(tmp_path / "run").table())}
    assert json.dumps([back[r["id"]] for r in recorded(name)]) == json.dumps(recorded(name))
    assert (done.lines, done.imported, done.traces, done.left) == (len(back), len(back), len(back), [])
    assert done.clean


def test_group_sums_and_samples_of_an_imported_run_are_those_of_its_traces(tmp_path: Path) -> None:
    import_files(TRACES / "0.2.0" / "group_rewards.jsonl", tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert [g.rewards["fastest"].sum for g in run.groups()] == [0.5, 0.5, 0.5]
    assert [g.rewards["most_concise"].sum for g in run.groups()] == [1.0, 0.5, 0.5]
    assert len(samples(convert(run.table(), run.groups(), ConvertOptions()))) == 12
    assert verify(run).findings == []


def test_numbers_that_are_none_and_huge_ones_and_halves_of_characters_come_through(tmp_path: Path) -> None:
    record = turn(id="a", metrics={"m": float("nan")}, info={"big": 2**80, "half": "\ud800", "far": float("inf")})
    _, [back] = imported(tmp_path, lines(record))
    assert json.dumps(back) == json.dumps(record)


def test_rows_say_where_in_the_run_they_are(tmp_path: Path) -> None:
    imported(tmp_path, lines(turn(id="a", idx=0), turn(id="b", idx=1), turn(id="c", idx=0)))
    run = open_run(tmp_path / "run")
    places = ("run", "split", "step", "attempt", "writer", "group_index", "rollout_index", "trace_id")
    rows = run.table().select(list(places)).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (run.run_id, "train", 0, 0, "import", group, rollout, trace)
        for group, rollout, trace in ((0, 0, "a"), (0, 1, "c"), (1, 0, "b"))
    ]


# -- lines


def test_every_line_is_accounted_for_and_what_is_left_out_is_named_by_its_number(tmp_path: Path) -> None:
    whole = json.dumps(turn(id="cut")).encode()
    done, back = imported(
        tmp_path,
        lines(
            turn(id="a"),
            b'{"id": "broken',
            [1, 2],
            3,
            turn(id="b"),
            turn(id="a"),
            {"id": "e", "env": {}, "traces": []},
            b"\xff\xfe not text",
            {"id": "no task"},
            turn(id="c") | {"id": 7},
            turn(id="odd", rewards={"ok": {"score": [], "weight": 1.0}}),
            b"",
            {"id": "e", "env": {}, "errors": [{"type": "EnvError", "message": "no box"}], "traces": []},
            {"prompt": [], "completion": [], "reward": 1.0},
        )
        + whole[:200],
    )
    assert sorted(r["id"] for r in back) == ["a", "b", "odd"]
    why = named(done, "skipped")
    assert sorted(why) == [2, 3, 4, 7, 8, 9, 10, 13, 14, 15]
    assert named(done, "repeated") == {6: "trace a had come before"}
    assert (done.lines, done.imported, done.skipped, done.repeated, done.blank) == (15, 3, 10, 1, 1)
    assert adds_up(done)
    assert not done.clean
    assert why[2].startswith("no JSON (")
    assert why[3] == "a JSON list; expected an object"
    assert why[4] == "a JSON int; expected an object"
    assert why[7] == "an Episode without traces"
    assert why[9] == "no task; expected a trace or an Episode of Verifiers"
    assert why[10] == "trace id 7; expected text"
    assert why[13] == "an Episode without traces, which ended in an error (EnvError: no box)"
    assert why[14] == "no task; expected a trace or an Episode of Verifiers"


def test_lines_keep_their_numbers_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_sources, "BLOCK_BYTES", 3000)
    records = [turn(id=str(i), idx=i % 3, info={"pad": "x" * (5000 if i == 7 else 10)}) for i in range(20)]
    done, back = imported(tmp_path, lines(*records[:9], b"{", *records[9:], b"["))
    assert sorted(named(done, "skipped")) == [10, 22]
    assert (done.lines, done.traces, done.groups) == (22, 20, 3)
    order = sorted(records, key=lambda r: (r["task"]["data"]["idx"], int(r["id"])))
    assert json.dumps(back) == json.dumps(order)


def test_strict_stops_at_the_first_bad_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"traces\.jsonl: line 2: no JSON \(.*\) \(strict is set, so nothing was imported"
    ):
        imported(tmp_path, lines(turn(id="a"), b"{", turn(id="b")), strict=True)
    assert not (tmp_path / "run").exists()


def test_more_bad_lines_than_are_named_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "MOST_NAMED", 5)
    done, _ = imported(tmp_path, lines(turn(), *[b"{"] * 20))
    assert (len(done.left), done.unnamed, done.skipped) == (5, 15, 20)


def test_a_last_line_without_its_end_is_a_line(tmp_path: Path) -> None:
    done, back = imported(tmp_path, lines(turn(id="a")) + json.dumps(turn(id="b")).encode())
    assert (done.traces, [r["id"] for r in back]) == (2, ["a", "b"])


def test_line_separators_inside_a_text_end_no_line(tmp_path: Path) -> None:
    record = turn(id="a", prompt="one\u2028two\u2029three\x85four\x0bfive")
    done, back = imported(tmp_path, json.dumps(record, ensure_ascii=False).encode() + b"\n")
    assert (done.lines, done.left) == (1, [])
    assert back == [record]


def test_empty_lines_and_windows_line_ends_are_passed_over(tmp_path: Path) -> None:
    data = lines(turn(id="a"), b"", b"  \t", turn(id="b")).replace(b"\n", b"\r\n")
    done, _ = imported(tmp_path, data)
    assert (done.lines, done.traces, done.blank, done.left) == (4, 2, 2, [])


def test_a_byte_order_mark_before_the_first_line_is_passed_over(tmp_path: Path) -> None:
    done, back = imported(tmp_path, b"\xef\xbb\xbf" + lines(turn(id="a")))
    assert (done.left, back) == ([], [turn(id="a")])


def test_nesting_beyond_reason_costs_its_line_only(tmp_path: Path) -> None:
    deep = json.dumps(turn(id="deep")).replace('"info": {}', '"info": ' + "[" * 50_000 + "]" * 50_000)
    done, back = imported(tmp_path, lines(deep.encode(), turn(id="a")))
    assert [r["id"] for r in back] == ["a"]
    assert list(named(done, "skipped")) == [1]


@pytest.mark.parametrize("depth", [900, 975, 985, 992])
def test_nesting_at_the_edge_of_reason_is_kept_or_named(tmp_path: Path, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    trace = json.dumps(turn(id="t")).replace('"idx": 0', f'"idx": 0, "deep": {deep}')
    line = {"id": "e", "env": {"id": "x"}, "deep": 0, "traces": [turn(id="inside")]}
    episode = json.dumps(line).replace('"deep": 0', f'"deep": {deep}')
    done, back = imported(tmp_path, lines(turn(id="a"), trace.encode(), episode.encode()))
    assert adds_up(done)
    assert (len(back), done.skipped) == (done.traces, 3 - done.traces)
    assert depth > 900 or done.clean
    for record in back:
        assert json.dumps(record) in (trace, json.dumps(turn(id="a")), json.dumps(turn(id="inside")))


@pytest.mark.parametrize("data", [b"", b"\n\n", b"not json\n", b"[]\n"])
def test_a_file_without_any_trace_is_refused_and_leaves_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "traces.jsonl").write_bytes(data)
    with pytest.raises(BadInput, match=r"traces\.jsonl: \d+ lines? and no Verifiers trace among them"):
        import_files(tmp_path / "traces.jsonl", tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- files


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "gz of two members": lambda data: gzip.compress(data[:500]) + gzip.compress(data[500:]),
    "zst of two frames": lambda data: zstandard.compress(data[:500]) + zstandard.compress(data[500:]),
}


@pytest.mark.parametrize("packed", PACKED)
def test_compressed_files_are_read_whatever_their_name(tmp_path: Path, packed: str) -> None:
    records = [turn(id=str(i), idx=i) for i in range(5)]
    done, back = imported(tmp_path, PACKED[packed](lines(*records)))
    assert (done.clean, back) == (True, records)


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_of_a_compressed_file_that_is_cut_the_whole_lines_are_taken_and_the_cut_is_named(
    tmp_path: Path, packed: str
) -> None:
    texts = [json.dumps(turn(id=str(i), info={"x": random.Random(i).sample(range(10**9), 9000)})) for i in range(8)]
    data = PACKED[packed](lines(*[t.encode() for t in texts]))
    done, back = imported(tmp_path, data[: len(data) * 2 // 3])
    assert 0 < len(back) < 8
    assert json.dumps(back) == json.dumps([json.loads(t) for t in texts[: len(back)]])
    assert len(done.cut) == 1
    assert f"line {done.lines} is the last that was read; the compressed file ends there" in done.cut[0]
    assert not done.clean
    assert adds_up(done)
    with pytest.raises(BadInput, match="strict is set"):
        import_files(tmp_path / "traces.jsonl", tmp_path / "other", strict=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_damage_in_a_compressed_file_is_named(tmp_path: Path, packed: str) -> None:
    text = lines(*[turn(id=str(i), info={"x": random.Random(i).sample(range(10**9), 9000)}) for i in range(8)])
    checked = zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(gzip.compress(text) if packed == "gz" else checked(text[:200_000]) + checked(text[200_000:]))
    data[len(data) * 2 // 3] ^= 0xFF
    done, back = imported(tmp_path, bytes(data))
    assert 0 < len(back) <= 8
    assert "the compressed bytes after it are damaged" in done.cut[0]


def test_several_files_are_imported_as_one_and_lines_are_named_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(turn(id="a"), b"{"))
    (tmp_path / "b.jsonl").write_bytes(lines(b"[", turn(id="b"), turn(id="a")))
    done = import_files([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "run")
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert [(left.file, left.line, left.kind) for left in done.left] == [
        (a, 2, "skipped"),
        (b, 1, "skipped"),
        (b, 3, "repeated"),
    ]
    assert str(Left(a, 2, None, "skipped", "why")) == "line 2 skipped: why"
    assert (done.traces, done.lines, adds_up(done)) == (2, 5, True)


def test_standard_input_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = zstandard.compress(lines(turn(id="a"), turn(id="b")))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    assert import_files("-", tmp_path / "run").traces == 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(lines(turn(id="c"))))))
    assert import_files("-", tmp_path / "run").joined == 0
    with pytest.raises(BadInput, match="standard input is named twice"):
        import_files(["-", "-"], tmp_path / "other")


@pytest.mark.parametrize("name", ["nothing.jsonl", "."])
def test_what_is_no_file_or_holds_no_traces_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"expected Verifiers' traces\.jsonl"):
        import_files(tmp_path / name, tmp_path / "run")


# -- folders of evaluations

CONFIG = """
model = "org/model"
num_rollouts = 3
[taskset]
id = "probe-v1"
[client]
type = "train"
renderer_model_name = "org/tokenizer"
[client.renderer]
name = "qwen3"
[client.headers]
Authorization = "Bearer secret"
[sampling]
temperature = 0.7
"""


@pytest.mark.parametrize("config", ["config.toml", "configs/resolved/eval.json", "configs/eval.toml"])
@pytest.mark.parametrize("name", ["traces.jsonl", "traces.jsonl.zst"])
def test_a_folder_of_an_evaluation_says_what_its_traces_do_not(tmp_path: Path, config: str, name: str) -> None:
    import tomllib

    folder = tmp_path / "outputs"
    data = lines(*[turn(id=f"{i}{g}", idx=g) for i in range(3) for g in range(2) if (i, g) != (2, 1)])
    folder.mkdir()
    (folder / name).write_bytes(zstandard.compress(data) if name.endswith("zst") else data)
    (folder / config).parent.mkdir(parents=True, exist_ok=True)
    is_json = config.endswith("json")
    (folder / config).write_text(
        json.dumps({"env": tomllib.loads(CONFIG), **tomllib.loads(CONFIG)}) if is_json else CONFIG
    )
    import_files(folder, tmp_path / "run")
    run = open_run(tmp_path / "run")
    row = run.table().to_pylist()[0]
    assert (row["model"], row["tokenizer"]) == ("org/model", "org/tokenizer")
    assert json.loads(row["sampling"]) == {"temperature": 0.7}
    assert json.loads(row["renderer"]) == {"name": "qwen3"}
    assert (run.info["model"], run.info["taskset"]) == ("org/model", "probe-v1")
    assert [(len(g.trace_ids), g.expected_size) for g in run.groups()] == [(3, 3), (2, 3)]
    assert b"secret" not in b"".join(p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file())


def test_a_folder_above_stands_for_every_evaluation_below_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "traces.jsonl").write_bytes(lines(turn(id=name)))
    done = import_files(tmp_path / "outputs", tmp_path / "run")
    assert (done.traces, done.groups) == (2, 2)


def test_a_configuration_that_cannot_be_read_is_named_and_costs_nothing_but_itself(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("model = ")
    done, _ = imported(tmp_path, lines(turn()))
    assert done.traces == 1
    assert len(done.unread) == 1
    assert "config.toml: no configuration that can be read" in done.unread[0]


# -- memory


def test_a_large_import_becomes_steps_of_whole_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_sources, "BLOCK_BYTES", 4000)
    records = [turn(id=f"{i}-{g}", idx=g) for i in range(4) for g in range(12)]
    whole, _ = imported(tmp_path, lines(*records))
    size = open_run(tmp_path / "run").table().nbytes
    monkeypatch.setattr(import_steps, "STEP_BYTES", size // 4)
    monkeypatch.setattr(import_steps, "TRACE_BYTES", 1)
    monkeypatch.setattr(import_steps, "PIECE_BYTES", size // 9)
    done = import_files(tmp_path / "traces.jsonl", tmp_path / "cut")
    run, other = open_run(tmp_path / "cut"), open_run(tmp_path / "run")
    assert whole.steps == 1
    assert done.steps > 3
    assert [c.part.step for c in run.commits()] == list(range(done.steps))
    assert [g.trace_ids for g in run.groups()] == [g.trace_ids for g in other.groups()]
    assert json.dumps(decode(run.table())) == json.dumps(decode(other.table()))
    assert max(pq.ParquetFile(p).num_row_groups for p in (tmp_path / "cut").rglob("*.parquet")) > 1
    assert verify(run).findings == []
    assert [p.name for p in (tmp_path / "cut").iterdir() if p.name.startswith(".")] == []


def test_a_group_larger_than_a_piece_is_written_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [turn(id=f"{i}", idx=i // 20, rewards={"ok": float(i)}) for i in range(40)]
    imported(tmp_path, lines(*records))
    size = open_run(tmp_path / "run").table().nbytes
    monkeypatch.setattr(import_steps, "PIECE_BYTES", size // 7)
    import_files(tmp_path / "traces.jsonl", tmp_path / "cut")
    run = open_run(tmp_path / "cut")
    assert {pq.ParquetFile(p).num_row_groups for p in (tmp_path / "cut").rglob("*.parquet")} <= {7, 8}
    assert decode(run.table()) == records
    assert [g.rewards["ok"].sum for g in run.groups()] == [sum(range(20)), sum(range(20, 40))]
    assert verify(run).findings == []


def test_small_traces_do_not_make_a_step_of_more_than_memory_should_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_steps, "STEP_BYTES", 4 * import_steps.TRACE_BYTES)
    monkeypatch.setattr(import_lines, "FLUSH_ROWS", 3)
    records = [turn(id=f"{g}-{i}", idx=g) for g in range(5) for i in range(2)]
    done, back = imported(tmp_path, lines(*records))
    assert back == records
    assert [c.file.rows for c in open_run(tmp_path / "run").commits()] == [4, 4, 2]
    assert done.steps == 3


def test_progress_is_told_in_megabytes_and_steps(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(lines(turn(id="a", info={"pad": "x" * 3_000_000}), turn(id="b")))
    told: list[tuple[str, int, int | None]] = []
    import_files(tmp_path / "traces.jsonl", tmp_path / "run", told=lambda *what: told.append(what))
    assert told == [("reading", 2, 2), ("writing", 1, 1)]


@pytest.mark.parametrize(
    ("options", "why"), [({"group_by": "x"}, "expected one of auto"), ({"jobs": 0}, "expected 1 or")]
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        import_files(tmp_path, tmp_path / "run", **options)
