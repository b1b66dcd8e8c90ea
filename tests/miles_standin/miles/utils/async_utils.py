"""One background event loop for coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

_loops: list[asyncio.AbstractEventLoop] = []


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    if not _loops:
        _loops.append(asyncio.new_event_loop())
        threading.Thread(target=_loops[0].run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loops[0]).result()
