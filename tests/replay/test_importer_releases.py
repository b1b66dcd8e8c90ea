"""Imports of every release: facts hold, one rollout in the shapes of all releases gives one row, nothing is lost."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from replay_build import SCENARIOS, TRACES, Record, facts, recorded, reply, said, trace, turn

from rolltape.replay import open_run
from rolltape.replay.branches import leaves, path_to
from rolltape.replay.imports import lines as import_lines
from rolltape.replay.imports.importer import Imported, import_files
from rolltape.schema import decode, encode
from rolltape.schema.episodes import episode_of, line_of

RELEASES = ("0.2.1", "0.3.0", "0.4.0")
FILES = [
    *(("0.2.0", name) for name in SCENARIOS),
    *(("0.2.0", f"written_by_verifiers/{n}") for n in ("errors", "multi_turn_user_sim", "single_turn", "tools")),
    *((r, f"{p}{n}") for r in RELEASES for p in ("", "written_by_verifiers/") for n in ("single_turn", "multi_branch")),
]
"""Every recorded file: (release, name)."""


def imported(folder: Path, *records: Any) -> pa.Table:
    """The rows of an import of `records` as lines, in their order."""
    (folder / "traces.jsonl").write_text("\n".join(map(json.dumps, records)))
    import_files(folder / "traces.jsonl", folder / "run")
    table = open_run(folder / "run").table()
    ids = [t["id"] for r in records for t in r.get("traces", [r])]
    at = table.column("trace_id").to_pylist()
    return table.take([at.index(i) for i in ids])


@pytest.fixture(scope="module")
def import_recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Imported, pa.Table]]:
    """Import a recorded file, once."""

    @functools.cache
    def once(release: str, name: str) -> tuple[Imported, pa.Table]:
        folder = tmp_path_factory.mktemp("run")
        done = import_files(TRACES / release / f"{name}.jsonl", folder)
        return done, open_run(folder).table()

    return once


Recorded = Callable[[str, str], tuple[Imported, pa.Table]]


# -- what is known of the recorded traces


@pytest.mark.parametrize(("release", "name"), FILES)
def test_facts_of_every_recorded_trace_hold_after_import(import_recorded: Recorded, release: str, name: str) -> None:
    done, table = import_recorded(release, name)
    known = {fact["id"]: fact for fact in facts(name.removeprefix("written_by_verifiers/"), release)}
    rows = {row["trace_id"]: row for row in table.to_pylist(maps_as_pydicts="strict")}
    assert done.clean
    assert done.releases == {release: len(rows)}
    assert rows.keys() == known.keys()
    for trace_id, fact in known.items():
        row = rows[trace_id]
        for column, key in (
            ("num_nodes", "nodes"),
            ("num_branches", "branches"),
            ("num_turns", "turns"),
            ("num_tokens", "unique_node_tokens"),
            ("num_sampled", "unique_sampled"),
        ):
            assert row[column] == fact[key], column
        scored = bool(row["rewards"]) and None not in row["rewards"].values()
        nan = scored and math.isnan(row["reward"])
        assert nan or row["reward"] == (fact["reward"] if scored else None)
        assert row["stop_condition"] == fact.get("stop_condition", fact.get("stop"))
        assert row["is_truncated"] == fact.get("is_truncated", fact.get("truncated"))
        assert row["error_types"] == [e["type"] if isinstance(e, dict) else e for e in fact["errors"]]
        assert per_branch(row) == [
            (b["tokens"], b["sampled"]) if isinstance(b, dict) else tuple(b) for b in fact["per_branch"]
        ]


def per_branch(row: Record) -> list[tuple[int, int]]:
    """(tokens, sampled tokens) of each branch of a row."""
    parents = [-1 if p is None else p for p in row["node_parent"]]
    ends = np.cumsum(row["node_tokens"]).tolist()
    spans = [slice(end - n, end) for end, n in zip(ends, row["node_tokens"], strict=True)]
    paths = [path_to(leaf, parents) for leaf in leaves(parents)]
    return [
        (sum(row["node_tokens"][n] for n in path), sum(sum(row["sampled"][spans[n]]) for n in path)) for path in paths
    ]


@pytest.mark.parametrize(("release", "name"), FILES)
def test_every_recorded_line_can_be_made_again_bit_for_bit(import_recorded: Recorded, release: str, name: str) -> None:
    _, table = import_recorded(release, name)
    made = []
    for extra, record in zip(table.column("extra").to_pylist(), decode(table), strict=True):
        episode = episode_of(extra)
        made.append(json.dumps(record if episode is None else line_of(episode, [record])))
        assert (episode is None) == (release < "0.3")
    assert sorted(made) == sorted(map(json.dumps, recorded(name, release)))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["single_turn", "multi_branch"])
def test_what_verifiers_wrote_and_what_it_held_give_the_same_columns(
    import_recorded: Recorded, name: str, release: str
) -> None:
    """Its writer drops nulls, and from 0.4.0 on rounds log-probs; the records here keep both, but for those of 0.4.0."""
    _, ours = import_recorded(release, name)
    _, theirs = import_recorded(release, f"written_by_verifiers/{name}")
    exact = (
        "extra",
        "task",
        "agent",
        "calls",
        "tools",
        "sampling",
        "renderer",
        "runtime",
        "logprobs",
        "logprob_decimals",
    )
    same = [c for c in ours.column_names if c not in (*exact, "run")]
    assert json.dumps(ours.select(same).to_pylist()) == json.dumps(theirs.select(same).to_pylist())
    close = np.array([[x or 0.0 for row in t.column("logprobs").to_pylist() for x in row] for t in (ours, theirs)])
    assert np.abs(close[0] - close[1]).max() <= (5.1e-5 if release == "0.4.0" else 0.0)


# -- one rollout in the shapes of all releases

SAMPLING = {"temperature": 0.7, "top_p": None, "reasoning_effort": None, "max_tokens": 64}
HARNESS = {"id": "null", "env": {}, "forward_env": [], "disabled_tools": None}
CLIENT = {
    "base_url": "http://127.0.0.1:1/v1",
    "type": "train",
    "renderer": {"name": "qwen3"},
    "renderer_model_name": "org/tokenizer",
}
RUNTIME = {"id": "box", "type": "subprocess"}
WEIGHT = 0.5


def as_0_2_0(record: Record) -> Record:
    return {**copy.deepcopy(record), "runtime": RUNTIME}


def as_0_2_1(record: Record) -> Record:
    """Finish reasons and usage move to the calls; version, run and agent are new."""
    old = as_0_2_0(record)
    span = old["timing"]["generation"] | {"model": {"duration": 1.0}, "harness": {"duration": 1.0}}
    new = {
        **{key: old[key] for key in ("id", "task", "runtime")},
        "version": 2,
        "verifiers": {"version": "0.2.1", "commit": None},
        "run": None,
        "agent": {"model": "org/model", "sampling": SAMPLING, "harness": HARNESS},
        "nodes": [{k: v for k, v in n.items() if k not in ("finish_reason", "usage")} for n in old["nodes"]],
        "tools": None,
        "calls": calls_of(old),
    }
    new |= {key: old[key] for key in old if key not in (*new, "timing")}
    spans = {k: span if k == "generation" else v for k, v in old["timing"].items()}
    return {**new, "timing": {"start": spans.pop("start"), "boot": {"start": 0.0, "end": 0.0}, **spans}}


def calls_of(record: Record) -> list[Record]:
    calls: list[Record] = [{"node": None, "finish_reason": None, "error": {"type": "E", "message": "m"}}]
    for i, node in enumerate(record["nodes"]):
        if node["sampled"]:
            said_of_it = {k: node[k] for k in ("finish_reason", "usage")}
            rest = {"time": {"start": 1.0, "end": 2.0}, "error": None}
            calls.append(
                {"node": i, "model": "org/model", "sampling": SAMPLING, "endpoint": "/x", **said_of_it, **rest}
            )
    return calls


def as_0_3_0(record: Record) -> Record:
    """Scores and weights apart; the runtime and settings are the agent's; an Episode around it."""
    old = as_0_2_1(record)
    config = {"harness": HARNESS, "runtime": {"type": "subprocess"}, "model": "org/model", "client": CLIENT}
    rewards = {k: {"score": v / WEIGHT, "weight": WEIGHT} for k, v in old["rewards"].items()}
    timing = {("agent" if k == "generation" else k): v for k, v in old["timing"].items()}
    new = {
        "version": 1,
        "id": old["id"],
        "verifiers": {"version": "0.3.0", "commit": None},
        "run": None,
        "task": old["task"],
        "agent": {"config": {**config, "sampling": SAMPLING}, "runtime": RUNTIME, "name": "agent", "trainable": True},
        "tools": [],
        "nodes": [{**node, "advantages": None} for node in old["nodes"]],
        "calls": old["calls"],
        "rewards": rewards,
        **{key: old[key] for key in ("metrics", "info", "extra_usage", "is_completed")},
        "ok": not old["errors"],
        **{key: old[key] for key in ("stop_condition", "errors")},
        "timing": timing,
    }
    return {"id": "e-" + old["id"], "env": {"id": "probe-v1"}, "ok": new["ok"], "errors": [], "traces": [new]}


