"""A small engine on loopback that speaks SGLang's native HTTP and samples from a known distribution.

`DemoEngine` is the server, `ToyModel` what it samples from, `Faults` what can go wrong on purpose, `write_tokenizer`
writes the tokenizer it speaks. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["DemoEngine", "Fault", "Faults", "NoPolicy", "Policy", "ToyModel", "Vocabulary", "write_tokenizer"]

_HOMES = {
    "DemoEngine": "server",
    "Fault": "faults",
    "Faults": "faults",
    "NoPolicy": "policy",
    "Policy": "policy",
    "ToyModel": "model",
    "Vocabulary": "vocabulary",
    "write_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
