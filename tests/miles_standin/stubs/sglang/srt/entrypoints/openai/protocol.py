"""The one type of SGLang that Miles' base types name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Tool(BaseModel):
    """A tool offered to the model."""

    type: str = "function"
    function: Any = None
