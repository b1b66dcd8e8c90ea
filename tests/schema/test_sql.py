"""SQL over files of the nastiest records there are: every column reads, every JSON text is valid, numbers are right."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_records import FILES, node, record, recorded, text_of
from schema_strategies import ANY_RECORD, GENERATED

from rolltape.schema import ROW, Context, Outcome, Turn, decode, encode, parquet
from rolltape.schema.parquet import read_parquet, write_parquet
from rolltape.schema.table import with_outcomes

JSON_COLUMNS = (
    "task",
    "info",
    "runtime",
    "extra_usage",
    "agent",
    "tools",
    "calls",
    "sampling",
    "renderer",
    "handed_reward",
)
JSON_LISTS = ("node_parts", "node_tool_calls")
SOMETIMES_JSON = ("task_prompt", "task_label")
NAN, INF = math.nan, math.inf

NASTY = [
    record(id="plain"),
    record(id="nan", rewards={"ok": NAN}, metrics={"m": NAN}),
    record(id="inf", rewards={"ok": INF, "b": -INF}, metrics={"m": -INF}),
    record(id="minus zero", rewards={"ok": -0.0}),
    record(id="names", rewards={"a.b": 0.25, 'q"uote': 0.5, "x y/z": 1.0, "ü\u2028": 2.0, "": 3.0, "'": 4.0}),
    record(id="surrogates \ud800", rewards={"\ud800": 1.0, chr(0xDFFF): 2.0}, stop_condition="\ud83d\ude00"),
    record(id="null name", rewards={"ok": None}, metrics={"m": None}),
    record(id="scores", rewards={"ok": {"score": 0.5, "weight": NAN}, "b": {"score": "x"}, "\ud800": {"score": 1.0}}),
    record(id="bare NaN", info={"x": [NAN, INF, {"\ud800": "\udc00"}], "big": 2**70, "nul": "a\0b", "line": "\u2028"}),
    record(id="info text", info="\ud800"),
    record(id="info number", info=NAN),
    record(id="info null", info=None),
    record(id="info list", info=[[], {}, [None]]),
    record(id="huge number", info={"x": 10**4000, "y": -(10**400), "z": 1e308}),
    record(id="keys", info={"$": 1, "a.b": 2, 'q"': 3, "": 4, "\0": 5, "\\": 6, "ü": 7}),
    record(id="deep", info=json.loads("[" * 800 + "]" * 800)),
    record(id="no nodes", nodes=[]),
    record(id="nodes text", nodes="x"),
    record(id="nodes null", nodes=None),
    record(id="message null", nodes=[node(role="user", content="", ids=[], mask=[], message=None)]),
    record(id="errors", errors=[{"type": "E\ud800", "message": "\0", "traceback": "\udc00"}, {"type": None}, 5]),
    record(id="task text", task="x"),
    record(id="task nan", task={"type": "\ud800", "data": {"idx": 2**64, "prompt": [NAN], "answer": {"\ud800": INF}}}),
    record(id="task nul", task={"type": "T\0", "data": {"idx": True, "name": "\0", "prompt": "\ud800", "answer": NAN}}),
    record(id="version", verifiers={"version": "\ud800"}, future={"\ud800": [NAN]}),
    record(id="timing", timing={"start": NAN, "setup": {"start": INF, "end": "x"}}),
    record(
        id="parts",
        nodes=[
            node(role="user", content=[{"type": "text", "text": "\ud800"}, {"x": NAN}, 7, None], ids=[0], mask=[False]),
            node(role="\ud800", content={"a": NAN}, ids=[2**31 - 1, -(2**31)], mask=[True, True], logprobs=[NAN, -INF]),
            node(role="tool", content=[], ids=[2**31], mask=[True], logprobs=[0.0]),
            node(role="assistant", content="\0", ids=[1, 2], mask=[True], logprobs=[-0.1], usage={"cost": NAN}),
        ],
    ),
    {"id": ""},
]
EMPTY: list[dict[str, Any]] = [{"id": "x"}, {"id": "y", "nodes": [], "rewards": {}, "metrics": {}, "errors": []}]
NULL = dict.fromkeys(record()) | {"id": "z"}
CONTEXT = Context(sampling={"t": NAN, "\ud800": "\udc00"}, renderer={}, model="\ud800", turns=(Turn(engine="\ud800"),))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of one schema and very different content."""
    folder = tmp_path_factory.mktemp("files")
    outcomes = [
        Outcome(trace_id="nan", disposition="emitted", handed_reward={"\ud800": NAN}, logprobs=np.array([NAN], "f4"))
    ]
    tables = {
        "nasty": with_outcomes(encode(NASTY, [CONTEXT] * len(NASTY)), outcomes),
        "plain": encode([record(id="p")]),
        "empty": encode(EMPTY),
        "null": encode([NULL]),
        "no rows": encode([]),
        "later": encode([t for f in FILES if not f.startswith("0.2.0") for t in recorded(f)]),
    }
    for name, table in tables.items():
        write_parquet(folder / f"{name}.parquet", [table])
    return {name: folder / f"{name}.parquet" for name in tables}


