"""Verifying a run: bytes, counts, groups, the conversion once more, and what the user knows of it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from replay_build import (
    Record,
    by_task,
    codes,
    group,
    put_attempt,
    put_part,
    put_run,
    put_step,
    recorded,
    reply,
    said,
    trace,
    turn,
)

from rolltape.replay import ConvertOptions, Expectations, Finding, convert, digest, finish, open_run, outcomes_of
from rolltape.replay.batches import batches
from rolltape.replay.commands.verify import print_verification
from rolltape.replay.exports.samples import write_samples
from rolltape.replay.housekeeping.compact import compact
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.imports.importer import import_files
from rolltape.replay.replayed import replay
from rolltape.replay.verification.verify import Verification, verify
from rolltape.schema import Outcome, Step, encode
from rolltape.schema.errors import OtherRun
from rolltape.schema.parquet import put_bytes
from rolltape.schema.paths import Part, RunPaths

FORK = (said(None, [1]), reply(0, [2], [3, 4]), said(0, [5], "edited"), reply(2, [], [6]))
FIRST = Part("train", 0, 0, "main")


def check_run(root: Path, **expect: Any) -> Verification:
    return verify(open_run(root), Expectations(**expect) if expect else None)


def team(step: int, size: int = 2) -> list[Record]:
    """Traces of one task, with group rewards that add up to 1."""
    return [turn(id=f"s{step}r{i}", idx=step, reward=1.0 if i == 0 else 0.0) for i in range(size)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A sound run of two steps."""
    put_run(tmp_path)
    put_step(tmp_path, 0, team(0), groups=[group(team(0), 0)])
    put_step(tmp_path, 1, team(1), groups=[group(team(1), 1)], first=2)
    return tmp_path


def only(result: Verification) -> Finding:
    [finding] = result.findings
    return finding


# -- a sound run


def test_a_sound_run_is_clean_and_counted(run: Path) -> None:
    result = check_run(run)
    assert result.findings == []
    assert (result.parts, result.traces, result.tokens, result.digests) == (2, 4, 24, 2)
    assert result.counts == {"started": 4, "emitted": 4, "lost": 0}
    assert result.to_dict()["clean"] is True


def test_a_run_without_steps_is_clean(tmp_path: Path) -> None:
    result = check_run(put_run(tmp_path))
    assert (result.findings, result.parts, result.traces) == ([], 0, 0)


