"""The transport against a real HTTP engine on loopback that answers what each test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from verifiers.v1.errors import OverlongPromptError, ProviderError

from rolltape.record.sampling import Limits
from rolltape.record.transport import RetryPolicy, SGLangTransport, clean_worker_url, is_unsupported

QUICK = RetryPolicy(attempts=4, seconds=5.0, backoff=0.001, longest=0.05)


def answer(ids: list[int] | None = None, finish: Any = "stop", **changes: Any) -> dict[str, Any]:
    """A reply as SGLang gives it; `changes` replace entries of meta_info, a value of ... removes one."""
    ids = [20, 21] if ids is None else ids
    meta = {
        "id": "rid-1",
        "finish_reason": {"type": finish} if isinstance(finish, str) else finish,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 1,
        "weight_version": "7",
        "e2e_latency": 0.25,
        "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(ids)],
    }
    meta |= changes
    return {"text": "", "output_ids": ids, "meta_info": {k: v for k, v in meta.items() if v is not ...}}


class Engine:
    """Answers /generate with the next entry of `script` (the last one for ever): JSON, (status, text), or a handler."""

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.aborts: list[dict[str, Any]] = []
        self.log: list[str] = []
        self.url = ""
        self.routes: dict[str, Any] = {}
        self.asked = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        self.log.append("generate")
        self.asked.set()
        entry = self.script[min(len(self.requests), len(self.script)) - 1]
        if callable(entry):
            return await entry(request)
        if isinstance(entry, tuple):
            return web.Response(status=entry[0], text=entry[1], headers=entry[2] if len(entry) > 2 else None)
        return web.Response(text=json.dumps(entry), content_type="application/json")

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts.append(await request.json())
        self.log.append("abort")
        return web.Response(text="")

    async def page(self, request: web.Request) -> web.Response:
        if request.path not in self.routes:
            return web.Response(status=404)
        return web.json_response(self.routes[request.path])


@contextlib.asynccontextmanager
async def serve(engine: Engine) -> AsyncIterator[Engine]:
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort)
    app.router.add_get("/{tail:.*}", engine.page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


def run(script: list[Any], use: Callable[[SGLangTransport, Engine], Any], **options: Any) -> Any:
    """`use(transport, engine)` against an engine with that script."""

    async def main() -> Any:
        async with serve(Engine(script)) as engine:
            settings = {"limits": Limits(response=100), "retry": QUICK, **options}
            transport = SGLangTransport(engine.url, **settings)
            try:
                return await use(transport, engine)
            finally:
                await transport.close()

    return asyncio.run(main())


async def ask(
    transport: SGLangTransport, session: str | None = "trace", prompt: list[int] | None = None, **sampling: Any
) -> Any:
    """The choice in the reply to one request."""
    response = await transport.post(
        f"{transport.base_url.removesuffix('/v1')}/inference/v1/generate",
        body={"model": "m", "token_ids": prompt or [1, 2, 3], "sampling_params": {"logprobs": 1, **sampling}},
        options={"headers": {"X-Session-ID": session}} if session else None,
    )
    return response.json()["choices"][0]


def refused(reply: Any, **options: Any) -> ProviderError:
    """The error that a reply ends in; the engine must have been asked once."""

    async def use(transport: SGLangTransport, engine: Engine) -> ProviderError:
        with pytest.raises(ProviderError) as caught:
            await ask(transport)
        assert len(engine.requests) == 1
        assert transport.turns("trace") == []
        return caught.value

    error = run([reply], use, **options)
    assert isinstance(error, ProviderError)
    return error


# The request


def test_a_request_reaches_the_engine_under_its_own_names_with_a_fixed_set_of_keys() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        await ask(transport, temperature=0.2, top_p=0.9, max_tokens=7, min_tokens=2, seed=5, stop_token_ids=[99])
        return engine.requests[0]

    request = run([answer()], use)
    assert request.pop("rid")
    assert request == {
        "input_ids": [1, 2, 3],
        "return_logprob": True,
        "sampling_params": {
            "temperature": 0.2,
            "top_p": 0.9,
            "max_new_tokens": 7,
            "min_new_tokens": 2,
            "sampling_seed": 5,
            "stop_token_ids": [99],
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "n": 1,
        },
    }


def test_the_routed_experts_key_of_a_bridged_turn_and_unknown_keys_never_reach_the_engine() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        await ask(transport, routed_experts_prompt_start=12, reasoning_effort="high", made_up=1)
        return engine.requests[0]["sampling_params"]

    params = run([answer()], use)
    assert set(params) == {
        "max_new_tokens",
        "skip_special_tokens",
        "no_stop_trim",
        "spaces_between_special_tokens",
        "n",
    }


def test_priority_cache_salt_and_adapter_travel_under_sglangs_names() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        body = {"token_ids": [1, 2, 3], "sampling_params": {}, "priority": 3, "cache_salt": "salt"}
        await transport.post("", body=body)
        return engine.requests[0]

    request = run([answer()], use, lora_path="adapter")
    assert (request["priority"], request["extra_key"], request["lora_path"]) == (3, "salt", "adapter")


def test_the_routing_key_is_the_trace_id_where_it_is_asked_for() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        await ask(transport, session="abc")
        return engine.headers[0].get("X-SMG-Routing-Key")

    assert run([answer()], use, routing_key=True) == "abc"
    assert run([answer()], use) is None


def test_proxy_variables_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run([answer()], lambda transport, _: ask(transport))["token_ids"] == [20, 21]


# The three length limits


@pytest.mark.parametrize(
    ("limits", "requested", "expected"),
    [
        (Limits(response=50), None, 50),
        (Limits(response=50), 20, 20),
        (Limits(response=50), 80, 50),
        (Limits(response=50, context=13), 20, 10),
        (Limits(context=13), None, 10),
        (Limits(), 20, 20),
    ],
)
def test_new_tokens_are_the_least_of_request_response_limit_and_room(
    limits: Limits, requested: int | None, expected: int
) -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        await ask(transport, max_tokens=requested)
        return engine.requests[0]["sampling_params"]["max_new_tokens"]

    assert run([answer()], use, limits=limits) == expected


def test_a_prompt_that_fills_the_context_is_a_truncation_and_asks_nothing() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        with pytest.raises(OverlongPromptError, match="3 tokens"):
            await ask(transport)
        return engine.requests

    assert run([answer()], use, limits=Limits(response=50, context=3)) == []


def test_only_the_first_prompt_of_an_episode_is_held_to_the_prompt_limit() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        with pytest.raises(OverlongPromptError, match="first prompt has 5 tokens, the limit is 4"):
            await ask(transport, prompt=[1] * 5)
        await ask(transport, prompt=[1] * 4)
        await ask(transport, prompt=[1] * 9)
        return len(engine.requests)

    assert run([answer(prompt_tokens=...)], use, limits=Limits(response=50, prompt=4)) == 2


def test_ten_thousand_other_episodes_later_a_second_turn_is_still_a_second_turn() -> None:
    async def use(transport: SGLangTransport, _: Engine) -> Any:
        await ask(transport, session="first")
        for i in range(10_050):
            transport._sessions[f"other-{i}"] = type(transport._sessions["first"])()
        await ask(transport, session="first", prompt=[1] * 9)
        return len(transport.turns("first"))

    assert run([answer(prompt_tokens=...)], use, limits=Limits(response=50, prompt=4)) == 2


def test_a_request_that_nothing_limits_names_the_setting() -> None:
    async def use(transport: SGLangTransport, _: Engine) -> Any:
        with pytest.raises(ProviderError, match="--max-response") as caught:
            await ask(transport)
        assert is_unsupported(str(caught.value))
        return caught.value.status_code

    assert run([answer()], use, limits=Limits()) == 400


def test_an_engine_that_calls_the_prompt_too_long_is_a_truncation() -> None:
    text = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
    assert isinstance(refused((400, text)), OverlongPromptError)


# What the engine says of a turn


def test_ids_and_logprobs_come_from_the_same_entries_and_reach_renderers_exactly() -> None:
    choice = run([answer([5, 6], output_token_logprobs=[[-0.1, 5, None], [-2.3, 6, "x"]])], lambda t, _: ask(t))
    assert choice == {
        "token_ids": [5, 6],
        "logprobs": {
            "content": [{"token": "token_id:5", "logprob": -0.1}, {"token": "token_id:6", "logprob": -2.3}],
        },
        "finish_reason": "stop",
    }


def test_turns_are_kept_per_episode_until_it_is_forgotten() -> None:
    async def use(transport: SGLangTransport, _: Engine) -> None:
        await ask(transport, session="a")
        await ask(transport, session="b")
        await ask(transport, session="a")
        turn = transport.turns("a")[0]
        assert (turn.weight_version, turn.cached_tokens, turn.latency, turn.engine) == ("7", 1, 0.25, "rid-1")
        assert (turn.prompt_tokens, turn.completion_tokens, turn.retries) == (3, 2, 0)
        assert turn.finish_reason == "stop"
        assert [t.weight_version for t in transport.turns("a")] == ["7", "8"]
        transport.forget("a")
        assert transport.turns("a") == []
        assert len(transport.turns("b")) == 1

    run([answer(), answer(), answer(weight_version="8")], use)


def test_optional_meta_fields_may_be_missing() -> None:
    reply = answer(
        weight_version=..., prompt_tokens=..., cached_tokens=..., id=..., e2e_latency=..., completion_tokens=...
    )

    async def use(transport: SGLangTransport, _: Engine) -> None:
        assert (await ask(transport))["token_ids"] == [20, 21]
        turn = transport.turns("trace")[0]
        assert turn.weight_version is turn.cached_tokens is turn.latency is turn.engine is turn.prompt_tokens is None

    run([reply], use)


def test_a_latency_beyond_every_float_is_left_out() -> None:
    async def use(transport: SGLangTransport, _: Engine) -> Any:
        await ask(transport)
        return transport.turns("trace")

    [turn] = run([answer(e2e_latency=10**400)], use)
    assert turn.latency is None


def test_a_reply_nested_too_deeply_is_no_json() -> None:
    assert "reply is not JSON" in str(refused((200, "[" * 200_000)))


def test_length_is_told_apart_from_stop() -> None:
    assert run([answer(finish="length")], lambda t, _: ask(t))["finish_reason"] == "length"


def test_an_empty_completion_is_passed_on_as_what_it_is() -> None:
    choice = run([answer([])], lambda t, _: ask(t))
    assert choice == {"token_ids": [], "logprobs": {"content": []}, "finish_reason": "stop"}


# Aborts and finish reasons


@pytest.mark.parametrize(
    "reply",
    [
        answer([], {"type": "abort", "message": "weights are updated"}, output_token_logprobs=...),
        answer([], {"type": "abort", "message": "weights are updated"}),
        answer([1, 2, 3, 4, 5], {"type": "abort", "message": "weights are updated"}),
    ],
    ids=["no logprobs key", "no tokens", "five tokens"],
)
def test_an_abort_sent_with_http_200_is_an_error_that_says_so(reply: dict[str, Any]) -> None:
    error = refused(reply)
    assert "aborted" in str(error)
    assert "weights are updated" in str(error)
    assert error.status_code == 503


def test_an_abort_keeps_the_status_the_engine_gives_it() -> None:
    assert refused(answer([], {"type": "abort", "status_code": 400})).status_code == 400


@pytest.mark.parametrize("reason", [None, ..., "stop", "length", "abort", {"type": "eos"}, {}, 5])
def test_null_plain_and_unknown_finish_reasons_are_errors_and_never_stop(reason: Any) -> None:
    error = refused(answer(finish_reason=reason))
    assert "finish" in str(error)
    assert error.status_code == 502


# Replies that contradict themselves


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (answer(output_token_logprobs=...), "no output_token_logprobs"),
        (answer(output_token_logprobs=None), "no output_token_logprobs"),
        (answer(output_token_logprobs=[[-0.1, 20, None]]), "2 output_ids and 1 log-probs"),
        (answer(output_token_logprobs=[[-0.1, 20], [-0.1, 21], [-0.1, 22]]), "2 output_ids and 3 log-probs"),
        (answer(output_token_logprobs=[[-0.1, 20], [-0.1, 99]]), "Position 1"),
        (answer(completion_tokens=3), "counts 3 completion tokens and sent 2"),
        (answer(output_token_logprobs=[[-0.1, 20], [None, 21]]), "position 1 of 2 is None"),
        (answer(output_token_logprobs=[[-0.1, 20], [float("nan"), 21]]), "position 1 of 2 is nan"),
        (answer(output_token_logprobs=[[float("-inf"), 20], [-0.1, 21]]), "position 0 of 2 is -inf"),
        (answer(output_token_logprobs=[[-0.1, 20], [0.5, 21]]), "position 1 of 2 is 0.5"),
        (answer(output_token_logprobs=[[-0.1, 20], [True, 21]]), "position 1 of 2 is True"),
        (answer(output_token_logprobs=[[-0.1, 20], [10**400, 21]]), "position 1 of 2"),
        (answer(output_token_logprobs=[[-0.1, 20], ["-0.1", 21]]), "position 1 of 2 is '-0.1'"),
        (answer(output_token_logprobs=[[-0.1, 20], [-0.1]]), "output_token_logprobs[1]"),
        (answer(output_token_logprobs=[[-0.1, 20], None]), "output_token_logprobs[1]"),
        (answer(output_token_logprobs=[[-0.1, 20], [-0.1, "21"]]), "holds the token id '21'"),
        (answer([20, -1]), "output_token_logprobs[1] holds the token id -1; expected one from 0 to 2147483647"),
        (answer([20, 2**70]), "output_token_logprobs[1] holds the token id 1180591620717411303424; expected"),
        (answer(output_token_logprobs=[[-0.1, 20], [-1e39, 21]]), "position 1 of 2 is -1e+39"),
        (answer(prompt_tokens=2), "sent a prompt of 3 tokens and counts 2: it saw another text"),
        (answer(prompt_tokens="3"), "sent a prompt of 3 tokens and counts '3'"),
        (answer(list(range(101))), "asked for at most 100 tokens and sent 101"),
        ({"text": "hello"}, "no meta_info"),
        ([], "JSON list"),
    ],
)
def test_a_reply_whose_ids_logprobs_or_counts_disagree_is_refused_with_what_was_found(reply: Any, says: str) -> None:
    error = refused(reply)
    assert says in str(error)
    assert error.status_code == 502


def test_a_tiny_positive_logprob_is_rounding_and_passes() -> None:
    choice = run([answer([20], output_token_logprobs=[[2.4e-7, 20, None]])], lambda t, _: ask(t))
    assert choice["logprobs"]["content"][0]["logprob"] == 2.4e-7


def test_one_null_among_twenty_logprobs_is_named_by_its_position() -> None:
    ids = list(range(20))
    entries: list[list[Any]] = [[-0.1, token, None] for token in ids]
    entries[13][0] = None
    assert "position 13 of 20 is None" in str(refused(answer(ids, output_token_logprobs=entries)))


@pytest.mark.parametrize("kept_by", ["log-probs", "output_ids"])
def test_a_trailing_stop_token_in_one_list_only_is_refused_and_the_convention_named(kept_by: str) -> None:
    entries = [[-0.1, token, None] for token in range(10, 19)]
    reply = answer(list(range(10, 19)), {"type": "stop", "matched": 2}, output_token_logprobs=entries)
    if kept_by == "log-probs":
        entries.append([-0.2, 2, None])
    else:
        reply["output_ids"].append(2)
    error = refused(reply)
    assert f"Only the {kept_by} keep the matched stop token 2" in str(error)
    assert "no_stop_trim" in str(error)


def test_the_logprob_of_the_sampled_token_is_taken_not_that_of_the_top_candidate() -> None:
    top = [[[-0.10, 512, None], [-2.30, 880, None]]]
    reply = answer([880], output_token_logprobs=[[-2.30, 880, None]], output_top_logprobs=top)
    assert run([reply], lambda t, _: ask(t))["logprobs"]["content"] == [{"token": "token_id:880", "logprob": -2.30}]
    mixed = answer([880], output_token_logprobs=[[-0.10, 512, None]], output_top_logprobs=top)
    assert "token 880 in output_ids and 512 in output_token_logprobs" in str(refused(mixed))


def test_a_reply_that_is_no_json_shows_how_it_begins() -> None:
    error = refused((200, "<html>gateway</html>"))
    assert "<html>gateway" in str(error)


# What is retried


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 500, 501])
def test_a_status_that_cannot_pass_fails_at_once_with_status_and_text(status: int) -> None:
    error = refused((status, '{"error": "no such adapter"}'))
    assert error.status_code == status
    assert "no such adapter" in str(error)


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_status_that_can_pass_is_tried_again_and_the_turn_says_how_often(status: int) -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        await ask(transport)
        assert len(engine.requests) == 3
        assert len({request["rid"] for request in engine.requests}) == 1
        assert transport.turns("trace")[0].retries == 2

    run([(status, "busy"), (status, "busy"), answer()], use)


def test_retries_end_after_a_bounded_number_with_the_last_status_and_text() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        with pytest.raises(ProviderError, match=r"HTTP 503: no workers Asked 4 times") as caught:
            await ask(transport)
        assert caught.value.status_code == 503
        assert len(engine.requests) == 4

    run([(503, "no workers")], use)


def test_retries_end_after_a_bounded_time() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        with pytest.raises(ProviderError, match="Asked once"):
            await ask(transport)
        assert len(engine.requests) == 1

    run([(503, "busy")], use, retry=RetryPolicy(attempts=100, seconds=0.0, backoff=0.01))


def test_retry_after_is_honoured_up_to_the_longest_wait() -> None:
    policy = RetryPolicy(backoff=0.001, longest=8.0)
    assert policy.wait(1, retry_after=3.0) == 3.0
    assert policy.wait(1, retry_after=900.0) == 8.0
    assert policy.wait(1) <= 0.0015

    async def use(transport: SGLangTransport, _: Engine) -> None:
        with pytest.raises(ProviderError, match="Asked once"):  # the wait asked for would pass the deadline
            await ask(transport)

    run([(429, "slow down", {"Retry-After": "7"})], use, retry=RetryPolicy(seconds=5.0, longest=30.0))


def test_an_engine_that_cannot_be_reached_is_retried_and_then_reported() -> None:
    async def main() -> None:
        async with serve(Engine([answer()])) as engine:
            url = engine.url
        transport = SGLangTransport(url, limits=Limits(response=5), retry=QUICK)
        with pytest.raises(ProviderError, match=r"connection to the engine failed.*Asked 4 times") as caught:
            await ask(transport)
        assert caught.value.status_code == 503
        assert "Connect" in (await transport.healthy() or "")
        await transport.close()

    asyncio.run(main())


async def drop(request: web.Request) -> web.StreamResponse:
    """Read the request, as an engine that samples would, and close the connection without a reply."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def test_a_connection_dropped_after_the_request_is_aborted_before_it_is_sent_again_under_the_same_id() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        choice = await ask(transport)
        rid = engine.requests[0]["rid"]
        assert engine.log == ["generate", "abort", "generate"]
        assert engine.aborts == [{"rid": rid}]
        assert engine.requests[1]["rid"] == rid
        assert choice["token_ids"] == [20, 21]
        assert [turn.retries for turn in transport.turns("trace")] == [1]

    run([drop, answer()], use)


