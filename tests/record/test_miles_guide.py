"""The guide's examples are read as they stand: every key exists, defaults are the defaults, every option is in it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rolltape.record.config import env_config
from rolltape.record.launching.options import RENAMED
from rolltape.record.miles.options import _NOT_HONOURED, OF_MILES, MilesOptions, _read_own
from rolltape.record.options import LiveOptions
from rolltape.record.writing.store import StoreOptions

GUIDE = (Path(__file__).parents[2] / "record" / "MILES.md").read_text(encoding="utf-8")
SMALLEST, FULL, OWN = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
NOT_UNDER_MILES = {"writer", "mask", *({f.name for f in fields(StoreOptions)} - {"retry_seconds"})}
"""Options of a live run that under Miles are given as [journal], or do not exist."""


def test_the_environments_are_ones_that_verifiers_takes() -> None:
    smallest = tomllib.loads(SMALLEST)
    assert list(smallest) == ["taskset"]
    config = env_config(tomllib.loads(FULL))
    assert config.max_turns == 8
    assert config.retries.rollout.max_retries == 2
    assert config.timeout.scoring == 60.0


def uncommented(text: str) -> dict[str, Any]:
    """The example with its commented keys switched on."""
    return tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))


def test_rolltapes_own_options_are_known_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(re.sub(r"^# (\w+ = )", r"\1", OWN, flags=re.MULTILINE), encoding="utf-8")
    read = _read_own(str(path))
    every = {f.name for f in fields(LiveOptions)} - set(OF_MILES) - NOT_UNDER_MILES
    assert every == set(read["own"]) - {"journal"}
    assert read["store"] == StoreOptions()
    assert set(uncommented(OWN)["journal"]) == {f.name for f in fields(StoreOptions)}
    assert read["expect"].group_reward_sum == {"fastest": 0.5}


def test_what_stands_uncommented_is_the_default() -> None:
    given = tomllib.loads(OWN)
    defaults = {f.name: f.default for f in (*fields(LiveOptions), *fields(MilesOptions))}
    for name, value in given.items():
        if name not in ("journal", "expect"):
            assert defaults[name] == value, name


@pytest.mark.parametrize("option", [option for option, _ in _NOT_HONOURED.values() if option.startswith("--")])
def test_refused_options_are_in_the_table(option: str) -> None:
    assert f"`{option}`" in GUIDE or option == "--multi-lora-n-adapters"


@pytest.mark.parametrize("option", sorted(set(RENAMED) - {"--hf-checkpoint", "--ref-load", "--save"}))
def test_options_of_the_integration_are_named(option: str) -> None:
    assert option in GUIDE or option in ("--global-batch-size", "--actor-num-gpus-per-node")


def test_links_and_modules_exist() -> None:
    folder = Path(__file__).parents[2] / "record"
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", GUIDE):
        assert (folder / target).exists(), target
