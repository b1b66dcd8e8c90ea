"""Miles' functions, the launcher and the demo with a run in an object store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from miles_bench import MilesBench, Policy, bench_fixture, is_clean, shown
from typer.testing import CliRunner

from rolltape.record.demo.folder import DemoFolder
from rolltape.record.engine import write_tokenizer
from rolltape.replay.cli import app
from rolltape.schema import RunConflict
from rolltape.schema.storage import StorePath, place


@pytest.fixture
def bench(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilesBench]:
    monkeypatch.setattr(MilesBench, "run_folder", f"{bucket}/runs/miles")
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    yield from bench_fixture(tmp_path, tokenizer, monkeypatch, policy=Policy())


def test_miles_trains_into_a_store_resumes_and_replays_from_it(bench: MilesBench) -> None:
    outputs = bench.train(bench.function(), 0, 1)
    bench.restart()
    again = bench.train(bench.function(), 1, 2)
    run = bench.recorded()
    assert isinstance(run.paths.root, StorePath)
    assert is_clean(run)
    assert [(c.part.step, c.part.attempt) for c in run.commits("train")] == [(0, 0), (1, 1), (2, 1)]
    expected = [shown(output.samples) for output in (outputs[0], *again)]
    assert [shown(output.samples) for output in bench.replay(0, 1, 2)] == expected


def test_a_launch_forwards_what_a_store_needs_and_no_secret(tmp_path: Path, bucket: str) -> None:
    config = tmp_path / "env.toml"
    config.write_text('[taskset]\nid = "rolltape.record.demo"\n')
    words = ["launch", str(config), "--run", f"{bucket}/runs/golf", "--dry-run", "--no-check", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    variables = json.loads(result.stdout)["variables"]
    assert variables["ROLLTAPE_RUN"] == f"{bucket}/runs/golf"
    assert {"AWS_ENDPOINT_URL", "AWS_REGION", "ROLLTAPE_STATE"} <= variables.keys()
    assert "something" not in result.stdout


def test_a_demo_in_a_store_keeps_its_own_files_here(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = place(f"{bucket}/demo-run")
    assert isinstance(root, StorePath)
    folder = DemoFolder(root)
    folder.prepare(seed=0, overwrite=False)
    assert folder.environment == Path("demo-run-setup/env.toml")
    assert folder.environment.exists()
    (root / "run.json").put(b"{}")
    with pytest.raises(RunConflict, match="holds something already"):
        folder.prepare(seed=0, overwrite=True)
