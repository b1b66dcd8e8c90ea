"""Functions by their dotted names."""

from __future__ import annotations

import importlib
from typing import Any


def load_function(path: str | None) -> Any:
    if not path:
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
