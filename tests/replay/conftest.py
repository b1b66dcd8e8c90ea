"""Makes the builders of this folder importable, whichever way pytest is started; the demo run that is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def demo_run() -> Path:
    """A run that `rolltape demo` recorded. Not to be written to."""
    return Path(__file__).parents[1] / "data" / "runs" / "demo"
