"""JSON files of a run that hold something else than was written: a sentence says which file it is, and no traceback."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rolltape.replay import open_run
from rolltape.schema.errors import Damaged

Cli = Callable[..., tuple[int, str, str]]
DEEP = "[" * 100_000 + "]" * 100_000
COMMIT = "commits/train/00000000.0.main.json"


@pytest.fixture
def run(demo_run: Path, tmp_path: Path) -> Path:
    """The demo run, to be damaged."""
    return Path(shutil.copytree(demo_run, tmp_path / "run"))


@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 100_000 + "1" + "}" * 100_000])
def test_json_that_is_nested_too_deeply_is_damaged(run: Path, rolltape: Cli, text: str) -> None:
    for name, code in (("run.json", 2), (COMMIT, 1), ("attempts/0.json", 1)):
        whole = (run / name).read_text()
        (run / name).write_text(text)
        found, out, err = rolltape("verify", run, "--json")
        assert (found, name in out + err, "nested too deeply" in out + err) == (code, True, True), name
        assert rolltape("stats", run)[0] == (0 if name.startswith("attempts") else 2)
        (run / name).write_text(whole)


def test_the_other_runs_are_listed_beside_one_that_is_nested_too_deeply(
    run: Path, demo_run: Path, rolltape: Cli
) -> None:
    shutil.copytree(demo_run, run.parent / "sound")
    for name in ("run.json", COMMIT):
        (run / name).write_text(DEEP)
        code, out, _ = rolltape("list", run.parent, "--json")
        states = {r["name"]: r["state"] for r in json.loads(out)["runs"]}
        assert (code, states) == (0, {"run": "damaged", "sound": "complete"})


@pytest.mark.parametrize("levels", range(100, 1100, 100))
def test_a_checksum_of_any_depth_is_refused_where_it_does_not_fit(run: Path, levels: int) -> None:
    said = json.loads((run / "run.json").read_text())
    said["command"] = json.loads("[" * levels + "]" * levels) if levels < 500 else "DEEP"
    text = json.dumps(said).replace('"DEEP"', "[" * levels + "]" * levels)
    (run / "run.json").write_text(text)
    with pytest.raises(Damaged, match=r"run\.json: "):
        open_run(run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("model", "tokenizer", "taskset")
            for value in (5, math.nan, ["m"], {"m": 1}, True)
        ),
        *(("created_at", value) for value in ("now", math.nan, -math.inf, [1])),
        ("imported", "yes"),
        ("rescored_from", 7),
        ("run", 7),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name(run: Path, rolltape: Cli, name: str, value: object) -> None:
    said = json.loads((run / "run.json").read_text())
    del said["checksum"]
    (run / "run.json").write_text(json.dumps({**said, name: value}))
    told = "no run id" if name == "run" else f"run.json: {name} is {value!r}; expected "
    for words in (("verify", run), ("diff", run, run), ("stats", run)):
        code, _, err = rolltape(*words)
        assert (code, told in err) == (2, True), words
    code, out, _ = rolltape("list", run.parent, "--json")
    assert (code, [r["state"] for r in json.loads(out)["runs"]]) == (0, ["damaged"])


@pytest.mark.parametrize(
    "body", [{"settings": 5}, {"versions": []}, {"start_step": math.inf}, {"attempt": -math.inf}, {"settings": None}]
)
def test_an_attempt_with_a_value_of_another_type_is_left_out(run: Path, rolltape: Cli, body: dict[str, object]) -> None:
    (run / "attempts/0.json").write_text(json.dumps({"attempt": 0, **body}))
    assert open_run(run).attempts == {}
    for words in (("diff", run, run), ("list", run.parent), ("stats", run)):
        assert rolltape(*words)[0] == 0, words
