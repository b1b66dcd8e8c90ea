"""Every example query of every view gives what a plain count in Python gives, on the demo run and on one of everything."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_build import Record, group, put_run, put_step, reply, said, trace, turn

from rolltape.replay import ConvertOptions, open_run
from rolltape.replay.exports.samples import batches
from rolltape.replay.run import Run
from rolltape.replay.sql import VIEWS
from rolltape.replay.stats import stats

Row = dict[str, Any]
EXAMPLES = [(view.name, example.question) for view in VIEWS.values() for example in view.examples]


class Counted:
    """The rows and records of a run, as Python reads them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: list[Row] = run.table().to_pylist(maps_as_pydicts="strict")
        self.steps = sorted({row["step"] for row in self.rows})

    def by(self, *keys: str, rows: Iterable[Row] | None = None) -> list[tuple[tuple[Any, ...], list[Row]]]:
        """Rows by the values of `keys`, in order; null last."""
        found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in self.rows if rows is None else rows:
            found[tuple(row[k] for k in keys)].append(row)
        return sorted(found.items(), key=lambda item: ordered(item[0]))

    def named(self, column: str) -> list[Row]:
        """Each named value of a MAP column."""
        return [
            {**row, "name": name, "value": value} for row in self.rows for name, value in (row[column] or {}).items()
        ]

    def nodes(self) -> list[Row]:
        """Each node with its trace's id."""
        fields = ("role", "content", "tokens", "sampled", "finish_reason")
        return [
            {"step": row["step"], "trace_id": row["trace_id"], "node": i}
            | {name: row[f"node_{name}"][i] for name in fields}
            for row in self.rows
            for i in range(row["num_nodes"])
        ]

    def tokens(self) -> list[Row]:
        """Each stored token."""
        names = {"token_id": "token_ids", "sampled": "sampled", "is_content": "is_content", "logprob": "logprobs"}
        return [
            {"trace_id": row["trace_id"], "position": i} | {name: row[column][i] for name, column in names.items()}
            for row in self.rows
            for i in range(row["num_tokens"])
        ]

    def turns(self) -> list[Row]:
        """Each sampled node with what the engine said."""
        result = []
        for row in self.rows:
            nodes = [i for i in range(row["num_nodes"]) if row["node_sampled"][i]]
            for i, node in enumerate(nodes):
                said = {name: (row[f"turn_{name}"] or {}) for name in ("weight_version", "finish_reason")}
                engine = {name: values[i] if values else None for name, values in said.items()}
                finish = engine["finish_reason"] or row["node_finish_reason"][node]
                result.append({"step": row["step"], "weight_version": engine["weight_version"], "finish": finish})
        return result


def ordered(values: Sequence[Any]) -> tuple[Any, ...]:
    """A key that sorts as DuckDB does: null last."""
    return tuple((value is None, 0 if value is None else value) for value in values)


def mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def ended(row: Row) -> bool:
    """Whether a rollout came to its end."""
    return not row["error_types"] and row["disposition"] not in ("retried", "cancelled")


def finite(value: float | None) -> bool:
    """Whether a number was scored."""
    return value is not None and math.isfinite(value)


def there(values: Iterable[Any]) -> int:
    return sum(v is not None for v in values)


# -- what each example must say


def reward_and_its_price(c: Counted) -> list[tuple[Any, ...]]:
    return [
        (
            step,
            len(rows),
            sum(map(ended, rows)),
            mean(r["reward"] for r in rows if ended(r) and finite(r["reward"])),
            mean(r["num_sampled"] for r in rows if ended(r) and r["num_sampled"]),
            mean(float(r["is_truncated"]) for r in rows if ended(r)),
        )
        for (step,), rows in c.by("step")
    ]


def failing_tasks(c: Counted) -> list[tuple[Any, ...]]:
    found = []
    for key, rows in c.by("task_idx", "task_name"):
        rewards = [r["reward"] for r in rows if ended(r) and finite(r["reward"])]
        found.append((*key, len(rows), sum(map(ended, rows)), mean(rewards), max(rewards, default=None)))
    return sorted(found, key=lambda r: (r[4] is not None, r[4] or 0, r[0]))[:20]


def passed_or_not(c: Counted) -> list[tuple[Any, ...]]:
    def passed(row: Row) -> bool | None:
        if not ended(row):
            return False
        return None if row["reward"] is None else finite(row["reward"]) and row["reward"] >= 1

    rows = [r | {"passed": passed(r)} for r in c.rows]
    return [
        (
            *key,
            len(found),
            mean(r["num_turns"] for r in found),
            mean(r["num_sampled"] for r in found),
            mean(float(r["is_truncated"]) for r in found),
            mean(len(r["error_types"]) for r in found),
        )
        for key, found in c.by("passed", rows=rows)
    ]


