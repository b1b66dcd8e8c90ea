"""Recording into an object store: an S3 server on this machine, also behind a road that cuts, refuses and loses answers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from record_build import at, checked, commit, dispositions, emitted, record_step, records_of, trace
from record_s3 import Road, road
from typer.testing import CliRunner

from rolltape.record.recorder import NotRecorded, Recorder, StoreOptions
from rolltape.record.writing.recover import recover
from rolltape.replay.cli import app
from rolltape.replay.housekeeping.compact import compact
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.run import open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema import RunConflict, Unreachable
from rolltape.schema.storage import StorePath, listed, place

QUICK = StoreOptions(retry_seconds=0.05, commit_seconds=60.0)


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/runs/first"


@pytest.fixture
def way(s3_server: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:  # noqa: ARG001
    """The road that everything takes from now on."""
    with road(s3_server) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found


def state(url: str) -> Path:
    found = place(url)
    assert isinstance(found, StorePath)
    return found.state


def journals(url: str) -> list[Path]:
    return sorted(state(url).rglob("*.journal"))


def wait_for_steps(recorder: Recorder) -> None:
    until = time.monotonic() + 30
    while recorder.status.pending_steps and time.monotonic() < until:
        time.sleep(0.02)
    assert recorder.status.pending_steps == 0, recorder.status


def test_a_run_is_recorded_into_a_store_and_its_journal_here(url: str) -> None:
    recorder = Recorder.open(url, model="m", store=QUICK)
    record_step(recorder, 0, ["a", "b"])
    recorder.started("train", 1)
    recorder.add(trace("c"), at(1))
    (journal,) = journals(url)
    assert journal.stat().st_size > 0
    assert [p.name for p in listed(place(url), "*/*/*")] == ["00000000.0.main.json", "00000000.0.main.parquet"]
    commit(recorder, 1, emitted("c"))
    recorder.close(30)
    assert journals(url) == []
    assert [p for p in state(url).rglob("*") if p.name.endswith(".tmp")] == []
    assert checked(url).traces == 3
    assert records_of(open_run(url)).keys() == {"a", "b", "c"}


def test_what_is_recorded_into_a_store_is_what_would_be_on_disk(url: str, tmp_path: Path) -> None:
    tables = []
    for where in (url, str(tmp_path / "run")):
        recorder = Recorder.open(where, store=QUICK)
        record_step(recorder, 0, ["a", "b"], tokens=200)
        recorder.close(30)
        tables.append(open_run(where).table("train").drop_columns(["run"]))
    assert tables[0] == tables[1]


def test_a_store_that_holds_a_run_is_not_written_over(url: str) -> None:
    Recorder.open(url, model="m").close()
    with pytest.raises(RunConflict, match=r"holds run .* already"):
        Recorder.open(url, model="m")
    with pytest.raises(RunConflict, match="something else"):
        Recorder.open(url, model="another", resume=True)
    root = place(f"{url}-other")
    assert isinstance(root, StorePath)
    (root / "notes.txt").put(b"mine")
    with pytest.raises(RunConflict, match=r"not empty \(notes.txt\)"):
        Recorder.open(str(root), model="m")


def test_a_newer_attempt_supersedes_and_writers_of_one_machine_share_one(url: str) -> None:
    first = Recorder.open(url, store=QUICK)
    second = Recorder.open(url, store=QUICK, resume=True, writer="second")
    assert (first.attempt, second.attempt) == (0, 0)
    with pytest.raises(RunConflict, match=r"records into .* at this moment"):
        Recorder.open(url, resume=True)
    record_step(first, 0, ["a"])
    record_step(second, 0, ["b"])
    first.close()
    second.close()
    third = Recorder.open(url, store=QUICK, resume=True, start_step=0)
    assert third.attempt == 1
    record_step(third, 0, ["c"])
    third.close()
    assert open_run(url).table("train")["trace_id"].to_pylist() == ["c"]
    assert dispositions(open_run(url)).keys() == {"a", "b", "c"}


def test_what_a_killed_writer_left_here_is_recovered_into_the_store(url: str) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from record_build import at, record_step, trace\n"
        "from rolltape.record.recorder import Recorder\n"
        "recorder = Recorder.open(sys.argv[1])\n"
        "record_step(recorder, 0, ['a'])\n"
        "for name in 'bcd':\n"
        "    recorder.started('train', 1)\n"
        "    assert recorder.add(trace(name), at(1))\n"
        "os._exit(9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, url, str(Path(__file__).parent)], check=False)
    assert killed.returncode == 9
    assert open_run(url).table("train").num_rows == 1
    assert [f.code for f in verify(open_run(url)).findings] == ["journal"]
    found = recover(url)
    assert [part["traces"] for part in found.committed] == [3]
    assert found.faults == []
    assert dispositions(open_run(url)) == {"a": "emitted", **dict.fromkeys("bcd", "interrupted")}
    assert journals(url) == []
    assert recover(url).anything is False
    checked(url)


def test_the_state_folder_can_be_chosen(url: str, tmp_path: Path) -> None:
    recorder = Recorder.open(url, state=tmp_path / "elsewhere")
    recorder.add(trace("a"), at(0))
    assert list((tmp_path / "elsewhere").rglob("*.journal"))
    assert journals(url) == []
    recorder._store._journal.close()  # type: ignore[union-attr]  # as the end of the process does
    assert recover(url).committed == []
    assert [part["traces"] for part in recover(url, tmp_path / "elsewhere").committed] == [1]


# -- a store that fails


@pytest.mark.parametrize("what", ["500", "cut", "after"])
@pytest.mark.parametrize("target", ["/traces/", "/commits/"])
def test_a_put_that_fails_loses_nothing_and_leaves_no_half_data(
    url: str, way: Road, s3_server: str, monkeypatch: pytest.MonkeyPatch, what: str, target: str
) -> None:
    recorder = Recorder.open(url, store=QUICK)
    record_step(recorder, 0, ["a", "b"])
    way.rule = lambda method, path: what if method == "PUT" and target in path else None
    done = record_step(recorder, 1, ["c", "d"])
    assert done.commit is None
    assert done.error is not None
    assert "did not do it" in done.error
    whole = what == "after" and target == "/commits/"  # it is there, only nobody was told
    with monkeypatch.context() as direct:
        direct.setenv("AWS_ENDPOINT_URL", s3_server)
        assert checked_now(url) == (["a", "b", "c", "d"] if whole else ["a", "b"])
    record_step(recorder, 2, ["e"])
    assert whole or recorder.status.pending_steps == 2
    way.rule = lambda _method, _path: None
    wait_for_steps(recorder)
    status = recorder.close(30)
    assert (status.not_durable, status.lost, status.error) == (0, 0, None)
    assert journals(url) == []
    assert checked(url).traces == 5
    assert dispositions(open_run(url)) == dict.fromkeys("abcde", "emitted")


def checked_now(url: str) -> list[str]:
    return sorted(open_run(url).table("train")["trace_id"].to_pylist())


def test_training_goes_on_while_the_store_is_gone_and_recover_puts_what_is_left(
    url: str, way: Road, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder.open(url, store=StoreOptions(retry_seconds=0.05, commit_seconds=0.2))
    record_step(recorder, 0, ["a"])
    wait_for_steps(recorder)
    way.rule = lambda _method, _path: "cut"
    for step in (1, 2):
        began = time.monotonic()
        assert record_step(recorder, step, [f"t{step}"]).commit is None
        assert time.monotonic() - began < 5
    status = recorder.close(0.5)
    assert (status.pending_steps, status.lost) == (2, 0)
    assert [j.stat().st_size > 0 for j in journals(url)] == [True]
    with monkeypatch.context() as direct:
        direct.setenv("AWS_ENDPOINT_URL", s3_server)
        assert checked_now(url) == ["a"]
    faults = recover_when_free(url, way)
    assert faults == []
    assert dispositions(open_run(url)) == {"a": "emitted", "t1": "emitted", "t2": "emitted"}
    checked(url)


def recover_when_free(url: str, way: Road) -> list[str]:
    """Recover once the recorder's thread, which may still hold its journal, has given up."""
    way.rule = lambda _method, _path: None
    until = time.monotonic() + 30
    while (found := recover(url)).alive and time.monotonic() < until:
        time.sleep(0.1)
    return found.faults