def as_0_3_1(record: Record) -> Record:
    """The task is known by a key; task, group and run stand on the Episode. As its own reader and writer took it."""
    episode = as_0_3_0(record)
    [old] = episode["traces"]
    key = hashlib.sha256(json.dumps(old["task"]).encode()).hexdigest()
    task = {**old["task"], "key": key, "hash": key}
    changes = {"verifiers": {"version": "0.3.1"}, "task": task}
    new = {k: v for k, v in {**old, **changes}.items() if k != "run"}
    around = {"task": task, "group": {"id": task["key"]}, "run": {"type": "eval", "id": "r", "name": "n"}}
    line = {k: v for k, v in episode.items() if k not in ("ok", "errors", "traces")} | around
    return without_nulls({**line, "ok": episode["ok"], "errors": [], "traces": [new]})


def as_0_4_0(record: Record) -> Record:
    """As its writer leaves it: nulls dropped, log-probs rounded."""
    episode = as_0_3_0(record)
    [old] = episode["traces"]
    task = as_0_3_1(record)["task"]
    nodes = [
        {
            "parent": node["parent"],
            "semantic_parents": [],
            **{k: v for k, v in node.items() if k not in ("parent", "advantages")},
            "logprobs": [round(x, 4) for x in node["logprobs"]],
        }
        for node in old["nodes"]
    ]
    changes = {"verifiers": {"version": "0.4.0"}, "task": task, "nodes": nodes, "is_timeout": False}
    new = {k: v for k, v in {**old, **changes}.items() if k != "run"}
    return without_nulls({**episode, "task": task, "is_timeout": False, "traces": [new]})


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


