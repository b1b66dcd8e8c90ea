"""Live runs from the first episode to the last commit, on the demo engine and the bundled taskset."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rolltape.record.cli import record, summary_text
from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine, Fault, Faults, write_tokenizer
from rolltape.record.engine.faults import Switch
from rolltape.record.live import LiveOptions, LiveSummary, _other_model, cancelled_unsaid, run_live
from rolltape.record.progress import Quiet, StepNews, Tally, TraceNews
from rolltape.record.recorder import Recorder
from rolltape.replay.convert import convert
from rolltape.replay.digest import digest
from rolltape.replay.listing.runs import list_runs
from rolltape.replay.options import ConvertOptions
from rolltape.replay.outcomes import finish, read_outcomes
from rolltape.replay.run import Run, open_run
from rolltape.schema.errors import BadInput, RunConflict

DEMO = '[taskset]\nid = "rolltape.record.demo"\n'
numbers = itertools.count()


@dataclass
class Heard(Quiet):
    """A display that remembers, and calls `on_trace` for each."""

    notes: list[str] = field(default_factory=list)
    steps: list[StepNews] = field(default_factory=list)
    traces: list[TraceNews] = field(default_factory=list)
    on_trace: Callable[[int], None] = lambda _: None

    def note(self, message: str) -> None:
        self.notes.append(message)

    def trace(self, news: TraceNews) -> None:
        self.traces.append(news)
        self.on_trace(len(self.traces))

    def step_ended(self, news: StepNews) -> None:
        self.steps.append(news)


@dataclass
class Bench:
    """An engine and a place for runs."""

    engine: DemoEngine
    folder: Path
    tokenizer: Path

    def options(self, environment: str = DEMO, **changes: Any) -> LiveOptions:
        config = self.folder / f"env{next(numbers)}.toml"
        config.write_text(environment)
        given = {
            "config": config,
            "run": self.folder / "run",
            "engine": self.engine.url,
            "model": "demo",
            "tokenizer": str(self.tokenizer),
            "renderer": "qwen3",
            "enable_thinking": False,
            "max_response": 256,
            "renderer_pool": 1,
            "retry_seconds": 5.0,
        }
        return LiveOptions(**{**given, **changes})

    def run(self, environment: str = DEMO, heard: Heard | None = None, **changes: Any) -> tuple[LiveSummary, Run]:
        options = self.options(environment, **changes)
        summary = asyncio.run(run_live(options, progress=heard or Heard()))
        return summary, open_run(options.run)

    def taskset(self, source: str) -> str:
        """The id of a new taskset module."""
        name = f"live_{next(numbers)}"
        (self.folder / f"{name}.py").write_text(source)
        return name


class Reasons(DemoPolicy):
    """The demo's policy, which also answers "Think." with a thought before the reply."""

    def candidates(self, prompt_text: str) -> Any:
        if "Think." in prompt_text:
            return [(1.0, "Let me see.\n</think>\n\nIt is 42."), (1.0, "<think>\nLet me see.\n</think>\n\nIt is 42.")]
        return super().candidates(prompt_text)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(str(tmp_path))
    with DemoEngine(tokenizer_dir=tokenizer, policy=Reasons()).serve_in_thread() as engine:
        yield Bench(engine, tmp_path, tokenizer)


def rows(run: Run, split: str = "train", steps: int | None = None) -> list[dict[str, Any]]:
    names = ["trace_id", "step", "group_index", "rollout_index", "try_number", "disposition", "reason", "error_types"]
    names += ["turn_weight_version", "turn_retries", "num_turns", "reward", "stop_condition", "task_idx"]
    return list(run.table(split, steps, columns=names).to_pylist())


def counts(run: Run, split: str = "train") -> dict[str, int]:
    total: dict[str, int] = {}
    for step in run.steps(split):
        for name, count in step.counts.items():
            total[name] = total.get(name, 0) + count
    return total


