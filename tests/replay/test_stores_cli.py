"""Commands on object stores: what is found there, what is not, and who may not look."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from replay_build import put_run, put_step, turn

from rolltape.replay import open_run
from rolltape.replay.listing.runs import list_runs
from rolltape.replay.verification.approve import approve
from rolltape.schema.errors import RunNotFound, Unreachable
from rolltape.schema.storage import PATIENCE, StorePath, place

Run = Callable[..., tuple[int, str, str]]


def put(folder: Path, url: str) -> str:
    """Copy what is below a folder to a store."""
    for file in (p for p in folder.rglob("*") if p.is_file()):
        target = place(url)
        assert isinstance(target, StorePath)
        (target / file.relative_to(folder)).put(file.read_bytes())
    return url


def run_of(folder: Path, *records: dict[str, Any]) -> Path:
    root = put_run(folder)
    for step, record in enumerate(records):
        put_step(root, step, [record], first=step)
    return root


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest, bucket: str) -> str:
    return bucket if request.param == "s3" else f"memory://{bucket[5:]}"


# -- list


def test_runs_are_listed_as_deep_in_a_store_as_in_a_folder(store: str, tmp_path: Path) -> None:
    for name in ("a", "x/b", "x/y/z/w/c", ".hidden/d", "a/traces/e"):
        run_of(tmp_path / name, turn(name.replace("/", "-")))
    put(tmp_path, store)
    names = sorted(r.name for r in list_runs(tmp_path).runs)
    assert names == ["a", "x/b", "x/y/z/w/c"]
    assert sorted(r.name for r in list_runs(store).runs) == names
    assert [r.name for r in list_runs(f"{store}/x/y").runs] == ["z/w/c"]
    assert [r.name for r in list_runs(f"{store}/a").runs] == ["a"]


def test_what_lies_below_a_run_is_not_looked_through(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path / "a", turn("t"))
    put(tmp_path, bucket)
    looked: list[str] = []
    folders = StorePath.folders

    def counted(self: StorePath) -> tuple[list[StorePath], list[str]]:
        looked.append(str(self))
        return folders(self)

    monkeypatch.setattr(StorePath, "folders", counted)
    assert len(list_runs(bucket).runs) == 1
    assert looked == [bucket, f"{bucket}/a"]


@pytest.mark.usefixtures("bucket")
def test_a_bucket_that_is_not_there_is_said_to_be_missing(rolltape: Run) -> None:
    sentence = "s3://there-is-no-such-bucket: there is no such bucket. Check its name"
    for words in (
        ("list", "s3://there-is-no-such-bucket"),
        ("list", "s3://there-is-no-such-bucket/runs"),
        ("verify", "s3://there-is-no-such-bucket/run"),
        ("approve", "s3://there-is-no-such-bucket/run"),
        ("sql", "s3://there-is-no-such-bucket/run", "SELECT count(*) FROM traces"),
    ):
        code, out, err = rolltape(*words)
        assert (code, out) == (2, ""), words
        assert sentence in err, words
    target: Any = place("s3://there-is-no-such-bucket/run")
    with pytest.raises(Unreachable, match="there is no such bucket"):
        (target / "x").put(b"x")


def test_a_prefix_with_nothing_below_is_no_empty_list(bucket: str, rolltape: Run) -> None:
    code, _, err = rolltape("list", f"{bucket}/nothing")
    assert (code, f"{bucket}/nothing: no object lies there or below" in err) == (2, True)
    target: Any = place(bucket)
    (target / "other" / "file.txt").put(b"x")
    code, out, _ = rolltape("list", f"{bucket}/other")
    assert (code, "No recorded run in" in out) == (0, True)


# -- who may not look, and who does not answer


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that lets nobody in."""

    class Refusing(BaseHTTPRequestHandler):
        def _refuse(self) -> None:
            body = b"<Error><Code>InvalidAccessKeyId</Code><Message>The key is not known.</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = _refuse

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_credentials_that_are_wrong_are_said_to_be(
    bucket: str, refusing: str, monkeypatch: pytest.MonkeyPatch, rolltape: Run
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", refusing)
    for words in (("list", bucket), ("verify", f"{bucket}/run"), ("approve", f"{bucket}/run")):
        code, _, err = rolltape(*words)
        assert code == 2, words
        assert "refused it for want of credentials that are right" in err, words
        assert "AWS_ACCESS_KEY_ID" in err, words


def test_a_store_of_google_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 1; by default pyarrow would try for 15 minutes."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    url = "gs://anonymous@bucket/runs?scheme=http&endpoint_override=127.0.0.1:1&retry_limit_seconds=1"
    with pytest.raises(Unreachable, match=r"bucket/runs.*the store did not do it .*[Cc]onnect"):
        list_runs(url)
    asked: list[str] = []
    monkeypatch.setattr(
        "rolltape.schema.storage.fs.FileSystem",
        type("FileSystem", (), {"from_uri": staticmethod(lambda url: (asked.append(url), "x"))}),
    )
    for url in ("gs://bucket/waiting", "gs://bucket/waiting?scheme=http"):
        place(url)
    assert asked == [
        f"gs://bucket/waiting?retry_limit_seconds={PATIENCE}",
        f"gs://bucket/waiting?scheme=http&retry_limit_seconds={PATIENCE}",
    ]


# -- approve


def objects(url: str) -> dict[str, str]:
    """Every object below a URL but the approved Samples, with its sha256."""
    root: Any = place(url)
    names = [p for pattern in ("*", "*/*", "*/*/*") for p in root.sizes(pattern) if "/expected/" not in str(p)]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in names}


