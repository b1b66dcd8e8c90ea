"""Verifying annotations: are their files the ones that were written, and do they fit the traces they are about?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_build import by_task, codes, put_run, put_step, turn

from rolltape.replay import open_run
from rolltape.replay.annotations import annotations_of
from rolltape.replay.verification.verify import verify
from rolltape.schema.parquet import Written
from rolltape.schema.paths import RunPaths
from rolltape.schema.sealed import seal

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two traces of 6 tokens and 2 nodes with an annotation of each level."""
    put_run(tmp_path)
    records = [turn(id=id, idx=0) for id in ("a", "b")]
    put_step(tmp_path, 0, records, groups=by_task(records))
    opened = open_run(tmp_path)
    tokens = opened.table().column("num_tokens")[0].as_py()
    opened.annotate("labels", {"trace_id": ["a"], "note": ["good"], "logprobs": [[0.0] * tokens]})
    opened.annotate("judged", {"trace_id": ["a", "b"], "node": [1, 1], "ok": [True, False]})
    opened.annotate("seen", {"trace_id": ["a", "a"], "position": [0, 1], "x": [1, 2]})
    return tmp_path


def rewrite(run: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Another table in the place of an annotation's, with a record that knows it."""
    annotation = annotations_of(open_run(run))[name]
    folder = RunPaths(run).annotations / name
    path, record = folder / annotation.file, folder / f"{annotation.version}.json"
    table = change(pq.read_table(path))
    pq.write_table(table, path)
    data = path.read_bytes()
    written = Written(table.num_rows, len(data), hashlib.sha256(data).hexdigest())
    record.write_bytes(seal({"schema": "1.0", **replace(annotation, written=written).to_dict()}))


def test_sound_annotations_are_counted_and_clean(run: Path, rolltape: Cli) -> None:
    code, out, _ = rolltape("verify", run)
    assert (code, out.splitlines()[-1]) == (0, "clean")
    assert ", 3 annotations; " in out
    assert verify(open_run(run)).annotations == 3


@pytest.mark.parametrize("what", ["flip", "cut", "missing", "record", "record missing a field"])
def test_an_annotation_that_is_not_as_it_was_written_is_named_and_the_others_are_read(run: Path, what: str) -> None:
    folder = RunPaths(run).annotations / "labels"
    [file], [record] = folder.glob("*.parquet"), folder.glob("*.json")
    data = file.read_bytes()
    if what == "flip":
        file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif what == "cut":
        file.write_bytes(data[:-1])
    elif what == "missing":
        file.unlink()
    elif what == "record":
        record.write_bytes(record.read_bytes()[:-20])
    else:
        record.write_bytes(seal({"schema": "1.0", "name": "labels"}))
    [finding] = verify(open_run(run)).findings
    assert (finding.code, finding.severity) == ("annotation", "error")
    assert str(folder) in str(finding.file)


@pytest.mark.parametrize(
    ("name", "column", "values", "says"),
    [
        ("labels", "trace_id", ["z"], "1 row about traces that are not in the run, such as z"),
        (
            "labels",
            "logprobs",
            [[0.0]],
            "1 list of 'logprobs' not over all tokens of their traces; the first has 1 items",
        ),
        ("judged", "node", [1, 9], "1 row about a node that its trace does not have"),
        ("judged", "trace_id", ["a", "a"], "1 row whose trace_id, node came before"),
        ("seen", "position", [-1, 1], "1 row about a position that its trace does not have"),
    ],
)
def test_what_does_not_fit_its_traces_is_found(
    run: Path, name: str, column: str, values: list[object], says: str
) -> None:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, pa.array(values, table.schema.field(column).type))

    rewrite(run, name, change)
    [finding] = verify(open_run(run)).findings
    assert finding.code == "annotation"
    assert says in finding.message


def test_columns_that_are_not_those_of_the_record_are_found(run: Path) -> None:
    rewrite(run, "labels", lambda table: table.rename_columns(["trace_id", "other", "logprobs"]))
    [finding] = verify(open_run(run)).findings
    assert "['trace_id', 'other', 'logprobs'], but its record says ['trace_id', 'note', 'logprobs']" in finding.message


def test_traces_of_a_damaged_step_are_not_reported_as_unknown(run: Path) -> None:
    [part] = (c.part for c in open_run(run).all_commits)
    RunPaths(run).parquet(part).unlink()
    assert codes(verify(open_run(run)).findings) == ["file"]


def test_only_the_newest_version_counts(run: Path, rolltape: Cli) -> None:
    [old] = (RunPaths(run).annotations / "labels").glob("*.parquet")
    open_run(run).annotate("labels", {"trace_id": ["b"], "note": ["bad"]}, overwrite=True)
    old.write_bytes(b"")
    assert json.loads(rolltape("verify", run, "--json")[1])["findings"] == []
