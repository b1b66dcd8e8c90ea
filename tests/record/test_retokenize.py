"""Rendering recorded messages again: what differs, where, and which kind of difference it is."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from record_build import Record, records_of
from rescore_build import DEMO, record_run

from rolltape.record.client import RendererSettings, RolloutClient
from rolltape.record.engine import DemoEngine, Vocabulary, write_tokenizer
from rolltape.record.inprocess.harness import close_client
from rolltape.record.rechecking.renderings import RetokenizeOptions
from rolltape.record.rechecking.retokenize import Retokenized, retokenize
from rolltape.record.sampling import Limits
from rolltape.record.transport import SGLangTransport
from rolltape.replay.checks.findings import Finding
from rolltape.replay.cli import main
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput, MissingExtra

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Words:
    """A policy that says one thing for ever."""

    def __init__(self, reply: str) -> None:
        self.reply = reply

    def candidates(self, prompt_text: str) -> Sequence[tuple[float, str]]:  # noqa: ARG002
        return [(1.0, self.reply)]


def converse(tokenizer: str, reply: str, *, thinking: bool, turns: int = 2, retention: str | None = None) -> Record:
    """A real episode of user turns on the demo engine, whose replies are mostly `reply`, as its record."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.types import SamplingConfig

    from rolltape.record.config import env_config, load_environment

    folder, name = Path(tokenizer).parent, f"chatty_probe_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(
        "import verifiers.v1 as vf\n\n\nclass Chats(vf.Taskset[vf.Task, vf.TasksetConfig]):\n    def load(self):\n"
        "        return [vf.Task(vf.TaskData(idx=0, prompt='How many are left?'), self.config.task)]\n\n\n"
        "def user(task, messages):\n    return 'And now?' if len(messages) < 2 * " + str(turns) + " else None\n\n\n"
        "__all__ = ['Chats']\n"
    )
    sys.path.insert(0, str(folder))
    harness = {"id": "rolltape.record.inprocess", "user": f"{name}:user"}
    environment = load_environment(env_config({"taskset": {"id": name}, "harness": harness}))

    async def run() -> Record:
        async with DemoEngine(tokenizer_dir=tokenizer, policy=Words(reply), epsilon=1e-9) as engine:
            transport = SGLangTransport(engine.url, limits=Limits(response=64))
            settings = RendererSettings("qwen3", thinking, retention)
            client = RolloutClient(transport, model="demo", tokenizer=tokenizer, renderer=settings, pool_size=1)
            context = ModelContext(client=client, model="demo", sampling=SamplingConfig(temperature=1.0))
            await client.warm()
            try:
                async with environment.serving():
                    [task] = environment.taskset.load()
                    [trace] = await environment.episode(task, context, 1).run()
                    assert not trace.errors, trace.errors
                    return trace.to_record()  # type: ignore[no-any-return]
            finally:
                await close_client()
                await transport.close()

    try:
        return asyncio.run(run())
    finally:
        sys.path.remove(str(folder))


def split(record: Record, vocabulary: Vocabulary, node: int) -> Record:
    """`record` with the sampled ids of a node spelled byte by byte: the same text, and not how a tokenizer would have it."""
    record = copy.deepcopy(record)
    spelled = record["nodes"][node]
    first = spelled["mask"].index(True)
    body = spelled["token_ids"][first:-1]
    single = [vocabulary.encode(chr(byte))[0] for byte in vocabulary.decode_bytes(body)]
    assert len(single) > len(body)
    spelled["token_ids"] = [*spelled["token_ids"][:first], *single, spelled["token_ids"][-1]]
    for name, value in (("mask", True), ("is_content", True)):
        spelled[name] = [*spelled[name][:first], *[value] * (len(single) + 1)]
    spelled["logprobs"] = [-1.0] * (len(single) + 1)
    return record


def again(tmp_path: Path, records: Sequence[Record], **options: Any) -> Retokenized:
    number = len(list(tmp_path.iterdir()))
    run = record_run(tmp_path / f"run{number}", [[list(records)]])
    return retokenize(open_run(run), RetokenizeOptions(**options))


def by_code(result: Retokenized, code: str) -> list[Finding]:
    return [found for found in result.findings if found.code == code]


def plain(thinking: bool = False) -> RendererSettings:
    return RendererSettings("qwen3", thinking)


def test_the_demo_is_rendered_as_it_was_recorded(tokenizer: str) -> None:
    result = retokenize(open_run(DEMO), RetokenizeOptions(tokenizer=tokenizer))
    assert result.findings == []
    assert result.counts["traces"] == 48
    assert result.counts["same"] == result.counts["nodes"] > 200
    assert result.counts["tokens"] == sum(open_run(DEMO).table(columns=["num_tokens"]).column(0).to_pylist())
    [note] = result.notes
    assert "tool schemas are not recorded; they were read back from the tokens" in note


