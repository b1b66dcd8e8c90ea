"""The journal against Verifiers' traces.jsonl: each trace taken apart and appended on its own, never batched.

Each side works in a thread of its own, beside the main one, as it does in a run: there the two have the same allocator.
Each begins with an empty file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

import baselines

from rolltape.record.writing.journal import Fsync, Journal, pack_record
from rolltape.schema.encoding import row_of


def sides_of(traces: Sequence[Any], folder: Path) -> dict[str, Callable[[], Any]]:
    """What is timed: Verifiers' `write_trace` of every trace, and encoding and appending it, by how the journal syncs."""
    journals = {fsync: Journal(folder / f"0.{fsync}.journal", fsync=fsync) for fsync in get_args(Fsync)}
    sides: dict[str, Callable[[], Any]] = {"write_jsonl": partial(baselines.write_jsonl, list(traces), folder)}
    sides.update((fsync, partial(_append, traces, journal)) for fsync, journal in journals.items())
    return {name: partial(_in_thread, ThreadPoolExecutor(1), side) for name, side in sides.items()}


def _in_thread(thread: ThreadPoolExecutor, side: Callable[[], Any]) -> Any:
    return thread.submit(side).result()


def _append(traces: Sequence[Any], journal: Journal) -> None:
    journal.clear()
    for trace in traces:
        journal.append(pack_record("trace", {}, row_of(trace)))


def ratios_of(seconds: dict[str, float]) -> dict[str, float]:
    """`write_trace` over ours, as the journal syncs by default, and with the other ways."""
    named = {"interval": "journal_vs_jsonl", "always": "journal_vs_jsonl_synced", "never": "journal_vs_jsonl_unsynced"}
    return {name: seconds["write_jsonl"] / seconds[fsync] for fsync, name in named.items()}
