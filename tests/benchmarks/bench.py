"""Measure rolltape against traces.jsonl, .pt files and the floor of building bare lists, on the same rollouts.

    python tests/benchmarks/bench.py [--json] [--shape agentic|long_prompt] [--groups 4 16 32] [--repeats 5] [--episodes 256]

Sides that are compared take turns (a, b, c, a, b, c, …), so that a busy machine slows all of them alike; a ratio is one
of medians. Above 1 rolltape is smaller or faster. README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import baselines
import journals
import live
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rollouts import SHAPES, VOCABULARY, Record, Shape, make_records

from rolltape.replay import check, convert, flatten
from rolltape.replay.view import COLUMNS
from rolltape.schema import Context, Group, encode, read_parquet, write_parquet

TOKEN_COLUMNS = ("token_ids", "sampled", "is_content", "logprobs")
VOCABULARIES = {15: 24_000, 16: 48_000, 17: VOCABULARY}
"""Distinct token ids by the bits a dictionary's index over them would take."""
HAS_TORCH = importlib.util.find_spec("torch") is not None
NO_TORCH = "torch is not installed, so the .pt file was left out (size_vs_pt, replay_vs_pt)."

Sides = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Work:
    """One workload, laid out in a folder: the same rollouts in every form."""

    shape: Shape
    folder: Path
    traces: list[Any]
    contexts: list[Context]
    groups: list[Group]
    tokens: int
    arrays: list[baselines.Arrays]

    @property
    def parquet(self) -> Path:
        """Ours."""
        return self.folder / "rollouts.parquet"

    @property
    def pt(self) -> Path:
        """The .pt file."""
        return self.folder / "rollouts.pt"

    def write_ours(self) -> int:
        """Trace objects to a Parquet file, whole and synced. Returns its bytes."""
        return write_parquet(self.parquet, [self.rows()]).bytes

    def write_theirs(self) -> int:
        """Trace objects to a synced traces.jsonl. Returns its bytes."""
        size = baselines.write_jsonl(self.traces, self.folder)
        with (self.folder / baselines.TRACES_FILE).open("rb") as file:
            os.fsync(file.fileno())
        return size

    def rows(self) -> pa.Table:
        """Trace objects to rows."""
        return encode(self.traces, self.contexts)

    def replay(self) -> list[Any]:
        """Parquet file to checked, complete Samples; its pages are verified on the way."""
        conversion = convert(read_parquet(self.parquet, COLUMNS), self.groups)
        assert not conversion.dropped, conversion.findings
        return [sample for group in conversion.groups for sample in flatten(group)]


