"""Re-scoring of whole runs: retries, evaluations, other releases, resuming, stores, and what the command prints."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from record_build import Record, checked, dispositions, recorded, records_of, trace
from rescore_build import (
    DEMO,
    OK,
    PROBE,
    ROLLTAPE,
    SOMETIMES,
    cells,
    demo_config,
    golf,
    golf_run,
    group_sums,
    probes,
    record_run,
    rewards,
    taskset,
    totals,
)

from rolltape.record.recorder import Recorder
from rolltape.record.rescoring.rescore import RescoreOptions, rescore
from rolltape.replay.cli import main
from rolltape.replay.run import open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema import Context, Group, Outcome, Step
from rolltape.schema.errors import BadInput, RunConflict

# -- tries that do not count, evaluations, other releases, resuming, the demo


def test_a_try_that_was_run_again_is_scored_for_itself_and_no_member_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = OK + "    @vf.group_reward\n    async def size(self, traces):\n        return [len(traces)] * len(traces)\n"
    recorder = Recorder.open(tmp_path / "run", model="m")
    again, cut = trace("again"), trace("cut", is_completed=False, rewards={})
    for i, record in enumerate((trace("a"), trace("b"), again, cut)):
        recorder.started("train", 0)
        recorder.add(record, Context(group_index=0, rollout_index=min(i, 1), try_number=int(i == 1)))
    group = Group.from_records([trace("a"), trace("b")], expected_size=2, group_index=0)
    fates = {"a": "emitted", "b": "emitted", "again": "retried", "cut": "cancelled"}
    outcomes = [Outcome(trace_id=t, disposition=d) for t, d in fates.items()]
    recorder.commit_now("train", 0, groups=[group], outcomes=outcomes, record=Step())
    recorder.close()
    result = rescore(tmp_path / "run", probes(tmp_path, monkeypatch, body), tmp_path / "new")
    found = rewards(tmp_path / "new")
    assert found["a"] == found["b"] == {"ok": 2.0, "size": 2.0}
    assert (found["again"], found["cut"]) == ({"ok": 2.0, "size": None}, {})
    assert dispositions(tmp_path / "new") == fates
    assert group_sums(tmp_path / "new") == [{"ok": 4.0, "size": 4.0}]
    assert result.notes["traces not scored: the rollout was cut short"] == 1
    checked(tmp_path / "new")


def test_an_evaluation_is_scored_and_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.open(tmp_path / "run", model="m")
    recorder.started("eval", 0, eval_name="held-out")
    recorder.add(trace("a", rewards={"ok": 0.0}), Context(split="eval", eval_name="held-out", group_index=0))
    group = Group.from_records([trace("a")], expected_size=1, group_index=0, split="eval", eval_name="held-out")
    outcomes = [Outcome(trace_id="a", disposition="eval")]
    step = Step(split="eval", eval_name="held-out")
    recorder.commit_now("eval", 0, groups=[group], outcomes=outcomes, record=step, eval_name="held-out")
    recorder.close()
    config = probes(tmp_path, monkeypatch, OK)
    rescore(tmp_path / "run", config, tmp_path / "new", RescoreOptions(split="eval-held-out"))
    [commit] = open_run(tmp_path / "new").all_commits
    assert (commit.part.split, commit.step.eval_name, commit.groups[0].rewards["ok"].sum) == (
        "eval-held-out",
        "held-out",
        2,
    )
    assert dispositions(tmp_path / "new") == {"a": "eval"}
    checked(tmp_path / "new")


def test_a_new_run_can_lie_in_an_object_store(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = golf_run(tmp_path / "run"), taskset(tmp_path, monkeypatch, golf(fastest=2.0), "CodeGolfTask")
    result = rescore(run, config, f"{bucket}/new")
    assert result.changes is not None
    assert result.changes.counts["changed"] == 3
    assert [g.rewards["fastest"].sum for g in open_run(f"{bucket}/new").groups()] == [2.0, 2.0, 2.0]
    more = rescore(f"{bucket}/new", config, f"{bucket}/again")
    assert more.changes is not None
    assert more.changes.counts["changed"] == 0


@pytest.mark.parametrize("release", ["0.2.1", "0.3.0", "0.4.0"])
def test_traces_of_later_releases_are_scored_and_keep_their_own_shape(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [r for place, r in recorded(release) if "written_by" not in place and "single_turn" in place]
    run = record_run(tmp_path / "run", [[[copy.deepcopy(r)] for r in records]])
    body = """
    @vf.metric
    async def reply_chars(self, trace):
        return len(trace.last_reply)

    @vf.reward(weight=4.0)
    async def ok(self, trace):
        assert trace.num_turns and trace.nodes[-1].finish_reason, "the trace says why its last turn ended"
        return 1.0