def test_a_bridged_conversation_is_one_branch_and_comes_out_again(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False)
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain())
    assert (result.counts["branches"], result.counts["same"], result.findings) == (1, len(record["nodes"]), [])


def test_records_that_leave_out_defaults_as_later_releases_do_are_compared_too(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False)
    del record["nodes"][0]["parent"], record["nodes"][0]["mask"], record["nodes"][1]["message"]["tool_calls"]
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain())
    assert (result.counts["same"], result.findings) == (len(record["nodes"]), [])


def test_sampled_ids_that_no_tokenizer_gives_are_told_from_drift(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False)
    spelled = split(record, Vocabulary.load(tokenizer), 1)
    result = again(tmp_path, [spelled], tokenizer=tokenizer, renderer=plain(), strict=True)
    [found] = result.findings
    first = spelled["nodes"][1]["mask"].index(True)
    assert (found.code, found.severity, found.node, found.position) == ("noncanonical", "warning", 1, first)
    assert found.expected["ids"][:2] == spelled["nodes"][1]["token_ids"][first : first + 2]
    assert found.found["ids"][0] == record["nodes"][1]["token_ids"][first]
    assert (result.counts["noncanonical"], result.counts["drift"]) == (1, 0)


def test_another_setting_of_the_renderer_is_drift_in_the_generation_prompt(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain(thinking=True))
    [found] = result.findings
    assert (found.code, found.severity, found.node) == ("drift", "warning", 1)
    assert found.expected["text"].startswith("<think>")
    assert "another template or setting" in found.message
    strict = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain(thinking=True), strict=True)
    assert [f.severity for f in strict.findings] == ["error"]


def test_another_tokenizer_is_drift_in_the_same_text(tokenizer: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_text((Path(tokenizer) / name).read_text())
    described = json.loads((other / "tokenizer.json").read_text())
    described["model"]["merges"] = [m for m in described["model"]["merges"] if m != ["H", "o"]]
    (other / "tokenizer.json").write_text(json.dumps(described))
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    found = by_code(again(tmp_path, [record], tokenizer=str(other), renderer=plain()), "drift")
    assert [(f.node, f.position) for f in found] == [(0, record["nodes"][0]["is_content"].index(True))]
    assert "in the same text: another tokenizer" in found[0].message


def test_ids_changed_by_hand_are_found_at_their_place_and_what_follows_is_compared(
    tokenizer: str, tmp_path: Path
) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False)
    record["nodes"][2]["token_ids"][4] += 1
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain())
    assert [(f.code, f.node, f.position) for f in result.findings] == [("drift", 2, 4)]
    assert result.counts["same"] == len(record["nodes"]) - 1


def test_a_fork_by_dropped_reasoning_is_found_where_it_begins(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "<think>\nLet me count.\n</think>\n\nThe answer is 3.", thinking=True)
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain(thinking=True))
    [fork] = by_code(result, "fork")
    first = record["nodes"][1]["mask"].index(True)
    assert (fork.node, fork.position, result.counts["forks by rendering"]) == (2, first, 1)
    assert fork.expected["text"].startswith("<think>")
    assert fork.found["text"].startswith("The answer")
    assert by_code(result, "drift") == []
    assert result.counts["same"] == len(record["nodes"])


def test_a_fork_by_sampling_is_told_from_one_by_rendering(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "<think>\nLet me count.\n</think>\n\nThe answer is 3.", thinking=True)
    answer, rerendered = record["nodes"][1], record["nodes"][2]
    answer["message"]["reasoning_content"] = rerendered["message"]["reasoning_content"] = None
    first = answer["mask"].index(True)
    body = rerendered["token_ids"][first:]
    answer["token_ids"][first:] = body[: body.index(Vocabulary.load(tokenizer).turn_end) + 1]
    for name in ("mask", "is_content"):
        answer[name] = [False] * first + [True] * (len(answer["token_ids"]) - first)
    answer["logprobs"] = [-1.0] * (len(answer["token_ids"]) - first)
    spelled = split(record, Vocabulary.load(tokenizer), 1)
    result = again(tmp_path, [spelled], tokenizer=tokenizer, renderer=plain(thinking=True))
    [fork] = by_code(result, "fork")
    assert (fork.node, fork.position, result.counts["forks by sampling"]) == (2, first, 1)
    assert "its ids were not canonical" in fork.message


