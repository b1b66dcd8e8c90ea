"""A reply of `/generate` before it is bytes. Log-probs stay JSON entries, so no float is formatted twice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    """Text, ids, log-prob entries and meta_info of one generation."""

    text: str
    ids: list[int]
    entries: list[bytes] | None
    """Entries of output_token_logprobs, None for no such key."""
    input_entries: list[bytes] | None
    """Entries of input_token_logprobs, None for no such key."""
    meta: dict[str, Any]
    """meta_info without the two lists."""

    def keep(self, count: int) -> None:
        """Leave only the first `count` tokens; the text is cut in proportion."""
        whole = len(self.ids)
        self.text = self.text[: len(self.text) * count // whole] if whole else ""
        self.ids = self.ids[:count]
        if self.entries is not None:
            self.entries = self.entries[:count]
        self.meta["completion_tokens"] = count

    def encode(self) -> bytes:
        """The JSON body."""
        meta = json.dumps(self.meta).encode()[:-1]
        lists = (("input_token_logprobs", self.input_entries), ("output_token_logprobs", self.entries))
        for name, entries in lists:
            if entries is not None:
                meta += b',"%s":[%s]' % (name.encode(), b",".join(entries))
        ids = ",".join(map(str, self.ids)).encode()
        return b'{"text":%s,"output_ids":[%s],"meta_info":%s}}' % (json.dumps(self.text).encode(), ids, meta)
