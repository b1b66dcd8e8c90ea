"""The demo tokenizer: round trips, transformers, and renderers' qwen3."""

from pathlib import Path
from typing import Any

import pytest

from rolltape.record.engine import Vocabulary, write_tokenizer
from rolltape.record.engine.tokenizer import MARKUP_TOKENS, SPECIAL_TOKENS
from rolltape.schema.errors import BadInput

TEXTS = [
    "",
    "How many plums? Zoë paid ½ €.\r\n\t  two  spaces ",
    "😀👩‍👩‍👧 e\u0301 \u00e9 \u2028 \x00\x07 日本語",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call><|im_end|>',
    "<|im_start|>user\n<|im_start|> < | im_end | ><think>\n\n</think>\n\n",
]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Works out an expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pool(folder: Path) -> Any:
    from renderers import create_renderer_pool
    from renderers.configs import Qwen3RendererConfig

    return create_renderer_pool(str(folder), Qwen3RendererConfig(enable_thinking=False), size=1)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_from_their_ids(text: str) -> None:
    vocabulary = Vocabulary.load(None)
    assert vocabulary.decode(vocabulary.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_and_the_engine_agree(folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    vocabulary = Vocabulary.load(folder)
    assert tokenizer.encode(text, add_special_tokens=False) == vocabulary.encode(text)
    assert tokenizer.decode(vocabulary.encode(text), clean_up_tokenization_spaces=False) == text
    assert len(tokenizer) == vocabulary.size


def test_every_markup_token_is_one_id_and_only_special_ones_are_skipped() -> None:
    vocabulary = Vocabulary.load(None)
    for token in (*SPECIAL_TOKENS, *MARKUP_TOKENS):
        ids = vocabulary.encode(token)
        assert len(ids) == 1
        assert vocabulary.decode(ids, skip_special=True) == ("" if token in SPECIAL_TOKENS else token)


def test_the_vocabulary_is_the_same_each_time(tmp_path: Path, folder: Path) -> None:
    again = write_tokenizer(tmp_path / "new" / "folder")
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_qwen3_renders_tools_and_says_which_tokens_are_content(pool: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Zoë has 12 plums."}]
    rendered = pool.render(messages, tools=TOOLS, add_generation_prompt=True)
    vocabulary = Vocabulary.load(None)
    text = vocabulary.decode(rendered.token_ids)
    assert '"name": "calculator"' in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    content = [token for token, kept in zip(rendered.token_ids, rendered.is_content, strict=True) if kept]
    assert vocabulary.decode(content) == "Be kind.Zoë has 12 plums."


def test_qwen3_parses_a_tool_call_and_bridges_to_the_next_turns(pool: Any) -> None:
    vocabulary = Vocabulary.load(None)
    prompt = pool.render_ids([{"role": "user", "content": "12*7?"}], tools=TOOLS, add_generation_prompt=True)
    reply = TEXTS[3]
    completion = vocabulary.encode(reply)
    parsed = pool.parse_response(completion, tools=TOOLS)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("calculator", {"expression": "12*7"})]
    for message in ({"role": "tool", "content": "84"}, {"role": "user", "content": "And then?"}):
        bridged = pool.bridge_to_next_turn(prompt, completion, [message], tools=TOOLS)
        assert bridged.token_ids[: len(prompt) + len(completion)] == [*prompt, *completion]
        content = [token for token, kept in zip(bridged.token_ids, bridged.is_content, strict=True) if kept]
        assert vocabulary.decode(content) == message["content"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        Vocabulary.load(tmp_path)


def test_tokenizers_that_are_not_byte_level_or_have_no_chat_markup_are_refused() -> None:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE, WordLevel

    with pytest.raises(BadInput, match="ByteLevel"):
        Vocabulary(Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    plain = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    plain.decoder = decoders.ByteLevel()
    with pytest.raises(BadInput, match="im_start"):
        Vocabulary(plain)
