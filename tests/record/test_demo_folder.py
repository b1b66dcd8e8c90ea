"""What `rolltape demo` does to a folder, and what it leaves alone."""

import json
import tomllib
from pathlib import Path

import pytest
from rolltape.record.demo.folder import DemoFolder
from rolltape.schema.errors import BadInput, RunConflict


def test_a_new_folder_gets_an_environment_an_expectation_and_a_tokenizer(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "deep" / "run")
    folder.prepare(seed=3, overwrite=False)
    environment = tomllib.loads(folder.environment.read_text())
    assert environment["taskset"] == {"id": "rolltape.record.demo", "seed": 3}
    assert environment["harness"] == {"id": "rolltape.record.demo"}
    assert tomllib.loads(folder.expectation.read_text()) == {"group_reward_sum": {"fastest": 0.5}}
    assert (folder.tokenizer / "tokenizer.json").is_file()


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    DemoFolder(tmp_path).prepare(seed=0, overwrite=False)


def test_an_earlier_demo_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "run")
    folder.prepare(seed=0, overwrite=False)
    (folder.run / "traces").mkdir()
    (folder.run / "traces" / "old").touch()
    with pytest.raises(RunConflict, match="--overwrite"):
        folder.prepare(seed=0, overwrite=False)
    assert (folder.run / "traces" / "old").exists()
    folder.prepare(seed=0, overwrite=True)
    assert not (folder.run / "traces").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_that_are_no_demo_run_are_never_touched(tmp_path: Path, overwrite: bool) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    with pytest.raises(RunConflict, match=r"holds thesis\.tex"):
        DemoFolder(tmp_path).prepare(seed=0, overwrite=overwrite)
    other = tmp_path / "other"
    (other / "traces").mkdir(parents=True)
    with pytest.raises(RunConflict, match="not a demo run"):
        DemoFolder(other).prepare(seed=0, overwrite=overwrite)
    assert thesis.read_text() == "years of work"
    assert (other / "traces").is_dir()


@pytest.mark.parametrize("run", [json.dumps({"taskset": {"id": "mine"}}), "not json"])
def test_a_demo_folder_with_another_run_in_it_is_kept(tmp_path: Path, run: str) -> None:
    folder = DemoFolder(tmp_path / "run")
    folder.prepare(seed=0, overwrite=False)
    (folder.run / "run.json").write_text(run)
    with pytest.raises(RunConflict, match=r"run\.json"):
        folder.prepare(seed=0, overwrite=True)
    assert (folder.run / "run.json").read_text() == run


def test_links_and_files_are_kept(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "run")
    folder.prepare(seed=0, overwrite=False)
    link = tmp_path / "link"
    link.symlink_to(folder.run)
    with pytest.raises(RunConflict, match="link"):
        DemoFolder(link).prepare(seed=0, overwrite=True)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInput, match="is a file"):
        DemoFolder(file).prepare(seed=0, overwrite=True)
