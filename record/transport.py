"""Carries Renderers' generate requests to an SGLang engine, and back.

Renderers and Verifiers' TrainClient talk to vLLM's `/inference/v1/generate` through an OpenAI client. `SGLangTransport`
stands in for that client: it sends SGLang's `/generate` over one shared aiohttp session, checks the reply
(`rolltape.record.reply`), and keeps what the engine said of every turn until the episode that asked has ended.

What it retries: connections that could not be made or were lost, and the statuses 408, 429 and 503, a bounded number of
times and seconds. A request that was sent and then lost may still be running, so it is aborted by its id before it is
sent again under the same id. Everything else fails at once, as Verifiers' ProviderError with the status and the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import aiohttp
from verifiers.v1.errors import OverlongPromptError, ProviderError, model_error

from rolltape.record.reply import BadReply, Reply, check_asked, read_reply
from rolltape.record.sampling import Limits, SamplingDefaults, engine_params, left_out, rename
from rolltape.schema.jsontext import read_json
from rolltape.schema.records import Turn, number

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SESSION_HEADER = "X-Session-ID"
"""Verifiers puts the trace id here on every engine request."""

ROUTING_HEADER = "X-SMG-Routing-Key"
"""SGLang's routers keep requests with one value on one worker."""

RETRIED_STATUSES = frozenset({408, 429, 503})
"""Statuses that can pass by waiting. Other 4xx and 5xx say that the request or the engine is wrong."""

UNSUPPORTED = "rolltape cannot serve this request: "
"""Begins the message of every refusal that no retry can change; a run that meets one ends with it."""


def unsupported(found: str, advice: str) -> ProviderError:
    """The refusal (status 400) of something rolltape does not do, with the setting that avoids it."""
    return ProviderError(f"{UNSUPPORTED}{found} {advice}", status_code=400)


def is_unsupported(message: str) -> bool:
    """Whether an error message, as recorded on a trace, is one of `unsupported`'s."""
    return UNSUPPORTED in message


def ended() -> ProviderError:
    """The refusal of a reply that came after its episode: committed late, it would change a trace already recorded."""
    return ProviderError("The episode ended while the engine was still sampling.", status_code=499)


@dataclass(frozen=True)
class RetryPolicy:
    """How long one engine request is tried."""

    attempts: int = 6
    """Requests in all, the first included."""
    seconds: float = 60.0
    """No new attempt starts later than this after the first."""
    backoff: float = 0.25
    """Mean of the first wait, in seconds; doubled each time."""
    longest: float = 10.0
    """Longest wait, in seconds, also where Retry-After asks for more."""

    def wait(self, attempt: int, retry_after: float | None = None) -> float:
        """Seconds before attempt `attempt + 1`: jittered, and never sooner than the engine asked."""
        jittered: float = self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
        return min(max(jittered, retry_after or 0.0), self.longest)


@dataclass(frozen=True)
class RawResponse:
    """What the OpenAI client's `post` returns with `cast_to=httpx.Response`, as far as Renderers reads it."""

    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class _Session:
    """One episode's requests so far."""

    turns: list[Turn] = field(default_factory=list)
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    closed: bool = False


