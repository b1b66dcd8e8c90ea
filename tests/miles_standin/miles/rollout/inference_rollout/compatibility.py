"""How Miles makes and calls a rollout function."""

from __future__ import annotations

import inspect
from typing import Any

from miles.utils.async_utils import run
from miles.utils.misc import load_function


def load_rollout_function(input: Any, path: str) -> Any:
    found = load_function(path)
    if inspect.isclass(found):
        return found(input)
    return lambda call: found(input.args, call.rollout_id, input.data_source, evaluation=call.evaluation)


def call_rollout_function(function: Any, input: Any) -> Any:
    output = function(input)
    return run(output) if inspect.iscoroutine(output) else output
