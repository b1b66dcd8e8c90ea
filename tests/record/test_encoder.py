"""Traces that end together are taken apart together, and none waits for long or for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rolltape.record.writing import encoder as module
from rolltape.record.writing.encoder import Encoder
from rolltape.record.writing.store import Entry
from rolltape.record.writing.worker import Worker
from rolltape.schema.errors import BadInput


class Written:
    """What was handed on to be written, a list a call; `held` keeps it from being written."""

    def __init__(self) -> None:
        self.worker = Worker("writes", lambda: None, 60.0)
        self.calls: list[list[str]] = []
        self.held = threading.Event()
        self.held.set()

    def write(self, entries: Any) -> Future[Any]:
        self.calls.append([e.trace_id for e in entries])
        return self.worker.submit(self.held.wait)


@pytest.fixture
def written() -> Iterator[Written]:
    found = Written()
    yield found
    found.held.set()
    found.worker.stop(10.0)


@pytest.fixture
def encoder(written: Written) -> Iterator[Encoder]:
    found = Encoder("encodes", written.worker, written.write)
    yield found
    found.stop()


def entry(name: str) -> Entry:
    return Entry(None, trace_id=name)


def noted(waits: list[float]) -> Callable[..., bool]:
    """In place of an event's `wait`: waits for the window are noted, and not made."""
    real = threading.Event.wait

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        if timeout != module.WINDOW:
            return real(self, timeout)
        waits.append(timeout)
        return False

    return wait


async def put(encoder: Encoder, name: str, seconds: float = 10.0) -> Entry:
    return await encoder.put(lambda: entry(name), seconds)


def test_what_ends_within_the_window_is_written_together(
    encoder: Encoder, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 0.5)

    async def several() -> list[Entry]:
        first = asyncio.ensure_future(put(encoder, "a"))
        await asyncio.sleep(0.05)
        return [await first, *await asyncio.gather(*(put(encoder, name) for name in "de"))]

    async def all_of_them() -> list[Entry]:
        found = await asyncio.gather(several(), asyncio.sleep(0.1), put(encoder, "b"), put(encoder, "c"))
        return [*found[0], *found[2:]]

    assert [e.trace_id for e in asyncio.run(all_of_them())] == ["a", "d", "e", "b", "c"]
    assert sorted(map(sorted, written.calls)) == [["a", "b", "c"], ["d", "e"]]


