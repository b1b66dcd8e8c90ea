"""Runs in object stores: an S3 server on this machine, and fsspec's store in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from replay_build import group, put_attempt, put_run, put_step, turn

from rolltape.replay import convert, open_run
from rolltape.replay.cli import main
from rolltape.replay.verification.verify import verify
from rolltape.schema import BadInput, MissingExtra, RunNotFound, Unreachable
from rolltape.schema.paths import RunPaths
from rolltape.schema.storage import StorePath, listed, place, sha256_of, size_of, sizes


def upload(folder: Path, url: str) -> str:
    """Copy a run on disk to a store, file by file."""
    target = place(url)
    assert isinstance(target, StorePath)
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        (target / file.relative_to(folder)).put(file.read_bytes())
    return url


def small_run(root: Path) -> Path:
    """Three steps, the last recorded again by a second attempt."""
    put_run(root)
    for step in range(3):
        records = [turn(f"{step}-{i}", reward=float(i), idx=step) for i in range(4)]
        put_step(root, step, records, groups=[group(records, step)], first=4 * step)
    put_attempt(root, 1, start_step=2)
    records = [turn(f"again-{i}", idx=2) for i in range(4)]
    put_step(root, 2, records, groups=[group(records, 2)], first=8, attempt=1)
    return root


# -- naming places


def test_a_path_is_a_folder_and_a_url_is_a_place_in_a_store(bucket: str) -> None:
    assert place("runs/first") == Path("runs/first")
    assert place(Path("runs/first")) == Path("runs/first")
    assert place("file:///tmp/a%20b") == Path("/tmp/a b")
    found = place(f"{bucket}/runs/first/")
    assert isinstance(found, StorePath)
    assert str(found) == f"{bucket}/runs/first"
    assert found.name == "first"
    assert str(found / "a" / "b.json") == f"{bucket}/runs/first/a/b.json"
    assert (found / "a" / "b.json").stem == "b"
    assert (found / "a" / "b.json").parent == found / "a"
    assert place(found) is found


def test_a_url_that_went_through_a_path_is_understood(bucket: str) -> None:
    assert str(place(Path(f"{bucket}/runs"))) == f"{bucket}/runs"


def test_an_object_is_never_opened_as_a_local_file_by_mistake(bucket: str) -> None:
    with pytest.raises(TypeError):
        os.fspath(place(bucket))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://", "names no place; write s3://bucket/prefix"),
        ("s3://b/run?region=x", "AWS_REGION"),
        ("nosuch://b/run", "cannot be opened as a place"),
    ],
)
def test_a_url_that_names_nothing_is_refused(url: str, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        place(url)


def test_a_number_of_attempts_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "many")
    with pytest.raises(BadInput, match="AWS_MAX_ATTEMPTS is 'many'; expected a whole number"):
        place("s3://a-bucket-of-its-own/run")


def test_a_scheme_that_needs_a_package_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtra, match=r"rolltape\[fsspec\]"):
        place("sftp://host/run")


def test_the_state_folder_is_told_by_argument_variable_or_default(
    monkeypatch: pytest.MonkeyPatch, bucket: str, tmp_path: Path
) -> None:
    def state(where: str, base: Path | None = None) -> Path:
        found = place(where, base)
        assert isinstance(found, StorePath)
        return found.state

    assert state(f"{bucket}/a").parent == tmp_path / "state"
    assert state(f"{bucket}/a") != state(f"{bucket}/b")
    assert state(f"{bucket}/a", tmp_path / "other").parent == tmp_path / "other"
    monkeypatch.delenv("ROLLTAPE_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state(f"{bucket}/a").parent == tmp_path / "xdg" / "rolltape"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state(f"{bucket}/a").parent == tmp_path / "home" / ".local" / "state" / "rolltape"


# -- objects


@pytest.fixture(params=["s3", "memory"])
def root(request: pytest.FixtureRequest, bucket: str) -> StorePath:
    found = place(f"{bucket}/run" if request.param == "s3" else f"memory://{bucket[5:]}/run")
    assert isinstance(found, StorePath)
    return found


def test_objects_are_put_read_listed_and_removed(root: StorePath) -> None:
    assert not root.exists()
    assert listed(root, "*/*.json") == []
    (root / "a" / "1.json").put(b"one")
    (root / "a" / "10.json").put(b"ten")
    (root / "b" / "2.json").put(b"")
    (root / "b" / "c" / "3.json").put(b"deeper")
    (root / "b" / "4.txt").put(b"another ending")
    assert [str(p) for p in listed(root, "*/*.json")] == [f"{root}/{n}" for n in ("a/1.json", "a/10.json", "b/2.json")]
    assert sizes(root / "a", "*.json") == {root / "a" / "1.json": 3, root / "a" / "10.json": 3}
    assert [p.name for p in root.iterdir()] == ["a", "b"]
    assert (root / "a" / "1.json").read_bytes() == b"one"
    assert (root.is_dir(), root.is_file(), (root / "a" / "1.json").is_file()) == (True, False, True)
    (root / "a" / "1.json").unlink()
    (root / "a" / "1.json").unlink(missing_ok=True)
    for gone in (lambda p: p.unlink(), lambda p: p.read_bytes(), size_of, sha256_of):
        with pytest.raises(FileNotFoundError):
            gone(root / "a" / "1.json")
    assert [p.name for p in listed(root, "a/*.json")] == ["10.json"]


def test_an_object_that_is_there_is_not_put_again(root: StorePath) -> None:
    assert (root / "x.json").put_once(b"first")
    assert not (root / "x.json").put_once(b"second")
    assert (root / "x.json").read_bytes() == b"first"


def test_a_file_is_sent_whole_and_read_anywhere(root: StorePath, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 20  # more than one part of a multipart upload
    (tmp_path / "big").write_bytes(data)
    (root / "big").upload(tmp_path / "big")
    assert size_of(root / "big") == len(data)
    assert sha256_of(root / "big") == sha256_of(tmp_path / "big")
    with (root / "big").open() as file:
        file.seek(len(data) - 5)
        assert file.read() == data[-5:]


def test_an_upload_that_arrives_shorter_is_not_believed(
    root: StorePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    monkeypatch.setattr(StorePath, "size", lambda _: 4)
    with pytest.raises(Unreachable, match="8 bytes were sent and 4 are there"):
        (root / "file").upload(tmp_path / "file")


def test_a_store_that_cannot_do_what_a_run_needs_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(f"memory://{bucket[5:]}/read-only")

    def unable(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(type(found.files.handler.fs), "pipe_file", unable)
    monkeypatch.setattr(type(found.files.handler.fs), "_open", unable)
    with pytest.raises(BadInput, match="memory has no way to do this; a run needs a store"):
        (found / "run.json").put(b"{}")


def test_an_object_cannot_be_opened_for_writing(root: StorePath) -> None:
    with pytest.raises(BadInput, match="put whole"):
        (root / "x").open("ab")


# -- runs


@pytest.fixture
def run_url(bucket: str, tmp_path: Path) -> tuple[Path, str]:
    folder = small_run(tmp_path / "run")
    return folder, upload(folder, f"{bucket}/runs/small")


def test_a_run_in_a_store_reads_as_the_one_on_disk(run_url: tuple[Path, str]) -> None:
    here, there = open_run(run_url[0]), open_run(run_url[1])
    assert there.run_id == here.run_id
    assert there.all_commits == here.all_commits
    assert there.attempts == here.attempts
    assert there.splits() == ["train"]
    assert there.table("train") == here.table("train")
    assert there.table("train", steps=1, columns=["trace_id", "reward"]).num_rows == 4
    assert there.table("train", steps=2, attempt=0)["trace_id"].to_pylist() == ["2-0", "2-1", "2-2", "2-3"]
    assert there.groups("train") == here.groups("train")
    assert convert(there.table("train"), there.groups("train")).groups


def test_a_run_in_a_store_is_verified(run_url: tuple[Path, str]) -> None:
    result = verify(open_run(run_url[1]))
    assert (result.findings, result.parts, result.traces, result.digests) == ([], 4, 12, 3)


def test_verify_finds_bytes_that_changed_in_a_store(run_url: tuple[Path, str]) -> None:
    run = open_run(run_url[1])
    file = run.paths.parquet(run.all_commits[0].part)
    assert isinstance(file, StorePath)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.put(bytes(data))
    run.paths.parquet(run.all_commits[1].part).unlink()
    assert [f.code for f in verify(open_run(run_url[1])).errors] == ["file", "file"]


def test_a_file_without_its_commit_is_not_data_in_a_store_either(run_url: tuple[Path, str]) -> None:
    run = open_run(run_url[1])
    run.paths.commit(run.all_commits[1].part).unlink()
    again = open_run(run_url[1])
    assert again.table("train", columns=["step"])["step"].to_pylist() == [0] * 4 + [2] * 4
    assert {f.code for f in verify(again).findings} == {"uncommitted", "missing_step"}


def test_a_place_without_a_run_is_refused(bucket: str) -> None:
    with pytest.raises(RunNotFound, match=r"nothing holds no run.json"):
        open_run(f"{bucket}/nothing")
    with pytest.raises(RunNotFound, match=r"there is no such bucket"):
        open_run("s3://there-is-no-such-bucket/run")


def test_a_store_that_does_not_answer_is_no_damage(run_url: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(run_url[1])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Unreachable, match=r"run.json: the store did not do it .*AWS_ENDPOINT_URL"):
        open_run(run_url[1])
    gone = place(run_url[1])
    assert isinstance(gone, StorePath)
    silent = type(run)(RunPaths(gone, gone.state), run.info)
    silent.__dict__["contents"] = run.contents
    with pytest.raises(Unreachable):
        silent.table("train")
    with pytest.raises(Unreachable):
        verify(silent)


# -- commands


def rolltape(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["rolltape", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_commands_take_urls(
    run_url: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = run_url[1]
    assert rolltape("verify", url, "--json", monkeypatch=monkeypatch) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["path"], said["clean"], said["parts"]) == (url, True, 4)
    out = str(tmp_path / "samples_{rollout_id}.jsonl")
    assert rolltape("convert", url, "--out", out, "--step", "1", monkeypatch=monkeypatch) == 0
    assert len((tmp_path / "samples_1.jsonl").read_text().splitlines()) == 4
    assert rolltape("convert", url, "--out", f"{url}/x.jsonl", "--step", "1", monkeypatch=monkeypatch) == 2
    assert rolltape("verify", f"{url}-not", monkeypatch=monkeypatch) == 2
    assert f"{url}-not holds no run.json" in capsys.readouterr().err.replace("\n", " ")


def test_traces_are_imported_into_a_store(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "traces.jsonl"
    source.write_text("".join(json.dumps(turn(f"t{i}", idx=i)) + "\n" for i in range(3)))
    url = f"{bucket}/imported"
    assert rolltape("import", str(source), "--run", url, monkeypatch=monkeypatch) == 0
    assert open_run(url).table("train").num_rows == 3
    assert verify(open_run(url)).errors == []
    assert not Path("s3:").exists()


def test_reading_a_folder_needs_no_store(tmp_path: Path) -> None:
    """Neither fsspec nor a connection is needed for a run on disk."""
    small_run(tmp_path / "run")
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from rolltape.replay import open_run\n"
        f"print(open_run({str(tmp_path / 'run')!r}).table('train').num_rows)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "12"