SHAPES: dict[str, Callable[[Record], Record]] = {
    "0.2.0": as_0_2_0,
    "0.2.1": as_0_2_1,
    "0.3.0": as_0_3_0,
    "0.3.1": as_0_3_1,
    "0.4.0": as_0_4_0,
}
SAME = (
    *("trace_id", "task_type", "task_idx", "task_name", "task_prompt", "task_label", "reward", "rewards", "metrics"),
    *(
        "is_completed",
        "is_truncated",
        "stop_condition",
        "error_types",
        "error_messages",
        "info",
        "runtime",
        "started_at",
    ),
    *(
        "generation_start",
        "generation_end",
        "scoring_end",
        "token_ids",
        "sampled",
        "is_content",
        "node_parent",
        "node_role",
    ),
    *(
        "node_content",
        "node_reasoning",
        "node_tool_calls",
        "node_tokens",
        "node_logprobs",
        "node_sampled",
        "node_timestamp",
    ),
    *(
        "node_finish_reason",
        "node_prompt_tokens",
        "node_completion_tokens",
        "node_cached_tokens",
        "node_reasoning_tokens",
    ),
    *("node_raw", "num_nodes", "num_turns", "num_branches", "num_tokens", "num_sampled"),
)
"""Columns that hold the same, whichever release wrote the rollout."""


