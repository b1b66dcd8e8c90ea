"""Whole episodes through the in-process harness: real Verifiers, real renderer, the demo engine over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext

from rolltape.record.client import RendererSettings, RolloutClient
from rolltape.record.config import env_config, load_environment, load_tasks
from rolltape.record.engine import DemoEngine, write_tokenizer
from rolltape.record.inprocess import InProcessHarness
from rolltape.record.inprocess.harness import close_client
from rolltape.record.inprocess.tools import imported, tool_of
from rolltape.record.sampling import Limits
from rolltape.record.transport import SGLangTransport
from rolltape.schema.errors import BadInput

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = "42"

class Asked(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

class Asks(vf.Taskset[Asked, vf.TasksetConfig]):
    def load(self):
        return [Asked(Data(idx=0, prompt=PROMPT, system_prompt="Be brief."), self.config.task)]

__all__ = ["Asks"]
"""

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
numbers = itertools.count()


class Says:
    """A policy that gives the n-th scripted reply to the n-th assistant turn."""

    def __init__(self, replies: Sequence[str]) -> None:
        self.replies = replies
        self.prompts: list[str] = []

    def candidates(self, prompt_text: str) -> list[tuple[float, str]]:
        self.prompts.append(prompt_text)
        turn = prompt_text.count("<|im_start|>assistant") - 1
        return [(1.0, self.replies[min(turn, len(self.replies) - 1)])]


