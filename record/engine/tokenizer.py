"""The demo engine's tokenizer: a byte-level BPE of a few hundred entries, made in code, with Qwen3's special tokens.

No model hub is needed: the vocabulary is the 256 bytes, the merges that spell a list of common words from left to
right, and the special tokens. Bytes are never normalised, so every text comes back from its ids unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Marked special: a decoder leaves them out of the text when it is asked to skip special tokens."""

MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""One id each but ordinary text to a decoder, as in Qwen3's tokenizer: parsers look for them in decoded text."""

_WORDS = """
assistant user system tool Answer answer calculator expression arguments name the The and And of in is are how How
many much all left bags boxes plums pears apples eggs loose sells stall metres days walks packed full them that That
there There says Total with what What function type string object description required properties for each reply
line number result call return signature json parameters will you You may with one or more
"""


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary, as GPT-2's tokenizer maps them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in plain}
    shifted = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(0x100 + place) for place, byte in enumerate(shifted)})
    return alphabet


def _merges() -> list[tuple[str, str]]:
    """Merges that spell every word, alone and after a space, from left to right; each pair once, in order."""
    space = byte_alphabet()[0x20]
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS.split():
        for spelled in (word, space + word):
            for end in range(1, len(spelled)):
                merges.setdefault((spelled[:end], spelled[end]))
    return list(merges)


def build_tokenizer() -> Any:
    """The tokenizer as a `tokenizers.Tokenizer`; always the same vocabulary in the same order."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    merges = _merges()
    pieces = [*byte_alphabet().values(), *(left + right for left, right in merges)]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return tokenizer


def write_tokenizer(directory: str | Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` as transformers' AutoTokenizer and renderers load them.

    Args:
        directory: The folder, made if it is missing; the two files are replaced.

    Returns:
        The folder.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token.startswith("<|im_")],
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
