"""Log-probs recomputed by the engine: here, by a rule that a test can tell."""

from __future__ import annotations

from typing import Any


async def recompute_samples_rollout_logprobs_via_prefill(
    args: Any, samples: list[Any], *, url: str, sampling_params: Any
) -> None:
    if not getattr(args, "recompute_logprobs_via_prefill", False):
        return
    assert url.endswith("/generate")
    assert sampling_params["max_new_tokens"] == args.rollout_max_response_len
    for sample in samples:
        sample.rollout_log_probs = [-0.1 * (token % 7) - 0.3 for token in sample.tokens[-sample.response_length :]]
        sample.metadata["rollout_log_probs_source"] = "sglang_prefill_recompute"
