"""The model client of live rollouts: Verifiers' TrainClient on our transport, with a renderer that is chosen openly.

TrainClient finds its renderer by the name of the tokenizer. A checkpoint on disk has a path instead of that name, so
the renderer is chosen here: as asked for, or by what the path says of the model it holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError
from renderers import RendererConfig, RendererPool, create_renderer
from renderers.base import MODEL_RENDERER_MAP, TRUSTED_REVISIONS, load_tokenizer
from renderers.client import MalformedGenerateResponseError
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError

from rolltape.record.problems import near
from rolltape.record.transport import SGLangTransport, ended, unsupported
from rolltape.replay.tokenizer import located
from rolltape.schema.errors import BadInput

DEFAULT_POOL = min(8, max(2, os.cpu_count() or 1))
"""Renderers in the pool: each holds a tokenizer of its own, and more than there are cores help nobody."""

NAME_A_RENDERER = "Name a renderer that can with --renderer (such as qwen3)."


@dataclass(frozen=True)
class RendererSettings:
    """How messages become tokens. None leaves a setting to the renderer."""

    name: str | None = None
    """A renderer's name, such as `qwen3`; None chooses it by the model."""
    enable_thinking: bool | None = None
    thinking_retention: str | None = None
    """`tool_cycle`, or `all` to keep earlier reasoning, so that a conversation stays one branch."""

    def to_dict(self) -> dict[str, Any]:
        """The settings that are set, as recorded with every trace."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def renderer_identity(checkpoint: str) -> str | None:
    """The registered model whose renderer suits a checkpoint: its id, or what its path says; None where it is unclear.

    A hub cache names the model in a folder (`models--org--name`); a local snapshot often in its last folder. Where
    names fit several models, they must agree on the renderer.
    """
    if checkpoint in MODEL_RENDERER_MAP:
        return checkpoint
    path = PurePath(checkpoint)
    cached = {part.removeprefix("models--").replace("--", "/") for part in path.parts if part.startswith("models--")}
    known = cached & MODEL_RENDERER_MAP.keys()
    matches = known or {model for model in MODEL_RENDERER_MAP if model.rsplit("/", 1)[-1] == path.name}
    renderers = {MODEL_RENDERER_MAP[model] for model in matches}
    return min(matches) if len(renderers) == 1 else None


def model_name(checkpoint: str) -> str:
    """A checkpoint's name: the last part of its id or path, or where it lies in a hub cache that of the model's id."""
    parts = PurePath(checkpoint).parts or ("",)
    cached = [part for part in parts if part.startswith("models--")]
    return cached[-1].rpartition("--")[2] if cached else parts[-1]


def renderer_config(settings: RendererSettings, *checkpoints: str) -> RendererConfig | None:
    """The renderer's typed configuration; None leaves the choice to Renderers (its chat-template fallback).

    `checkpoints` (model, tokenizer) are looked at in order where `settings` names no renderer. Raises BadInput for a
    name or setting that the renderer does not have, and for settings without a known renderer to give them to.
    """
    identity = next((found for path in checkpoints if (found := renderer_identity(path))), None)
    name = settings.name or (MODEL_RENDERER_MAP[identity] if identity else None)
    given = settings.to_dict() | ({"name": name} if name else {})
    if name is None:
        if given:
            raise BadInput(
                f"No renderer is known for {' or '.join(map(repr, checkpoints))}, so {', '.join(given)} cannot be set; "
                "name one with --renderer (such as qwen3)."
            )
        return None
    try:
        return TypeAdapter(RendererConfig).validate_python(given)
    except ValidationError as error:
        raise unfit(error, given) from error


def unfit(error: ValidationError, given: Mapping[str, Any]) -> BadInput:
    """The refusal of renderer settings that do not validate."""
    found = error.errors(include_url=False)
    name = str(given.get("name"))
    if found[0]["type"] == "union_tag_invalid":
        known = found[0]["ctx"]["expected_tags"]
        close = near(name, known.replace("'", "").split(", "))
        return BadInput(f"There is no renderer {name!r}{close}; there are {known}.")
    problems = "; ".join(f"{'.'.join(map(str, p['loc'][1:]))}: {p['msg']}" for p in found[:3])  # the first is its name
    return BadInput(f"The renderer {name!r} cannot be set up with {dict(given)}: {problems}.")


def loaded(place: str, named: str) -> Any:
    """The tokenizer that `located` found at `place` for `named`. Of some ids Renderers trusts one revision, by their name."""
    return load_tokenizer(named if named in TRUSTED_REVISIONS else place)


class RolloutClient(TrainClient):
    """TrainClient with an explicit renderer, a pool filled off the event loop, and refusals that name a setting.

    Errors of its own are ProviderError; those no retry can change are `rolltape.record.transport.unsupported`'s.
    """

    def __init__(
        self,
        transport: SGLangTransport,
        *,
        model: str,
        tokenizer: str | None = None,
        renderer: RendererSettings | None = None,
        pool_size: int = DEFAULT_POOL,
    ) -> None:
        self.settings = renderer or RendererSettings()
        self.tokenizer = tokenizer or model
        config = renderer_config(self.settings, model, self.tokenizer)
        super().__init__(transport, pool_size=pool_size, config=config, renderer_model_name=self.tokenizer)
        self._pool: RendererPool | None = None
        self._warming = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections to the engine."""
        await self.close()

    @property
    def transport(self) -> SGLangTransport:
        return self.openai  # type: ignore[no-any-return]

    @property
    def toolless(self) -> str | None:
        """The renderer's class, once it is loaded, where it cannot render tools."""
        pool = self._pool
        return None if pool is None or pool.supports_tools else pool.renderer_cls.__name__

    async def warm(self, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Load the tokenizers in a thread, once; raises BadInput where there is none to load."""
        if self._pool is not None:
            return
        async with self._warming:
            if self._pool is None:
                self._pool = await asyncio.to_thread(self._filled_pool, chat_template_kwargs)

    def _filled_pool(self, chat_template_kwargs: Mapping[str, Any] | None) -> RendererPool:
        def factory() -> Any:
            try:
                tokenizer = loaded(located(self.tokenizer), self.tokenizer)
            except BadInput:
                raise
            except (OSError, ValueError, ImportError) as error:
                raise BadInput(
                    f"No tokenizer could be loaded from {self.tokenizer!r} ({type(error).__name__}: {error}); "
                    "give a folder or hub id with --tokenizer."
                ) from error
            try:
                return create_renderer(tokenizer, self.config, chat_template_kwargs=chat_template_kwargs)
            except (ValueError, TypeError, NotImplementedError) as error:
                raise BadInput(f"No renderer fits {self.tokenizer!r}: {error} Name one with --renderer.") from error

        # The first is made alone: transformers imports its parts on first use, which several threads cannot do at once.
        first = [factory()]

        def next_one() -> Any:
            try:
                return first.pop()
            except IndexError:
                return factory()

        return RendererPool(next_one, size=self.pool_size)

    async def get_response(self, dialect: Any, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One model turn; the signature and the result are TrainClient's."""
        if not isinstance(dialect, ChatDialect):
            raise unsupported(
                f"the harness speaks {type(dialect).__name__}, and only chat completions can be tokenized.",
                "Use a harness that speaks chat completions, such as null, default or rolltape.record.inprocess.",
            )
        if _has_images(body):
            raise unsupported("a message holds an image.", "Use a text-only taskset.")
        await self.warm()
        if body.get("tools") and (renderer := self.toolless) is not None:
            raise unsupported(f"the harness offers tools, which {renderer} cannot render.", NAME_A_RENDERER)
        try:
            response = await super().get_response(dialect, body, *args, **kwargs)
        except NotImplementedError as error:
            raise unsupported(f"{error}.", "Choose another renderer with --renderer.") from error
        except MalformedGenerateResponseError as error:
            raise ProviderError(f"Renderers refused the engine's reply: {error}") from error
        if (session := kwargs.get("session_id")) and not self.transport.knows(session):
            raise ended()
        return response

    async def relay(self, *_args: Any, **_kwargs: Any) -> Any:
        """Streams are refused: their tokens and log-probs cannot be checked as a whole."""
        raise unsupported("the harness asks for a stream.", "Use a harness that asks for whole replies.")

    async def relay_aux(self, _dialect: Any, route: str, *_args: Any, **_kwargs: Any) -> Any:
        """Side routes such as token counting are refused."""
        raise unsupported(f"the harness asks for the side route {route!r}.", "Use a harness that needs none.")


def _has_images(body: Mapping[str, Any]) -> bool:
    contents = (message.get("content") for message in body.get("messages") or () if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in parts)
