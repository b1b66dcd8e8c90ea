"""Python functions as tools of a model: the JSON schema from the signature, calls from the arguments it sent."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rolltape.record.problems import near, raised
from rolltape.schema.errors import BadInput

INJECTED = "trace"
"""A parameter of this name gets the rollout's Trace and is not shown to the model."""


@dataclass(frozen=True)
class Tool:
    """A function, what the model is told of it, and the model of its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    wire: Mapping[str, Any]
    """The entry of a chat request's `tools`."""
    wants_trace: bool

    async def call(self, raw: str, trace: Any) -> str:
        """The result as the content of a tool message.

        Whatever goes wrong is content too (`error: …`), so that the model can try again: arguments that are no JSON
        object or do not fit the signature, and what the function raises.
        """
        try:
            arguments = self.arguments.model_validate_json(raw or "{}")
        except ValidationError as error:
            return f"error: bad arguments for {self.name}: {_problems(error)}"
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        if self.wants_trace:
            values[INJECTED] = trace
        try:
            result = self.function(**values)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            return f"error: {self.name} failed: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


@lru_cache(maxsize=1024)
def tool_of(name: str, function: Callable[..., Any]) -> Tool:
    """The tool that `function` is, under `name`.

    Types come from the annotations (any that pydantic knows; none means anything), the description from the docstring.
    Raises BadInput for a signature with `*args`, `**kwargs` or positional-only parameters.
    """
    hints = _hints(function)
    fields: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.name == INJECTED:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadInput(
                f"The tool {name!r} takes {parameter}; a model can only send named arguments, so name each parameter."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    arguments = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)
    schema = arguments.model_json_schema()
    schema.pop("title", None)
    description = inspect.getdoc(function) or ""
    wire = {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
    return Tool(name, function, arguments, wire, INJECTED in parameters)


@cache
def imported(path: str) -> Callable[..., Any]:
    """The function at a dotted path, `package.module:name`.

    Raises BadInput where nothing callable is there, or its module does not load.
    """
    module, _, name = path.partition(":")
    if not name:
        raise BadInput(f"{path!r} does not name a function; write package.module:function.")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise BadInput(
            f"There is no {path!r} ({error}); write package.module:function, of a module that is installed, beside the "
            "config, or on PYTHONPATH."
        ) from error
    except Exception as error:  # whatever a module of somebody else's raises
        raise BadInput(f"{path!r} does not load: {raised(error)}.") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in dir(found) if callable(getattr(found, known, None))]
            raise BadInput(
                f"There is no {path!r}: {module} has no {part!r}{near(part, names)}; write package.module:function."
            )
        found = getattr(found, part)
    if not callable(found):
        raise BadInput(f"{path!r} is a {type(found).__name__}, expected a function.")
    return found  # type: ignore[no-any-return]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    )