class Lost(Exception):
    """A connection failed; `sent` tells whether the engine may have the request."""

    def __init__(self, cause: BaseException, *, sent: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.sent = sent


class Refused(Exception):
    """The engine answered with an HTTP status other than 200."""

    def __init__(self, status: int, text: str, retry_after: str | None) -> None:
        super().__init__(f"The engine answered HTTP {status}: {text or '(no text)'}")
        self.status = status
        self.retry_after = _seconds(retry_after)


class SGLangTransport:
    """The `post` / `get` / `base_url` / `close` that Renderers and TrainClient use, over an SGLang engine or router.

    `engine_url` may be a function, asked at each request: a trainer starts its engines after it has made its client.
    `request_seconds` bounds one HTTP request; None waits for ever. Errors raised by `post` are Verifiers'
    ProviderError, or OverlongPromptError where a length limit leaves no room (a truncation, not a failure).
    """

    def __init__(
        self,
        engine_url: str | Callable[[], str],
        *,
        limits: Limits | None = None,
        defaults: SamplingDefaults | None = None,
        retry: RetryPolicy | None = None,
        routing_key: bool = False,
        lora_path: str | None = None,
        request_seconds: float | None = 1800.0,
        connections: int = 4096,
    ) -> None:
        self._engine_url = engine_url
        self.limits = limits or Limits()
        self.defaults = defaults or SamplingDefaults()
        self.retry = retry or RetryPolicy()
        self.routing_key = routing_key
        self.lora_path = lora_path
        self.request_seconds = request_seconds
        self.connections = connections
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        self._sessions: dict[str, _Session] = {}
        self._http: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._warned: set[str] = set()

    # What Renderers calls

    @property
    def engine_url(self) -> str:
        """Address of the engine or router, without a slash or `/v1` at the end."""
        url = self._engine_url() if callable(self._engine_url) else self._engine_url
        base, mark, query = url.partition("?")
        return base.rstrip("/").removesuffix("/v1") + mark + query

    @property
    def base_url(self) -> str:
        """The address Renderers derives its endpoint from."""
        return _at(self.engine_url, "/v1")

    async def get(self, _path: str, **_options: Any) -> dict[str, list[Any]]:
        """Renderers asks `/models` for a context cap here; the limits are applied in `post` instead."""
        return {"data": []}

    async def post(
        self, _endpoint: str, *, body: Mapping[str, Any], options: Mapping[str, Any] | None = None, **_rest: Any
    ) -> RawResponse:
        """Serve one generate request; `body` holds token_ids, sampling_params, priority and cache_salt."""
        if body.get("features") is not None:
            raise unsupported("it carries image or other multimodal features.", "Use a text-only taskset and renderer.")
        if body.get("stream"):
            raise unsupported("it asks for a stream.", "Use a harness that asks for whole replies.")
        session_id = dict((options or {}).get("headers") or {}).get(SESSION_HEADER)
        payload = self._payload(body, first=session_id not in self._sessions)
        session = self._sessions.setdefault(session_id, _Session()) if session_id else _Session()
        async with self._running(session, payload["rid"]):
            reply, retries = await self._generate(payload, session_id, self._send)
        with _provider_error():
            check_asked(reply, len(payload["input_ids"]), payload["sampling_params"]["max_new_tokens"])
        session.turns.append(_turn(reply, retries))
        return RawResponse(reply.to_renderers())

    async def ask(self, payload: Mapping[str, Any]) -> bytes:
        """The engine's answer to a `/generate` request that samples nothing, with the same retries; errors as `post`."""
        payload = {"rid": f"{self._name}-{next(self._numbers)}", **payload}
        async with self._running(_Session(), payload["rid"]):
            raw, _ = await self._generate(payload, None, self._once)
        return raw

    async def close(self) -> None:
        """Close the connections; the transport can be used again afterwards."""
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    # What the runner calls

    def turns(self, session: str) -> list[Turn]:
        """What the engine said of each accepted reply of an episode (its trace id), in order."""
        known = self._sessions.get(session)
        return list(known.turns) if known else []

    def knows(self, session: str) -> bool:
        """Whether an episode has asked something and is not forgotten."""
        return session in self._sessions

    def forget(self, session: str) -> None:
        """Drop an episode that has ended and abort what it still has running: no late reply joins its trace."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        known.closed = True
        for task in known.running:
            task.cancel()

    async def healthy(self, seconds: float = 5.0) -> str | None:
        """None if the engine answers `/health` within `seconds`; otherwise what went wrong."""
        try:
            async with self._client().get(
                _at(self.engine_url, "/health"), timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                return None if response.status in (200, 404) else f"HTTP {response.status}: {await _text(response)}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    async def models(self) -> list[str]:
        """What the engine calls the model that it serves: its path, and the names it goes by. Empty where it tells nothing."""
        paths = ("/get_model_info", _model_path), ("/v1/models", _model_ids)
        return [name for path, read in paths for name in await self._told(path, read) or () if isinstance(name, str)]

    async def workers(self) -> list[str]:
        """Addresses of the engines behind a router (`/workers`, else `/list_workers`), or the engine's own address."""
        for path, read in (("/workers", _workers), ("/list_workers", _urls)):
            if found := await self._told(path, read):
                return list(dict.fromkeys(clean_worker_url(url) for url in found))
        return [self.engine_url]

    async def _told(self, path: str, read: Callable[[Any], Answer]) -> Answer | None:
        """What the engine says at `path`, as `read` takes it out of the JSON; None where it does not say that."""
        unsaid = (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError)
        with contextlib.suppress(*unsaid):
            async with self._client().get(
                _at(self.engine_url, path), timeout=aiohttp.ClientTimeout(total=10)
            ) as response:
                response.raise_for_status()
                return read(json.loads(await response.read()))
        return None

    async def abort_all(self) -> dict[str, str | None]:
        """Abort every request on every worker, also other clients'. Per address: None, or what went wrong."""
        return await self._abort({"abort_all": True})

    # One request

    def _payload(self, body: Mapping[str, Any], *, first: bool) -> dict[str, Any]:
        prompt = list(body["token_ids"])
        params = rename(body.get("sampling_params") or {})
        payload = {
            "rid": f"{self._name}-{next(self._numbers)}",
            "input_ids": prompt,
            "sampling_params": engine_params(params, self._room(params, len(prompt), first), self.defaults),
            "return_logprob": True,
        }
        self._warn_once(left_out(params))
        optional = {
            "lora_path": self.lora_path,
            "priority": body.get("priority"),
            "extra_key": body.get("cache_salt"),
        }
        return payload | {key: value for key, value in optional.items() if value is not None}

    def _room(self, params: Mapping[str, Any], prompt_tokens: int, first: bool) -> int:
        if first and self.limits.prompt is not None and prompt_tokens > self.limits.prompt:
            raise OverlongPromptError(
                f"The first prompt has {prompt_tokens} tokens, the limit is {self.limits.prompt}."
            )
        room = self.limits.max_new_tokens(params.get("max_new_tokens"), prompt_tokens)
        if room is None:
            raise unsupported("nothing limits the length of a reply.", "Set --max-response or --max-context.")
        if room < 1:
            raise OverlongPromptError(
                f"The prompt has {prompt_tokens} tokens; no room for a reply is left by the context limit "
                f"({self.limits.context}), the response limit ({self.limits.response}) and the request "
                f"({params.get('max_new_tokens')})."
            )
        return room

    @contextlib.asynccontextmanager
    async def _running(self, session: _Session, rid: str) -> Any:
        """Let `forget` cancel the request inside, and tell the engine of a cancelled one."""
        task = asyncio.current_task()
        assert task is not None
        session.running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self._abort_in_background(rid)
            if not session.closed:
                raise
            task.uncancel()
            raise ended() from None
        finally:
            session.running.discard(task)

    async def _generate(
        self, payload: Mapping[str, Any], session_id: str | None, send: Callable[..., Awaitable[Answer]]
    ) -> tuple[Answer, int]:
        """Send `payload` until it is answered, and how often it was sent again."""
        headers = {ROUTING_HEADER: session_id} if self.routing_key and session_id else {}
        started = time.monotonic()
        attempt = 1
        while True:
            try:
                return await send(payload, headers), attempt - 1
            except Lost as lost:
                wait = self.retry.wait(attempt)
                if isinstance(lost.cause, TimeoutError) and lost.sent:
                    self._abort_in_background(payload["rid"])
                    found = f"The engine sent no reply within {self.request_seconds} s; raise --request-seconds."
                    raise ProviderError(found, status_code=504) from lost.cause
                if not self._may_retry(attempt, started, wait):
                    raise self._gave_up(_connection_text(lost.cause), attempt, started, 503) from lost.cause
                if lost.sent:
                    await self._abort({"rid": payload["rid"]})
            except Refused as refused:
                wait = self.retry.wait(attempt, refused.retry_after)
                if refused.status not in RETRIED_STATUSES:
                    raise _refusal(refused) from None
                if not self._may_retry(attempt, started, wait):
                    raise self._gave_up(str(refused), attempt, started, refused.status) from None
            await asyncio.sleep(wait)
            attempt += 1

    async def _send(self, payload: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
        """Send `payload` once. Raises Lost, Refused, or ProviderError for a reply that cannot be used."""
        return _read(await self._once(payload, headers))

    async def _once(self, payload: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
        """The engine's answer as it came."""
        data = json.dumps(payload).encode()
        timeout = aiohttp.ClientTimeout(total=self.request_seconds, sock_connect=10.0)
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with self._client().post(
                _at(self.engine_url, "/generate"), data=data, headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise Refused(response.status, await _text(response), response.headers.get("Retry-After"))
                return await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Lost(error, sent=False) from error
        except TimeoutError as error:
            raise Lost(error, sent=True) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, AttributeError) as error:
            # AttributeError: aiohttp's own, of a reply whose head was None; seen once in 40,000 requests
            raise Lost(error, sent=True) from error
        except aiohttp.ClientError as error:
            raise ProviderError(f"The engine could not be asked: {_connection_text(error)}.") from error

    def _may_retry(self, attempt: int, started: float, wait: float) -> bool:
        return attempt < self.retry.attempts and time.monotonic() - started + wait <= self.retry.seconds

    def _gave_up(self, found: str, attempts: int, started: float, status: int) -> ProviderError:
        tries = "once" if attempts == 1 else f"{attempts} times"
        seconds = time.monotonic() - started
        return ProviderError(f"{found} Asked {tries} in {seconds:.1f} s.", status_code=status)

    # Aborts and connections

    async def _abort(self, body: Mapping[str, Any]) -> dict[str, str | None]:
        async def one(url: str) -> str | None:
            try:
                async with self._client().post(
                    _at(url, "/abort_request"), json=body, timeout=aiohttp.ClientTimeout(total=10)
                ) as response:
                    return None if response.status == 200 else f"HTTP {response.status}"
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                return f"{type(error).__name__}: {error}"

        urls = await self.workers()
        return dict(zip(urls, await asyncio.gather(*(one(url) for url in urls)), strict=True))

    def _abort_in_background(self, rid: str) -> None:
        async def abort() -> None:
            await self._abort({"rid": rid})

        task = asyncio.get_running_loop().create_task(abort())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _client(self) -> aiohttp.ClientSession:
        """The shared session; aiohttp ignores proxy settings of the environment unless told otherwise."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._http.closed or self._loop is not loop:
            # SGLang's server drops idle connections after 5 s: drop them first, or requests are lost on them.
            connector = aiohttp.TCPConnector(limit=self.connections, keepalive_timeout=4.0)
            self._http = aiohttp.ClientSession(connector=connector, trust_env=False)
            self._loop = loop
        return self._http

    def _warn_once(self, keys: set[str]) -> None:
        for key in keys - self._warned:
            self._warned.add(key)
            logger.warning("The sampling setting %r is not one that rolltape sends to SGLang; it is left out.", key)


def _at(url: str, path: str) -> str:
    """A path of an engine, whose address may end in a query such as `?api_key=…`."""
    base, mark, query = url.partition("?")
    return base + path + mark + query


def clean_worker_url(url: str) -> str:
    """A worker's address without the `@rank` that data-parallel routers add."""
    return re.sub(r"@\d+/?$", "", url).rstrip("/")


def _refusal(refused: Refused) -> ProviderError:
    """The error of a status that waiting does not change; a prompt too long for the model is a truncation."""
    if refused.status in (400, 413):
        return model_error(str(refused), status_code=refused.status)
    return ProviderError(str(refused), status_code=refused.status)


def checked(payload: object) -> Reply:
    """The reply in the decoded JSON `payload`; raises ProviderError where it cannot be used."""
    with _provider_error():
        return read_reply(payload)


@contextlib.contextmanager
def _provider_error() -> Iterator[None]:
    """Raise BadReply as ProviderError, with its status."""
    try:
        yield
    except BadReply as error:
        raise ProviderError(str(error), status_code=error.status) from None


def _read(raw: bytes) -> Reply:
    try:
        payload = read_json(raw)
    except ValueError as error:
        start = raw[:200].decode(errors="replace")
        raise ProviderError(f"The engine's reply is not JSON ({error}); it begins with {start!r}.") from None
    return checked(payload)


def _turn(reply: Reply, retries: int) -> Turn:
    meta = reply.meta
    engine = meta.get("engine_id") or meta.get("id")
    version = meta.get("weight_version")
    return Turn(
        weight_version=None if version is None else str(version),
        cached_tokens=_whole(meta.get("cached_tokens")),
        latency=number(meta.get("e2e_latency")),
        engine=None if engine is None else str(engine),
        prompt_tokens=_whole(meta.get("prompt_tokens")),
        completion_tokens=_whole(meta.get("completion_tokens")),
        finish_reason=reply.finish_reason,
        retries=retries,
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _model_path(payload: Any) -> list[Any]:
    return [payload["model_path"]]


def _model_ids(payload: Any) -> list[Any]:
    return [model["id"] for model in payload["data"]]


def _workers(payload: Any) -> list[str]:
    return [str(worker["url"]) for worker in payload["workers"]]


def _urls(payload: Any) -> list[str]:
    return [str(url) for url in payload["urls"]]


async def _text(response: aiohttp.ClientResponse, limit: int = 2000) -> str:
    try:
        return (await response.content.read(limit)).decode(errors="replace").strip()
    except (aiohttp.ClientError, OSError) as error:
        return f"(body lost: {error})"


def _connection_text(error: BaseException) -> str:
    return f"The connection to the engine failed: {type(error).__name__}: {error}."


def _seconds(header: str | None) -> float | None:
    """Seconds to wait by a Retry-After header: a number or an HTTP date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
