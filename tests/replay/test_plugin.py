"""`pytest --rolltape`: recorded runs go through today's converter, and the first field that differs is named."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_build import Record, put_run, put_step, reply, said, trace

from rolltape.replay import ConvertOptions, Sample, branches, digest, open_run, options
from rolltape.replay.verification.approve import approve
from rolltape.schema.paths import Part, RunPaths

pytest_plugins = "pytester"

converting = sys.modules["rolltape.replay.convert"]
"""The module, as the package gives its function under this name."""


def forked(id: str, idx: int) -> Record:
    """A trace of two branches: the tool's output was edited, and the model went on from both."""
    return trace(
        said(None, [1, 2]),
        reply(0, [3], [4, 5]),
        said(1, [6], "one", "tool"),
        reply(2, [7], [8, 9, 10]),
        said(1, [11], "another", "tool"),
        reply(4, [7], [12, 13]),
        id=id,
        idx=idx,
        rewards={"ok": 1.0, "style": 0.5},
    )


def chain(id: str, idx: int) -> Record:
    """A trace of one branch and two turns."""
    nodes = said(None, [1, 2]), reply(0, [3], [4, 5]), said(1, [6], "more"), reply(2, [7], [8, 9])
    return trace(*nodes, id=id, idx=idx, rewards={"ok": 1.0})


SIBLINGS = ConvertOptions(branch_policy="siblings")


def record(root: Path, steps: int = 2) -> Path:
    """A run of `steps` steps: a group of two chains, and one of a chain and a forked trace."""
    put_run(root)
    for step in range(steps):
        names = [f"{name}{step}" for name in "abcd"]
        records = [chain(names[0], 0), chain(names[1], 0), chain(names[2], 1), forked(names[3], 1)]
        put_step(root, step, records, options=SIBLINGS, first=10 * step)
    return root


@pytest.fixture
def run(pytester: pytest.Pytester) -> Path:
    """A recorded and approved run in the current folder."""
    root = record(pytester.path / "run")
    approve(open_run(root))
    return root


QUIET = [f"-pno:{plugin}" for plugin in ("cacheprovider", "hypothesispytest", "timeout", "anyio")]
"""Leaves out plugins that take a second to load."""


def replay(pytester: pytest.Pytester, *args: str | Path) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*QUIET, *map(str, args))


def failure(result: pytest.RunResult) -> str:
    """What a run with failures said, in one line."""
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    return " ".join(" ".join(result.outlines).split())


# -- runs that are as they were


def test_every_step_of_a_run_is_a_test_that_passes(pytester: pytest.Pytester, run: Path) -> None:
    result = replay(pytester, "--rolltape", run, "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*1 recorded run, version 1 of the converter*", "*run::train-0 PASSED*"])


def test_what_the_live_run_took_digests_of_needs_no_approval(pytester: pytest.Pytester) -> None:
    record(pytester.path / "run")
    replay(pytester, "--rolltape", "run").assert_outcomes(passed=2)


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one process", "workers"])
def test_steps_that_were_not_compared_with_approved_samples_are_counted(
    pytester: pytest.Pytester, workers: Sequence[str]
) -> None:
    root = record(pytester.path / "run", steps=3)
    approve(open_run(root), steps=[1])
    result = replay(pytester, "--rolltape", "run", "-q", "--junit-xml=junit.xml", *workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["rolltape: 2 steps compared with recorded digests, for no Samples were approved *"])
    written = (pytester.path / "junit.xml").read_text()
    assert [written.count(f'"rolltape_against" value="{what}"') for what in ("recorded", "approved")] == [2, 1]
    approve(open_run(root))
    assert "recorded digests" not in replay(pytester, "--rolltape", "run", *workers).stdout.str()


