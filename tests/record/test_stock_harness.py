"""A stock Verifiers harness for real: its program in the subprocess runtime, on the demo engine."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext

from rolltape.record.client import RendererSettings, RolloutClient
from rolltape.record.config import load_config, load_environment, load_tasks
from rolltape.record.engine import DemoEngine, write_tokenizer
from rolltape.record.sampling import Limits
from rolltape.record.transport import SGLangTransport

TASKSET = """
import verifiers.v1 as vf

class Asked(vf.Task):
    @vf.reward
    async def right(self, trace) -> float:
        return float("42" in trace.last_reply)

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(vf.TaskData(idx=0, prompt="What is it?"), self.config.task)]

__all__ = ["Asks"]
"""

CONFIG = """
[taskset]
id = "stock_tasks"

[harness]
id = "null"

[harness.env]
UV_EXCLUDE_NEWER = "2026-07-15T00:00:00Z"
"""


class Answers:
    def candidates(self, prompt_text: str) -> list[tuple[float, str]]:  # noqa: ARG002
        return [(1.0, "It is 42.")]


@pytest.mark.slow_env
@pytest.mark.skipif(
    shutil.which("uv") is None, reason="The subprocess runtime starts programs with uv, which is not here."
)
def test_the_null_harness_runs_in_the_subprocess_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stock_tasks.py").write_text(TASKSET)
    (tmp_path / "env.toml").write_text(CONFIG)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")

    async def main(url: str) -> tuple[Any, Any]:
        environment = load_environment(load_config(tmp_path / "env.toml"))
        (task,) = load_tasks(environment, rollouts=1)
        transport = SGLangTransport(url, limits=Limits(response=50))
        client = RolloutClient(
            transport, model="demo", tokenizer=str(tokenizer), renderer=RendererSettings("qwen3"), pool_size=1
        )
        context = ModelContext(model="demo", client=client, sampling=vf.SamplingConfig(temperature=1.0))
        async with environment.serving():
            trace = await environment.episode(task, context, n=1).rollouts[0].run()
        turns = transport.turns(trace.id)
        await client.close()
        return trace, turns

    with DemoEngine(tokenizer_dir=tokenizer, policy=Answers(), epsilon=1e-9).serve_in_thread() as engine:
        trace, turns = asyncio.run(main(engine.url))
    assert not trace.has_error, trace.error
    assert trace.rewards == {"right": 1.0}
    assert trace.stop_condition == "agent_completed"
    assert trace.nodes[-1].logprobs
    assert [turn.completion_tokens for turn in turns] == [len(trace.nodes[-1].logprobs)]
