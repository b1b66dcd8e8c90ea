"""Samples of recorded steps as files: `rolltape convert`, and `rolltape export --format samples`.

`.pt` is what Miles reads with `--load-debug-rollout-data`; `.jsonl` and `.parquet` hold the same Samples for people
without torch. Only one step is in memory at a time.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.replay.batches import batches, evaluated, read_part
from rolltape.replay.options import BranchPolicy, ConvertOptions
from rolltape.replay.printing.words import counted
from rolltape.replay.run import Run
from rolltape.replay.sample import Sample
from rolltape.replay.whole import check_targets, whole_file
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, MissingExtra, install


@dataclass(frozen=True)
class Written:
    """One file of Samples."""

    path: Path
    name: str
    """The rollout id in its name."""
    samples: int
    warnings: tuple[str, ...] = ()
    """What is to be known of all of them."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Traces of the step that gave no Sample, by what became of them."""

    def line(self, run: str) -> str:
        """The file, its Samples, and how many traces gave none. `run`: what was converted."""
        lost = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in self.left_out.items())
        why = f"; {counted(sum(self.left_out.values()), 'trace')} gave none: {lost}" if lost else ""
        if not self.samples:
            why = f": no trace of this step gives one{f' ({lost})' if lost else ''}; `rolltape verify {run}` says more"
        return f"{self.path}: {counted(self.samples, 'sample')}{why}"


def write_samples(
    run: Run,
    pattern: str,
    *,
    steps: Sequence[int] | None = None,
    evaluations: bool = False,
    branch_policy: BranchPolicy | None = None,
    overwrite: bool = False,
    told: Callable[[Written], None] = lambda _: None,
) -> list[Written]:
    """Write the Samples of each recorded step to `pattern` with `{rollout_id}` filled in.

    The ending chooses the form: .pt, .jsonl or .parquet. `steps`: which; None takes all. `evaluations`: also those, as
    `eval_<rollout id>`. `branch_policy`: instead of the recorded one (see `batches`).

    Raises BadInput for a pattern that cannot take every step, RunConflict for a file that exists, MissingExtra where .pt is
    asked for and torch is missing, and what `batches` raises.
    """
    found = list(dict.fromkeys(s.step for s in run.steps("train"))) if steps is None else list(steps)
    recalled = _evaluation_steps(run, steps) if evaluations else {}
    names = [str(step) for step in found] + [f"eval_{step}" for step in recalled]
    write = _writer(pattern)
    if not names and steps is None and not evaluations and _evaluation_steps(run, None):
        raise BadInput(
            "the run holds evaluations only, and no step of training to convert; add --eval (write_samples: evaluations=True) "
            "to convert those."
        )
    paths = _paths(run, pattern, names, overwrite)
    result = []
    for step in found:
        warnings: list[str] = []
        left_out: Counter[str] = Counter()
        samples = _step_samples(run, step, branch_policy, warnings, left_out)
        written = _written(write, paths[str(step)], str(step), samples)
        result.append(replace(written, warnings=tuple(warnings), left_out=left_out))
        told(result[-1])
    for step, commits in recalled.items():
        left_out = Counter()
        samples = (s for commit in commits for s in _evaluation_samples(run, commit, branch_policy, left_out))
        written = _written(write, paths[f"eval_{step}"], f"eval_{step}", samples)
        result.append(replace(written, left_out=left_out))
        told(result[-1])
    return result


def _step_samples(
    run: Run, step: int, branch_policy: BranchPolicy | None, warnings: list[str], left_out: Counter[str]
) -> Iterator[Sample]:
    """The Samples of a step; what is to be known of all of them goes to `warnings`, and how many gave none to `left_out`."""
    for batch in batches(run, step, branch_policy):
        warnings += map(str, batch.warnings)
        trained = ConvertOptions.from_dict(batch.step.options).branch_policy
        if batch.step.digest_handed is not None and branch_policy not in (None, trained):
            warnings.append(
                f"converted with branch policy {branch_policy}, but recorded with {trained}: not the batches that trained, and "
                "without what hooks of the trainer changed"
            )
        left_out.update(batch.left_out)
        yield from batch.samples


def _evaluation_steps(run: Run, steps: Sequence[int] | None) -> dict[int, list[Commit]]:
    found: dict[int, list[Commit]] = {}
    for split in run.splits():
        if split.startswith("eval"):
            for commit in run.commits(split):
                if steps is None or commit.step.step in steps:
                    found.setdefault(commit.step.step, []).append(commit)
    return dict(sorted(found.items()))


def _evaluation_samples(
    run: Run, commit: Commit, branch_policy: BranchPolicy | None, left_out: Counter[str]
) -> Iterator[Sample]:
    """The Samples of an evaluation; how many traces gave none, and why, goes to `left_out`."""
    options = ConvertOptions.from_dict(commit.step.options).with_branches(branch_policy)
    table = read_part(run, commit)
    rollouts = evaluated(table, commit.groups, options, None)
    kept = {rollout.trace_id for rollout in rollouts if rollout.samples}
    rows = table.select(["trace_id", "disposition", "error_types", "num_sampled"]).to_pylist()
    left_out.update(_why_none(row) for row in rows if row["trace_id"] not in kept)
    for rollout in rollouts:
        yield from rollout.samples