def test_a_reply_that_the_template_writes_otherwise_is_named_where_the_branch_was_bridged(
    tokenizer: str, tmp_path: Path
) -> None:
    reply = "<think>\nLet me count.\n</think>\n\nThe answer is 3."
    record = converse(tokenizer, reply, thinking=True, retention="all")
    settings = RendererSettings("qwen3", True, "all")
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=settings)
    assert result.counts["branches"] == 1
    [found] = result.findings
    assert (found.code, found.severity, found.node) == ("rewritten", "warning", 1)
    assert found.expected["text"].startswith("<think>")


def test_another_message_is_a_fork_of_the_conversation_and_no_finding(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    copies = copy.deepcopy(record["nodes"])
    copies[0]["message"]["content"] = "How many?"
    vocabulary = Vocabulary.load(tokenizer)
    ids = vocabulary.encode("<|im_start|>user\nHow many?<|im_end|>\n")
    copies[0] |= {"token_ids": ids, "mask": [False] * len(ids), "is_content": [False] * len(ids)}
    copies[1]["parent"] = 2
    record["nodes"] += copies
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain())
    assert (result.findings, result.counts["branches"], result.counts["forks by another message"]) == ([], 2, 1)


def test_what_is_not_recorded_is_named_and_what_is_missing_refused(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    result = again(tmp_path, [record], tokenizer=tokenizer, renderer=plain())
    assert result.notes["the renderer's settings are not recorded"] == 1
    with pytest.raises(BadInput, match=r"no tokenizer is recorded; .*--tokenizer"):
        again(tmp_path, [record])
    with pytest.raises(BadInput, match="name the model with --model"):
        again(tmp_path, [record], tokenizer=tokenizer)
    with pytest.raises(BadInput, match="There is no tokenizer folder"):
        again(tmp_path, [record], tokenizer=str(tmp_path / "nowhere"), renderer=plain())
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"holds no tokenizer\.json"):
        again(tmp_path, [record], tokenizer=str(tmp_path / "empty"), renderer=plain())
    by_model = again(tmp_path, [record], tokenizer=tokenizer, model="Qwen/Qwen3-8B")
    assert by_model.counts["drift"] == 1  # its default is to think


def test_traces_without_tokens_or_with_images_are_counted_by_reason(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    bare, seen = copy.deepcopy(record), copy.deepcopy(record)
    bare["id"], seen["id"] = "bare", "seen"
    for node in bare["nodes"]:
        node |= {"token_ids": [], "mask": [], "is_content": [], "logprobs": []}
    seen["nodes"][0]["message"]["content"] = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    result = again(tmp_path, [record, bare, seen], tokenizer=tokenizer, renderer=plain())
    assert result.notes["traces not compared: no token is recorded"] == 1
    assert result.notes["traces not compared: a message holds an image"] == 1
    assert result.counts["traces"] == 1


@pytest.mark.parametrize("field", [{"token_ids": [-5]}, {"token_ids": [1 << 40]}, {"token_ids": "x"}, {"mask": [True]}])
def test_a_trace_with_what_is_no_token_id_is_named_and_the_others_compared(
    tokenizer: str, tmp_path: Path, field: dict[str, Any]
) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    broken = copy.deepcopy(record) | {"id": "broken"}
    broken["nodes"][0] |= field
    result = again(tmp_path, [broken, record], tokenizer=tokenizer, renderer=plain())
    assert result.notes["traces not compared: a node holds what is no token id, mask or parent"] == 1
    assert result.counts["traces"] == 1


def test_a_trace_whose_text_no_tokenizer_takes_is_named_and_the_others_compared(tokenizer: str, tmp_path: Path) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    broken = copy.deepcopy(record) | {"id": "broken"}
    broken["nodes"][0]["message"]["content"] = "\ud83d"
    result = again(tmp_path, [broken, record], tokenizer=tokenizer, renderer=plain())
    assert result.notes["traces not compared: a message holds half of a surrogate pair, which no tokenizer takes"] == 1
    assert result.counts["traces"] == 1


def test_steps_whose_tokens_were_pruned_are_left_out_and_counted(tokenizer: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(DEMO, tmp_path / "run"))
    prune(open_run(run), Wish(tokens=True, before=2))
    result = retokenize(open_run(run), RetokenizeOptions(tokenizer=tokenizer))
    assert (result.counts["traces"], result.findings) == (16, [])
    assert result.notes["traces left out, for their tokens were pruned"] == 32


def test_with_a_limit_only_some_traces_of_each_step_are_looked_at(tokenizer: str) -> None:
    result = retokenize(open_run(DEMO), RetokenizeOptions(tokenizer=tokenizer, limit=3))
    assert result.counts["traces"] == 9
    assert result.notes["traces of 48 looked at, up to 3 of each step (--limit)"] == 9


def tools_file(tmp_path: Path) -> Path:
    """The calculator's schema, as the demo offers it."""
    first = records_of(DEMO)
    text = Vocabulary.load(None).decode(next(iter(first.values()))["nodes"][0]["token_ids"])
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([json.loads(text.split("<tools>\n")[1].split("\n</tools>")[0])]))
    return path


