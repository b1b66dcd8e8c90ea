"""A made-up training run with what real ones go through, in whatever size: the same for the same seed.

Over its course the policy learns (easy tasks first), writes longer answers, and is ever surer of its tokens. A reward is added
half-way, when the run is resumed two steps before where it stopped; a sandbox is down for a while; later on the trainer runs
ahead of the engines, so that turns come from older weights; some answers are cut off, some values are NaN or were not scored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from replay_build import Record, group, put_attempt, put_run, reply, said, trace

from rolltape.replay import ConvertOptions, Sample, convert, finish, flatten, outcomes_of
from rolltape.schema import ROW, Context, Group, Outcome, Step, encode, with_outcomes, write_parquet
from rolltape.schema.commits import Commit
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.records import Turn

FAMILIES = ("add", "boxes", "change", "clock", "digits", "walk")
LIMIT = 640
"""Most sampled tokens of a rollout; what is longer is cut off."""


@dataclass(frozen=True)
class Life:
    """Sizes of a run and what it goes through."""

    steps: int = 200
    groups: int = 8
    """A step."""
    rollouts: int = 8
    """A group."""
    tasks: int = 48
    tokens: int = 110
    """Sampled tokens of a rollout at the start, about."""
    learning: float = 3.4
    """How much better the policy gets; 0: not at all."""
    growth: float = 1.2
    """How much longer its answers get, relative to those of the start."""
    odd: float = 0.004
    """Share of rollouts with a NaN, or without a score."""
    recomputed: bool = True
    """Whether the trainer recomputed log-probs."""
    seed: int = 0


@dataclass(frozen=True)
class _Moment:
    """A step, and where in its course it is."""

    step: int
    at: float
    """From 0 to 1."""
    life: Life

    @property
    def skill(self) -> float:
        """Grows, with a setback after two thirds."""
        dip = 0.9 * math.exp(-(((self.at - 0.68) / 0.03) ** 2))
        return -1.2 + self.life.learning * self.at**0.8 - (dip if self.life.learning else 0.0)

    @property
    def down(self) -> bool:
        """Whether the sandbox fails most rollouts."""
        return 0.34 < self.at < 0.37

    @property
    def cites(self) -> bool:
        """Whether the reward that came later is scored."""
        return self.at >= 0.5

    @property
    def lag(self) -> float:
        """Mean number of weight versions that a turn is behind."""
        return 0.25 + 1.6 * max(0.0, self.at - 0.6) / 0.4


def record_run(root: Path, life: Life | None = None) -> Path:
    """Record the run into `root`: the first half as attempt 0, the rest as attempt 1."""
    life = life or Life()
    put_run(root, model="small-model", tokenizer="small-model", taskset="receipts")
    half = life.steps // 2
    rng = np.random.default_rng(life.seed)
    for step in range(min(half + 2, life.steps)):
        _record_step(root, _Moment(step, min(step, half - 1) / max(1, life.steps - 1), life), 0, rng)
    put_attempt(root, 1, half)
    for step in range(half, life.steps):
        _record_step(root, _Moment(step, step / max(1, life.steps - 1), life), 1, rng)
    return root


def _record_step(root: Path, now: _Moment, attempt: int, rng: np.random.Generator) -> None:
    """Record a step as a live run does: encode, convert, hand over, commit."""
    life = now.life
    records: list[Record] = []
    contexts: list[Context] = []
    groups: list[Group] = []
    retried: list[Outcome] = []
    for place in range(life.groups):
        number = now.step * life.groups + place
        last: list[Record] = []
        for made, turns, again in _group(now, number % life.tasks, f"{attempt}-{number}", rng):
            records.append(made)
            contexts.append(
                Context(run="r1", step=now.step, attempt=attempt, group_index=number, model="small-model", turns=turns)
            )
            if again:
                error = made["errors"][0]
                reason = f"{error['type']}: {error['message']}"
                retried.append(Outcome(trace_id=made["id"], disposition="retried", reason=reason))
            else:
                last.append(made)
        groups.append(group(last, number, life.rollouts, step=now.step))
    table = encode(records, contexts)
    conversion = convert(table, groups, ConvertOptions())
    outcomes = [*outcomes_of(conversion), *retried]
    handed = finish(conversion.groups, outcomes)
    if life.recomputed:
        samples = {s.routing_key: s for g in handed for s in flatten(g)}
        oldest = {
            r["id"]: min(int(t.weight_version or 0) for t in c.turns) for r, c in zip(records, contexts, strict=True)
        }
        outcomes = [
            _recomputed(o, samples[o.trace_id], now.step - oldest[o.trace_id], rng) if o.trace_id in samples else o
            for o in outcomes
        ]
    counts = Counter(o.disposition for o in outcomes)
    began = 1.7e9 + 100 * now.step + 5000 * attempt
    sampled = sum(len(n["logprobs"]) for r in records for n in r["nodes"])
    record = Step(
        step=now.step,
        attempt=attempt,
        options=ConvertOptions().to_dict(),
        batch=tuple(s.index or 0 for g in handed for s in flatten(g)),
        counts={"started": counts.total(), **counts, "lost": 0},
        started_at=began,
        ended_at=began + 20 + sampled / 450 + float(rng.gamma(2, 3)),
    )
    part, paths = Part("train", now.step, attempt, "main"), RunPaths(root)
    file = write_parquet(paths.parquet(part), [with_outcomes(table, outcomes)])
    commit = Commit(
        part=part,
        file=file,
        groups=conversion.records,
        step=record,
        fingerprint=ROW.fingerprint,
        written_at=began + 100,
        sums={"sampled_tokens": sampled, "tokens": sum(table.column("num_tokens").to_pylist())},
    )
    put_once(paths.commit(part), commit.to_bytes())


def _group(
    now: _Moment, task: int, number: str, rng: np.random.Generator
) -> Iterator[tuple[Record, tuple[Turn, ...], bool]]:
    """(trace, its turns, whether it was run again) of each try; the shortest correct answers share the race."""
    hardness = np.random.default_rng(task).normal(0.0, 2.6)
    made = []
    for rollout in range(now.life.rollouts):
        if rng.random() < (0.6 if now.down else 0.015):
            again = rng.random() < 0.5
            made.append((_failed(now, task, f"{number}-{rollout}-0", rng), again))
            if not again:
                continue
        made.append((_rollout(now, task, hardness, f"{number}-{rollout}-1", rng), False))
    sound = [r for r, again in made if not again]
    scored = [r for r in sound if r["rewards"].get("correct") == 1.0]
    shortest = min((_length(r) for r in scored), default=0)
    winners = [r for r in scored if _length(r) == shortest]
    for record in (r for r in sound if not r["errors"]):
        record["rewards"]["fastest"] = 0.5 / len(winners) if any(record is w for w in winners) else 0.0
    for record, again in made:
        yield record, _turns(record, now, rng), again


def _rollout(now: _Moment, task: int, hardness: float, id: str, rng: np.random.Generator) -> Record:
    correct = rng.random() < 1 / (1 + math.exp(hardness - now.skill))
    wordy = now.life.tokens * (1 + now.life.growth * now.at**1.5) * (1.0 if correct else 1.25)
    length = max(4, int(wordy * rng.lognormal(0.1 * hardness, 0.45)))
    cut = length >= LIMIT * now.life.tokens / 110
    length = min(length, int(LIMIT * now.life.tokens / 110))
    correct = correct and not cut
    tidy = not cut and rng.random() < 0.6 + 0.39 * min(1.0, 4 * now.at)
    rewards: dict[str, float | None] = {"correct": float(correct), "format": 0.1 if tidy else 0.0}
    if now.cites:
        rewards["cites"] = 0.2 * float(rng.random() < 0.25 + 0.7 * (now.at - 0.5))
    if rng.random() < now.life.odd:
        rewards["format"] = rng.choice([math.nan, None])  # type: ignore[arg-type]
    first = int(length * rng.uniform(0.3, 0.6))
    tool = [40, 41, *rng.integers(300, 320, 6).tolist(), 42]
    ids = rng.integers(100, 4000, length).tolist()
    values = _logprobs(now, length, rng)
    nodes = (
        said(
            None, [1, *rng.integers(100, 300, 24).tolist(), 2], f"A receipt of kind {FAMILIES[task % 6]}: what is due?"
        ),
        reply(0, [3], ids[:first], values[:first], "I add the lines up with the tool.", finish="tool_calls"),
        said(1, tool, str(int(rng.integers(3, 300))), "tool"),
        reply(
            2,
            [3],
            ids[first:],
            values[first:],
            f"The total is {int(rng.integers(3, 300))}.",
            "length" if cut else "stop",
        ),
    )
    data = {"name": f"{FAMILIES[task % 6]}-{task}"}
    stop = "max_tokens" if cut else "agent_completed"
    return trace(*nodes, id=id, idx=task, rewards=rewards, metrics={"tool_calls": 1.0}, stop=stop, data=data)


def _failed(now: _Moment, task: int, id: str, rng: np.random.Generator) -> Record:
    error = (
        "SandboxError: no sandbox answered" if now.down or rng.random() < 0.4 else "ProviderError: 503 from the engine"
    )
    length = int(rng.integers(4, 30))
    nodes = (
        said(
            None, [1, *rng.integers(100, 300, 24).tolist(), 2], f"A receipt of kind {FAMILIES[task % 6]}: what is due?"
        ),
        reply(
            0, [3], rng.integers(100, 4000, length).tolist(), _logprobs(now, length, rng), "I add", finish="tool_calls"
        ),
    )
    data = {"name": f"{FAMILIES[task % 6]}-{task}"}
    return trace(*nodes, id=id, idx=task, rewards={}, errors=[error], stop="error", data=data)


def _logprobs(now: _Moment, n: int, rng: np.random.Generator) -> list[float]:
    """Surer and surer tokens; the setback makes the policy unsure for a while."""
    unsure = 1.0 - 0.55 * now.at + 0.5 * math.exp(-(((now.at - 0.68) / 0.03) ** 2))
    values = -rng.gamma(0.25, 1.6 * unsure, n)
    certain = rng.random(n) < 0.3 + 0.25 * now.at
    chosen: list[float] = np.where(certain, values * 1e-4, values).astype(np.float32).tolist()
    return chosen


def _turns(record: Record, now: _Moment, rng: np.random.Generator) -> tuple[Turn, ...]:
    """What the engine said of each reply: later turns never come from older weights than earlier ones."""
    replies = [n for n in record["nodes"] if n["sampled"]]
    lags = sorted(rng.poisson(now.lag, len(replies)).tolist(), reverse=True)
    return tuple(
        Turn(
            weight_version=str(max(0, now.step - lag)),
            latency=0.2 + len(node["logprobs"]) / 60,
            completion_tokens=len(node["logprobs"]),
            finish_reason=node["finish_reason"],
        )
        for node, lag in zip(replies, lags, strict=True)
    )


def _recomputed(outcome: Outcome, sample: Sample, behind: int, rng: np.random.Generator) -> Outcome:
    """Log-probs as a trainer computes them: other rounding, newer weights, and now and then something else altogether."""
    recorded, trained = np.array(sample.rollout_log_probs), np.array(sample.loss_mask, bool)
    noise = rng.normal(0.0, 1.0, len(recorded)) * (0.003 + 0.012 * behind) * np.sqrt(-recorded)
    odd = (rng.random(len(recorded)) < 0.001) * rng.normal(0.0, 0.5, len(recorded))
    values = np.where(trained, np.minimum(recorded + noise + odd, 0.0), 0.0)
    return replace(outcome, logprobs=values.astype(np.float32))


def _length(record: Mapping[str, Record]) -> int:
    return sum(len(n["logprobs"]) for n in record["nodes"])