@pytest.mark.parametrize("name", ["forks", "group_rewards", "reasoning", "tools", "truncated"])
def test_one_rollout_in_the_shapes_of_all_releases_is_one_row(tmp_path: Path, name: str) -> None:
    tables = {}
    for release, shape in SHAPES.items():
        (tmp_path / release).mkdir()
        tables[release] = imported(tmp_path / release, *map(shape, recorded(name)))
    first = tables["0.2.0"].select(list(SAME)).to_pylist(maps_as_pydicts="strict")
    for release, table in tables.items():
        for one, other in zip(first, table.select(list(SAME)).to_pylist(maps_as_pydicts="strict"), strict=True):
            assert json.dumps(one) == json.dumps(other), release
    for release in ("0.2.1", "0.3.0", "0.3.1"):
        assert tables[release].column("logprobs").equals(tables["0.2.0"].column("logprobs"))
    rounded = tables["0.4.0"].column("logprobs").to_pylist()
    for one, other in zip(tables["0.2.0"].column("logprobs").to_pylist(), rounded, strict=True):
        assert [x is None for x in one] == [x is None for x in other]
        assert max((abs(a - b) for a, b in zip(one, other, strict=True) if a is not None), default=0.0) <= 5.1e-5
    assert tables["0.2.0"].column("scores").null_count == len(first)
    for row in tables["0.3.0"].to_pylist(maps_as_pydicts="strict"):
        assert row["scores"] == {k: v / WEIGHT for k, v in row["rewards"].items()}
        assert row["weights"] == dict.fromkeys(row["rewards"], WEIGHT)


@pytest.mark.parametrize("release", RELEASES)
def test_settings_are_read_from_the_agent(tmp_path: Path, release: str) -> None:
    [row] = imported(tmp_path, SHAPES[release](recorded("single_turn")[0])).to_pylist()
    sampling = SAMPLING if release != "0.4.0" else without_nulls(SAMPLING)
    assert (row["model"], json.loads(row["sampling"])) == ("org/model", sampling)
    assert row["verifiers_version"] == release
    assert open_run(tmp_path / "run").info["model"] == "org/model"
    if release != "0.2.1":
        assert (json.loads(row["renderer"]), row["tokenizer"]) == ({"name": "qwen3"}, "org/tokenizer")


@pytest.mark.parametrize("release", RELEASES)
def test_the_shapes_built_here_are_those_the_releases_write(release: str) -> None:
    """Keys of a trace, its nodes, calls, rewards and agent, in order, against a recorded trace of the release."""
    built, real = (
        line.get("traces", [line])[0]
        for line in (SHAPES[release](recorded("single_turn")[0]), recorded("single_turn", release)[0])
    )
    late = ("mm_token_type_id_map", "request_rewrites", "response_rewrites", "num_input_tokens", "num_output_tokens")
    assert set(built) ^ set(real) <= {*late, "num_total_tokens", "is_timeout"}
    assert [k for k in built if k != "is_timeout"] == [k for k in real if k in built and k != "is_timeout"]
    assert list(built["nodes"][-1]) == list(real["nodes"][-1])
    assert set(built["calls"][-1]) == set(real["calls"][-1])
    assert set(built["agent"]) == set(real["agent"])
    assert [type(v) for v in built["rewards"].values()] == [type(v) for v in real["rewards"].values()]
    assert set(built["timing"]) == set(real["timing"])


# -- where releases say things in several places


def call(node: int | None, finish: str | None, **changes: Any) -> Record:
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    return {"node": node, "finish_reason": finish, "usage": usage, "error": None} | changes


def later(*calls: Record, **changes: Any) -> Record:
    record = as_0_2_1(trace(said(None, [1, 2]), reply(0, [3], [4, 5, 6], finish=None)))
    return {**record, "calls": list(calls), **changes}


@pytest.mark.parametrize(
    ("calls", "truncated"),
    [
        ([call(1, "length")], True),
        ([call(1, "stop")], False),
        ([call(1, "stop"), call(None, "length")], True),
        ([call(1, "length"), call(None, None, error={"type": "E", "message": "m"})], True),
        ([call(1, "length"), call(None, "stop")], False),
        ([], False),
    ],
)
def test_a_last_call_that_ended_by_length_is_truncation(calls: list[Record], truncated: bool) -> None:
    assert encode([later(*calls)]).column("is_truncated").to_pylist() == [truncated]