def same_again(run: Run) -> bool:
    """Whether a replay of every step gives the digests that were recorded."""
    for commit in run.commits():
        table = run.table("train", commit.part.step)
        again = convert(table, commit.groups, ConvertOptions.from_dict(commit.step.options))
        handed = finish(again.groups, read_outcomes(table), commit.step)
        if (digest(again.groups), digest(handed)) != (commit.step.digest_converted, commit.step.digest_handed):
            return False
    return True


def faulty(**switches: float) -> Faults:
    return Faults({Fault.named(name): Switch(probability) for name, probability in switches.items()})


def test_steps_are_recorded_converted_and_committed_with_their_counters(bench: Bench) -> None:
    heard = Heard()
    summary, run = bench.run(heard=heard, steps=3)
    assert summary.exit_code == 0
    assert counts(run) == {"started": 48, "emitted": 44, "error": 4, "lost": 0}
    steps = run.steps()
    assert [(s.step, s.cursor, s.next_group_index) for s in steps] == [(0, 4, 4), (1, 8, 8), (2, 12, 12)]
    assert [s.next_sample_index for s in steps] == [16, 28, 44]
    assert [index for s in steps for index in s.batch or ()] == list(range(44))
    assert [row["task_idx"] for row in rows(run)[::4]] == list(range(12))
    assert [news.emitted for news in heard.steps] == [16, 12, 16]
    assert summary.untaught is None
    assert same_again(run)


def test_a_row_holds_what_the_engine_said_of_each_of_its_turns(bench: Bench) -> None:
    bench.engine.weight_version = "17"
    _, run = bench.run(groups=1)
    for row in rows(run):
        assert row["turn_weight_version"] == ["17"] * row["num_turns"]
        assert row["turn_retries"] == [0] * row["num_turns"]
    table = run.table(columns=["model", "tokenizer", "sampling", "renderer"]).to_pylist()[0]
    assert table["model"] == "demo"
    assert json.loads(table["sampling"])["max_tokens"] == 256
    assert json.loads(table["renderer"]) == {"name": "qwen3", "enable_thinking": False}


def test_every_try_of_a_retried_rollout_is_a_row(bench: Bench) -> None:
    bench.engine.faults = faulty(http_403=0.3)
    summary, run = bench.run(groups=3, rollout_retries=2)
    total = counts(run)
    assert total["retried"] > 0
    assert total["lost"] == 0
    assert total["started"] == 12 + total["retried"]
    retried = [row for row in rows(run) if row["disposition"] == "retried"]
    assert all(row["error_types"] == ["ProviderError"] and "HTTP 403" in row["reason"] for row in retried)
    last = {(row["group_index"], row["rollout_index"]): row["try_number"] for row in rows(run)}
    assert max(last.values()) >= 1
    assert summary.counts["retried"] == total["retried"]


def test_an_environment_that_always_fails_ends_the_run_with_the_error(bench: Bench) -> None:
    bench.engine.faults = faulty(http_403=1.0)
    summary, run = bench.run(steps=10_000, max_failed_groups=6)
    assert summary.exit_code == 1
    assert summary.stopped == "failing"
    assert "6 task groups failed one after the other" in (summary.message or "")
    assert "HTTP 403" in (summary.message or "")
    assert len(run.steps()) == 2
    total = counts(run)
    assert total["error"] + total.get("cancelled", 0) == total["started"]
    assert total["error"] >= 24
    assert run.commits("train")[-1].step.cursor == 0


def test_engine_faults_cost_rollouts_and_a_replay_gives_the_same_samples(bench: Bench) -> None:
    bench.engine.faults = Faults({fault: Switch(0.02) for fault in Fault if fault is not Fault.LATENCY})
    summary, run = bench.run(steps=3, rollout_retries=3, rollouts=4, min_group_size=2)
    assert not summary.recording_failures
    assert counts(run)["lost"] == 0
    assert same_again(run)


GROUPED = """
import verifiers.v1 as vf

class Asked(vf.Task):
    @vf.reward
    async def there(self, trace) -> float:
        return 1.0

    @vf.group_reward
    async def unfair(self, traces) -> list[float]:
        if self.data.idx == 1:
            raise ValueError("no referee")
        return [0.5 for _ in traces]

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=i, prompt="?"), self.config.task) for i in range(3)]

__all__ = ["Asks"]
"""