def test_a_fault_inside_the_client_is_one_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = aiohttp.ClientResponse.start, []

    async def start(self: aiohttp.ClientResponse, connection: Any) -> Any:
        calls.append(self)
        if self.url.path == "/generate" and len(calls) == 1:
            raise AttributeError("'NoneType' object has no attribute 'getall'")
        return await real(self, connection)

    async def use(transport: SGLangTransport, engine: Engine) -> None:
        assert (await ask(transport))["token_ids"] == [20, 21]
        assert engine.log[-2:] == ["abort", "generate"]

    monkeypatch.setattr(aiohttp.ClientResponse, "start", start)
    run([answer(), answer()], use)


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


def test_a_request_without_a_reply_in_time_is_aborted_and_not_sent_again() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        with pytest.raises(ProviderError, match="--request-seconds") as caught:
            await ask(transport)
        assert caught.value.status_code == 504
        await transport.close()
        assert engine.log == ["generate", "abort"]

    run([hang], use, request_seconds=0.2)


def test_forgetting_an_episode_ends_what_it_still_has_running() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        late = asyncio.create_task(ask(transport))
        await engine.asked.wait()
        transport.forget("trace")
        with pytest.raises(ProviderError, match="episode ended"):
            await late
        await transport.close()
        assert engine.aborts == [{"rid": engine.requests[0]["rid"]}]
        assert transport.turns("trace") == []
        assert not transport._sessions

    run([hang], use)


