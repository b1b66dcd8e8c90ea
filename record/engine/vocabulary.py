"""A tokenizer as the demo engine uses it: token ids to bytes through a table, text to ids through `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.record.engine.tokenizer import build_tokenizer, byte_alphabet
from rolltape.schema.errors import BadInput

Ids = npt.NDArray[np.int64]

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TEXT_END = "<|endoftext|>"


class Vocabulary:
    """Ids, bytes and special tokens of one byte-level tokenizer with Qwen's chat markup.

    Attributes:
        size: Number of ids.
        pieces: The bytes of each id, shape [size], dtype object.
        special: True where a decoder may skip the id, shape [size].
        turn_start, turn_end, text_end: Ids of `<|im_start|>`, `<|im_end|>`, `<|endoftext|>`.
    """

    def __init__(self, tokenizer: Any) -> None:
        described = json.loads(tokenizer.to_str())
        _require_byte_level(described)
        added = {token["id"]: token for token in described["added_tokens"]}
        self._tokenizer = tokenizer
        self.size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.pieces = np.full(self.size, b"", dtype=object)
        self.special = np.zeros(self.size, dtype=bool)
        letters = {letter: byte for byte, letter in byte_alphabet().items()}
        for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            plain = token_id not in added
            self.pieces[token_id] = bytes(letters[letter] for letter in piece) if plain else piece.encode()
            self.special[token_id] = not plain and added[token_id]["special"]
        self.turn_start = self._markup(TURN_START)
        self.turn_end = self._markup(TURN_END)
        self.text_end = self._markup(TEXT_END)
        self.encode_cached = lru_cache(maxsize=4096)(self._encode_tuple)

    @classmethod
    def load(cls, directory: str | Path | None) -> Vocabulary:
        """Load `tokenizer.json` of a folder; None stands for the tokenizer made in code.

        Raises:
            BadInput: The folder has no tokenizer.json, or its tokenizer is not byte-level with Qwen's chat markup.
        """
        if directory is None:
            return cls(build_tokenizer())
        from tokenizers import Tokenizer

        file = Path(directory) / "tokenizer.json"
        if not file.is_file():
            raise BadInput(f"{file} was not found; give a folder that holds a tokenizer.json, or no folder at all.")
        return cls(Tokenizer.from_file(str(file)))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written out in it become their ids."""
        return list(self._encode_tuple(text))

    def decode_bytes(self, ids: npt.NDArray[Any] | Sequence[int], *, skip_special: bool = False) -> bytes:
        """The bytes of a list of ids, put together."""
        array = np.asarray(ids, dtype=np.int64)
        if skip_special:
            array = array[~self.special[array]]
        return b"".join(self.pieces[array].tolist())

    def decode(self, ids: npt.NDArray[Any] | Sequence[int], *, skip_special: bool = False) -> str:
        """The text of a list of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def _encode_tuple(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _markup(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise BadInput(f"The tokenizer has no {token} token; the demo engine needs Qwen's chat markup.")
        return int(token_id)


def _require_byte_level(described: dict[str, Any]) -> None:
    """Refuse a tokenizer whose pieces cannot be turned into bytes one by one."""
    decoder = described.get("decoder") or {}
    kinds = {decoder.get("type"), *(step.get("type") for step in decoder.get("decoders", []))}
    if "ByteLevel" not in kinds:
        raise BadInput(
            f"The tokenizer's decoder is {decoder.get('type')!r}, expected ByteLevel; "
            "use a byte-level tokenizer such as Qwen's, or none."
        )