def test_traces_one_after_the_other_hardly_wait(
    encoder: Encoder, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", noted(waits))

    async def one_by_one() -> None:
        for i in range(200):
            await put(encoder, str(i))

    asyncio.run(one_by_one())
    assert [len(call) for call in written.calls] == [1] * 200
    assert len(waits) == 9  # 1, 2, 4, 8, 16, 32, 64 and 64 others lie between


def test_waiting_is_taken_up_again_when_traces_come_together(
    encoder: Encoder, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", noted(waits))
    encoder._barren = encoder._skip = 64
    free = threading.Event()
    encoder.run(free.wait)  # while the thread is busy, two come

    async def two() -> None:
        both = asyncio.gather(put(encoder, "a"), put(encoder, "b"))
        await asyncio.sleep(0.01)
        free.set()
        await both
        assert waits == []
        await put(encoder, "c")

    asyncio.run(two())
    assert (written.calls, waits) == ([["a", "b"], ["c"]], [module.WINDOW])


def test_not_more_than_a_few_go_on_at_once(encoder: Encoder, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 60.0)

    async def many() -> None:
        await asyncio.gather(*(put(encoder, str(i)) for i in range(2 * module.MOST)))

    asyncio.run(asyncio.wait_for(many(), 30.0))  # a batch that is full does not wait
    assert [len(call) for call in written.calls] == [module.MOST] * 2


def test_one_that_cannot_be_taken_apart_costs_nobody_else(encoder: Encoder, written: Written) -> None:
    def broken() -> Entry:
        raise ValueError("no trace")

    async def three() -> list[Any]:
        found = (put(encoder, "a"), encoder.put(broken, 10.0), put(encoder, "b"))
        return await asyncio.gather(*found, return_exceptions=True)

    a, error, b = asyncio.run(three())
    assert (a.trace_id, str(error), b.trace_id) == ("a", "no trace", "b")
    assert written.calls == [["a", "b"]]


def test_who_is_cancelled_leaves_the_others_and_is_written_too(encoder: Encoder, written: Written) -> None:
    async def two() -> Entry:
        gone = asyncio.ensure_future(put(encoder, "a"))
        stays = asyncio.ensure_future(put(encoder, "b"))
        await asyncio.sleep(0)
        gone.cancel()
        found = await stays
        assert gone.cancelled()
        return found

    assert asyncio.run(two()).trace_id == "b"
    assert written.calls == [["a", "b"]]


def test_a_disk_that_hangs_holds_nobody_longer_than_is_allowed(encoder: Encoder, written: Written) -> None:
    written.held.clear()

    async def both() -> float:
        begin = time.monotonic()
        await asyncio.gather(put(encoder, "a", 0.2), put(encoder, "b", 0.2))
        return time.monotonic() - begin

    assert 0.2 <= asyncio.run(both()) < 5.0


def test_a_job_does_not_wait_for_the_window_and_comes_after_what_was_put(
    encoder: Encoder, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 60.0)

    async def put_then_run() -> list[list[str]]:
        trace = asyncio.ensure_future(put(encoder, "a"))
        await asyncio.sleep(0.05)
        seen = await asyncio.wrap_future(encoder.run(lambda: list(written.calls)))
        await trace
        return seen

    assert asyncio.run(asyncio.wait_for(put_then_run(), 30.0)) == [["a"]]


def test_every_event_loop_is_told_of_its_own(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 0.2)
    found: list[str] = []

    def loop(name: str) -> None:
        found.append(asyncio.run(put(encoder, name)).trace_id)

    threads = [threading.Thread(target=loop, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(found) == [str(i) for i in range(8)]


def test_event_loops_do_not_wait_for_each_other_s_window(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 2.0)
    threads = [threading.Thread(target=lambda: asyncio.run(put(encoder, "a"))) for _ in range(6)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert time.monotonic() - begin < 6.0


def test_what_is_there_is_written_before_one_that_takes_long(
    encoder: Encoder, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 0.2)

    def slow() -> Entry:
        assert written.calls == []
        time.sleep(0.3)
        return entry("b")

    def last() -> Entry:
        assert written.calls == [["a", "b"]]
        return entry("c")

    async def three() -> list[Entry]:
        return await asyncio.gather(put(encoder, "a"), encoder.put(slow, 10.0), encoder.put(last, 10.0))

    assert [e.trace_id for e in asyncio.run(three())] == ["a", "b", "c"]
    assert written.calls == [["a", "b"], ["c"]]


def test_who_comes_after_the_end_is_told(encoder: Encoder) -> None:
    encoder.stop()
    with pytest.raises(BadInput, match="the recorder is closed"):
        asyncio.run(put(encoder, "a"))
    with pytest.raises(BadInput, match="the recorder is closed"):
        encoder.run(int)


def test_an_end_of_the_process_in_a_trace_s_own_code_is_an_error_of_that_trace(encoder: Encoder) -> None:
    def ends() -> Entry:
        raise SystemExit(3)

    async def two() -> list[Any]:
        return await asyncio.gather(encoder.put(ends, 10.0), put(encoder, "b"), return_exceptions=True)

    error, b = asyncio.run(two())
    assert (type(error), str(error), b.trace_id) == (RuntimeError, "SystemExit: 3", "b")


def test_stopped_it_still_does_what_was_put(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 60.0)

    async def put_and_stop() -> Entry:
        trace = asyncio.ensure_future(put(encoder, "a"))
        await asyncio.sleep(0.05)
        encoder.stop()
        return await trace

    assert asyncio.run(asyncio.wait_for(put_and_stop(), 30.0)).trace_id == "a"
