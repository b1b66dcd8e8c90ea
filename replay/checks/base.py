"""What checks share: a finding about a row, and where a node or token lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.replay.checks.findings import Finding
from rolltape.replay.view import View

Found = Iterator[tuple[int, Finding]]
"""(row, finding) of one check."""


def finding(view: View, row: int, code: str, message: str, **rest: Any) -> tuple[int, Finding]:
    """A finding about a row, with step, group and trace filled in."""
    return row, Finding(
        code=code,
        message=message,
        step=view.column("step")[row].as_py(),
        group_index=view.column("group_index")[row].as_py(),
        trace_id=view.trace_ids[row],
        **rest,
    )


def place_of(view: View, node: int) -> tuple[int, int]:
    """(row, index in its trace) of a node."""
    return int(view.node_row[node]), int(view.node_index[node])


def nodes_of(view: View, tokens: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(node, positions in that node) of ascending token positions."""
    nodes, begins = np.unique(np.searchsorted(view.node_token_starts, tokens, side="right") - 1, return_index=True)
    for node, at in zip(nodes.tolist(), np.split(tokens, begins)[1:], strict=True):
        yield node, at - view.node_token_starts[node]
