"""The transport to Miles' engines: its address, Miles' HTTP client, and what is sent again."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from aiohttp import web
from miles_bench import miles_args
from verifiers.v1.errors import OverlongPromptError, ProviderError

from rolltape.record.miles import MilesSGLangTransport
from rolltape.record.transport import RetryPolicy

ENDPOINT = "http://ignored/inference/v1/generate"
Answer = Callable[[web.Request], Any]


def reply(*ids: int, **meta: Any) -> dict[str, Any]:
    """What an engine answers."""
    entries = [[-0.5, token, None] for token in ids]
    return {
        "output_ids": list(ids),
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries, **meta},
    }


@pytest.fixture
def miles_client(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any, int]]:
    """Miles' HTTP helper, answering at once; what it was asked."""
    helper = importlib.import_module("miles.utils.http_utils")
    asked: list[tuple[str, Any, Any, int]] = []

    async def post(url: str, payload: Any, max_retries: int = 60, action: str = "post", headers: Any = None) -> Any:  # noqa: ARG001
        asked.append((url, payload, headers, max_retries))
        return reply(20, 21)

    monkeypatch.setattr(helper, "_http_client", object(), raising=False)
    monkeypatch.setattr(helper, "post", post)
    return asked


async def ask(transport: MilesSGLangTransport, session: str = "trace-1", **body: Any) -> Any:
    options = {"headers": {"X-Session-ID": session}}
    return await transport.post(ENDPOINT, body={"token_ids": [10, 11], "sampling_params": {}, **body}, options=options)


def test_a_request_goes_through_miles_client_in_sglangs_words(miles_client: list[Any]) -> None:
    args = miles_args(
        sglang_router_ip="127.0.0.1",
        sglang_router_port=30000,
        sglang_router_policy="manual",
        rollout_max_response_len=8,
        rollout_skip_special_tokens=True,
        rollout_stop_token_ids=[7],
        lora_rank=4,
    )
    params = {"temperature": 0.2, "max_tokens": 2, "stop_token_ids": [99], "logprobs": 1}
    answer = asyncio.run(ask(MilesSGLangTransport(args), sampling_params=params, cache_salt="s", priority=1)).json()
    [(url, payload, headers, tries)] = miles_client
    assert (url, headers, tries) == ("http://127.0.0.1:30000/generate", {"X-SMG-Routing-Key": "trace-1"}, 1)
    payload.pop("rid")
    assert payload == {
        "input_ids": [10, 11],
        "return_logprob": True,
        "lora_path": "miles_lora",
        "priority": 1,
        "extra_key": "s",
        "sampling_params": {
            "temperature": 0.2,
            "stop_token_ids": [99, 7],
            "max_new_tokens": 2,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "n": 1,
        },
    }
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([20, 21], "stop")
    assert choice["logprobs"]["content"][0] == {"token": "token_id:20", "logprob": -0.5}


def test_what_a_bridged_turn_adds_to_the_sampling_settings_is_not_sent(miles_client: list[Any]) -> None:
    asyncio.run(ask(MilesSGLangTransport(miles_args()), sampling_params={"routed_experts_prompt_start": 5}))
    assert "routed_experts_prompt_start" not in miles_client[0][1]["sampling_params"]


def test_the_routers_address_is_read_when_a_request_is_made() -> None:
    args = miles_args(sglang_router_ip=None, sglang_router_port=None)
    copied = miles_args()
    transports = [MilesSGLangTransport(args), MilesSGLangTransport(copied, router_args=args)]
    args.sglang_router_ip, args.sglang_router_port = "10.0.0.4", 3210
    assert {transport.base_url for transport in transports} == {"http://10.0.0.4:3210/v1"}
    args.sglang_model_routers = {"default": ("10.0.0.5", 3211), "ref": ("10.0.0.6", 3212)}
    assert {transport.base_url for transport in transports} == {"http://10.0.0.5:3211/v1"}


