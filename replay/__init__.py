"""Reads recorded runs, checks them, and turns traces into Samples.

The names below are imported when they are first used: the pytest plugin is loaded in every test run of every project that
has rolltape installed, and must not cost it pyarrow.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.replay.checks import check
    from rolltape.replay.checks.findings import Finding
    from rolltape.replay.convert import Conversion, convert, flatten
    from rolltape.replay.digest import digest
    from rolltape.replay.options import ConvertOptions, Expectations
    from rolltape.replay.outcomes import finish, outcomes_of, read_outcomes
    from rolltape.replay.run import Run, open_run
    from rolltape.replay.sample import Sample, Status

__all__ = [
    "Conversion",
    "ConvertOptions",
    "Expectations",
    "Finding",
    "Run",
    "Sample",
    "Status",
    "check",
    "convert",
    "digest",
    "finish",
    "flatten",
    "open_run",
    "outcomes_of",
    "read_outcomes",
]
_HOMES = {
    "checks": ("check",),
    "checks.findings": ("Finding",),
    "convert": ("Conversion", "convert", "flatten"),
    "digest": ("digest",),
    "options": ("ConvertOptions", "Expectations"),
    "outcomes": ("finish", "outcomes_of", "read_outcomes"),
    "run": ("Run", "open_run"),
    "sample": ("Sample", "Status"),
}
"""Modules, and what each gives to the package."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package. Importing a module sets it as an attribute here; `convert` and `digest` are the functions' names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
