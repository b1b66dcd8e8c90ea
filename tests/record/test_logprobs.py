"""Log-probs of recorded tokens recomputed on an engine: aligned per branch and turn, at the recorded temperature."""

from __future__ import annotations

import copy
import json
import math
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_build import Record, trace
from rescore_build import DEMO

from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine, Faults
from rolltape.record.engine.model import ToyModel
from rolltape.record.engine.vocabulary import Vocabulary
from rolltape.record.rechecking.logprobs import EngineGivenUp, LogprobOptions, Recomputed, read_scores, recompute
from rolltape.record.recorder import Recorder
from rolltape.record.transport import RetryPolicy
from rolltape.replay.cli import main
from rolltape.replay.run import open_run
from rolltape.schema import Context, Group, Outcome, Step, Turn
from rolltape.schema.errors import BadInput

QUICK = RetryPolicy(attempts=2, seconds=1.0, backoff=0.01)
MODEL = ToyModel(Vocabulary.load(None))


def scored(id: str, turns: int = 2, temperature: float = 1.0, shift: float = 0.0, **fields: Any) -> Record:
    """A trace of user turns on random ids, with the log-probs that the demo engine's model gives them, `shift` added."""
    rng = np.random.default_rng(zlib.crc32(id.encode()))
    nodes: list[dict[str, Any]] = []
    for turn in range(turns):
        parent = None if not nodes else len(nodes) - 1
        question = trace("x")["nodes"][0]
        ids = rng.integers(0, 300, 5).tolist()
        nodes.append(question | {"parent": parent, "token_ids": ids, "mask": [False] * 5, "is_content": [True] * 5})
        answer = trace("x")["nodes"][1]
        ids = rng.integers(0, 300, 7).tolist()
        mask = [False, False, *[True] * 5]
        content = {"token_ids": ids, "mask": mask, "is_content": mask, "parent": len(nodes) - 1}
        answer = answer | content | {"message": answer["message"] | {"content": f"answer {turn}"}}
        nodes.append(answer)
    record = trace(id, **fields) | {"nodes": nodes}
    return relogged(record, temperature, shift)


def relogged(record: Record, temperature: float = 1.0, shift: float = 0.0) -> Record:
    """`record` with the log-probs that the model gives each sampled token under its own branch."""
    for node in record["nodes"]:
        path, parent = [node], node["parent"]
        while parent is not None:
            path.insert(0, record["nodes"][parent])
            parent = path[0]["parent"]
        ids = np.array([t for n in path for t in n["token_ids"]])
        scores = MODEL.score(ids, len(ids) - len(node["token_ids"]), temperature)
        node["logprobs"] = [float(s) + shift for s, m in zip(scores, node["mask"], strict=True) if m]
    return record


def a_run(path: Path, *steps: list[Record], sampling: dict[str, Any] | None = None) -> Path:
    recorder = Recorder.open(path, model="m")
    settings = {"temperature": 1.0} if sampling is None else sampling or None
    for step, records in enumerate(steps):
        for record in records:
            turns = [Turn(weight_version="7") for node in record["nodes"] if node["sampled"]]
            recorder.started("train", step)
            recorder.add(record, Context(step=step, group_index=step, sampling=settings, turns=turns))
        group = Group.from_records(records, expected_size=len(records), group_index=step, step=step)
        outcomes = [Outcome(trace_id=r["id"], disposition="emitted") for r in records]
        recorder.commit_now("train", step, groups=[group], outcomes=outcomes, record=Step())
    recorder.close()
    return path


@contextmanager
def engine(**options: Any) -> Iterator[DemoEngine]:
    with DemoEngine(**options).serve_in_thread() as server:
        yield server


def recomputed(run: Path, **options: Any) -> Recomputed:
    with engine(**options.pop("server", {})) as server:
        return recompute(open_run(run), LogprobOptions(engine=server.url, retry=QUICK, **options))


def test_the_demo_has_the_log_probs_that_its_engine_gives() -> None:
    result = recomputed(DEMO, server={"policy": DemoPolicy()})
    sampled = sum(open_run(DEMO).table(columns=["num_sampled"]).column(0).to_pylist())
    assert result.total.tokens == sampled
    assert result.total.to_dict() | {"tokens": 0} == {
        "tokens": 0,
        "mean_absolute": 0.0,
        "max_absolute": 0.0,
        "mean": 0.0,
        "k3": 0.0,
    }
    assert sorted(result.steps) == [("train", 0), ("train", 1), ("train", 2)]
    assert (result.findings, result.notes, result.worst) == ([], {}, [])
    assert dict(result.engine_versions) == {"1": 48}