def in_process(taskset: str, more: str = "") -> str:
    return f'{more}\n[taskset]\nid = "{taskset}"\n[harness]\nid = "rolltape.record.inprocess"\n'


def test_ids_that_the_model_does_not_have_are_not_trained(bench: Bench) -> None:
    model = bench.folder / "model"
    model.mkdir()
    for size, emitted in ((10_000, 8), (300, 0)):
        (model / "config.json").write_text(json.dumps({"vocab_size": size}))
        summary, _ = bench.run(model=str(model), run=bench.folder / f"run{size}", rollouts=2)
        assert summary.counts["emitted"] == emitted
        [step] = open_run(bench.folder / f"run{size}").steps()
        assert step.options["vocab_size"] == size
    assert re.search(r"token_id: node 0 has token id \d+ at token \d+; expected 0 to 299", str(summary.reasons))


def test_a_group_reward_that_raises_costs_its_group_and_its_traces_stay(bench: Bench) -> None:
    summary, run = bench.run(in_process(bench.taskset(GROUPED)), groups=3, rollouts=2, max_response=8)
    assert summary.exit_code == 0
    by_group = {row["group_index"]: (row["disposition"], row["reason"], row["reward"]) for row in rows(run)}
    assert by_group[0] == ("emitted", None, 1.5)
    assert by_group[1][0] == "incomplete_group"
    assert "no referee" in by_group[1][1]
    assert by_group[1][2] == 1.0
    assert same_again(run)


def test_rewards_that_are_no_number_are_left_out_of_the_means_that_are_shown(bench: Bench) -> None:
    source = GROUPED.replace("return 1.0", 'return float("nan") if self.data.idx else 1.0').replace("== 1", "< 0")
    heard = Heard()
    summary, _ = bench.run(in_process(bench.taskset(source)), heard, groups=3, rollouts=2, max_response=8)
    assert [step.reward for step in heard.steps] == [1.5]
    tally = Tally()
    for news in heard.traces:
        tally.add(news)
    assert (tally.reward, summary.counts["emitted"]) == (1.0, 2)


def test_an_evaluation_records_every_task_and_makes_no_samples(bench: Bench) -> None:
    summary, run = bench.run(eval=True, eval_name="holdout", rollouts=2, steps=2)
    assert summary.exit_code == 0
    assert run.splits() == ["eval-holdout"]
    first = rows(run, "eval-holdout", 0)
    assert [row["task_idx"] for row in first[::2]] == list(range(12))
    assert {row["disposition"] for row in first} == {"eval", "error"}
    assert all(step.batch is None for step in run.steps("eval-holdout"))


def test_an_interrupt_cancels_what_runs_and_commits_what_has_ended(bench: Bench) -> None:
    bench.engine.faults = Faults({Fault.LATENCY: Switch(1.0)}, latency=0.1)
    heard = Heard(on_trace=lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 5 else None)
    summary, run = bench.run(heard=heard, steps=50, concurrency=3)
    assert summary.exit_code == 130
    assert len(run.steps()) == 1
    total = counts(run)
    assert total["lost"] == 0
    assert total["cancelled"] >= 1
    assert total["started"] == len(rows(run))
    assert any("Ctrl-C again" in note for note in heard.notes)
    assert same_again(run)


def test_a_run_whose_last_step_was_cut_short_is_not_listed_as_complete(bench: Bench) -> None:
    bench.run(steps=1, groups=2)
    [listed] = list_runs(bench.folder / "run").runs
    assert (listed.state, listed.why) == ("complete", None)
    bench.engine.faults = Faults({Fault.LATENCY: Switch(1.0)}, latency=0.1)
    stop = Heard(on_trace=lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 5 else None)
    bench.run(heard=stop, steps=1, groups=6, concurrency=4, resume=True)
    [listed] = list_runs(bench.folder / "run").runs
    assert (listed.steps, listed.steps_asked, listed.state) == (2, 2, "unfinished")
    assert re.fullmatch(r"step 1 was cut short: [1-6] of 6 task groups ended\.", listed.why or "")


