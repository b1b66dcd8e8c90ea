"""The Python in replay/README.md runs as it stands there, on the demo's run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rolltape.replay import open_run

README = Path(__file__).parents[2] / "replay/README.md"


@pytest.fixture
def snippets(demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks of Python, in a folder where `demo-run` and `other` lie."""
    for name in ("demo-run", "other"):
        shutil.copytree(demo_run, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_questions_in_sql_need_nothing_but_two_open_runs(snippets: list[str]) -> None:
    [snippet] = [s for s in snippets if "sql([run, other]" in s]
    names: dict[str, Any] = {"run": open_run("demo-run"), "other": open_run("other")}
    exec(snippet, names)
    assert names["connection"].sql("SELECT count(*) FROM traces").fetchall() > [(0,)]


def test_the_example_from_python_needs_nothing_but_the_run(snippets: list[str]) -> None:
    [snippet] = [s for s in snippets if 'open_run("demo-run")' in s]
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["samples"]
