"""Makes the builders of this folder importable, whichever way pytest is started; the demo run, recorded once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that `rolltape demo` records. Not to be written to."""
    run = tmp_path_factory.mktemp("demo") / "demo-run"
    words = [sys.executable, "-m", "rolltape.replay.cli", "demo", "--run", str(run), "--json"]
    subprocess.run(words, check=True, capture_output=True)
    return run
