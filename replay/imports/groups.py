"""Which traces are one group: the rollouts whose rewards are compared.

Verifiers says it in different places, or not at all, so it is read from what a line has, in this order (`auto`):

- the group that the trainer gave the Episode (`group.id`, from 0.3.1 on);
- the task, within one step of one training run (`run`, from 0.2.1 on);
- the task, within one file. A run of an evaluation that was resumed has two ids, so its id is not asked.

`episode` goes by the Episode's group, else by the Episode; `run` by task and run, whichever run that is; `task` by the task
alone. A task is its key where the release has one, else its index, else its data. Traces of different agents are never one
group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from rolltape.schema.records import as_mapping

GroupBy = Literal["auto", "episode", "run", "task"]
GROUP_BY: tuple[GroupBy, ...] = get_args(GroupBy)

Key = tuple[Any, ...]


def group_key(by: GroupBy, record: Mapping[str, Any], line: Mapping[str, Any], source: str) -> bytes:
    """16 bytes that are equal for traces of one group.

    `line` is the line that `record` came in, the record itself where it was no Episode; `source` names the file.
    """
    agent = as_mapping(record.get("agent"))
    key = (_key(by, record, line, source), agent.get("name"), is_trained(record))
    text = repr(key)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_trained(record: Mapping[str, Any]) -> bool:
    """Whether the agent that made the trace is one that is trained: all are that do not say otherwise."""
    return as_mapping(record.get("agent")).get("trainable") is not False


def _key(by: GroupBy, record: Mapping[str, Any], line: Mapping[str, Any], source: str) -> Key:
    if by == "task":
        return "task", _task(record)
    given = as_mapping(line.get("group")).get("id") if line is not record else None
    if by in ("auto", "episode") and isinstance(given, str):
        return "group", given
    if by == "episode":
        return "episode", line.get("id")
    run = _run(record, line)
    if run is not None and (by == "run" or run[2] is not None):
        return "run", run, _task(record)
    return "file", source, _task(record)


def _task(record: Mapping[str, Any]) -> Key:
    task = as_mapping(record.get("task"))
    data = as_mapping(task.get("data"))
    if isinstance(task.get("key"), str):
        return task.get("type"), "key", task["key"]
    index = data.get("idx")
    return task.get("type"), "idx", json.dumps(data, sort_keys=True) if index is None else index


def _run(record: Mapping[str, Any], line: Mapping[str, Any]) -> Key | None:
    """(id, kind of work, training step) of the run that a trace or its Episode names."""
    for holder in (line, record):
        run = as_mapping(holder.get("run"))
        if run:
            work = as_mapping(run.get("work", run))
            return run.get("id"), work.get("type"), work.get("step")
    return None
