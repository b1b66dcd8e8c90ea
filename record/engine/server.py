"""The demo engine: SGLang's native HTTP on loopback over the toy model.

Random numbers depend on the prompt, not on the order in which requests arrive: a request with `sampling_seed` always
gets the reply of (prompt, seed); without one, the n-th request for the same prompt gets the reply of (prompt, engine
seed, n). So a run of many concurrent episodes draws the same set of episodes every time.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from aiohttp import web

from rolltape.record.engine.distribution import entry
from rolltape.record.engine.faults import Fault, Faults, abort_reason, spoil
from rolltape.record.engine.model import Sampled, ToyModel
from rolltape.record.engine.policy import Policy
from rolltape.record.engine.prefix import PrefixCache
from rolltape.record.engine.reply import Reply
from rolltape.record.engine.request import Request, UnknownSamplingKey
from rolltape.record.engine.vocabulary import Ids, Vocabulary

ROUTING_HEADER = "X-SMG-Routing-Key"
REMEMBERED_PROMPTS = 1_000_000
"""Prompts whose number of requests is kept; the least recently seen go first."""


class DemoEngine:
    """A server that is up inside `async with`.

    Attributes:
        model: What it samples from.
        faults: What goes wrong on purpose; may be replaced at any time.
        requests: Requests by path ("/generate") and faults by name ("fault:http_503").
        weight_version: As reported with every reply.
    """

    def __init__(
        self,
        *,
        tokenizer_dir: str | Path | None = None,
        seed: int = 0,
        faults: Faults | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        policy: Policy | None = None,
        epsilon: float = 1e-4,
        end_hazard: float = 1 / 400,
    ) -> None:
        self.model = ToyModel(Vocabulary.load(tokenizer_dir), policy=policy, epsilon=epsilon, end_hazard=end_hazard)
        self.tokenizer_dir = tokenizer_dir
        self.seed = seed
        self.faults = faults or Faults()
        self.requests: Counter[str] = Counter()
        self.weight_version = "1"
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None
        self._cache = PrefixCache()
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._waiting: dict[object, tuple[str, asyncio.Event]] = {}

    @property
    def url(self) -> str:
        """Address of the running server, without a slash at the end."""
        if self._runner is None:
            raise RuntimeError("The engine is not running; enter it with `async with` or `serve_in_thread()` first.")
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    @property
    def waiting(self) -> int:
        """Requests that are held up by the latency fault right now."""
        return len(self._waiting)

    async def __aenter__(self) -> DemoEngine:
        app = web.Application(client_max_size=1 << 28, middlewares=[_counting(self.requests)])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weight_version", self._update_weights)
        app.router.add_post("/faults", self._set_faults)
        app.router.add_get("/faults", self._get_faults)
        app.router.add_get("/health", self._health)
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/list_workers", self._list_workers)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/get_model_info", self._model_info)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=4096).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        runner, self._runner = self._runner, None
        self._abort_waiting(None)
        if runner is not None:
            await runner.cleanup()

    @contextmanager
    def serve_in_thread(self) -> Iterator[DemoEngine]:
        """Run in a background thread with its own event loop; on leaving, the server is stopped and the thread joined.

        Raises:
            OSError: The port is taken.
        """
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="demo-engine", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.__aenter__(), loop).result()
            try:
                yield self
            finally:
                asyncio.run_coroutine_threadsafe(self.__aexit__(None, None, None), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        began = time.perf_counter()
        try:
            body = json.loads(await http.read())
            request = Request.parse(
                body, vocabulary_size=self.model.vocabulary.size, routing_key=http.headers.get(ROUTING_HEADER)
            )
        except UnknownSamplingKey as error:
            return _refuse(500, str(error))
        except ValueError as error:
            return _refuse(400, str(error))
        prompt, seen = self._recognise(request.ids)
        wait, fault = self.faults.strike(_generator(b"faults", prompt, self.faults.seed, seen))
        if fault is not None:
            self.requests[f"fault:{fault.label}"] += 1
        if wait and await self._wait(request, wait):
            return _send(self._aborted(request, began))
        if fault is not None and fault.status is not None:
            return _refuse(fault.status, f"demo engine: fault {fault.label}")
        reply = self._reply(request, self._sample(request, prompt, seen), began)
        return _send(reply) if fault is None else self._send_spoiled(http, reply, fault)

    def _recognise(self, ids: Ids) -> tuple[bytes, int]:
        """The digest of a prompt, and how many requests there were for it before."""
        digest = blake2b(ids.tobytes(), digest_size=16).digest()
        seen = self._seen.pop(digest, 0)
        self._seen[digest] = seen + 1
        if len(self._seen) > REMEMBERED_PROMPTS:
            self._seen.popitem(last=False)
        return digest, seen

    def _sample(self, request: Request, prompt: bytes, seen: int) -> Sampled:
        seed = request.sampling.sampling_seed
        rng = (
            _generator(b"engine", prompt, self.seed, seen) if seed is None else _generator(b"request", prompt, seed, 0)
        )
        return self.model.sample(request.ids, request.sampling, rng)

    def _reply(self, request: Request, sampled: Sampled, began: float) -> Reply:
        cached = self._cache.lookup(request.routing_key, request.ids)
        self._cache.store(request.routing_key, request.ids, sampled.ids)
        meta = self._meta(request, sampled.finish, began, completion=len(sampled.ids), cached=cached)
        wants = request.return_logprob
        return Reply(
            text=self._text(sampled, request),
            ids=sampled.ids.tolist(),
            entries=sampled.entries if wants else None,
            input_entries=self._input_entries(request) if wants else None,
            meta=meta,
        )

    def _meta(
        self, request: Request, finish: dict[str, Any], began: float, *, completion: int, cached: int
    ) -> dict[str, Any]:
        number = self.requests["/generate"]
        return {
            "id": request.rid or blake2b(f"{self.seed}/{number}".encode(), digest_size=16).hexdigest(),
            "finish_reason": finish,
            "prompt_tokens": len(request.ids),
            "completion_tokens": completion,
            "cached_tokens": cached,
            "weight_version": self.weight_version,
            "num_retractions": 0,
            "e2e_latency": time.perf_counter() - began,
        }

    def _text(self, sampled: Sampled, request: Request) -> str:
        """The decoded reply; what ended it is cut off unless `no_stop_trim`."""
        sampling, matched = request.sampling, sampled.finish.get("matched")
        trim = matched is not None and not sampling.no_stop_trim
        ids = sampled.ids[:-1] if trim and isinstance(matched, int) else sampled.ids
        text: str = self.model.vocabulary.decode(ids, skip_special=sampling.skip_special_tokens)
        return text.partition(matched)[0] if trim and isinstance(matched, str) else text

    def _input_entries(self, request: Request) -> list[bytes]:
        """Log-probs of the prompt from `logprob_start_len` on; the first has none, as SGLang pads it."""
        start = request.logprob_start_len
        if start < 0 or start >= len(request.ids):
            return []
        scores = self.model.score(request.ids, start, request.sampling.effective_temperature).tolist()
        ids = request.ids[start:].tolist()
        first = b"[null,%d,null]" % ids[0]
        return [first, *(entry(score, token) for score, token in zip(scores[1:], ids[1:], strict=True))]

    async def _wait(self, request: Request, seconds: float) -> bool:
        """Wait like a request in a queue; True if it was aborted meanwhile."""
        ticket, aborted = object(), asyncio.Event()
        self._waiting[ticket] = (request.rid or "", aborted)
        try:
            async with asyncio.timeout(seconds):
                await aborted.wait()
        except TimeoutError:
            pass
        finally:
            del self._waiting[ticket]
        return aborted.is_set()

    def _aborted(self, request: Request, began: float) -> Reply:
        meta = self._meta(request, abort_reason("Aborted while waiting"), began, completion=0, cached=0)
        return Reply("", [], [] if request.return_logprob else None, None, meta)

    def _send_spoiled(self, http: web.Request, reply: Reply, fault: Fault) -> web.StreamResponse:
        if fault is Fault.DROP_CONNECTION:
            if http.transport is not None:
                http.transport.abort()
            return web.Response(status=499)
        spoil(reply, fault)
        body = reply.encode()
        return _json(body[: len(body) // 2] if fault is Fault.MALFORMED_JSON else body)

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json() if http.can_read_body else {}
        self._abort_waiting(None if body.get("abort_all") else str(body.get("rid", "")))
        return web.Response()

    def _abort_waiting(self, rid: str | None) -> None:
        """Abort the waiting requests whose id begins with `rid`; None for all of them."""
        for waiting, aborted in self._waiting.values():
            if rid is None or (rid and waiting.startswith(rid)):
                aborted.set()

    async def _update_weights(self, http: web.Request) -> web.Response:
        body = await http.json() if http.can_read_body else {}
        number = int(self.weight_version) + 1 if self.weight_version.isdecimal() else 1
        self.weight_version = str(body.get("new_version", number))
        self._cache.clear()
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def _set_faults(self, http: web.Request) -> web.Response:
        try:
            self.faults = Faults.parse(await http.json())
        except (ValueError, TypeError) as error:
            return _refuse(400, str(error))
        return web.json_response(self.faults.describe())

    async def _get_faults(self, _: web.Request) -> web.Response:
        return web.json_response(self.faults.describe())

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _workers(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": "demo", "url": self.url, "is_healthy": True}]})

    async def _list_workers(self, _: web.Request) -> web.Response:
        return web.json_response({"urls": [self.url]})

    async def _model_info(self, _: web.Request) -> web.Response:
        folder = str(self.tokenizer_dir) if self.tokenizer_dir else "built in"
        info = {"model_path": "demo", "tokenizer_path": folder, "is_generation": True}
        return web.json_response({**info, "weight_version": self.weight_version})


def _counting(requests: Counter[str]) -> Any:
    """A middleware that counts requests by path."""

    @web.middleware
    async def count(http: web.Request, handler: Any) -> web.StreamResponse:
        requests[http.path] += 1
        response: web.StreamResponse = await handler(http)
        return response

    return count


def _generator(purpose: bytes, prompt: bytes, seed: int, number: int) -> np.random.Generator:
    """Random numbers of one request."""
    digest = blake2b(b"%s|%s|%d|%d" % (purpose, prompt, seed, number), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def _send(reply: Reply) -> web.Response:
    return _json(reply.encode())


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