@pytest.mark.parametrize(
    ("stop", "truncated"),
    [("max_turns", True), ("compaction_failed", True), ("agent_timeout", False), ("agent_completed", False)],
)
def test_limits_of_every_release_are_truncation_and_a_timeout_of_the_agent_is_none(stop: str, truncated: bool) -> None:
    assert encode([later(call(1, "stop"), stop_condition=stop)]).column("is_truncated").to_pylist() == [truncated]


def test_of_several_calls_of_a_node_the_last_one_counts_and_odd_ones_are_passed_over() -> None:
    odd = ["no call", {"node": True}, {"node": 99, "finish_reason": "length"}, {"node": -1}, {}]
    usage = {"prompt_tokens": 2**70, "completion_tokens": 5, "cost": 1}
    record = later(call(1, "length"), *odd, call(1, "stop", usage=usage))  # type: ignore[arg-type]
    table = encode([record])
    [row] = table.to_pylist()
    assert row["node_finish_reason"] == [None, "stop"]
    assert (row["node_prompt_tokens"], row["node_completion_tokens"]) == ([None, None], [None, 5])
    assert row["node_cost"] == [None, 1.0]
    assert json.dumps(decode(table)) == json.dumps([record])


def test_what_a_node_says_itself_is_not_replaced_by_its_call() -> None:
    record = later(call(1, "stop"))
    record["nodes"][1] |= {"finish_reason": None, "usage": None}
    table = encode([record])
    assert table.column("node_finish_reason").to_pylist() == [[None, None]]
    assert table.column("node_completion_tokens").to_pylist() == [[None, None]]
    assert json.dumps(decode(table)) == json.dumps([record])


def test_a_reward_that_was_not_scored_is_null_and_not_zero(tmp_path: Path) -> None:
    episode = as_0_3_0(recorded("single_turn")[0])
    episode["traces"][0]["rewards"] = {"ok": None, "other": {"score": 1.0, "weight": 2.0}}
    episode["traces"][0]["metrics"] = {"m": None}
    [row] = imported(tmp_path, episode).to_pylist(maps_as_pydicts="strict")
    assert (row["reward"], row["rewards"], row["metrics"]) == (None, {"ok": None, "other": 2.0}, {"m": None})
    assert (row["scores"], row["weights"]) == ({"other": 1.0}, {"other": 2.0})
    [group] = open_run(tmp_path / "run").groups()
    assert {k: (v.count, v.sum) for k, v in group.rewards.items()} == {"ok": (0, None), "other": (1, 2.0)}


@pytest.mark.parametrize(
    ("version", "logprobs", "decimals"),
    [
        ("0.4.0", [-0.1234, -0.5, -0.0], 4),
        ("0.4.0", [-0.5, -0.25, -0.0], 4),
        ("0.4.0", [-0.123456, -0.5, -0.0], None),
        ("0.3.0", [-0.5, -0.25, -0.0], None),
        ("0.3.0", [-0.1234, -0.5, -0.0], 4),
        ("1.0.0", [-0.5, -0.25, -0.0], 4),
        ("main", [-0.5, -0.25, -0.0], None),
    ],
)
def test_rounded_log_probs_are_marked_also_where_float32_holds_them(
    version: str, logprobs: list[float], decimals: int | None
) -> None:
    record = later(call(1, "stop"), verifiers={"version": version})
    record["nodes"][1]["logprobs"] = logprobs
    table = encode([record])
    assert table.column("logprob_decimals").to_pylist() == [decimals]
    assert json.dumps(decode(table)) == json.dumps([record])