def prepare(shape: Shape, groups: int, folder: Path) -> tuple[Work, dict[str, int]]:
    """The workload and the bytes of each file."""
    records = make_records(shape, groups)
    traces = baselines.to_traces(records)
    bytes_ = {"jsonl": baselines.write_jsonl(traces, folder)}
    samples = baselines.samples_from_jsonl(folder)
    work = Work(
        shape,
        folder,
        traces,
        [Context(group_index=i // shape.rollouts, rollout_index=i % shape.rollouts) for i in range(len(records))],
        list(_groups(records, shape)),
        sum(len(sample["tokens"]) for sample in samples),
        baselines.arrays_of(samples),
    )
    if HAS_TORCH:
        bytes_["pt"] = baselines.save_pt(samples, work.pt)
    bytes_["parquet"] = work.write_ours()
    _same_samples(work.replay(), samples)
    return work, bytes_


def _groups(records: Sequence[Record], shape: Shape) -> Iterator[Group]:
    for start in range(0, len(records), shape.rollouts):
        members = records[start : start + shape.rollouts]
        yield Group.from_records(members, group_index=start // shape.rollouts, expected_size=shape.rollouts)


def _same_samples(ours: Sequence[Any], theirs: Sequence[baselines.SampleDict]) -> None:
    """Speed says nothing about Samples that differ."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("tokens", "loss_mask", "rollout_log_probs", "response", "response_length", "prompt", "reward"):
            assert getattr(mine, name) == other[name], f"{name} of {mine.routing_key} differs"


def measure(sides: Sides, repeats: int) -> dict[str, float]:
    """Median seconds of each side, taking turns. Results are freed outside the time taken.

    What a side has written is on disk before the next one begins: to sync a file is to wait for others of its file system.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    with _own_objects_set_aside():
        for _ in range(repeats):
            for name, side in sides.items():
                gc.collect()
                os.sync()
                start = time.perf_counter()
                result = side()
                taken[name].append(time.perf_counter() - start)
                del result
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


@contextmanager
def _own_objects_set_aside() -> Iterator[None]:
    """Keep the garbage collector, which stays on, from walking over what the benchmark itself holds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def sides_of(work: Work) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    table = read_parquet(work.parquet, COLUMNS)
    sides: dict[str, Callable[[], Any]] = {
        "write_jsonl": lambda: baselines.write_jsonl(work.traces, work.folder),
        "write_parquet": lambda: _unsynced(work.write_ours),
        "write_jsonl_synced": work.write_theirs,
        "write_parquet_synced": work.write_ours,
        "encode": work.rows,
        "read_jsonl": lambda: baselines.samples_from_jsonl(work.folder),
        "replay": work.replay,
        "floor": lambda: baselines.floor(work.arrays),
        "read_parquet": lambda: read_parquet(work.parquet, COLUMNS),
        "convert": lambda: convert(table, work.groups),
        "check": lambda: check(table),
    }
    return {**sides, "read_pt": lambda: baselines.load_pt(work.pt)} if HAS_TORCH else sides


def _unsynced(side: Callable[[], Any]) -> Any:
    """What a side takes where files are not synced, as `write_trace` does not sync its own."""
    sync, os.fsync = os.fsync, lambda _: None
    try:
        return side()
    finally:
        os.fsync = sync


def run(name: str, groups: int, repeats: int) -> dict[str, Any]:
    """The numbers of one shape and group count."""
    with tempfile.TemporaryDirectory(prefix="rolltape-bench-") as folder:
        work, sizes = prepare(SHAPES[name], groups, Path(folder))
        columns = column_bytes(work.parquet)
        seconds = measure(sides_of(work), repeats)
    ratios = {
        "size_vs_jsonl": sizes["jsonl"] / sizes["parquet"],
        "size_vs_pt": sizes["pt"] / sizes["parquet"] if HAS_TORCH else None,
        "replay_vs_jsonl": seconds["read_jsonl"] / seconds["replay"],
        "replay_vs_pt": seconds["read_pt"] / seconds["replay"] if HAS_TORCH else None,
        "replay_vs_floor": seconds["floor"] / seconds["replay"],
        "checks_vs_replay": seconds["convert"] / seconds["check"],
        "parquet_vs_jsonl": seconds["write_jsonl"] / seconds["write_parquet"],
        "parquet_vs_jsonl_synced": seconds["write_jsonl_synced"] / seconds["write_parquet_synced"],
    }
    return {
        "shape": name,
        "groups": groups,
        "traces": len(work.traces),
        "tokens": work.tokens,
        "ratios": {k: v if v is None else round(v, 3) for k, v in ratios.items()},
        "bytes_per_token": {
            **{k: round(v / work.tokens, 3) for k, v in sizes.items()},
            **{k: round(columns[k] / work.tokens, 3) for k in TOKEN_COLUMNS},
            "ids_masks_logprobs": round(sum(columns[k] for k in TOKEN_COLUMNS) / work.tokens, 3),
            "their_entropy": round(entropy(work) / work.tokens, 3),
        },
        "mtok_per_s": {k: round(work.tokens / v / 1e6, 2) for k, v in seconds.items()},
    }


def column_bytes(path: Path) -> dict[str, int]:
    """Compressed bytes of each column of a Parquet file."""
    metadata = pq.read_metadata(path)
    sizes: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            name = chunk.path_in_schema.split(".")[0]
            sizes[name] = sizes.get(name, 0) + chunk.total_compressed_size
    return sizes


def entropy(work: Work) -> float:
    """Bytes that ids and log-probs hold at least, whatever the encoding: shared prompts once, no token foreseeable.

    The log-probs are continuous: sign, exponent and the first seven bits of the fraction follow a distribution, and the
    16 bits after them are noise.
    """
    size, prompt = work.shape.rollouts, work.shape.prompt
    ids = [ids if i % size == 0 else ids[prompt:] for i, (ids, _, _) in enumerate(work.arrays)]
    logprobs = np.concatenate([values[mask > 0] for _, mask, values in work.arrays])
    return _entropy(np.concatenate(ids)) + _entropy(logprobs.view(np.uint32) >> 16) + 2 * len(logprobs)


def _entropy(values: npt.NDArray[Any]) -> float:
    """Bytes of an ideal code for `values`, whose frequencies are known to it."""
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / len(values))).sum() / 8)


def vocabulary_widths(groups: int) -> dict[str, float]:
    """Bytes per token of ids, masks and log-probs of the long-prompt shape, by the bits of a dictionary's index."""
    result = {}
    for bits, distinct in VOCABULARIES.items():
        records = make_records(SHAPES["long_prompt"], groups, distinct=distinct)
        with tempfile.TemporaryDirectory(prefix="rolltape-bench-") as folder:
            path = Path(folder) / "rollouts.parquet"
            write_parquet(path, [encode(records)])
            columns = column_bytes(path)
        tokens = sum(len(node["token_ids"]) for record in records for node in record["nodes"])
        result[f"{bits} bits"] = round(sum(columns[k] for k in TOKEN_COLUMNS) / tokens, 3)
    return result


def recording(shape: Shape, repeats: int, episodes: int) -> dict[str, Any]:
    """What recording costs while episodes run: the journal, CPU, the event loop."""
    with tempfile.TemporaryDirectory(prefix="rolltape-bench-") as folder:
        traces = baselines.to_traces(make_records(shape, 8))
        seconds = measure(journals.sides_of(traces, Path(folder)), 5 * repeats)  # of 40 ms each
    found = {**journals.ratios_of(seconds), **live.recording_cpu(repeats, steps=3, rollouts=episodes)}
    found |= live.loop_stall(repeats, callbacks=False)
    del found["callbacks"]
    return {name: round(value, 3) for name, value in found.items()}


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report as tables."""
    results = report["results"]
    for part, title in (
        ("ratios", f"ratios of medians of {report['repeats']}: above 1 rolltape is smaller or faster"),
        ("bytes_per_token", "bytes per token"),
        ("mtok_per_s", "million tokens per second"),
    ):
        table = Table("", title=title, title_justify="left")
        for result in results:
            table.add_column(f"{result['shape']}\n{result['groups']} groups", justify="right", no_wrap=True)
        for name in results[0][part]:
            cells = [result[part][name] for result in results]
            table.add_row(name, *("-" if cell is None else f"{cell:.2f}" for cell in cells))
        console.print(table)
    if report["recording"]:
        table = Table("recording", "", title="journal_vs_jsonl: above 1 rolltape is faster", title_justify="left")
        for name, value in report["recording"].items():
            table.add_row(name, f"{value:.2f}")
        console.print(table)
    for width, found in report["long_prompt_bytes_per_token"].items():
        console.print(f"long_prompt, ids + masks + log-probs, dictionary of {width}: {found:.2f} B/token")
    for sentence in report["skipped"]:
        console.print(sentence)


def measured(shapes: Sequence[str], groups: Sequence[int], repeats: int, episodes: int) -> dict[str, Any]:
    """The numbers of all shapes and group counts, and of recording."""
    packages = ("verifiers", "pyarrow", "numpy", *(["torch"] if HAS_TORCH else []))
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "repeats": repeats,
        "skipped": [] if HAS_TORCH else [NO_TORCH],
        "results": [run(shape, count, repeats) for shape in shapes for count in groups],
        "long_prompt_bytes_per_token": vocabulary_widths(min(groups)) if "long_prompt" in shapes else {},
        "recording": recording(SHAPES[shapes[0]], repeats, episodes) if episodes else {},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--shape", choices=list(SHAPES), help="only this shape (default: agentic and long_prompt)")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 16, 32], help="group counts")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    parser.add_argument("--episodes", type=int, default=256, help="episodes a step of the live part; 0 leaves it out")
    chosen = parser.parse_args(arguments)
    shapes = [chosen.shape] if chosen.shape else ["agentic", "long_prompt"]
    report = measured(shapes, chosen.groups, chosen.repeats, chosen.episodes)
    if chosen.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, Console())


if __name__ == "__main__":
    main()
