"""A bundled taskset with its own harness, to see rolltape work: `rolltape.record.demo` is the id of both.

Verifiers is imported when the taskset or the harness is asked for, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["StallHarness", "StallTaskset"]

_HOMES = {"StallHarness": "harness", "StallTaskset": "taskset"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
