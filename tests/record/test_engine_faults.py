"""Every fault of the demo engine, over real HTTP."""

import asyncio
import json
import math
from typing import Any

import aiohttp
import pytest

from rolltape.record.engine import DemoEngine, Fault, Faults
from rolltape.schema.errors import BadInput

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}, "return_logprob": True}


def ask(faults: Faults, count: int = 1) -> list[tuple[int, str]]:
    """Status and text of `count` equal requests to an engine with these faults."""

    async def run(url: str) -> list[tuple[int, str]]:
        answers = []
        async with aiohttp.ClientSession() as session:
            for _ in range(count):
                async with session.post(f"{url}/generate", json=BODY) as response:
                    answers.append((response.status, await response.text()))
        return answers

    with DemoEngine(faults=faults).serve_in_thread() as engine:
        return asyncio.run(run(engine.url))


def reply_with(fault: Fault) -> dict[str, Any]:
    [(status, text)] = ask(Faults.of([f"{fault.label}=1"]))
    assert status == 200
    reply: dict[str, Any] = json.loads(text)
    return reply


def test_every_fault_has_its_own_name_and_says_what_it_does() -> None:
    assert len({fault.label for fault in Fault}) == len(Fault)
    assert all(fault.effect for fault in Fault)
    assert all(Fault.named(fault.label) is fault for fault in Fault)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault.status])
def test_status_faults_answer_with_their_status_and_a_json_body(fault: Fault) -> None:
    [(status, text)] = ask(Faults.of([f"{fault.label}=1"]))
    assert status == fault.status
    assert fault.label in json.loads(text)["error"]["message"]


def test_drop_connection_closes_without_an_answer() -> None:
    with pytest.raises(aiohttp.ClientConnectionError):
        ask(Faults.of(["drop_connection=1"]))


def test_malformed_json_is_a_200_that_breaks_off() -> None:
    [(status, text)] = ask(Faults.of(["malformed_json=1"]))
    assert status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_aborts_are_200s_that_differ_in_what_they_keep() -> None:
    partial, minimal, empty = (
        reply_with(fault) for fault in (Fault.ABORT_PARTIAL, Fault.ABORT_MINIMAL, Fault.ABORT_EMPTY)
    )
    assert {reply["meta_info"]["finish_reason"]["type"] for reply in (partial, minimal, empty)} == {"abort"}
    assert len(partial["output_ids"]) == len(partial["meta_info"]["output_token_logprobs"]) == 10
    assert partial["meta_info"]["completion_tokens"] == 10
    assert set(minimal["meta_info"]) == {"id", "finish_reason"}
    assert empty["output_ids"] == empty["meta_info"]["output_token_logprobs"] == []


def test_an_empty_completion_stops_without_a_token() -> None:
    reply = reply_with(Fault.EMPTY_COMPLETION)
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    assert reply["meta_info"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("fault", "entries"), [(Fault.LOGPROBS_SHORT, 19), (Fault.LOGPROBS_SURPLUS, 21), (Fault.LOGPROB_NAN, 20)]
)
def test_logprobs_can_be_too_few_or_too_many(fault: Fault, entries: int) -> None:
    reply = reply_with(fault)
    assert len(reply["output_ids"]) == 20
    assert len(reply["meta_info"]["output_token_logprobs"]) == entries


def test_logprobs_can_be_absent_nan_null_or_of_another_token() -> None:
    assert "output_token_logprobs" not in reply_with(Fault.LOGPROBS_ABSENT)["meta_info"]
    assert math.isnan(reply_with(Fault.LOGPROB_NAN)["meta_info"]["output_token_logprobs"][-1][0])
    assert reply_with(Fault.LOGPROB_NULL)["meta_info"]["output_token_logprobs"][-1][0] is None
    other = reply_with(Fault.LOGPROB_OTHER_TOKEN)
    assert other["meta_info"]["output_token_logprobs"][-1][1] != other["output_ids"][-1]


def test_counts_and_finish_reasons_can_be_wrong() -> None:
    assert reply_with(Fault.WRONG_COUNT)["meta_info"]["completion_tokens"] == 21
    assert reply_with(Fault.FINISH_NULL)["meta_info"]["finish_reason"] is None
    assert reply_with(Fault.FINISH_UNKNOWN)["meta_info"]["finish_reason"] == {"type": "banana"}
    assert reply_with(Fault.FINISH_STRING)["meta_info"]["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["weight_version", "prompt_tokens", "cached_tokens", "id"])
def test_optional_fields_can_be_absent(field: str) -> None:
    assert field not in reply_with(Fault.named(f"no_{field}"))["meta_info"]


def test_faults_strike_as_often_as_told_and_equally_for_equal_seeds() -> None:
    statuses = [[status for status, _ in ask(Faults.of(["http_503=0.5"], seed=seed), 200)] for seed in (1, 1, 2)]
    assert statuses[0] == statuses[1] != statuses[2]
    assert 70 < statuses[0].count(503) < 130


def test_a_fault_can_be_limited_to_some_strikes() -> None:
    assert [status for status, _ in ask(Faults.of(["http_429=1:2"]), 4)] == [429, 429, 200, 200]


def test_faults_are_set_read_and_counted_at_run_time() -> None:
    async def run(url: str) -> tuple[int, Any, int]:
        async with aiohttp.ClientSession() as session:
            wrong = await session.post(f"{url}/faults", json={"faults": {"flood": 1}})
            assert wrong.status == 400
            assert "drop_connection" in (await wrong.json())["error"]["message"]
            await session.post(f"{url}/faults", json={"faults": {"http_404": 1}})
            shown = await (await session.get(f"{url}/faults")).json()
            return wrong.status, shown, (await session.post(f"{url}/generate", json=BODY)).status

    with DemoEngine().serve_in_thread() as engine:
        _, shown, status = asyncio.run(run(engine.url))
        assert shown["faults"] == {"http_404": {"probability": 1.0, "times": None}}
        assert status == 404
        assert engine.requests["fault:http_404"] == 1


@pytest.mark.parametrize("text", ["http_503", "http_503=often", "flood=0.1", "http_503=2"])
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        Faults.of([text])


def test_latency_comes_on_top_of_another_fault() -> None:
    faults = Faults.of(["latency=1", "http_503=1"], latency=0.05, jitter=0.01)
    assert [status for status, _ in ask(faults)] == [503]
