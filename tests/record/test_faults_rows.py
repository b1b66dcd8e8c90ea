"""Rows that are damaged while the recorder lives, and traces that nobody expected."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_build import opened
from record_build import (
    LONG,
    at,
    checked,
    commit,
    counts,
    dispositions,
    emitted,
    records_of,
    same,
    trace,
    unsynced,
)

from rolltape.record.recorder import NotRecorded, Recorder, StoreOptions
from rolltape.record.writing import limits
from rolltape.record.writing import store as store_module
from rolltape.record.writing.journal import Record, read_journal
from rolltape.record.writing.recover import recover
from rolltape.replay import open_run
from rolltape.schema import Outcome, Step, decode, frames
from rolltape.schema.encoding import row_of
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import TRACE
from rolltape.schema.table import rows_to_table

# -- damage while the recorder lives


def test_a_journaled_row_that_does_not_read_back_is_lost_alone(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "run", keep_bytes=0)
    recorder.started("train", 0, 3)
    for n in "abc":
        recorder.add(trace(n), at(0))
    [journal] = (tmp_path / "run" / "journal").glob("*.journal")
    [_, damaged, _] = [r for r in read_journal(journal) if isinstance(r, Record) and r.row]
    with journal.open("r+b") as file:
        file.seek(damaged.offset + damaged.bytes - 1)
        file.write(b"\xff")
    assert recorder.rows("train", 0).column("trace_id").to_pylist() == ["a", "c"]
    done = commit(recorder, 0, emitted(*"abc"))
    assert done.step.counts == {"started": 3, "emitted": 2, "lost": 1}
    assert recorder.close().lost == 1
    assert records_of(tmp_path / "run").keys() == {"a", "c"}
    checked(tmp_path / "run")


def test_a_row_that_no_table_can_be_made_of_is_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltape.record.writing import parts

    real = rows_to_table

    def picky(rows: list[Any]) -> Any:
        if any(r.values["trace_id"] == "b" for r in rows):
            raise ValueError("nobody knows why")
        return real(rows)

    recorder = opened(tmp_path / "run")
    for n in "abc":
        recorder.add(trace(n), at(0))
    monkeypatch.setattr(parts, "rows_to_table", picky)
    assert commit(recorder, 0, emitted(*"abc")).step.counts == {"started": 3, "emitted": 2, "lost": 1}
    recorder.close()
    assert records_of(tmp_path / "run").keys() == {"a", "c"}
    checked(tmp_path / "run")


def test_a_trace_that_cannot_be_taken_apart_is_lost_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = row_of

    def picky(record: Any, *rest: Any) -> Any:
        if record["id"] == "b":
            raise RuntimeError("nobody knows why")
        return real(record, *rest)

    monkeypatch.setattr("rolltape.record.recorder.row_of", picky)
    recorder = opened(tmp_path / "run")
    recorder.started("train", 0, 3)
    assert recorder.add(trace("a"), at(0))
    assert not recorder.add(trace("b"), at(0))
    assert asyncio.run(recorder.trace(trace("c"), at(0)))
    assert recorder.status.lost == 1
    assert commit(recorder, 0, emitted(*"abc")).step.counts == {"started": 3, "emitted": 2, "lost": 1}
    recorder.close()
    strict = opened(tmp_path / "run", strict=True)
    with pytest.raises(NotRecorded, match="trace b could not be recorded: RuntimeError: nobody knows why"):
        strict.add(trace("b"), at(1))
    strict.close()


def test_the_journal_does_not_grow_where_steps_always_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous trainer begins a step before the last one ends, so that no moment is without an open one."""
    unsynced(monkeypatch)
    monkeypatch.setattr(store_module, "_DEAD_BYTES", 30_000)
    root = tmp_path / "run"
    recorder = opened(root, keep_bytes=0)
    [journal] = (root / "journal").glob("*.journal")
    sizes = []
    recorder.started("train", 0)
    recorder.add(trace("t0", tokens=500), at(0))
    for step in range(60):
        recorder.started("train", step + 1)
        recorder.add(trace(f"t{step + 1}", tokens=500), at(step + 1))
        commit(recorder, step, emitted(f"t{step}"))
        sizes.append(journal.stat().st_size)
    assert max(sizes) < 60_000
    shutil.copytree(root, tmp_path / "copy")
    recover(tmp_path / "copy")
    assert records_of(tmp_path / "copy").keys() == {f"t{i}" for i in range(61)}
    assert counts(tmp_path / "copy")["started"] == 61
    assert dispositions(tmp_path / "copy")["t60"] == "interrupted"
    commit(recorder, 60, emitted("t60"))
    recorder.close()
    assert records_of(root).keys() == {f"t{i}" for i in range(61)}
    checked(root)