@pytest.fixture
def sql() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        yield connection


def over(paths: Any) -> str:
    """The FROM clause of some files."""
    names = [str(p) for p in paths]
    return f"read_parquet({names})"


def strict(text: str) -> None:
    """Refuse what only some JSON readers take: DuckDB calls NaN and a trailing comma valid, others do not."""
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in a JSON column"))


def check_sql(sql: duckdb.DuckDBPyConnection, source: str) -> int:
    """Read everything there is in `source`; the number of its rows."""
    rows = sql.sql(f"SELECT * FROM {source}").fetchall()
    texts = [f"SELECT {column} AS text FROM {source}" for column in JSON_COLUMNS]
    texts += [f"SELECT unnest({column}) AS text FROM {source}" for column in JSON_LISTS]
    texts += [f"SELECT {column} AS text FROM {source} WHERE {column}_is_json" for column in SOMETIMES_JSON]
    for query in texts:
        found = sql.sql(f"SELECT text, json_valid(text) FROM ({query}) WHERE text IS NOT NULL").fetchall()
        assert all(valid for _, valid in found), query
        for text, _ in found:
            strict(text)
        sql.sql(f"SELECT json_extract_string(text, '$.x'), json_type(text) FROM ({query})").fetchall()
    return len(rows)


# -- every column of every row


@pytest.mark.parametrize("name", ["nasty", "plain", "empty", "null", "no rows", "later"])
def test_every_column_reads_and_every_json_text_is_valid(
    name: str, files: dict[str, Path], sql: duckdb.DuckDBPyConnection
) -> None:
    assert check_sql(sql, over([files[name]])) == pq.read_metadata(files[name]).num_rows


def test_the_nasty_records_themselves_come_back(files: dict[str, Path]) -> None:
    assert [text_of(r) for r in decode(read_parquet(files["nasty"]))] == [text_of(r) for r in NASTY]


