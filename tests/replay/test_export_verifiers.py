"""Exported lines are the records as they were, and Verifiers' own reader and `replay` take them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zstandard
from replay_build import SCENARIOS, TRACES, Record, by_task, put_part, put_run, put_step, recorded, turn

from rolltape.replay import cli, open_run
from rolltape.replay.chosen import chosen_commits
from rolltape.replay.exports.config import toml, write_config
from rolltape.replay.exports.exported import Exported
from rolltape.replay.exports.verifiers import (
    ARRAYS,
    INCOMPLETE,
    OWN_EPISODE,
    PROMPT,
    UNSCORED,
    _pieces,
    write_verifiers,
    writes_episodes,
)
from rolltape.schema import ROW, TRACE, Context, Step, decode, encode
from rolltape.schema.errors import BadInput
from rolltape.schema.jsontext import unpack_extra
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.sealed import seal


def put(root: Path, records: list[Record], version: str | None = None) -> Path:
    """A run of `records` as one step."""
    put_run(root)
    table = encode(records, [Context(run="r1", verifiers_version=version)] * len(records))
    put_part(root, Part("train", 0, 0, "main"), table, by_task(records), [], Step())
    return root


def export(root: Path, out: Path | str, **options: Any) -> Exported:
    run = open_run(root)
    return write_verifiers(run, chosen_commits(run), str(out), **options)


def brought_in(file: Path, root: Path) -> None:
    """Import a file by the command line, as its users do."""
    words = ["rolltape", "import", str(file), "--run", str(root)]
    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(sys, "argv", words)
        cli.main()


def lines(path: Path) -> list[Record]:
    with path.open("rb") as file:
        return [json.loads(line) for line in file]


def read_by_verifiers(folder: Path) -> list[Any]:
    from verifiers.v1.cli.output import read_traces
    from verifiers.v1.trace import WireTrace

    return list(read_traces(folder, WireTrace))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_line_is_the_record_as_it_was_and_verifiers_reads_it(scenario: str, tmp_path: Path) -> None:
    records = recorded(scenario)
    done = export(put(tmp_path / "run", records, "0.2.0"), tmp_path / "out" / "traces.jsonl")
    found = lines(tmp_path / "out" / "traces.jsonl")
    assert json.dumps(found) == json.dumps(records)  # key order, NaN and floats included
    assert done.notes == {}
    traces = read_by_verifiers(tmp_path / "out")
    assert json.dumps([t.to_record() for t in traces]) == json.dumps(records)


@pytest.mark.parametrize("release", ["0.2.1", "0.3.0", "0.4.0"])
@pytest.mark.parametrize("scenario", ["single_turn", "multi_branch"])
def test_later_releases_keep_their_record_inside_their_kind_of_line(
    release: str, scenario: str, tmp_path: Path
) -> None:
    records = [t for line in recorded(scenario, release) for t in line.get("traces", [line])]
    export(put(tmp_path / "run", records), tmp_path / "x.jsonl")
    found = lines(tmp_path / "x.jsonl")
    assert [("traces" in line) for line in found] == [release != "0.2.1"] * len(records)
    assert json.dumps([t for line in found for t in line.get("traces", [line])]) == json.dumps(records)


@pytest.mark.parametrize(
    ("release", "episodes"),
    [("0.2.0", False), ("0.2.1.dev3", False), ("0.1.14", False), ("0.3.0", True), ("0.10.0", True), ("1.0", True)],
)
def test_episodes_begin_with_release_0_3(release: str, episodes: bool) -> None:
    assert writes_episodes(release) is episodes


def test_import_of_an_export_is_the_identity_on_rows(tmp_path: Path) -> None:
    for scenario in SCENARIOS:
        brought_in(TRACES / "0.2.0" / f"{scenario}.jsonl", tmp_path / scenario / "a")
        export(tmp_path / scenario / "a", tmp_path / scenario / "x.jsonl")
        brought_in(tmp_path / scenario / "x.jsonl", tmp_path / scenario / "b")
        a, b = (open_run(tmp_path / scenario / name).table() for name in "ab")
        columns = [name for name in ROW.arrow.names if name != "run"]
        assert a.num_rows == len(recorded(scenario))
        for name in columns:  # text of the values: NaN equals NaN
            assert str(a.column(name).to_pylist()) == str(b.column(name).to_pylist()), name


def same_rows(a: Path, b: Path) -> None:
    """Whether two runs hold the same rows, but for the run they are of. Text of the values: NaN equals NaN."""
    first, second = (open_run(root).table().sort_by("trace_id") for root in (a, b))
    assert first.num_rows > 0
    for name in (n for n in ROW.arrow.names if n != "run"):
        kept, found = first.column(name).to_pylist(), second.column(name).to_pylist()
        if name == "extra":
            kept, found = ([x if x is None else unpack_extra(x) for x in values] for values in (kept, found))
        assert str(kept) == str(found), name


WRITTEN = sorted(f.relative_to(TRACES) for f in TRACES.glob("*/written_by_verifiers/*.jsonl"))


@pytest.mark.parametrize("file", WRITTEN, ids=str)
def test_what_verifiers_wrote_comes_back_though_its_reader_wants_it_otherwise(file: Path, tmp_path: Path) -> None:
    brought_in(TRACES / file, tmp_path / "a")
    export(tmp_path / "a", tmp_path / "x.jsonl")
    brought_in(tmp_path / "x.jsonl", tmp_path / "b")
    same_rows(tmp_path / "a", tmp_path / "b")


UNREADABLE: dict[str, Record] = {
    "reward": {"rewards": {"b": None, "a": 1.0, "z": None}},
    "metric": {"metrics": {"m": None}},
    "both": {"rewards": {"b": None}, "metrics": {"m": 2.0, "n": None}, "info": {"x": [1]}},
    "no info": {"rewards": {"b": None}, "info": ...},
    "prompt": {"task": {"type": "T", "data": {"idx": 3}}},
    "own word": {"metrics": {"m": None}, "info": {"rolltape_export": "mine"}},
}


@pytest.mark.parametrize("change", UNREADABLE)
def test_an_unreadable_record_is_read_after_export_and_itself_after_import(change: str, tmp_path: Path) -> None:
    record = {k: v for k, v in {**turn(id="a"), **UNREADABLE[change]}.items() if v is not ...}
    (tmp_path / "s.jsonl").write_text(json.dumps(record) + "\n")
    brought_in(tmp_path / "s.jsonl", tmp_path / "a")
    export(tmp_path / "a", tmp_path / "out" / "traces.jsonl")
    assert len(read_by_verifiers(tmp_path / "out")) == 1
    brought_in(tmp_path / "out" / "traces.jsonl", tmp_path / "b")
    if change != "own word":
        same_rows(tmp_path / "a", tmp_path / "b")
    [back] = decode(open_run(tmp_path / "b").table(columns=TRACE.arrow.names))
    if change != "own word":
        assert json.dumps(back) == json.dumps(record)
    else:
        assert back["info"] == record["info"]


def test_what_was_scored_between_export_and_import_stays(tmp_path: Path) -> None:
    brought_in(put_lines(tmp_path, turn(id="a", rewards={"x": None, "y": None})), tmp_path / "a")
    export(tmp_path / "a", tmp_path / "x.jsonl")
    [line] = lines(tmp_path / "x.jsonl")
    line["rewards"] = {"y": 0.5, "new": 1.0}
    brought_in(put_lines(tmp_path, line), tmp_path / "b")
    [back] = decode(open_run(tmp_path / "b").table(columns=TRACE.arrow.names))
    assert back["rewards"] == {"x": None, "y": 0.5, "new": 1.0}
    assert "rolltape_export" not in back["info"]


@pytest.mark.parametrize("task", [{"data": "text"}, {"data": None}, {}, {"data": {}}, {"data": {"prompt": "kept"}}])
@pytest.mark.parametrize("said", [{"without": ["prompt", "info"]}, {"rewards": []}, {"rewards": 3}, {"other": []}, []])
def test_whatever_a_line_says_was_changed_its_import_goes_on(task: Record, said: Any, tmp_path: Path) -> None:
    record = turn(id="a", info={"rolltape_export": said}) | {"task": {"type": "T"} | task}
    brought_in(put_lines(tmp_path, record, turn(id="b")), tmp_path / "a")
    back = decode(open_run(tmp_path / "a").table(columns=TRACE.arrow.names))
    assert sorted(r["id"] for r in back) == ["a", "b"]
    [a] = [r for r in back if r["id"] == "a"]
    assert a["task"] == record["task"]
    assert ("rolltape_export" in a.get("info", {})) == (said in ({"rewards": 3}, {"other": []}, []))


def put_lines(folder: Path, *records: Record) -> Path:
    (folder / "s.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder / "s.jsonl"


@pytest.mark.parametrize("scenario", ["single_turn", "multi_branch"])
def test_a_trace_line_of_a_release_that_writes_episodes_is_one_again(scenario: str, tmp_path: Path) -> None:
    records = [t for line in recorded(scenario, "0.4.0") for t in line["traces"]]
    brought_in(put_lines(tmp_path, *records), tmp_path / "a")
    done = export(tmp_path / "a", tmp_path / "x.jsonl")
    assert done.notes == {OWN_EPISODE: len(records)}
    brought_in(tmp_path / "x.jsonl", tmp_path / "b")
    same_rows(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("release", ["0.2.1", "0.3.0", "0.4.0"])
@pytest.mark.parametrize("scenario", ["single_turn", "multi_branch"])
def test_lines_and_rows_of_later_releases_come_back_whole(release: str, scenario: str, tmp_path: Path) -> None:
    source = TRACES / release / f"{scenario}.jsonl"
    brought_in(source, tmp_path / "a")
    done = export(tmp_path / "a", tmp_path / "x.jsonl")
    assert sorted(map(json.dumps, lines(tmp_path / "x.jsonl"))) == sorted(map(json.dumps, lines(source)))
    assert done.notes == {}
    brought_in(tmp_path / "x.jsonl", tmp_path / "b")
    a, b = (open_run(tmp_path / name).table() for name in "ab")
    for name in (n for n in ROW.arrow.names if n != "run"):
        assert str(a.column(name).to_pylist()) == str(b.column(name).to_pylist()), name


def episodes() -> list[Record]:
    """Three Episode lines: of one trace, of two whose tasks differ, of one."""
    found = lines(TRACES / "0.4.0" / "single_turn.jsonl")
    found[1]["traces"].append(found.pop(3)["traces"][0])
    assert found[1]["traces"][0]["task"] != found[1]["traces"][1]["task"]
    return found


def test_an_episode_of_several_traces_is_one_line_again_though_its_rows_lie_apart(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes()))
    brought_in(tmp_path / "s.jsonl", tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "x.jsonl")
    assert [(f.lines, f.traces) for f in done.files] == [(3, 4)]
    assert sorted(map(json.dumps, lines(tmp_path / "x.jsonl"))) == sorted(map(json.dumps, episodes()))


def test_an_episode_that_is_not_all_there_is_written_with_what_is(tmp_path: Path) -> None:
    whole = episodes()
    (tmp_path / "s.jsonl").write_text(json.dumps(whole[1]) + "\n")
    brought_in(tmp_path / "s.jsonl", tmp_path / "all")
    run = open_run(tmp_path / "all")
    rows = run.table(columns=TRACE.arrow.names)
    put_run(tmp_path / "part", run=run.run_id)
    put_part(tmp_path / "part", Part("train", 0, 0, "main"), rows.slice(1, 1), [], [], Step())
    done = export(tmp_path / "part", tmp_path / "x.jsonl")
    [line] = lines(tmp_path / "x.jsonl")
    [kept] = line["traces"]
    assert kept in whole[1]["traces"]
    assert {k: v for k, v in line.items() if k != "traces"} == {k: v for k, v in whole[1].items() if k != "traces"}
    assert done.notes == {INCOMPLETE: 1}


# -- what Verifiers' reader refuses though its writer wrote it


@pytest.mark.parametrize("scenario", ["multi_turn_user_sim", "errors", "single_turn", "tools"])
def test_what_verifiers_wrote_and_cannot_read_again_is_made_readable(scenario: str, tmp_path: Path) -> None:
    brought_in(TRACES / "0.2.0" / "written_by_verifiers" / f"{scenario}.jsonl", tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "out" / "traces.jsonl")
    assert done.notes == {"multi_turn_user_sim": {PROMPT: 4}, "errors": {UNSCORED: 1}}.get(scenario, {})
    traces = read_by_verifiers(tmp_path / "out")
    assert {t.id for t in traces} == {r["id"] for r in recorded(scenario)}
    if scenario == "multi_turn_user_sim":
        assert [t.task.data.prompt for t in traces] == [None] * 4


def test_a_null_reward_is_left_out_and_never_becomes_zero(tmp_path: Path) -> None:
    record = turn(id="a", rewards={"good": 1.0, "none": None}, metrics={"m": None})
    done = export(put(tmp_path / "run", [record]), tmp_path / "traces.jsonl")
    [line] = lines(tmp_path / "traces.jsonl")
    assert (line["rewards"], line["metrics"], done.notes) == ({"good": 1.0}, {}, {UNSCORED: 1})
    assert read_by_verifiers(tmp_path)[0].rewards == {"good": 1.0}


def test_raw_arrays_are_left_out_and_counted(tmp_path: Path) -> None:
    record = turn(id="a")
    record["nodes"][1]["routed_experts"] = {"__nd__": True, "data": b"\x00\xff", "shape": [2], "dtype": "uint8"}
    done = export(put(tmp_path / "run", [record, turn(id="b")]), tmp_path / "traces.jsonl")
    assert done.notes == {ARRAYS: 1}
    assert [line["id"] for line in lines(tmp_path / "traces.jsonl")] == ["a", "b"]
    assert "routed_experts" not in lines(tmp_path / "traces.jsonl")[0]["nodes"][1]
    assert len(read_by_verifiers(tmp_path)) == 2


def test_lines_are_ascii_so_that_no_reader_breaks_them(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c \ud800 \U0001f916"
    record = turn(id="a", data={"name": text})
    export(put(tmp_path / "run", [record]), tmp_path / "x.jsonl")
    data = (tmp_path / "x.jsonl").read_bytes()
    assert data.isascii()
    assert data.count(b"\n") == 1
    assert json.loads(data)["task"]["data"]["name"] == text


# -- several releases, compression, memory


def test_a_mix_of_releases_is_refused_or_goes_to_a_file_each(tmp_path: Path) -> None:
    old = [turn(id="a"), turn(id="b")]
    new = [t for line in recorded("single_turn", "0.4.0") for t in line["traces"]]
    root = put(tmp_path / "run", [old[0], *new, old[1]])
    with pytest.raises(BadInput, match=r"several Verifiers releases \(2 of 0\.2\.0, 4 of 0\.4\.0\).*\{release\}"):
        export(root, tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()
    done = export(root, tmp_path / "x-{release}.jsonl")
    assert [(f.path.name, f.traces) for f in done.files] == [("x-0.2.0.jsonl", 2), ("x-0.4.0.jsonl", 4)]
    assert [line["id"] for line in lines(tmp_path / "x-0.2.0.jsonl")] == ["a", "b"]
    assert [line["traces"][0]["id"] for line in lines(tmp_path / "x-0.4.0.jsonl")] == [t["id"] for t in new]


def test_a_release_that_names_another_folder_stays_in_its_own(tmp_path: Path) -> None:
    hostile = [turn(id="a") | {"verifiers": {"version": "../../x"}}, turn(id="b") | {"verifiers": {"version": ".."}}]
    done = export(put(tmp_path / "run", hostile), tmp_path / "out" / "{release}" / "traces.jsonl")
    assert [f.path.relative_to(tmp_path / "out").parts[0] for f in done.files] == ["_", "__.._x"]
    twins = [turn(id="a") | {"verifiers": {"version": "a b"}}, turn(id="b") | {"verifiers": {"version": "a/b"}}]
    with pytest.raises(BadInput, match="would share a file"):
        export(put(tmp_path / "twins", twins), tmp_path / "{release}.jsonl")


def test_the_ending_chooses_compression(tmp_path: Path) -> None:
    root = put(tmp_path / "run", [turn(id="a"), turn(id="b")])
    for ending in ("jsonl", "jsonl.gz", "jsonl.zst"):
        export(root, tmp_path / f"x.{ending}")
    plain = (tmp_path / "x.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "x.jsonl.gz").read_bytes()) == plain
    with zstandard.open(tmp_path / "x.jsonl.zst", "rb") as file:
        assert file.read() == plain


def test_long_row_groups_are_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [turn(id=f"t{i}") for i in range(10)]
    table = encode(records)
    monkeypatch.setattr("rolltape.replay.exports.verifiers.TOKENS_AT_ONCE", 3 * table["num_tokens"][0].as_py())
    pieces = list(_pieces(table))
    assert [p.num_rows for p in pieces] == [3, 3, 3, 1]
    assert [r for p in pieces for r in decode(p)] == records


# -- Verifiers' replay

TASKSET = """
from verifiers.v1 import Task, TaskData, Taskset, TasksetConfig
from verifiers.v1.decorators import reward

