"""Recorded steps as the batches they were, one at a time, and as files: `rolltape convert`.

`.pt` is what Miles reads with `--load-debug-rollout-data`; `.jsonl` and `.parquet` hold the same Samples for people
without torch. Only one step is in memory at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.replay.convert import SampleGroup, convert, convert_alone, flatten
from rolltape.replay.digest import digest
from rolltape.replay.options import ConvertOptions
from rolltape.replay.outcomes import finish, read_outcomes
from rolltape.replay.run import Run
from rolltape.replay.sample import Sample
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, CheckFailed, MissingExtra, RunConflict
from rolltape.schema.records import Group, Step


@dataclass(frozen=True)
class Batch:
    """A recorded training step, converted again."""

    step: Step
    groups: list[SampleGroup]
    """As handed to the trainer."""
    table: pa.Table
    """The rows it was made of."""

    @property
    def samples(self) -> list[Sample]:
        """All Samples, in order."""
        return [sample for group in self.groups for sample in flatten(group)]


def batches(run: Run, step: int) -> list[Batch]:
    """The batches of a training step, one for each writer that recorded it.

    Raises BadInput where the step was not recorded, Damaged where its file is not what was committed, and CheckFailed where
    its rows no longer convert to the Samples that trained.
    """
    return [_batch(run, commit) for commit in run.commits("train", step)]


def _batch(run: Run, commit: Commit) -> Batch:
    table, step = read_part(run, commit), commit.step
    conversion = convert(table, commit.groups, ConvertOptions.from_dict(step.options))
    outcomes = read_outcomes(table)
    groups = finish(conversion.groups, outcomes, step) if outcomes else conversion.groups  # an import has none
    for what, then, now in (
        ("converted", step.digest_converted, conversion.groups),
        ("handed over", step.digest_handed, groups),
    ):
        if then is not None and then != digest(now):
            raise CheckFailed(
                f"step {step.step}: its rows give other Samples than were {what} then; `rolltape verify {run.paths.root}` "
                "names what differs."
            )
    return Batch(step, groups, table)


def read_part(run: Run, commit: Commit) -> pa.Table:
    """All rows of a committed part."""
    tables = list(run.part_batches(commit))
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})


# -- evaluations


@dataclass(frozen=True)
class Evaluated:
    """One rollout of an evaluation."""

    trace_id: str
    reward: float | None
    """None where it failed, or nothing was scored."""
    failed: bool
    truncated: bool
    samples: list[Sample]
    """Empty where nothing was sampled, or a check failed."""


def evaluated(
    table: pa.Table, groups: Iterable[Group], options: ConvertOptions, reward_key: str | None
) -> list[Evaluated]:
    """The rollouts of an evaluation: groups in order, rollouts in order; their Samples numbered from 0.

    `reward_key` names one of the rewards, or `reward` for the total; None takes the total. Raises BadInput where a
    rollout that did not fail has no such reward.
    """
    names = ("trace_id", "reward", "rewards", "error_types", "is_truncated")
    rows = {r["trace_id"]: r for r in table.select(list(names)).to_pylist(maps_as_pydicts="strict")}
    made, _ = convert_alone(table, options)
    result, index = [], 0
    for group in groups:
        for trace in group.trace_ids:
            row, samples = rows.get(trace, _LOST), made.get(trace, [])
            first = index
            for sample in samples:
                sample.group_index, sample.index = group.group_index, index
                sample.rollout_id = first if options.branch_policy == "siblings" else None
                index += 1
            failed = bool(row["error_types"])
            reward = None if failed else _named_reward(row, reward_key)
            result.append(Evaluated(trace, reward, failed, bool(row["is_truncated"]), samples))
    return result


_LOST: Mapping[str, Any] = {"error_types": ["lost"], "is_truncated": False}
"""What is known of a rollout whose row is not there."""


def _named_reward(row: Mapping[str, Any], key: str | None) -> float | None:
    total: float | None = row["reward"]
    named: dict[str, float | None] = {**(row["rewards"] or {}), "reward": total}
    if key is None or key == "reward":
        return total
    if key not in named:
        raise BadInput(f"trace {row['trace_id']}: no reward is named {key!r}; there are {sorted(named)}.")
    return named[key]


# -- files


@dataclass(frozen=True)
class Written:
    """One file of an export."""

    path: Path
    name: str
    """The rollout id in its name."""
    samples: int


def export(
    run: Run,
    pattern: str,
    *,
    steps: Sequence[int] | None = None,
    evaluations: bool = False,
    overwrite: bool = False,
    told: Callable[[Written], None] = lambda _: None,
) -> list[Written]:
    """Write the Samples of each recorded step to `pattern` with `{rollout_id}` filled in.

    The ending chooses the form: .pt, .jsonl or .parquet. `steps`: which; None takes all. `evaluations`: also those, as
    `eval_<rollout id>`. Raises BadInput for a pattern that cannot take every step, RunConflict for a file that exists,
    MissingExtra where .pt is asked for and torch is missing, and what `batches` raises.
    """
    found = list(dict.fromkeys(s.step for s in run.steps("train"))) if steps is None else list(steps)
    recalled = _evaluation_steps(run, steps) if evaluations else {}
    names = [str(step) for step in found] + [f"eval_{step}" for step in recalled]
    write = _writer(pattern)
    paths = _paths(run, pattern, names, overwrite)
    result = []
    for step in found:
        samples = (s for batch in batches(run, step) for s in batch.samples)
        result.append(_written(write, paths[str(step)], str(step), samples))
        told(result[-1])
    for step, commits in recalled.items():
        samples = (s for commit in commits for s in _evaluation_samples(run, commit))
        result.append(_written(write, paths[f"eval_{step}"], f"eval_{step}", samples))
        told(result[-1])
    return result


def _evaluation_steps(run: Run, steps: Sequence[int] | None) -> dict[int, list[Commit]]:
    found: dict[int, list[Commit]] = {}
    for split in run.splits():
        if split.startswith("eval"):
            for commit in run.commits(split):
                if steps is None or commit.step.step in steps:
                    found.setdefault(commit.step.step, []).append(commit)
    return dict(sorted(found.items()))


def _evaluation_samples(run: Run, commit: Commit) -> list[Sample]:
    options = ConvertOptions.from_dict(commit.step.options)
    rollouts = evaluated(read_part(run, commit), commit.groups, options, None)
    return [sample for rollout in rollouts for sample in rollout.samples]


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
    inside = [p for p in paths.values() if p.resolve().is_relative_to(run.paths.root.resolve())]
    if inside:
        raise BadInput(f"{inside[0]} lies inside the run; nothing but recordings belongs there. Choose another folder.")
    there = [path for path in paths.values() if path.exists()]
    if there and not overwrite:
        raise RunConflict(f"{there[0]} exists; choose another name, or set --overwrite.")
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
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        count = write(part, name, samples)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return Written(path, name, count)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            "a .pt file needs torch, which is not installed: pip install 'rolltape[torch]', or write .jsonl or .parquet."
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
