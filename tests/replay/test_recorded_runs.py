"""The recorded runs in tests/data, which every test run replays: all of them approved, small, and of no one's machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rolltape.replay import open_run
from rolltape.replay.listing.folders import runs_in
from rolltape.replay.verification.approve import approve
from rolltape.replay.verification.expected import read_sums
from rolltape.schema.paths import RunPaths

RUNS = Path(__file__).parents[1] / "data" / "runs"


def test_there_is_a_demo_and_a_run_of_each_release_and_all_of_them_are_small() -> None:
    assert [run.name for run in runs_in(RUNS)] == [
        "demo",
        *(f"verifiers-{release}" for release in ("0.2.0", "0.2.1", "0.3.0", "0.4.0")),
    ]
    assert sum(path.stat().st_size for path in RUNS.rglob("*") if path.is_file()) < 1_000_000


@pytest.mark.parametrize("run", runs_in(RUNS), ids=lambda run: run.name)
def test_what_its_steps_give_was_approved_and_is_what_they_give(run: Path) -> None:
    found = approve(open_run(run), write=False)
    assert {approval.state for approval in found} == {"same"}
    assert all(approval.samples for approval in found)
    assert read_sums(RunPaths(run)).keys() == {approval.part for approval in found}


@pytest.mark.parametrize("run", runs_in(RUNS), ids=lambda run: run.name)
def test_nothing_in_it_names_a_folder_of_the_machine_that_made_it(run: Path) -> None:
    texts = [str(open_run(run).table().to_pylist()), *(p.read_text() for p in run.rglob("*.json"))]
    for text in texts:
        assert not re.search(r"/(root|home|work|Users|mnt)/", text)
