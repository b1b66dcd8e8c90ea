"""Bringing Verifiers' traces.jsonl into a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from replay_build import TRACES, Record, recorded, samples, turn

from rolltape.replay import ConvertOptions, convert, open_run
from rolltape.replay.importer import Imported, import_file
from rolltape.replay.verify import verify
from rolltape.schema import decode
from rolltape.schema.errors import BadInput, RunConflict


def lines(*items: Any) -> bytes:
    """Records as JSON lines; bytes stand as they are."""
    return b"".join((i if isinstance(i, bytes) else json.dumps(i).encode()) + b"\n" for i in items)


def imported(folder: Path, data: bytes) -> tuple[Imported, list[Record]]:
    """Import a file of `data`; what was done, and the records that can be read back."""
    (folder / "traces.jsonl").write_bytes(data)
    done = import_file(folder / "traces.jsonl", folder / "run")
    return done, decode(open_run(folder / "run").table())


@pytest.mark.parametrize("name", ["group_rewards", "forks", "errors", "zero", "written_by_verifiers/errors"])
def test_a_recorded_file_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    done = import_file(TRACES / "0.2.0" / f"{name}.jsonl", tmp_path / "run")
    back = {r["id"]: r for r in decode(open_run(tmp_path / "run").table())}
    assert json.dumps([back[r["id"]] for r in recorded(name)]) == json.dumps(recorded(name))
    assert (done.lines, done.traces, done.skipped, done.repeated) == (len(back), len(back), [], [])


def test_traces_of_one_task_are_one_group_wherever_they_stand(tmp_path: Path) -> None:
    records = [turn(id=f"{i}{g}", idx=g) for i in range(3) for g in (7, 4)]
    done, back = imported(tmp_path, lines(*records))
    groups = open_run(tmp_path / "run").groups()
    assert done.groups == 2
    assert [(g.group_index, g.task_index, g.trace_ids) for g in groups] == [
        (0, 7, ("07", "17", "27")),
        (1, 4, ("04", "14", "24")),
    ]
    assert [g.expected_size for g in groups] == [3, 3]
    assert [r["id"] for r in back] == ["07", "17", "27", "04", "14", "24"]


def test_tasks_of_two_kinds_or_without_an_index_are_groups_of_their_own(tmp_path: Path) -> None:
    records = [turn(id=i) for i in "abcde"]
    records[1]["task"]["type"] = "OtherTask"
    for record, prompt in zip(records[2:], ("one", "two", "one"), strict=True):
        record["task"]["data"] = {"prompt": prompt}
    imported(tmp_path, lines(*records))
    assert [g.trace_ids for g in open_run(tmp_path / "run").groups()] == [("a",), ("b",), ("c", "e"), ("d",)]


def test_group_sums_and_samples_of_an_imported_run_are_those_of_its_traces(tmp_path: Path) -> None:
    import_file(TRACES / "0.2.0" / "group_rewards.jsonl", tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert [g.rewards["fastest"].sum for g in run.groups()] == [0.5, 0.5, 0.5]
    assert [g.rewards["most_concise"].sum for g in run.groups()] == [1.0, 0.5, 0.5]
    assert len(samples(convert(run.table(), run.groups(), ConvertOptions()))) == 12
    assert verify(run).findings == []


def test_every_line_is_accounted_for_and_what_is_left_out_is_named_by_its_number(tmp_path: Path) -> None:
    episode = {"id": "e", "env": {}, "task": {"type": "X", "data": {}}, "traces": [turn(id="inside")]}
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
            episode,
            b"\xff\xfe not text",
            {"id": "no task"},
            turn(id="c") | {"id": 7},
            turn(id="odd", rewards={"ok": {"score": [], "weight": 1.0}}),
        )
        + whole[:200],
    )
    assert sorted(r["id"] for r in back) == ["a", "b", "odd"]
    named = dict(done.skipped)
    assert sorted(named) == [2, 3, 4, 7, 8, 9, 10, 12]
    assert done.repeated == [(6, "a")]
    assert done.lines == 12 == done.traces + len(done.skipped) + len(done.repeated)
    assert named[2].startswith("no JSON (")
    assert named[3] == "a JSON list; expected an object"
    assert named[4] == "a JSON int; expected an object"
    assert "Episode line of Verifiers 0.3.0 or later" in named[7]
    assert named[9] == "no task; expected a trace of Verifiers 0.2"
    assert named[10] == "trace id 7; expected text"


def test_a_last_line_without_its_end_is_a_line(tmp_path: Path) -> None:
    done, back = imported(tmp_path, lines(turn(id="a")) + json.dumps(turn(id="b")).encode())
    assert (done.traces, [r["id"] for r in back]) == (2, ["a", "b"])


def test_line_separators_inside_a_text_end_no_line(tmp_path: Path) -> None:
    record = turn(id="a", prompt="one\u2028two\u2029three\x85four\x0bfive")
    data = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    done, back = imported(tmp_path, data)
    assert (done.lines, done.skipped) == (1, [])
    assert back == [record]


def test_empty_lines_and_windows_line_ends_are_passed_over(tmp_path: Path) -> None:
    data = lines(turn(id="a"), b"", b"  ", turn(id="b")).replace(b"\n", b"\r\n")
    done, _ = imported(tmp_path, data)
    assert (done.traces, done.skipped) == (2, [])


def test_numbers_that_are_none_and_huge_ones_come_through(tmp_path: Path) -> None:
    data = json.dumps(turn(id="a", metrics={"m": float("nan")}, info={"big": 2**80})).encode()
    _, [back] = imported(tmp_path, data)
    assert back["info"] == {"big": 2**80}
    assert json.dumps(back["metrics"]) == '{"m": NaN}'


def test_nesting_beyond_reason_costs_its_line_only(tmp_path: Path) -> None:
    deep = json.dumps(turn(id="deep")).replace('"info": {}', '"info": ' + "[" * 50_000 + "]" * 50_000)
    done, back = imported(tmp_path, lines(deep.encode(), turn(id="a")))
    assert [r["id"] for r in back] == ["a"]
    assert [n for n, _ in done.skipped] == [1]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"not json\n", b"[]\n"])
def test_a_file_without_any_trace_is_refused_and_leaves_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "traces.jsonl").write_bytes(data)
    with pytest.raises(BadInput, match=r"traces\.jsonl: \d+ lines and no Verifiers trace among them"):
        import_file(tmp_path / "traces.jsonl", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["nothing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"expected Verifiers' traces\.jsonl"):
        import_file(tmp_path / name, tmp_path / "run")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(lines(turn()))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RunConflict, match="is not empty; choose a new folder"):
        import_file(tmp_path / "traces.jsonl", tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]
    with pytest.raises(RunConflict):
        import_file(tmp_path / "traces.jsonl", tmp_path / "traces.jsonl")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done, _ = imported(tmp_path, lines(turn()))
    assert done.traces == 1


def test_progress_is_told_by_line(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(lines(turn(id="a"), b"{", turn(id="b")))
    told: list[int] = []
    import_file(tmp_path / "traces.jsonl", tmp_path / "run", progress=told.append)
    assert told == [1, 3]
