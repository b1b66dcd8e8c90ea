"""How a recorded row was rendered: its renderer, its tokenizer, its tools. What is not recorded is named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from renderers import RendererConfig, create_renderer
from renderers.base import MODEL_RENDERER_MAP

from rolltape.record.client import RendererSettings, loaded, renderer_identity, unfit
from rolltape.replay.tokenizer import located
from rolltape.schema.errors import BadInput
from rolltape.schema.jsontext import read_json
from rolltape.schema.storage import AnyPath

_CONFIG: TypeAdapter[Any] = TypeAdapter(RendererConfig)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class RetokenizeOptions:
    """How to render. What a row has recorded goes first; the rest fills in for what it has not."""

    tokenizer: str | None = None
    """Folder or id of the tokenizer; None takes the recorded one's."""
    model: str | None = None
    """Model whose renderer to take where no renderer is recorded."""
    renderer: RendererSettings = field(default_factory=RendererSettings)
    tools: Path | None = None
    """JSON list of tool schemas, as chat completions take them."""
    strict: bool = False
    """Whether drift and forks are errors."""
    limit: int | None = None
    """Only so many traces of each step."""


class Renderings:
    """Renderers by their settings, over one tokenizer each."""

    def __init__(self, options: RetokenizeOptions, beside: AnyPath | None = None) -> None:
        """`beside`: the run, where a recorded path may be meant from."""
        self.options = options
        self.beside = beside
        self.used: list[str] = []
        """Folders or ids of the tokenizers that were loaded."""
        self.given_tools = None if options.tools is None else _read_tools(options.tools)
        self._tokenizers: dict[str, Any] = {}
        self._renderers: dict[str, Any] = {}

    def of(self, row: Mapping[str, Any]) -> tuple[Any, Any, list[str]]:
        """(renderer, tokenizer, what is not recorded) of a row. Raises BadInput where there is none of one."""
        path = self.options.tokenizer or row["tokenizer"]
        missing = []
        if path is None:
            raise BadInput(
                f"trace {row['trace_id']}: no tokenizer is recorded; name a folder or hub id with --tokenizer."
            )
        recorded = _recorded_settings(row)
        if recorded is None:
            missing.append("the renderer's settings are not recorded")
        wanted = {**self.options.renderer.to_dict(), **(recorded or {})}
        if "name" not in wanted:
            wanted["name"] = self._named(row, str(path))
        key = json.dumps([path, wanted], sort_keys=True)
        if key not in self._renderers:
            self._renderers[key] = self._made(str(path), wanted)
        return self._renderers[key], self._tokenizer(str(path)), missing

    def tools(self, row: Mapping[str, Any], first: str, *, used: bool) -> tuple[list[dict[str, Any]] | None, list[str]]:
        """(tool schemas, what is not recorded of them): those given, else the recorded ones, else those that `first`, the
        text of the first message's tokens, holds in the markup of Qwen and others. `used`: whether a tool was called."""
        if self.given_tools is not None:
            return self.given_tools, []
        recorded = json.loads(row["tools"]) if row["tools"] else None
        if recorded is not None:
            return [_wire_tool(tool) for tool in recorded] or None, []
        found = _TOOLS.search(first)
        try:
            read_back = None if found is None else [read_json(line) for line in found[1].splitlines()]
        except ValueError:
            read_back = None
        if read_back:
            note = "tool schemas are not recorded; they were read back from the tokens of the first message"
            return read_back, [note]
        return None, ["tool schemas are not recorded, and tools were called; give them with --tools"] if used else []

    def _named(self, row: Mapping[str, Any], path: str) -> str:
        known = (m for m in (self.options.model, row["model"], row["tokenizer"], path) if m)
        identity = next((found for model in known if (found := renderer_identity(model))), None)
        if identity is None:
            raise BadInput(
                f"trace {row['trace_id']}: neither a renderer nor a model with a known one is recorded; name the model with "
                "--model (such as Qwen/Qwen3-8B) or the renderer with --renderer (such as qwen3)."
            )
        return str(MODEL_RENDERER_MAP[identity])

    def _made(self, path: str, wanted: Mapping[str, Any]) -> Any:
        tokenizer = self._tokenizer(path)
        try:
            return create_renderer(tokenizer, _CONFIG.validate_python(dict(wanted)))
        except ValidationError as error:
            raise unfit(error, wanted) from error
        except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
            raise BadInput(f"No renderer {wanted.get('name')!r} fits the tokenizer {path!r}: {error}") from error

    def _tokenizer(self, path: str) -> Any:
        if path not in self._tokenizers:
            where = located(path, None if self.options.tokenizer else self.beside)
            try:
                self._tokenizers[path] = loaded(where, path)
            except (OSError, ValueError, ImportError) as error:
                raise BadInput(
                    f"No tokenizer could be loaded from {where!r} ({type(error).__name__}: {str(error).splitlines()[0]}); give "
                    "that of the recording, a folder or hub id, with --tokenizer."
                ) from error
            self.used.append(where)
        return self._tokenizers[path]


def _recorded_settings(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The renderer's settings as they were recorded, live or by a later release of Verifiers."""
    settings = None if row["renderer"] is None else json.loads(row["renderer"])
    return {k: v for k, v in settings.items() if v is not None} if isinstance(settings, dict) else None


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: no readable JSON ({error}); expected a list of tool schemas.") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadInput(f"{path}: expected a JSON list of tool schemas, as chat completions take them.")
    return tools


def _wire_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as Verifiers records it in the shape that templates take."""
    if "function" in tool:
        return dict(tool)
    named = {key: tool.get(key) for key in ("name", "description", "parameters")}
    strict = {"strict": tool["strict"]} if tool.get("strict") is not None else {}
    return {"type": "function", "function": named | strict}
