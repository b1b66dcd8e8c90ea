"""Recording real Verifiers episodes that somebody else runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext

from rolltape.record import Recorder, Tape
from rolltape.record.client import RendererSettings, RolloutClient
from rolltape.record.config import env_config, load_environment, load_tasks
from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine, Fault, Faults, write_tokenizer
from rolltape.record.engine.faults import Switch
from rolltape.record.inprocess.harness import close_client
from rolltape.record.recorder import NotRecorded
from rolltape.record.sampling import Limits
from rolltape.record.transport import SGLangTransport
from rolltape.record.writing.resume import first_index
from rolltape.replay.run import Run, open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema.errors import BadInput

README = Path(__file__).parents[2] / "record" / "README.md"
numbers = itertools.count()

GROUPED = """
import verifiers.v1 as vf
from rolltape.record.inprocess import InProcessHarness

class Asked(vf.Task):
    @vf.reward
    async def there(self, trace) -> float:
        return 1.0

    @vf.group_reward
    async def unfair(self, traces) -> list[float]:
        if self.data.idx == 1:
            raise ValueError("no referee")
        return [0.25 * place for place, _ in enumerate(traces)]

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=i, prompt="?"), self.config.task) for i in range(3)]

class Plain(InProcessHarness):
    pass

__all__ = ["Asks", "Plain"]
"""


@dataclass
class Bench:
    """An engine, and environments whose episodes ask it."""

    engine: DemoEngine
    folder: Path
    tokenizer: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @asynccontextmanager
    async def serving(self, **config: Any) -> AsyncIterator[tuple[Any, list[Any], ModelContext]]:
        """(environment, tasks, model context) while its servers run."""
        environment = load_environment(env_config({"taskset": {"id": self.grouped()}, **config}))
        client = RolloutClient(
            SGLangTransport(self.engine.url, limits=Limits(response=64)),
            model="demo",
            tokenizer=str(self.tokenizer),
            renderer=RendererSettings("qwen3", enable_thinking=False),
            pool_size=1,
        )
        context = ModelContext(model="demo", client=client, sampling=vf.SamplingConfig(temperature=1.0, max_tokens=64))
        try:
            async with environment.serving():
                yield environment, load_tasks(environment, rollouts=4), context
        finally:
            await client.close()
            await close_client()

    def grouped(self) -> str:
        """The id of a taskset of three tasks; the group reward of the second raises."""
        name = f"taped_{next(numbers)}"
        (self.folder / f"{name}.py").write_text(GROUPED)
        return name

    def fail(self, probability: float) -> None:
        self.engine.faults = Faults({Fault.named("http_403"): Switch(probability)})

    def slow(self, seconds: float) -> None:
        self.engine.faults = Faults({Fault.LATENCY: Switch(1.0)}, latency=seconds)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(str(tmp_path))
    with DemoEngine(tokenizer_dir=tokenizer, policy=DemoPolicy()).serve_in_thread() as engine:
        yield Bench(engine, tmp_path, tokenizer)


@pytest.fixture
def recorder(bench: Bench) -> Iterator[Recorder]:
    recorder = Recorder.open(bench.run, model="demo", taskset="taped")
    yield recorder
    recorder.close()


KEYED = (
    GROUPED.replace("vf.Taskset[Asked, vf.TasksetConfig]", "vf.Taskset[Asked, Keyed]")
    .replace(
        "class Asks(",
        """class Keyed(vf.TasksetConfig):
    search_key: str = ""