def _why_none(row: Mapping[str, Any]) -> str:
    """What became of a trace of an evaluation that gave no Sample."""
    if row["disposition"] not in (None, "eval"):
        return str(row["disposition"])
    if row["error_types"]:
        return "error"
    return "failed_check" if row["num_sampled"] else "empty"


def _paths(run: Run, pattern: str, names: Sequence[str], overwrite: bool) -> dict[str, Path]:
    """The file of each name. Raises BadInput, or RunConflict where one exists."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None}
    except ValueError as error:
        raise BadInput(f"{pattern!r} is no pattern ({error}); write braces only around rollout_id.") from error
    if any(spec or how for _, field, spec, how in string.Formatter().parse(pattern) if field is not None):
        raise BadInput(f"{pattern!r} formats a field; write {{rollout_id}} as it is.")
    if fields - {"rollout_id"}:
        raise BadInput(f"{pattern!r} holds {sorted(fields - {'rollout_id'})}; the only field is {{rollout_id}}.")
    if not names:
        raise BadInput("the run holds no step to convert; record one first.")
    if "rollout_id" not in fields and len(names) > 1:
        raise BadInput(
            f"{pattern!r} has no {{rollout_id}}, and there are {len(names)} steps: each would replace the one before; "
            "write {rollout_id} into the name, or choose one step."
        )
    paths = {name: Path(pattern.format(rollout_id=name)) for name in names}
    check_targets(run, paths.values(), overwrite)
    return paths


Write = Callable[[Path, str, Iterator[Sample]], int]


def _writer(pattern: str) -> Write:
    endings: dict[str, Write] = {".pt": _write_pt, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
    ending = Path(pattern).suffix
    if ending not in endings:
        raise BadInput(f"{pattern!r} ends in {ending or 'nothing'}; expected {', '.join(endings)}.")
    if ending == ".pt":
        _torch()
    return endings[ending]


def _written(write: Write, path: Path, name: str, samples: Iterator[Sample]) -> Written:
    """Write one file beside its place and put it there whole."""
    with whole_file(path) as part:
        count = write(part, name, samples)
    return Written(path, name, count)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            f"a .pt file needs torch, which is not installed: {install('torch')}; or write .jsonl or .parquet."
        ) from error
    return torch


def _write_pt(path: Path, name: str, samples: Iterator[Sample]) -> int:
    dumped = [sample.to_dict() for sample in samples]
    number = int(name.removeprefix("eval_"))
    _torch().save({"rollout_id": number, "metadata": {}, "samples": dumped}, path)
    return len(dumped)


def _write_jsonl(path: Path, name: str, samples: Iterator[Sample]) -> int:  # noqa: ARG001
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample.to_dict(), separators=(",", ":"), ensure_ascii=True) + "\n")
            count += 1
    return count


_JSON = ("prompt", "label", "reward", "metadata", "train_metadata", "spec_info", "prefix_cache_info")
_PARQUET = pa.schema(
    [
        ("group_index", pa.int64()),
        ("index", pa.int64()),
        ("rollout_id", pa.int64()),
        ("prompt", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("response", pa.string()),
        ("response_length", pa.int32()),
        ("label", pa.string()),
        ("reward", pa.string()),
        ("loss_mask", pa.list_(pa.int8())),
        ("rollout_log_probs", pa.list_(pa.float32())),
        ("weight_versions", pa.list_(pa.string())),
        ("remove_sample", pa.bool_()),
        ("status", pa.string()),
        ("metadata", pa.string()),
        ("routing_key", pa.string()),
        ("non_generation_time", pa.float64()),
        ("spec_info", pa.string()),
        ("prefix_cache_info", pa.string()),
    ]
)
"""Columns of an exported Parquet file: the Sample's fields; those of `_JSON` as JSON text."""


def _write_parquet(path: Path, name: str, samples: Iterator[Sample]) -> int:  # noqa: ARG001
    count = 0
    with pq.ParquetWriter(path, _PARQUET, compression="zstd") as file:
        for rows in _chunks(samples):
            columns = [pa.array([_cell(row, field.name) for row in rows], field.type) for field in _PARQUET]
            file.write_table(pa.Table.from_arrays(columns, schema=_PARQUET))
            count += len(rows)
    return count


def _chunks(samples: Iterator[Sample], tokens: int = 4_000_000) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for sample in samples:
        rows.append(sample.to_dict())
        size += len(sample.tokens)
        if size >= tokens:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _cell(row: Mapping[str, Any], name: str) -> Any:
    return json.dumps(row[name], ensure_ascii=True) if name in _JSON else row[name]