class Talk:
    """What an episode left behind."""

    def __init__(self, trace: Any, says: Says, requests: Mapping[str, int]) -> None:
        self.trace = trace
        self.says = says
        self.requests = requests

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(node.message.role, str(node.message.content or "")) for node in self.trace.nodes]


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Talk]:
    """Run one episode: `talk(replies, harness settings, harness=class, environment settings)`."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(
        replies: Sequence[str],
        settings: Mapping[str, Any] | None = None,
        *,
        harness: type[InProcessHarness] | None = None,
        prompt: Any = "What is it?",
        **environment: Any,
    ) -> Talk:
        name = f"asks_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(TASKSET.replace("PROMPT", repr(prompt)))
        config = env_config(
            {"taskset": {"id": name}, "harness": {"id": "rolltape.record.inprocess", **(settings or {})}, **environment}
        )
        return asyncio.run(episode(config, Says(replies), tokenizer, harness))

    return run


async def episode(config: Any, says: Says, tokenizer: Path, harness: type[InProcessHarness] | None) -> Talk:
    env = load_environment(config)
    if harness is not None:
        env.harness = harness(config.harness)
    (task,) = load_tasks(env, rollouts=1)
    engine = DemoEngine(tokenizer_dir=tokenizer, policy=says, epsilon=1e-9)
    with engine.serve_in_thread():
        transport = SGLangTransport(engine.url, limits=Limits(response=300))
        client = RolloutClient(
            transport,
            model="demo",
            tokenizer=str(tokenizer),
            renderer=RendererSettings("qwen3", enable_thinking=False),
            pool_size=1,
        )
        context = ModelContext(model="demo", client=client, sampling=vf.SamplingConfig(temperature=1.0))
        async with env.serving():
            trace = await env.episode(task, context, n=1).rollouts[0].run()
        await client.close()
        await close_client()
    return Talk(trace, says, engine.requests)


def test_a_conversation_of_one_turn_is_scored_and_ends_as_completed(talk: Callable[..., Talk]) -> None:
    done = talk(["It is 42."])
    assert done.messages == [("system", "Be brief."), ("user", "What is it?"), ("assistant", "It is 42.")]
    assert done.trace.rewards == {"right": 1.0}
    assert done.trace.stop_condition == "agent_completed"
    assert not done.trace.has_error


def test_a_prompt_of_messages_opens_the_conversation_as_it_is(talk: Callable[..., Talk]) -> None:
    prompt = [
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "?"},
    ]
    done = talk(["x", "42"], prompt=prompt)
    assert [role for role, _ in done.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert done.trace.num_turns == 1


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def slow_echo(text: str) -> str:
    """Give a text back."""
    await asyncio.sleep(0)
    return text


def broken() -> str:
    """Never works."""
    raise RuntimeError("no luck")


def seen(trace: Any) -> dict[str, int]:
    """Count the turns so far."""
    return {"turns": trace.num_turns}


class WithTools(InProcessHarness):
    def tools(self, task: Any) -> dict[str, Callable[..., Any]]:
        assert task.answer == "42"
        return {"add": add, "echo": slow_echo, "broken": broken, "seen": seen}


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", '{"a": 40, "b": 2}', "42"),
        ("add", '{"a": 41}', "42"),
        ("echo", '{"text": "hi"}', "hi"),
        ("seen", "{}", '{"turns": 1}'),
        ("broken", "{}", "error: broken failed: RuntimeError: no luck"),
        ("add", '{"a": "many"}', "error: bad arguments for add: a: Input should be a valid integer"),
        ("add", '{"c": 1}', "error: bad arguments for add: a: Field required; c: Extra inputs are not permitted"),
        ("sub", "{}", "error: there is no tool 'sub'; the tools are: add, broken, echo, seen"),
    ],
)
def test_a_tool_call_is_answered_and_its_errors_are_answers_too(
    talk: Callable[..., Talk], name: str, arguments: str, result: str
) -> None:
    done = talk([CALL.format(name=name, arguments=arguments), "42"], harness=WithTools)
    (answer,) = [content for role, content in done.messages if role == "tool"]
    assert answer.startswith(result)
    assert done.messages[-1] == ("assistant", "42")
    assert done.trace.num_branches == 1
    assert not done.trace.has_error


def test_the_model_is_told_of_a_tool_by_its_signature_and_docstring() -> None:
    def look(
        word: str, where: Literal["title", "text"] = "text", limit: int | None = None, *, trace: Any = None
    ) -> str:
        """Look a word up.

        The first `limit` places.
        """
        return word + where + str(limit) + str(trace)

    function = tool_of("look", look).wire["function"]
    assert function["name"] == "look"
    assert function["description"] == "Look a word up.\n\nThe first `limit` places."
    parameters = function["parameters"]
    assert parameters["type"] == "object"
    assert parameters["required"] == ["word"]
    assert list(parameters["properties"]) == ["word", "where", "limit"]
    assert parameters["properties"]["where"]["enum"] == ["title", "text"]
    assert parameters["additionalProperties"] is False
    json.dumps(parameters)


def test_a_tool_whose_arguments_have_no_names_is_refused() -> None:
    def variadic(*words: str) -> str:
        return " ".join(words)

    with pytest.raises(BadInput, match="name each parameter"):
        tool_of("variadic", variadic)


def test_tools_and_the_user_can_be_named_in_the_config(talk: Callable[..., Talk], tmp_path: Path) -> None:
    (tmp_path / "my_hooks.py").write_text(
        "def double(n: int) -> int:\n"
        '    """Twice."""\n'
        "    return 2 * n\n"
        "async def user(task, messages):\n"
        "    return [{'role': 'user', 'content': 'sure?'}] if len(messages) < 6 else None\n"
    )
    done = talk(
        [CALL.format(name="double", arguments='{"n": 21}'), "It is 42.", "Yes, 42."],
        {"tools": ["my_hooks:double"], "user": "my_hooks:user"},
    )
    assert done.messages[3:] == [
        ("tool", "42"),
        ("assistant", "It is 42."),
        ("user", "sure?"),
        ("assistant", "Yes, 42."),
    ]
    assert done.trace.num_turns == 3


def test_a_dotted_path_that_leads_nowhere_is_named() -> None:
    with pytest.raises(BadInput, match=r"package\.module:function"):
        imported("json.dumps")
    with pytest.raises(BadInput, match="There is no 'json:dumpling'"):
        imported("json:dumpling")
    with pytest.raises(BadInput, match="expected a function"):
        imported("json:__name__")


class Nagging(InProcessHarness):
    async def user(self, task: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:  # noqa: ARG002
        return [{"role": "user", "content": "More."}]


def test_the_harness_limit_of_turns_ends_a_conversation_as_truncated(talk: Callable[..., Talk]) -> None:
    done = talk(["No."], {"max_turns": 3}, harness=Nagging)
    assert done.trace.num_turns == 3
    assert done.trace.stop_condition == "max_turns"
    assert done.trace.is_truncated
    assert not done.trace.has_error


def test_verifiers_own_limit_of_turns_ends_it_too(talk: Callable[..., Talk]) -> None:
    done = talk(["No."], harness=Nagging, max_turns=2)
    assert done.trace.num_turns == 2
    assert done.trace.stop_condition == "max_turns"


def test_a_hook_that_raises_is_an_error_on_the_trace(talk: Callable[..., Talk]) -> None:
    class Bad(InProcessHarness):
        async def user(self, task: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:  # noqa: ARG002
            raise KeyError("gone")

    done = talk(["No."], harness=Bad)
    assert done.trace.error.type == "HarnessError"
    assert "KeyError" in done.trace.error.message
    assert done.trace.num_turns == 1


def test_a_second_turn_bridges_and_every_request_uses_the_fixed_keys(talk: Callable[..., Talk]) -> None:
    done = talk([CALL.format(name="add", arguments='{"a": 41}'), "42"], harness=WithTools)
    assert done.requests["/generate"] == 2  # the engine answers 500 to a key it does not know
    assert done.trace.num_branches == 1
    assert done.says.prompts[1].startswith(done.says.prompts[0])
