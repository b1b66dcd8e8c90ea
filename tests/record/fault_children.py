"""What the processes do that tests kill: they record or recover, and die at a given moment.

`python fault_children.py` serves: it forks a child per request, so that one starts in milliseconds, with everything
imported. A request is a line of JSON, {"start": function, "args": {…}} or {"wait": process}; so is the answer.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parent))

from record_build import at, commit, emitted, lifelike, trace

from rolltape.record.recorder import Recorder, StoreOptions
from rolltape.record.writing.recover import recover
from rolltape.schema import Group, Outcome, Step
from rolltape.schema.errors import RolltapeError
from rolltape.schema.table import rows_to_table

DIED = 9
"""Exit code of a child that died where it was to."""


def die(where: str, call: int, when: str) -> None:
    """End this process at the `call`-th call of a function: `before` it, `after` it, or after `half` of what it writes."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os._exit(DIED)
        if calls == call and when == "half":
            args = (*args[:-1], args[-1][: len(args[-1]) // 2])
        result = real(*args, **kwargs)
        if calls == call:
            os._exit(DIED)
        return result

    setattr(owner, name, dying)


def record_two_steps(root: str, acks: str, **death: Any) -> None:
    """Step 0 is committed: a, b, c, of which a is recorded twice. Step 1 is not: d of two that started."""
    if death:
        die(**death)
    recorder = Recorder.open(root, resume=True)
    with open(acks, "a", encoding="utf-8", buffering=1) as told:
        for i, name in enumerate("abc"):
            recorder.started("train", 0)
            record = trace(name, rewards={"ok": 0.0})
            if recorder.add(record, at(0, group_index=0, rollout_index=i)):
                told.write(name + "\n")
        again = trace("a")
        recorder.add(again, at(0, group_index=0, rollout_index=0))
        group = Group.from_records(
            [again, *(trace(n, rewards={"ok": 0.0}) for n in "bc")], group_index=0, expected_size=3, step=0
        )
        outcomes = [
            *emitted("a", "b"),
            Outcome(trace_id="c", disposition="filtered", reason="flat", handed_reward={"x": 0.5}),
        ]
        done = recorder.commit_now("train", 0, groups=[group], outcomes=outcomes, record=Step(cursor=7))
        assert done.commit is not None
        recorder.started("train", 1, 2)
        if recorder.add(trace("d"), at(1, group_index=1)):
            told.write("d\n")
    os._exit(0)


def recover_once(root: str, **death: Any) -> None:
    """Recover a run."""
    if death:
        die(**death)
    recover(root)
    os._exit(0)


def write_for_ever(root: str, writer: str, acks: str, seed: int, step: int, traces: int = 6) -> None:
    """Record and commit steps until killed; every acknowledged trace is told, then every committed step."""
    rng = random.Random(seed)
    try:
        recorder = Recorder.open(root, writer=writer, resume=True, start_step=step, store=StoreOptions(fsync="never"))
    except RolltapeError as error:
        Path(acks).write_text(f"refused {error}\n")
        os._exit(1)
    with open(acks, "a", encoding="utf-8", buffering=1) as told:
        told.write(f"opened {recorder.attempt}\n")
        while True:
            names = [f"{writer}.{seed}.{step}.{i}" for i in range(traces)]
            recorder.started("train", step, len(names))
            if seed % 2:
                for i, name in enumerate(names):
                    if recorder.add(lifelike(rng, name), at(step, group_index=i, rollout_index=0)):
                        told.write(f"trace {name}\n")
            else:
                asyncio.run(_at_once(recorder, rng, step, names, told))
            commit(recorder, step, emitted(*names))
            told.write(f"step {step}\n")
            step += 1


async def _at_once(recorder: Recorder, rng: random.Random, step: int, names: list[str], told: TextIO) -> None:
    """Record traces on an event loop, all at the same time."""

    async def one(i: int, name: str) -> None:
        if await recorder.trace(lifelike(rng, name), at(step, group_index=i, rollout_index=0)):
            told.write(f"trace {name}\n")

    await asyncio.gather(*(one(i, name) for i, name in enumerate(names)))


def hold(root: str, writer: str, told: str) -> None:
    """Open a run, and do nothing."""
    recorder = Recorder.open(root, writer=writer, resume=True)
    Path(told).write_text(str(recorder.attempt))
    time.sleep(600)


def begin(root: str, model: str, told: str) -> None:
    """Begin a run of a model, or say why not."""
    try:
        recorder = Recorder.open(root, model=model, writer=model, resume=True)
    except RolltapeError as error:
        Path(told).write_text(str(error))
        os._exit(1)
    recorder.close()
    os._exit(0)


def record_until(folder: str, number: str) -> None:
    """Record traces of a step that does not end, until a signal comes; its handler closes the recorder and ends."""
    recorder = Recorder.open(Path(folder) / "run")

    def end(*_: object) -> None:
        status = recorder.close(20)
        print("closed lost", status.lost, flush=True)
        os._exit(0)

    signal.signal(getattr(signal, number), end)
    for i in range(10**6):
        recorder.started("train", i // 8)
        if recorder.add(trace(f"t{i}"), at(i // 8)):
            print("trace", f"t{i}", flush=True)


def _serve() -> None:
    functions: dict[str, Callable[..., None]] = {
        f.__name__: f for f in (record_two_steps, recover_once, write_for_ever, hold, begin)
    }
    rows_to_table([])  # imports what pyarrow needs for it, once and not in every child
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            try:
                functions[request["start"]](**request["args"])
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(70)
        print(answer, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["until"]:
        record_until(*sys.argv[2:])
    _serve()
