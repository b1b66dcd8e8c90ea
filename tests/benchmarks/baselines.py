"""The other ways to keep rollouts that rolltape is measured against, each doing its whole job.

- traces.jsonl, as Verifiers writes and reads it
- a .pt file of Sample dicts, as Miles' debug dump is one (needs torch)
- the floor: making the bare Python lists of a Sample out of numpy arrays that lie ready in memory
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from verifiers.v1.cli.output import TRACES_FILE, read_traces, write_trace
from verifiers.v1.trace import WireTrace

SampleDict = dict[str, Any]
Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int8], npt.NDArray[np.float32]]
"""Token ids, loss mask and log-probs of one Sample."""


def to_traces(records: list[dict[str, Any]]) -> list[Any]:
    """Records as Verifiers Trace objects."""
    return [WireTrace.model_validate(record) for record in records]


def write_jsonl(traces: list[Any], folder: Path) -> int:
    """Write traces.jsonl trace by trace, as a run of Verifiers does. Returns its bytes."""
    file: Path = folder / TRACES_FILE
    file.unlink(missing_ok=True)
    for trace in traces:
        write_trace(folder, trace)
    return file.stat().st_size


def samples_from_jsonl(folder: Path) -> list[SampleDict]:
    """Samples out of traces.jsonl: read, validated, and mapped in plain Python."""
    return [sample_of(trace, index) for index, trace in enumerate(read_traces(folder, WireTrace))]


def sample_of(trace: Any, index: int) -> SampleDict:
    """A trace with one branch as a dict with the fields of Miles' Sample that rollouts fill in."""
    [branch] = trace.branches
    ids, sampled, logprobs = list(branch.token_ids), list(branch.sampled_mask), list(branch.logprobs)
    begin = sampled.index(True)
    summary = {"rewards": dict(trace.rewards), "metrics": dict(trace.metrics), "stop_condition": trace.stop_condition}
    return {
        "group_index": trace.task.data.idx,
        "index": index,
        "prompt": trace.task.data.prompt,
        "tokens": ids,
        "response": trace.last_reply,
        "response_length": len(ids) - begin,
        "label": "42",
        "reward": trace.reward,
        "loss_mask": [int(flag) for flag in sampled[begin:]],
        "rollout_log_probs": logprobs[begin:],
        "status": "completed",
        "routing_key": trace.id,
        "metadata": {"verifiers": summary},
    }


def save_pt(samples: list[SampleDict], path: Path) -> int:
    """Save Samples as Miles' debug dump does. Returns the file's bytes."""
    import torch

    torch.save({"rollout_id": 0, "metadata": {}, "samples": samples}, path)
    return path.stat().st_size


def load_pt(path: Path) -> list[SampleDict]:
    """Samples out of a .pt file."""
    import torch

    samples: list[SampleDict] = torch.load(path, weights_only=False)["samples"]
    return samples


def arrays_of(samples: list[SampleDict]) -> list[Arrays]:
    """The long lists of Samples as arrays."""
    return [
        (
            np.array(sample["tokens"], np.int32),
            np.array(sample["loss_mask"], np.int8),
            np.array(sample["rollout_log_probs"], np.float32),
        )
        for sample in samples
    ]


def floor(arrays: list[Arrays]) -> list[tuple[list[int], list[int], list[float]]]:
    """The least that making Samples can cost: their long lists, out of arrays."""
    return [(ids.tolist(), mask.tolist(), logprobs.tolist()) for ids, mask, logprobs in arrays]
