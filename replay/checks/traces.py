"""Checks on whole traces: branches, rewards, turns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rolltape.replay.branches import asked_again, leaves, path_to, superseded
from rolltape.replay.checks.base import Found, finding, place_of
from rolltape.replay.options import ConvertOptions
from rolltape.replay.printing.words import counted
from rolltape.replay.view import View
from rolltape.schema.records import exact_sum

FORK_ADVICE = (
    'past reasoning is dropped, or sampled tokens are rendered anew, at each user turn: set thinking_retention = "all" '
    "or enable_thinking = false in the renderer settings to keep one branch, or take branch_policy = 'siblings' "
    "(--branch-policy siblings) to train every branch"
)


def _traces(view: View, options: ConvertOptions) -> Found:
    rewards = view.pylist("rewards")
    columns = {name: view.pylist(name) for name in ("reward", "num_branches", "error_types", "turn_weight_version")}
    scores, weights = view.pylist("scores"), view.pylist("weights")
    sampled = np.bincount(view.node_row, weights=view.node_sampled_tokens, minlength=view.n).astype(np.int64)
    problems = view.pylist("problems")
    stops, cut = view.pylist("stop_condition"), view.pylist("is_truncated")
    for row in range(view.n):
        failed = bool(columns["error_types"][row])
        yield from _branches(view, row, columns["num_branches"][row], failed, options)
        if not sampled[row] and not failed:
            nodes = int(view.node_starts[row + 1] - view.node_starts[row])
            yield finding(
                view,
                row,
                "no_trainable_token",
                _why_empty(nodes, stops[row], cut[row]),
                expected="at least 1",
                found=0,
            )
        yield from _reward(view, row, rewards[row] or {}, columns["reward"][row], failed, options)
        yield from _contributions(view, row, rewards[row] or {}, scores[row], weights[row])
        yield from _turns(view, row, columns["turn_weight_version"][row])
        limits = options.expect.sampled_tokens
        if limits is not None and not failed and not limits[0] <= sampled[row] <= limits[1]:
            yield finding(
                view,
                row,
                "expected_sampled_tokens",
                f"{counted(int(sampled[row]), 'sampled token')}; {limits[0]} to {limits[1]} are expected",
                expected=list(limits),
                found=int(sampled[row]),
            )
        for problem in problems[row] or ():
            yield finding(view, row, "not_exact", problem, severity="warning")
    yield from _roots(view)


def _why_empty(nodes: int, stop: str | None, cut: bool | None) -> str:
    if not nodes and cut:
        return f"it was cut off before anything was sampled ({stop}): the limits leave no room for its first prompt"
    if not nodes:
        return "it ended without a model call"
    return f"0 trainable tokens in {counted(int(nodes), 'node')}; did the engine return token ids and log-probs?"


def _branches(view: View, row: int, count: int, failed: bool, options: ConvertOptions) -> Found:
    if count > 1 and options.branch_policy == "reject":
        where = fork_of(view, row)
        second = "" if where is None else f", the second begins at node {where}"
        yield finding(
            view,
            row,
            "branches",
            f"{count} branches{second}; expected 1. Where it is a fork, {FORK_ADVICE}",
            node=where,
            expected=1,
            found=count,
        )
    wanted = options.expect.branches
    if wanted is not None and not failed and count != wanted:
        yield finding(
            view,
            row,
            "expected_branches",
            f"{counted(count, 'branch', 'branches')}; {wanted} expected",
            expected=wanted,
            found=count,
        )


def _asked_again(view: View, options: ConvertOptions) -> Found:
    """Conversations that were answered more than once: no trace says which answer the harness went by."""
    if options.branch_policy != "siblings":
        return
    for row in np.flatnonzero(~view.linear).tolist():
        span = slice(view.node_starts[row], view.node_starts[row + 1])
        parents, sampled = view.parents[span].tolist(), view.node_sampled[span].tolist()
        if any(p >= i for i, p in enumerate(parents)):
            continue
        dropped = superseded(parents, sampled)
        for replies in asked_again(parents, sampled).values():
            kept = [n for n in replies if n not in dropped]
            yield finding(
                view,
                row,
                "asked_again",
                f"nodes {replies} answer the same conversation; {kept} are trained, each with the trace's one reward, and "
                f"{[n for n in replies if n in dropped]} are left out as superseded",
                severity="warning",
                node=replies[0],
                expected=1,
                found=len(replies),
            )


def fork_of(view: View, row: int) -> int | None:
    """First node at which the second branch of a trace leaves the first."""
    parents = view.parents[view.node_starts[row] : view.node_starts[row + 1]].tolist()
    if any(p >= i for i, p in enumerate(parents)):
        return None
    ends = leaves(parents)
    first = set(path_to(ends[0], parents)) if ends else set()
    return next((n for n in path_to(ends[1], parents) if n not in first), None) if len(ends) > 1 else None


def _reward(
    view: View, row: int, rewards: dict[str, Any], total: float | None, failed: bool, options: ConvertOptions
) -> Found:
    bad = {k: v for k, v in rewards.items() if v is not None and not math.isfinite(v)}
    if bad:
        name, value = next(iter(bad.items()))
        yield finding(
            view,
            row,
            "reward_value",
            f"reward {name!r} is {value}; expected a finite number",
            expected="finite",
            found={k: str(v) for k, v in bad.items()},
        )
    missing = [k for k, v in rewards.items() if v is None]
    wanted = options.expect.reward_names
    if wanted is not None and not failed and (set(rewards) != set(wanted) or missing):
        yield finding(
            view,
            row,
            "expected_rewards",
            f"scored under {sorted(set(rewards) - set(missing))}; {sorted(wanted)} are expected",
            expected=sorted(wanted),
            found=sorted(rewards),
        )
    if failed or bad:
        return
    if missing or not rewards:
        if options.unscored == "refuse":
            what = f"reward {missing[0]!r} was not scored" if missing else "nothing was scored"
            yield finding(
                view,
                row,
                "unscored",
                f"{what}, which is not a reward of 0; let the taskset score every rollout, or set unscored = 'allow' "
                "where the trainer scores",
                found=missing or None,
            )
        return
    parts = exact_sum(list(rewards.values()))
    if total is None or not math.isclose(total, parts, rel_tol=1e-9, abs_tol=1e-9):
        yield finding(
            view,
            row,
            "reward_sum",
            f"the reward is {total}, but its parts add up to {parts}",
            expected=parts,
            found=total,
        )
    yield from _reward_key(view, row, rewards, options)


def _reward_key(view: View, row: int, rewards: dict[str, Any], options: ConvertOptions) -> Found:
    key = options.reward_key
    if key is None:
        return
    if "reward" in rewards:
        yield finding(
            view,
            row,
            "reward_name",
            "a reward is itself named 'reward', the name of the total in structured rewards; rename it in the taskset, "
            "or leave reward_key unset",
            found=sorted(rewards),
        )
    elif key != "reward" and key not in rewards:
        yield finding(
            view,
            row,
            "reward_key",
            f"reward_key {key!r} names no reward; there are {[*sorted(rewards), 'reward']}",
            expected=key,
            found=sorted(rewards),
        )


def _contributions(view: View, row: int, rewards: dict[str, Any], scores: Any, weights: Any) -> Found:
    for name, score in (scores or {}).items():
        weight, part = (weights or {}).get(name), rewards.get(name)
        if score is None or weight is None or part is None:
            continue
        if math.isclose(score * weight, part, rel_tol=1e-9, abs_tol=1e-9):
            continue
        yield finding(
            view,
            row,
            "contribution",
            f"reward {name!r} contributes {part}, but score {score} times weight {weight} is {score * weight}",
            expected=score * weight,
            found=part,
        )


def _turns(view: View, row: int, versions: Any) -> Found:
    numbers = [int(v) for v in versions or () if v is not None and str(v).lstrip("-").isdigit()]
    if numbers != sorted(numbers):
        yield finding(
            view,
            row,
            "weight_versions",
            f"weight versions go back from turn to turn ({numbers}); did a router send turns to engines of different age?",
            severity="warning",
            found=numbers,
        )


def _roots(view: View) -> Found:
    """Several roots, and roots that begin with one template token twice."""
    roots = np.flatnonzero(view.parents == -1)
    counts = np.bincount(view.node_row[roots], minlength=view.n)
    for row in np.flatnonzero(counts > 1).tolist():
        yield finding(
            view,
            row,
            "roots",
            f"{counts[row]} conversations in one trace; the reward is one for all of them",
            severity="warning",
            found=int(counts[row]),
        )
    long = roots[view.node_tokens[roots] > 1]
    starts = view.node_token_starts[long]
    same = view.ids[starts] == view.ids[starts + 1] if len(long) else np.zeros(0, np.bool_)
    content = view.column("is_content").flatten()
    for node, start in zip(long[same], starts[same], strict=True):
        if content[int(start)].as_py() or content[int(start) + 1].as_py():
            continue
        row, index = place_of(view, int(node))
        yield finding(
            view,
            row,
            "double_start",
            f"the conversation begins with token {view.ids[start]} twice; does the template hold a start token that the "
            "tokenizer adds again?",
            severity="warning",
            node=index,
            found=int(view.ids[start]),
        )


TRACE_CHECKS = (_asked_again, _traces)