"""
    data = "class ProbeData(vf.TaskData):\n    kind: str\n\n\nclass ProbeTask"
    source = (PROBE.replace("vf.TaskData", "ProbeData") + body).replace("class ProbeTask", data)
    result = rescore(run, taskset(tmp_path, monkeypatch, source, "ProbeTask"), tmp_path / "new")
    assert result.failures == []
    for record in records:
        again = records_of(tmp_path / "new")[record["id"]]
        pair = isinstance(record["rewards"]["ok"], dict)
        assert again["rewards"] == {"ok": {"score": 1.0, "weight": 4.0} if pair else 4.0}
        assert again["metrics"]["reply_chars"] == record["metrics"]["reply_chars"]
        changed = {key for key in record if again[key] != record[key]}
        assert changed <= {"rewards", "timing"}
        assert list(again) == list(record)
    assert verify(open_run(tmp_path / "new")).errors == []


def test_the_demo_re_scored_by_its_own_taskset_is_the_batch_that_was_trained(tmp_path: Path) -> None:
    result = rescore(DEMO, demo_config(tmp_path), tmp_path / "new")
    then, now = open_run(DEMO), open_run(tmp_path / "new")
    for old, new in zip(then.steps(), now.steps(), strict=True):
        assert (old.batch, old.digest_converted, old.digest_handed) == (
            new.batch,
            new.digest_converted,
            new.digest_handed,
        )
    assert [g.rewards for g in then.groups()] == [g.rewards for g in now.groups()]
    assert result.changes is not None
    assert result.changes.counts["changed"] == 0
    assert result.changes.counts["untouched"] == 4
    columns = set(then.table().column_names) - {"run", "scores", "weights", "scoring_start", "scoring_end"}
    old_rows, new_rows = then.table(columns=sorted(columns)), now.table(columns=sorted(columns))
    assert old_rows.combine_chunks().equals(new_rows.combine_chunks())
    checked(tmp_path / "new")


def test_sql_joins_both_runs_and_the_scores_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = golf_run(tmp_path / "run")
    rescore(run, taskset(tmp_path, monkeypatch, golf(fastest=2.0), "CodeGolfTask"), tmp_path / "new")
    rows = duckdb.sql(
        f"""select o.reward, n.reward, b.old, b.new from '{run}/traces/*/*.parquet' o
        join '{tmp_path}/new/traces/*/*.parquet' n using (trace_id)
        join '{tmp_path}/new/rescored/*/*.parquet' b using (trace_id) where b.kind = 'total'"""
    ).fetchall()
    assert len(rows) == 12
    assert all((old, new) == (then, now) for old, new, then, now in rows)
    assert math.fsum(new - old for old, new, *_ in rows) == 4.5


def test_a_re_scoring_that_was_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward(weight=2.0)
    async def ok(self, trace):
        import pathlib
        with pathlib.Path(__file__).with_suffix(".log").open("a") as log:
            log.write(trace.id + "\\n")
        if trace.id.startswith("2") and not pathlib.Path(__file__).with_suffix(".go").exists():
            await asyncio.sleep(60)
        return 0.5
"""
    steps = [[[trace(f"{step}-{i}")] for i in range(3)] for step in range(4)]
    run, config = record_run(tmp_path / "run", steps), probes(tmp_path, monkeypatch, body)
    log = tmp_path / "packages" / f"{config.stem}.log"
    command = [*ROLLTAPE, "rescore", str(run), "--config", str(config), "--out", str(tmp_path / "new")]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (log.exists() and "2-0" in log.read_text()):
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert [c.part.step for c in open_run(tmp_path / "new").all_commits] == [0, 1]

    with pytest.raises(RunConflict, match="--resume"):
        rescore(run, config, tmp_path / "new")
    log.write_text("")
    log.with_suffix(".go").touch()
    result = rescore(run, config, tmp_path / "new", RescoreOptions(resume=True))
    assert sorted(set(log.read_text().split())) == [f"{step}-{i}" for step in (2, 3) for i in range(3)]
    assert (result.steps, result.resumed) == (2, 2)
    assert result.changes is not None
    assert result.changes.counts["traces"] == 12
    assert set(totals(tmp_path / "new").values()) == {1.0}
    checked(tmp_path / "new")


def test_going_on_takes_no_number_anew_where_the_attempt_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = record_run(tmp_path / "run", [[[trace("a")]]]), probes(tmp_path, monkeypatch, OK)
    rescore(run, config, tmp_path / "new")
    (tmp_path / "new/attempts/0.json").unlink()
    rescore(run, config, tmp_path / "new", RescoreOptions(resume=True))
    assert open_run(tmp_path / "new").attempts == {}
    assert [f.code for f in verify(open_run(tmp_path / "new")).errors] == ["attempt"]


