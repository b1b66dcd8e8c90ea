"""What is masked before anything is written, and what is not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretBytes, SecretStr

from rolltape.record.secrets import MASK, Secrets
from rolltape.schema.errors import BadInput

secrets = Secrets()

CREDENTIAL = "q7Zk-93vX0pLm2Rt8sWd"


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apikey", "apiKey", "APIKey", "x-api-key", "X-API-Key", "OPENAI_API_KEY", "judge.api-key", "api_keys",
        "token", "HF_TOKEN", "refreshToken", "sessionToken", "access_token", "id_token", "github_token", "auth_tokens",
        "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "client_secret", "clientSecret", "secret", "secrets", "private_key",
        "password", "DB_PASSWORD", "PGPASSWORD", "passwd", "db_pass", "passphrase", "pwd", "Authorization",
        "proxy-authorization", "cookie", "Set-Cookie", "session_cookie", "credentials", "auth", "bearer", "jwt", "ssh_key",
        "key", "serper_key", "signing_key", "webhook_key",
    ],
)  # fmt: skip
def test_in_a_configuration_the_name_of_a_secret_is_enough(name: str) -> None:
    assert secrets.mask({name: "mosquito"}) == {name: MASK}
    assert secrets.mask({"deep": [{name: ["mosquito"]}]}) == {"deep": [{name: [MASK]}]}


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens", "min_new_tokens", "prompt_tokens", "completion_tokens", "stop_tokens", "stop_token_ids", "num_tokens",
        "tokenizer", "tokenizer_path", "token_ids", "token_count", "eos_token", "pad_token", "tokens_per_second",
        "reward_key", "eval_reward_key", "task_key", "answer_key", "prompt_key", "input_key", "label_key", "primary_key",
        "routing_key", "api_key_var", "token_type", "secret_name", "password_file", "headers_from_env", "session_id",
        "author", "authority", "monkey", "keyboard", "keyword", "hotkey", "donkey", "secretary", "passage", "bypass",
        "pass_rate", "compass", "tokenization", "cookie_recipe", "signal", "pinned", "design", "model", "fsync_seconds",
    ],
)  # fmt: skip
def test_harmless_names_keep_their_values(name: str) -> None:
    assert secrets.mask({name: "mosquito"}) == {name: "mosquito"}
    assert secrets.mask({name: 7}) == {name: 7}


@pytest.mark.parametrize(
    "name", ["key", "winner_key", "token", "next_token", "secret_word", "secret_code", "signature", "auth"]
)
def test_in_what_a_trace_tells_a_doubtful_name_needs_a_value_that_looks_like_a_credential(name: str) -> None:
    record = {"id": "t", "info": {name: "mosquito"}}
    assert secrets.mask_record(record) is record
    if name not in ("winner_key", "next_token"):
        assert secrets.mask_record({"id": "t", "info": {name: CREDENTIAL}})["info"] == {name: MASK}


def test_what_stands_below_the_name_of_a_secret_is_masked_whatever_it_is_called() -> None:
    given = {"credentials": {"user": "ann", "list": ["one", {"x": "two"}], "number": 12345, "on": True, "none": None}}
    masked = {"credentials": {"user": MASK, "list": [MASK, {"x": MASK}], "number": MASK, "on": True, "none": None}}
    assert secrets.mask(given) == masked


def test_environments_and_headers_keep_only_what_is_plainly_harmless() -> None:
    environment = {
        "UV_EXCLUDE_NEWER": "2026-07-15T00:00:00Z",
        "UV_COMPILE_BYTECODE": "1",
        "CACHE": "/var/cache/uv",
        "PROXY": "http://proxy:3128",
        "FLAVOUR": "mosquito",
        "HOOK": "https://hooks.example.com/services/T0/B0/abc",
        "PIN": "1234",
    }
    masked = {"harness": {"env": {**environment, "FLAVOUR": MASK, "HOOK": MASK}}}
    masked["harness"]["env"]["PIN"] = environment["PIN"]
    assert secrets.mask({"harness": {"env": environment}}) == masked
    headers = {"Content-Type": "application/json", "X-Team": "mosquito", "Authorization": "Bearer x"}
    assert secrets.mask({"extra_headers": headers}) == {
        "extra_headers": {**headers, "X-Team": MASK, "Authorization": MASK}
    }
    pairs = [["Authorization", "Basic x"], ["X-Api-Key", "mosquito"], ["Accept", "text/html"]]
    assert secrets.mask({"headers": pairs}) == {"headers": [["Authorization", MASK], ["X-Api-Key", MASK], pairs[2]]}
    assert secrets.mask([{"key": "api_key", "value": "mosquito"}]) == [{"key": "api_key", "value": MASK}]
    assert secrets.mask({"env": [{"name": "API_KEY", "value": "mosquito"}]}) == {
        "env": [{"name": "API_KEY", "value": MASK}]
    }


def test_an_option_on_a_command_line_is_masked() -> None:
    assert secrets.mask(["run", "--api-key", "mosquito", "--steps", "3"]) == ["run", "--api-key", MASK, "--steps", "3"]
    assert secrets.mask(["--api-key=mosquito", "model.api_key=mosquito"]) == [
        f"--api-key={MASK}",
        f"model.api_key={MASK}",
    ]
    assert (
        secrets.text("exit 1: run --token-file x --password mosquito")
        == f"exit 1: run --token-file x --password {MASK}"
    )


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://ann:pa@ss@host:8/x", "https://***@host:8/x"),
        ("https://ghp_token@host/x and http://b:c@d", "https://***@host/x and http://***@d"),
        ("https://h/x?api_key=abc&page=2#f", "https://h/x?api_key=***&page=2#f"),
        ("s3?X-Amz-Signature=1f&X-Amz-Credential=A%2Fb&Expires=9", "s3?X-Amz-Signature=***&X-Amz-Credential=***&Expires=9"),
        ("blob?sv=2020&sig=ab%3D&se=1", "blob?sv=2020&sig=***&se=1"),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("{'authorization': 'Basic YTpi', 'a': 1}", "{'authorization': '***', 'a': 1}"),
        ("sent Bearer eYq7Zk93v.x", "sent Bearer ***"),
        ("Cookie: a=b; c=d\nnext", "Cookie: ***\nnext"),
        ("OPENAI_API_KEY=abc run", "OPENAI_API_KEY=*** run"),
        ('{"client_secret": "abc", "n": 1}', '{"client_secret": "***", "n": 1}'),
        (r'"{\"password\": \"abc\"}"', r'"{\"password\": \"***\"}"'),
        ("OpenAI(api_key='abc', timeout=3)", "OpenAI(api_key='***', timeout=3)"),
        ("key sk-proj-abcdefgh12345678 refused", "key *** refused"),
        ("hf_AbcdefghIjklmnopqrst", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSM", "***"),
        ("curl -u ann:mosquito http://h", "curl -u ann:*** http://h"),
        ("curl -sSfu 'ann:1234' 'http://h?a=1&b=2'; ls", "curl -sSfu 'ann:***' 'http://h?a=1&b=2'; ls"),
        ("curl 'http://h?a=1&b=2' --user ann:mosquito; ls", "curl 'http://h?a=1&b=2' --user ann:***; ls"),
        ("curl http://h \\\n  --proxy-user=$USER:mosquito", "curl http://h \\\n  --proxy-user=$USER:***"),
        (json.dumps({"c": "curl h \\\n -u \"a:b\"\nls"}), json.dumps({"c": "curl h \\\n -u \"a:***\"\nls"})),
        ("mysql -h db -uroot -pmosquito shop", "mysql -h db -uroot -p*** shop"),
        ('["docker exec db mysqldump -p\'mosquito\' shop"]', '["docker exec db mysqldump -p\'***\' shop"]'),
        ("sshpass -p mosquito ssh ann@h", "sshpass -p *** ssh ann@h"),
        ("PGPASSWORD=mosquito psql -U ann", "PGPASSWORD=*** psql -U ann"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ],
)  # fmt: skip
def test_a_credential_inside_a_text_is_masked(text: str, masked: str) -> None:
    assert secrets.text(text) == masked
    assert secrets.text(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'reward_key'",
        "Unexpected token: '}' at 3",
        "stop_token_ids=[1, 2], max_tokens=16",
        "def f(api_key: str = None, token: str = None)",
        "a basic understanding of bearer authentication",
        "scikit: sk-learn-compatible-estimators",
        "http://127.0.0.1:30000/generate?max_tokens=3&reward_key=correct",
        "ratio 3:4, mail ann@example.com",
        "monkey=3; author: Zoë",
        "curl http://h:80; docker run -u root:root x",
        "curl http://h:80 | docker run -u root:root x",
        "curl http://h:80 && docker run -u root:root x",
        "curl http://h:80\ndocker run -u root:root x",
        '{"a": "curl h\\ndocker run -u root:root x"}',
        "curl -u $USER:$PASSWORD h; curl -u <name>:<password> h; curl -u ann h; curl -U http://proxy:3128 h",
        "curl -Hauthor:ann -H user:ann --user-agent a:b h",
        "wget -U firefox:3 http://h",
        "docker run --name mysql -p3306:3306 -d mysql",
        "docker run --name my-mysql -pfront:80",
        "mysql -p shop; mysql -P3306; mysql -p$PASSWORD; mysql && mkdir -pv x",
        "sshpass -p $PASSWORD ssh h; sshpass -f file ssh h",
    ],
)
def test_a_text_without_a_credential_stays_as_it_is(text: str) -> None:
    assert secrets.text(text) == text


def test_masking_again_changes_nothing() -> None:
    given: dict[str, Any] = {
        "headers": {"Authorization": "Bearer abc"},
        "engine": "http://u:p@h?api_key=x",
        "note": ["Authorization: Bearer abc", "API_KEY=abc", "Cookie: a"],
    }
    once = secrets.mask(given)
    assert secrets.mask(once) is once


def test_patterns_can_be_added_over_texts_and_names() -> None:
    own = Secrets(patterns=(r"ticket-\d+", r"^project$"))
    assert own.mask({"note": "see ticket-12 now", "project": "moth"}) == {"note": f"see {MASK} now", "project": MASK}
    assert own.mask_record({"id": "t", "info": {"a": "ticket-1"}})["info"] == {"a": MASK}


@pytest.mark.parametrize("pattern", ["(", "x*"])
def test_a_pattern_that_cannot_work_is_refused(pattern: str) -> None:
    with pytest.raises(BadInput, match=r"regular expression|empty text"):
        Secrets(patterns=(pattern,))


def test_secrets_of_a_configuration_are_masked_where_no_name_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "forwarded-mosquito")
    monkeypatch.setenv("SEED", "3")
    config = {
        "harness": {"env": {"PLAIN": "en_US.UTF-8", "SEARCH_KEY": "mosquito"}},
        "engine": "http://ann:pa%24s-word@h",
    }
    knowing = secrets.knowing(config, environment=["JUDGE_KEY", "SEED", "NOT_SET"])
    text = "exit 3: got mosquito, forwarded-mosquito and pa$s-word of ann"
    assert knowing.text(text) == f"exit 3: got {MASK}, {MASK} and {MASK} of ann"
    assert "mosquito" not in repr(knowing)


def test_what_pydantic_holds_for_a_secret_is_one_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDS", "Zq7-xK2-9vLm")

    class Inner(BaseModel):
        phrase: SecretStr
        code: SecretBytes

    class Harness(BaseModel):
        forward_env: list[str]

    class Config(BaseModel):
        inner: Inner
        harness: Harness

    config = Config(inner=Inner(phrase="plain words", code=b"0815-4711"), harness=Harness(forward_env=["WORDS"]))
    knowing = secrets.knowing(config)
    assert knowing.text("plain words, 0815-4711, Zq7-xK2-9vLm, other words") == f"{MASK}, {MASK}, {MASK}, other words"
    assert knowing.knowing(config) is knowing


def records() -> list[dict[str, Any]]:
    data = Path(__file__).parents[1] / "data" / "traces"
    lines = [line for file in sorted(data.rglob("*.jsonl")) for line in file.read_text(encoding="utf-8").split("\n")]
    return [json.loads(line) for line in lines if line]


def test_recorded_traces_of_every_release_hold_nothing_to_mask() -> None:
    found = records()
    assert len(found) > 20
    for record in found:
        for trace in record.get("traces", [record]):
            masked = secrets.mask_record(trace)
            assert {key: value for key, value in masked.items() if value is not trace[key]} == {}


def test_tokens_and_messages_are_left_and_not_copied() -> None:
    ids = list(range(100_000))
    node = {
        "message": {"role": "user", "content": "my password=abc, Bearer abcd1234"},
        "token_ids": ids,
        "api_key": "abc",
    }
    task = {"type": "T", "data": {"prompt": "api_key=abc", "password": "abc"}}
    record = {"id": "t", "task": task, "nodes": [node] * 50, "rewards": {"password": 1.0}, "metrics": {"api_key": 2.0}}
    assert secrets.mask_record(record) is record
    masked = secrets.mask_record({**record, "info": {"password": "abc"}})
    assert masked["info"] == {"password": MASK}
    assert masked["nodes"] is record["nodes"]
    assert masked["task"] is task
    assert list(masked) == [*record, "info"]


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000,
        "a:" * 100_000,
        "?" * 200_000,
        "x=" * 100_000,
        "--a " * 50_000,
        "://" * 70_000,
        "curl -u " * 25_000,
        "mysql -a -p" * 20_000,
    ],
)
def test_a_long_text_is_looked_through_in_time_that_grows_with_its_length(text: str) -> None:
    def seconds(n: int) -> float:
        started = time.process_time()
        secrets.text(text[: len(text) // n])
        return time.process_time() - started

    assert seconds(1) < 60 * seconds(8) + 0.5