def test_recovery_while_the_store_is_gone_keeps_the_journal(url: str, way: Road) -> None:
    recorder = Recorder.open(url, store=QUICK)
    recorder.add(trace("a"), at(0))
    recorder.close(30)
    way.rule = lambda method, path: "500" if method == "PUT" and "/traces/" in path else None
    found = recover(url)
    assert found.committed == []
    assert "cannot be settled now" in found.faults[0]
    assert len(journals(url)) == 1
    way.rule = lambda _method, _path: None
    assert [part["traces"] for part in recover(url).committed] == [1]
    assert journals(url) == []


def test_strict_recording_raises_when_the_store_is_gone(url: str, way: Road) -> None:
    recorder = Recorder.open(url, store=QUICK, strict=True)
    way.rule = lambda _method, _path: "500"
    with pytest.raises(NotRecorded, match="step 0 of 'train' is not on disk"):
        record_step(recorder, 0, ["a"])
    way.rule = lambda _method, _path: None
    recorder.close(30)
    assert checked_now(url) == ["a"]


def test_a_store_that_is_gone_is_refused_at_the_start(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Unreachable, match=r"run.json: the store did not do it"):
        Recorder.open(url)


def test_a_bucket_that_is_not_there_is_refused_at_the_start(bucket: str) -> None:
    with pytest.raises(Unreachable, match="there is no such bucket"):
        Recorder.open(f"{bucket}-not/run")


