"""Questions over a long run: the reward by step and name, and what it costs to open the run at all.

    uv run python tests/benchmarks/sql.py                  # 500 steps of 128 agentic rollouts: about 2 GB for a while
    uv run python tests/benchmarks/sql.py --steps 50       # quicker
    uv run python tests/benchmarks/sql.py --shape tiny --traces 4 --steps 10000 --repeats 1      # 10,000 files

Each side answers the same question, and the answers are compared with each other before anything is timed. DuckDB over
traces.jsonl is timed over the first `--jsonl-steps` steps and scaled up, for it reads every byte.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import duckdb
from long_run import LongRun
from rich.console import Console
from rich.table import Table
from rollouts import SHAPES

from rolltape.replay import open_run

QUERY = "SELECT step, name, count(value), avg(value) FROM rewards GROUP BY ALL ORDER BY ALL"
PLAIN = """
    SELECT step, e.key, count(e.value), avg(e.value)
    FROM (SELECT step, unnest(map_entries(rewards)) AS e FROM {}) GROUP BY ALL ORDER BY ALL
"""
OTHERS = {
    "reward by task": "SELECT task_idx, avg(reward) FROM traces GROUP BY ALL ORDER BY ALL",
    "steps": "SELECT step, counts['emitted'] FROM steps ORDER BY step",
    "groups": "SELECT step, count(*) FROM groups GROUP BY step ORDER BY step",
    "roles of one step": "SELECT role, sum(tokens) FROM nodes WHERE step = 7 GROUP BY role ORDER BY role",
    "log-probs of one step": "SELECT avg(logprob), count(logprob) FROM tokens WHERE step = 7",
}
"""Further questions, which are timed on their own."""

Side = Callable[[], list[tuple[Any, ...]]]


class Bench:
    """The sides, over one run."""

    def __init__(self, made: LongRun, folder: Path, jsonl_steps: int) -> None:
        self.made, self.folder, self.jsonl_steps = made, folder, min(jsonl_steps, made.steps)
        self.root, self.jsonl, self.one = folder / "run", folder / "traces.jsonl", folder / "one.parquet"
        self.bytes = {"parquet": made.write(self.root), "jsonl": made.write_jsonl(self.jsonl, self.jsonl_steps)}
        self.files = [str(path) for path in sorted(self.root.glob("traces/*/*.parquet"))]
        self.other = duckdb.connect()
        self.other.execute(f"COPY (SELECT step, rewards FROM read_parquet({self.files})) TO '{self.one}'")

    # -- the question

    def warm(self) -> list[tuple[Any, ...]]:
        """Through `Run.sql`, the commits read, the columns in memory."""
        return self.run.sql(QUERY).fetchall()

    def fresh(self) -> list[tuple[Any, ...]]:
        """The same for the first time: the run is opened, its commits are listed and read."""
        return open_run(self.root).sql(QUERY).fetchall()

    def plain(self) -> list[tuple[Any, ...]]:
        """DuckDB over the run's Parquet files."""
        return self.other.execute(PLAIN.format(f"read_parquet({self.files})")).fetchall()

    def single(self) -> list[tuple[Any, ...]]:
        """DuckDB over the two columns in one file."""
        return self.other.execute(PLAIN.format(f"'{self.one}'")).fetchall()

    def over_jsonl(self) -> list[tuple[Any, ...]]:
        """DuckDB over traces.jsonl, told what the columns are, so that it need not guess."""
        columns = "{step: 'BIGINT', rewards: 'MAP(VARCHAR, DOUBLE)'}"
        options = f"format = 'newline_delimited', columns = {columns}, maximum_object_size = 1073741824"
        source = f"read_json('{self.jsonl}', {options})"
        with duckdb.connect() as own:  # what it leaves in memory would slow down the side after it
            return own.execute(PLAIN.format(source)).fetchall()

    # -- opening

    def opened(self) -> list[tuple[Any, ...]]:
        """Open the run and read its commits."""
        return [(len(open_run(self.root).commits()),)]

    def read(self) -> list[tuple[Any, ...]]:
        """List the commits, read them and parse their JSON: what opening cannot do without."""
        return [(len([json.loads(path.read_bytes()) for path in sorted(self.root.glob("commits/*/*.json"))]),)]

    def compare(self) -> None:
        """Speed says nothing about answers that differ."""
        self.run = open_run(self.root)
        expected = self.single()
        for side in (self.fresh, self.warm, self.plain):
            _same(side(), expected)
        _same(self.over_jsonl(), [row for row in expected if row[0] < self.jsonl_steps])


def _same(found: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]]) -> None:
    """Equal but for the order in which floats were added."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:3] == theirs[:3]
        assert abs((mine[3] or 0) - (theirs[3] or 0)) < 1e-9


def measure(sides: Mapping[str, Side], repeats: int) -> dict[str, float]:
    """Median seconds of each side, taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def report_of(bench: Bench, repeats: int) -> dict[str, Any]:
    """Everything that is measured."""
    bench.compare()
    gc.collect()
    gc.freeze()  # the rollouts that the run was made of are millions of objects, and no part of any side
    names = ("fresh", "warm", "plain", "single", "over_jsonl", "opened", "read")
    seconds = measure({name: getattr(bench, name) for name in names}, repeats)
    seconds["over_jsonl"] *= bench.made.steps / bench.jsonl_steps
    others = {name: lambda query=query: bench.run.sql(query).fetchall() for name, query in OTHERS.items()}
    for ask in others.values():
        ask()
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("duckdb", "pyarrow")},
        "repeats": repeats,
        "steps": bench.made.steps,
        "traces": bench.made.steps * bench.made.traces,
        "bytes": {**bench.bytes, "jsonl": bench.bytes["jsonl"] * bench.made.steps // bench.jsonl_steps},
        "ratios": {
            "jsonl_vs_fresh": seconds["over_jsonl"] / seconds["fresh"],
            "jsonl_vs_warm": seconds["over_jsonl"] / seconds["warm"],
            "warm_vs_single": seconds["warm"] / seconds["single"],
            "fresh_vs_single": seconds["fresh"] / seconds["single"],
            "plain_vs_single": seconds["plain"] / seconds["single"],
            "opened_vs_read": seconds["opened"] / seconds["read"],
        },
        "seconds": seconds,
        "others": measure(others, repeats),
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report as tables."""
    console.print(
        f"{report['steps']:,} steps, {report['traces']:,} traces; Parquet {report['bytes']['parquet'] / 1e9:.2f} GB, "
        f"traces.jsonl {report['bytes']['jsonl'] / 1e9:.2f} GB; medians of {report['repeats']}"
    )
    for part, digits in (("ratios", 2), ("seconds", 4), ("others", 4)):
        table = Table("", part, title_justify="left")
        table.columns[1].justify = "right"
        for name, value in report[part].items():
            table.add_row(name, f"{value:,.{digits}f}")
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--shape", choices=list(SHAPES), default="agentic")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--traces", type=int, default=128, help="rollouts of a step")
    parser.add_argument("--jsonl-steps", type=int, default=25, help="steps that are written as traces.jsonl")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the run (default: a temporary folder)")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rolltape-bench-", dir=chosen.folder) as folder:
        made = LongRun(SHAPES[chosen.shape], chosen.steps, chosen.traces)
        report = report_of(Bench(made, Path(folder), chosen.jsonl_steps), chosen.repeats)
    if chosen.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, Console())


if __name__ == "__main__":
    main()
