"""Secrets are planted wherever they can enter a run, and every byte it writes is searched for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rolltape.record.cli import summary_text
from rolltape.record.engine import DemoEngine, write_tokenizer
from rolltape.record.live import LiveOptions, run_live
from rolltape.record.progress import Quiet, TraceNews
from rolltape.record.secrets import Secrets
from rolltape.record.writing.journal import read_journal
from rolltape.replay.run import open_run
from rolltape.replay.verification.verify import verify
from rolltape.schema.decoding import decode
from rolltape.schema.parquet import read_parquet

PLANTED = {
    "harness env": "planted-mosquito-01",
    "harness env without a telling name": "PlantedMosquito02",
    "taskset api key": "planted-mosquito-03",
    "taskset key": "planted-mosquito-04",
    "taskset token": "planted-mosquito-05",
    "taskset header": "planted-mosquito-06",
    "taskset list of keys": "planted-mosquito-07",
    "taskset url": "planted-mosquito-08",
    "engine password": "planted-mosquito-09",
    "engine query": "planted-mosquito-10",
    "forwarded variable": "planted-mosquito-11",
    "runtime": "planted-mosquito-12",
    "info password": "planted-mosquito-13",
    "info token": "planted-93vX0pLm2-14",
    "info header": "planted-mosquito-15",
    "info signed url": "planted-mosquito-16",
    "info text": "planted-mosquito-17",
    "info beside a number no column holds": "planted-mosquito-18",
    "error bearer": "planted-93vX0pLm2-19",
    "error url": "planted-mosquito-20",
    "error variable": "planted-mosquito-21",
    "error of known shape": "sk-proj-planted93vX0pLm222",
    "traceback": "planted-mosquito-23",
    "group reward": "planted-93vX0pLm2-24",
    "own pattern": "planted_ticket_25",
}

SAID = "My password=planted-in-message, Authorization: Bearer planted-in-message-9."

TASKSET = """
import os
import verifiers.v1 as vf
from rolltape.record.inprocess import InProcessHarness

P = PLANTED

class Config(vf.TasksetConfig):
    judge_api_key: str = ""
    key: str = ""
    search_token: str = ""
    extra_headers: dict[str, str] = {}
    api_keys: list[str] = []
    database: str = ""
    reward_key: str = ""
    max_tokens: int = 0
    tokenizer: str = ""

class Asked(vf.Task):
    async def setup(self, trace) -> None:
        trace.runtime.id = f"https://ann:{P['runtime']}@sandbox.example.com/7"
        trace.info.update(
            account={"user": "ann", "password": P["info password"]},
            token=P["info token"],
            request={"headers": {"X-Team": P["info header"], "Accept": "text/html"}},
            link=f"https://bucket.example.com/x?X-Amz-Expires=9&X-Amz-Signature={P['info signed url']}",
            log=[f"DB_PASSWORD={P['info text']} run"],
            odd={"nan": float("nan"), "lone": "\\ud800", "client_secret": P["info beside a number no column holds"]},
            ticket=P["own pattern"],
            author="Zoë", monkey="Coco", reward_key="correct", winner_key="b", stop_token_ids=[1, 2],
        )

    async def finalize(self, trace) -> None:
        if self.data.idx == 1:
            password = f"http://ann:{P['traceback']}@h"
            try:
                raise KeyError(password)
            except KeyError as error:
                raise ValueError(
                    f"GET https://h/x?page=2&token={P['error url']} with Bearer {P['error bearer']} failed: "
                    f"OPENAI_API_KEY={P['error variable']} {P['error of known shape']} "
                    f"{os.environ['PLANTED_JUDGE_KEY']} {P['harness env']} {P['engine password']}"
                ) from error

    @vf.reward
    async def correct(self, trace) -> float:
        return 1.0

    @vf.metric
    async def max_tokens(self, trace) -> float:
        return 3.0

    @vf.group_reward
    async def password(self, traces) -> list[float]:
        if self.data.idx == 2:
            raise ValueError(f"the referee said Bearer {P['group reward']}")
        return [0.5 for _ in traces]

class Asks(vf.Taskset[Asked, Config]):
    def load(self):
        return [Asked(vf.TaskData(idx=i, prompt=SAID), self.config.task) for i in range(3)]

class Plain(InProcessHarness):
    pass

__all__ = ["Asks", "Plain"]
"""

ENVIRONMENT = """
[retries.rollout]
max_retries = 1

[taskset]
id = "planted"
judge_api_key = "{taskset api key}"
key = "{taskset key}"
search_token = "{taskset token}"
api_keys = ["{taskset list of keys}"]
database = "postgres://ann:{taskset url}@db/x"
reward_key = "correct"
max_tokens = 512
tokenizer = "/models/q"

[taskset.extra_headers]
X-Team = "{taskset header}"

[harness]
forward_env = ["PLANTED_JUDGE_KEY"]

