"""The benchmark runs and says what it promises; its numbers are nobody's to assert."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RATIOS = {
    *("size_vs_jsonl", "size_vs_pt", "replay_vs_jsonl", "replay_vs_pt", "replay_vs_floor"),
    *("checks_vs_replay", "parquet_vs_jsonl", "parquet_vs_jsonl_synced"),
}


RECORDING = {"journal_vs_jsonl", "journal_vs_jsonl_synced", "recording_cpu", "loop_stall_ms"}


def bench(*arguments: str) -> str:
    """What the benchmark prints."""
    command = [sys.executable, str(HERE / "bench.py"), "--shape", "tiny", "--repeats", "1", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_json_holds_the_numbers_of_each_group_count_and_of_recording() -> None:
    report: dict[str, Any] = json.loads(bench("--json", "--groups", "1", "2", "--episodes", "8"))
    assert report["recording"].keys() > RECORDING
    assert all(value > 0 for value in report["recording"].values())
    assert [(result["shape"], result["groups"]) for result in report["results"]] == [("tiny", 1), ("tiny", 2)]
    for result in report["results"]:
        assert result["ratios"].keys() == RATIOS
        missing = {name for name, ratio in result["ratios"].items() if ratio is None}
        assert missing == ({"size_vs_pt", "replay_vs_pt"} if report["skipped"] else set())
        sizes = result["bytes_per_token"]
        assert sizes["ids_masks_logprobs"] >= sizes["their_entropy"] > 0


def test_tables_hold_the_same_and_say_what_was_left_out() -> None:
    told = bench("--groups", "1", "--episodes", "0")
    assert all(ratio in told for ratio in RATIOS)
    assert ("torch is not installed" in told) == (find_spec("torch") is None)