def test_an_object_deleted_under_its_recorder_is_put_again(url: str) -> None:
    recorder = Recorder.open(url, store=QUICK)
    record_step(recorder, 0, ["a"])
    recorder.paths.run.unlink()
    record_step(recorder, 1, ["b"])
    recorder.close(30)
    assert checked(url).traces == 2


def test_another_run_at_the_place_is_not_mixed_in(url: str) -> None:
    recorder = Recorder.open(url, store=StoreOptions(retry_seconds=0.05, commit_seconds=5))
    assert isinstance(recorder.paths.root, StorePath)
    recorder.paths.root.files.delete_dir(recorder.paths.root.key)
    other = Recorder.open(url, store=QUICK)
    assert other.attempt == 0
    assert recorder.paths.journals != other.paths.journals
    done = record_step(recorder, 0, ["a"])
    assert "another run has taken its place" in (done.error or "")
    recorder.close(30)
    record_step(other, 0, ["b"])
    other.close()
    assert checked_now(url) == ["b"]


# -- commands


def test_the_recover_command_takes_a_url(url: str) -> None:
    recorder = Recorder.open(url)
    recorder.add(trace("a"), at(0))
    recorder.close(30)
    result = CliRunner().invoke(app, ["recover", url])
    assert (result.exit_code, result.output.startswith("committed train 00000000.0.main: 1 trace")) == (0, True)


def test_a_run_is_recorded_recovered_verified_queried_compacted_and_pruned_in_a_store(url: str, way: Road) -> None:
    recorder = Recorder.open(url, store=QUICK)
    for step in range(3):
        record_step(recorder, step, [f"{step}a", f"{step}b"])
    recorder.add(trace("3a"), at(3))
    recorder.close(30)
    assert [part["traces"] for part in recover(url).committed] == [1]
    records, before = records_of(open_run(url)), checked(url)
    way.rule = lambda method, path: "cut" if method == "PUT" and "rewrite" in path else None
    with pytest.raises(Unreachable):
        compact(open_run(url))
    assert records_of(open_run(url)) == records
    way.rule = lambda _method, _path: None
    assert [m.files for m in compact(open_run(url)).merged] == [4]
    assert records_of(open_run(url)) == records
    query = "select step, count(*), sum(reward) from traces group by all order by 1"
    assert open_run(url).sql(query).fetchall() == [(0, 2, 2.0), (1, 2, 2.0), (2, 2, 2.0), (3, 1, 1.0)]
    assert prune(open_run(url), Wish(replaced=True)).removed == 8
    assert records_of(open_run(url)) == records
    after = checked(url)
    assert (after.parts, after.traces, after.notes) == (before.parts, before.traces, [])
    assert not list(state(url).rglob("*.tmp"))