def test_another_config_or_another_run_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]]])
    config = probes(tmp_path, monkeypatch, OK)
    rescore(run, config, tmp_path / "new")
    with pytest.raises(RunConflict, match="something else"):
        rescore(run, probes(tmp_path, monkeypatch, OK), tmp_path / "new", RescoreOptions(resume=True))
    other = record_run(tmp_path / "other", [[[trace("b")]]])
    for out in (tmp_path / "new", other):
        with pytest.raises((RunConflict, BadInput), match=r"no re-scoring of|is the run itself"):
            rescore(other, config, out, RescoreOptions(resume=True))


def test_only_the_steps_and_the_split_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record_run(tmp_path / "run", [[[trace("a")]], [[trace("b")]]])
    config = probes(tmp_path, monkeypatch, OK)
    rescore(run, config, tmp_path / "new", RescoreOptions(steps=(1,), split="train"))
    assert totals(tmp_path / "new") == {"b": 2.0}
    with pytest.raises(BadInput, match="no step 7 to re-score; recorded: steps 0–1"):
        rescore(run, config, tmp_path / "seven", RescoreOptions(steps=(7,)))
    with pytest.raises(BadInput, match="no split 'eval' was recorded; recorded are 'train'"):
        rescore(run, config, tmp_path / "eval", RescoreOptions(split="eval"))


def test_no_more_traces_at_once_than_asked_for_and_groups_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
    now, most = 0, 0

    @vf.reward
    async def ok(self, trace):
        cls = type(self)
        cls.now += 1
        cls.most = max(cls.most, cls.now)
        await asyncio.sleep(0.01)
        cls.now -= 1
        return float(cls.most)

    @vf.group_reward
    async def pair(self, traces):
        return [float(len(traces))] * len(traces)
"""
    groups: list[list[Record]] = [[trace(f"{g}-{i}") for i in range(2)] for g in range(6)]
    run = record_run(tmp_path / "run", [groups])
    rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new", RescoreOptions(concurrency=4))
    found = rewards(tmp_path / "new").values()
    assert max(r["ok"] or 0 for r in found) == 4
    assert {r["pair"] for r in found} == {2.0}


def test_secrets_that_scoring_puts_on_a_trace_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    @vf.reward
    async def ok(self, trace):
        trace.info["api_key"] = "sk-proj-abcdefghijklmnopqrstuvwx123456"
        return 1.0
"""
    body += """
    @vf.reward
    async def judged(self, trace):
        if trace.id == "a":
            raise ValueError("401 for Bearer abcdefghijklmnop1234567890")
        return 1.0
"""
    run = record_run(tmp_path / "run", [[[trace("a")], [trace("b")]]])
    result = rescore(run, probes(tmp_path, monkeypatch, body), tmp_path / "new")
    record = records_of(tmp_path / "new")["a"]
    assert record["info"] == {"api_key": "***"}
    for told in (result.failures[0]["error"], record["errors"][0]["message"]):
        assert told.endswith("ValueError: 401 for Bearer ***")
    beside = pq.read_table(tmp_path / "new" / "rescored" / "train").column("reason").to_pylist()
    assert [reason for reason in beside if reason] == ["ValueError: 401 for Bearer ***", "without judged"]


def test_the_command_prints_tables_or_json_and_exits_1_where_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path / "run", [[[trace("a"), trace("b")], [trace("c")]]])
    config = probes(tmp_path, monkeypatch, SOMETIMES)

    def command(source: Path, out: str, *more: str) -> tuple[int, str, str]:
        arguments = ["rolltape", "rescore", str(source), "--config", str(config), "--out", str(tmp_path / out), *more]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    code, shown, _ = command(run, "one")
    assert code == 1
    assert "not scored: trace b (step 0), sometimes: ValueError: no verdict" in shown
    [head] = [line for line in shown.splitlines() if line.startswith("name")]
    columns = ["name", "weight", "old mean", "n old", "new mean", "n new", "traces", "changed", "new scores"]
    assert [cell.strip() for cell in head.split("┃")] == columns
    rows = {row[0]: row[3:] for row in cells(shown) if len(row) == len(columns)}
    assert rows["total reward"] == ["3", "2.5", "2", "3", "3", "1 failed, 2 scored"]
    assert rows["ok"] == ["3", "2", "2", "3", "3", "3 scored"]
    assert rows["sometimes"] == ["0", "0.5", "2", "3", "2", "1 failed, 2 scored"]
    code, told, _ = command(run, "two", "--json")
    said = json.loads(told)
    assert (code, said["counts"]["failed"]) == (1, 1)
    assert [n["name"] for n in said["names"] if n["kind"] == "reward"] == ["ok", "sometimes"]
    code, _, refused = command(tmp_path / "nowhere", "three")
    assert code == 2
    assert "does not exist" in refused