def test_a_trace_that_comes_while_its_step_ends_is_in_it_or_refused(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "run")

    async def go(step: int) -> int:
        tasks = [asyncio.create_task(recorder.trace(trace(f"{step}.{i}"), at(step))) for i in range(8)]
        for _ in range(step):
            await asyncio.sleep(0)
        outcomes = emitted(*(f"{step}.{i}" for i in range(8)))
        await recorder.commit("train", step, groups=[], outcomes=outcomes, record=Step())
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(a is True or isinstance(a, BadInput) for a in answers)
        return sum(a is True for a in answers)

    recorded = [asyncio.run(go(step)) for step in range(12)]
    recorder.close()
    assert len(records_of(tmp_path / "run")) == sum(recorded)
    assert not list((tmp_path / "run").rglob("*.journal"))
    checked(tmp_path / "run")


# -- traces that nobody expected


def deep(levels: int) -> Any:
    value: Any = "the bottom"
    for _ in range(levels):
        value = {"down": [value]}
    return value


def endless() -> Any:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    "info",
    [
        pytest.param(lambda: {"x": object()}, id="an object"),
        pytest.param(lambda: {"x": {1, 2}, ("a", 1): lambda: 0}, id="a set, a function, a key that is no text"),
        pytest.param(endless, id="a cycle"),
        pytest.param(lambda: deep(200), id="nested deeply"),
        pytest.param(lambda: deep(5000), id="nested more deeply than Python goes"),
        pytest.param(lambda: {"x": b"\xff\x00", "n": 10**5000, "nan": float("nan")}, id="bytes, a long integer, NaN"),
        pytest.param(lambda: {"x": "\ud800", "y": "z" * 10**6}, id="a lone surrogate, long text"),
    ],
)
def test_whatever_lies_in_info_the_trace_is_recorded_and_survives(tmp_path: Path, info: Callable[[], Any]) -> None:
    from rolltape.schema import to_trace

    recorder = opened(tmp_path / "run")
    live = to_trace(trace("live"))
    live.info = info()
    assert asyncio.run(recorder.trace(live, at(0)))
    assert recorder.add(trace("plain", info=info()), at(0))
    assert recorder.rows("train", 0).num_rows == 2
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    recover(tmp_path / "copy")
    commit(recorder, 0, emitted("live", "plain"))
    recorder.close()
    for root in (tmp_path / "run", tmp_path / "copy"):
        found = records_of(root)
        assert found.keys() == {"live", "plain"}
        assert all(found[n]["nodes"] == trace(n)["nodes"] for n in found)
        checked(root)
    assert same(records_of(tmp_path / "run"), records_of(tmp_path / "copy"))


def test_a_text_longer_than_parquet_holds_is_cut_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LARGEST_COLUMN", 10_000)
    recorder = opened(tmp_path / "run")
    long = trace("long", text="é" * 30_000, info={"x": "y" * 20_000})
    long["nodes"][0]["message"]["content"] = "short"
    long["errors"] = [{"type": "E", "message": "m" * 12_000, "traceback": None}]
    assert recorder.add(long, at(0))
    assert recorder.add(trace("other"), at(0))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    recover(tmp_path / "copy")
    assert commit(recorder, 0, emitted("long", "other")).commit is not None
    recorder.close()
    for root in (tmp_path / "run", tmp_path / "copy"):
        row, other = open_run(root).table().to_pylist()
        assert (row["trace_id"], other["problems"]) == ("long", None)
        assert row["problems"] == [
            "error_messages: 12,000 bytes are more than a Parquet value holds; cut to 10,000",
            "info: 20,008 bytes of JSON are more than a Parquet value holds and were left out",
            "node_content[1]: 60,000 bytes are more than a Parquet value holds; cut to 9,995",
        ]
        assert row["node_content"] == ["short", "é" * 4997]
        assert row["error_messages"] == ["m" * 10_000]
        assert row["info"] is None
        assert row["token_ids"] == [1, 2, 0, 7, 14]
        assert [r["id"] for r in decode(open_run(root).table().select(TRACE.arrow.names))] == ["long", "other"]
        checked(root)


