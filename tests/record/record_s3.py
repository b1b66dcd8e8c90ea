"""An unreliable way to an S3 server: a proxy on this machine that refuses, cuts or answers by a rule."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Rule = Callable[[str, str], str | None]
"""(method, path) -> None to pass, `500` to answer that, `cut` to end the connection in the middle of the body, `after` to
pass the request on and end the connection before the answer."""


class Road(ThreadingHTTPServer):
    """The proxy. `rule` may be changed at any time; `log` is every request with what became of it."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        self.target = target.removeprefix("http://")
        self.rule: Rule = lambda _method, _path: None
        self.log: list[tuple[str, str, str | None]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: connections are cut on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Road

    def _pass(self) -> None:
        what = self.server.rule(self.command, self.path)
        self.server.log.append((self.command, self.path, what))
        if what == "cut":
            if self.command in ("PUT", "POST"):
                self.rfile.read(20)
            return self._end()
        body = self._body()
        if what == "500":
            self.send_response(500)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        onward = http.client.HTTPConnection(self.server.target, timeout=60)
        try:
            onward.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "expect":
                    onward.putheader(name, value)
            onward.endheaders(body)
            answer = onward.getresponse()
            content = answer.read()
            if what == "after":
                return self._end()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            size = answer.headers.get("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(size or 0))
            self.end_headers()
            self.wfile.write(content)
        finally:
            onward.close()
        return None

    def _body(self) -> bytes:
        """The body as it came, chunks and all."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while True:
            head = self.rfile.readline()
            size = int(head.split(b";")[0], 16)
            body += head + self.rfile.read(size + 2)
            if not size:
                return body

    def _end(self) -> None:
        self.close_connection = True
        self.connection.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def road(target: str) -> Iterator[Road]:
    """A proxy to the S3 server at `target`."""
    server = Road(target)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
