"""Checks on nodes and traces. Each yields findings and none stops at the first.

A check looks at whole arrays and comes down to a node or token only where something is wrong: a clean step costs a few
passes over its tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.replay.branches import asked_again, leaves, path_to, superseded
from rolltape.replay.findings import Finding
from rolltape.replay.groups import check_groups
from rolltape.replay.options import ConvertOptions
from rolltape.replay.view import View, views
from rolltape.schema.jsontext import unpack_extra
from rolltape.schema.records import Group, exact_sum

ROUNDING = 1e-3
"""A log-prob may be this much above 0: engines compute them in bfloat16 and round."""

FORK_ADVICE = (
    'past reasoning is dropped, or sampled tokens are rendered anew, at each user turn: set thinking_retention = "all" '
    "or enable_thinking = false in the renderer settings to keep one branch, or take branch_policy = 'siblings' to train "
    "every branch"
)

Make = Callable[..., Finding]


def check(
    table: pa.Table, options: ConvertOptions | None = None, groups: Sequence[Group] | None = None
) -> list[Finding]:
    """Everything wrong with the rows of `table`, and with `groups` where they are given.

    `table` holds at least the columns of `view.COLUMNS`. Findings come in row order, those of groups last.
    """
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
        f"{len(found)} traces, the first of them {found[0][0]}, have log-probs that Verifiers rounded to {decimals} "
        f"decimals, up to {0.5 * 10**-decimals:g} off those they were sampled with; let the trainer compute them again "
        "before it compares policies"
    )
    steps = set(table.column("step").to_pylist()) if "step" in table.column_names else set()
    step = steps.pop() if len(steps) == 1 else None
    return [Finding(code="logprobs_rounded", severity="warning", message=message, step=step, found=len(found))]


def check_view(view: View, options: ConvertOptions) -> list[Finding]:
    """Findings of the nodes and traces of one view, in row order."""
    found: list[tuple[int, Finding]] = []
    for part in (
        _counts,
        _parents,
        _logprobs,
        _ids,
        _sampled_places,
        _usage,
        _texts,
        _clock,
        _aborts,
        _asked_again,
        _traces,
    ):
        found.extend(part(view, options))
    found.sort(key=lambda item: item[0])
    return [finding for _, finding in found]


Found = Iterator[tuple[int, Finding]]


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


def _at(view: View, node: int) -> tuple[int, int]:
    """(row, index in its trace) of a node."""
    return int(view.node_row[node]), int(view.node_index[node])


def _nodes_of(view: View, tokens: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(node, positions in that node) of token positions."""
    nodes = np.searchsorted(view.node_token_starts, tokens, side="right") - 1
    for node in np.unique(nodes):
        yield int(node), tokens[nodes == node] - view.node_token_starts[node]


# -- nodes


def _counts(view: View, _: ConvertOptions) -> Found:
    for node in np.flatnonzero(_flags(view, "node_raw")):
        row, index = _at(view, int(node))
        found = _raw_lengths(view, row, index)
        yield finding(
            view,
            row,
            "lists",
            f"node {index}: token ids, mask, content mask and log-probs do not fit together ({found or 'kept in extra'}); "
            "expected a mask as long as the ids and one log-prob for each sampled token",
            node=index,
            found=found,
        )
    rows = np.diff(view.token_starts)
    sums = np.bincount(view.node_row, weights=view.node_tokens, minlength=view.n).astype(np.int64)
    for row in np.flatnonzero(sums != rows).tolist():
        yield finding(
            view,
            row,
            "token_count",
            f"{rows[row]} token ids, but its nodes count {sums[row]}",
            expected=int(sums[row]),
            found=int(rows[row]),
        )


def _flags(view: View, name: str) -> npt.NDArray[np.bool_]:
    values: npt.NDArray[np.bool_] = view.column(name).flatten().to_numpy(zero_copy_only=False)
    return values


def _raw_lengths(view: View, row: int, node: int) -> dict[str, Any] | None:
    """How long the lists of a raw node are, where the row's extra was read."""
    if view.batch.schema.get_field_index("extra") < 0:
        return None
    data = view.column("extra")[row].as_py()
    kept = unpack_extra(data).get("nodes", {}).get(str(node), {}) if data else {}
    lists = {k: v for k, v in kept.items() if k in ("token_ids", "mask", "is_content", "logprobs")}
    result: dict[str, Any] = {k: len(v) if isinstance(v, list) else repr(v)[:40] for k, v in lists.items()}
    nulls = [i for i, v in enumerate(lists.get("logprobs") or []) if v is None] if "logprobs" in lists else []
    if nulls:
        result["null log-probs at"] = nulls[:8]
    return result