def stops(c: Counted) -> list[tuple[Any, ...]]:
    found = [(k[0], len(rows), mean(r["num_turns"] for r in rows)) for k, rows in c.by("stop_condition")]
    return sorted(found, key=lambda r: (-r[1], *ordered(r[:1])))


def sureness(c: Counted) -> list[tuple[Any, ...]]:
    result = []
    for (step,), rows in c.by("step"):
        values = [x for r in rows for x in r["logprobs"] if x is not None]
        result.append((step, mean(values), len(values)))
    return result


def roles(c: Counted) -> list[tuple[Any, ...]]:
    return [(role, len(n), sum(x["tokens"] for x in n)) for (role,), n in c.by("role", rows=c.nodes())]


def conversation(c: Counted) -> list[tuple[Any, ...]]:
    first = min(r["trace_id"] for r in c.rows)
    return [(n["node"], n["role"], n["content"]) for n in c.nodes() if n["trace_id"] == first]


def weight_versions(c: Counted) -> list[tuple[Any, ...]]:
    return [(*key, len(turns)) for key, turns in c.by("step", "weight_version", rows=c.turns())]


def cut_turns(c: Counted) -> list[tuple[Any, ...]]:
    return [(*k, len(t), sum(x["finish"] == "length" for x in t)) for k, t in c.by("step", rows=c.turns())]


def unlikely(c: Counted) -> list[tuple[Any, ...]]:
    known = [t for t in c.tokens() if t["logprob"] is not None]
    known.sort(key=lambda t: (t["logprob"], t["trace_id"], t["position"]))
    return [(t["trace_id"], t["position"], t["token_id"], t["logprob"]) for t in known[:10]]


def kinds_of_tokens(c: Counted) -> list[tuple[Any, ...]]:
    found = c.by("sampled", "is_content", rows=c.tokens())
    return [(*key, len(tokens), there(t["logprob"] for t in tokens)) for key, tokens in found]


def rewards_by_step(c: Counted) -> list[tuple[Any, ...]]:
    found = c.by("step", "name", rows=filter(ended, c.named("rewards")))
    scored = [(k, [r["value"] for r in rows if finite(r["value"])]) for k, rows in found]
    return [(*k, len(values), mean(values)) for k, values in scored]


def largest_changes(c: Counted) -> list[tuple[Any, ...]]:
    scored = [r for r in c.named("rewards") if ended(r) and r["value"] is not None]
    finite = [r for r in scored if math.isfinite(r["value"])]
    before: dict[str, float] = {}
    found = []
    for (step, name), rows in c.by("step", "name", rows=finite):
        now = sum(r["value"] for r in rows) / len(rows)
        found.append((step, name, now, now - before[name] if name in before else None))
        before[name] = now
    return sorted(found, key=lambda r: (r[3] is None, -abs(r[3] or 0), r[1], r[0]))[:20]


def unscored(c: Counted) -> list[tuple[Any, ...]]:
    found = c.by("name", rows=c.named("rewards"))
    return [
        (
            *key,
            len(rows),
            sum(r["value"] is None for r in rows),
            sum(r["value"] is not None and not math.isfinite(r["value"]) for r in rows),
        )
        for key, rows in found
    ]


def side_by_side(c: Counted) -> list[tuple[Any, ...]]:
    rewards = [r for r in c.named("rewards") if ended(r) and finite(r["value"])]
    names = sorted({r["name"] for r in rewards})
    return [
        (step, *(mean(r["value"] for r in of if r["name"] == name) for name in names))
        for (step,), of in c.by("step", rows=rewards)
    ]


def measured(c: Counted) -> list[tuple[Any, ...]]:
    result = []
    for (name,), rows in c.by("name", rows=filter(ended, c.named("metrics"))):
        values = [r["value"] for r in rows if finite(r["value"])]
        result.append((name, len(values), mean(values), min(values, default=None), max(values, default=None)))
    return result


def without_signal(c: Counted) -> list[tuple[Any, ...]]:
    mine = [r for r in c.rows if ended(r) and finite(r["reward"])]
    result = []
    for key, rows in c.by("step", "group_index", "task_idx", rows=mine):
        rewards = [r["reward"] for r in rows]
        if len(rewards) > 1 and len({np.float32(x) for x in rewards}) == 1:
            result.append((*key, len(rows), min(rewards)))
    return result


