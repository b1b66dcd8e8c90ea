"""Finds Miles for the tests that need it: the real one where it is on the path, else the stand-in in tests/miles_standin."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "miles_standin"
REAL = importlib.util.find_spec("miles") is not None

sys.path.append(str(STANDIN))
if REAL:
    if importlib.util.find_spec("sglang") is None:
        sys.path.append(str(STANDIN / "stubs"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Miles' own dependencies
        importlib.import_module("miles.rollout.base_types")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which Miles the tests used."""
    import miles

    found = f"the real one, {Path(str(miles.__file__)).parent}" if REAL else "its stand-in, tests/miles_standin"
    terminalreporter.write_line(f"Miles: {found}")