def _parents(view: View, _: ConvertOptions) -> Found:
    bad = (view.parents < -1) | (view.parents >= view.node_index)
    for node in np.flatnonzero(bad):
        row, index = _at(view, int(node))
        parent = int(view.parents[node])
        yield finding(
            view,
            row,
            "parent",
            f"node {index} names node {parent if parent >= 0 else 'below 0'} as its parent; expected one before it",
            node=index,
            expected=f"0 to {index - 1}",
            found=parent,
        )


def _logprobs(view: View, _: ConvertOptions) -> Found:
    known = view.known
    wrong = ~view.sampled if known is None else known ^ view.sampled
    if wrong.any():
        yield from _misplaced(view, np.flatnonzero(wrong))
    values = view.logprobs
    if not len(values) or (values.max() <= 0 and values.min() > -math.inf):
        return
    for node, at in _nodes_of(view, np.flatnonzero(~((values <= ROUNDING) & (values > -math.inf)))):
        row, index = _at(view, node)
        value = float(values[view.node_token_starts[node] + at[0]])
        yield finding(
            view,
            row,
            "logprob_value",
            f"node {index} has the log-prob {value} at token {at[0]}"
            + (f" and {len(at) - 1} more of the kind" if len(at) > 1 else "")
            + f"; expected finite numbers of at most 0 (rounding up to {ROUNDING} is let pass)",
            node=index,
            position=int(at[0]),
            expected="finite, <= 0",
            found=str(value),
        )
    for node, at in _nodes_of(view, np.flatnonzero((values > 0) & (values <= ROUNDING))):
        row, index = _at(view, node)
        yield finding(
            view,
            row,
            "logprob_rounding",
            f"node {index} has {len(at)} log-probs just above 0, which reads as rounding by the engine",
            severity="warning",
            node=index,
            position=int(at[0]),
            found=len(at),
        )


def _misplaced(view: View, tokens: npt.NDArray[Any]) -> Found:
    raw = _flags(view, "node_raw")
    for node, at in _nodes_of(view, tokens):
        if raw[node]:
            continue
        row, index = _at(view, node)
        missing = int(np.count_nonzero(view.sampled[view.node_token_starts[node] + at]))
        code, what = ("logprob_missing", "sampled") if missing else ("logprob_surplus", "unsampled")
        yield finding(
            view,
            row,
            code,
            f"node {index} has {len(at)} {what} tokens {'without' if missing else 'with'} a log-prob, first at token "
            f"{at[0]}; expected exactly one for each sampled token",
            node=index,
            position=int(at[0]),
            expected=0,
            found=len(at),
        )


def _ids(view: View, options: ConvertOptions) -> Found:
    ids, limit = view.ids, options.vocab_size
    if not len(ids) or (ids.min() >= 0 and (limit is None or ids.max() < limit)):
        return
    bad = ids < 0 if limit is None else (ids < 0) | (ids >= limit)
    for node, at in _nodes_of(view, np.flatnonzero(bad)):
        row, index = _at(view, node)
        value = int(ids[view.node_token_starts[node] + at[0]])
        yield finding(
            view,
            row,
            "token_id",
            f"node {index} has token id {value} at token {at[0]}; expected 0 to "
            + ("the vocabulary's size" if limit is None else str(limit - 1)),
            node=index,
            position=int(at[0]),
            found=value,
        )


def _sampled_places(view: View, _: ConvertOptions) -> Found:
    counts = view.node_sampled_tokens
    for node in np.flatnonzero((counts > 0) & ~(view.node_sampled & view.is_text("node_role", "assistant"))):
        row, index = _at(view, int(node))
        role = view.roles[int(node)].as_py()
        yield finding(
            view,
            row,
            "sampled_place",
            f"node {index} ({role}, sampled {bool(view.node_sampled[node])}) has {counts[node]} sampled tokens; expected "
            "them only on assistant messages that the model produced",
            node=index,
            expected=0,
            found=int(counts[node]),
        )


def _usage(view: View, _: ConvertOptions) -> Found:
    """Recorded lengths against those the engine reported."""
    numbers, valid = view.node_numbers("node_completion_tokens")
    for node in np.flatnonzero(valid & view.node_sampled & (numbers != view.node_sampled_tokens)):
        row, index = _at(view, int(node))
        tokens = int(view.node_sampled_tokens[node])
        if tokens:
            yield finding(
                view,
                row,
                "usage",
                f"node {index} has {tokens} sampled tokens, but {numbers[node]} completion tokens were reported; was an "
                "end token appended that the model never sampled?",
                severity="warning",
                node=index,
                expected=int(numbers[node]),
                found=tokens,
            )
    yield from _prompt_lengths(view)


def _prompt_lengths(view: View) -> Found:
    prompts, valid = view.node_numbers("node_prompt_tokens")
    cached, has_cached = view.node_numbers("node_cached_tokens")
    told = prompts + np.where(has_cached, cached, 0)
    before = _tokens_before(view) + view.node_tokens - view.node_sampled_tokens
    look = valid & view.node_sampled & (view.node_sampled_tokens > 0) & (told != before)
    for node in np.flatnonzero(look):
        row, index = _at(view, int(node))
        yield finding(
            view,
            row,
            "prompt_length",
            f"node {index} follows {before[node]} recorded tokens, but the engine was given {told[node]}; the recorded "
            "tokens are not the ones it saw, so the log-probs belong to another text",
            node=index,
            expected=int(told[node]),
            found=int(before[node]),
        )


