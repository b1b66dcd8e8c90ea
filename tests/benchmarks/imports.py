"""Measure `rolltape import` against Verifiers' own reader on the same traces.jsonl, which Verifiers' writer wrote.

    python tests/benchmarks/imports.py [--json] [--traces 300] [--repeats 3] [--jobs 2] [--keep FOLDER]

Each run has a process of its own, which has loaded and used everything once before its time is taken, so that memory can
be read too; those that an import with several starts are started within its time. Sides take turns, as in bench.py; a
ratio is one of medians, and above 1 the import is faster.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rollouts import Record, Shape, make_records

FIVE_K = Shape(rollouts=8, turns=6, prompt=650, completion=540, observation=215)
"""About 5,000 tokens a trace, 65 % of them sampled."""
GROUPS_AT_ONCE = 16


def write_file(folder: Path, traces: int) -> dict[str, int]:
    """traces.jsonl as Verifiers writes it, without holding its traces. Returns traces, tokens and bytes."""
    from pydantic import TypeAdapter
    from verifiers.v1.trace import WireTrace

    adapter = TypeAdapter(WireTrace)
    path, tokens, count = folder / "traces.jsonl", 0, 0
    with path.open("wb") as file:
        for record in _records(traces):
            file.write(adapter.dump_json(WireTrace.model_validate(record), exclude_none=True) + b"\n")
            tokens += sum(len(node["token_ids"]) for node in record["nodes"])
            count += 1
    return {"traces": count, "tokens": tokens, "bytes": path.stat().st_size}


def _records(traces: int) -> Iterator[Record]:
    groups = -(-traces // FIVE_K.rollouts)
    for start in range(0, groups, GROUPS_AT_ONCE):
        for record in make_records(FIVE_K, min(GROUPS_AT_ONCE, groups - start), seed=start):
            record["task"]["data"]["idx"] += start
            yield record


# -- what is measured, in a process of its own


def read_traces(folder: Path, _: Path) -> int:
    """Verifiers' reader: every trace, as an object."""
    from verifiers.v1.cli.output import read_traces as read
    from verifiers.v1.trace import WireTrace

    return len(read(folder, WireTrace))


def import_json(folder: Path, run: Path) -> int:
    """The import, with the standard library's JSON."""
    from rolltape.replay.imports import lines

    lines._fast = None
    return import_fast(folder, run)


def import_fast(folder: Path, run: Path, jobs: int = 1) -> int:
    """The import, with msgspec where it is installed."""
    from rolltape.replay.imports.importer import import_files

    return import_files(folder, run, jobs=jobs).traces


SIDES: dict[str, Callable[[Path, Path], int]] = {
    "read_traces": read_traces,
    "import": import_fast,
    "import_json": import_json,
}


def child(side: str, folder: Path, small: Path) -> None:
    """Run one side and print what it took. `small` is a file to load and use everything with beforehand.

    Of several processes, peak memory and CPU time are those of the first.
    """
    work = SIDES.get(side) or (lambda source, run: import_fast(source, run, int(side.removeprefix("import_jobs_"))))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        SIDES.get(side, import_fast)(small, Path(place) / "small")
        cpu, start = time.process_time(), time.perf_counter()
        traces = work(folder, Path(place) / "run")
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"traces": traces, "seconds": seconds, "cpu": cpu, "peak": peak}))


def run(side: str, folder: Path, small: Path) -> dict[str, Any]:
    """One side in a process of its own."""
    command = [sys.executable, __file__, "--child", side, str(folder), str(small)]
    done: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return done


# -- the report


def measured(traces: int, repeats: int, jobs: Sequence[int], folder: Path) -> dict[str, Any]:
    """The numbers of a file of `traces` traces."""
    size = write_file(folder, traces)
    sides = ["read_traces", "import", *(["import_json"] if find_spec("msgspec") else [])]
    sides += [f"import_jobs_{n}" for n in jobs]
    with _small(folder) as small:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side in sides:
                runs[side].append(run(side, folder, small))
                assert runs[side][-1]["traces"] == size["traces"]
    median = {
        s: {k: statistics.median(r[k] for r in found) for k in ("seconds", "cpu", "peak")} for s, found in runs.items()
    }
    return {
        **size,
        "repeats": repeats,
        "msgspec": find_spec("msgspec") is not None,
        "ratios": {
            side: {
                "seconds": round(median["read_traces"]["seconds"] / m["seconds"], 2),
                "cpu": round(median["read_traces"]["cpu"] / m["cpu"], 2) if side in SIDES else None,
            }
            for side, m in median.items()
        },
        "ms_per_trace": {side: round(m["seconds"] / size["traces"] * 1e3, 3) for side, m in median.items()},
        "cpu_ms_per_trace": {s: round(m["cpu"] / size["traces"] * 1e3, 3) for s, m in median.items() if s in SIDES},
        "mtok_per_s": {side: round(size["tokens"] / m["seconds"] / 1e6, 2) for side, m in median.items()},
        "peak_mb": {side: round(m["peak"] / 1e6) for side, m in median.items()},
    }


@contextmanager
def _small(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as small:
        with (folder / "traces.jsonl").open("rb") as file:
            (Path(small) / "traces.jsonl").write_bytes(b"".join(file.readline() for _ in range(2)))
        yield Path(small)


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table."""
    size = f"{report['traces']} traces, {report['tokens']:,} tokens, {report['bytes'] >> 20} MiB"
    title = f"{size}; medians of {report['repeats']}"
    table = Table("", "speed", "by CPU", "ms/trace", "Mtok/s", "peak MB", title=title, title_justify="left")
    for side, ratio in report["ratios"].items():
        cpu = "-" if ratio["cpu"] is None else f"{ratio['cpu']:.2f}x"
        numbers = [str(report[part][side]) for part in ("ms_per_trace", "mtok_per_s", "peak_mb")]
        table.add_row(side, f"{ratio['seconds']:.2f}x", cpu, *numbers)
    console.print(table)
    if not report["msgspec"]:
        console.print("msgspec is not installed (the extra 'fast'): JSON was read by the standard library.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--traces", type=int, default=300, help="traces of about 5,000 tokens")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement")
    parser.add_argument("--jobs", type=int, nargs="*", default=[2], help="also with so many processes")
    parser.add_argument("--keep", type=Path, help="folder for the file, instead of one that is removed")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        side, folder, small = chosen.child
        child(side, Path(folder), Path(small))
        return
    folder = Path(tempfile.mkdtemp(prefix="rolltape-bench-")) if chosen.keep is None else chosen.keep
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report = measured(chosen.traces, chosen.repeats, chosen.jobs, folder)
    finally:
        if chosen.keep is None:
            shutil.rmtree(folder)
    if chosen.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, Console())


if __name__ == "__main__":
    main()
