"""Miles' HTTP client: one for the process, made when the engines start; a failure is tried again up to 60 times."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

_http_client: httpx.AsyncClient | None = None


async def post(url: str, payload: Any, max_retries: int = 60, action: str = "post", headers: Any = None) -> Any:
    assert _http_client is not None
    for left in reversed(range(max_retries)):
        try:
            response = await getattr(_http_client, action)(url, json=payload or {}, headers=headers)
            response.raise_for_status()
            return response.json()
        except Exception:
            if not left:
                raise
            await asyncio.sleep(1)
    return None