# Aborting everything


def test_aborting_reaches_every_worker_and_drops_the_rank_suffix() -> None:
    async def main() -> None:
        async with serve(Engine([answer()])) as one, serve(Engine([answer()])) as two, serve(Engine([])) as router:
            router.routes["/workers"] = {
                "workers": [{"url": f"{one.url}@0"}, {"url": f"{one.url}@1"}, {"url": f"{two.url}@0"}]
            }
            transport = SGLangTransport(router.url)
            assert await transport.abort_all() == {one.url: None, two.url: None}
            assert one.aborts == two.aborts == [{"abort_all": True}]
            await transport.close()

    asyncio.run(main())


def test_workers_are_listed_the_older_way_where_the_newer_is_missing() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        assert await transport.workers() == [engine.url]
        engine.routes["/list_workers"] = {"urls": ["http://10.0.0.1:30000@3", "http://10.0.0.2:30000/"]}
        assert await transport.workers() == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]

    run([answer()], use)


def test_a_model_has_a_path_and_names_where_the_engine_tells_them() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        assert await transport.models() == []
        engine.routes["/get_model_info"] = {"model_path": None}
        engine.routes["/v1/models"] = {"data": [{"id": "policy"}, {"id": "adapter"}]}
        assert await transport.models() == ["policy", "adapter"]
        engine.routes["/get_model_info"] = {"model_path": "/models/m"}
        engine.routes["/v1/models"] = {"data": None}
        assert await transport.models() == ["/models/m"]

    run([answer()], use)