@settings(GENERATED, max_examples=25)
@given(st.lists(ANY_RECORD, min_size=1, max_size=4))
def test_sql_reads_any_records(records: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as sql:
        path = Path(folder) / "a.parquet"
        table = encode(records)
        write_parquet(path, [table])
        assert check_sql(sql, over([path])) == len(records)
        sums = sql.sql(f"SELECT coalesce(list_sum(token_ids), 0) FROM {over([path])}").fetchall()
        assert [s for (s,) in sums] == [sum(ids) for ids in table["token_ids"].to_pylist()]


# -- one schema


def test_every_file_has_the_same_columns_and_types(files: dict[str, Path], sql: duckdb.DuckDBPyConnection) -> None:
    for path in files.values():
        required = {"token_ids", "sampled"}  # their lists hold no null, and files say so
        types = [
            pa.list_(pa.field("element", f.type, False)) if f.name in required else f.arrow_type for f in ROW.fields
        ]
        assert pq.read_schema(path).types == types
        assert pq.read_schema(path).names == ROW.arrow.names
        assert read_parquet(path).schema.types == [f.arrow_type for f in ROW.fields]
    described = [sql.sql(f"DESCRIBE SELECT * FROM {over([p])}").fetchall() for p in files.values()]
    assert all(d == described[0] for d in described)
    types = {name: kind for name, kind, *_ in described[0]}
    assert types["token_ids"] == "INTEGER[]"
    assert types["logprobs"] == "FLOAT[]"
    assert types["rewards"] == "MAP(VARCHAR, DOUBLE)"
    assert types["extra"] == "BLOB"
    assert "NULL" not in " ".join(types.values())


def test_files_are_read_together_in_any_order(files: dict[str, Path], sql: duckdb.DuckDBPyConnection) -> None:
    """Without union_by_name: a file that only holds nulls or no rows may come first."""
    total = sum(pq.read_metadata(p).num_rows for p in files.values())
    ids = None
    for first in files:
        order = [files[first], *(p for name, p in files.items() if name != first)]
        assert check_sql(sql, over(order)) == total
        found = sorted(sql.sql(f"SELECT trace_id, num_tokens, reward::VARCHAR FROM {over(order)}").fetchall(), key=repr)
        ids = ids or found
        assert found == ids


def test_pyarrow_datasets_read_the_files_in_any_order(files: dict[str, Path]) -> None:
    for order in itertools.islice(itertools.permutations(files.values()), 0, None, 97):
        dataset = ds.dataset([str(p) for p in order])
        table = dataset.to_table()
        assert table.num_rows == sum(pq.read_metadata(p).num_rows for p in files.values())
        assert table.schema.names == list(ROW.by_name)
        assert dataset.to_table(columns=["token_ids"], filter=pc.field("num_sampled") > 2).num_rows > 5


# -- numbers


def test_token_ids_are_exact_in_sql(tmp_path: Path, sql: duckdb.DuckDBPyConnection) -> None:
    ids = [0, 1, 151_935, 2**31 - 1, -1, -(2**31), 16_777_217]
    given_record = record(nodes=[node(role="user", content="", ids=ids, mask=[False] * 7)])
    write_parquet(tmp_path / "a.parquet", [encode([given_record])])
    (found,) = sql.sql(f"SELECT token_ids, list_sum(token_ids) FROM {over([tmp_path / 'a.parquet'])}").fetchall()
    assert found == (ids, sum(ids))


def test_log_probs_of_tokens_that_were_not_sampled_are_null_and_never_zero(
    tmp_path: Path, sql: duckdb.DuckDBPyConnection
) -> None:
    """10 tool tokens beside 10 sampled ones: a mean over placeholders would be half as large."""
    sampled = node(role="assistant", content="", ids=list(range(10)), mask=[True] * 10, logprobs=[-0.5] * 10, parent=0)
    tool = node(role="tool", content="", ids=list(range(10)), mask=[False] * 10, parent=1)
    lost = node(role="assistant", content="", ids=[1, 2], mask=[True, True], parent=2)
    write_parquet(tmp_path / "a.parquet", [encode([record(nodes=[sampled, tool, lost])])])
    source = over([tmp_path / "a.parquet"])
    assert sql.sql(f"SELECT list_avg(logprobs), len(logprobs), list_count(logprobs) FROM {source}").fetchall() == [
        (-0.5, 22, 10)
    ]
    assert sql.sql(f"SELECT node_tokens, node_logprobs, num_sampled FROM {source}").fetchall() == [
        ([10, 10, 2], [10, 0, 0], 12)
    ]


FILTERS = (
    "reward > 0.55",
    "reward < 0.55",
    "reward = 0.5",
    "isnan(reward)",
    "reward >= 'inf'::DOUBLE",
    "reward IS NULL",
)


@pytest.mark.parametrize("condition", FILTERS)
def test_filters_on_rewards_are_right_in_the_face_of_nan(
    condition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: duckdb.DuckDBPyConnection
) -> None:
    """Over a file and in memory alike: min and max of a column with NaN would make a reader skip row groups that match."""
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 6_000)
    values = [0.5, NAN, 0.1, 0.6, None, NAN, -1.0, INF, 0.55, -INF, 0.56, None]
    records = [record(id=f"t{i}", rewards={} if v is None else {"ok": v}) for i, v in enumerate(values)]
    path = tmp_path / "a.parquet"
    write_parquet(path, [encode(records)])
    assert pq.read_metadata(path).num_row_groups > 2
    memory = encode(records).select(["trace_id", "reward"])
    sql.register("memory", memory)
    expected = sql.sql(f"SELECT trace_id FROM memory WHERE {condition} ORDER BY 1").fetchall()
    assert sql.sql(f"SELECT trace_id FROM {over([path])} WHERE {condition} ORDER BY 1").fetchall() == expected
    assert expected, "the filter finds something"


