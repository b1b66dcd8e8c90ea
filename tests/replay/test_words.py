"""Counts in sentences: one of a thing is in the singular wherever people read it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_build import put_run, put_step, turn

from rolltape.replay.printing.words import counted

Cli = Callable[..., tuple[int, str, str]]
_ONE_OF_MANY = re.compile(
    r"(?<![\d.,/–-])\b1 (?!of\b|x\b)(\w+ )?(files|steps|traces|groups|rollouts|tokens|Samples|samples|batches|findings|"
    r"warnings|tasks|rows|lines|turns|messages|tries|settings|runs|conversations|branches|nodes)\b"
)


@pytest.mark.parametrize(
    ("number", "what", "many", "said"),
    [
        (1, "file", "", "1 file"),
        (0, "file", "", "0 files"),
        (1024, "batch", "batches", "1,024 batches"),
        (None, "turn", "", "– turns"),
    ],
)
def test_a_count_has_its_plural(number: int | None, what: str, many: str, said: str) -> None:
    assert counted(number, what, many) == said


@pytest.mark.parametrize(
    "words",
    [
        "stats RUN",
        "stats RUN --by task",
        "show RUN",
        "show RUN a",
        "list RUN",
        "verify RUN",
        "diff RUN RUN --all",
        "diff RUN OTHER",
        "convert RUN --out OUT/{rollout_id}.jsonl",
        "export RUN --format verifiers --out OUT/traces.jsonl",
        "export RUN --format hf --out OUT/hf.parquet",
        "sql RUN 'SELECT 1 AS x' --out OUT/x.csv",
        "prune RUN --tokens --yes",
        "import OUT/../traces.jsonl --run OUT/imported",
    ],
)
def test_of_a_run_of_one_trace_nothing_is_said_in_the_plural(words: str, tmp_path: Path, rolltape: Cli) -> None:
    for name, reward in (("run", 1.0), ("other", 0.5)):
        put_step(put_run(tmp_path / name), 0, [turn(id="a", reward=reward)])
    (tmp_path / "out").mkdir()
    if words.startswith("import"):
        rolltape("export", tmp_path / "run", "--format", "verifiers", "--out", tmp_path / "traces.jsonl")
    places = {"RUN": tmp_path / "run", "OTHER": tmp_path / "other", "OUT": tmp_path / "out"}
    given = re.sub(r"RUN|OTHER|OUT", lambda found: str(places[found[0]]), words)
    code, out, err = rolltape(*shlex.split(given))
    assert code == 0
    assert not [line for line in (out + err).splitlines() if _ONE_OF_MANY.search(line)]
