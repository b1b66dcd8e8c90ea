"""Records that Verifiers wrote and does not read, made readable in an export, and as they were again at an import.

What was changed is told by the record itself, in `info`, the one place where Verifiers 0.2 takes any key:

    "info": {..., "rolltape_export": {"rewards": ["good", "unscored"], "without": ["prompt"]}}

    rewards, metrics   all names, in order. Those that the record has no number for are null
    without            of `prompt` (of the task's data) and `info`: what was not there

A trace that is to be the line of a release which reads Episodes only gets one that names no environment and has the trace's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltape.schema.records import as_mapping

Record = dict[str, Any]

KEY = "rolltape_export"
"""Name in `info`."""
_SCORES = ("rewards", "metrics")


def without_prompt(record: Mapping[str, Any]) -> bool:
    """Whether a task's data has no prompt: 0.2's reader asks for the key, its writer leaves it out where it is null."""
    data = as_mapping(record.get("task")).get("data")
    return isinstance(data, dict) and "prompt" not in data


def unscored(record: Mapping[str, Any]) -> list[str]:
    """Which of rewards and metrics hold a null: 0.2 reads numbers only, its writer makes null of NaN."""
    return [key for key in _SCORES if isinstance(record.get(key), dict) and None in record[key].values()]


def make_readable(record: Record) -> None:
    """Change what the reader of Verifiers 0.2 refuses though its writer wrote it. `as_written` takes it back."""
    said: dict[str, list[str]] = {}
    for key in unscored(record):
        said[key] = list(record[key])
        record[key] = {name: value for name, value in record[key].items() if value is not None}
    if without_prompt(record):
        record["task"]["data"]["prompt"] = None
        said["without"] = ["prompt"]
    if not said:
        return
    if "info" not in record:
        said.setdefault("without", []).append("info")
    info = record.setdefault("info", {})
    if isinstance(info, dict):  # else nobody reads the line
        info.setdefault(KEY, said)


def as_written(record: Record) -> Record:
    """A record of an export as it was before; any other as it is.

    What came in between stays: a name that was scored since has its number.
    """
    said = as_mapping(record.get("info")).get(KEY)
    if not isinstance(said, dict) or not _is_ours(said):
        return record
    without = said.get("without", [])
    record = {**record, "info": {key: value for key, value in record["info"].items() if key != KEY}}
    if "info" in without and not record["info"]:
        del record["info"]
    for key in _SCORES:
        if key in said and isinstance(record.get(key), dict):
            record[key] = {name: record[key].get(name) for name in said[key]} | record[key]
    data = as_mapping(as_mapping(record.get("task")).get("data"))
    if "prompt" in without and data.get("prompt", ...) is None:
        record["task"] = {**record["task"], "data": {key: value for key, value in data.items() if key != "prompt"}}
    return record


def _is_ours(said: Mapping[str, Any]) -> bool:
    """Whether `make_readable` wrote it."""
    names = all(isinstance(v, list) and all(isinstance(name, str) for name in v) for v in said.values())
    return names and set(said) <= {*_SCORES, "without"}


def own_episode(record: Record) -> Record:
    """An Episode line for a trace that came without one."""
    ok = record.get("ok", not record.get("errors"))
    return {
        "id": record["id"],
        "env": {"id": ""},
        "task": record["task"],
        "ok": ok,
        "errors": [],
        "traces": [record],
    }


def is_own_episode(line: Mapping[str, Any]) -> bool:
    """Whether an Episode line is one of `own_episode`."""
    traces = line.get("traces")
    if line.get("env") != {"id": ""} or not (isinstance(traces, list) and len(traces) == 1):
        return False
    try:
        return isinstance(traces[0], dict) and line == own_episode({"id": None, "task": None, **traces[0]})
    except RecursionError:
        return False