def test_progress_is_told_for_every_part(run: Path) -> None:
    told: list[tuple[int, int]] = []
    verify(open_run(run), progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def test_a_step_of_siblings_with_dropped_traces_is_clean(tmp_path: Path) -> None:
    put_run(tmp_path)
    records = [
        trace(*FORK, id="fork"),
        turn(id="error", idx=1, reward=None, errors=["TaskError: no"]),
        turn(id="beside", idx=1),
        trace(id="empty", idx=2),
        turn(id="late", idx=3),
    ]
    records[4]["timing"]["scoring"] = {"start": 1.0, "end": 2.0}
    commit = put_step(tmp_path, 0, records, options=ConvertOptions(branch_policy="siblings"))
    assert commit.step.counts == {
        "started": 5, "emitted": 1, "error": 1, "incomplete_group": 1, "empty": 1, "failed_check": 1, "lost": 0,
    }  # fmt: skip
    assert commit.step.batch == (0, 1)
    assert check_run(tmp_path).findings == []


def test_what_a_hook_changed_is_part_of_the_digest_that_is_compared(tmp_path: Path) -> None:
    put_run(tmp_path)
    records = team(0)
    table, groups = encode(records), [group(records)]
    conversion = convert(table, groups)
    changed = [replace(o, handed_reward=0.125) for o in outcomes_of(conversion)]
    step = Step(
        digest_converted=digest(conversion.groups),
        digest_handed=digest(finish(conversion.groups, changed)),
        batch=(0, 1),
        counts={"started": 2, "emitted": 2},
    )
    put_part(tmp_path, FIRST, table, conversion.records, changed, step)
    assert check_run(tmp_path).findings == []
    RunPaths(tmp_path).commit(FIRST).unlink()
    put_part(tmp_path, FIRST, table, conversion.records, outcomes_of(conversion), step)
    assert codes(check_run(tmp_path).findings) == ["digest_handed"]


# -- expectations


EXPECTED = Expectations(branches=1, group_size=2, group_reward_sum={"ok": 2.0}, sampled_tokens=(1, 9))
NOTHING = [
    f"{name} was held against nothing" for name in ("branches", "group_size", "group_reward_sum", "sampled_tokens")
]


def nothing(result: Verification) -> list[str]:
    return [f.message.split(":")[0] for f in result.findings if (f.code, f.severity) == ("expected_nothing", "error")]


def test_expectations_that_nothing_is_held_against_are_findings(tmp_path: Path) -> None:
    put_run(tmp_path)
    assert nothing(verify(open_run(tmp_path), EXPECTED)) == NOTHING
    put_step(tmp_path, 0, [turn("a"), turn("b", errors=["TaskError: no"])])
    [found] = verify(open_run(tmp_path), EXPECTED).findings
    assert found.message == (
        "group_reward_sum was held against nothing: there is no group all of whose traces ended without an error"
    )
    put_step(tmp_path, 1, [turn("c"), turn("d")], groups=[group([turn("c"), turn("d")], 1)])
    assert verify(open_run(tmp_path), EXPECTED).findings == []


def test_expectations_of_traces_whose_tokens_were_pruned_are_held_against_nothing(run: Path) -> None:
    assert nothing(verify(open_run(run), EXPECTED)) == []
    prune(open_run(run), Wish(tokens=True, before=2))
    assert nothing(verify(open_run(run), EXPECTED)) == [NOTHING[0], NOTHING[3]]


def test_a_reward_that_no_trace_has_is_a_finding_in_each_group(run: Path) -> None:
    found = verify(open_run(run), Expectations(group_reward_sum={"none": 0.5})).findings
    assert codes(found, "error") == ["expected_group_reward_sum"] * 2


# -- bytes


def spoil(run: Path, change: Callable[[bytes], bytes], part: Part = FIRST) -> Path:
    file = RunPaths(run).parquet(part)
    file.write_bytes(change(file.read_bytes()))
    return file


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[: len(d) // 2],
        lambda _: b"",
        lambda _: b"PAR1",
        lambda d: d + b"x",
        lambda d: d[:-1] + bytes([d[-1] ^ 1]),
        lambda d: d[:200] + bytes([d[200] ^ 16]) + d[201:],
    ],
    ids=["half", "nothing", "only magic", "longer", "last bit", "a bit inside"],
)
def test_a_file_that_is_not_the_committed_one_is_named_and_the_rest_is_verified(
    run: Path, change: Callable[[bytes], bytes]
) -> None:
    file = spoil(run, change)
    result = check_run(run)
    finding = only(result)
    assert (finding.code, finding.severity, finding.step, finding.file) == ("file", "error", 0, str(file))
    assert str(file) in finding.message
    assert (result.traces, result.digests) == (2, 1)


def test_each_of_fifty_flipped_bits_is_found(run: Path) -> None:
    file = RunPaths(run).parquet(FIRST)
    data = file.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 50)):
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        assert codes(check_run(run).findings) == ["file"]


def test_a_missing_file_is_named(run: Path) -> None:
    RunPaths(run).parquet(FIRST).unlink()
    finding = only(check_run(run))
    assert finding.code == "file"
    assert "missing" in finding.message


def test_a_damaged_commit_is_named_and_its_file_is_no_leftover(run: Path) -> None:
    file = RunPaths(run).commit(FIRST)
    file.write_bytes(file.read_bytes()[:100])
    finding = only(check_run(run))
    assert (finding.code, finding.step, finding.file) == ("commit", 0, str(file))


def test_a_renamed_commit_is_found_with_what_it_leaves_behind(run: Path) -> None:
    file = RunPaths(run).commit(FIRST)
    file.rename(file.with_name("00000002.0.main.json"))
    result = check_run(run)
    assert codes(result.findings, "error") == ["commit", "missing_step"]
    assert codes(result.findings, "warning") == ["uncommitted"]


def test_a_file_without_a_commit_is_warned_about_and_not_read(run: Path) -> None:
    RunPaths(run).commit(Part("train", 1, 0, "main")).unlink()
    result = check_run(run)
    assert (only(result).code, only(result).severity) == ("uncommitted", "warning")
    assert result.errors == []
    assert result.traces == 2