@pytest.mark.parametrize(
    ("model", "served", "told"),
    [
        ("Qwen/Qwen3-8B", ["Qwen/Qwen3-8B"], False),
        ("Qwen/Qwen3-8B", ["/models/qwen3-8b/"], False),
        ("/models/Qwen3-8B", ["/cache/models--Qwen--Qwen3-8B/snapshots/0123abcd"], False),
        ("policy", ["/models/Qwen3-8B", "policy"], False),
        ("Qwen/Qwen3-8B", [], False),
        ("Qwen/Qwen3-8B", ["Qwen/Qwen3-0.6B"], True),
    ],
)
def test_names_of_a_model_are_compared_without_where_it_lies(model: str, served: list[str], told: bool) -> None:
    assert (_other_model(model, served) is not None) == told


def test_an_engine_of_another_model_is_told_once(bench: Bench) -> None:
    heard = Heard()
    bench.run(heard=heard, groups=1, steps=2)
    assert heard.notes == []
    summary, _ = bench.run(heard=heard, model="Qwen/Qwen3-8B", groups=1, steps=2, run=bench.folder / "other")
    assert heard.notes == ["The engine serves demo, but --model says Qwen/Qwen3-8B, and that is what is recorded."]
    assert summary.exit_code == 0


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = bench.run(groups=1)

    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("rolltape.record.live.run_live", loaded)
    app = typer.Typer()
    app.command()(record)
    config = bench.options().config
    words = [str(config), "--run", str(bench.folder / "run"), "--engine", bench.engine.url, "--model", "demo"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, f"holds run {run.run_id} already" in result.output) == (2, True)


def test_a_run_that_is_not_there_is_begun_and_that_is_said(bench: Bench) -> None:
    heard = Heard()
    _, run = bench.run(heard=heard, groups=1, resume=True)
    assert len(run.steps()) == 1
    assert [note for note in heard.notes if "begins at step 0" in note] == [
        f"{bench.folder / 'run'} holds no step to go on after; this begins at step 0."
    ]


def test_a_resumed_run_takes_the_tasks_again_that_a_stop_cut_short(bench: Bench) -> None:
    bench.engine.faults = Faults({Fault.LATENCY: Switch(1.0)}, latency=0.1)
    stop = Heard(on_trace=lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 8 else None)
    _, run = bench.run(heard=stop, groups=6, concurrency=4)
    cut = {row["task_idx"] for row in rows(run) if row["disposition"] in ("cancelled", "incomplete_group")}
    begun = {row["task_idx"] for row in rows(run)}
    [commit] = run.commits("train")
    assert 0 < len(begun - cut) < 6
    assert commit.step.cursor == min(set(range(6)) - (begun - cut))
    bench.engine.faults = Faults({})
    _, run = bench.run(groups=6, steps=1, resume=True)
    assert {row["task_idx"] for row in rows(run, steps=1)} == set(range(commit.step.cursor, commit.step.cursor + 6))


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGINT, "Ctrl-C again aborts."), (signal.SIGTERM, "Another SIGTERM aborts.")]
)
def test_a_second_signal_ends_the_process_with_what_to_do(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, again: str
) -> None:
    def end(number: int) -> None:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        raise KeyboardInterrupt(number)

    class Impatient(Heard):
        def note(self, message: str) -> None:
            super().note(message)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(signal, "raise_signal", end)
    heard = Impatient(on_trace=lambda traces: os.kill(os.getpid(), number) if traces == 2 else None)
    options = bench.options(run=bench.folder / "my run", steps=50, concurrency=2)
    with pytest.raises(KeyboardInterrupt, match=str(int(number))):
        asyncio.run(run_live(options, progress=heard))
    assert heard.notes[0].endswith(again)
    told = f"Aborted in the run {options.run}; `rolltape recover '{options.run}'` commits what had ended.\n"
    assert capsys.readouterr().err == told


