"""What does not fit in an environment's TOML, told by the tables as they stand there."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

LEGACY_KEYS = ("id", "args", "extra_env_kwargs")
"""Options at the top level that only V0 environments have."""


def problems_of(error: Any, data: Mapping[str, Any]) -> str:
    """The problems that a pydantic `error` of EnvConfig is about, each with the table that it lies in.

    The config of a taskset or harness is checked inside EnvConfig, whose error does not say which of them it is about; so
    each is checked again by itself, against the class of its plugin.
    """
    from pydantic import ValidationError
    from verifiers.v1 import EnvConfig
    from verifiers.v1.loaders import default_harness_id, harness_config_type, taskset_config_type

    taskset = dict(data.get("taskset") or {})
    harness = {"id": default_harness_id(taskset.get("id") or ""), **(data.get("harness") or {})}
    found: list[str] = []
    for table, values, config_type in (
        ("taskset", taskset, taskset_config_type),
        ("harness", harness, harness_config_type),
    ):
        owner = None
        try:
            owner = config_type(values["id"])
            owner.model_validate(values)
        except ValidationError as mine:
            found += [problem(p, owner, table) for p in mine.errors(include_url=False) if owner is not None]
    return "; ".join(found or [problem(p, EnvConfig) for p in error.errors(include_url=False)])


def problem(found: Mapping[str, Any], owner: Any, table: str | None = None) -> str:
    """One of pydantic's problems with a config class in words; `table` is where its options stand in the TOML."""
    place: Sequence[str | int] = found["loc"]
    if found["type"] != "extra_forbidden":
        where = ".".join(map(str, place))
        inside = f" in [{table}]" if table else ""
        return f"{where}{inside}: {found['msg']}" if where else f"{found['msg']}{inside}"
    names, models = _table(owner, place[:-1])
    path = [*([table] if table else []), *names]
    where = f"in [{'.'.join(path)}]" if path else "at the top level"
    known = [name for model in models for name in model.model_fields if path or name not in LEGACY_KEYS]
    return f"there is no option {place[-1]!r} {where}{near(str(place[-1]), known)}{options(known)}"


def near(word: str, known: Sequence[str]) -> str:
    """A question after the one of `known` that was meant, in brackets; nothing where none is close."""
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def options(known: Sequence[str]) -> str:
    """The options that there are; nothing where they are not known."""
    return f", whose options are {', '.join(dict.fromkeys(known))}" if known else ""


def _table(owner: Any, place: Sequence[str | int]) -> tuple[list[str], list[Any]]:
    """Names of the tables on the way to `place` and the classes that it may be. The tag of a union is no table."""
    names, models = [], [owner]
    for part in place:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if fields:
            names.append(str(part))
            models = [model for field in fields for model in _models(field.annotation)]
        elif isinstance(part, str):
            models = [m for m in models if part == m.__name__ or part in _tags(m)]
    return names, models


def _tags(model: Any) -> list[Any]:
    return [field.default for field in model.model_fields.values() if isinstance(field.default, str)]


def _models(annotation: Any) -> Iterator[Any]:
    """The pydantic classes in an annotation."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def raised(error: Exception) -> str:
    """What was raised, and the line that did it, which the text of a SyntaxError names by itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{where}"
