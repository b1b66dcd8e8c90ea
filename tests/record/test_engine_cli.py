"""`rolltape engine` as a program."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an engine; what still runs at the end of the test is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-m", "rolltape.replay.cli", "engine", *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_it_says_where_it_is_answers_and_ends_on_ctrl_c(start: Start, tmp_path: Path) -> None:
    async def health(url: str) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            return response.status

    process = start("--port", "0", "--write-tokenizer", str(tmp_path / "tokenizer"), "--fault", "http_503=0.5")
    assert process.stdout is not None
    first, curl = process.stdout.readline(), None
    while curl is None:
        line = process.stdout.readline()
        curl = line if "curl" in line else None
    url = first.split(" at ")[1].split(";")[0]
    assert f"{url}/generate" in curl
    assert asyncio.run(health(url)) == 200
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Ended after 0 requests" in output
    assert errors == ""
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--fault", "flood=1"], "drop_connection"), (["--tokenizer", "./nowhere"], "no tokenizer folder")],
)
def test_bad_options_are_refused_with_what_is_known(start: Start, arguments: list[str], said: str) -> None:
    process = start(*arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said in errors


def test_a_port_that_is_taken_is_named(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Choose another --port" in errors
