"""`rolltape diff`: means and their noise, what is null, tasks and steps of two runs, settings, coverage, and bounds for CI."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from replay_build import Record, put_attempt, put_run, put_step, recorded, reply, said, trace, turn

from rolltape.replay import open_run
from rolltape.replay.diff import Change, Diff, Mean, Paired
from rolltape.replay.diff_bounds import Bound
from rolltape.replay.diff_side import read_side
from rolltape.schema.errors import BadInput
from rolltape.schema.paths import RunPaths

Call = Callable[..., tuple[int, str, str]]


def put(root: Path, *steps: Sequence[Record], fates: dict[str, str] | None = None, **info: Any) -> Path:
    """A run whose steps hold these traces."""
    put_run(root, **info)
    for number, records in enumerate(steps):
        mine = {t: d for t, d in (fates or {}).items() if t in {r["id"] for r in records}}
        put_step(root, number, records, fates=mine, digest_converted=None, digest_handed=None)
    return root


def compared(a: Path, b: Path, steps: Sequence[int] | None = None) -> Diff:
    return Diff(*(read_side(open_run(path), "train", steps) for path in (a, b)))


def scored(*rewards: float | None, idx: int = 0, start: int = 0) -> list[Record]:
    """Rollouts of one task with these rewards; None is one that was not scored."""
    return [turn(id=f"{idx}-{start + i}", idx=idx, reward=r) for i, r in enumerate(rewards)]


# -- numbers


def test_a_mean_is_over_what_was_scored_and_the_rest_is_counted(tmp_path: Path) -> None:
    """B11, D11: null is not 0 and NaN is in no mean."""
    a = put(tmp_path / "a", scored(1.0, 0.0, None, None))
    b = put(tmp_path / "b", scored(0.2, 0.9, math.nan, None))
    found = compared(a, b).quantities["reward"]
    assert found.a == Mean(0.5, n=2, unscored=2)
    assert found.b == Mean(pytest.approx(0.55), n=2, unscored=1, not_finite=1)
    assert found.change == pytest.approx(0.05)


def test_metrics_that_few_rollouts_have_are_means_over_those(tmp_path: Path) -> None:
    """B12: 4 and 6 in two of eight rollouts have the mean 5."""
    measured = [turn(id=f"t{i}", metrics={"turns_to_fix": 4.0 + i} if i in (0, 2) else {}) for i in range(8)]
    run = put(tmp_path / "a", measured)
    assert compared(run, run).quantities["metrics.turns_to_fix"].a == Mean(5.0, n=2, unscored=6)


def test_names_may_hold_anything(tmp_path: Path) -> None:
    """D08."""
    names = ["judge.score", "a/b", "x y", 'say "hi"', "größe", "a=b", "[red]"]
    run = put(tmp_path / "a", [turn(id="a", rewards={name: float(i) for i, name in enumerate(names)})])
    found = compared(run, run).quantities
    assert {name: found[f"rewards.{name}"].a.mean for name in names} == {n: float(i) for i, n in enumerate(names)}
    assert Bound.parse("drop", "rewards.a=b=0.5").quantity == "rewards.a=b"


def test_the_standard_error_is_that_of_a_difference_of_means(tmp_path: Path) -> None:
    x, y = [0.1, 0.4, 0.9, 0.2], [0.5, 0.6, 0.95]
    found = compared(put(tmp_path / "a", scored(*x)), put(tmp_path / "b", scored(*y))).quantities["reward"]
    assert found.change == pytest.approx(statistics.mean(y) - statistics.mean(x))
    assert found.se == pytest.approx(math.sqrt(statistics.variance(x) / 4 + statistics.variance(y) / 3))


def test_one_rollout_has_no_standard_error_and_none_no_mean(tmp_path: Path) -> None:
    found = compared(put(tmp_path / "a", scored(0.5)), put(tmp_path / "b", scored(None, None)))
    assert found.quantities["reward"] == Change(Mean(0.5, 1), Mean(None, 0, unscored=2), None, None)
    assert found.tasks.rows[0].changes["reward"].change is None
    assert found.paired("reward") == Paired(0, None, None)


def test_rates_lengths_and_coverage(tmp_path: Path) -> None:
    long = trace(said(None, [1] * 90), reply(0, [], [2] * 10, finish="length"), id="long", idx=1)
    failed = turn(id="failed", idx=1, errors=["TaskError: no"], rewards={})
    again = turn(id="again", idx=1, errors=["TaskError: no"], rewards={})
    a = put(tmp_path / "a", scored(1.0, 1.0), scored(1.0, idx=1))
    b = put(tmp_path / "b", scored(1.0, 1.0), [long, failed, again], fates={"again": "retried"})
    found = compared(a, b)
    means = {name: (c.a.mean, c.b.mean) for name, c in found.quantities.items()}
    assert means["error_rate"] == (0.0, 0.25)  # of 4 rollouts: a try that was run again is none
    assert means["truncated_rate"] == (0.0, pytest.approx(1 / 3))  # of those that came to their end
    assert means["sampled_tokens"] == (3.0, pytest.approx((3 + 3 + 10) / 3))
    assert means["tokens"] == (6.0, pytest.approx((6 + 6 + 100) / 3))
    assert means["turns"] == means["branches"] == (1.0, 1.0)
    assert means["lost_rate"] == (0.0, 0.0)
    assert (found.quantities["emitted_rate"].a.n, found.quantities["emitted_rate"].b.n) == (3, 4)
    assert means["emitted_rate"] == tuple(
        side.coverage.get("emitted", 0) / n for side, n in ((found.a, 3), (found.b, 4))
    )
    assert found.coverage["started"] == (3, 5)
    assert found.coverage["retried"] == (0, 1)
    assert found.coverage["error"] == (0, 1)
    assert found.totals["rollouts"] == (3, 4)


def test_lost_tries_are_counted_though_they_have_no_row(tmp_path: Path) -> None:
    a = put(tmp_path / "a", scored(1.0))
    put_run(tmp_path / "b")
    put_step(tmp_path / "b", 0, scored(1.0), counts={"started": 4, "emitted": 1, "lost": 3})
    found = compared(a, tmp_path / "b")
    assert found.coverage["lost"] == (0, 3)
    assert [found.quantities[n].b.mean for n in ("emitted_rate", "lost_rate")] == [0.25, 0.75]


def test_an_import_has_no_dispositions_and_says_recorded(tmp_path: Path, rolltape: Call) -> None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in recorded("group_rewards")))
    rolltape("import", tmp_path / "t.jsonl", "--run", tmp_path / "run")
    found = compared(tmp_path / "run", tmp_path / "run")
    assert found.coverage == {"started": (12, 12), "recorded": (12, 12), "lost": (0, 0)}
    assert found.same
    assert not {"convert.", "versions"} & set(found.a.settings)  # an import has neither


# -- tasks and steps


def test_tasks_are_sorted_by_the_size_of_their_change_with_counts_and_noise(tmp_path: Path) -> None:
    a = put(tmp_path / "a", scored(0.5, 0.5), scored(0.9, 0.7, idx=1), scored(0.1, idx=2), scored(1.0, idx=7))
    b = put(tmp_path / "b", scored(0.4, 0.6), scored(0.1, 0.3, 0.2, idx=1), scored(0.4, idx=2), scored(1.0, idx=8))
    found = compared(a, b)
    rows = found.tasks.by_size("reward")
    assert [(r.name, r.a, r.b) for r in rows] == [("ProbeTask 1", 2, 3), ("ProbeTask 2", 1, 1)]  # task 0 did not change
    assert rows[0].changes["reward"].change == pytest.approx(-0.6)
    assert rows[0].changes["reward"].se == pytest.approx(math.sqrt(0.02 / 2 + 0.01 / 3))
    assert rows[1].changes["reward"].se is None
    assert (found.tasks.only_a, found.tasks.only_b) == (["ProbeTask 7"], ["ProbeTask 8"])


def test_over_the_same_tasks_each_counts_once_and_their_own_difficulty_is_no_noise(tmp_path: Path) -> None:
    a = put(tmp_path / "a", scored(0.1), scored(0.5, idx=1), scored(0.9, idx=2))
    b = put(tmp_path / "b", scored(0.2, 0.2, 0.2), scored(0.6, idx=1), scored(1.03, idx=2))
    found = compared(a, b).paired("reward")
    deltas = [0.1, 0.1, 0.13]
    assert found.tasks == 3
    assert found.change == pytest.approx(statistics.mean(deltas))
    assert found.se == pytest.approx(statistics.stdev(deltas) / math.sqrt(3))
    assert (found.se or 1) < (compared(a, b).quantities["reward"].se or 0) / 10


def test_steps_are_compared_by_number(tmp_path: Path) -> None:
    a = put(tmp_path / "a", scored(0.5), scored(0.9, idx=1), scored(0.9, idx=2))
    b = put(tmp_path / "b", scored(0.5), scored(0.1, idx=5))
    found = compared(a, b)
    assert [(r.name, r.changes["reward"].change) for r in found.steps.rows] == [("0", 0.0), ("1", pytest.approx(-0.8))]
    assert found.steps.only_a == ["2"]
    assert found.notes == ["different steps: 0–2 (3) and 0–1 (2)"]
    assert compared(a, b, [0]).notes == []


def test_tasks_match_by_key_where_all_have_one_and_else_by_class_and_index(tmp_path: Path) -> None:
    keyed = [t for line in recorded("single_turn", "0.4.0") for t in line["traces"]]
    plain = [turn(id=f"p{t['id']}", idx=t["task"]["data"]["idx"]) for t in keyed]
    with_key, without = put(tmp_path / "a", keyed), put(tmp_path / "b", plain)
    assert compared(with_key, with_key).tasks.only_a == []
    mixed = compared(with_key, without).tasks
    assert len(mixed.rows) == len({t["task"]["data"]["idx"] for t in keyed})
    assert (mixed.only_a, mixed.only_b) == ([], [])


def test_tasks_of_one_name_are_told_apart_by_their_index(tmp_path: Path) -> None:
    records = [turn(id=f"t{i}", idx=i, reward=i / 10) for i in (0, 1, 8)]
    for record, name in zip(records, ("plums-0", "plums-1", "plums-0"), strict=True):
        record["task"]["data"]["name"] = name
    run = put(tmp_path / "a", records)
    found = compared(run, run).tasks
    assert [(row.name, row.changes["reward"].a.mean) for row in found.rows] == [
        ("plums-0 (0)", 0.0),
        ("plums-1", 0.1),
        ("plums-0 (8)", 0.8),
    ]


def test_rollouts_of_tasks_without_a_name_are_counted(tmp_path: Path) -> None:
    nameless = turn(id="a")
    nameless["task"]["data"]["idx"] = None
    found = compared(put(tmp_path / "a", [nameless]), put(tmp_path / "b", scored(1.0)))
    assert found.tasks.unnamed == (1, 0)
    assert found.tasks.rows == []


# -- settings


def test_what_the_runs_were_recorded_with_is_said_first(tmp_path: Path, rolltape: Call) -> None:
    a = put(tmp_path / "a", scored(1.0), model="small", taskset="sums")
    b = put(tmp_path / "b", scored(1.0), model="large", taskset="words")
    code, printed, _ = rolltape("diff", a, b)
    lines = printed.splitlines()
    assert code == 0
    assert lines[0] == f"A  {a}: train, 1 step, 1 rollout in 1 group; small, m, sums"
    assert lines[2:4] == ["different models: small and large", "different tasksets: sums and words"]


def test_settings_of_the_attempts_that_recorded_the_steps_are_compared(tmp_path: Path) -> None:
    a = put(tmp_path / "a", scored(1.0), scored(1.0, idx=1))
    b = put(tmp_path / "b", scored(1.0), scored(1.0, idx=1))
    put_attempt(b, 1, start_step=1)
    put_step(b, 1, scored(1.0, idx=1), attempt=1, digest_converted=None, digest_handed=None)
    assert compared(a, b).settings == {"seed": (["0"], ["0", "1"])}
    assert compared(a, b, [0]).settings == {}
    RunPaths(b).attempt(1).unlink()
    assert compared(a, b).settings == {}


def test_many_settings_of_one_run_alone_are_counted_and_named_on_request(tmp_path: Path, rolltape: Call) -> None:
    a, b = put(tmp_path / "a", scored(1.0)), put(tmp_path / "b", scored(1.0))
    file = RunPaths(b).attempt(0)
    written = json.loads(file.read_text())
    written["settings"] |= {f"option_{i}": 7777 for i in range(9)}
    file.write_text(json.dumps(written))
    code, printed, _ = rolltape("diff", a, b)
    assert (code, "7777" in printed, "option_0" in printed) == (0, False, False)
    assert "9 settings of B only (--all names them)\n" in printed
    code, printed, _ = rolltape("diff", a, b, "--all")
    assert (code, "7777" in printed) == (0, False)
    assert "9 settings of B only (--json has their values): option_0, option_1" in " ".join(printed.split())


def test_an_empty_mapping_is_no_setting(tmp_path: Path) -> None:
    a, b = put(tmp_path / "a", scored(1.0)), put(tmp_path / "b", scored(1.0))
    for run, env in ((a, {}), (b, {"KEY": "x"})):
        file = RunPaths(run).attempt(0)
        written = json.loads(file.read_text())
        file.write_text(json.dumps({**written, "settings": {"forward": {}, "env": env}, "versions": {}}))
    found = compared(a, b)
    assert not [name for name in (*found.a.settings, *found.b.settings) if name in ("", "env", "forward", "versions")]
    assert found.settings["env.KEY"] == ([], ["x"])


def test_a_run_and_itself_do_not_differ(tmp_path: Path, rolltape: Call) -> None:
    rewards = [0.1, 0.2, math.nan, None, 0.7]
    run = put(tmp_path / "a", scored(*rewards), [turn(id="f", idx=1, errors=["E: x"])], scored(*rewards, idx=2))
    for by in ("task", "step", "none"):
        code, printed, _ = rolltape("diff", run, run, "--by", by)
        assert (code, printed.splitlines()[2:]) == (
            0,
            ["no difference: settings, coverage and every quantity are equal"],
        )
    report = json.loads(rolltape("diff", run, run, "--json")[1])
    assert report["same"] is True
    assert {q["change"] for q in report["quantities"].values()} <= {0, None}
    assert all(c["change"] in (0, None) for row in report["rows"] for c in row["changes"].values())


def test_the_order_of_rollouts_is_no_difference(tmp_path: Path) -> None:
    rewards = [0.1, 0.2, 0.3, 1e-9, 0.7, 0.1]
    a, b = put(tmp_path / "a", scored(*rewards)), put(tmp_path / "b", scored(*reversed(rewards)))
    assert compared(a, b).same


@pytest.mark.parametrize("what", ["reward", "null", "steps", "tokens", "fate", "model"])
def test_any_difference_is_one(tmp_path: Path, what: str) -> None:
    a = put(tmp_path / "a", scored(0.5, 0.5))
    other = scored(0.5, 0.6 if what == "reward" else None if what == "null" else 0.5)
    if what == "tokens":
        other[1]["nodes"][0] |= {"token_ids": [1, 2, 3], "mask": [False] * 3, "is_content": [True] * 3}
    steps = [other, scored(1.0, idx=1)] if what == "steps" else [other]
    b = put(
        tmp_path / "b",
        *steps,
        fates={"0-1": "filtered"} if what == "fate" else {},
        model="n" if what == "model" else "m",
    )
    assert not compared(a, b).same


# -- bounds


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """B has lost 0.1 of reward and gained a quarter of errors."""
    a = put(tmp_path / "a", scored(0.8, 0.8, 0.8, 0.8))
    failed = turn(id="f", errors=["TaskError: no"], reward=0.7)
    return a, put(tmp_path / "b", [*scored(0.7, 0.7, 0.7), failed])


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        (["--max-drop", "reward=0.05"], 1),
        (["--max-drop", "reward=0.1"], 0),  # 0.8 - 0.7 is more than 0.1 in floating point
        (["--max-drop", "reward=12%"], 1),
        (["--max-drop", "reward=13%"], 0),
        (["--max-rise", "reward=0"], 0),
        (["--max-rise", "error_rate=0.2"], 1),
        (["--max-rise", "error_rate=0.25"], 0),
        (["--max-drop", "reward=1", "--max-rise", "error_rate=0.01"], 1),
        (["--max-drop", "tokens=0", "--max-rise", "tokens=0"], 0),
        (["--max-rise", "lost_rate=0"], 0),
    ],
)
def test_a_bound_that_does_not_hold_ends_with_1(
    runs: tuple[Path, Path], rolltape: Call, bounds: list[str], code: int
) -> None:
    assert rolltape("diff", *runs, *bounds)[0] == code
    report = json.loads(rolltape("diff", *runs, *bounds, "--json")[1])
    assert all(b["holds"] for b in report["bounds"]) == (code == 0)


def test_the_bound_that_does_not_hold_is_named(runs: tuple[Path, Path], rolltape: Call) -> None:
    _, printed, _ = rolltape("diff", *runs, "--max-drop", "reward=0.05", "--max-rise", "error_rate=50%")
    assert printed.splitlines()[-2:] == [
        "FAILED  --max-drop: reward dropped by 0.1 (0.8 in A, 0.7 in B); allowed are 0.05",
        "FAILED  --max-rise: error_rate rose by 0.25 (0 in A, 0.25 in B); allowed are 50% of A, 0",
    ]


def test_what_cannot_be_judged_does_not_hold(tmp_path: Path, rolltape: Call) -> None:
    a, b = put(tmp_path / "a", scored(0.5)), put(tmp_path / "b", scored(None))
    code, printed, _ = rolltape("diff", a, b, "--max-drop", "reward=1")
    assert code == 1
    assert printed.splitlines()[-1] == "FAILED  --max-drop: reward cannot be judged: no value in B"


def test_a_mean_that_no_float_holds_cannot_be_judged(tmp_path: Path, rolltape: Call) -> None:
    a, b = put(tmp_path / "a", scored(1.7e308, 1.6e308)), put(tmp_path / "b", scored(0.5, 0.5))
    assert compared(a, b).quantities["reward"].change is None
    code, printed, _ = rolltape("diff", a, b, "--max-drop", "reward=1")
    assert (code, printed.splitlines()[-1]) == (1, "FAILED  --max-drop: reward cannot be judged: no value in A")


def test_a_bound_says_how_many_values_are_in_no_mean(tmp_path: Path, rolltape: Call) -> None:
    a, b = put(tmp_path / "a", scored(0.5, 0.5)), put(tmp_path / "b", scored(0.5, math.nan))
    _, printed, _ = rolltape("diff", a, b, "--max-drop", "reward=1")
    assert "(0.5 in A, 0.5 in B; in no mean, being no finite numbers: 1 of B); allowed are 1" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-drop", "reward"], "expected NAME=NUMBER, such as reward=0.05"),
        (["--max-drop", "=1"], "expected NAME=NUMBER"),
        (["--max-drop", "reward=-1"], "expected NAME=NUMBER"),
        (["--max-rise", "reward=nan"], "expected NAME=NUMBER"),
        (["--max-drop", "rewards=0.1"], "no such quantity; did you mean"),
        (["--of", "nothing"], "no such quantity of a rollout; there are reward"),
        (["--of", "lost_rate"], "no such quantity of a rollout"),
        (["--split", "eval"], "no split 'eval' was recorded"),
        (["--step", "9"], "step 9 of 'train' was not recorded"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    runs: tuple[Path, Path], rolltape: Call, words: list[str], said: str
) -> None:
    code, printed, error = rolltape("diff", *runs, *words)
    assert (code, printed) == (2, "")
    assert said in error
    assert error.count("\n") == 1


def test_a_missing_run_is_refused(tmp_path: Path, rolltape: Call) -> None:
    run = put(tmp_path / "a", scored(1.0))
    code, _, error = rolltape("diff", run, tmp_path / "none")
    assert code == 2
    assert "does not exist" in error
    with pytest.raises(BadInput, match="nothing was recorded"):
        read_side(open_run(put_run(tmp_path / "empty")), "train")


# -- what is printed


def test_tables_read_well_at_100_columns(
    runs: tuple[Path, Path], rolltape: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltape.replay.printing.console.out.width", 100, raising=False)
    for by in ("task", "step"):
        _, printed, _ = rolltape("diff", *runs, "--by", by)
        assert max(map(len, printed.splitlines()[2:])) <= 100
        assert "reward     " in printed
        assert f"reward by {by}" in printed
        assert f"reward changed in 1 of 1 {by} that both runs have" in printed


def test_tables_hold_what_differs_and_a_line_says_what_is_equal(runs: tuple[Path, Path], rolltape: Call) -> None:
    _, printed, _ = rolltape("diff", *runs)
    same = next(line for line in printed.splitlines() if line.startswith("means, the same in both: "))
    assert "branches 1" in same
    assert not any(line.startswith("branches ") for line in printed.splitlines())
    _, printed, _ = rolltape("diff", *runs, "--all")
    assert "the same in both" not in printed
    assert {"branches", "started", "emitted", "reward"} <= {line.partition(" ")[0] for line in printed.splitlines()}
    _, printed, _ = rolltape("diff", runs[0], runs[0], "--all")
    assert "Means over rollouts" in printed


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_narrow_terminals(
    runs: tuple[Path, Path], rolltape: Call, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("rolltape.replay.printing.console.out._width", width)
    _, printed, _ = rolltape("diff", *runs, "--all")
    tables = printed.partition("Tries, by")[2]
    assert max(map(len, tables.splitlines())) <= width
    heads = [line.split() for line in tables.splitlines() if " A " in line and " change" in line]
    assert len(heads) >= 3
    assert all({"A", "B", "change"} <= set(head) for head in heads)


def test_only_the_largest_changes_are_shown_unless_all_are_asked_for(tmp_path: Path, rolltape: Call) -> None:
    a = put(tmp_path / "a", *(scored(0.0, idx=i) for i in range(6)))
    b = put(tmp_path / "b", *(scored(i / 10, idx=i) for i in range(6)))
    _, printed, _ = rolltape("diff", a, b, "--top", 2)
    assert [w for i in range(6) if (w := f"ProbeTask {i}") in printed] == ["ProbeTask 4", "ProbeTask 5"]
    assert "changed in 5 of 6 tasks that both runs have; shown are the 2 largest changes" in printed
    assert printed.index("ProbeTask 5") < printed.index("ProbeTask 4")
    assert "ProbeTask 1" in rolltape("diff", a, b, "--top", 0)[1]
    report = json.loads(rolltape("diff", a, b, "--top", 2, "--json")[1])
    assert len(report["rows"]) == 6