SCORES_SLOWLY = """
import asyncio, os, signal
import verifiers.v1 as vf

class Asked(vf.Task):
    @vf.reward
    async def there(self, trace) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=0, prompt="?"), self.config.task)]

__all__ = ["Asks"]
"""


def test_an_interrupt_inside_a_task_leaves_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        with cancelled_unsaid():
            await asyncio.create_task(interrupted())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    gc.collect()
    assert caplog.records == []


def test_rollouts_that_are_cancelled_while_they_are_scored_leave_no_errors_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    environment = in_process(bench.taskset(SCORES_SLOWLY)) + "[timeout]\nscoring = 30\n"
    summary, run = bench.run(environment, groups=1, rollouts=1, max_response=8)
    gc.collect()
    assert summary.exit_code == 143
    assert counts(run)["cancelled"] == 1
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


SHOWS = """
import verifiers.v1 as vf

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

class Asks(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        prompt = [{"role": "user", "content": [IMAGE]}]
        return [vf.Task(vf.TaskData(idx=0, prompt=prompt), self.config.task)]

__all__ = ["Asks"]
"""


def test_a_request_rolltape_cannot_serve_ends_the_run_with_the_setting_to_change(bench: Bench) -> None:
    environment = in_process(bench.taskset(SHOWS))
    summary, run = bench.run(environment, rollout_retries=5, steps=9, concurrency=1)
    assert summary.stopped == "unsupported"
    assert "Use a text-only taskset" in (summary.message or "")
    assert counts(run)["error"] >= 1
    assert "retried" not in counts(run)
    assert bench.engine.requests["/generate"] == 0


THINKS = """
import verifiers.v1 as vf

class Asked(vf.Task):
    @vf.reward
    async def there(self, trace) -> float:
        return 1.0

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=0, prompt="Think."), self.config.task)]

async def user(task, messages):
    return [{"role": "user", "content": "Again."}] if len(messages) < 5 else None

__all__ = ["Asks"]
"""


@pytest.fixture
def thinks(bench: Bench) -> str:
    """An environment whose model reasons in each of three turns, with user turns in between."""
    taskset = bench.taskset(THINKS)
    return in_process(taskset) + f'user = "{taskset}:user"\n'


def test_forked_traces_are_dropped_with_a_message_that_names_the_settings(bench: Bench, thinks: str) -> None:
    heard = Heard()
    summary, run = bench.run(thinks, heard=heard, enable_thinking=True)
    assert summary.exit_code == 1
    assert summary.counts["failed_check"] == 16
    assert any("--thinking-retention all" in note and "--no-thinking" in note for note in heard.notes)
    assert same_again(run)


def test_the_retention_that_the_message_names_keeps_one_branch(bench: Bench, thinks: str) -> None:
    summary, _ = bench.run(thinks, enable_thinking=True, thinking_retention="all")
    assert summary.counts["emitted"] == 16


def test_siblings_are_numbered_apart_over_the_steps(bench: Bench, thinks: str) -> None:
    summary, run = bench.run(thinks, enable_thinking=True, branch_policy="siblings", steps=2)
    assert summary.exit_code == 0
    batch = [index for step in run.steps() for index in step.batch or ()]
    assert len(batch) > summary.counts["emitted"]
    assert batch == list(range(len(batch)))
    assert same_again(run)


LATE = """
import verifiers.v1 as vf

class Asked(vf.Task):
    @vf.reward
    async def there(self, trace) -> float:
        return float(len(trace.nodes))

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=0, prompt="?"), self.config.task)]

__all__ = ["Asks"]
"""


def test_a_reply_after_the_timeout_of_its_rollout_changes_nothing(bench: Bench) -> None:
    bench.engine.faults = Faults({Fault.LATENCY: Switch(1.0)}, latency=0.4)
    environment = in_process(bench.taskset(LATE)) + "[timeout]\nrollout = 0.1\n"
    _, run = bench.run(environment, groups=1, rollouts=1, max_response=8)
    (row,) = rows(run)
    assert (row["stop_condition"], row["reward"], row["num_turns"]) == ("harness_timeout", 0.0, 0)
    assert row["disposition"] == "empty"
    assert bench.engine.requests["/abort_request"] == 1


