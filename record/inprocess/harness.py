"""The chat loop and its tools, run inside this process.

A stock harness starts a Python program per rollout and costs 1.2 s of CPU each; this one costs a few milliseconds.
It is for tasks that need no sandbox: tools are Python functions of this process, so they must be trusted and quick (a
plain function runs on the event loop; make slow ones `async`). Model calls go to Verifiers' interception server over
HTTP like any harness's, so limits, stop conditions, user simulators and the recorded trace are Verifiers' own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from pydantic import Field
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from rolltape.record.inprocess.tools import Tool, imported, tool_of
from rolltape.schema.errors import BadInput

Message = dict[str, Any]
"""A chat message in OpenAI's wire shape."""


class InProcessHarnessConfig(HarnessConfig):
    """Settings under `[harness]` in the environment's TOML."""

    tools: list[str] = Field(default_factory=list)
    """Functions offered to the model, as `package.module:function`."""
    user: str | None = None
    """An async function `(task, messages) -> list of messages or None`, asked after each turn without a tool call."""
    max_turns: int | None = None
    """Model turns before the rollout is ended as truncated; None leaves it to the environment's own `max_turns`."""


class InProcessHarness(Harness[InProcessHarnessConfig]):
    """Runs a rollout's conversation. Subclass it to give tools and a user per task, or name them in the config."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    SUPPORTS_USER_SIM = True
    SUPPORTS_MESSAGE_PROMPT = True

    def __init__(self, config: Any) -> None:
        """Raises BadInput where a function that the config names is not there, or cannot be a tool."""
        super().__init__(config)
        for path in config.tools:
            with _about("tools"):
                tool_of(path.rpartition(":")[2], imported(path))
        if config.user is not None:
            with _about("user"):
                imported(config.user)

    def tools(self, task: TaskData) -> Mapping[str, Callable[..., Any]]:  # noqa: ARG002
        """Name to function of the tools for a task; a parameter called `trace` gets the Trace."""
        return {path.rpartition(":")[2]: imported(path) for path in self.config.tools}

    async def user(self, task: TaskData, messages: list[Message]) -> list[Message] | None:
        """The user's next messages after a turn without a tool call; None ends the conversation."""
        if self.config.user is None:
            return None
        answer = imported(self.config.user)(task, messages)
        return await answer if inspect.isawaitable(answer) else answer  # type: ignore[no-any-return]

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
    ) -> ProgramResult:
        """Hold the conversation; a model call that the interception server refuses ends it, as it ends a program."""
        task = trace.task.data
        tools = {name: tool_of(name, function) for name, function in self.tools(task).items()}
        body: dict[str, Any] = {"model": ctx.model, "messages": self._opening(task)}
        if tools:
            body["tools"] = [tool.wire for tool in tools.values()]
        messages: list[Message] = body["messages"]
        turns = 0
        while True:
            if self.config.max_turns is not None and turns >= self.config.max_turns:
                trace.stop("max_turns")
                break
            status, reply = await _ask(endpoint, secret, body)
            if status != 200:
                return ProgramResult(exit_code=1, stdout="", stderr=f"HTTP {status}: {reply.decode(errors='replace')}")
            turns += 1
            message = {k: v for k, v in json.loads(reply)["choices"][0]["message"].items() if v is not None}
            messages.append(message)
            more = await self._after(task, trace, tools, message, messages)
            if not more:
                break
            messages.extend(more)
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, task: TaskData) -> list[Message]:
        system, prompt = self.resolve_prompt(task)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]

    async def _after(
        self, task: TaskData, trace: Trace, tools: Mapping[str, Tool], message: Message, messages: list[Message]
    ) -> list[Message] | None:
        """What follows a model turn: the results of its tool calls, else the user's messages, else nothing."""
        calls = message.get("tool_calls")
        if not calls:
            return _messages(await self.user(task, messages))
        return [await _result(tools, call, trace) for call in calls]


@contextmanager
def _about(option: str) -> Iterator[None]:
    """Say of a refusal which option it is about."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"[harness] {option}: {error}") from error


def _messages(answer: Any) -> list[Message] | None:
    """What a user said, as messages: its text, one message, a list of them, or None to end the conversation."""
    if answer is None:
        return None
    if isinstance(answer, str):
        return [{"role": "user", "content": answer}]
    said = [answer] if isinstance(answer, dict) else answer
    if isinstance(said, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in said):
        return said
    raise TypeError(
        f"the user hook gave a {type(answer).__name__}; expected the text of its reply, a message (a dict with role and "
        "content), a list of messages, or None to end the conversation"
    )


async def _result(tools: Mapping[str, Tool], call: Mapping[str, Any], trace: Trace) -> Message:
    name = call["function"]["name"]
    tool = tools.get(name)
    if tool is None:
        known = ", ".join(sorted(tools)) or "none"
        content = f"error: there is no tool {name!r}; the tools are: {known}"
    else:
        content = await tool.call(call["function"]["arguments"], trace)
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[aiohttp.ClientSession]] = (
    weakref.WeakKeyDictionary()
)


async def _kept() -> AsyncGenerator[aiohttp.ClientSession]:
    """A client session, as often as it is asked for. `asyncio.run` ends the generators of its loop, and this closes it."""
    loop, connector = asyncio.get_running_loop(), aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    try:
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
        ) as client:
            while True:
                yield client
    finally:
        _clients.pop(loop, None)


async def _client() -> aiohttp.ClientSession:
    """One client session per event loop: a session per rollout would cost more than the rollout."""
    return await anext(_clients.setdefault(asyncio.get_running_loop(), _kept()))


async def close_client() -> None:
    """Close this event loop's client session before the loop ends; it is made again when it is needed."""
    if (kept := _clients.get(asyncio.get_running_loop())) is not None:
        await kept.aclose()


async def _ask(endpoint: str, secret: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    client = await _client()
    async with client.post(f"{endpoint}/chat/completions", data=json.dumps(body).encode(), headers=headers) as response:
        return response.status, await response.read()
