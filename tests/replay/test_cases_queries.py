"""Known ways to get wrong answers from SQL over recorded files: what the views say."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from replay_build import Record, put_run, put_step, reply, said, trace, turn

from rolltape.replay import ConvertOptions, open_run
from rolltape.replay.sql import VIEWS, connect
from rolltape.schema import BadInput, Context, Damaged, RunNotFound, Turn, encode
from rolltape.schema.paths import Part, RunPaths

SIBLINGS = ConvertOptions(branch_policy="siblings")


def ask(root: Path, query: str, **selection: Any) -> list[tuple[Any, ...]]:
    return open_run(root).sql(query, **selection).fetchall()


def recorded(root: Path, *steps: list[Record], **rest: Any) -> Path:
    """A run whose steps hold these traces."""
    put_run(root)
    for step, records in enumerate(steps):
        put_step(root, step, records, first=1000 * step, **rest)
    return root


# -- many files


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_reward_that_only_later_files_have_is_summed_whatever_file_comes_first(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    steps = [turn("a", rewards={"x": 1.0})], [turn("b", rewards={"x": 1.0, "y": 0.25})]
    root = recorded(tmp_path, *(steps[i] for i in order))
    sums = ask(root, "SELECT name, sum(value), count(*) FROM rewards GROUP BY name ORDER BY name")
    assert sums == [("x", 2.0, 2), ("y", 0.25, 1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_files_without_errors_are_read_with_files_that_have_some(tmp_path: Path, order: tuple[int, int]) -> None:
    steps = [turn("a")], [turn("b", reward=None, errors=["ToolError: gone"])]
    root = recorded(tmp_path, *(steps[i] for i in order))
    assert ask(root, "SELECT trace_id, type, message FROM errors") == [("b", "ToolError", "gone")]
    assert ask(root, "SELECT trace_id, len(error_types) FROM traces ORDER BY 1") == [("a", 0), ("b", 1)]


def test_steps_come_in_the_order_of_their_numbers_not_of_their_files_names(tmp_path: Path) -> None:
    put_run(tmp_path)
    for step in (10, 2, 1):
        put_step(tmp_path, step, [turn(f"t{step}")], first=step)
    assert ask(tmp_path, "SELECT step FROM traces") == [(1,), (2,), (10,)]
    assert ask(tmp_path, "SELECT step FROM steps ORDER BY step") == [(1,), (2,), (10,)]


def test_what_is_still_being_written_or_was_left_behind_is_never_read(tmp_path: Path) -> None:
    root = recorded(tmp_path, [turn("a")])
    folder = root / "traces" / "train"
    (folder / ".00000001.0.main.parquet.77.abcd.tmp").write_bytes(b"PAR1")
    (folder / "00000001.0.main.parquet").write_bytes(b"PAR1 cut short")
    (folder / "notes.parquet").write_bytes(b"")
    assert ask(root, "SELECT count(*) FROM traces") == [(1,)]


@pytest.mark.parametrize("cut", [0, 4, 200], ids=["nothing", "only magic", "half"])
def test_a_file_that_was_cut_refuses_the_query_and_rows_of_other_steps_are_read(tmp_path: Path, cut: int) -> None:
    root = recorded(tmp_path, *([turn(f"t{step}")] for step in range(10)))
    path = RunPaths(root).parquet(Part("train", 3, 0, "main"))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(Damaged, match="00000003"):
        ask(root, "SELECT count(*) FROM traces")
    whole = [step for step in range(10) if step != 3]
    assert open_run(root).table("train", whole, columns=["trace_id"]).num_rows == 9


def test_a_run_without_steps_answers_every_view_with_its_columns_and_no_row(tmp_path: Path) -> None:
    put_run(tmp_path)
    for name, view in VIEWS.items():
        answer = open_run(tmp_path).sql(f"SELECT * FROM {name}")
        assert answer.columns == [column.name for column in view.columns]
        assert answer.fetchall() == []
    assert ask(tmp_path, "SELECT count(*), avg(reward), max(num_tokens) FROM traces") == [(0, None, None)]


def test_a_folder_that_is_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="does not exist"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(RunNotFound, match=r"holds no run\.json"):
        open_run(tmp_path)


def test_folders_named_like_columns_change_no_value(tmp_path: Path) -> None:
    root = recorded(tmp_path / "step=77" / "group_index=9" / "run=other", [turn("a"), turn("b", idx=1)])
    assert ask(root, "SELECT step, task_idx, run FROM traces ORDER BY trace_id") == [
        (0, 0, "run=other"),
        (0, 1, "run=other"),
    ]


ODD = ("judge.score", "a/b", "x y", 'quo"te', "it's", "größe", "$.a", "a]b", "", "select")


@pytest.mark.parametrize("view", ["rewards", "metrics"])
def test_names_of_any_characters_are_found(tmp_path: Path, view: str) -> None:
    values = {name: float(i + 1) for i, name in enumerate(ODD)}
    root = recorded(tmp_path, [turn("a", **{view: values})])
    assert dict(ask(root, f"SELECT name, value FROM {view}")) == values
    for name, value in values.items():
        found = open_run(root).sql(f"SELECT value FROM {view} WHERE name = $name", parameters={"name": name}).fetchall()
        assert found == [(value,)]
    [wide] = open_run(root).sql(f"PIVOT (SELECT name, value FROM {view}) ON name USING sum(value)").fetchall()
    assert sorted(wide) == sorted(values.values())


def test_several_readers_may_ask_at_once_and_none_writes(tmp_path: Path) -> None:
    root = recorded(tmp_path / "run", [turn("a"), turn("b")])
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    program = (
        "import sys; from rolltape.replay import open_run\n"
        "answer = open_run(sys.argv[1]).sql('SELECT count(*) FROM traces')\n"
        "input(); print(answer.fetchall())"
    )
    command = [sys.executable, "-c", program, str(root)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    mine = [open_run(root).sql("SELECT count(*) FROM traces") for _ in range(2)]  # open while the other is
    assert other.communicate("\n")[0].strip() == "[(2,)]"
    assert [answer.fetchall() for answer in mine] == [[(2,)]] * 2
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before


def test_queries_of_tokens_read_no_text_and_fit_into_little_memory(tmp_path: Path) -> None:
    def long(i: int) -> Record:
        sampled = reply(0, [2], range(3, 20_003), [-1.0 - (n == 7) * (i + 1) for n in range(20_000)])
        return trace(said(None, [1], f"{i}" * 8_000_000), sampled, id=f"t{i}", idx=i)

    put_run(tmp_path)
    for step in range(6):
        put_step(tmp_path, step, [long(4 * step + i) for i in range(4)], first=4 * step)
    connection = connect(open_run(tmp_path), locked=False)
    connection.execute("SET memory_limit = '100MB'; SET threads = 1; SET max_temp_directory_size = '0B'")
    lowest = "SELECT trace_id, position, logprob FROM tokens ORDER BY logprob LIMIT 2"
    assert connection.execute(lowest).fetchall() == [("t23", 9, -25.0), ("t22", 9, -24.0)]
    assert connection.execute("SELECT count(*) FROM tokens").fetchall() == [(24 * 20_002,)]


# -- what is not there is not 0


def test_the_best_of_rewards_is_a_number_and_nan_and_null_are_counted_apart(tmp_path: Path) -> None:
    rewards = {"a": 0.2, "b": 0.9, "c": math.nan, "d": None}
    root = recorded(tmp_path, [turn(id, rewards={"ok": value}) for id, value in rewards.items()])
    finite = "SELECT max(reward), avg(reward), count(*) FROM traces WHERE isfinite(reward)"
    assert ask(root, finite) == [(0.9, pytest.approx(0.55), 2)]
    apart = "SELECT count(*) FILTER (isnan(reward)), count(*) FILTER (reward IS NULL), count(*) FROM traces"
    assert ask(root, apart) == [(1, 1, 4)]
    best = "SELECT trace_id FROM traces WHERE isfinite(reward) ORDER BY reward DESC LIMIT 1"
    assert ask(root, best) == [("b",)]
    assert "isfinite" in VIEWS["rewards"].row


def test_means_over_scored_traces_and_over_all_are_told_apart(tmp_path: Path) -> None:
    scored = [turn("a", rewards={"solved": 1.0}), turn("b", rewards={"solved": 0.0})]
    failed = [turn(id, rewards={}, errors=["ToolError: gone"]) for id in "cd"]
    root = recorded(tmp_path, [*scored, *failed])
    query = """
        SELECT avg(value), sum(coalesce(value, 0)) / count(*), count(*) - count(value)
        FROM traces LEFT JOIN rewards USING (trace_id)
    """
    assert ask(root, query) == [(0.5, 0.25, 2)]


def test_a_metric_is_averaged_over_those_that_measured_it(tmp_path: Path) -> None:
    measured = [turn(f"m{v}", metrics={"turns_to_fix": float(v)}) for v in (4, 6)]
    root = recorded(tmp_path, [*measured, *(turn(f"n{i}") for i in range(6))])
    assert ask(root, "SELECT avg(value), count(value) FROM metrics WHERE name = 'turns_to_fix'") == [(5.0, 2)]


def test_scores_weights_and_contributions_stand_apart_and_add_up(tmp_path: Path) -> None:
    weighted = {"a": {"score": 1.0, "weight": 0.2}, "b": {"score": 0.5, "weight": 1.0}}
    root = recorded(tmp_path, [turn("t", rewards=weighted)])
    assert ask(root, "SELECT name, score, weight, value FROM rewards ORDER BY name") == [
        ("a", 1.0, 0.2, 0.2),
        ("b", 0.5, 1.0, 0.5),
    ]
    [(total, reward)] = ask(root, "SELECT sum(value), any_value(reward) FROM rewards JOIN traces USING (trace_id)")
    assert total == pytest.approx(reward, abs=1e-9) == pytest.approx(0.7, abs=1e-9)


def test_a_trace_without_tokens_is_in_no_list_of_tokens_and_still_counted(tmp_path: Path) -> None:
    root = recorded(tmp_path, [turn("a"), trace(id="none", idx=1, errors=["HarnessError: exit 3"], rewards={})])
    assert ask(root, "SELECT count(DISTINCT trace_id) FROM tokens") == [(1,)]
    every = "SELECT trace_id, count(token_id) FROM traces LEFT JOIN tokens USING (trace_id) GROUP BY 1 ORDER BY 1"
    assert ask(root, every) == [("a", 6), ("none", 0)]
    assert "no row" in VIEWS["nodes"].row


def test_numbers_per_token_of_a_trace_without_token_ids_are_unknown_and_never_a_division_by_zero(
    tmp_path: Path,
) -> None:
    node = reply(0, [], [], text="words", prompt=12, completion=5)
    root = recorded(tmp_path, [trace(said(None, []), node, id="a")])
    assert ask(root, "SELECT num_tokens, list_avg(logprobs), reward / nullif(num_sampled, 0) FROM traces") == [
        (0, None, None)
    ]
    assert ask(root, "SELECT sampled_tokens, completion_tokens, prompt_tokens FROM turns") == [(0, 5, 12)]


# -- tokens


def test_the_least_likely_token_is_the_one_that_was_sampled(tmp_path: Path) -> None:
    root = recorded(tmp_path, [trace(reply(None, [10, 11, 12, 13], [20, 21, 22], [-0.1, -9.0, -0.2]), id="a")])
    query = "SELECT position, token_id, logprob FROM tokens ORDER BY logprob NULLS LAST LIMIT 1"
    assert ask(root, query) == [(5, 21, -9.0)]


def test_means_of_log_probs_leave_out_what_tools_said(tmp_path: Path) -> None:
    record = trace(
        said(None, [1]),
        reply(0, [], range(100, 105), [-1.0] * 5),
        said(1, range(200, 210), role="tool"),
        reply(2, [], range(300, 305), [-3.0] * 5),
        id="a",
    )
    root = recorded(tmp_path, [record])
    assert ask(root, "SELECT avg(logprob), count(logprob), count(*) FROM tokens") == [(-2.0, 10, 21)]
    assert ask(root, "SELECT list_avg(logprobs) FROM traces") == [(-2.0,)]


def test_stored_sequence_and_trained_tokens_are_three_numbers(tmp_path: Path) -> None:
    nodes = [said(None, range(1000))]
    for branch in range(3):
        nodes.append(reply(0, [], range(2000 + 10 * branch, 2010 + 10 * branch)))
        nodes.append(said(len(nodes) - 1, [], "go on", role="tool"))
    root = recorded(tmp_path, [trace(*nodes, id="a")], options=SIBLINGS)
    assert ask(root, "SELECT num_tokens, num_sampled FROM traces") == [(1030, 30)]
    assert ask(root, "SELECT sum(tokens), sum(trained_tokens), count(*) FROM samples") == [(3030, 30, 3)]


def test_a_rollout_of_three_branches_counts_once_in_sums_over_traces(tmp_path: Path) -> None:
    nodes = [said(None, [1])]
    for branch in range(3):
        nodes.append(said(0, [2], f"history {branch}"))
        nodes.append(reply(len(nodes) - 1, [3], [100 + branch]))
    records = [turn("x", reward=0.0), trace(*nodes, id="y")]
    root = recorded(tmp_path, [*records], options=SIBLINGS)
    assert ask(root, "SELECT sum(reward), avg(reward) FROM traces") == [(1.0, 0.5)]
    assert ask(root, "SELECT reward_sums['ok'], actual_size FROM groups") == [(1.0, 2)]
    assert ask(root, "SELECT count(*), count(DISTINCT trace_id) FROM samples") == [(4, 2)]


def test_turns_that_were_cut_by_length_can_be_counted(tmp_path: Path) -> None:
    nodes: list[Record] = []
    for i in range(30):
        nodes.append(said(len(nodes) - 1 if nodes else None, [1]))
        nodes.append(reply(len(nodes) - 1, [2], [100 + i], finish="length" if i >= 17 else "stop"))
    root = recorded(tmp_path, [trace(*nodes, id="a"), turn("b", idx=1)])
    query = "SELECT trace_id, count(*) FROM nodes WHERE finish_reason = 'length' GROUP BY 1"
    assert ask(root, query) == [("a", 13)]
    assert ask(root, "SELECT trace_id, is_truncated FROM traces ORDER BY 1") == [("a", True), ("b", False)]


def test_the_oldest_weight_version_of_a_trace_and_a_missing_one_can_be_asked_for(tmp_path: Path) -> None:
    def spoken(id: str, *versions: str | None) -> tuple[Record, Context]:
        nodes: list[Record] = []
        for i, _ in enumerate(versions):
            nodes.append(said(len(nodes) - 1 if nodes else None, [1]))
            nodes.append(reply(len(nodes) - 1, [2], [100 + i]))
        turns = [Turn(weight_version=version, completion_tokens=1) for version in versions]
        return trace(*nodes, id=id), Context(run="r1", turns=turns)

    made = [spoken("a", "7", "7", "8"), spoken("b", "7", None, "9"), spoken("c", "8", "7")]
    put_run(tmp_path)
    put_records(tmp_path, [record for record, _ in made], [context for _, context in made])
    query = """
        SELECT trace_id, min(CAST(weight_version AS INT)), count(*) - count(weight_version),
               list(weight_version ORDER BY turn)
        FROM turns GROUP BY trace_id ORDER BY trace_id
    """
    assert ask(tmp_path, query) == [
        ("a", 7, 0, ["7", "7", "8"]),
        ("b", 7, 1, ["7", None, "9"]),
        ("c", 7, 0, ["8", "7"]),
    ]


def put_records(root: Path, records: list[Record], contexts: list[Context]) -> None:
    """A committed step of rows with these contexts, as an import has them: without outcomes."""
    from replay_build import by_task, put_part

    from rolltape.schema import Step

    put_part(root, Part("train", 0, 0, "main"), encode(records, contexts), by_task(records), [], Step())


# -- how traces ended, and when


def test_timeouts_that_were_scored_and_those_that_are_errors_can_be_separated(tmp_path: Path) -> None:
    records = [
        turn("scored", stop="harness_timeout"),
        turn("error", idx=1, reward=None, errors=["TimeoutError: 60 s"]),
    ]
    root = recorded(tmp_path, records)
    query = "SELECT trace_id, is_truncated, len(error_types), reward FROM traces ORDER BY 1"
    assert ask(root, query) == [("error", False, 1, None), ("scored", True, 0, 1.0)]


def test_every_trace_says_whether_it_was_trained_or_why_not(tmp_path: Path) -> None:
    records = [turn(f"t{i}", idx=i) for i in range(10)]
    root = recorded(tmp_path, records, fates={"t8": "filtered", "t9": "leftover"})
    query = "SELECT disposition, count(*) FROM outcomes GROUP BY 1 ORDER BY 1"
    assert ask(root, query) == [("emitted", 8), ("filtered", 1), ("leftover", 1)]
    assert ask(root, "SELECT count(*) FROM samples") == [(8,)]


def test_tasks_that_come_up_again_after_a_restart_can_be_counted(tmp_path: Path) -> None:
    steps = [[turn(f"{step}{idx}", idx=idx) for idx in idxs] for step, idxs in enumerate([(0, 1), (2, 3), (0, 1)])]
    root = recorded(tmp_path, *steps)
    query = "SELECT task_idx, list(DISTINCT step ORDER BY step) FROM traces GROUP BY 1 HAVING count(DISTINCT step) > 1"
    assert sorted(ask(root, query)) == [(0, [0, 2]), (1, [0, 2])]


def test_no_column_depends_on_the_time_zone_of_the_session() -> None:
    types = {column.type for view in VIEWS.values() for column in view.columns}
    assert not [type for type in types if "TIME" in type or "DATE" in type]


def test_what_is_no_question_is_refused(tmp_path: Path) -> None:
    root = recorded(tmp_path, [turn("a")])
    for query in ("DROP VIEW traces", "COPY traces TO 'x.parquet'", "SELECT 1; SELECT 2", "SELECT nothing FROM traces"):
        with pytest.raises(BadInput):
            ask(root, query)
