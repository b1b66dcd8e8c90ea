"""The benchmark of questions runs, and its sides agree; its numbers are nobody's to assert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def test_every_side_answers_alike_and_is_timed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(HERE / "sql.py"),
        "--shape",
        "tiny",
        "--traces",
        "4",
        "--steps",
        "20",
        "--repeats",
        "1",
    ]
    ended = subprocess.run(
        [*command, "--jsonl-steps", "5", "--json", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert (report["steps"], report["traces"]) == (20, 80)
    assert all(value > 0 for part in ("ratios", "seconds", "others", "bytes") for value in report[part].values())
    assert list(tmp_path.iterdir()) == []