def test_pyarrow_filters_are_right_in_the_face_of_nan(tmp_path: Path) -> None:
    records = [record(id=f"t{i}", rewards={"ok": v}) for i, v in enumerate([NAN, 0.9, 0.1, NAN])]
    write_parquet(tmp_path / "a.parquet", [encode(records)])
    found = ds.dataset(str(tmp_path / "a.parquet")).to_table(columns=["trace_id"], filter=pc.field("reward") > 0.55)
    assert found["trace_id"].to_pylist() == ["t1"]


def test_no_float_column_has_statistics_and_the_keys_have() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "a.parquet", [encode(NASTY)])
        group = pq.read_metadata(Path(folder) / "a.parquet").row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    with_statistics = {c.path_in_schema for c in columns if c.is_stats_set}
    assert not any(c.physical_type in ("FLOAT", "DOUBLE") and c.is_stats_set for c in columns)
    assert {"step", "trace_id", "group_index", "split", "task_idx"} <= with_statistics


def test_token_columns_are_encoded_as_measured() -> None:
    """Dictionaries of token ids depend on the width of their index; masks are runs."""
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "a.parquet", [encode([record()])])
        group = pq.read_metadata(Path(folder) / "a.parquet").row_group(0)
    columns = {c.path_in_schema.split(".")[0]: c for c in (group.column(i) for i in range(group.num_columns))}
    for name in ("token_ids", "logprobs"):
        assert "BYTE_STREAM_SPLIT" in columns[name].encodings
        assert not columns[name].has_dictionary_page
    assert "RLE" in columns["sampled"].encodings
    assert {c.compression for c in columns.values()} == {"ZSTD"}


# -- names and texts


@pytest.mark.parametrize(
    ("name", "value"), [("a.b", 0.25), ('q"uote', 0.5), ("x y/z", 1.0), ("ü\u2028", 2.0), ("", 3.0), ("'", 4.0)]
)
def test_rewards_of_any_name_are_found(
    name: str, value: float, files: dict[str, Path], sql: duckdb.DuckDBPyConnection
) -> None:
    query = f"SELECT rewards[?] FROM {over([files['nasty']])} WHERE trace_id = 'names'"
    assert sql.execute(query, [name]).fetchall() == [(value,)]


def test_reward_names_can_be_listed_and_summed(files: dict[str, Path], sql: duckdb.DuckDBPyConnection) -> None:
    entries = (
        f"SELECT unnest(map_entries(rewards)) AS e FROM {over([files['nasty']])} WHERE trace_id IN ('names', 'plain')"
    )
    assert sql.sql(f"SELECT sum(e.value), count(DISTINCT e.key) FROM ({entries})").fetchall() == [(11.75, 7)]


def test_a_null_reward_is_not_zero(files: dict[str, Path], sql: duckdb.DuckDBPyConnection) -> None:
    query = f"SELECT reward, rewards['ok'], metrics['m'] FROM {over([files['nasty']])} WHERE trace_id = 'null name'"
    assert sql.sql(query).fetchall() == [(None, None, None)]