def _tokens_before(view: View) -> npt.NDArray[np.int64]:
    """[N] tokens on the path before each node."""
    starts = view.node_token_starts[:-1] - view.token_starts[view.node_row]
    for row in np.flatnonzero(~view.linear):
        first, end = view.node_starts[row], view.node_starts[row + 1]
        parents, sizes = view.parents[first:end], view.node_tokens[first:end]
        for i, parent in enumerate(parents.tolist()):
            inside = 0 <= parent < i
            starts[first + i] = starts[first + parent] + sizes[parent] if inside else 0
    return starts


def _texts(view: View, _: ConvertOptions) -> Found:
    """Sampled messages whose tokens were not recorded, and images, whose pixels are not in a trace."""
    empty = np.flatnonzero(view.node_sampled & (view.node_sampled_tokens == 0))
    raw = _flags(view, "node_raw")
    for node in empty:
        text = view.contents[int(node)].as_py()
        if text and not raw[node]:
            row, index = _at(view, int(node))
            yield finding(
                view,
                row,
                "no_tokens",
                f"node {index} is a reply of {len(text)} characters without sampled tokens; text is never tokenised here, "
                "so record it with the engine's token ids",
                node=index,
                found=text[:80],
            )
    parts = view.column("node_parts").flatten()
    if parts.null_count == len(parts):
        return
    for node in np.flatnonzero(parts.is_valid().to_numpy(zero_copy_only=False)):
        if any(isinstance(p, dict) and p.get("type") != "text" for p in json.loads(parts[int(node)].as_py())):
            row, index = _at(view, int(node))
            yield finding(
                view,
                row,
                "image",
                f"node {index} holds an image, or other content that is no text; its tokens cannot be trained without it, "
                "and Samples here do not carry it",
                node=index,
            )


def _clock(view: View, _: ConvertOptions) -> Found:
    """Messages that were added after scoring began: the reward was given to something else than what is recorded."""
    stamps, valid = view.node_numbers("node_timestamp")
    scoring = view.column("scoring_start").fill_null(0.0).to_numpy(zero_copy_only=False)
    late = valid & (scoring[view.node_row] > 0) & (stamps > scoring[view.node_row])
    for row in np.unique(view.node_row[late]):
        nodes = np.flatnonzero(late & (view.node_row == row))
        index = int(view.node_index[nodes[0]])
        yield finding(
            view,
            int(row),
            "late_node",
            f"{len(nodes)} nodes, the first of them node {index}, were added after scoring had begun, so the reward was "
            "given without them; a longer timeout.rollout, or a shorter one at the engine, avoids it",
            node=index,
            found=len(nodes),
        )


# -- traces


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
                f"{sampled[row]} sampled tokens; {limits[0]} to {limits[1]} are expected",
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
    return f"0 trainable tokens in {nodes} nodes; did the engine return token ids and log-probs?"


def _branches(view: View, row: int, count: int, failed: bool, options: ConvertOptions) -> Found:
    if count > 1 and options.branch_policy == "reject":
        where = fork_of(view, row)
        yield finding(
            view,
            row,
            "branches",
            f"{count} branches, the second begins at node {where}; expected 1. Where it is a fork, {FORK_ADVICE}",
            node=where,
            expected=1,
            found=count,
        )
    wanted = options.expect.branches
    if wanted is not None and not failed and count != wanted:
        yield finding(
            view, row, "expected_branches", f"{count} branches; {wanted} are expected", expected=wanted, found=count
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


def _aborts(view: View, _: ConvertOptions) -> Found:
    """Turns that the engine gave up and that the conversation went on from."""
    aborted = view.is_text("node_finish_reason", "abort")
    rows = view.column("turn_finish_reason")
    for row in [i for i, r in enumerate(rows.to_pylist()) if "abort" in (r or ())]:
        nodes = np.arange(view.node_starts[row], view.node_starts[row + 1])
        turns = nodes[view.node_sampled[nodes]]
        reasons = rows[row].as_py()
        if len(reasons) == len(turns):
            aborted[turns[np.array([r == "abort" for r in reasons], np.bool_)]] = True
    for node in np.flatnonzero(aborted):
        row, index = _at(view, int(node))
        if index in view.parents[view.node_starts[row] : view.node_starts[row + 1]]:
            yield finding(
                view,
                row,
                "aborted_turn",
                f"node {index} was aborted by the engine and the conversation went on after it; a turn that never "
                "completed is not trained",
                node=index,
                found="abort",
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
        row, index = _at(view, int(node))
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