class Asks(""",
    )
    .replace("return 1.0", "trace.info['heard'] = 'of the taskset: mosquito; of the harness: dragonfly'; return 1.0")
)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def clean(path: Path) -> Run:
    run = open_run(path)
    assert [str(finding) for finding in verify(run).findings] == []
    for commit in run.commits() + run.commits("eval") if "eval" in run.splits() else run.commits():
        counts = dict(commit.step.counts)
        assert counts.pop("started") == sum(counts.values())
    return run


def fates(run: Run, split: str = "train") -> list[tuple[int, int, int, str]]:
    names = ["group_index", "rollout_index", "try_number", "disposition"]
    return [tuple(row.values()) for row in run.table(split, columns=names).to_pylist()]


def test_the_example_of_the_readme_records_an_episode(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    text = README.read_text().partition("## Record episodes of your own")[2]
    example, context = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    scope: dict[str, Any] = {}
    here = {
        "http://127.0.0.1:30000": bench.engine.url,
        'tokenizer="Qwen/Qwen3-0.6B"': f"tokenizer={str(bench.tokenizer)!r}",
    }
    for named, mine in (*here.items(), ("Qwen/Qwen3-0.6B", "demo"), ("1024", "64")):
        assert named in context
        context = context.replace(named, mine)
    exec("async def example(environment, task, context):\n" + textwrap.indent(example, "    "), scope)
    exec(f"async def made():\n{textwrap.indent(context, '    ')}\n    return context", scope)

    async def main() -> None:
        async with bench.serving() as (environment, tasks, _):
            monkeypatch.setattr(type(environment), "serving", lambda _: _nothing())
            context = await scope["made"]()
            await scope["example"](environment, tasks[0], context)
            await context.client.close()

    asyncio.run(main())
    run = clean(bench.folder / "runs" / "taped")
    assert fates(run) == [(0, n, 0, "leftover") for n in range(4)]
    (group,) = run.groups()
    assert {name: (r.count, r.sum) for name, r in group.rewards.items()} == {"there": (4, 4.0), "unfair": (4, 1.5)}
    rows = run.table(columns=["rewards", "model", "sampling"]).to_pylist()
    assert [dict(row["rewards"])["unfair"] for row in rows] == [0.0, 0.25, 0.5, 0.75]
    assert rows[0]["model"] == "demo"
    assert '"max_tokens":64' in rows[0]["sampling"].replace(" ", "")


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("named", [True, False])
def test_secrets_of_the_configuration_are_masked_where_a_trace_tells_them(
    bench: Bench, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Those of the taskset's configuration, which no episode shows, only of an environment that is named."""
    monkeypatch.setitem(globals(), "GROUPED", KEYED)
    monkeypatch.setenv("JUDGE_TOKEN", "dragonfly")
    name = bench.grouped()

    async def main() -> None:
        config = {"taskset": {"id": name, "search_key": "mosquito"}, "harness": {"forward_env": ["JUDGE_TOKEN"]}}
        async with bench.serving(**config) as (environment, tasks, context):
            tape = Tape(recorder, step=0, environment=environment if named else None)
            await tape.episode(environment.episode(tasks[0], context, n=2)).run()
            await tape.end()

    asyncio.run(main())
    told = f"of the taskset: {'***' if named else 'mosquito'}; of the harness: ***"
    assert {json.loads(row["info"])["heard"] for row in clean(bench.run).table(columns=["info"]).to_pylist()} == {told}


def test_every_try_of_a_retried_rollout_is_recorded(bench: Bench, recorder: Recorder) -> None:
    bench.fail(0.4)

    async def main() -> list[Any]:
        async with bench.serving(retries={"rollout": {"max_retries": 3}}) as (environment, tasks, context):
            tape = Tape(recorder, step=0)
            runs = [tape.episode(environment.episode(tasks[i], context, n=4)).run() for i in (0, 2, 0)]
            groups = await asyncio.gather(*runs)
            handed = {t.id: {} for group in groups if not any(t.has_error for t in group) for t in group}
            await tape.end(handed)
            return groups

    groups = asyncio.run(main())
    run = clean(bench.run)
    tries = fates(run)
    assert sum(fate == "retried" for *_, fate in tries) > 0
    for group, rollout in itertools.product(range(3), range(4)):
        mine = [(number, fate) for g, r, number, fate in tries if (g, r) == (group, rollout)]
        assert [number for number, _ in mine] == list(range(len(mine)))
        assert [fate == "retried" for _, fate in mine] == [True] * (len(mine) - 1) + [False]
    returned = {trace.id: trace for group in groups for trace in group}
    rows = run.table(columns=["trace_id", "disposition", "rewards", "error_types", "reason"]).to_pylist()
    for row in rows:
        if row["disposition"] == "retried":
            assert row["trace_id"] not in returned
            assert "HTTP 403" in row["reason"]
        else:
            trace = returned[row["trace_id"]]
            assert dict(row["rewards"] or {}) == trace.rewards
            assert len(row["error_types"] or ()) == len(trace.errors)


def test_a_rollout_that_is_cancelled_is_recorded_as_far_as_it_came(bench: Bench, recorder: Recorder) -> None:
    async def main() -> None:
        async with bench.serving() as (environment, tasks, context):
            tape = Tape(recorder, step=0)
            episode = tape.episode(environment.episode(tasks[0], context, n=32))
            running = asyncio.ensure_future(episode.run(asyncio.Semaphore(1)))
            await until(lambda: recorder.rows("train", 0).num_rows >= 1)
            bench.slow(600)
            await until(lambda: bench.engine.waiting > 0)
            running.cancel()
            await tape.end({})
            assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)

    asyncio.run(main())
    run = clean(bench.run)
    tries = fates(run)
    assert {fate for *_, fate in tries} == {"cancelled", "incomplete_group"}
    assert run.groups() == []
    assert run.steps()[0].counts["lost"] == 0
    reasons = run.table(columns=["disposition", "reason"]).to_pylist()
    assert {r["reason"] for r in reasons if r["disposition"] == "incomplete_group"} == {"its group was cancelled"}


