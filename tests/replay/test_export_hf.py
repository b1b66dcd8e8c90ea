"""Conversations for Hugging Face datasets: one fixed schema, a row a branch, nothing gained and nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from replay_build import Record, by_task, put_part, put_run, put_step, recorded, reply, said, trace, turn

from rolltape.replay import open_run
from rolltape.replay.chosen import chosen_commits
from rolltape.replay.exports.exported import Exported
from rolltape.replay.exports.hf import BRANCHES, NO_GRAPH, NO_MESSAGE, SCHEMA, write_hf
from rolltape.schema import Step, encode
from rolltape.schema.paths import Part


def export(root: Path, out: Path) -> tuple[list[Record], Exported]:
    run = open_run(root)
    done = write_hf(run, chosen_commits(run), out, overwrite=True)
    table = pq.read_table(out)
    assert table.schema.equals(SCHEMA)
    return table.to_pylist(), done


def conversations(tmp_path: Path, *records: Record) -> tuple[list[Record], Exported]:
    root = put_run(tmp_path / "run")
    put_part(root, Part("train", 0, 0, "main"), encode(records), by_task(records), [], Step())
    return export(root, tmp_path / "x.parquet")


def spoken(message: Any) -> dict[str, Any]:
    """A message without what is null."""
    return {k: v for k, v in message.items() if v is not None}


def test_a_conversation_stands_with_its_reward_and_task(tmp_path: Path) -> None:
    record = turn(id="a", idx=3, rewards={"good": 0.5, "short": 0.25}, metrics={"words": 2.0}, data={"answer": "42"})
    [row], done = conversations(tmp_path, record)
    assert done.notes == {}
    assert [spoken(m) for m in row["messages"]] == [
        {"role": "user", "content": "a question", "sampled": False},
        {"role": "assistant", "content": "an answer", "sampled": True},
    ]
    assert (row["id"], row["branch"], row["branches"], row["reward"], row["task_idx"]) == ("a", 0, 1, 0.75, 3)
    assert (row["task_label"], json.loads(row["task"])["answer"]) == ("42", "42")
    assert [spoken(r) for r in row["rewards"]] == [{"name": "good", "value": 0.5}, {"name": "short", "value": 0.25}]
    assert row["metrics"] == [{"name": "words", "value": 2.0}]
    assert (row["num_tokens"], row["num_sampled"], row["tools"], row["disposition"]) == (6, 3, None, None)


def test_mixed_content_keeps_null_empty_and_parts_apart(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    call = [{"id": "c", "name": "f", "arguments": "{}"}]
    nodes = [said(None, [1], "", role="system"), said(0, [2], parts), reply(1, [], [3], text=None)]  # type: ignore[arg-type]
    nodes[2]["message"]["tool_calls"] = call
    [row], _ = conversations(tmp_path, trace(*nodes))
    assert [m["content"] for m in row["messages"]] == ["", "look", None]
    assert [m["content_parts"] and json.loads(m["content_parts"]) for m in row["messages"]] == [None, parts, None]


def test_arguments_stay_the_text_the_model_wrote(tmp_path: Path) -> None:
    """C10, C11: no call gains the arguments of another, no type changes, broken JSON stays broken."""
    arguments = ['{"x": 1, "y": 1.0}', '{"text": "hi", "x": "1"}', "{}", '{"x": tru']
    first, second = (
        reply(0, [], [2, 3], tool_calls=None),
        reply(0, [], [2, 3]),
    )
    first["message"]["tool_calls"] = [{"id": f"c{i}", "name": "move", "arguments": a} for i, a in enumerate(arguments)]
    second["message"]["tool_calls"] = []
    rows, _ = conversations(tmp_path, trace(said(None, [1]), first, id="a"), trace(said(None, [1]), second, id="b"))
    calls = rows[0]["messages"][1]["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == arguments
    assert next((c["id"], c["type"], c["function"]["name"]) for c in calls) == ("c0", "function", "move")
    assert rows[0]["messages"][0]["tool_calls"] is None
    assert rows[1]["messages"][1]["tool_calls"] == []


def test_tool_messages_say_which_call_they_answer(tmp_path: Path) -> None:
    [row] = [
        r for r in conversations(tmp_path, *recorded("tools"))[0] if r["task_type"] and "bash" in str(r["messages"])
    ]
    asked = next(m for m in row["messages"] if m["tool_calls"])
    answered = next(m for m in row["messages"] if m["role"] == "tool")
    assert answered["tool_call_id"] == asked["tool_calls"][0]["id"]


def test_a_branch_is_a_row_and_shared_messages_stand_in_each(tmp_path: Path) -> None:
    records = recorded("forks")
    rows, done = conversations(tmp_path, *records)
    facts = {r["id"]: _paths(r) for r in records}
    assert done.notes == {BRANCHES: sum(len(p) > 1 for p in facts.values())}
    for record in records:
        mine = [r for r in rows if r["id"] == record["id"]]
        assert [r["branch"] for r in mine] == list(range(len(facts[record["id"]])))
        assert {r["branches"] for r in mine} == {len(mine)}
        assert [[m["content"] for m in r["messages"]] for r in mine] == facts[record["id"]]
    assert len(rows) == sum(map(len, facts.values()))


def _paths(record: Record) -> list[list[Any]]:
    """Contents of the messages from the root to each leaf, the plain way."""
    nodes, parents = record["nodes"], {n["parent"] for n in record["nodes"]}
    result = []
    for leaf in (i for i in range(len(nodes)) if i not in parents):
        path: list[Any] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, nodes[at]["message"]["content"])
            at = nodes[at]["parent"]
        result.append(path)
    return result


def test_a_trace_without_messages_is_a_row_too(tmp_path: Path) -> None:
    rows, done = conversations(tmp_path, trace(id="none", errors=["ProviderError: 500"], rewards={}), turn(id="b"))
    assert [(r["id"], r["messages"] == [], r["branch"], r["branches"], r["reward"]) for r in rows] == [
        ("none", True, None, 0, None),
        ("b", False, 0, 1, 1.0),
    ]
    assert (rows[0]["error_types"], rows[0]["rewards"], done.notes) == (["ProviderError"], [], {NO_MESSAGE: 1})


@pytest.mark.parametrize("parent", [1, 7, -5])
def test_parents_that_are_no_earlier_messages_end_in_recorded_order(tmp_path: Path, parent: int) -> None:
    broken = trace(said(None, [1], "one"), reply(parent, [], [2], text="two"), said(None, [3], "three"), id="x")
    rows, done = conversations(tmp_path, turn(id="a"), broken, turn(id="b"))
    assert [[m["content"] for m in r["messages"]] for r in rows][1] == ["one", "two", "three"]
    assert (len(rows), done.notes) == (3, {NO_GRAPH: 1})


def test_later_releases_have_scores_weights_tools_and_a_task_key(tmp_path: Path) -> None:
    records = [t for line in recorded("single_turn", "0.4.0") for t in line["traces"]]
    records[0]["tools"] = [{"name": "f", "description": "d", "parameters": {"type": "object"}}]
    rows, _ = conversations(tmp_path, *records)
    assert rows[0]["rewards"] == [{"name": "ok", "value": 2.0, "score": 1.0, "weight": 2.0}]
    assert json.loads(rows[0]["tools"]) == [{"type": "function", "function": records[0]["tools"][0]}]
    assert rows[1]["tools"] == "[]"
    assert rows[0]["task_key"] == records[0]["task"]["key"]
    assert rows[0]["verifiers_version"] == "0.4.0"


def test_many_small_steps_make_few_row_groups(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    for step in range(5):
        put_step(root, step, [turn(id=f"{step}-{i}") for i in range(3)])
    rows, done = export(root, tmp_path / "x.parquet")
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 1
    assert [(r["step"], r["disposition"]) for r in rows] == [(s, "emitted") for s in range(5) for _ in range(3)]
    assert (done.files[0].traces, done.files[0].lines) == (15, 15)


def test_a_step_without_traces_gives_a_file_without_rows(tmp_path: Path) -> None:
    root = put_run(tmp_path / "run")
    put_step(root, 0, [], groups=[])
    rows, _ = export(root, tmp_path / "x.parquet")
    assert rows == []


LOAD = """
import json, sys
from datasets import load_dataset
data = load_dataset("parquet", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
row = data[0]
print(json.dumps([len(data), row["messages"], row["reward"], data.features["messages"].feature["content"].dtype]))
"""


def test_hugging_face_datasets_loads_it(tmp_path: Path) -> None:
    rows, _ = conversations(tmp_path, *recorded("tools"), *recorded("forks"), *recorded("zero"))
    command = [sys.executable, "-c", LOAD, str(tmp_path / "x.parquet"), str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ended.stdout) == [len(rows), rows[0]["messages"], rows[0]["reward"], "large_string"]