def test_differences_are_those_of_each_step_and_position(tmp_path: Path) -> None:
    first, second = [scored("a"), scored("b")], [scored("c", turns=60, shift=0.25)]
    result = recomputed(a_run(tmp_path / "run", first, second))
    assert result.steps["train", 0].largest == 0.0
    gap = result.steps["train", 1].to_dict()
    assert gap["tokens"] == 300
    assert gap["mean_absolute"] == pytest.approx(0.25, abs=1e-6)
    assert gap["mean"] == pytest.approx(-0.25, abs=1e-6)
    assert gap["k3"] == pytest.approx(np.exp(-0.25) - 1 + 0.25, abs=1e-6)
    assert list(result.positions) == [0, 256]
    assert result.positions[0].tokens + result.positions[256].tokens == 320
    assert result.total.tokens == 320


def test_the_largest_difference_is_named_with_its_node_and_token(tmp_path: Path) -> None:
    record = scored("a", turns=3)
    record["nodes"][3]["logprobs"][1] -= 2.0
    result = recomputed(a_run(tmp_path / "run", [record]))
    [(size, place)] = result.worst
    assert size == pytest.approx(2.0)
    assert (place["trace_id"], place["node"], place["position"]) == ("a", 3, 3)
    assert place["token_id"] == record["nodes"][3]["token_ids"][3]
    assert place["recorded"] == pytest.approx(place["recomputed"] - 2.0)


def test_each_branch_is_scored_under_its_own_tokens_and_a_shared_turn_once(tmp_path: Path) -> None:
    record = scored("a", turns=2)
    branch = copy.deepcopy(record["nodes"][2:])
    branch[0]["token_ids"] = [9, 8, 7, 6, 5]
    branch[0]["parent"], branch[1]["parent"] = 1, 4
    record["nodes"] += branch
    result = recomputed(a_run(tmp_path / "run", [relogged(record)]))
    assert (result.total.tokens, result.total.largest) == (15, 0.0)
    assert result.counts["requests"] == 2


def test_log_probs_are_taken_at_the_recorded_temperature(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored("a", temperature=0.5)], sampling={"temperature": 0.5})
    assert recomputed(run).total.largest == 0.0
    wrong = a_run(tmp_path / "wrong", [scored("a", temperature=0.5)])
    assert recomputed(wrong).total.largest > 0.1


def test_where_the_engine_scores_given_tokens_at_temperature_1_nothing_is_said_of_other_temperatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ToyModel.score
    monkeypatch.setattr(ToyModel, "score", lambda self, ids, start, _temperature: plain(self, ids, start, 1.0))
    run = a_run(tmp_path / "run", [scored("a"), scored("b")], sampling={"temperature": 0.5})
    result = recomputed(run)
    assert (result.total.tokens, result.findings) == (0, [])
    [(note, count)] = result.notes.items()
    assert count == 2
    assert note == "traces left out: sampled at temperature 0.5, and the engine scores given tokens at 1"


def test_greedy_log_probs_are_those_of_temperature_1(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored("a")], sampling={"temperature": 0.0})
    assert recomputed(run).total.largest == 0.0


def test_a_temperature_that_is_not_recorded_is_unknown_and_not_1(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored("a")], sampling={})
    result = recomputed(run)
    assert result.total.tokens == 0
    assert dict(result.notes) == {"traces left out: their temperature is not recorded; give it with --temperature": 1}
    assert recomputed(run, temperature=1.0).total.tokens == 10


def test_penalties_that_an_engine_does_not_apply_to_given_tokens_are_named(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored("a")], sampling={"temperature": 1.0, "presence_penalty": 0.5})
    [note] = recomputed(run).notes
    assert "sampled with presence_penalty" in note


# -- replies


IDS = [10, 11, 12, 13]
WANTED = np.array([False, False, True, True])


def reply(entries: Any, **meta: Any) -> bytes:
    return json.dumps({"meta_info": {"input_token_logprobs": entries, **meta}}).encode()