def test_a_missing_or_damaged_attempt_is_named(run: Path) -> None:
    file = RunPaths(run).attempt(0)
    file.write_text("{")
    assert only(check_run(run)).code == "attempt"
    file.unlink()
    assert "commits name attempt 0" in only(check_run(run)).message


# -- what was committed


def recommitted(run: Path, **changes: Any) -> None:
    """Step 0 with other things in its step record, as a faulty writer would have left it."""
    commit = open_run(run).commits(steps=0)[0]
    put_bytes(RunPaths(run).commit(FIRST), replace(commit, step=replace(commit.step, **changes)).to_bytes())


@pytest.mark.parametrize("name", ["digest_converted", "digest_handed"])
def test_a_batch_that_no_longer_comes_out_the_same_is_found(run: Path, name: str) -> None:
    recommitted(run, **{name: "0" * 64})
    finding = only(check_run(run))
    assert (finding.code, finding.step, finding.expected) == (name, 0, "0" * 64)
    assert len(str(finding.found)) == 64


def test_another_order_of_the_batch_is_another_batch(run: Path) -> None:
    recommitted(run, batch=(1, 0))
    assert only(check_run(run)).code == "digest_handed"


def test_a_batch_of_samples_that_do_not_come_out_is_found(run: Path) -> None:
    recommitted(run, batch=(0, 1, 2))
    finding = only(check_run(run))
    assert finding.code == "digest_handed"
    assert "batch only [2]" in finding.message


@pytest.mark.parametrize(
    "counts",
    [
        {"started": 3, "emitted": 2, "lost": 0},
        {"started": 2, "emitted": 1, "error": 1, "lost": 0},
        {"started": 3, "emitted": 3, "lost": 0},
        {"started": 1, "emitted": 1, "lost": 0},
    ],
)
def test_counts_that_do_not_add_up_are_found(run: Path, counts: dict[str, int]) -> None:
    recommitted(run, counts=counts)
    assert set(codes(check_run(run).findings)) == {"coverage"}


def test_lost_tries_are_warned_about(run: Path) -> None:
    recommitted(run, counts={"started": 5, "emitted": 2, "lost": 3})
    finding = only(check_run(run))
    assert (finding.code, finding.severity, finding.found) == ("lost", "warning", 3)


def test_rows_that_are_fewer_than_committed_are_found(run: Path) -> None:
    commit = open_run(run).commits(steps=0)[0]
    put_bytes(RunPaths(run).commit(FIRST), replace(commit, file=replace(commit.file, rows=3)).to_bytes())
    finding = only(check_run(run))
    assert finding.code == "rows"
    assert finding.message == "2 rows, but 3 were committed"


@pytest.mark.parametrize("options", [{"branch_policies": "all"}, {"branch_policy": "all"}, {"expect": {"moon": 1}}])
def test_options_that_this_version_does_not_know_are_found(run: Path, options: dict[str, Any]) -> None:
    recommitted(run, options=options)
    assert only(check_run(run)).code == "convert"


def test_a_row_that_changed_after_it_was_committed_is_found_by_its_group_and_by_the_digest(run: Path) -> None:
    commit = open_run(run).commits(steps=0)[0]
    rows = encode([team(0)[0], turn(id="s0r1", idx=0, reward=0.75)])
    RunPaths(run).commit(FIRST).unlink()
    put_part(
        run,
        FIRST,
        rows,
        commit.groups,
        [Outcome(trace_id=t, disposition="emitted") for t in ("s0r0", "s0r1")],
        commit.step,
    )
    assert codes(check_run(run).findings) == ["group_reward_sum", "digest_converted", "digest_handed"]


# -- two runs in one folder


def other_run(run: Path, *, scores: bool) -> None:
    """Put a sound step of another run in the place of the first step; `scores`: whether its commit repeats its rows' run."""
    paths = RunPaths(run)
    for path in (paths.parquet(FIRST), paths.commit(FIRST)):
        path.unlink()
    commit = put_step(run, 0, team(0), groups=[group(team(0), 0)], run="r2")
    if not scores:
        put_bytes(paths.commit(FIRST), replace(commit, file=replace(commit.file, scores=None)).to_bytes())


