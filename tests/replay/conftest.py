"""Makes the builders of this folder importable, whichever way pytest is started; the demo run that is kept."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def rolltape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call the command line; exit code, standard output and standard error."""
    from rolltape.replay import cli

    def call(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rolltape", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="session")
def demo_run() -> Path:
    """A run that `rolltape demo` recorded. Not to be written to."""
    return Path(__file__).parents[1] / "data" / "runs" / "demo"


@pytest.fixture(scope="session")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps of one trace each. Not to be written to."""
    from replay_build import put_run
    from sql_build import steps_of

    return steps_of(put_run(tmp_path_factory.mktemp("twenty") / "run"), 20)


@pytest.fixture
def twenty(kept_run: Path, tmp_path: Path) -> Path:
    """A run of 20 steps of one's own."""
    return Path(shutil.copytree(kept_run, tmp_path / "run"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts whose files were opened for scores, in the order that happened."""
    from rolltape.replay.sql import scores

    names: list[str] = []
    read = scores._read

    def counted(part: Any, columns: Any) -> Any:
        names.append(part.commit.part.stem)
        return read(part, columns)

    monkeypatch.setattr(scores, "_read", counted)
    return names
