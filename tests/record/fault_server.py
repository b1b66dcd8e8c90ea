"""Starts the functions of `fault_children` as processes, waits for them, and kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class Children:
    """Processes that record and die. A context manager; what still runs at its end is killed."""

    def __init__(self) -> None:
        words = [sys.executable, str(Path(__file__).with_name("fault_children.py"))]
        self._server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._alive: set[int] = set()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._alive):
            self.kill(process)
        self._server.communicate()

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(self, function: str, **args: Any) -> int:
        """Start a child; its process id."""
        process = self._ask({"start": function, "args": args})
        self._alive.add(process)
        return process

    def wait(self, process: int) -> int:
        """Its exit code, negative for a signal, once it has ended."""
        self._alive.discard(process)
        return self._ask({"wait": process})

    def run(self, function: str, **args: Any) -> int:
        """The exit code of a child that is waited for."""
        return self.wait(self.start(function, **args))

    def kill(self, process: int) -> None:
        """kill -9, and wait."""
        os.kill(process, signal.SIGKILL)
        self.wait(process)