@pytest.mark.parametrize("scores", [True, False])
def test_a_step_of_another_run_is_found_and_gives_no_samples(run: Path, scores: bool) -> None:
    other_run(run, scores=scores)
    finding = only(check_run(run))
    assert (finding.code, finding.severity, finding.step) == ("other_run", "error", 0)
    assert finding.file == str(RunPaths(run).parquet(FIRST))
    assert "its rows are of run r2" in finding.message
    assert "that this is run r1; two runs are not mixed" in finding.message
    opened = open_run(run)
    for read in (
        lambda: opened.table(steps=0),
        lambda: opened.table(columns=["trace_id"]),
        lambda: batches(opened, 0),
        lambda: list(replay(opened)),
        lambda: write_samples(opened, str(run.parent / "samples" / "{rollout_id}.jsonl")),
    ):
        with pytest.raises(OtherRun, match="two runs are not mixed"):
            read()
    assert opened.table(steps=1, columns=["trace_id"]).column_names == ["trace_id"]
    assert len(batches(opened, 1)) == 1


def test_every_step_is_of_another_run_where_the_id_was_edited(run: Path) -> None:
    compact(open_run(run))
    info = json.loads(RunPaths(run).run.read_bytes())
    put_bytes(RunPaths(run).run, json.dumps(info | {"run": "r3"}).encode())
    assert [(f.code, f.step) for f in check_run(run).findings] == [("other_run", 0), ("other_run", 1)]


