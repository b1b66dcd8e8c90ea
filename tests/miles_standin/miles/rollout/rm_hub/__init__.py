"""Miles' reward models by the function that `--custom-rm-path` names."""

from __future__ import annotations

from typing import Any

from miles.utils.misc import load_function


async def async_rm(args: Any, sample: Any) -> Any:
    return await load_function(args.custom_rm_path)(args, sample)


async def batched_async_rm(args: Any, samples: list[Any]) -> Any:
    return await load_function(args.custom_rm_path)(args, samples)
