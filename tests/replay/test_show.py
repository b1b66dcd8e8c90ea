"""`rolltape show`: finding one trace, reading no more than it needs, and saying all there is to know of it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replay_build import SCENARIOS, Record, group, put_attempt, put_run, put_step, recorded, reply, said, trace, turn

from rolltape.replay import open_run
from rolltape.replay.printing.traces import UNLIKELY, Look, render_trace
from rolltape.replay.show.lookup import distinct, find, read_row, trace_ids
from rolltape.replay.show.trace import Trace, read_trace
from rolltape.schema import Context, Group, Outcome, Step, encode, with_outcomes, write_parquet
from rolltape.schema.commits import Commit
from rolltape.schema.errors import BadInput, Damaged
from rolltape.schema.parquet import put_once
from rolltape.schema.paths import Part, RunPaths
from rolltape.schema.records import Turn
from rolltape.schema.storage import StorePath, place

Cli = Callable[..., tuple[int, str, str]]
TOKEN_COLUMNS = {"token_ids", "sampled", "is_content", "logprobs", "recomputed_logprobs"}


def put_chunks(
    root: Path,
    chunks: Sequence[Sequence[Record]],
    *,
    step: int = 0,
    groups: Sequence[Group] = (),
    outcomes: Sequence[Outcome] = (),
    turns: Sequence[Turn] = (),
    **context: Any,
) -> Commit:
    """Record a step, a row group for each of `chunks`."""
    place = Context(run="r1", step=step, turns=turns, **context)
    tables = [with_outcomes(encode(chunk, [place] * len(chunk)), outcomes) for chunk in chunks]
    part = Part("train", step, 0, "main")
    file = write_parquet(RunPaths(root).parquet(part), tables)
    commit = Commit(part=part, file=file, groups=groups, step=Step(step=step), written_at=2.0)
    put_once(RunPaths(root).commit(part), commit.to_bytes())
    return commit


def only(root: Path, record: Record, **more: Any) -> str:
    """Record one trace; its id."""
    put_run(root)
    put_chunks(root, [[record]], groups=[group([record])], **more)
    return str(record["id"])


def drawn(root: Path, prefix: str = "", width: int = 100, **look: Any) -> str:
    """What is shown of a trace."""
    from rolltape.replay.printing.console import SafeConsole

    run = open_run(root)
    place = find(run, prefix or trace_ids(run, run.all_commits[0])[0])
    chosen = Look(**look)
    console = SafeConsole(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render_trace(read_trace(run, place, tokens=chosen.tokens), "run", chosen))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[str]]]:
    """Row groups that are read meanwhile: number and columns."""
    calls: list[tuple[int, set[str]]] = []
    original = pq.ParquetFile.read_row_group

    def spy(self: Any, i: int, columns: Sequence[str] | None = None, **rest: Any) -> Any:
        calls.append((i, set(self.schema_arrow.names if columns is None else columns)))
        return original(self, i, columns=columns, **rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    return calls


# -- finding a trace


def test_a_trace_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="abc1"), turn(id="abd2")])
    put_step(tmp_path, 1, [turn(id="b1", idx=1)])
    run = open_run(tmp_path)
    assert (find(run, "b").trace_id, find(run, "b").commit.part.step) == ("b1", 1)
    assert find(run, "abd").trace_id == "abd2"
    assert find(run, "abc1").trace_id == "abc1"


def test_a_beginning_that_several_have_names_them(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="0123456789ab"), turn(id="0123456789cd")])
    put_step(tmp_path, 7, [turn(id="01ff", idx=1)])
    code, _, err = rolltape("show", tmp_path, "01")
    assert code == 2
    assert err == (
        f"Error: {tmp_path}: 3 trace ids begin with '01': 0123456789ab (step 0), 0123456789cd (step 0), 01ff (step 7); "
        "give more characters.\n"
    )
    many = put_run(tmp_path / "many")
    put_step(many, 0, [turn(id=f"a{i:02}") for i in range(20)])
    with pytest.raises(BadInput, match=r"20 trace ids begin with 'a': .* and 12 more; give more"):
        find(open_run(many), "a")


def test_an_id_that_is_not_there_is_a_sentence(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="abc")])
    code, _, err = rolltape("show", tmp_path, "x")
    assert (code, err.count("\n")) == (2, 1)
    assert "no trace id begins with 'x'; `rolltape show" in err
    assert rolltape("show", tmp_path, "")[0] == 2


def test_a_try_that_was_run_again_is_found_though_no_group_names_it(tmp_path: Path) -> None:
    put_run(tmp_path)
    tries = [turn(id="first", errors=["ToolError: no"]), turn(id="second")]
    put_chunks(tmp_path, [tries], groups=[group(tries[1:])])
    place = find(open_run(tmp_path), "fi")
    assert (place.trace_id, place.group) == ("first", None)


def test_of_two_attempts_the_newest_is_shown_and_an_older_one_found_if_there_is_no_other(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="both", reward=0.0), turn(id="old")])
    put_attempt(tmp_path, 1)
    put_step(tmp_path, 0, [turn(id="both", reward=1.0), turn(id="olive")], attempt=1)
    run = open_run(tmp_path)
    assert (find(run, "both").commit.part.attempt, find(run, "both").superseded) == (1, False)
    assert find(run, "ol").trace_id == "olive"
    assert find(run, "old").superseded
    assert find(run, "both", attempt=0).commit.part.attempt == 0
    assert "recorded again by a newer attempt" in drawn(tmp_path, "old")


def test_a_search_can_be_narrowed_to_steps_and_splits(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a0")])
    put_step(tmp_path, 1, [turn(id="a1")])
    put_step(tmp_path, 1, [turn(id="a2")], split="eval")
    run = open_run(tmp_path)
    assert find(run, "a", steps=[0]).trace_id == "a0"
    assert find(run, "a", steps=[1], splits=["eval"]).trace_id == "a2"


# -- reading no more than is needed


def test_one_row_group_of_token_data_is_read(tmp_path: Path, read: list[tuple[int, set[str]]]) -> None:
    put_run(tmp_path)
    for step in range(5):
        chunks = [[turn(id=f"{step}-{chunk}-{i}") for i in range(3)] for chunk in range(4)]
        put_chunks(tmp_path, chunks, step=step, groups=[group([r for c in chunks for r in c], step)])
    run = open_run(tmp_path)
    found = read_trace(run, find(run, "3-2-1"), tokens=True)
    assert [t.id for m in found.messages for t in m.tokens or ()] == [1, 2, 3, 4, 5, 6]
    assert [(i, columns >= TOKEN_COLUMNS) for i, columns in read] == [(0, False), (1, False), (2, False), (2, True)]
    assert all(columns == {"trace_id"} for _, columns in read[:3])


def test_without_tokens_no_token_column_is_read(
    demo_run: Path, read: list[tuple[int, set[str]]], rolltape: Cli
) -> None:
    run = open_run(demo_run)
    first = trace_ids(run, run.all_commits[0])[0]
    assert rolltape("show", demo_run, first)[0] == 0
    assert rolltape("show", demo_run)[0] == 0
    assert read
    assert not any(columns & TOKEN_COLUMNS for _, columns in read)


def test_files_are_opened_to_find_a_trace_only_where_their_commit_does_not_name_all(
    tmp_path: Path, read: list[tuple[int, set[str]]]
) -> None:
    put_run(tmp_path)
    tries = [turn(id="a0", errors=["ToolError: no"]), turn(id="a1")]
    put_chunks(tmp_path, [tries], step=0, groups=[group(tries[1:])])
    put_chunks(tmp_path, [[turn(id="b")]], step=1, groups=[group([turn(id="b")], 1)])
    find(open_run(tmp_path), "b")
    assert read == [(0, {"trace_id"})]


# -- what a trace says


@pytest.mark.parametrize("name", SCENARIOS)
def test_json_holds_the_messages_and_tokens_of_the_record(name: str, tmp_path: Path) -> None:
    records = recorded(name)
    put_run(tmp_path)
    put_chunks(tmp_path, [records], groups=[group(records)])
    run = open_run(tmp_path)
    for record in records:
        found = read_trace(run, find(run, record["id"]), tokens=True).to_dict()
        assert found["trace_id"] == record["id"]
        assert found["rewards"] == pytest.approx(record["rewards"], nan_ok=True)
        assert len(found["nodes"]) == len(record["nodes"])
        for shown, node in zip(found["nodes"], record["nodes"], strict=True):
            message = node["message"]
            assert (shown["index"] == 0) == (node["parent"] is None) or shown["parent"] == node["parent"]
            assert shown["role"] == message["role"]
            if isinstance(message["content"], str):
                assert (
                    shown["content"] == message["content"].encode("utf-8", "replace").decode()
                    or "\ufffd" in shown["content"]
                )
            assert shown["reasoning"] == message.get("reasoning_content")
            assert shown["tool_calls"] == message.get("tool_calls")
            if not shown["raw"]:
                assert shown["token_ids"] == node["token_ids"]
                assert shown["sampled_tokens"] == node["mask"]
                kept = [p for p in shown["logprobs"] if p is not None]
                assert kept == pytest.approx(node["logprobs"], rel=1e-6, nan_ok=True)
        json.dumps(found)


def test_a_conversation_is_shown_with_roles_calls_and_reasoning(tmp_path: Path) -> None:
    call = {"id": "call-1", "name": "search", "arguments": '{"q": "x", "n": 2}'}
    first = reply(0, [3], [4, 5], text="", finish="tool_calls")
    first["message"] |= {"reasoning_content": "I should look.", "tool_calls": [call]}
    answer = said(1, [6, 7], "found it", role="tool")
    answer["message"]["name"] = "search"
    record = trace(said(None, [1, 2], "where is it?"), first, answer, reply(2, [8], [9], text="There."), id="abc")
    turns = (Turn(weight_version="7", latency=0.25, cached_tokens=2), Turn(weight_version="8", latency=2.0, retries=1))
    only(tmp_path, record, turns=turns)
    shown = drawn(tmp_path)
    conversation = shown[shown.index("\nuser") + 1 :].splitlines()
    assert conversation == [
        "user  #0; 2 tokens",
        "  where is it?",
        "",
        "assistant  #1; 3 tokens, 2 sampled; tool_calls; took 250 ms; 2 cached; weights 7",
        "  I should look.",
        '  → search(q="x", n=2)',
        "",
        "tool search ← call-1  #2; 2 tokens",
        "  found it",
        "",
        "assistant  #3; 2 tokens, 1 sampled; stop; took 2.0 s; weights 8; 1 request before it failed",
        "  There.",
    ]


def test_branches_are_a_tree(tmp_path: Path) -> None:
    nodes = [
        said(None, [1], "root"),
        reply(0, [], [2], text="left"),
        reply(0, [], [3], text="right"),
        said(2, [4], "on"),
    ]
    only(tmp_path, trace(*nodes, reply(3, [], [5], text="end"), reply(3, [], [6], text="other end")))
    shown = drawn(tmp_path).partition("\n\n")[2]
    found = re.findall(r"(branch [\d.]+|conversation \d|root|left|right|\bon\b|other end|end)$", shown, re.MULTILINE)
    assert found == [
        *("root", "on", "branch 1", "left", "branch 2", "right", "on", "branch 2.1", "end", "branch 2.2", "other end")
    ]
    assert shown.count("2 ways on") == 1


def test_several_conversations_and_a_parent_that_is_none_are_shown(tmp_path: Path) -> None:
    nodes = [said(None, [1], "one"), said(None, [2], "two"), reply(9, [], [3], text="lost parent")]
    only(tmp_path, trace(*nodes))
    shown = drawn(tmp_path)
    assert "3 conversations" in shown
    assert [shown.index(f"conversation {i}") for i in (1, 2, 3)] == sorted(
        shown.index(f"conversation {i}") for i in (1, 2, 3)
    )


def test_a_thousand_forks_in_a_row_are_shown(tmp_path: Path) -> None:
    nodes = [said(None, [1], "root")]
    for depth in range(1000):
        parent = 0 if depth == 0 else 2 * depth
        nodes += [reply(parent, [], [2], text="dead end"), reply(parent, [], [3], text="on")]
    only(tmp_path, trace(*nodes))
    shown = drawn(tmp_path)
    assert shown.count("dead end") == 1000
    assert max(map(len, shown.splitlines()[:50])) <= 100


def test_a_trace_without_messages_says_so(tmp_path: Path) -> None:
    only(tmp_path, trace(rewards={}, errors=["SetupError: no"]))
    shown = drawn(tmp_path)
    assert "no messages" in shown
    assert "reward   not scored" in shown
    assert "error    SetupError: no" in shown


# -- rewards, outcome, time


def test_rewards_are_shown_in_parts_with_scores_weights_and_the_groups_sums(tmp_path: Path) -> None:
    record = turn(id="a", rewards={"ok": {"score": 0.5, "weight": 2.0}, "style": {"score": None, "weight": 1.0}})
    other = turn(id="b", rewards={"ok": {"score": 1.0, "weight": 2.0}, "style": {"score": 0.25, "weight": 1.0}})
    put_run(tmp_path)
    put_chunks(tmp_path, [[record, other]], groups=[group([record, other])])
    shown = drawn(tmp_path, "a", width=200)
    assert "ok 1 (0.5 x 2) + style not scored (– x 1)" in shown
    assert "group    2 of 2 rollouts; sums: ok 3, style none (1 of 2 scored)" in shown


@pytest.mark.parametrize(("total", "said_"), [(math.nan, "nan = ok nan"), (0.0, "0 = ok 0")])
def test_nan_is_nan_and_zero_is_zero(tmp_path: Path, total: float, said_: str) -> None:
    only(tmp_path, turn(rewards={"ok": total}))
    assert f"reward   {said_}\n" in drawn(tmp_path)


def test_why_a_trace_was_dropped_is_said_with_what_it_means(tmp_path: Path) -> None:
    record = turn(id="a")
    fate = Outcome(trace_id="a", disposition="filtered", reason="no spread", handed_reward=0.5, remove_sample=(True,))
    only(tmp_path, record, outcomes=[fate])
    shown = drawn(tmp_path)
    assert "outcome  filtered: was dropped by a filter of the trainer\nwhy      no spread" in shown
    assert "handed   0.5, changed by a hook of the trainer" in shown
    assert "removed  1 of 1 Sample, by" in shown


def test_times_settings_and_truncation_are_shown(tmp_path: Path) -> None:
    span = {"start": 10.0, "end": 12.5}
    never = {"start": 0.0, "end": 0.0}
    timing = {
        "start": 10.0,
        "setup": never,
        "generation": span,
        "finalize": never,
        "scoring": {"start": 12.5, "end": 12.504},
    }
    record = trace(said(None, [1]), reply(0, [], [2], finish="length"), id="a", timing=timing)
    only(tmp_path, record, model="m", sampling={"temperature": 0.7, "top_k": None}, renderer={"name": "qwen3"})
    shown = drawn(tmp_path)
    assert "generation 2.5 s, scoring 4 ms" in shown
    assert "setup" not in shown
    assert "model    m; temperature 0.7; renderer name qwen3" in shown
    assert "ended by agent_completed, truncated" in shown


def test_tracebacks_and_long_texts_are_shown_in_full_on_request(tmp_path: Path) -> None:
    text = "\n".join(f"line {i}" for i in range(500))
    record = trace(said(None, [1], text), id="a", errors=["ToolError: no"])
    record["errors"][0]["traceback"] = "Traceback: here"
    only(tmp_path, record)
    short, full = drawn(tmp_path), drawn(tmp_path, full=True)
    assert "line 11 … " in short
    assert "more characters (--full)" in short
    assert "Traceback" not in short
    assert all(f"line {i}\n" in full for i in range(500))
    assert "Traceback: here" in full


# -- tokens


def test_unlikely_tokens_are_marked_with_their_probability(tmp_path: Path) -> None:
    logprobs = [math.log(p) for p in (0.9, 0.05, UNLIKELY + 0.01, 0.0004)]
    only(tmp_path, trace(said(None, [1, 2]), reply(0, [3], [10, 11, 12, 13], logprobs), id="a"))
    shown = drawn(tmp_path, tokens=True)
    assert "\n  1 2\n" in shown
    assert "\n  3 10 ‹11 5%› 12 ‹13 0.04%›\n" in shown
    shown = drawn(tmp_path, tokens=True, logprobs=True)
    assert "\n  3 10:-0.11 ‹11:-3.00› 12:-2.21 ‹13:-7.82›\n" in shown
    mean = sum(logprobs) / 4
    assert f"4 log-probs, mean {mean:.3f}, 2 below 10%; least likely 13 0.04%, 11 5%, 12 11%" in shown


def test_sampled_tokens_without_a_log_prob_are_no_certain_ones(tmp_path: Path) -> None:
    record = trace(said(None, [1]), reply(0, [], [10, 11], [-0.1, math.nan]), id="a")
    only(tmp_path, record)
    shown = drawn(tmp_path, tokens=True, logprobs=True)
    assert "10:-0.10 ‹11:nan›" in shown
    assert "1 sampled token without a finite log-prob" in shown


def test_many_tokens_are_cut_and_the_rest_counted(tmp_path: Path) -> None:
    only(tmp_path, trace(said(None, list(range(1000))), id="a"))
    assert "… 850 more tokens (--full)" in drawn(tmp_path, tokens=True)
    assert " 999\n" in drawn(tmp_path, tokens=True, full=True) + "\n"


def test_tokens_that_were_pruned_are_said_to_be_gone(tmp_path: Path) -> None:
    put_run(tmp_path)
    table = with_outcomes(encode([turn(id="a")], [Context(run="r1")]), [])
    for name in TOKEN_COLUMNS:
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.nulls(1, table.schema.field(name).type))
    part = Part("train", 0, 0, "main")
    file = write_parquet(RunPaths(tmp_path).parquet(part), [table])
    commit = Commit(part=part, file=file, groups=[group([turn(id="a")])], step=Step(), written_at=2.0)
    put_once(RunPaths(tmp_path).commit(part), commit.to_bytes())
    shown = drawn(tmp_path, tokens=True, logprobs=True)
    assert "tokens   not there any more: their columns were pruned" in shown
    assert "an answer" in shown


def test_with_a_tokenizer_tokens_are_text(tmp_path: Path, rolltape: Cli) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"zero": 0, "one": 1, "two \n\x1b": 2, "[UNK]": 3}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    only(tmp_path / "run", trace(said(None, [1, 2]), reply(0, [0], [1, 77], [-5.0, -0.1]), id="a"))
    code, out, _ = rolltape("show", tmp_path / "run", "a", "--tokenizer", tmp_path)
    out = "\n".join(line.rstrip() for line in out.split("\n"))
    assert code == 0
    assert "  one two␣\\n\\x1b\n" in out
    assert "  zero ‹one 0.7%› [77]\n" in out
    code, _, err = rolltape("show", tmp_path / "run", "a", "--tokenizer", tmp_path / "run")
    assert (code, "holds no tokenizer.json" in err) == (2, True)
    code, _, err = rolltape("show", tmp_path / "run", "a", "--tokenizer", tmp_path / "run" / "run.json")
    assert (code, "is a file; give a folder" in err) == (2, True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "tokenizer.json").write_text("{")
    code, _, err = rolltape("show", tmp_path / "run", "a", "--tokenizer", tmp_path / "cut")
    assert (code, "no readable tokenizer" in err) == (2, True)


def test_tokens_are_text_by_the_recorded_tokenizer_where_it_is_here(tmp_path: Path, rolltape: Cli) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"zero": 0, "one": 1}, unk_token="zero")
    only(tmp_path / "run", trace(said(None, [1]), reply(0, [0], [1], [-5.0]), id="a"), tokenizer="made/words")
    _, out, err = rolltape("show", tmp_path / "run", "a", "--logprobs")
    assert "the recorded one, made/words, is not here" in err
    (tmp_path / "made" / "words").mkdir(parents=True)
    tokenizers.Tokenizer(model).save(str(tmp_path / "made" / "words" / "tokenizer.json"))
    _, out, err = rolltape("show", tmp_path / "run", "a", "--logprobs")
    assert "one" in out
    assert f"tokens as text by the recorded tokenizer, {tmp_path}/made/words" in "".join(err.splitlines())


# -- the command


def test_traces_of_the_last_step_are_listed_in_order(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 3, [turn(id="early")])
    records = [turn(id="b", idx=1), turn(id="a", reward=None), turn(id="c", idx=1, reward=0.5)]
    put_step(tmp_path, 4, records, fates={"c": "filtered"})
    code, out, _ = rolltape("show", tmp_path)
    assert code == 0
    assert f"{tmp_path}  train step 4: 3 traces" in out
    assert "early" not in out
    assert "filtered" in out
    code, out, _ = rolltape("show", tmp_path, "--step", 3, "--step", 4, "--json")
    traces = json.loads(out)["traces"]
    assert [(t["step"], t["trace_id"], t["reward"]) for t in traces] == [
        *((3, "early", 1.0), (4, "b", 1.0), (4, "a", None), (4, "c", 0.5)),
    ]


def test_listed_ids_tell_traces_apart() -> None:
    assert distinct(["abcdefgh1", "abcdefgh2"]) == 10
    assert distinct(["a", "b", "a"]) == 8


def test_json_of_a_trace_says_where_it_is(tmp_path: Path, rolltape: Cli) -> None:
    only(tmp_path, turn(id="abc", reward=math.nan))
    code, out, _ = rolltape("show", tmp_path, "ab", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["trace_id"], found["reward"], found["superseded"], found["step"]) == ("abc", "nan", False, 0)
    assert found["group"]["trace_ids"] == ["abc"]
    assert "token_ids" not in found["nodes"][0]
    _, out, _ = rolltape("show", tmp_path, "ab", "--json", "--tokens")
    assert [n["token_ids"] for n in json.loads(out)["nodes"]] == [[1, 2], [3, 4, 5, 6]]


def test_nothing_that_a_trace_says_reaches_the_terminal_as_control_characters(tmp_path: Path, rolltape: Cli) -> None:
    bad = "\x1b[31m\x1b]0;t\x07\x9b2J\u202e\x08\r"
    call = {"id": bad, "name": bad, "arguments": bad}
    first = reply(0, [3], [4], text=bad)
    first["message"] |= {"reasoning_content": bad, "tool_calls": [call]}
    last = said(1, [5], bad, role="tool")
    last["message"] |= {"name": bad, "tool_call_id": bad}
    record = trace(
        *(said(None, [1], bad), first, last),
        id="a",
        rewards={bad: 1.0},
        metrics={bad: 1.0},
        errors=[f"E{bad}: {bad}"],
        stop=bad,
        data={"name": bad, "answer": bad},
    )
    record["errors"][0]["traceback"] = bad
    outcome = Outcome(trace_id="a", disposition="error", reason=bad)
    only(tmp_path, record, outcomes=[outcome], model=bad, sampling={bad: bad}, turns=(Turn(weight_version=bad),))
    for words in ([], ["a"], ["a", "--full", "--logprobs"], ["a", "--json"]):
        code, out, _ = rolltape("show", tmp_path, *words)
        assert code == 0
        assert not set(out) & {"\x1b", "\x07", "\x9b", "\u202e", "\x08", "\r"}, words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens"], "are about one trace"),
        (["--step", "9"], "step 9 of 'train' was not recorded"),
        (["--split", "evil"], "no split 'evil' was recorded; recorded are 'train'."),
        (["a", "--step", "9"], "no trace id begins with 'a'"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, rolltape: Cli, words: list[str], told: str) -> None:
    only(tmp_path, turn(id="a"))
    code, _, err = rolltape("show", tmp_path, *words)
    assert code == 2
    assert told in err


def test_an_empty_run_is_shown_as_empty(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path)
    code, out, _ = rolltape("show", tmp_path)
    assert (code, out) == (0, f"{tmp_path}: nothing is committed yet.\n")


def test_a_damaged_file_is_named(tmp_path: Path, rolltape: Cli) -> None:
    trace_id = only(tmp_path, turn(id="a"))
    run = open_run(tmp_path)
    place = find(run, trace_id)
    path = run.paths.parquet(place.commit.part)
    os.truncate(str(path), 300)
    code, _, err = rolltape("show", tmp_path, "a")
    assert code == 2
    assert err.startswith(f"Error: {path}: 300 bytes, but ")
    Path(str(path)).unlink()
    with pytest.raises(Damaged, match="it is missing"):
        read_row(run, place)


def test_a_trace_that_its_file_lacks_is_damage(tmp_path: Path) -> None:
    put_run(tmp_path)
    put_chunks(tmp_path, [[turn(id="a")]], groups=[group([turn(id="b")])])
    run = open_run(tmp_path)
    with pytest.raises(Damaged, match="trace b is not in it, though its commit names it"):
        read_row(run, find(run, "b"))


def test_a_run_in_an_object_store_is_listed_counted_and_shown(
    demo_run: Path, bucket: str, rolltape: Cli, read: list[tuple[int, set[str]]]
) -> None:
    url = place(f"{bucket}/runs/demo")
    assert isinstance(url, StorePath)
    for file in (p for p in demo_run.rglob("*") if p.is_file()):
        (url / file.relative_to(demo_run)).put(file.read_bytes())
    code, out, _ = rolltape("list", bucket, "--json")
    [found] = json.loads(out)["runs"]
    assert (code, found["name"], found["state"], found["traces"]) == (0, "runs/demo", "complete", 48)
    here, there = (rolltape("stats", run, "--json")[1] for run in (demo_run, url))
    assert json.loads(here)["splits"] == json.loads(there)["splits"]
    run = open_run(demo_run)
    first = trace_ids(run, run.all_commits[1])[0]
    read.clear()
    code, out, _ = rolltape("show", url, first, "--tokens")
    assert code == 0
    assert first in out
    assert sum(columns >= TOKEN_COLUMNS for _, columns in read) == 1


def test_a_trace_is_plain_data(demo_run: Path) -> None:
    run = open_run(demo_run)
    for commit in run.all_commits:
        for trace_id in trace_ids(run, commit):
            found = read_trace(run, find(run, trace_id), tokens=True)
            assert isinstance(found, Trace)
            counts = [(len(m.tokens or ()), sum(t.sampled for t in m.tokens or ())) for m in found.messages]
            assert sum(n for n, _ in counts) == found.row["num_tokens"]
            assert sum(n for _, n in counts) == found.row["num_sampled"]
