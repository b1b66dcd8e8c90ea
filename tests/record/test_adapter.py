"""Recording a rollout function of the shape of Miles' own Verifiers adapter, as it is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext

from rolltape.record import Recorder, attach
from rolltape.record.adapter import _handed, close
from rolltape.record.client import RendererSettings, RolloutClient
from rolltape.record.config import env_config, load_environment, load_tasks
from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine, write_tokenizer
from rolltape.record.inprocess.harness import close_client
from rolltape.record.sampling import Limits
from rolltape.record.transport import SGLangTransport
from rolltape.replay.run import Run, open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema.errors import BadInput, RunConflict

GROUPS = 3


class Setting:
    """What adapters are made of, for a test: an engine, and hooks that the test may set."""

    engine: str
    tokenizer: str
    before_group: Callable[[int], None] = staticmethod(lambda _: None)
    changed: Callable[[Any], None] = staticmethod(lambda _: None)
    handed: Callable[[list[Any]], list[Any]] = staticmethod(lambda groups: groups)


class Adapter:
    """Task groups through Verifiers, samples out: the shape of Miles' adapter, in its order of things."""

    def __init__(self, input: Any) -> None:
        self.args = input.args
        self.env = load_environment(env_config({"taskset": {"id": "rolltape.record.demo"}}))
        self._tasks = load_tasks(self.env, rollouts=2)
        self._next_train_task_idx: int | None = None

    def context(self) -> ModelContext:
        client = RolloutClient(
            SGLangTransport(Setting.engine, limits=Limits(response=256)),
            model="demo",
            tokenizer=Setting.tokenizer,
            renderer=RendererSettings("qwen3", enable_thinking=False),
            pool_size=1,
        )
        return ModelContext(model="demo", client=client, sampling=vf.SamplingConfig(max_tokens=256))

    @asynccontextmanager
    async def serving(self) -> Any:
        context = self.context()
        try:
            async with self.env.serving():
                yield context
        finally:
            await context.client.close()

    async def train(self, input: Any) -> Any:
        if self._next_train_task_idx is None:
            self._next_train_task_idx = input.rollout_id * GROUPS
        groups: list[list[Any]] = []
        async with self.serving() as context:
            while len(groups) < GROUPS:
                Setting.before_group(len(groups))
                task = self._tasks[self._next_train_task_idx % len(self._tasks)]
                self._next_train_task_idx += 1
                traces = await self.env.episode(task, context, n=2).run(asyncio.Semaphore(4))
                if not any(trace.has_error for trace in traces):
                    groups.append([self.sample(trace) for trace in traces])
        return SimpleNamespace(samples=Setting.handed(groups), metrics={})

    async def evaluate(self, _: Any) -> Any:
        async with self.serving() as context:
            traces = await self.env.episode(self._tasks[0], context, n=2).run()
        return SimpleNamespace(data={"demo": {"rewards": [trace.reward for trace in traces]}}, metrics={})

    def sample(self, trace: Any) -> Any:
        logprobs = trace.branches[0].logprobs
        made = SimpleNamespace(
            routing_key=trace.id, reward=trace.reward, remove_sample=False, rollout_log_probs=logprobs
        )
        Setting.changed(made)
        return made


class Awaited(Adapter):
    """Called like Miles' adapter."""

    async def __call__(self, input: Any) -> Any:
        return await (self.evaluate(input) if input.evaluation else self.train(input))


class Plain(Adapter):
    """Called without await; Miles takes both."""

    def __call__(self, input: Any) -> Any:
        return asyncio.run(_whole(self.evaluate(input) if input.evaluation else self.train(input)))


