"""The demo engine over real HTTP: distribution, seeds, lengths, stops, caches, aborts."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from rolltape.record.engine import DemoEngine, Vocabulary

PROMPT = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TwoReplies:
    """Knows one question."""

    def candidates(self, prompt_text: str) -> list[tuple[float, str]] | None:
        return [(3.0, "Answer: 12"), (1.0, "Answer: 13, I think")] if "How many?" in prompt_text else None


@contextmanager
def engine(**settings: Any) -> Iterator[DemoEngine]:
    with DemoEngine(**settings).serve_in_thread() as running:
        yield running


def post(url: str, *bodies: dict[str, Any], headers: dict[str, str] | None = None) -> list[tuple[int, Any]]:
    """Status and JSON of each request, sent one after another."""

    async def run() -> list[tuple[int, Any]]:
        answers = []
        async with aiohttp.ClientSession() as session:
            for body in bodies:
                async with session.post(f"{url}/generate", json=body, headers=headers) as response:
                    answers.append((response.status, json.loads(await response.text())))
        return answers

    return asyncio.run(run())


def get(url: str) -> Any:
    async def run() -> Any:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200
            text = await response.text()
            return json.loads(text) if text else None

    return asyncio.run(run())


def send(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async def run() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None

    return asyncio.run(run())


def request(ids: list[int], **sampling: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


def prompt_ids() -> list[int]:
    return Vocabulary.load(None).encode(PROMPT)


def test_a_reply_has_ids_counts_and_one_logprob_per_id() -> None:
    with engine(policy=TwoReplies(), epsilon=0.0) as running:
        [(status, reply)] = post(running.url, request(prompt_ids(), max_new_tokens=64, no_stop_trim=True))
    meta = reply["meta_info"]
    ids = reply["output_ids"]
    assert status == 200
    assert reply["text"] in {"Answer: 12", "Answer: 13, I think"}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert all(entry[2] is None and entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["completion_tokens"] == len(ids)
    assert meta["prompt_tokens"] == len(prompt_ids())
    assert meta["finish_reason"] == {"type": "stop", "matched": ids[-1]}
    assert meta["weight_version"] == "1"
    assert {"id", "cached_tokens", "e2e_latency"} <= set(meta)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3, 0.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_logprobs_of_given_tokens_equal_those_returned_when_sampled(temperature: float, ignore_eos: bool) -> None:
    prompt = prompt_ids()
    sampling = {"temperature": temperature, "max_new_tokens": 60, "ignore_eos": ignore_eos, "top_p": 0.9, "top_k": 40}
    with engine(policy=TwoReplies(), epsilon=0.05) as running:
        for seed in range(8):
            [(_, reply)] = post(running.url, request(prompt, **sampling, sampling_seed=seed))
            sampled = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
            again = {
                **request(prompt + reply["output_ids"], temperature=temperature, max_new_tokens=0),
                "logprob_start_len": len(prompt) - 1,
            }
            [(_, scored)] = post(running.url, again)
            given = scored["meta_info"]["input_token_logprobs"]
            assert given[0] == [None, prompt[-1], None]
            assert [entry[0] for entry in given[1:]] == sampled
            assert [float(np.float32(value)) for value in sampled] == sampled
            assert scored["output_ids"] == []
            assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_probabilities_of_the_next_token_sum_to_one_and_follow_the_candidates() -> None:
    prompt = prompt_ids()
    vocabulary = Vocabulary.load(None)
    with engine(policy=TwoReplies(), epsilon=0.05) as running:
        model = running.model
        begun = vocabulary.encode("Answer: 1")
        probs = [
            np.exp(model.score(np.array([*prompt, *begun, token]), len(prompt) + len(begun), 1.0)[0].astype(float))
            for token in range(vocabulary.size)
        ]
    assert sum(probs) == pytest.approx(1.0, abs=1e-6)
    two, three = vocabulary.encode("2")[0], vocabulary.encode("3")[0]
    assert probs[two] == pytest.approx(0.95 * 0.75 + 0.05 * running.model.unigram.probs[two])
    assert probs[three] == pytest.approx(0.95 * 0.25 + 0.05 * running.model.unigram.probs[three])


def test_drawn_tokens_are_as_frequent_as_their_probabilities() -> None:
    ids = Vocabulary.load(None).encode("no chat here")
    with engine() as running:
        [(_, reply)] = post(running.url, request(ids, max_new_tokens=50_000, ignore_eos=True))
        expected = running.model.unigram.probs
    counts = np.bincount(reply["output_ids"], minlength=len(expected)) / 50_000
    assert np.abs(counts - expected).max() < 0.01


def test_equal_seeds_give_equal_replies_and_others_do_not() -> None:
    ids = Vocabulary.load(None).encode("no chat here")
    with engine() as running:
        replies = post(running.url, *(request(ids, max_new_tokens=50, sampling_seed=seed) for seed in (7, 7, 8)))
    first, again, other = (reply["output_ids"] for _, reply in replies)
    assert first == again
    assert first != other


def test_without_a_seed_the_engine_seed_and_the_count_of_the_prompt_decide() -> None:
    ids = Vocabulary.load(None).encode("no chat here")
    bodies = [request(ids, max_new_tokens=50), request([*ids, 5], max_new_tokens=50), request(ids, max_new_tokens=50)]
    runs = []
    for seed, order in ((1, (0, 1, 2)), (1, (1, 0, 2)), (2, (0, 1, 2))):
        with engine(seed=seed) as running:
            replies = post(running.url, *(bodies[place] for place in order))
        runs.append([tuple(replies[order.index(place)][1]["output_ids"]) for place in range(3)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][2]
    assert set(runs[0]).isdisjoint(runs[2])


def test_lengths_are_kept() -> None:
    ids = Vocabulary.load(None).encode("no chat here")
    with engine(end_hazard=0.2) as running:
        replies = post(
            running.url,
            request(ids, max_new_tokens=10, ignore_eos=True),
            request(ids, max_new_tokens=80, min_new_tokens=40, sampling_seed=1),
            request(ids, max_new_tokens=0),
        )
        end = running.model.vocabulary.turn_end
    (_, exact), (_, least), (_, none) = replies
    assert len(exact["output_ids"]) == 10
    assert exact["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    assert 40 < len(least["output_ids"]) < 80
    assert least["output_ids"].index(end) == len(least["output_ids"]) - 1
    assert none["output_ids"] == []
    assert none["meta_info"]["output_token_logprobs"] == []


def test_min_new_tokens_also_holds_back_scripted_replies() -> None:
    with engine(policy=TwoReplies()) as running:
        [(_, reply)] = post(running.url, request(prompt_ids(), max_new_tokens=60, min_new_tokens=30, sampling_seed=3))
        assert running.model.vocabulary.turn_end not in reply["output_ids"][:30]


def test_stop_texts_and_stop_ids_end_a_reply_with_the_token_that_completes_them() -> None:
    vocabulary = Vocabulary.load(None)
    with engine(policy=TwoReplies(), epsilon=0.0) as running:
        colon = vocabulary.encode(":")[0]
        replies = post(
            running.url,
            request(prompt_ids(), max_new_tokens=60, stop=["r: 1", "never"]),
            request(prompt_ids(), max_new_tokens=60, stop="r: 1", no_stop_trim=True),
            request(prompt_ids(), max_new_tokens=60, stop_token_ids=[colon]),
        )
    (_, trimmed), (_, whole), (_, by_id) = replies
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": "r: 1"}
    assert trimmed["text"] == "Answe"
    assert whole["text"] == "Answer: 1"
    assert trimmed["output_ids"] == whole["output_ids"]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": colon}
    assert by_id["text"] == "Answer"


def test_special_tokens_stay_in_the_text_when_asked_for() -> None:
    with engine(policy=TwoReplies(), epsilon=0.0) as running:
        sampling = {"max_new_tokens": 60, "no_stop_trim": True, "skip_special_tokens": False}
        [(_, reply)] = post(running.url, request(prompt_ids(), **sampling))
    assert reply["text"].endswith("<|im_end|>")


def test_greedy_takes_the_likeliest_reply() -> None:
    with engine(policy=TwoReplies(), epsilon=0.3) as running:
        replies = post(running.url, *(request(prompt_ids(), temperature=0, max_new_tokens=60) for _ in range(3)))
    assert {reply["text"] for _, reply in replies} == {"Answer: 12"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input_ids": [1], "sampling_params": {"max_tokens": 4}}, 500, "max_tokens"),
        ({"input_ids": [1], "sampling_params": {"routed_experts_prompt_start": 4}}, 500, "routed_experts_prompt_start"),
        ({"input_ids": [[1]]}, 400, "list of lists"),
        ({"input_ids": []}, 400, "at least one"),
        ({"input_ids": [1.5]}, 400, "whole numbers"),
        ({"input_ids": [10**9]}, 400, "between 0 and"),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, 400, "n must be 1"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.5}}, 400, "min_p"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, 400, "top_p"),
        ({"input_ids": [1], "logprob_start_len": 5}, 400, "logprob_start_len"),
        ({"input_ids": [1], "stream": True}, 400, "stream"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(body: dict[str, Any], status: int, said: str) -> None:
    with engine() as running:
        [(answered, reply)] = post(running.url, body)
    assert answered == status
    assert said in reply["error"]["message"]


def test_every_sampling_key_of_the_wire_is_accepted() -> None:
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 5,
        "min_new_tokens": 1,
        "sampling_seed": 3,
        "stop": None,
        "stop_token_ids": [3],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "n": 1,
        "ignore_eos": False,
    }
    body = {**request([1, 2], **sampling), "lora_path": None, "priority": 1, "extra_key": "salt", "rid": "mine"}
    with engine() as running:
        [(status, reply)] = post(running.url, body)
    assert status == 200
    assert reply["meta_info"]["id"] == "mine"


def test_cached_tokens_count_the_common_prefix_of_a_routing_key() -> None:
    ids = Vocabulary.load(None).encode("a prompt of some length that comes again and again and again, always the same")
    with engine() as running:
        [(_, first)] = post(running.url, request(ids, max_new_tokens=5), headers={"X-SMG-Routing-Key": "one"})
        longer = [*ids, *first["output_ids"], 3, 4]
        [(_, second)] = post(running.url, request(longer, max_new_tokens=5), headers={"X-SMG-Routing-Key": "one"})
        [(_, other)] = post(running.url, request(longer, max_new_tokens=5), headers={"X-SMG-Routing-Key": "two"})
        [(_, plain)] = post(running.url, request(ids, max_new_tokens=5))
        [(_, same)] = post(running.url, request(ids, max_new_tokens=5))
    cached = [reply["meta_info"]["cached_tokens"] for reply in (first, second, other, plain, same)]
    assert cached == [0, len(ids) + len(first["output_ids"]), 0, 0, len(ids) - 1]


def test_new_weights_change_the_version_and_empty_the_cache() -> None:
    with engine() as running:
        post(running.url, request([1, 2, 3], max_new_tokens=1))
        assert send(f"{running.url}/update_weight_version", {})[1]["new_version"] == "2"
        [(_, reply)] = post(running.url, request([1, 2, 3], max_new_tokens=1))
        assert (reply["meta_info"]["weight_version"], reply["meta_info"]["cached_tokens"]) == ("2", 0)
        send(f"{running.url}/update_weight_version", {"new_version": "step-9"})
        assert get(f"{running.url}/model_info")["weight_version"] == "step-9"


def test_it_says_where_its_workers_are_and_that_it_is_well() -> None:
    with engine() as running:
        assert get(f"{running.url}/health") is None
        assert get(f"{running.url}/workers")["workers"][0]["url"] == running.url
        assert get(f"{running.url}/list_workers") == {"urls": [running.url]}
        assert get(f"{running.url}/get_model_info")["is_generation"] is True


@pytest.mark.parametrize("abort", [{"rid": "slow"}, {"abort_all": True}])
def test_waiting_requests_are_aborted_and_say_so(abort: dict[str, Any]) -> None:
    async def run(url: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            body = {**request([1, 2], max_new_tokens=5), "rid": "slow-1"}
            waiting = asyncio.ensure_future(session.post(f"{url}/generate", json=body))
            for _ in range(2000):
                if running.waiting:
                    break
                await asyncio.sleep(0.005)
            async with session.post(f"{url}/abort_request", json={"rid": "another"}) as response:
                assert response.status == 200
            assert not waiting.done()
            async with session.post(f"{url}/abort_request", json=abort) as response:
                assert response.status == 200
            async with await waiting as response:
                return response.status, await response.json()

    with engine() as running:
        send(f"{running.url}/faults", {"faults": {"latency": 1}, "latency": 60})
        status, reply = asyncio.run(run(running.url))
    assert status == 200
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"


def test_leaving_does_not_wait_for_slow_requests_and_frees_the_port() -> None:
    with engine() as running:
        url, port = running.url, int(running.url.rsplit(":", 1)[1])
        assert url.startswith("http://127.0.0.1:")
    with engine(port=port) as again:
        assert again.url == url
        with pytest.raises(OSError, match="in use"), engine(port=port):
            pass
    with pytest.raises(RuntimeError, match="not running"):
        _ = again.url


def test_a_thousand_concurrent_requests_are_answered() -> None:
    async def run(url: str) -> set[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one(number: int) -> int:
                body = request([number % 500, 1, 2], max_new_tokens=50, ignore_eos=True)
                async with session.post(f"{url}/generate", json=body) as response:
                    return len((await response.json())["output_ids"])

            return set(await asyncio.gather(*(one(number) for number in range(1000))))

    with engine() as running:
        assert asyncio.run(run(running.url)) == {50}
        assert running.requests["/generate"] == 1000
