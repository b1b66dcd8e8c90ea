"""Checks on nodes and traces. Each yields findings and none stops at the first.

A check looks at whole arrays and comes down to a node or token only where something is wrong: a clean step costs a few
passes over its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rolltape.replay.checks.findings import Finding
from rolltape.replay.checks.groups import check_groups
from rolltape.replay.checks.nodes import NODE_CHECKS
from rolltape.replay.checks.traces import TRACE_CHECKS
from rolltape.replay.options import ConvertOptions
from rolltape.replay.printing.words import counted
from rolltape.replay.view import COLUMNS, View, views
from rolltape.schema.records import Group
from rolltape.schema.table import needs


def check(
    table: pa.Table, options: ConvertOptions | None = None, groups: Sequence[Group] | None = None
) -> list[Finding]:
    """Everything wrong with the rows of `table`, and with `groups` where they are given.

    `table` holds at least the columns of `view.COLUMNS`; raises BadInput where it does not. Findings come in row order, those
    of groups last.
    """
    needs(table, COLUMNS, "check")
    options = options or ConvertOptions()
    findings = [f for view in views(table) for f in check_view(view, options)]
    findings += rounded(table)
    return findings if groups is None else [*findings, *check_groups(table, groups, options)]


def rounded(table: pa.Table) -> list[Finding]:
    """One warning for all traces of `table` whose log-probs were rounded by the release of Verifiers that wrote them."""
    if "logprob_decimals" not in table.column_names or table.column("logprob_decimals").null_count == table.num_rows:
        return []
    columns = (table.column(name).to_pylist() for name in ("trace_id", "logprob_decimals"))
    found = [(trace, decimals) for trace, decimals in zip(*columns, strict=True) if decimals is not None]
    decimals = min(d for _, d in found)
    message = (
        f"{counted(len(found), 'trace')}, the first {found[0][0]}, with log-probs that Verifiers rounded to {decimals} "
        f"decimals, up to {0.5 * 10**-decimals:g} off those they were sampled with; let the trainer compute them again "
        "before it compares policies"
    )
    steps = set(table.column("step").to_pylist()) if "step" in table.column_names else set()
    step = steps.pop() if len(steps) == 1 else None
    return [Finding(code="logprobs_rounded", severity="warning", message=message, step=step, found=len(found))]


def check_view(view: View, options: ConvertOptions) -> list[Finding]:
    """Findings of the nodes and traces of one view, in row order."""
    found: list[tuple[int, Finding]] = []
    for part in (*NODE_CHECKS, *TRACE_CHECKS):
        found.extend(part(view, options))
    found.sort(key=lambda item: item[0])
    return [finding for _, finding in found]
