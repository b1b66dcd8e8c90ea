"""Finds Miles for the tests that need it: the real one where it is on the path, else the stand-in in tests/miles_standin.
Starts an S3 server on this machine for the tests that need one."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "miles_standin"
REAL = importlib.util.find_spec("miles") is not None

sys.path.append(str(STANDIN))
if REAL:
    if importlib.util.find_spec("sglang") is None:
        sys.path.append(str(STANDIN / "stubs"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Miles' own dependencies
        importlib.import_module("miles.rollout.base_types")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which Miles the tests used."""
    import miles

    found = f"the real one, {Path(str(miles.__file__)).parent}" if REAL else "its stand-in, tests/miles_standin"
    terminalreporter.write_line(f"Miles: {found}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server (moto's, a process of its own) on a free port of 127.0.0.1."""
    pytest.importorskip("moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a fresh bucket; the environment says where it is, and that local state goes below `tmp_path`."""
    from pyarrow import fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "ROLLTAPE_STATE": str(tmp_path / "state"),
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    fs.S3FileSystem(region="us-east-1", endpoint_override=s3_server, allow_bucket_creation=True).create_dir(name)
    return f"s3://{name}"