def test_runs_in_a_store_are_approved_and_the_recording_stays_as_it_was(
    store: str, tmp_path: Path, rolltape: Run
) -> None:
    local = run_of(tmp_path / "runs" / "a", turn("t0", 0.5), turn("t1", 1.0))
    run_of(tmp_path / "runs" / "deep" / "b", turn("u0", 0.5))
    url = put(tmp_path, store) + "/runs"
    before = objects(f"{url}/a")
    code, out, _ = rolltape("approve", url, "--dry-run", "--json")
    said = json.loads(out)
    assert (code, said["changed"], [r["path"] for r in said["runs"]]) == (1, 3, [f"{url}/a", f"{url}/deep/b"])
    assert not (open_run(f"{url}/a").paths.root / "expected").exists()
    code, out, _ = rolltape("approve", f"{url}/a")
    assert (code, "2 written, 0 as they were" in out) == (0, True)
    assert objects(f"{url}/a") == before
    approve(open_run(local))
    for file in local.glob("expected/*/*.parquet"):
        assert (open_run(f"{url}/a").paths.root / file.relative_to(local)).read_bytes() == file.read_bytes()
    code, out, _ = rolltape("approve", f"{url}/a", "--dry-run")
    assert (code, "0 would change, 2 as they were" in out) == (0, True)
    assert not Path("s3:").exists()


def test_approving_what_holds_no_run_or_does_not_answer_is_refused(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rolltape: Run
) -> None:
    url = put(run_of(tmp_path / "run", turn("t0")), f"{bucket}/run")
    target: Any = place(bucket)
    (target / "other" / "x").put(b"x")
    code, _, err = rolltape("approve", f"{bucket}/other")
    assert (code, "other holds no recorded run" in err) == (2, True)
    run = open_run(url)
    assert run.commits()
    monkeypatch.setattr(StorePath, "read_bytes", lambda self: (_ for _ in ()).throw(Unreachable(f"{self}: silent")))
    with pytest.raises(Unreachable, match=r"expected/.*silent"):
        approve(run)
    with pytest.raises(RunNotFound, match="no object lies there"):
        list_runs(f"{bucket}/nowhere")