def test_tools_can_be_given_and_wrong_ones_are_drift_in_the_first_message(tokenizer: str, tmp_path: Path) -> None:
    tools = tools_file(tmp_path)
    assert retokenize(open_run(DEMO), RetokenizeOptions(tokenizer=tokenizer, tools=tools)).findings == []
    tools.write_text(tools.read_text().replace("calculator", "abacus"))
    result = retokenize(open_run(DEMO), RetokenizeOptions(tokenizer=tokenizer, tools=tools, limit=1))
    assert {(f.code, f.node) for f in result.findings} == {("drift", 0)}
    tools.write_text("{}")
    with pytest.raises(BadInput, match="expected a JSON list of tool schemas"):
        retokenize(open_run(DEMO), RetokenizeOptions(tokenizer=tokenizer, tools=tools))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rolltape", "verify", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


def test_verify_shows_counts_findings_and_a_verdict(
    tokenizer: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    options = (str(DEMO), "--retokenize", "--tokenizer", tokenizer)
    code, shown, _ = command(*options)
    assert code == 0
    assert "Rendered again: 48 traces" in shown
    assert "forks: none" in shown
    assert f"tokenizer: {tokenizer}" in shown
    assert shown.rstrip().endswith("clean")
    code, told, _ = command(*options, "--limit", "2", "--json")
    said = json.loads(told)
    assert (code, said["clean"], said["retokenize"]["counts"]["traces"]) == (0, True, 6)


@pytest.mark.parametrize("why", ["no token is recorded", "its findings say why"])
def test_where_no_node_can_be_compared_the_run_is_not_clean(
    tokenizer: str,
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    record = converse(tokenizer, "The answer is 3 boxes.", thinking=False, turns=1)
    if why == "no token is recorded":
        for node in record["nodes"]:
            node |= {"token_ids": [], "mask": [], "is_content": [], "logprobs": []}
    else:
        monkeypatch.setattr("renderers.qwen3.Qwen3Renderer.render", lambda *_, **__: 1 / 0)
    run = record_run(tmp_path / "run", [[[record]]])
    options = (str(run), "--retokenize", "--tokenizer", tokenizer, "--renderer", "qwen3")
    code, shown, refused = command(*options)
    assert code == 2
    assert "clean" not in shown
    assert "Rendered again" not in shown
    assert refused.startswith("Error: --retokenize compared nothing: ")
    assert why in refused
    assert refused.endswith("Give what is missing, or leave --retokenize out.\n")
    code, told, _ = command(*options, "--json")
    said = json.loads(told)
    assert (code, said["clean"], said["retokenize"]["compared"]) == (2, False, 0)


def test_the_recorded_tokenizer_is_taken_and_nothing_is_said_but_the_findings(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "runs" / "demo")
    write_tokenizer(tmp_path / "demo-setup" / "tokenizer")
    program = [sys.executable, "-m", "rolltape.replay.cli", "verify", "demo", "--retokenize", "--limit", "1"]
    done = subprocess.run(program, cwd=tmp_path / "runs", capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"tokenizer: {tmp_path}/demo-setup/tokenizer" in done.stdout


def test_options_of_a_check_that_is_not_asked_for_are_refused(command: Callable[..., tuple[int, str, str]]) -> None:
    run = str(DEMO)
    for option, needs in (
        (["--tokenizer", "x"], "--retokenize"),
        (["--temperature", "1"], "--logprobs"),
        (["--strict"], "--retokenize or --logprobs"),
    ):
        code, _, refused = command(run, *option)
        assert code == 2
        assert f"{option[0]} says how {needs} is done" in refused


def test_without_the_extra_only_the_checks_that_need_it_are_refused(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise MissingExtra("renderers is not installed; live rollouts need renderers.")

    monkeypatch.setattr("rolltape.record.versions.check_live", missing)
    for option in (("--retokenize",), ("--logprobs", "http://127.0.0.1:9")):
        code, _, refused = command(str(DEMO), *option)
        assert code == 2
        assert f"`rolltape verify {option[0]}` needs the extra 'live': renderers is not installed" in refused
    assert command(str(DEMO))[0] == 0
