"""What `rolltape demo` does to folders, and what it leaves alone."""

import json
import tomllib
from pathlib import Path

import pytest

from rolltape.record.demo.folder import DemoFolder
from rolltape.schema.errors import BadInput, RunConflict
from rolltape.schema.paths import Part, RunPaths

PART = Part("train", 0, 0, "main")


def recorded(run: Path, taskset: str = "rolltape.record.demo") -> DemoFolder:
    """A folder as a demo leaves it."""
    (run / "traces").mkdir(parents=True)
    (run / "traces" / "old").touch()
    (run / "run.json").write_text(json.dumps({"taskset": taskset}))
    return DemoFolder(run)


def test_a_setup_folder_with_environment_expectation_and_tokenizer_is_made_beside_the_run(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "deep" / "run")
    folder.prepare(seed=3, overwrite=False)
    environment = tomllib.loads(folder.environment.read_text())
    assert environment["taskset"] == {"id": "rolltape.record.demo", "seed": 3}
    assert "harness" not in environment
    assert tomllib.loads(folder.expectation.read_text()) == {"group_reward_sum": {"fastest": 0.5}}
    assert (folder.tokenizer / "tokenizer.json").is_file()
    assert [entry.name for entry in folder.run.parent.iterdir()] == ["run-setup"]


def test_an_empty_folder_and_an_unfinished_start_are_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for _ in range(2):
        DemoFolder(tmp_path / "run").prepare(seed=0, overwrite=False)


def test_an_earlier_demo_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    with pytest.raises(RunConflict, match="--overwrite"):
        folder.prepare(seed=0, overwrite=False)
    assert (folder.run / "traces" / "old").exists()
    folder.prepare(seed=0, overwrite=True)
    assert not folder.run.exists()


def test_a_demo_run_to_which_something_was_added_is_still_one(tmp_path: Path) -> None:
    """Approved Samples and annotations, as the README's commands add them."""
    folder = recorded(tmp_path / "run")
    paths = RunPaths(folder.run)
    for added in (paths.expected(PART), paths.annotations / "labels" / "a.parquet", paths.rescored(PART)):
        added.parent.mkdir(parents=True)
        added.touch()
    with pytest.raises(RunConflict, match="--overwrite"):
        folder.prepare(seed=0, overwrite=False)
    folder.prepare(seed=0, overwrite=True)
    assert not folder.run.exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_that_are_no_demo_run_are_never_touched(tmp_path: Path, overwrite: bool) -> None:
    thesis = recorded(tmp_path / "thesis")
    (thesis.run / "thesis.tex").write_text("years of work")
    with pytest.raises(RunConflict, match=r"holds thesis\.tex"):
        thesis.prepare(seed=0, overwrite=overwrite)
    other = recorded(tmp_path / "other", taskset="somebody.elses")
    with pytest.raises(RunConflict, match=r"somebody\.elses"):
        other.prepare(seed=0, overwrite=overwrite)
    bare = tmp_path / "bare"
    (bare / "traces").mkdir(parents=True)
    with pytest.raises(RunConflict, match=r"no readable run\.json"):
        DemoFolder(bare).prepare(seed=0, overwrite=overwrite)
    assert (thesis.run / "thesis.tex").read_text() == "years of work"
    assert (other.run / "traces" / "old").exists()
    assert bare.is_dir()


def test_a_setup_folder_of_somebody_else_is_kept(tmp_path: Path) -> None:
    setup = tmp_path / "run-setup"
    setup.mkdir()
    (setup / "env.toml").write_text("[mine]\n")
    with pytest.raises(RunConflict, match="run-setup is not the demo's"):
        DemoFolder(tmp_path / "run").prepare(seed=0, overwrite=True)
    assert (setup / "env.toml").read_text() == "[mine]\n"


def test_links_and_files_are_kept(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    link = tmp_path / "link"
    link.symlink_to(folder.run)
    with pytest.raises(RunConflict, match="link"):
        DemoFolder(link).prepare(seed=0, overwrite=True)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInput, match="is a file"):
        DemoFolder(file).prepare(seed=0, overwrite=True)
    assert (folder.run / "traces" / "old").exists()