def test_many_texts_that_are_too_long_together_are_cut_where_they_are_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGEST_COLUMN", 1000)
    nodes = [trace("x")["nodes"][0] for _ in range(5)]
    for node, size in zip(nodes, (10, 900, 200, 0, 700), strict=True):
        node["message"] = {"role": "user", "content": "x" * size}
    row = limits.fit(row_of(trace("t", nodes=nodes)))
    sizes = [len(t) for t in row.nodes["node_content"]]
    assert sizes == [10, 395, 200, 0, 395]
    assert sum(sizes) == 1000


def test_a_row_that_no_frame_holds_is_not_durable_but_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = opened(tmp_path / "run")
    assert recorder.add(trace("a"), at(0))
    monkeypatch.setattr(frames, "LARGEST", 5000)
    assert not recorder.add(trace("b", tokens=5000), at(0))
    assert "a journal frame holds at most 5000" in str(recorder.status.error)
    assert recorder.rows("train", 0).num_rows == 2
    done = commit(recorder, 0, emitted("a", "b"))
    assert done.commit is not None
    assert done.commit.sums["not_durable"] == 1
    recorder.close()
    assert len(records_of(tmp_path / "run")["b"]["nodes"][1]["token_ids"]) == 5000


def test_outcomes_that_hooks_fill_with_anything_are_written(tmp_path: Path) -> None:
    import numpy as np

    recorder = opened(tmp_path / "run")
    for n in "abc":
        recorder.add(trace(n), at(0))
    outcomes = [
        Outcome(trace_id="a", disposition="emitted", handed_reward=np.float32(0.5), logprobs=[-1.0, -2.0, -3.0]),  # type: ignore[arg-type]
        Outcome(trace_id="b", disposition="error", reason="bad \ud800 text", handed_reward={"x": {1, 2}}),
        Outcome(trace_id="c", disposition="filtered", remove_sample=[np.True_]),  # type: ignore[arg-type]
    ]
    record = Step(options={"path": Path("x")}, batch=(np.int64(3),))  # type: ignore[arg-type]
    done = recorder.commit_now("train", 0, groups=[], outcomes=outcomes, record=record)
    assert done.error is None
    recorder.close()
    rows = open_run(tmp_path / "run").table().to_pylist()
    assert [r["handed_reward"] for r in rows] == ["0.5", '{"x":[1,2]}', None]
    assert (rows[1]["reason"], rows[2]["remove_sample"]) == ("bad \ufffd text", [True])
    assert open_run(tmp_path / "run").steps()[0].batch == (3,)


def test_traces_of_no_nodes_are_recorded(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "run")
    assert recorder.add(trace("a", nodes=[]), at(0))
    commit(recorder, 0, [Outcome(trace_id="a", disposition="empty")])
    recorder.close()
    assert records_of(tmp_path / "run")["a"]["nodes"] == []
    checked(tmp_path / "run")


def test_twenty_thousand_tiny_traces_make_one_step_of_few_row_groups(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "run", store=StoreOptions(fsync="never"))
    names = [f"{i:05}" for i in range(20_000 if LONG else 4000)]
    tiny = {"task": {"type": "T", "data": {"idx": 0}}, "nodes": [], "rewards": {}}
    for i, n in enumerate(names):
        assert recorder.add({"id": n, **tiny}, at(0, group_index=i // 8, rollout_index=i % 8))
    done = commit(recorder, 0, [Outcome(trace_id=n, disposition="empty") for n in names])
    assert done.commit is not None
    recorder.close()
    run = open_run(tmp_path / "run")
    batches = list(run.batches(columns=["trace_id"]))
    assert [t for b in batches for t in b.column(0).to_pylist()] == names
    assert len(batches) <= 8
    assert done.commit.file.bytes < 60 * len(names)