def test_a_folder_of_runs_is_replayed_run_by_run(pytester: pytest.Pytester) -> None:
    for name in ("a", "b/c"):
        record(pytester.path / "runs" / name, steps=1)
    (pytester.path / "runs" / "notes").mkdir()
    result = replay(pytester, "--rolltape", "runs", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*runs/a::train-0 PASSED*", "*runs/b/c::train-0 PASSED*"])


def test_only_the_runs_that_are_replayed_are_counted(pytester: pytest.Pytester) -> None:
    for name in ("asked", "runs/a", "runs/b"):
        record(pytester.path / name, steps=1)
    pytester.makeini("[pytest]\nrolltape_runs = runs")
    other = pytester.mkdir("other")
    (other / "test_other.py").write_text("def test_one(): pass")
    for words, header, passed in (
        (("--rolltape", "asked"), "1 recorded run,", 1),
        (("other", "--rolltape", "asked"), "1 recorded run,", 2),
        ((), "2 recorded runs,", 3),
    ):
        result = replay(pytester, *words)
        result.assert_outcomes(passed=passed)
        result.stdout.fnmatch_lines([f"rolltape: {header}*"])
    assert "recorded run" not in replay(pytester, "other").stdout.str()


def test_several_runs_can_be_given_beside_tests_of_other_kinds(pytester: pytest.Pytester) -> None:
    for name in ("a", "b"):
        record(pytester.path / name, steps=1)
    pytester.makepyfile("def test_one(): pass")
    replay(pytester, "--rolltape", "a", "--rolltape", "b", "--rolltape", "a", ".").assert_outcomes(passed=3)
    replay(pytester, "--rolltape", "a", ".", "-m", "rolltape").assert_outcomes(passed=1, deselected=1)
    replay(pytester, "--rolltape", "a", ".", "-k", "train-0").assert_outcomes(passed=1, deselected=1)


@pytest.mark.parametrize("testpaths", ["", "testpaths = tests"])
def test_without_a_path_the_given_runs_are_replayed_and_no_test_of_another_kind_is_even_imported(
    pytester: pytest.Pytester, tmp_path: Path, testpaths: str
) -> None:
    record(pytester.path / "kept", steps=1)
    record(tmp_path / "elsewhere", steps=1)
    (pytester.mkdir("tests") / "test_one.py").write_text("raise SystemExit('imported')")
    pytester.makeini(f"[pytest]\nrolltape_runs = kept\n{testpaths}")
    result = replay(pytester, "--rolltape", tmp_path / "elsewhere")
    result.assert_outcomes(passed=1)
    assert "testpaths" not in result.stdout.str()
    replay(pytester, "--rolltape", "kept", "-k", "train-0").assert_outcomes(passed=1)
    replay(pytester, "--rolltape", "kept", "-k", "train-7").assert_outcomes(deselected=1)


def test_configured_runs_are_replayed_where_pytest_comes_upon_them(pytester: pytest.Pytester, run: Path) -> None:
    pytester.makepyfile("def test_one(): pass")
    pytester.makeini("[pytest]\nrolltape_runs = run")
    replay(pytester).assert_outcomes(passed=3)
    replay(pytester, "--rolltape", run).assert_outcomes(passed=2)
    replay(pytester, "--rolltape", run, ".").assert_outcomes(passed=3)
    replay(pytester, "test_configured_runs_are_replayed_where_pytest_comes_upon_them.py").assert_outcomes(passed=1)


def test_configured_runs_outside_of_what_pytest_walks_are_replayed_where_everything_is_tested(
    pytester: pytest.Pytester,
) -> None:
    record(pytester.path / "data" / "run", steps=1)
    tests = pytester.mkdir("tests")
    (tests / "test_one.py").write_text("def test_one(): pass")
    pytester.makeini("[pytest]\nrolltape_runs = data\ntestpaths = tests")
    replay(pytester).assert_outcomes(passed=2)
    replay(pytester, "tests").assert_outcomes(passed=1)


def test_runs_that_nobody_asked_for_are_left_alone(pytester: pytest.Pytester, run: Path) -> None:
    assert replay(pytester, run).ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_replaying_writes_nothing_so_that_workers_may_share_a_run(pytester: pytest.Pytester, run: Path) -> None:
    def state() -> dict[str, tuple[int, str]]:
        files = [path for path in sorted(run.rglob("*")) if path.is_file()]
        return {str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}

    before = state()
    replay(pytester, "--rolltape", run).assert_outcomes(passed=2)
    assert state() == before


def test_loading_the_plugin_imports_neither_arrow_nor_anything_of_ours_but_the_plugin() -> None:
    program = "import sys, rolltape.replay.pytest_plugin; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("rolltape.")}
    assert ours == {
        "rolltape.replay",
        "rolltape.replay.listing",
        "rolltape.replay.listing.folders",
        "rolltape.replay.pytest_plugin",
    }
    assert {"pyarrow", "numpy", "duckdb", "rich", "typer"}.isdisjoint(done.stdout.split())


# -- a converter that was changed


def shift_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the converter put every mask one token too early."""
    made = converting._Rows._sample

    def make(self: Any, i: int, branch: int, nodes: Any, arrays: Any) -> Sample:
        ids, mask, values = arrays
        sample: Sample = made(self, i, branch, nodes, (ids, np.roll(mask, -1), values))
        return sample

    monkeypatch.setattr(converting._Rows, "_sample", make)


def halve_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the converter give half of every reward."""
    reward = converting._Rows._reward
    monkeypatch.setattr(converting._Rows, "_reward", lambda self, i: reward(self, i) / 2)


def test_a_mask_that_is_off_by_one_is_named_to_the_token(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift_masks(monkeypatch)
    said = failure(replay(pytester, "--rolltape", run))
    place = (
        "run, step 0 of train, writer main, its Samples: group 0, trace a0, branch 0: loss_mask at position 1 (token 4)"
    )
    assert f" {place}: expected 1, now 0 4 of 5 Samples differ (loss_mask 4). " in said
    assert "rolltape approve run" in said
    assert "FAILED run::train-1" in said


def test_a_halved_reward_is_named_with_both_values(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halve_rewards(monkeypatch)
    said = failure(replay(pytester, "--rolltape", run))
    assert (
        "step 0 of train, writer main, its Samples: group 0, trace a0, branch 0: reward: expected 1.0, now 0.5" in said
    )


def test_branches_in_another_order_are_named(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = branches.sibling_branches
    monkeypatch.setattr(converting, "sibling_branches", lambda *args: made(*args)[::-1])
    said = failure(replay(pytester, "--rolltape", run))
    assert 'group 1, trace d0, branch 0: order at position 3: expected {"branch":0,"trace":"d0"}, now ' in said
    assert '{"branch":1,"trace":"d0"}' in said


def test_a_trace_that_is_dropped_now_is_named_with_the_reason(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converting, "sibling_branches", lambda *_: [])
    said = failure(replay(pytester, "--rolltape", run))
    assert "group 1, trace c0, branch 0: sample: expected a Sample, now nothing" in said
    assert "Now the trace is dropped: incomplete_group, group 1 has 1 of 2 sound rollouts (1 empty)." in said


def test_a_change_of_what_the_trainer_was_handed_is_told_from_one_of_conversion(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["rolltape.replay.replayed"]
    done = module.finish
    monkeypatch.setattr(module, "finish", lambda *args: done(*args)[::-1])
    said = failure(replay(pytester, "--rolltape", run))
    assert (
        "step 0 of train, writer main, the batch handed over: group 0, trace a0, branch 0: order at position 0" in said
    )


def test_a_batch_that_can_not_be_made_any_more_says_why(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["rolltape.replay.replayed"]
    done = module.finish
    monkeypatch.setattr(module, "finish", lambda groups, *rest: done(groups[1:], *rest))
    assert "the step's batch and its converted samples differ: batch only [0, 1]" in failure(
        replay(pytester, "--rolltape", run)
    )


def test_without_approved_samples_a_difference_says_how_to_get_its_place(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = record(pytester.path / "run")
    halve_rewards(monkeypatch)
    said = failure(replay(pytester, "--rolltape", root))
    assert "run, step 0 of train, writer main: its Samples are no longer those of the live run (sha256 " in said
    assert "For the exact place: `rolltape approve run` on the last revision that passes" in said


def test_a_converter_of_a_newer_version_that_makes_the_same_samples_passes(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(pytester.path / "unapproved")
    for module in (options, sys.modules["rolltape.replay.digest"]):
        monkeypatch.setattr(module, "CONVERTER_VERSION", 2)
    assert digest([]) != digest([], 1)
    result = replay(pytester, "--rolltape", run, "--rolltape", "unapproved")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*version 2 of the converter*"])


def test_a_child_process_with_a_changed_converter_fails_at_the_exact_place(
    pytester: pytest.Pytester, run: Path
) -> None:
    pytester.makeconftest(
        """
        import sys
        import rolltape.replay.convert

        module = sys.modules["rolltape.replay.convert"]
        reward = module._Rows._reward
        module._Rows._reward = lambda self, i: reward(self, i) / 2
        """
    )
    said = failure(pytester.runpytest_subprocess(*QUIET, "--rolltape", run))
    assert "FAILED run::train-0" in said
    assert "group 0, trace a0, branch 0: reward: expected 1.0, now 0.5" in said


# -- runs that cannot be replayed


def test_a_damaged_file_fails_its_step_and_no_other(pytester: pytest.Pytester, run: Path) -> None:
    path = RunPaths(run).parquet(Part("train", 0, 0, "main"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    result = replay(pytester, "--rolltape", run)
    result.assert_outcomes(passed=1, failed=1)
    assert f"{path.relative_to(pytester.path)}: " in failure(result)
    assert "committed; restore the file from a copy." in failure(result)
    assert "exception occurred" not in failure(result)


def test_a_damaged_commit_fails_its_step_and_no_other(pytester: pytest.Pytester, run: Path) -> None:
    path = RunPaths(run).commit(Part("train", 1, 0, "main"))
    path.write_bytes(path.read_bytes()[:100])
    result = replay(pytester, "--rolltape", run)
    result.assert_outcomes(passed=1, failed=1)
    assert f"{path.relative_to(pytester.path)}: no readable commit" in failure(result)


def test_a_run_that_cannot_be_opened_fails_and_lets_other_tests_run(pytester: pytest.Pytester, run: Path) -> None:
    (run / "run.json").unlink()
    pytester.makepyfile("def test_one(): pass")
    result = replay(pytester, "--rolltape", run, ".")
    result.assert_outcomes(passed=1, failed=1)
    assert "run holds no run.json, so it is no recorded run" in failure(result)


def test_a_step_that_is_missing_fails(pytester: pytest.Pytester) -> None:
    root = record(pytester.path / "run", steps=4)
    approve(open_run(root), steps=[3])
    for step in (1, 3):
        RunPaths(root).commit(Part("train", step, 0, "main")).unlink()
    result = replay(pytester, "--rolltape", root)
    result.assert_outcomes(passed=2, failed=2)
    assert "run, step 1 of train: not recorded, but later steps are" in failure(result)
    assert "run, step 3 of train: its Samples were approved, but the recording holds it no more" in failure(result)


def test_a_newer_schema_fails_with_what_to_do(pytester: pytest.Pytester) -> None:
    put_run(pytester.path / "run", schema="2.0")
    result = replay(pytester, "--rolltape", "run")
    result.assert_outcomes(failed=1)
    assert "run/run.json: schema version 2.0 was found, this rolltape knows 1.0; install a newer" in failure(result)


def test_a_run_without_steps_fails(pytester: pytest.Pytester) -> None:
    root = put_run(pytester.path / "run")
    assert "run holds no step, so nothing is replayed" in failure(replay(pytester, "--rolltape", root))


@pytest.mark.parametrize(
    ("name", "why"), [("empty", "holds no recorded run"), ("missing", "does not exist"), ("file", "is no folder")]
)
def test_a_folder_without_a_run_is_a_usage_error(pytester: pytest.Pytester, name: str, why: str) -> None:
    (pytester.path / "empty").mkdir()
    (pytester.path / "file").write_text("")
    result = replay(pytester, "--rolltape", name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: --rolltape (or rolltape_runs): {pytester.path / name} {why}; give the folder*"]
    )
    pytester.makeini(f"[pytest]\nrolltape_runs = {name}")
    assert replay(pytester).ret == pytest.ExitCode.USAGE_ERROR


def changed(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a file of expected Samples again with other rows, as rolltape would."""
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def other(name: str) -> Callable[[pa.Table], pa.Table]:
    """Another last entry in the list `name` of the first row."""

    def change(table: pa.Table) -> pa.Table:
        lists = table.column(name).to_pylist()
        lists[0][-1] = 1 - lists[0][-1]
        i = table.schema.get_field_index(name)
        return table.set_column(i, name, pa.array(lists, table.schema.field(i).type))

    return change


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: changed(path, other("loss_mask")), "its Samples do not fit its digest"),
    (lambda path: changed(path, other("tokens")), "its Samples do not fit its digest"),
    (lambda path: changed(path, lambda table: table.slice(0, len(table) - 1)), "its Samples do not fit its digest"),
    (lambda path: changed(path, lambda table: table.slice(1)), "its rows are no batch of Samples"),
    (lambda path: changed(path, lambda table: table.slice(len(table) // 2)), "its Samples do not fit its digest"),
    (lambda path: changed(path, lambda table: table.drop_columns("loss_mask")), "it has no column 'loss_mask'"),
    (lambda path: path.write_bytes(path.read_bytes()[:100]), "Parquet magic bytes not found"),
    (lambda path: pq.write_table(pq.read_table(path).replace_schema_metadata(), path), "which format it has"),
    (lambda path: path.write_bytes(flipped(path.read_bytes())), "not as it was approved"),
]


def flipped(raw: bytes) -> bytes:
    return raw[:100] + bytes([raw[100] ^ 1]) + raw[101:]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
@pytest.mark.parametrize("kept", [True, False])
def test_expected_samples_that_are_not_as_they_were_approved_fail_with_what_to_do_though_nothing_else_changed(
    pytester: pytest.Pytester, run: Path, damage: Callable[[Path], Any], why: str, kept: bool
) -> None:
    paths = RunPaths(run)
    path = paths.expected(Part("train", 0, 0, "main"))
    if not kept:  # as an earlier rolltape approved it
        paths.sums.unlink()
    damage(path)
    result = replay(pytester, "--rolltape", run)
    result.assert_outcomes(passed=1, failed=1)
    said = failure(result)
    assert f"{path.relative_to(pytester.path)}: not as it was approved (" in said
    assert ("its sha256 is " if kept else why) in said
    assert "restore it from version control, or if the change is meant: `rolltape approve run`." in said
    assert "changed" in {approval.state for approval in approve(open_run(run), write=False)}
    approve(open_run(run))
    replay(pytester, "--rolltape", run).assert_outcomes(passed=2)


def test_expected_samples_that_are_gone_fail_though_the_live_run_took_a_digest(
    pytester: pytest.Pytester, run: Path
) -> None:
    path = RunPaths(run).expected(Part("train", 0, 0, "main"))
    path.unlink()
    result = replay(pytester, "--rolltape", run)
    result.assert_outcomes(passed=1, failed=1)
    assert f"{path.relative_to(pytester.path)}: not as it was approved (the file is gone); restore it" in failure(
        result
    )
    RunPaths(run).commit(Part("train", 1, 0, "main")).unlink()
    RunPaths(run).expected(Part("train", 1, 0, "main")).unlink()
    said = failure(replay(pytester, "--rolltape", run))
    assert "run, step 1 of train: its Samples were approved, but the recording holds it no more" in said


def test_runs_that_an_earlier_rolltape_approved_are_replayed_as_they_are(
    pytester: pytest.Pytester, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunPaths(run).sums.unlink()
    replay(pytester, "--rolltape", run).assert_outcomes(passed=2)
    halve_rewards(monkeypatch)
    assert "reward: expected 1.0, now 0.5" in failure(replay(pytester, "--rolltape", run))


@pytest.mark.parametrize("text", [b"\xff", b"no sum\n", b"0" * 64 + b"  train/x.parquet\n"])
def test_damaged_sums_of_expected_samples_fail_with_what_to_do(
    pytester: pytest.Pytester, run: Path, text: bytes
) -> None:
    RunPaths(run).sums.write_bytes(text)
    assert "run/expected/SHA256SUMS: not as it was approved (" in failure(replay(pytester, "--rolltape", run))


def test_expected_samples_of_another_recording_fail(pytester: pytest.Pytester, run: Path) -> None:
    other = RunPaths(record(pytester.path / "other", steps=1))
    put_step(pytester.path / "third", 0, [chain("z", 0)])
    third = RunPaths(put_run(pytester.path / "third"))
    assert other.run.exists()
    expected = third.expected(Part("train", 0, 0, "main"))
    expected.parent.mkdir(parents=True)
    expected.write_bytes(RunPaths(run).expected(Part("train", 0, 0, "main")).read_bytes())
    said = failure(replay(pytester, "--rolltape", "third"))
    assert "the approved Samples are those of another recording of this step" in said


def test_an_import_needs_approval_and_an_evaluation_may_wait_for_it(pytester: pytest.Pytester) -> None:
    root = put_run(pytester.path / "run")
    put_step(root, 0, [chain("a", 0)], digest_converted=None, digest_handed=None)
    put_step(root, 0, [chain("b", 0)], split="eval", digest_converted=None, digest_handed=None)
    result = replay(pytester, "--rolltape", root, "-rs")
    result.assert_outcomes(failed=1, skipped=1)
    assert failure(result).count("nothing to compare with. The recording holds no digest of its Samples") >= 2
    approve(open_run(root))
    replay(pytester, "--rolltape", root).assert_outcomes(passed=2)


def test_an_approved_evaluation_is_compared_rollout_by_rollout(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = put_run(pytester.path / "run")
    failed = trace(said(None, [1]), reply(0, [2], [3]), id="c", idx=1, errors=["ToolError: gone"])
    put_step(root, 7, [chain("a", 0), forked("b", 0), failed], split="eval-math", options=SIBLINGS)
    approve(open_run(root))
    replay(pytester, "--rolltape", root).assert_outcomes(passed=1)
    shift_masks(monkeypatch)
    text = failure(replay(pytester, "--rolltape", root))
    assert (
        "step 7 of eval-math, writer main, the Samples of its rollouts: group 0, trace a, branch 0: loss_mask" in text
    )
    assert "2 of 4 Samples differ (loss_mask 2)" in text


# -- tests that people write


def test_a_test_that_takes_the_fixture_runs_once_for_each_run(pytester: pytest.Pytester, run: Path) -> None:
    record(pytester.path / "other", steps=1)
    pytester.makepyfile(
        """
        from rolltape.replay.replayed import replay

        def test_no_tool_output_is_trained(rolltape_run):
            for part in replay(rolltape_run):
                for sample in part.samples:
                    response = sample.tokens[-sample.response_length:]
                    trained = {t for t, m in zip(response, sample.loss_mask) if m}
                    assert not trained & {6, 11}
        """
    )
    result = replay(pytester, "--rolltape", run, "--rolltape", "other", ".", "-v", "-k", "tool_output")
    result.assert_outcomes(passed=2, deselected=3)
    result.stdout.fnmatch_lines(["*test_no_tool_output_is_trained[[]run[]] PASSED*"])


def test_without_a_run_such_a_test_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(rolltape_run): raise AssertionError")
    result = replay(pytester, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no recorded run: give --rolltape DIR, or set rolltape_runs*"])


def test_the_fixture_fails_with_a_sentence_where_the_run_cannot_be_opened(pytester: pytest.Pytester, run: Path) -> None:
    (run / "run.json").write_text("{")
    pytester.makepyfile("def test_it(rolltape_run): pass")
    result = replay(pytester, "--rolltape", run, ".", "-k", "test_it")
    result.assert_outcomes(errors=1, deselected=1)
    assert "run/run.json: no readable JSON" in failure(result)
