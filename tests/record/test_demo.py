"""The bundled taskset: problems and policy by themselves, then real episodes on the demo engine."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from rolltape.record.demo.calculator import calculator
from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.demo.problems import (
    FOLLOW_UP,
    WORDINGS,
    make_problem,
    read_answer,
    read_follow_up,
    read_problem,
)
from rolltape.record.engine import DemoEngine, write_tokenizer

CONFIG = {"taskset": {"id": "rolltape.record.demo"}}


async def play(folder: Path, *, seed: int, thinking: bool = False, only: int | None = None) -> list[list[Any]]:
    """The groups of four traces of every task."""
    from transformers import AutoTokenizer  # noqa: F401
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.types import SamplingConfig

    from rolltape.record.client import RendererSettings, RolloutClient
    from rolltape.record.config import env_config, load_environment, load_tasks
    from rolltape.record.inprocess.harness import close_client
    from rolltape.record.sampling import Limits
    from rolltape.record.transport import SGLangTransport

    config = env_config({**CONFIG, "taskset": {"id": "rolltape.record.demo", "seed": seed}})
    environment = load_environment(config)
    async with DemoEngine(seed=seed, policy=DemoPolicy()) as engine:
        transport = SGLangTransport(engine.url, limits=Limits(response=256))
        client = RolloutClient(
            transport,
            model="demo",
            tokenizer=str(folder),
            renderer=RendererSettings(name="qwen3", enable_thinking=thinking),
            pool_size=1,
        )
        context = ModelContext(client=client, model="demo", sampling=SamplingConfig(temperature=1.0))
        await client.warm()
        try:
            async with environment.serving():
                tasks = load_tasks(environment, rollouts=4)[:only]
                return list(await asyncio.gather(*(environment.episode(task, context, 4).run() for task in tasks)))
        finally:
            await close_client()
            await transport.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def groups(folder: Path) -> list[list[Any]]:
    return asyncio.run(play(folder, seed=0))


@pytest.mark.parametrize("kind", WORDINGS)
def test_a_problem_is_read_back_from_its_question(kind: str) -> None:
    for seed in range(20):
        problem = make_problem(kind, random.Random(seed))
        again = read_problem(problem.question)
        assert again is not None
        assert (again.expression, again.answer) == (problem.expression, problem.answer)
        assert int(calculator(problem.expression)) == problem.answer != problem.wrong_answer
        assert int(calculator(problem.mistake)) == problem.wrong_answer


def test_other_texts_are_no_problem_no_follow_up_and_no_answer() -> None:
    assert read_problem("How many plums?") is None
    assert read_follow_up("Then all of them are taken away.") is None
    assert read_follow_up(FOLLOW_UP.format(taken=4)) == 4
    assert [read_answer(text) for text in ("", "12", "Answer: 12\nBye", "So\nAnswer: -3\n")] == [None, None, None, -3]


@pytest.mark.parametrize(
    ("expression", "result"), [("2 + 3 * 4", "14"), ("-(7 - 9) * 2", "4"), ("17 // 5", "3"), ("17 % 5", "2")]
)
def test_the_calculator_works_out_whole_numbers(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize("expression", ["2 ** 9", "open('x')", "1.5 + 1", "True", "1 +", "1 // 0", "1" * 300])
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)


def test_the_policy_knows_only_the_demo() -> None:
    policy = DemoPolicy()
    assert policy.candidates("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n") is None
    assert policy.candidates("no chat") is None
    question = make_problem("bags", random.Random(1)).question
    known = policy.candidates(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert known is not None
    assert sum(weight for weight, _ in known) == pytest.approx(1.0)


def test_importing_the_package_does_not_import_verifiers() -> None:
    import subprocess
    import sys

    code = "import sys, rolltape.record.demo, rolltape.record.engine; print('verifiers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_there_is_one_taskset_and_one_harness_under_the_same_id() -> None:
    from rolltape.record.config import env_config, load_environment

    environment = load_environment(env_config(CONFIG))
    assert type(environment.taskset).__name__ == "StallTaskset"
    assert type(environment.harness).__name__ == "StallHarness"
    tasks = environment.taskset.load()
    assert len(tasks) == 12
    assert [task.data for task in tasks] == [task.data for task in environment.taskset.load()]


def test_episodes_have_several_turns_a_tool_and_a_user_turn(groups: list[list[Any]]) -> None:
    traces = [trace for group in groups for trace in group]
    assert len(traces) == 48
    assert max(trace.num_turns for trace in traces) >= 3
    assert any(trace.tool_messages for trace in traces)
    roles = [node.message.role for node in max(traces, key=lambda trace: len(trace.nodes)).nodes]
    assert roles.count("user") == 2
    assert all(trace.num_branches == 1 for trace in traces)


def test_there_are_errors_truncations_wrong_answers_and_clean_groups(groups: list[list[Any]]) -> None:
    errors = [trace for group in groups for trace in group if trace.errors]
    assert len(errors) == 4
    assert all("torn" in trace.error.message for trace in errors)
    assert any(trace.is_truncated for group in groups for trace in group)
    clean = [group for group in groups if not any(trace.errors for trace in group)]
    assert len(clean) == 11
    corrects = {trace.rewards["correct"] for group in clean for trace in group}
    assert corrects == {0.0, 0.5, 1.0}
    assert all({"tool_calls", "questions_answered"} <= set(trace.metrics) for group in clean for trace in group)


def test_every_race_has_one_winner_and_the_shortest_may_be_shared(groups: list[list[Any]]) -> None:
    for group in groups:
        assert sorted(trace.rewards["fastest"] for trace in group) == [0.0, 0.0, 0.0, 0.5]
    shares = {sum(trace.rewards["shortest"] for trace in group) for group in groups}
    assert shares - {0.0, 0.25}
    assert shares <= {0.0, 0.25, 0.5, 0.75, 1.0}


def test_equal_seeds_play_the_same_episodes_in_any_order(folder: Path, groups: list[list[Any]]) -> None:
    def tokens(played: list[list[Any]]) -> list[list[list[int]]]:
        return [sorted(trace.branches[0].token_ids for trace in group) for group in played]

    assert tokens(asyncio.run(play(folder, seed=0))) == tokens(groups)
    assert tokens(asyncio.run(play(folder, seed=1, only=2))) != tokens(groups[:2])


@pytest.mark.parametrize("seed", [2, 3])
def test_any_seed_shows_an_error_and_a_truncation(folder: Path, seed: int) -> None:
    traces = [trace for group in asyncio.run(play(folder, seed=seed)) for trace in group]
    assert any(trace.errors for trace in traces)
    assert any(trace.is_truncated for trace in traces)
    assert any(trace.rewards.get("correct") == 1.0 for trace in traces)


def test_logprobs_of_a_whole_conversation_can_be_recomputed(groups: list[list[Any]]) -> None:
    import numpy as np

    model = DemoEngine(policy=DemoPolicy()).model
    for trace in groups[0]:
        branch = trace.branches[0]
        scores = model.score(np.array(branch.token_ids), 0, 1.0)
        sampled = np.array(branch.sampled_mask)
        recorded = np.array([value for node in branch.nodes for value in node.logprobs], dtype=np.float32)
        assert np.array_equal(scores[sampled], recorded)
