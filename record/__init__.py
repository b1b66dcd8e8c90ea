"""The live side: runs Verifiers episodes on an engine and records every trace."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.record.adapter import attach
    from rolltape.record.recorder import Recorder, StoreOptions
    from rolltape.record.secrets import Secrets
    from rolltape.record.tape import Tape

_WHERE = {
    "Recorder": "recorder",
    "Secrets": "secrets",
    "StoreOptions": "recorder",
    "Tape": "tape",
    "attach": "adapter",
}

__all__ = ["Recorder", "Secrets", "StoreOptions", "Tape", "attach"]


def __getattr__(name: str) -> Any:
    """Public names, loaded when they are asked for: importing the package imports nothing heavy."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