[harness.env]
OPENAI_API_KEY = "{harness env}"
FLAVOUR = "{harness env without a telling name}"
UV_EXCLUDE_NEWER = "2026-07-15T00:00:00Z"
"""


def bytes_of(folder: Path) -> Iterator[tuple[str, str]]:
    """(where, what) of everything in a run's folder: raw, and taken apart where it is compressed."""
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        raw = file.read_bytes()
        yield file.name, raw.decode("utf-8", "replace")
        if file.suffix == ".journal" and raw:
            yield file.name, "".join(repr(vars(record) | vars(record.row or record)) for record in read_journal(file))
        if file.suffix == ".parquet":
            table = read_parquet(file)
            yield file.name, repr(table.to_pylist()) + repr(table.schema.metadata)
            yield f"{file.name} decoded", repr(decode(table))


def found(folder: Path) -> dict[str, list[str]]:
    """Which secrets stand where."""
    places: dict[str, list[str]] = {}
    for where, text in bytes_of(folder):
        for name, secret in PLANTED.items():
            if secret in text:
                places.setdefault(name, []).append(where)
    return places


class Searching(Quiet):
    """Searches the folder while the run is open."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found, self.journaled = folder, {}, 0

    def trace(self, news: TraceNews) -> None:  # noqa: ARG002
        self.found |= found(self.folder)
        self.journaled += any("Zoë" in text for where, text in bytes_of(self.folder) if where.endswith(".journal"))


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveOptions]:
    """A run with secrets wherever one can enter."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PLANTED_JUDGE_KEY", PLANTED["forwarded variable"])
    monkeypatch.delitem(__import__("sys").modules, "planted", raising=False)
    (tmp_path / "planted.py").write_text(f"PLANTED = {PLANTED!r}\nSAID = {SAID!r}\n{TASKSET}")
    config = tmp_path / "env.toml"
    config.write_text(ENVIRONMENT.format(**PLANTED))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    with DemoEngine(tokenizer_dir=tokenizer).serve_in_thread() as engine:
        address = engine.url.replace("://", f"://ann:{PLANTED['engine password']}@")
        yield LiveOptions(
            config=config,
            run=tmp_path / "run",
            engine=f"{address}/?api_key={PLANTED['engine query']}",
            model="demo",
            tokenizer=tokenizer,
            renderer="qwen3",
            enable_thinking=False,
            renderer_pool=1,
            rollouts=2,
            groups=3,
            max_response=8,
            mask=(r"planted_ticket_\d+",),
        )


def test_no_planted_secret_is_in_any_byte_of_a_run(options: LiveOptions) -> None:
    searching = Searching(Path(options.run))
    summary = asyncio.run(run_live(options, progress=searching))
    assert summary.counts == {"started": 8, "emitted": 2, "error": 2, "retried": 2, "incomplete_group": 2}
    assert searching.journaled > 0
    assert searching.found == {}
    assert found(Path(options.run)) == {}
    told = json.dumps(summary.to_dict()) + summary_text(summary)
    assert [name for name, secret in PLANTED.items() if secret in told] == []


def test_what_is_no_secret_is_recorded_as_it_is(options: LiveOptions) -> None:
    asyncio.run(run_live(options, progress=Quiet()))
    run = open_run(options.run)
    assert not verify(run).errors
    taskset = run.attempts[0].settings["environment"]["taskset"]
    assert (taskset["reward_key"], taskset["max_tokens"], taskset["tokenizer"]) == ("correct", 512, "/models/q")
    assert run.attempts[0].settings["environment"]["harness"]["env"]["UV_EXCLUDE_NEWER"] == "2026-07-15T00:00:00Z"
    assert run.attempts[0].settings["max_response"] == 8
    for record in decode(run.table()):
        info = record["info"]
        assert {k: info[k] for k in ("author", "monkey", "reward_key", "winner_key", "stop_token_ids")} == {
            "author": "Zoë",
            "monkey": "Coco",
            "reward_key": "correct",
            "winner_key": "b",
            "stop_token_ids": [1, 2],
        }
        assert info["account"] == {"user": "ann", "password": "***"}
        assert info["odd"]["lone"] == "\ud800"
        assert record["task"]["data"]["prompt"] == SAID
        assert record["nodes"][0]["message"]["content"] == SAID
        assert record["metrics"].get("max_tokens", 3.0) == 3.0
    emitted = [record for record in decode(run.table()) if "password" in record["rewards"]]
    assert [record["rewards"]["password"] for record in emitted][:2] == [0.5, 0.5]


def test_the_search_would_find_each_of_them(options: LiveOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Secrets, "mask", lambda _, value, name="": value)  # noqa: ARG005
    monkeypatch.setattr(Secrets, "mask_record", lambda _, record: record)
    monkeypatch.setattr(Secrets, "text", lambda _, text: text)
    options = replace(options, mask=())
    asyncio.run(run_live(options, progress=Quiet()))
    assert PLANTED.keys() - found(Path(options.run)).keys() == set()