def test_a_worker_address_without_a_rank_stays_as_it_is() -> None:
    assert clean_worker_url("http://host:30000") == "http://host:30000"
    assert clean_worker_url("http://user@host:30000@12") == "http://user@host:30000"


# What rolltape does not do


@pytest.mark.parametrize("extra", [{"features": {"kwargs_data": None}}, {"stream": True}])
def test_images_and_streams_are_refused_as_unsupported_without_asking_the_engine(extra: dict[str, Any]) -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> None:
        with pytest.raises(ProviderError) as caught:
            await transport.post("", body={"token_ids": [1], "sampling_params": {}, **extra})
        assert caught.value.status_code == 400
        assert is_unsupported(str(caught.value))
        assert engine.requests == []

    run([answer()], use)


def test_credentials_in_the_address_go_with_every_request() -> None:
    async def use(transport: SGLangTransport, engine: Engine) -> Any:
        secured = SGLangTransport(
            engine.url.replace("://", "://ann:pass@") + "/v1/?api_key=abc", limits=transport.limits
        )
        try:
            await ask(secured)
            assert await secured.healthy() is None
            return engine.headers[0]["Authorization"], secured.base_url.rpartition("/v1")[2]
        finally:
            await secured.close()

    assert run([answer()], use) == ("Basic YW5uOnBhc3M=", "?api_key=abc")
