"""The transport to the engines that Miles started: their router's address, and Miles' own HTTP client.

Miles posts through one client of its own (spread over its nodes with `--use-distributed-post`), which would repeat any
failure 60 times; here it is asked to try once, and what may be tried again is decided by `SGLangTransport`. Where Miles'
client is not there (another process, a test), our own does the same.
"""

from __future__ import annotations

import asyncio
import importlib
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import httpx

from rolltape.record.miles.options import defaults_of, limits_of, lora_of, routes_by_key
from rolltape.record.reply import Reply
from rolltape.record.transport import Lost, Refused, RetryPolicy, SGLangTransport, checked


def router_url(args: Namespace) -> str:
    """Address of the router in front of the trained model's engines, as it is known now."""
    routers = getattr(args, "sglang_model_routers", None)
    host, port = routers["default"] if routers and "default" in routers else _router(args)
    return f"http://{host}:{port}"


def _router(args: Namespace) -> tuple[Any, Any]:
    return args.sglang_router_ip, args.sglang_router_port


class Http(Protocol):
    """One try of one JSON request; the decoded reply. Raises Lost or Refused."""

    async def __call__(self, url: str, payload: Mapping[str, Any], headers: Mapping[str, str]) -> Any: ...


def miles_http() -> Http | None:
    """Miles' HTTP client; None where there is none, or Miles has not started it."""
    try:
        helper = importlib.import_module("miles.utils.http_utils")
    except ImportError:
        return None
    started = getattr(helper, "_http_client", helper) is not None or getattr(helper, "_post_actors", None)

    async def ask(url: str, payload: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        try:
            return await helper.post(url, dict(payload), max_retries=1, headers=dict(headers) or None)
        except httpx.HTTPStatusError as error:
            reply = error.response
            raise Refused(reply.status_code, reply.text.strip()[:2000], reply.headers.get("Retry-After")) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Lost(error, sent=False) from error
        except httpx.TransportError as error:
            raise Lost(error, sent=True) from error

    return ask if started else None


class Gate:
    """Lets so many requests at the engines at once, on whichever event loop runs."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore = asyncio.Semaphore(places)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Wait for a place and hold it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self.places)
        async with self._semaphore:
            yield


class MilesSGLangTransport(SGLangTransport):
    """`SGLangTransport` to Miles' router, with the limits and stops of Miles' arguments.

    `router_args`: the arguments that hold the router's address, where `args` are a copy (evaluation's). The address is read
    at each request: Miles makes its rollout functions before it starts the engines.
    """

    def __init__(
        self,
        args: Namespace,
        *,
        router_args: Namespace | None = None,
        retry: RetryPolicy | None = None,
        request_seconds: float | None = 1800.0,
        gate: Gate | None = None,
        http: str = "miles",
    ) -> None:
        self.args, self.router_args = args, router_args or args
        super().__init__(
            lambda: router_url(self.router_args),
            limits=limits_of(args),
            defaults=defaults_of(args),
            retry=retry,
            routing_key=routes_by_key(args),
            lora_path=lora_of(args),
            request_seconds=request_seconds,
        )
        self._gate, self._whose = gate or Gate(4096), http

    async def _send(self, payload: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
        """One try, when the engines have a place for it; waiting for the place does not count as the request's time."""
        ask = miles_http() if self._whose == "miles" else None
        async with self._gate():
            if ask is None:
                return await super()._send(payload, headers)
            try:
                async with asyncio.timeout(self.request_seconds):
                    return checked(await ask(f"{self.engine_url}/generate", payload, headers))
            except TimeoutError as error:
                raise Lost(error, sent=True) from error