def test_a_run_whose_groups_have_equal_rewards_says_that_they_teach_nothing(bench: Bench) -> None:
    flat = in_process(bench.taskset(LATE))
    summary, _ = bench.run(flat, groups=2, rollouts=2, steps=2, max_response=8)
    assert "\n4 of 4 groups had equal rewards in all their rollouts, and so teach nothing.\n" in summary_text(summary)
    assert [(step.flat, step.comparable) for step in summary.steps] == [(2, 2), (2, 2)]
    evaluated, _ = bench.run(flat, run=bench.folder / "eval", eval=True, rollouts=2, max_response=8)
    assert evaluated.untaught is None
    summary.steps[0] = replace(summary.steps[0], flat=0)
    assert summary.untaught is None, "half of them is not most"
    summary.steps[:] = [replace(summary.steps[0], flat=1, comparable=1)]
    assert summary.untaught == "1 of 1 group had equal rewards in all its rollouts, and so teaches nothing."


@pytest.mark.parametrize(("fault", "unversioned"), [("no_weight_version=1", True), ("no_weight_version=1:1", False)])
def test_a_run_of_an_engine_that_never_named_its_weight_version_says_so(
    bench: Bench, fault: str, unversioned: bool
) -> None:
    bench.engine.faults = Faults.of([fault])
    summary, run = bench.run(groups=1, rollouts=2)
    versions = [version for row in rows(run) for version in row["turn_weight_version"]]
    assert (len(versions) > 1, versions.count(None)) == (True, len(versions) if unversioned else 1)
    assert summary.to_dict()["unversioned"] == len(versions) * unversioned
    said = (
        f"\nThe engine named no weight version with {len(versions)} turns, so lag and drift by weight version cannot be"
    )
    assert (said in summary_text(summary)) == unversioned


def test_a_trace_that_cannot_be_recorded_is_counted_and_the_others_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, calls, real = Heard(), itertools.count(), Recorder.trace

    async def trace(self: Recorder, *arguments: Any) -> None:
        if next(calls) == 4:
            raise OSError("disk full")
        await real(self, *arguments)

    monkeypatch.setattr(Recorder, "trace", trace)
    summary, run = bench.run(in_process(bench.taskset(LATE)), heard=heard, groups=8, rollouts=2, max_response=8)
    assert summary.recording_failures == 1
    assert summary.exit_code == 1
    assert counts(run)["lost"] == 1
    assert counts(run)["emitted"] == 14
    assert any("disk full" in note for note in heard.notes)


def test_a_step_that_cannot_be_committed_ends_the_run_with_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def commit(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Recorder, "commit", commit)
    summary = asyncio.run(run_live(bench.options(in_process(bench.taskset(LATE)), groups=1, steps=3, max_response=8)))
    assert (summary.stopped, summary.exit_code, summary.steps) == ("recording", 1, [])
    assert "Step 0 of train could not be committed: no space left" in (summary.message or "")


def test_a_run_is_continued_after_its_last_step(bench: Bench) -> None:
    bench.run(steps=1, groups=5)
    with pytest.raises(RunConflict, match=r"--resume \(in Python resume=True\)"):
        bench.run(steps=1, groups=5)
    _, run = bench.run(steps=2, groups=5, resume=True)
    assert [(s.step, s.attempt, s.cursor) for s in run.steps()] == [(0, 0, 5), (1, 1, 10), (2, 1, 15)]
    assert [row["task_idx"] for row in rows(run)[::4]] == [i % 12 for i in range(15)]
    indices = [index for step in run.steps() for index in step.batch or ()]
    assert len(set(indices)) == len(indices)


def test_tasks_are_shuffled_the_same_way_for_one_seed(bench: Bench, tmp_path: Path) -> None:
    orders = [
        [row["task_idx"] for row in rows(bench.run(run=tmp_path / name, groups=12, shuffle=True, seed=seed)[1])[::4]]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(12))


# Refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": "http://127.0.0.1:9"}, "No engine answers at http://127.0.0.1:9"),
        ({"tokenizer": "/no/such/folder"}, "--tokenizer"),
        ({"rollouts": 1}, "@group_reward fastest, shortest"),
        (
            {"renderer": "default", "enable_thinking": None},
            "offers calculator, and DefaultRenderer cannot render tools. Name",
        ),
        ({"renderer": "qwen33"}, "There is no renderer 'qwen33' (did you mean 'qwen3'?); there are"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_is_written(
    bench: Bench, changes: Mapping[str, Any], says: str
) -> None:
    options = bench.options(**changes)
    with pytest.raises(BadInput) as caught:
        asyncio.run(run_live(options))
    assert says in str(caught.value)
    assert not Path(options.run).exists()
    assert bench.engine.requests["/generate"] == 0


# The command line

app = typer.Typer(add_completion=False)
app.command()(record)


def invoke(bench: Bench, *arguments: str) -> Any:
    options = bench.options()
    given = [str(options.config), "--run", str(options.run), "--engine", options.engine, "--model", "demo"]
    given += ["--tokenizer", str(bench.tokenizer), "--renderer", "qwen3", "--no-thinking", "--renderer-pool", "1"]
    return CliRunner().invoke(app, [*given, *arguments])


def test_the_command_prints_a_summary_as_json_and_progress_elsewhere(bench: Bench) -> None:
    result = invoke(bench, "--steps", "2", "--groups", "2", "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["counts"]["emitted"], len(summary["steps"]), summary["exit_code"]) == (16, 2, 0)
    assert "train step 1: 8 traces" in result.stderr


def test_the_command_ends_with_what_became_of_the_traces(bench: Bench) -> None:
    result = invoke(bench, "--steps", "2", "--quiet")
    assert result.exit_code == 0
    assert "2 steps in" in result.stdout
    assert "28 emitted, 4 error" in result.stdout
    assert "4 x TaskError: task finalize" in result.stdout
    assert result.stderr == ""


def test_every_option_of_a_run_can_be_given_on_the_command_line() -> None:
    parameters = {parameter.name for parameter in typer.main.get_command(app).params}
    renamed = {"evaluate": "eval", "thinking": "enable_thinking", "stop_token_id": "stop_token_ids"}
    given = {renamed.get(str(name), str(name)) for name in parameters} - {"as_json", "quiet"}
    assert given == set(LiveOptions.names())


def test_the_help_says_that_steps_are_added_to_a_run_that_is_resumed() -> None:
    (steps,) = [p for p in typer.main.get_command(app).params if p.name == "steps"]
    assert "with --resume, so many more" in str(getattr(steps, "help", ""))


def test_a_refusal_is_one_sentence_and_exit_code_2(bench: Bench) -> None:
    result = invoke(bench, "--rollouts", "1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: The taskset 'rolltape.record.demo' compares")
    assert "Traceback" not in result.output
    assert invoke(bench, "--no-such-option").exit_code == 2


def test_what_the_config_says_wrong_is_said_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "codex.toml").write_text('taskset.id = "x"\nharness.id = "codex"')
    (tmp_path / "none.toml").write_text("max_turns = 3")
    code = """
import sys
from pathlib import Path
from rolltape.record.cli import run_with
from rolltape.record.options import LiveOptions
from rolltape.schema.errors import BadInput
for name in ("nope", "codex", "none"):
    try:
        run_with(LiveOptions(config=Path(sys.argv[1]) / f"{name}.toml", run="r", engine="http://e", model="m"))
    except BadInput as error:
        print(error)
print(sys.modules.keys() & {"verifiers", "renderers", "transformers", "torch"})
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    missing, codex, nameless, imported = done.stdout.splitlines()
    assert "There is no file" in missing
    assert "codex harness" in codex
    assert "names no taskset" in nameless
    assert imported == "set()"
