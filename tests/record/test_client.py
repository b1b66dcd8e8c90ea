"""Which renderer is chosen, and what the client refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.responses import ResponsesDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

from rolltape.record.client import RendererSettings, RolloutClient, renderer_config, renderer_identity
from rolltape.record.engine import DemoEngine, write_tokenizer
from rolltape.record.sampling import Limits
from rolltape.record.transport import SGLangTransport, is_unsupported
from rolltape.schema.errors import BadInput


@pytest.mark.parametrize(
    ("checkpoint", "identity"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/abc", "Qwen/Qwen3-8B"),
        ("/checkpoints/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/checkpoints/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("/checkpoints/my-finetune", None),
        ("/cache/models--me--my-finetune/snapshots/abc", None),
        ("someone/Qwen3-8B-tuned", None),
    ],
)
def test_a_checkpoint_is_recognised_by_its_id_hub_folder_or_last_folder(checkpoint: str, identity: str | None) -> None:
    assert renderer_identity(checkpoint) == identity


def test_a_folder_name_that_fits_models_with_different_renderers_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = {"one/Model": "qwen3", "two/Model": "glm-5", "one/Same": "qwen3", "two/Same": "qwen3"}
    monkeypatch.setattr("rolltape.record.client.MODEL_RENDERER_MAP", models)
    assert renderer_identity("/checkpoints/Model") is None
    assert renderer_identity("/checkpoints/Same") == "one/Same"


def test_settings_go_to_the_renderer_of_the_model() -> None:
    config = renderer_config(RendererSettings(thinking_retention="all", enable_thinking=True), "/x/Qwen3-8B")
    assert (config.name, config.thinking_retention, config.enable_thinking) == ("qwen3", "all", True)


def test_a_named_renderer_wins_and_the_tokenizer_is_asked_second() -> None:
    assert renderer_config(RendererSettings("glm-5"), "Qwen/Qwen3-8B").name == "glm-5"
    assert renderer_config(RendererSettings(), "/x/unknown", "/x/Qwen3-8B").name == "qwen3"
    assert renderer_config(RendererSettings(), "/x/unknown") is None


def test_settings_without_a_renderer_to_take_them_are_refused() -> None:
    with pytest.raises(BadInput, match=r"enable_thinking cannot be set; name one with --renderer"):
        renderer_config(RendererSettings(enable_thinking=False), "/x/unknown")
    with pytest.raises(BadInput, match="'nope'"):
        renderer_config(RendererSettings("nope"), "m")
    with pytest.raises(BadInput, match="thinking_retention"):
        renderer_config(RendererSettings("qwen3", thinking_retention="sometimes"), "m")


def use(tmp_path: Path, check: Callable[[RolloutClient, DemoEngine], Any], renderer: str | None = "qwen3") -> None:
    async def main() -> None:
        tokenizer = write_tokenizer(tmp_path / "tokenizer")
        engine = DemoEngine(tokenizer_dir=tokenizer)
        with engine.serve_in_thread():
            transport = SGLangTransport(engine.url, limits=Limits(response=20))
            client = RolloutClient(
                transport, model="demo", tokenizer=str(tokenizer), renderer=RendererSettings(renderer), pool_size=1
            )
            await check(client, engine)
            await client.close()

    asyncio.run(main())


BODY = {"messages": [{"role": "user", "content": "Hi."}]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


async def refusal(client: RolloutClient, dialect: Any, body: dict[str, Any]) -> str:
    with pytest.raises(ProviderError) as caught:
        await client.get_response(dialect, body, "demo", SamplingConfig())
    assert caught.value.status_code == 400
    assert is_unsupported(str(caught.value))
    return str(caught.value)


def test_what_cannot_become_training_tokens_is_refused_with_what_to_change(tmp_path: Path) -> None:
    async def check(client: RolloutClient, engine: DemoEngine) -> None:
        assert "ResponsesDialect" in await refusal(client, ResponsesDialect(), {"input": "Hi."})
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        assert "image" in await refusal(client, ChatDialect(), {"messages": [{"role": "user", "content": [image]}]})
        with pytest.raises(ProviderError, match="stream"):
            await client.relay(ChatDialect(), BODY, "demo", SamplingConfig())
        with pytest.raises(ProviderError, match="count_tokens"):
            await client.relay_aux(ChatDialect(), "/v1/messages/count_tokens", {})
        assert engine.requests["/generate"] == 0

    use(tmp_path, check)


def test_tools_on_a_renderer_without_tools_name_the_setting(tmp_path: Path) -> None:
    async def check(client: RolloutClient, engine: DemoEngine) -> None:
        assert "--renderer" in await refusal(client, ChatDialect(), {**BODY, "tools": TOOLS})
        assert engine.requests["/generate"] == 0

    use(tmp_path, check, renderer="default")


def test_a_reply_after_the_episode_has_ended_is_not_handed_on(tmp_path: Path) -> None:
    async def check(client: RolloutClient, engine: DemoEngine) -> None:
        late = asyncio.create_task(
            client.get_response(ChatDialect(), BODY, "demo", SamplingConfig(), session_id="trace")
        )
        while not client.transport.knows("trace"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        client.transport.forget("trace")
        with pytest.raises(ProviderError, match="episode ended"):
            await late
        assert engine.requests["/generate"] <= 1

    use(tmp_path, check)


def test_a_tokenizer_that_is_not_there_is_named_before_any_request() -> None:
    async def main() -> None:
        client = RolloutClient(SGLangTransport("http://127.0.0.1:9"), model="/no/such/Qwen3-8B", pool_size=1)
        with pytest.raises(BadInput, match=r"folder /no/such/Qwen3-8B,.*--tokenizer"):
            await client.warm()
        await client.close()

    asyncio.run(main())
