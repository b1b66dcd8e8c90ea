"""Branches of a trace and which tokens of each are trained.

A branch is the path from a root to a leaf of the message graph (verifiers.v1.graph). With the policy `siblings` each leaf
becomes one Sample, after three rules:

- A superseded retry is left out: a sampled leaf that has a later sampled sibling under the same parent is a reply that
  was asked for again. A sibling that was not sampled is no retry but a re-rendered or edited history, and the leaf stays.
- A sampled node that several branches share is trainable once, in the branch of the earliest leaf that is kept.
- A branch left without a trainable token is no Sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Branch:
    """One path. `index` counts all leaves of the trace, as Verifiers does."""

    index: int
    nodes: tuple[int, ...]
    trainable: frozenset[int]
    """Nodes of the path whose sampled tokens are trained here."""


def leaves(parents: Sequence[int]) -> list[int]:
    """Nodes that are no node's parent, in order."""
    inner = set(parents)
    return [i for i in range(len(parents)) if i not in inner]


def path_to(leaf: int, parents: Sequence[int]) -> tuple[int, ...]:
    """Nodes from the root to `leaf`. Parents must come before their children (see the check `parent`)."""
    path = [leaf]
    while (parent := parents[path[-1]]) >= 0:
        path.append(parent)
    return tuple(reversed(path))


def superseded(parents: Sequence[int], sampled: Sequence[bool]) -> set[int]:
    """Sampled leaves with a later sampled sibling under the same parent."""
    last = {parent: node for node, parent in enumerate(parents) if sampled[node]}
    return {leaf for leaf in leaves(parents) if sampled[leaf] and last[parents[leaf]] > leaf}


def asked_again(parents: Sequence[int], sampled: Sequence[bool]) -> dict[int, list[int]]:
    """Sampled children of each node that has several: replies to one and the same conversation."""
    replies: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if sampled[node]:
            replies.setdefault(parent, []).append(node)
    return {parent: nodes for parent, nodes in replies.items() if len(nodes) > 1}


def sibling_branches(parents: Sequence[int], sampled: Sequence[bool], sampled_tokens: Sequence[int]) -> list[Branch]:
    """The branches that become Samples under the policy `siblings`."""
    dropped = superseded(parents, sampled)
    taken: set[int] = set()
    result = []
    for index, leaf in enumerate(leaves(parents)):
        if leaf in dropped:
            continue
        path = path_to(leaf, parents)
        trainable = frozenset(n for n in path if sampled_tokens[n] and n not in taken)
        taken |= trainable
        if trainable:
            result.append(Branch(index, path, trainable))
    return result
