"""The configuration beside exported traces, without which Verifiers' `replay` does not start.

Its releases up to 0.3.0 look for `config.toml`, later ones for `configs/resolved/*.json`. What it says is the environment
that the run's newest attempt recorded, secrets masked as they are there, or the taskset of an imported run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolltape.replay.run import Run
from rolltape.replay.whole import whole_file
from rolltape.schema.commits import Commit

TRACES = "traces.jsonl"
"""Name under which Verifiers looks for traces in a folder."""


def write_config(run: Run, commits: Sequence[Commit], traces: Path, release: str) -> Path | None:
    """Write the configuration beside `traces` and return its path.

    None, and nothing is written, where the file is not called traces.jsonl, a configuration is there already, or the run knows
    no taskset.
    """
    known = environment(run, commits)
    if traces.name != TRACES or known is None:
        return None
    path = traces.parent / ("config.toml" if _before_json(release) else "configs/resolved/eval.json")
    if path.exists():
        return None
    text = toml(known) if path.suffix == ".toml" else json.dumps(known, indent=2)
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def scored_again(run: Run, commits: Sequence[Commit], config: Path) -> str:
    """The sentence that says how traces beside `config` are scored again: by Verifiers' replay, where it finds the taskset."""
    known = environment(run, commits)
    taskset = str(known["taskset"]["id"]) if known else ""
    if "." not in taskset:
        folder = config.parent if config.suffix == ".toml" else config.parents[2]
        return f"to score them again by Verifiers: {shlex.join(['replay', str(folder), '--output-dir', f'{folder}-again'])}"
    given = str(config) if config.suffix == ".toml" else "ENV.toml"
    command = shlex.join(["rolltape", "rescore", str(run.paths.root), "--config", given, "--out", "RESCORED"])
    return f"Verifiers' replay finds no taskset inside a package, such as {taskset}; to score them again: {command}"


def environment(run: Run, commits: Sequence[Commit]) -> Mapping[str, Any] | None:
    """The environment that the newest attempt of `commits` recorded, or the run's taskset alone; None where it has neither."""
    for number in sorted({c.part.attempt for c in commits}, reverse=True):
        attempt = run.attempts.get(number)
        found = attempt.settings.get("environment") if attempt else None
        if isinstance(found, Mapping) and isinstance(found.get("taskset"), Mapping) and found["taskset"].get("id"):
            return found
    taskset = run.info.get("taskset")
    return {"taskset": {"id": taskset}} if taskset else None


def _before_json(release: str) -> bool:
    numbers = [int(n) for n in re.findall(r"\d+", release)[:3]]
    return numbers < [0, 3, 1]


def toml(values: Mapping[str, Any]) -> str:
    """`values` as TOML, a line a key, tables inside lines. Nulls are left out, as TOML has none."""
    return "".join(f"{_key(key)} = {_toml(value)}\n" for key, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(json.dumps(value), repr(value))
    return _text(str(value))


def _key(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z0-9_-]+", value) else _text(value)


def _text(value: str) -> str:
    """A basic string: JSON's escapes are TOML's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