@pytest.mark.usefixtures("miles_client")
def test_a_second_turn_is_no_first_prompt_after_ten_thousand_other_sessions() -> None:
    transport = MilesSGLangTransport(miles_args(rollout_max_prompt_len=4))

    async def many() -> None:
        for number in range(10_001):
            await ask(transport, f"trace-{number}")
        await ask(transport, "trace-0", token_ids=list(range(9)))
        with pytest.raises(OverlongPromptError):
            await ask(transport, "new", token_ids=list(range(9)))

    asyncio.run(many())


@pytest.mark.parametrize("finish", [{"type": "abort", "message": "flushed"}, None, {"type": "banana"}])
def test_an_abort_and_an_unknown_finish_reason_are_errors_that_say_so(
    monkeypatch: pytest.MonkeyPatch, miles_client: list[Any], finish: Any
) -> None:
    helper = importlib.import_module("miles.utils.http_utils")

    async def post(*_: Any, **__: Any) -> Any:
        return reply(20, finish_reason=finish)

    monkeypatch.setattr(helper, "post", post)
    with pytest.raises(ProviderError, match=r"aborted.*flushed|finish.reason"):
        asyncio.run(ask(MilesSGLangTransport(miles_args())))
    assert not miles_client


def serving(answer: Answer, check: Callable[[str], Any]) -> None:
    """Run `check` with the address of a server that answers every request by `answer`, through Miles' client."""

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        helper = importlib.import_module("miles.utils.http_utils")
        before = helper._http_client
        async with httpx.AsyncClient(timeout=None) as client:
            helper._http_client = client
            try:
                await check(f"http://{host}:{port}")
            finally:
                helper._http_client = before
                await runner.cleanup()

    asyncio.run(run())


def transport_to(url: str, **changes: Any) -> MilesSGLangTransport:
    host, port = url.removeprefix("http://").split(":")
    args = miles_args(sglang_router_ip=host, sglang_router_port=int(port))
    return MilesSGLangTransport(args, retry=RetryPolicy(attempts=3, backoff=0.01), **changes)


@pytest.mark.parametrize("http", ["miles", "own"])
@pytest.mark.parametrize(("status", "requests"), [(400, 1), (403, 1), (404, 1), (500, 1), (503, 3), (429, 3)])
def test_only_what_can_pass_is_sent_again_and_the_status_stays(http: str, status: int, requests: int) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({"error": "no such thing"}, status=status)

    async def check(url: str) -> None:
        transport = transport_to(url, http=http)
        with pytest.raises(ProviderError, match="no such thing") as error:
            await ask(transport)
        assert error.value.status_code == status
        await transport.close()

    serving(answer, check)
    assert seen == ["/generate"] * requests


def test_a_reply_that_does_not_come_ends_the_request_with_the_time_it_waited() -> None:
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/generate":
            await over.wait()
        return web.json_response({})

    async def check(url: str) -> None:
        transport = transport_to(url, request_seconds=0.1)
        with pytest.raises(ProviderError, match=r"0\.1 s") as error:
            await ask(transport)
        assert error.value.status_code == 504
        over.set()
        await transport.close()

    serving(answer, check)


def test_pending_requests_are_aborted_on_every_worker_also_behind_a_rank() -> None:
    aborted: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/workers":
            here = f"http://{request.host}"
            return web.json_response({"workers": [{"url": f"{here}@0"}, {"url": f"{here}@1"}, {"url": f"{here}/b@0"}]})
        aborted.append((request.path, await request.json()))
        return web.json_response({})

    async def check(url: str) -> None:
        transport = transport_to(url)
        assert set((await transport.abort_all()).values()) == {None}
        await transport.close()

    serving(answer, check)
    assert sorted(path for path, _ in aborted) == ["/abort_request", "/b/abort_request"]
    assert all(body == {"abort_all": True} for _, body in aborted)


def test_images_are_refused_with_what_to_use() -> None:
    with pytest.raises(ProviderError, match="text-only") as error:
        asyncio.run(ask(MilesSGLangTransport(miles_args()), features={}))
    assert error.value.status_code == 400