__all__ = ["SortTaskset"]

class SortData(TaskData):
    info: dict

class AlphabetSortTask(Task[SortData]):
    @reward(weight=0.5)
    async def turns(self, trace) -> float:
        return float(trace.num_turns == self.data.info["num_turns"])

class SortTaskset(Taskset[AlphabetSortTask, TasksetConfig]):
    def load(self):
        return []
"""


def test_replay_scores_an_exported_run_of_a_user_simulator(tmp_path: Path) -> None:
    """The file that Verifiers wrote is refused by its own replay; the export of it is scored."""
    written = TRACES / "0.2.0" / "written_by_verifiers" / "multi_turn_user_sim.jsonl"
    brought_in(written, tmp_path / "run")
    attempt = RunPaths(tmp_path / "run").attempt(0)
    attempt.unlink()
    settings = {"environment": {"taskset": {"id": "sorting_probe"}}}
    put_once(attempt, seal({"attempt": 0, "start_step": 0, "started_at": 0.0, "settings": settings, "versions": {}}))
    (tmp_path / "sorting_probe.py").write_text(TASKSET)
    done = export(tmp_path / "run", tmp_path / "out" / "traces.jsonl")
    assert done.configs == [tmp_path / "out" / "config.toml"]
    assert done.next == [f"to score them again by Verifiers: replay {tmp_path}/out --output-dir {tmp_path}/out-again"]
    command = [sys.executable, "-m", "verifiers.v1.cli.replay", "out", "--output-dir", "again", "--rich", "False"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert [r["rewards"] for r in lines(tmp_path / "again" / "traces.jsonl")] == [{"turns": 0.5}] * 4


def test_the_configuration_goes_where_each_release_looks_for_it(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, [turn()], attempt=3)
    environment = {"taskset": {"id": "x", "n": None, "s": 'q"\\\n\x7f', "list": [1, 2.5, True]}, "odd key": {}}
    put_once(RunPaths(root).attempt(3), seal({"attempt": 3, "settings": {"environment": environment}}))
    run = open_run(root)
    commits = chosen_commits(run)
    assert write_config(run, commits, tmp_path / "other.jsonl", "0.2.0") is None
    old = write_config(run, commits, tmp_path / "old" / "traces.jsonl", "0.3.0")
    assert old == tmp_path / "old" / "config.toml"
    known = {**environment, "taskset": {k: v for k, v in environment["taskset"].items() if v is not None}}
    assert tomllib.loads(old.read_text()) == known
    assert write_config(run, commits, tmp_path / "old" / "traces.jsonl", "0.3.0") is None  # there already
    new = write_config(run, commits, tmp_path / "new" / "traces.jsonl", "0.3.1")
    assert new == tmp_path / "new" / "configs" / "resolved" / "eval.json"
    assert json.loads(new.read_text()) == environment


@pytest.mark.parametrize(("release", "config"), [("0.2.0", "config.toml"), ("0.4.0", "ENV.toml")])
def test_a_taskset_inside_a_package_is_said_to_be_none_that_replay_finds(
    tmp_path: Path, release: str, config: str
) -> None:
    root = put(tmp_path / "run", [turn()], release)
    attempt = RunPaths(root).attempt(0)
    attempt.unlink()
    put_once(attempt, seal({"attempt": 0, "settings": {"environment": {"taskset": {"id": "a.package"}}}}))
    [sentence] = export(root, tmp_path / "out" / "traces.jsonl").next
    assert sentence.startswith(
        "Verifiers' replay finds no taskset inside a package, such as a.package; to score them again: "
    )
    command = sentence.rpartition(": ")[2].split()
    assert command[:3] == ["rolltape", "rescore", str(root)]
    assert Path(command[4]).name == config


def test_toml_of_every_kind_of_value() -> None:
    values = {"a": 1, "b": -0.5, "c": 1e300, "d": float("inf"), "e": "é\U0001f916\t", "f": [[], {"x": {}}], "g": None}
    assert tomllib.loads(toml(values)) == {k: v for k, v in values.items() if v is not None}
