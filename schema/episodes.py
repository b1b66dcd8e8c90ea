"""Episode lines of Verifiers 0.3.0 and later: several traces, and what is said of all of them.

A row is a trace. What its Episode says beside the traces (id, env, task, group, run, ok, errors …) goes with each of them
into `extra`, so that the line can be made again, key order included, from the rows of its traces:

    take apart    envelope(line, i)            what to put into `extra` under "episode"
    look          episode_of(extra)            the Episode of a row; None where its line was a trace
    put together  line_of(episode, records)    the line, bit for bit
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolltape.schema.jsontext import unpack_extra

KEY = "episode"
"""Name in `extra`."""
_SHARED = ("task",)
"""Values that an Episode repeats from its traces, and that are kept once where both are the same."""


@dataclass(frozen=True)
class Episode:
    """The Episode a trace came in."""

    keys: tuple[str, ...]
    """Of the line, in order, `traces` among them."""
    values: Mapping[str, Any]
    """By key, without `traces` and without what is `shared`."""
    shared: tuple[str, ...]
    """Keys whose value is that of the trace."""
    index: int
    """Place of the trace among the Episode's."""
    traces: int
    """How many traces the line held."""

    @property
    def id(self) -> str | None:
        """The Episode's id."""
        found = self.values.get("id")
        return found if isinstance(found, str) else None


def is_episode(line: Mapping[str, Any]) -> bool:
    """Whether a line of traces.jsonl is an Episode: it holds traces, and is none itself."""
    return "traces" in line and "nodes" not in line


def envelope(line: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What an Episode line says beside its traces, as it is kept with trace `index`."""
    trace = line["traces"][index]
    shared = [k for k in _SHARED if k in line and k in trace and _same(line[k], trace[k])]
    return {
        "keys": list(line),
        "values": {k: v for k, v in line.items() if k != "traces" and k not in shared},
        "shared": shared,
        "index": index,
        "traces": len(line["traces"]),
    }


def _same(a: Any, b: Any) -> bool:
    """Whether two JSON values are written alike: 1 and 1.0 are equal and are not."""
    return a == b and json.dumps(a) == json.dumps(b)


def episode_of(extra: bytes | Mapping[str, Any] | None) -> Episode | None:
    """The Episode of a row by its column `extra`; None where the row's line was a trace."""
    kept = unpack_extra(extra) if isinstance(extra, bytes) else extra or {}
    if KEY not in kept:
        return None
    e = kept[KEY]
    return Episode(tuple(e["keys"]), e["values"], tuple(e["shared"]), e["index"], e["traces"])


def line_of(episode: Episode, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The Episode line that held `records`: its traces as `decode` gives them, in the order of their `index`."""
    rest = {k: records[episode.index if len(records) == episode.traces else 0][k] for k in episode.shared}
    values = {**episode.values, **rest, "traces": list(records)}
    return {key: values[key] for key in episode.keys}
