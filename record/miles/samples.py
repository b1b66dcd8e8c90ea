"""One Verifiers trace as Miles Samples, for people who call it themselves."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from rolltape.replay.convert import convert_alone
from rolltape.replay.miles import Conversations, to_miles
from rolltape.replay.options import BranchPolicy, ConvertOptions
from rolltape.schema.errors import BadInput, CheckFailed
from rolltape.schema.table import encode

logger = logging.getLogger(__name__)


def trace_to_samples(
    args: Namespace, trace: Any, *, group_index: int, index_start: int, branch_policy: BranchPolicy = "reject"
) -> list[Any]:
    """The Samples of a Verifiers Trace or its JSON record, numbered from `index_start`.

    A trace without anything sampled gives none, with a warning. Raises CheckFailed where it cannot be trained: with several
    branches (unless `branch_policy` is `siblings`), or with token lists that do not fit together.
    """
    key = getattr(args, "reward_key", None)
    table = encode([trace])
    made, findings = convert_alone(table, ConvertOptions(branch_policy, reward_key=key, unscored="allow"))
    samples = next(iter(made.values()), [])
    failed = bool(table.column("error_types")[0].as_py())
    empty = not table.column("num_sampled")[0].as_py()
    if not samples and (failed or not table.column("num_nodes")[0].as_py()) and empty:
        logger.warning("trace %s holds nothing sampled and gives no sample", table.column("trace_id")[0].as_py())
        return []
    wrong = next((finding for finding in findings if finding.severity == "error"), None)
    if wrong is not None:
        raise CheckFailed(str(wrong))
    conversations = Conversations(table)
    result = []
    for index, sample in enumerate(samples, index_start):
        sample.group_index, sample.index = group_index, index
        sample.rollout_id = index_start if branch_policy == "siblings" else None
        result.append(to_miles(sample))
        conversations.tell(result[-1])
    return result


def trace_to_sample(args: Namespace, trace: Any, *, group_index: int, index: int) -> Any:
    """The one Sample of a trace. Raises BadInput where it gives none, and what `trace_to_samples` raises."""
    samples = trace_to_samples(args, trace, group_index=group_index, index_start=index)
    if not samples:
        raise BadInput("the trace gives no sample: nothing was sampled in it.")
    return samples[0]
