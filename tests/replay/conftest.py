"""Makes the builders of this folder importable, whichever way pytest is started; the demo run that is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What queries keep of runs goes where the tests are, not where the user's is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLTAPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def demo_run() -> Path:
    """A run that `rolltape demo` recorded. Not to be written to."""
    return Path(__file__).parents[1] / "data" / "runs" / "demo"