def short_groups(c: Counted) -> list[tuple[Any, ...]]:
    found = [(g.step, g.group_index, g.task_index, g.expected_size, len(g.trace_ids)) for g in c.run.groups()]
    return sorted(g for g in found if g[4] < g[3])


def group_sums(c: Counted) -> list[tuple[Any, ...]]:
    found = [(g.step, g.group_index, name, s.sum) for g in c.run.groups() for name, s in g.rewards.items()]
    return sorted(found, key=ordered)


def fates(c: Counted) -> list[tuple[Any, ...]]:
    steps = c.run.steps()
    return [(s.step, s.writer, s.counts["started"], s.counts.get("emitted", 0), s.counts.get("lost", 0)) for s in steps]


def speed(c: Counted) -> list[tuple[Any, ...]]:
    result = []
    for step in c.steps:
        commits = [k for k in c.run.commits() if k.part.step == step]
        counts = [k.sums["sampled_tokens"] for k in commits if "sampled_tokens" in k.sums]
        times = [(k.step.started_at, k.step.ended_at) for k in commits if k.step.started_at and k.step.ended_at]
        seconds = max(t[1] for t in times) - min(t[0] for t in times) if times else None
        sampled = sum(counts) if counts else None
        result.append((step, sampled, sampled / seconds if sampled is not None and seconds else None))
    return result


def not_trained(c: Counted) -> list[tuple[Any, ...]]:
    lost = Counter((r["disposition"], r["reason"]) for r in c.rows if r["disposition"] not in (None, "emitted"))
    return [(*key, n) for key, n in sorted(lost.items(), key=lambda i: (-i[1], ordered(i[0])))]


def batch_sizes(c: Counted) -> list[tuple[Any, ...]]:
    result = []
    for step in c.steps:
        samples = [s for batch in batches(c.run, step) for s in batch.samples]
        if samples:
            trained = sum(sum(s.loss_mask or ()) for s in samples)
            result.append((step, len(samples), trained, mean(s.response_length for s in samples)))
    return result


def first_samples(c: Counted) -> list[tuple[Any, ...]]:
    found = [
        (step, place, s.index, s.routing_key, s.reward)
        for step in c.steps
        for batch in batches(c.run, step)
        for place, s in enumerate(batch.samples)
    ]
    return found[:10]


def error_kinds(c: Counted) -> list[tuple[Any, ...]]:
    kinds = Counter(t for r in c.rows for t in r["error_types"])
    traces = Counter(t for r in c.rows for t in set(r["error_types"]))
    return [(kind, n, traces[kind]) for kind, n in sorted(kinds.items(), key=lambda i: (-i[1], i[0]))]


def error_messages(c: Counted) -> list[tuple[Any, ...]]:
    found = [
        (r["step"], r["trace_id"], i, *said)
        for r in c.rows
        for i, said in enumerate(zip(r["error_types"], r["error_messages"], strict=True))
    ]
    return [(*row[:2], *row[3:]) for row in sorted(found)[:20]]


ANSWERS: dict[str, Callable[[Counted], list[tuple[Any, ...]]]] = {
    "How does the reward move, and what is it bought with?": reward_and_its_price,
    "Which tasks still fail?": failing_tasks,
    "What do rollouts that fail have in common?": passed_or_not,
    "Where do rollouts stop?": stops,
    "How sure was the model of what it sampled, step by step?": sureness,
    "How many messages and tokens does each role have?": roles,
    "What did trace … say? (here: the first of the run)": conversation,
    "Which weight versions produced a step's replies?": weight_versions,
    "Which turns were cut by length?": cut_turns,
    "Which sampled tokens were the least likely?": unlikely,
    "How many tokens of each kind are stored?": kinds_of_tokens,
    "How does each reward move?": rewards_by_step,
    "At which step did which reward change most?": largest_changes,
    "Which rewards were not scored, and where is NaN or infinity?": unscored,
    "One column a reward, side by side": side_by_side,
    "How many traces measured each metric, and what came out?": measured,
    "Which groups carry no signal: all their rewards are equal?": without_signal,
    "Which groups are short?": short_groups,
    "What does a race among rollouts pay out in a group?": group_sums,
    "What became of the tries of each step?": fates,
    "How many tokens were sampled, and how fast?": speed,
    "Why were traces not trained?": not_trained,
    "How large is each batch?": batch_sizes,
    "In what order were the first samples handed over?": first_samples,
    "Which errors come up, and in how many traces?": error_kinds,
    "What did they say?": error_messages,
}


# -- a run of everything