def test_rows_that_name_no_run_may_be_of_any(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_part(tmp_path, FIRST, encode(team(0)), [group(team(0))], [], Step())
    assert check_run(tmp_path).findings == []
    assert open_run(tmp_path).table(columns=["run"]).column("run").null_count == 2


# -- steps and attempts


def test_a_step_that_is_missing_between_others_is_named(run: Path) -> None:
    put_step(run, 4, team(4), groups=[group(team(4), 4)], first=8)
    assert [(f.code, f.step) for f in check_run(run).findings] == [("missing_step", 2), ("missing_step", 3)]


def test_a_run_that_begins_late_and_evaluations_with_gaps_miss_nothing(tmp_path: Path) -> None:
    put_run(tmp_path, start_step=5)
    put_step(tmp_path, 5, team(5))
    for step in (0, 4):
        put_step(
            tmp_path,
            step,
            team(step + 10),
            groups=[group(team(step + 10), step)],
            split="eval",
            fates={f"s{step + 10}r{i}": "eval" for i in range(2)},
        )
    assert check_run(tmp_path).findings == []


def test_superseded_steps_are_read_but_not_counted(run: Path) -> None:
    put_attempt(run, 1, start_step=1)
    newer = [turn(id=f"new{i}", idx=1) for i in range(2)]
    put_step(run, 1, newer, groups=[group(newer, 1)], attempt=1, first=2)
    result = check_run(run)
    assert result.findings == []
    assert (result.parts, result.traces, result.counts["started"]) == (3, 4, 4)
    spoil(run, lambda d: d[:-1], Part("train", 1, 0, "main"))
    assert only(check_run(run)).code == "file"


def test_a_trace_in_two_steps_is_found(run: Path) -> None:
    put_step(
        run, 2, [*team(2), *team(0)], groups=[group(team(2), 2)], fates={"s0r0": "retried", "s0r1": "retried"}, first=4
    )
    found = check_run(run).findings
    assert [(f.code, f.trace_id, f.step) for f in found] == [("trace_twice", "s0r0", 2), ("trace_twice", "s0r1", 2)]
    assert "step 0 of 'train' (writer 'main')" in found[0].message


def test_a_trace_that_two_writers_recorded_in_one_step_is_found(run: Path) -> None:
    put_step(run, 0, team(0), groups=[group(team(0), 7)], writer="other", first=9)
    assert codes(check_run(run).findings) == ["trace_twice", "trace_twice"]


def test_a_group_index_that_is_used_again_is_found(run: Path) -> None:
    put_step(run, 2, team(2), groups=[group(team(2), 1)], first=4)
    finding = only(check_run(run))
    assert (finding.code, finding.step, finding.group_index) == ("group_twice", 2, 1)


def test_group_indices_of_training_and_evaluation_are_apart(run: Path) -> None:
    records = [turn(id="e0"), turn(id="e1")]
    put_step(run, 0, records, split="eval", fates={"e0": "eval", "e1": "eval"})
    assert check_run(run).findings == []


# -- what dispositions have settled


def test_a_group_that_was_cut_short_and_dropped_is_settled(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, team(0), groups=[group(team(0), size=4)])
    assert check_run(tmp_path).findings == []


def test_a_group_that_was_trained_though_it_is_short_is_not(tmp_path: Path) -> None:
    put_run(tmp_path)
    records = team(0)
    outcomes = [Outcome(trace_id=r["id"], disposition="emitted") for r in records]
    step = Step(counts={"started": 2, "emitted": 2})
    put_part(tmp_path, FIRST, encode(records), [group(records, size=4)], outcomes, step)
    assert codes(check_run(tmp_path).findings) == ["group_size"]


def test_findings_of_traces_without_a_disposition_all_count(tmp_path: Path) -> None:
    put_run(tmp_path)
    records = [trace(*FORK, id="fork"), trace(id="empty", idx=1)]
    put_part(tmp_path, FIRST, encode(records), by_task(records), [], Step())
    assert codes(check_run(tmp_path).findings) == ["branches", "no_trainable_token"]


def test_an_evaluation_may_fork_say_nothing_and_be_cut_short(tmp_path: Path) -> None:
    put_run(tmp_path)
    records = [trace(*FORK, id="fork"), trace(id="empty"), turn(id="failed", reward=None, errors=["TaskError: no"])]
    fates = {"fork": "eval", "empty": "eval", "failed": "error"}
    put_step(
        tmp_path,
        0,
        records,
        groups=[group(records, size=4)],
        split="eval-math",
        fates=fates,
        digest_converted=None,
        digest_handed=None,
        batch=None,
    )
    result = check_run(tmp_path)
    assert result.findings == []
    assert result.counts == {"started": 3, "eval": 2, "error": 1, "lost": 0}


def test_what_is_wrong_with_the_recording_of_an_evaluation_counts(tmp_path: Path) -> None:
    put_run(tmp_path)
    records = [trace(said(None, [1]), reply(0, [2], [3], []), id="a")]
    put_step(
        tmp_path, 0, records, split="eval", fates={"a": "eval"}, digest_converted=None, digest_handed=None, batch=None
    )
    found = only(check_run(tmp_path))
    assert (found.code, found.split, found.step) == ("logprob_missing", "eval", 0)
    assert str(found).startswith("error logprob_missing (step 0 of eval, trace a, node 1, token 1):")


def test_samples_are_counted_as_they_were_handed_over(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, team(0) + team(1), fates={"s0r0": "leftover", "s0r1": "leftover"})
    result = check_run(tmp_path)
    assert (result.findings, result.samples, result.counts["emitted"]) == ([], 2, 2)


# -- expectations


def test_expected_group_sums_hold_for_recorded_code_golf(tmp_path: Path) -> None:
    put_run(tmp_path)
    records = recorded("group_rewards")
    put_step(tmp_path, 0, records, groups=by_task(records))
    assert check_run(tmp_path, group_reward_sum={"fastest": 0.5}).findings == []
    found = check_run(tmp_path, group_reward_sum={"fastest": 0.4, "most_concise": 0.5}).findings
    assert [(f.group_index, f.expected, f.found) for f in found] == [
        (0, 0.4, 0.5),
        (0, 0.5, 1.0),
        (1, 0.4, 0.5),
        (2, 0.4, 0.5),
    ]


def test_surplus_rollouts_of_an_imported_task_are_reported(tmp_path: Path) -> None:
    lines = [json.dumps(turn(id=str(i), idx=i // 6)) for i in range(10)]
    (tmp_path / "traces.jsonl").write_text("\n".join(lines))
    import_files(tmp_path / "traces.jsonl", tmp_path / "run")
    found = check_run(tmp_path / "run", group_size=4).findings
    assert [(f.code, f.group_index, f.expected, f.found) for f in found] == [("expected_group_size", 0, 4, 6)]


def test_traces_of_an_import_that_give_no_sample_are_counted_as_convert_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"rewards": {}, "errors": ["TaskError: no"]}
    traces = [turn(id=str(i), idx=i // 2, **(failed if i in (1, 2, 3) else {})) for i in range(6)]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, traces)))
    import_files(tmp_path / "traces.jsonl", tmp_path / "run")
    result = check_run(tmp_path / "run")
    [written] = write_samples(open_run(tmp_path / "run"), str(tmp_path / "x.jsonl"))
    assert result.left_out == written.left_out == {"error": 3, "incomplete_group": 1}
    print_verification("run", result)
    assert "\n4 traces give no Sample: 3 error, 1 incomplete group\n" in capsys.readouterr().out


def test_what_was_recorded_of_traces_is_not_counted_a_second_time(run: Path) -> None:
    assert check_run(run).left_out == {}


def test_expectations_are_held_against_the_newest_attempt_only(run: Path) -> None:
    put_attempt(run, 1)
    records = [turn(id=f"new{i}") for i in range(4)]
    put_step(run, 0, records, attempt=1)
    assert codes(check_run(run, group_size=2).findings) == ["expected_group_size"]
    assert check_run(run, group_size=4).findings == []


def test_expectations_are_held_against_final_tries_only(tmp_path: Path) -> None:
    put_run(tmp_path)
    final = turn(id="final")
    retried = trace(id="retried", rewards={}, errors=["ProviderError: 400"])
    cancelled = trace(said(None, [1]), id="cancelled", rewards={})
    put_step(
        tmp_path,
        0,
        [final, retried, cancelled],
        groups=[group([final])],
        fates={"retried": "retried", "cancelled": "cancelled"},
    )
    result = check_run(tmp_path, branches=1, sampled_tokens=(1, 9), reward_names=("ok",))
    assert result.findings == []


def test_every_expectation_that_fails_is_named_with_its_step(run: Path) -> None:
    found = check_run(
        run, group_size=3, branches=2, sampled_tokens=(5, 9), reward_names=("other",), group_reward_sum={"ok": 0.5}
    ).findings
    for step in (0, 1):
        assert codes(f for f in found if f.step == step) == [
            *["expected_branches", "expected_rewards", "expected_sampled_tokens"] * 2,
            "expected_group_size",
            "expected_group_reward_sum",
        ]


def test_a_verification_is_plain_values(run: Path) -> None:
    spoil(run, lambda d: d[:-1])
    data = check_run(run).to_dict()
    assert data["clean"] is False
    assert data["findings"][0]["code"] == "file"
    assert "trace_id" not in data["findings"][0]
    assert isinstance(pa.array([data["traces"]]), pa.Array)


# -- nothing committed


def journaled(root: Path) -> Path:
    """A run all of whose steps are in a journal."""
    journal = RunPaths(put_run(root)).journal(0, "main")
    journal.parent.mkdir()
    journal.write_bytes(b"x")
    return journal


def test_a_run_without_a_committed_step_is_not_clean_and_what_settles_it_is_named(
    tmp_path: Path, rolltape: Callable[..., tuple[int, str, str]]
) -> None:
    journal = journaled(tmp_path)
    code, out, _ = rolltape("verify", tmp_path)
    assert (code, out.splitlines()[-1]) == (1, "nothing was checked: no step is committed, 1 finding")
    assert f"`rolltape recover {tmp_path}` settles it" in out
    assert out.count(str(journal)) == 1
    assert json.loads(rolltape("verify", tmp_path, "--json")[1])["clean"] is False
    with journal.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, out, _ = rolltape("verify", tmp_path)
    assert (code, out.splitlines()[-1]) == (0, "nothing was checked: no step is committed, 1 warning")
    put_step(tmp_path, 0, [turn()])
    code, out, _ = rolltape("verify", tmp_path)
    assert (code, out.splitlines()[-1]) == (0, "clean, 1 warning")


def test_a_run_in_which_nothing_was_recorded_is_not_called_clean(
    tmp_path: Path, rolltape: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = rolltape("verify", put_run(tmp_path))
    assert (code, out.splitlines()[-1]) == (0, "nothing was checked: no step is committed")