class Lazy(Adapter):
    """A plain call that gives an awaitable."""

    def __call__(self, input: Any) -> Any:
        return self.evaluate(input) if input.evaluation else self.train(input)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run, with the engine that adapters ask."""
    folder = tmp_path / "run"
    monkeypatch.setenv("ROLLTAPE_RUN", str(folder))
    with DemoEngine(tokenizer_dir=tokenizer, policy=DemoPolicy()).serve_in_thread() as engine:
        for name, value in {"engine": engine.url, "tokenizer": str(tokenizer)}.items():
            monkeypatch.setattr(Setting, name, value, raising=False)
        yield folder
    close(folder)


def constructed(adapter: Any, **args: Any) -> Any:
    given = {"hf_checkpoint": "demo", "lr": 1e-6, "wandb_key": "planted-mosquito", "router": object()}
    return adapter(SimpleNamespace(args=SimpleNamespace(**{**given, **args}), data_source=None))


def call(adapter: Any, rollout_id: int, evaluation: bool = False) -> Any:
    output = adapter(SimpleNamespace(rollout_id=rollout_id, evaluation=evaluation))
    return asyncio.run(_whole(output)) if asyncio.iscoroutine(output) else output


async def _whole(*outputs: Any) -> Any:
    """The last of some outputs, in an event loop that ends with them."""
    try:
        return (await asyncio.gather(*outputs))[-1]
    finally:
        await close_client()


def clean(folder: Path) -> Run:
    run = open_run(folder)
    assert [str(finding) for finding in verify(run).findings] == []
    return run


def fates(run: Run, step: int, split: str = "train") -> list[str]:
    return run.table(split, step, columns=["disposition"]).column(0).to_pylist()


@pytest.mark.parametrize("theirs", [Awaited, Plain, Lazy])
def test_an_adapters_steps_are_recorded_and_its_samples_are_the_same(run: Path, theirs: type) -> None:
    adapter = constructed(attach(theirs))
    assert isinstance(adapter, theirs)
    assert type(adapter).__name__ == theirs.__name__
    for step in range(3):
        samples = call(adapter, step).samples
        assert [len(group) for group in samples] == [2, 2, 2]
        recorded = open_run(run)
        rows = recorded.table(steps=step, columns=["trace_id", "reward", "disposition"]).to_pylist()
        assert {row["trace_id"]: row["reward"] for row in rows if row["disposition"] == "emitted"} == {
            sample.routing_key: sample.reward for group in samples for sample in group
        }
    close(run)
    recorded = clean(run)
    assert [(s.step, s.attempt, s.cursor, s.next_group_index) for s in recorded.steps()] == [
        (0, 0, 3, 3),
        (1, 0, 7, 7),  # one group failed
        (2, 0, 10, 10),
    ]
    assert sorted(fates(recorded, 1)) == ["emitted"] * 6 + ["error"] * 2
    settings = recorded.attempts[0].settings
    assert (settings["lr"], settings["wandb_key"], "router" in settings) == (1e-6, "***", False)
    assert (recorded.info["model"], recorded.info["taskset"]) == ("demo", "rolltape.record.demo")


def test_an_instance_is_changed_in_place(run: Path) -> None:
    adapter = constructed(Awaited)
    assert attach(adapter) is adapter
    assert isinstance(adapter, Awaited)
    call(adapter, 0)
    assert fates(clean(run), 0) == ["emitted"] * 6


def test_a_call_that_raises_records_what_had_ended_and_raises_the_same(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def stop(groups: int) -> None:
        if groups == 2:
            raise Stopped("in the middle")

    monkeypatch.setattr(Setting, "before_group", staticmethod(stop))
    for step, theirs in enumerate((Awaited, Plain)):
        adapter = constructed(attach(theirs))
        with pytest.raises(Stopped, match="in the middle"):
            call(adapter, step)
        assert set(fates(open_run(run), step)) <= {"filtered", "error"}
        assert len(fates(open_run(run), step)) >= 4
    clean(run)


def test_evaluations_are_recorded_under_the_name_of_the_taskset_each_with_a_number_of_its_own(run: Path) -> None:
    training, evaluation = constructed(attach(Awaited)), constructed(attach(Awaited))
    call(evaluation, 0, evaluation=True)
    call(training, 0)
    call(evaluation, 0, evaluation=True)  # Miles evaluates before training, and after each step
    call(evaluation, 5, evaluation=True)
    recorded = clean(run)
    (name,) = set(recorded.splits()) - {"train"}
    assert [step.step for step in recorded.steps(name)] == [0, 1, 5]
    assert fates(recorded, 5, name) == ["eval", "eval"]
    assert set(recorded.attempts) == {0}


def test_training_and_evaluation_may_run_at_once(run: Path) -> None:
    training, evaluation = constructed(attach(Awaited)), constructed(attach(Awaited))
    calls = [training(SimpleNamespace(rollout_id=0, evaluation=False))]
    calls += [evaluation(SimpleNamespace(rollout_id=0, evaluation=True))]
    asyncio.run(_whole(*calls))
    recorded = clean(run)
    assert fates(recorded, 0) == ["emitted"] * 6
    assert fates(recorded, 0, recorded.splits()[1]) == ["eval"] * 2


def test_a_run_that_steps_back_is_continued_and_supersedes(run: Path) -> None:
    adapter = constructed(attach(Awaited))
    for step in range(3):
        call(adapter, step)
    close(run)
    again = constructed(attach(Awaited))
    call(again, 1)
    recorded = clean(run)
    assert [(s.step, s.attempt) for s in recorded.steps()] == [(0, 0), (1, 1)]
    assert len(recorded.all_commits) == 4
    assert recorded.attempts[1].start_step == 1
    indices = [group.group_index for commit in recorded.all_commits for group in commit.groups]
    assert len(set(indices)) == len(indices)


def test_what_the_trainer_changed_of_a_sample_is_recorded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count()

    def change(sample: Any) -> None:
        number = next(counter)
        if number == 0:
            sample.reward = 9.5
        if number == 1:
            sample.remove_sample = True
        sample.rollout_log_probs = [value - 1.0 for value in sample.rollout_log_probs]

    monkeypatch.setattr(Setting, "changed", staticmethod(change))
    monkeypatch.setattr(Setting, "handed", staticmethod(lambda groups: [[[s] for s in group] for group in groups[:2]]))
    call(constructed(attach(Awaited), recompute_logprobs_via_prefill=True), 0)
    rows = (
        clean(run).table(columns=["disposition", "handed_reward", "remove_sample", "recomputed_logprobs"]).to_pylist()
    )
    assert [row["disposition"] for row in rows] == ["emitted"] * 4 + ["filtered"] * 2
    assert [row["handed_reward"] for row in rows] == ["9.5", None, None, None, None, None]
    assert [row["remove_sample"] for row in rows] == [None, [True], None, None, None, None]
    assert all(len(row["recomputed_logprobs"]) > 0 for row in rows[:4])


def test_recording_that_fails_does_not_stop_training_unless_it_is_strict(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def commit(*_: Any, **__: Any) -> None:
        raise RunConflict("committed before")

    monkeypatch.setattr(Recorder, "commit", commit)
    assert len(call(constructed(attach(Awaited)), 0).samples) == GROUPS
    assert "a step could not be recorded: committed before" in caplog.text
    close(run)
    with pytest.raises(RunConflict):
        call(constructed(attach(Awaited, strict=True)), 1)


def test_without_a_folder_nothing_is_attached(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLTAPE_RUN")
    with pytest.raises(BadInput, match="set ROLLTAPE_RUN"):
        constructed(attach(Awaited))
    adapter = constructed(Awaited)
    with pytest.raises(BadInput, match="set ROLLTAPE_RUN"):
        attach(adapter)
    assert type(adapter) is Awaited
    assert not run.exists()


def test_a_folder_of_another_run_is_refused_before_any_episode(run: Path) -> None:
    Recorder.open(run, model="another").close()
    with pytest.raises(RunConflict, match="'another' then, 'demo' now"):
        call(constructed(attach(Awaited)), 0)


def test_traces_of_another_step_that_are_handed_over_are_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    samples = [SimpleNamespace(routing_key=name, reward=2.0) for name in ("mine", "older")]
    tape: Any = SimpleNamespace(step=3, rewards={"mine": {"ok": 1.0}}.get)
    handed = _handed(samples, tape, recomputed=False)
    assert {name: changes["handed_reward"] for name, changes in handed.items()} == {"mine": 2.0}
    assert "step 3: 1 traces of other steps were handed over, older first" in caplog.text