def some_trace(rng: random.Random, id: str, idx: int) -> Record:
    rewards: dict[str, float | None] = {
        "Correct": rng.choice([0.0, 1.0]),
        "judge.score x": rng.choice([0.0, 0.25, None]),
    }
    if rng.random() < 0.05:
        rewards["Correct"] = rng.choice([math.nan, math.inf, -math.inf])
    if rng.random() < 0.1:
        rewards = {}
    metrics: dict[str, Any] = {"turns to fix": float(rng.randrange(9))} if rng.random() < 0.4 else {}
    errors = (
        rng.choice([["ProviderError: 503"], ["ToolError: gone", "ProviderError: 503"]]) if rng.random() < 0.1 else []
    )
    nodes = [said(None, [1, 2])]
    for number in range(rng.randrange(1, 4)):
        if number:
            nodes.append(said(len(nodes) - 1, [8] * rng.randrange(3), "17", role="tool"))
        logprobs = [-rng.random() * 9 for _ in range(rng.randrange(1, 12))]
        sampled = [rng.randrange(50) for _ in logprobs]
        nodes.append(reply(len(nodes) - 1, [3], sampled, logprobs, finish=rng.choice(["stop", "length"])))
    stop = rng.choice(["agent_completed", "max_turns", None])
    return trace(*nodes, id=id, idx=idx, rewards=rewards, metrics=metrics, errors=errors, stop=stop)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0, 2 and 10, two writers, short groups, names of all kinds, null, NaN and infinity, errors, filtered traces."""
    root = put_run(tmp_path_factory.mktemp("everything"))
    rng = random.Random(5)
    number = 0
    for step in (10, 2, 0):
        for writer in ("a", "b"):
            groups, records = [], []
            for index in range(4):
                members = [some_trace(rng, f"{step}{writer}{index}{i}", idx=index) for i in range(3)]
                if index == 2:  # all alike
                    members = [r | {"rewards": {"Correct": 1.0}} for r in members]
                groups.append(group(members, number, size=3 + (index == 3)))
                records += members
                number += 1
            sound = [
                r["id"] for r in records if r["rewards"] == {"Correct": 1.0, "judge.score x": 0.25} and not r["errors"]
            ]
            fates = dict.fromkeys(sound[:1], "filtered")
            options = ConvertOptions(min_group_size=1)
            extra = {} if step == 2 else {"started_at": 100.0 * step, "ended_at": 100.0 * step + 7}
            put_step(
                root,
                step,
                records,
                groups=groups,
                writer=writer,
                fates=fates,
                options=options,
                first=1000 * number,
                **extra,
            )
    return root


@pytest.mark.parametrize("which", ["demo", "everything"])
@pytest.mark.parametrize(("view", "question"), EXAMPLES)
def test_an_example_says_what_a_count_in_python_says(
    view: str, question: str, which: str, demo_run: Path, everything: Path
) -> None:
    run = open_run(demo_run if which == "demo" else everything)
    [example] = [e for e in VIEWS[view].examples if e.question == question]
    found = run.sql(example.sql).fetchall()
    expected = ANSWERS[question](Counted(run))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert list(mine) == [pytest.approx(v, nan_ok=True) if isinstance(v, float) else v for v in theirs]


def test_the_examples_are_about_something(everything: Path) -> None:
    """An example that finds nothing in either run would prove nothing."""
    run = open_run(everything)
    for view in VIEWS.values():
        for example in view.examples:
            assert run.sql(example.sql).fetchall(), example.question


def test_groups_without_signal_are_those_that_stats_counts(demo_run: Path, tmp_path: Path) -> None:
    put_run(tmp_path)
    failed = [turn(id=f"f{i}", reward=0.0, errors=["ToolError: no"]) for i in range(3)]
    wild = [turn(id=f"n{i}", reward=math.nan, idx=1) for i in range(3)]
    flat = [turn(id=f"e{i}", reward=reward, idx=2) for i, reward in enumerate((1.0, 0.9999999999999999, None))]
    alone = [turn(id="o", reward=1.0, idx=3), turn(id="p", reward=math.inf, idx=3)]
    groups = [failed, wild, flat, alone]
    records = [record for members in groups for record in members]
    put_step(tmp_path, 0, records, groups=[group(members, i) for i, members in enumerate(groups)])
    [example] = [e for e in VIEWS["groups"].examples if "carry no signal" in e.question]
    assert [row[2] for row in open_run(tmp_path).sql(example.sql).fetchall()] == [2]
    assert len(open_run(demo_run).sql(example.sql).fetchall()) == stats(open_run(demo_run)).total.flat


def test_every_view_has_examples() -> None:
    assert set(ANSWERS) == {question for _, question in EXAMPLES}
    assert all(view.examples for view in VIEWS.values())