@pytest.mark.parametrize(("key", "value"), [("$", "1"), ("a.b", "2"), ("ü", "7"), ("\\", "6"), ("", "4")])
def test_json_keys_of_any_name_are_found(
    key: str, value: str, files: dict[str, Path], sql: duckdb.DuckDBPyConnection
) -> None:
    entries = f"SELECT unnest(json_keys(info)) AS key, info FROM {over([files['nasty']])} WHERE trace_id = 'keys'"
    assert (key,) in sql.sql(f"SELECT key FROM ({entries})").fetchall()
    pointer = "/" + key.replace("~", "~0").replace("/", "~1")
    query = f"SELECT json_extract_string(info, ?) FROM {over([files['nasty']])} WHERE trace_id = 'keys'"
    assert sql.execute(query, [pointer]).fetchall() == [(value,)]


def test_nul_characters_and_line_separators_reach_sql(files: dict[str, Path], sql: duckdb.DuckDBPyConnection) -> None:
    columns = "json_extract_string(info, '$.nul'), info->>'$.line'"
    query = f"SELECT {columns} FROM {over([files['nasty']])} WHERE trace_id = 'bare NaN'"
    assert sql.sql(query).fetchall() == [("a\0b", "\u2028")]
    query = f"SELECT task_type, task_name FROM {over([files['nasty']])} WHERE trace_id = 'task nul'"
    assert sql.sql(query).fetchall() == [("T\0", "\0")]


def test_what_sql_cannot_hold_is_replaced_in_columns_only(
    files: dict[str, Path], sql: duckdb.DuckDBPyConnection
) -> None:
    """NaN becomes null and lone surrogates U+FFFD, in the column; the record keeps both."""
    query = f"SELECT info FROM {over([files['nasty']])} WHERE trace_id = 'bare NaN'"
    ((text,),) = sql.sql(query).fetchall()
    assert json.loads(text)["x"] == [None, None, {"\ufffd": "\ufffd"}]
    query = f"SELECT count(*) FROM {over([files['nasty']])} WHERE trace_id = 'surrogates \ufffd'"
    assert sql.sql(query).fetchall() == [(1,)]


def test_errors_are_counted_by_class(files: dict[str, Path], sql: duckdb.DuckDBPyConnection) -> None:
    query = f"SELECT error_types, len(error_messages) FROM {over([files['nasty']])} WHERE trace_id = 'errors'"
    assert sql.sql(query).fetchall() == [(["E\ufffd", None], 2)]


def test_lists_of_one_row_have_one_length(files: dict[str, Path], sql: duckdb.DuckDBPyConnection) -> None:
    tokens = [f.name for f in ROW.fields if f.shape == "token" and f.name != "recomputed_logprobs"]
    nodes = [f.name for f in ROW.fields if f.shape == "node"]
    for count, names in (("num_tokens", tokens), ("num_nodes", nodes)):
        wrong = " OR ".join(f"len({name}) IS DISTINCT FROM {count}" for name in names)
        assert sql.sql(f"SELECT trace_id FROM {over(files.values())} WHERE {wrong}").fetchall() == []
    wrong = "list_sum(node_tokens) IS DISTINCT FROM num_tokens AND num_nodes > 0"
    assert sql.sql(f"SELECT trace_id FROM {over(files.values())} WHERE {wrong}").fetchall() == []


def test_columns_of_a_folder_called_key_value_come_from_the_file(
    tmp_path: Path, sql: duckdb.DuckDBPyConnection
) -> None:
    """Our own folders are never called so (see check_name); a user may still put a run below one."""
    path = tmp_path / "run=007" / "a.parquet"
    write_parquet(path, [encode([record()], [Context(run="envA/0")])])
    query = f"SELECT run FROM read_parquet('{path}', hive_partitioning = false)"
    assert sql.sql(query).fetchall() == [("envA/0",)]
