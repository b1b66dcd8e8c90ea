"""The benchmark of imports runs; its numbers are nobody's to assert."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import imports

from rolltape.replay.imports import lines as import_lines


@pytest.mark.parametrize("side", imports.SIDES)
def test_each_side_of_the_benchmark_takes_every_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(import_lines, "_fast", import_lines._fast)  # one side takes it away
    size = imports.write_file(tmp_path, 8)
    with imports._small(tmp_path) as small:
        imports.child(side, tmp_path, small)
    found = json.loads(capsys.readouterr().out)
    assert found["traces"] == size["traces"] == 8
    assert min(found["seconds"], found["cpu"], found["peak"]) > 0
    assert 4000 < size["tokens"] / size["traces"] < 6000