def test_scores_are_taken_from_the_end_of_the_list_whatever_it_is_padded_with() -> None:
    entries = [[None, 11, None], [-0.2, 12, None], [-0.3, 13, None]]
    for padding in ([], [[None, 10, None]], [[None, 9, None], [-9.0, 10, None]]):
        scores, _ = read_scores(reply(padding + entries), IDS, WANTED)
        assert scores.tolist() == [np.float32(-0.2), np.float32(-0.3)]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (reply([[-0.3, 13, None]]), "scored 1 tokens where 2 were asked for"),
        (reply([[None, 11, None], [-0.2, 12, None], [-0.3, 14, None]]), "belong to other ids: 14 for 13 at 3"),
        (reply([[None, 11, None], [None, 12, None], [-0.3, 13, None]]), "no finite log-prob for 1 of 2 sampled tokens"),
        (reply([[None, 11, None], [math.nan, 12, None], [-0.3, 13]]), "no finite log-prob for 1 of 2 sampled tokens"),
        (reply([[None, 11, None], ["-0.2", 12, None], [-0.3, 13]]), "no finite log-prob for 1 of 2 sampled tokens"),
        (reply([None, None, None, None]), "no pair of log-prob and id"),
        (reply([[], [], [], []]), "no pair of log-prob and id"),
        (reply([], finish_reason={"type": "abort", "message": "weights"}), "aborted the request: weights"),
        (b'{"meta_info": {"finish_reason": {"type": "abort"}}}', "aborted the request"),
        (b'{"meta_info": {}}', "NoneType for input_token_logprobs"),
        (b'{"meta_info": 5}', "no meta_info"),
        (b"not json", "no meta_info"),
    ],
)
def test_a_reply_that_is_cut_shifted_or_holds_no_numbers_is_refused(answer: bytes, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        read_scores(answer, IDS, WANTED)


# -- an engine that fails


COMMAND = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> COMMAND:
    """`rolltape verify`: exit code, standard output and standard error."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rolltape", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def test_where_no_trace_can_be_scored_the_run_is_not_clean(tmp_path: Path, command: COMMAND) -> None:
    run = a_run(tmp_path / "run", [scored(str(i)) for i in range(4)], sampling={})
    with engine() as server:
        code, shown, refused = command(run, "--logprobs", server.url, "--limit", 2)
        assert code == 2
        assert "clean" not in shown
        assert "Log-probs" not in shown
        assert refused == (
            "Error: --logprobs compared nothing: 2 traces left out: their temperature is not recorded; give it with "
            "--temperature; 2 traces of 4 looked at, up to 2 of each step (--limit). Give what is missing, look at more "
            "traces (--limit), or leave --logprobs out.\n"
        )
        code, told, refused = command(run, "--logprobs", server.url, "--json")
        said = json.loads(told)
        assert (code, said["clean"], said["findings"], said["logprobs"]["compared"]) == (2, False, [], 0)
        assert said["logprobs"]["counts"] == {"traces": 0, "requests": 0}
        assert refused.startswith("Error: --logprobs compared nothing: 4 traces left out")
        assert refused == f"Error: {said['error']}\n"
        code, shown, _ = command(run, "--logprobs", server.url, "--temperature", 1)
        assert (code, shown.splitlines()[-1]) == (0, "clean")
        assert "Log-probs of 4 traces by 4 requests" in shown
        code, _, refused = command(a_run(tmp_path / "empty", []), "--logprobs", server.url)
        assert (code, "--logprobs compared nothing: there is no trace." in refused) == (2, True)


@contextmanager
def answering(*statuses: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers /generate with these statuses in turn, the last one for ever, and the payloads it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, b"{}")

        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/generate":
                self.answer(200, b"{}")
                return
            status = statuses[min(len(got), len(statuses) - 1)]
            got.append(payload)
            start = payload["logprob_start_len"]
            ids = payload["input_ids"][start:]
            entries = [[None if i == 0 else -1.0, token, None] for i, token in enumerate(ids)]
            self.answer(status, reply(entries) if status == 200 else b'{"error": "busy"}')

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_request_begins_one_token_before_the_first_that_is_scored_and_samples_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored("a", turns=1)], sampling={"temperature": 1.0, "top_p": 0.9})
    with answering(200) as (url, got):
        result = recompute(open_run(run), LogprobOptions(engine=url, lora="adapter"))
    [payload] = got
    assert payload["logprob_start_len"] == 6
    assert len(payload["input_ids"]) == 12
    assert payload["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 0}
    assert (payload["return_logprob"], payload["lora_path"]) == (True, "adapter")
    assert result.total.tokens == 5


def test_what_can_pass_is_tried_again_and_what_cannot_is_named(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored("a"), scored("b")])
    with answering(503, 200) as (url, got):
        result = recompute(open_run(run), LogprobOptions(engine=url, retry=QUICK, concurrency=1))
    assert (len(got), result.findings) == (3, [])
    with answering(400, 200) as (url, got):
        result = recompute(open_run(run), LogprobOptions(engine=url, retry=QUICK, concurrency=1, strict=True))
    [found] = result.findings
    assert (found.code, found.severity, found.trace_id, found.step) == ("logprobs", "error", "a", 0)
    assert "HTTP 400" in found.message
    assert (result.counts["traces"], result.counts["failed"]) == (1, 1)


def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored(str(i), turns=1) for i in range(20)])
    with pytest.raises(EngineGivenUp, match="does not answer"):
        recompute(open_run(run), LogprobOptions(engine="http://127.0.0.1:9", retry=QUICK))
    with (
        answering(500) as (url, got),
        pytest.raises(EngineGivenUp, match=r"16 requests to .* failed one after the other"),
    ):
        recompute(open_run(run), LogprobOptions(engine=url, retry=QUICK, concurrency=2))
    assert len(got) <= 18


def test_a_run_none_of_whose_traces_could_be_scored_is_not_clean(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored("a"), scored("b")])
    with answering(400) as (url, _), pytest.raises(EngineGivenUp, match=r"2 requests to .* failed .*HTTP 400"):
        recompute(open_run(run), LogprobOptions(engine=url, retry=QUICK, concurrency=1))


def test_faults_of_the_demo_engine_cost_only_their_traces(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored(str(i)) for i in range(30)])
    faults = Faults.of(["http_503=0.2", "drop_connection=0.1", "abort_empty=0.1"])
    result = recomputed(run, server={"faults": faults})
    assert result.counts["traces"] + result.counts["failed"] == 30
    assert result.counts["traces"] > 10
    assert result.total.largest == 0.0
    assert len(result.findings) == result.counts["failed"]


def test_a_bounded_number_of_requests_is_under_way(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored(str(i), turns=1) for i in range(12)])
    most = 0
    with DemoEngine(faults=Faults.of(["latency=1"], latency=0.05)).serve_in_thread() as server:
        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.005):
                most = max(most, server.waiting)

        watcher = threading.Thread(target=watch)
        watcher.start()
        recompute(open_run(run), LogprobOptions(engine=server.url, concurrency=3))
        done.set()
        watcher.join()
    assert 1 < most <= 3


def test_with_a_limit_some_traces_of_each_step_are_scored_and_it_says_so(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [scored(str(i)) for i in range(8)], [scored("x")])
    told: list[tuple[int, int]] = []
    with engine() as server:
        result = recompute(open_run(run), LogprobOptions(engine=server.url, limit=2), lambda *at: told.append(at))
    assert result.counts["traces"] == 3
    assert dict(result.notes) == {"traces of 9 looked at, up to 2 of each step (--limit)": 3}
    assert told[-1] == (3, 3)


def test_recorded_log_probs_that_are_no_numbers_are_left_out_and_the_trace_named(tmp_path: Path) -> None:
    record = scored("a")
    record["nodes"][1]["logprobs"][0] = math.nan
    result = recomputed(a_run(tmp_path / "run", [record]))
    assert (result.total.tokens, result.total.largest) == (9, 0.0)
    assert result.notes["traces with recorded log-probs that are no finite numbers, which are left out"] == 1


def test_rounded_log_probs_are_named(tmp_path: Path) -> None:
    record = scored("a")
    for node in record["nodes"]:
        node["logprobs"] = [round(value, 4) for value in node["logprobs"]]
    result = recomputed(a_run(tmp_path / "run", [record | {"verifiers": {"version": "0.4.0"}}]))
    assert 0 < result.total.largest < 1e-4
    assert result.notes["traces whose log-probs were rounded to 4 decimals"] == 1


def test_wrong_options_are_refused() -> None:
    with pytest.raises(BadInput, match="expected an address such as"):
        LogprobOptions(engine="127.0.0.1:30000")
    with pytest.raises(BadInput, match="concurrency is 0"):
        LogprobOptions(engine="http://x", concurrency=0)


def test_verify_shows_differences_by_step_and_position_and_other_weights(tmp_path: Path, command: COMMAND) -> None:
    run = a_run(tmp_path / "run", [scored("a", shift=0.5)])
    with engine() as server:
        code, shown, _ = command(run, "--logprobs", server.url)
        assert code == 0
        assert "KL(recorded || recomputed)" in shown
        assert "weight versions: recorded 7; the engine's 1" in shown
        assert "far apart: step 0, trace a" in shown
        code, told, _ = command(run, "--logprobs", server.url, "--json")
        said = json.loads(told)["logprobs"]
        assert (code, said["total"]["tokens"], said["steps"][0]["step"]) == (0, 10, 0)
    code, _, refused = command(run, "--logprobs", "http://127.0.0.1:9")
    assert code == 2
    assert "does not answer" in refused