def test_a_group_reward_that_raises_reaches_the_caller_and_costs_the_group(bench: Bench, recorder: Recorder) -> None:
    async def main() -> None:
        async with bench.serving() as (environment, tasks, context):
            tape = Tape(recorder, step=3, first_group=7)
            with pytest.raises(Exception, match="no referee"):
                await tape.episode(environment.episode(tasks[1], context, n=2)).run()
            good = await tape.episode(environment.episode(tasks[2], context, n=2)).run()
            await tape.end({trace.id: {} for trace in good}, cursor=5)

    asyncio.run(main())
    run = clean(bench.run)
    assert fates(run) == [(7, n, 0, "incomplete_group") for n in (0, 1)] + [(8, n, 0, "emitted") for n in (0, 1)]
    assert "no referee" in run.table(columns=["reason"]).to_pylist()[0]["reason"]
    assert [group.group_index for group in run.groups()] == [8]
    assert (run.steps()[0].cursor, run.steps()[0].next_group_index) == (5, 9)


def test_groups_are_numbered_on_from_step_to_step_and_from_attempt_to_attempt(bench: Bench) -> None:
    async def taped(recorder: Recorder, *steps: int, split: str = "train") -> None:
        async with bench.serving() as (environment, tasks, context):
            for step in steps:
                tape = Tape(recorder, step=step, split=split)
                for _ in range(2):
                    await tape.episode(environment.episode(tasks[0], context, n=2)).run()
                await tape.end()

    def open_one(**options: Any) -> Recorder:
        return Recorder.open(bench.run, model="m", taskset="t", **options)

    first = open_one()
    other = open_one(writer="b", resume=True)
    asyncio.run(taped(first, 0, 1))
    asyncio.run(taped(first, 0, split="eval"))
    asyncio.run(taped(other, 1, 2))
    first.close()
    other.close()
    again = open_one(resume=True, start_step=2)
    asyncio.run(taped(again, 2, 3))
    again.close()
    run = clean(bench.run)
    lane = first_index("b")
    found = {(s.step, s.writer): s.next_group_index for s in run.steps()}
    assert found == {(0, "main"): 2, (1, "main"): 4, (1, "b"): lane + 2, (2, "main"): 6, (3, "main"): 8}
    groups = [(g.step, g.group_index) for g in run.groups()]
    assert groups == [(0, 0), (0, 1), (1, lane), (1, lane + 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]
    assert [g.group_index for g in run.groups("eval")] == [0, 1]


def test_outcomes_follow_what_the_trainer_took(bench: Bench, recorder: Recorder) -> None:
    async def main() -> None:
        async with bench.serving() as (environment, tasks, context):
            tape = Tape(recorder, step=0)
            bench.fail(0.0)
            whole, part, none = [
                await tape.episode(environment.episode(tasks[0], context, n=2)).run() for _ in range(3)
            ]
            bench.fail(1.0)
            await tape.episode(environment.episode(tasks[2], context, n=2)).run()
            taken: dict[str, Any] = {trace.id: {} for trace in whole}
            taken[part[0].id] = {"remove_sample": (True,), "handed_reward": 9.0}
            assert tape.rewards(none[1].id) == {"there": 1.0, "unfair": 0.25}
            assert tape.rewards("unknown") is None
            await tape.end(taken)

    asyncio.run(main())
    run = clean(bench.run)
    assert [fate for *_, fate in fates(run)] == ["emitted"] * 3 + ["filtered"] * 3 + ["error"] * 2
    rows = run.table(columns=["reason", "remove_sample", "handed_reward"]).to_pylist()
    assert rows[2]["remove_sample"] == [True]
    assert rows[2]["handed_reward"] == "9.0"
    assert [row["reason"] for row in rows[3:6]] == [
        "the trainer took its group without it",
        "the trainer did not take its group",
        "the trainer did not take its group",
    ]


def test_an_evaluation_has_its_name_and_no_samples(bench: Bench, recorder: Recorder) -> None:
    async def main() -> None:
        async with bench.serving() as (environment, tasks, context):
            tape = Tape(recorder, step=2, split="eval", eval_name="holdout")
            await tape.episode(environment.episode(tasks[0], context, n=2)).run()
            await tape.end()

    asyncio.run(main())
    assert [fate for *_, fate in fates(open_run(bench.run), "eval-holdout")] == ["eval", "eval"]
    assert not verify(open_run(bench.run)).findings


def test_a_trace_that_was_taken_without_being_recorded_is_refused(recorder: Recorder) -> None:
    tape = Tape(recorder, step=4)
    with pytest.raises(BadInput, match="1 of 1 emitted traces are none that step 4 recorded, the first 'nope'"):
        asyncio.run(tape.end({"nope": {}}))
    assert asyncio.run(tape.end({})).commit is not None


def test_a_try_that_outlives_its_step_is_counted_lost_and_ends_undisturbed(
    bench: Bench, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltape.record.tape.LONGEST_WAIT", 0.05)
    bench.slow(0.4)

    async def main() -> list[Any]:
        async with bench.serving() as (environment, tasks, context):
            tape = Tape(recorder, step=0)
            running = asyncio.ensure_future(tape.episode(environment.episode(tasks[0], context, n=2)).run())
            await asyncio.sleep(0.1)
            await tape.end({})
            with pytest.raises(BadInput, match="has ended; make a Tape"):
                tape.episode(environment.episode(tasks[0], context, n=2))
            return await running

    assert len(asyncio.run(main())) == 2
    assert open_run(bench.run).steps()[0].counts == {"started": 2, "lost": 2}
    assert not verify(open_run(bench.run)).errors


def test_recording_that_fails_stops_no_episode_unless_it_is_strict(
    bench: Bench, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trace(*_: Any) -> bool:
        raise NotRecorded("the disk is full")

    async def main() -> list[Any]:
        async with bench.serving() as (environment, tasks, context):
            return await Tape(recorder, step=0).episode(environment.episode(tasks[0], context, n=2)).run()

    monkeypatch.setattr(Recorder, "trace", trace)
    assert len(asyncio.run(main())) == 2
    recorder.strict = True
    with pytest.raises(NotRecorded, match="disk is full"):
        asyncio.run(main())
