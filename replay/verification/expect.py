"""Expectations in TOML: what the user knows of a run, checked with everything else.

branches = 1                       # of every trace
group_size = 4                     # of every group
sampled_tokens = [1, 4096]         # least and most of a trace
reward_names = ["correct", "fastest", "most_concise"]

[group_reward_sum]                 # per group and reward name
fastest = 0.5
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rolltape.replay.options import Expectations
from rolltape.schema.errors import BadInput


def load_expectations(path: str | Path) -> Expectations:
    """Read an expectations file. Raises BadInput naming the file, the key, what was found and what is allowed."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; expected a TOML file of expectations.") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: no TOML ({error}).") from error
    return parse_expectations(data, str(path))


def parse_expectations(data: Mapping[str, Any], where: str) -> Expectations:
    """Expectations from parsed TOML. Raises BadInput."""
    unknown = sorted(set(data) - set(_PARSERS))
    if unknown:
        raise BadInput(f"{where}: {unknown[0]!r} is no expectation; known are {', '.join(_PARSERS)}.")
    return Expectations(**{key: _PARSERS[key](value, f"{where}: {key}") for key, value in data.items()})


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadInput(f"{where} is {value!r}; expected a whole number of 0 or more.")
    return value


def _range(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise BadInput(f"{where} is {value!r}; expected two whole numbers, least and most.")
    low, high = (_whole(v, where) for v in value)
    if low > high:
        raise BadInput(f"{where} is {value!r}; the least is above the most.")
    return low, high


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise BadInput(f"{where} is {value!r}; expected a list of reward names.")
    return tuple(value)


def _sums(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise BadInput(f"{where} is {value!r}; expected a table of reward names and numbers.")
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise BadInput(f"{where}.{name} is {number!r}; expected a number, and a finite one.")
    return {name: float(number) for name, number in value.items()}


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "branches": _whole,
    "group_size": _whole,
    "group_reward_sum": _sums,
    "sampled_tokens": _range,
    "reward_names": _names,
}