def test_a_release_is_told_by_what_the_record_says_and_not_by_its_version_field(tmp_path: Path) -> None:
    record = later(call(1, "stop"), version=1)
    (tmp_path / "traces.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(turn(id="old") | {"version": 2}))
    done = import_files(tmp_path / "traces.jsonl", tmp_path / "run")
    assert done.releases == {"0.2.0": 1, "0.2.1": 1}


# -- Episodes


def episode(*ids: str, **changes: Any) -> Record:
    """An Episode of several traces, with all that can stand around them."""
    traces = [as_0_4_0(turn(id=i))["traces"][0] for i in ids]
    around = {"id": "e1", "env": {"id": "solve+judge"}, "task": traces[0]["task"], "group": {"id": "g1"}}
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": 3, "policy": {"start": 1, "end": 2}}}
    return {**around, "run": run, "ok": True, "errors": [], "traces": traces, "num_total_tokens": 2**70} | changes


def test_an_episode_of_several_traces_is_a_row_each_and_can_be_made_again(tmp_path: Path) -> None:
    line = episode("a", "b", "c")
    line["traces"][1]["task"] = {"type": "Other", "data": {}}
    table = imported(tmp_path, line)
    episodes = [episode_of(extra) for extra in table.column("extra").to_pylist()]
    assert [(e.id, e.index, e.traces, e.shared) for e in episodes if e is not None] == [
        ("e1", 0, 3, ("task",)),
        ("e1", 1, 3, ()),
        ("e1", 2, 3, ("task",)),
    ]
    assert episodes[0] is not None
    assert json.dumps(line_of(episodes[0], decode(table))) == json.dumps(line)
    assert episode_of(None) is None


def test_a_task_that_is_equal_and_written_otherwise_is_kept_apart(tmp_path: Path) -> None:
    line = episode("a")
    line["task"] = copy.deepcopy(line["task"]) | {"data": {**line["task"]["data"], "idx": 0.0}}
    table = imported(tmp_path, line)
    found = episode_of(table.column("extra")[0].as_py())
    assert found is not None
    assert json.dumps(line_of(found, decode(table))) == json.dumps(line)


def test_bad_traces_of_an_episode_are_named_and_cost_only_themselves(tmp_path: Path) -> None:
    line = episode("a", "b")
    line["traces"] += [3, {"id": "c"}, line["traces"][0]]
    (tmp_path / "traces.jsonl").write_text(json.dumps(line))
    done = import_files(tmp_path / "traces.jsonl", tmp_path / "run")
    assert (done.lines, done.imported, done.traces) == (1, 1, 2)
    assert [(left.line, left.kind, left.trace, left.why) for left in done.left] == [
        (1, "skipped", None, "trace 2 of the Episode: a JSON int; expected an object"),
        (1, "skipped", "c", "trace 3 of the Episode: no task; expected a trace or an Episode of Verifiers"),
        (1, "repeated", "a", "trace a had come before"),
    ]


# -- JSON


def test_json_is_read_alike_with_and_without_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    if not import_lines.IS_FAST:
        pytest.skip("msgspec is not installed")
    texts = [
        *(
            b"-0",
            b"-0.0",
            b"1E5",
            b"1.0",
            b"18446744073709551616",
            b"-9223372036854775809",
            b"1" * 4000,
            b"1e400",
            b"-1e400",
        ),
        *(b"NaN", b"[Infinity,-Infinity]", b"4.9e-324", b"2.4703282292062327e-324", b"9007199254740993", b"0.1e-7"),
        *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\xed\xa0\x80"', b'{"\\ud800":1}', b'"\\u0000\\/"'),
        *(b'{"a":1,"b":2,"a":3}', b"\xef\xbb\xbf{}", b" [1 , 2] ", b'"\xe2\x80\xa8"', b"[" * 900 + b"]" * 900),
        *(b"01", b"1.", b".5", b"+1", b"[1,]", b'{"a":1,}', b'"\x01"', b'"\xff"', b"{} {}", b"", b"nul", b"[" * 99_999),
    ]

    def read(text: bytes) -> str:
        try:
            value = import_lines.parse(text)
        except (ValueError, RecursionError):
            return "refused"
        return f"{type(value)} {value!r}"

    fast = [read(text) for text in texts]
    monkeypatch.setattr(import_lines, "_fast", None)
    assert fast == [read(text) for text in texts]


def test_without_msgspec_an_import_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_files(TRACES / "0.4.0" / "multi_branch.jsonl", tmp_path / "fast")
    monkeypatch.setattr(import_lines, "_fast", None)
    import_files(TRACES / "0.4.0" / "multi_branch.jsonl", tmp_path / "slow")
    fast, slow = (decode(open_run(tmp_path / name).table()) for name in ("fast", "slow"))
    assert json.dumps(fast) == json.dumps(slow)
