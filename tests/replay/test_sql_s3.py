"""SQL and annotations over a run in an object store: a real S3 API on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from rolltape.replay import open_run
from rolltape.replay.sql import scores, sql
from rolltape.schema import Damaged
from rolltape.schema.errors import RunConflict
from rolltape.schema.storage import place

pytest.importorskip("moto")


@pytest.fixture
def remote(bucket: str, demo_run: Path) -> str:
    """URL of a copy of the demo run."""
    return uploaded(demo_run, f"{bucket}/demo")


def uploaded(root: Path, url: str) -> str:
    """Copy a run to a store."""
    target: Any = place(url)
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        (target / str(file.relative_to(root))).put(file.read_bytes())
    return url


def test_answers_are_those_of_the_folder(remote: str, demo_run: Path) -> None:
    local, run = open_run(demo_run), open_run(remote)
    for query in (
        "SELECT step, name, avg(value) FROM rewards GROUP BY ALL ORDER BY ALL",
        "SELECT role, count(*), sum(len(content)) FROM nodes GROUP BY role ORDER BY role",
        "SELECT avg(logprob), count(*) FROM tokens WHERE step = 1",
        "SELECT step, count(*), sum(response_length) FROM samples GROUP BY step ORDER BY step",
        "SELECT run, count(*) FROM groups GROUP BY run",
    ):
        assert run.sql(query).fetchall() == local.sql(query).fetchall()
    both = sql([local, run], "SELECT run, count(*) FROM traces GROUP BY run ORDER BY run").fetchall()
    assert [count for _, count in both] == [48, 48]
    assert len({name for name, _ in both}) == 2


def test_questions_about_scores_fetch_commits_and_no_file(
    bucket: str, kept_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(uploaded(kept_run, f"{bucket}/scores"))
    monkeypatch.setattr(scores, "_read", lambda *_: pytest.fail("a file was read"))
    assert run.commits()
    assert run.sql("SELECT count(*), sum(reward) FROM traces").fetchall() == [(20, 190.0)]


def test_an_object_that_is_missing_or_cut_is_named(remote: str) -> None:
    target: Any = place(remote)
    path = target / "traces" / "train" / "00000001.0.main.parquet"
    data = path.read_bytes()
    path.put(data[:-1])
    with pytest.raises(Damaged, match=r"00000001\.0\.main\.parquet"):
        open_run(remote).sql("SELECT count(*) FROM nodes")
    path.unlink()
    with pytest.raises(Damaged, match=r"00000001\.0\.main\.parquet"):
        open_run(remote).sql("SELECT count(*) FROM nodes")


def test_annotations_are_put_once_and_joined(remote: str) -> None:
    run = open_run(remote)
    traces = run.sql("SELECT trace_id, num_sampled FROM traces ORDER BY trace_id").fetchall()
    run.annotate("x", {"trace_id": [t for t, _ in traces], "lp": [[0.5] * n for _, n in traces]})
    query = "SELECT count(*), sum(list_count(a.lp)) FROM traces t JOIN annotation_x a USING (run, trace_id)"
    assert open_run(remote).sql(query).fetchall() == [(48, sum(n for _, n in traces))]
    with pytest.raises(RunConflict, match="already"):
        run.annotate("x", {"trace_id": [traces[0][0]], "v": [1]})
    run.annotate("x", {"trace_id": [traces[0][0]], "v": [1]}, overwrite=True)
    assert open_run(remote).sql("SELECT v FROM annotation_x").fetchall() == [(1,)]
    files = fs.FileSelector(f"{remote.removeprefix('s3://')}/annotations/x")
    target: Any = place(remote)
    assert len(target.files.get_file_info(files)) == 4
