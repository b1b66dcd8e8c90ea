"""Checks on nodes and their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.replay.checks.base import Found, finding, nodes_of, place_of
from rolltape.replay.options import ConvertOptions
from rolltape.replay.printing.words import counted
from rolltape.replay.view import View
from rolltape.schema.jsontext import unpack_extra

ROUNDING = 1e-3
"""A log-prob may be this much above 0: engines compute them in bfloat16 and round."""


def _counts(view: View, _: ConvertOptions) -> Found:
    for node in np.flatnonzero(_flags(view, "node_raw")):
        row, index = place_of(view, int(node))
        found = _raw_lengths(view, row, index)
        yield finding(
            view,
            row,
            "lists",
            f"token ids, mask, content mask and log-probs do not fit together ({_lengths(found)}); "
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
    if "extra" not in view:
        return None
    data = view.column("extra")[row].as_py()
    kept = unpack_extra(data).get("nodes", {}).get(str(node), {}) if data else {}
    lists = {k: v for k, v in kept.items() if k in ("token_ids", "mask", "is_content", "logprobs")}
    result: dict[str, Any] = {k: len(v) if isinstance(v, list) else repr(v)[:40] for k, v in lists.items()}
    nulls = [i for i, v in enumerate(lists.get("logprobs") or []) if v is None] if "logprobs" in lists else []
    if nulls:
        result["null log-probs at"] = nulls[:8]
    return result


def _lengths(found: Mapping[str, Any] | None) -> str:
    """The lengths of a raw node's lists, for a sentence."""
    return ", ".join(f"{name} {value}" for name, value in (found or {}).items()) or "they are kept in extra"


def _parents(view: View, _: ConvertOptions) -> Found:
    bad = (view.parents < -1) | (view.parents >= view.node_index)
    for node in np.flatnonzero(bad):
        row, index = place_of(view, int(node))
        parent = int(view.parents[node])
        named = f"node {parent}" if parent >= 0 else "a node of a negative index"
        yield finding(
            view,
            row,
            "parent",
            f"node {index} names {named} as its parent; expected one before it",
            node=index,
            expected=f"0 to {index - 1}",
            found=parent,
        )


def _logprobs(view: View, _: ConvertOptions) -> Found:
    known = view.known
    wrong = ~view.sampled if known is None else known ^ view.sampled
    if wrong.any():
        yield from _misplaced(view, np.flatnonzero(wrong))
    stored = view.stored_logprobs
    if not len(stored) or (stored.max() <= 0 and stored.min() > -math.inf):
        return
    values = view.logprobs
    for node, at in nodes_of(view, np.flatnonzero(~((values <= ROUNDING) & (values > -math.inf)))):
        row, index = place_of(view, node)
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
    for node, at in nodes_of(view, np.flatnonzero((values > 0) & (values <= ROUNDING))):
        row, index = place_of(view, node)
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
    for node, at in nodes_of(view, tokens):
        if raw[node]:
            continue
        row, index = place_of(view, node)
        missing = int(np.count_nonzero(view.sampled[view.node_token_starts[node] + at]))
        code, what = ("logprob_missing", "sampled") if missing else ("logprob_surplus", "unsampled")
        yield finding(
            view,
            row,
            code,
            f"node {index} has {counted(len(at), f'{what} token')} {'without' if missing else 'with'} a log-prob, first at "
            f"token {at[0]}; expected exactly one for each sampled token",
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
    for node, at in nodes_of(view, np.flatnonzero(bad)):
        row, index = place_of(view, node)
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
        row, index = place_of(view, int(node))
        role = view.roles[int(node)].as_py()
        yield finding(
            view,
            row,
            "sampled_place",
            f"node {index} ({role}, sampled {bool(view.node_sampled[node])}) has "
            f"{counted(int(counts[node]), 'sampled token')}; expected "
            "them only on assistant messages that the model produced",
            node=index,
            expected=0,
            found=int(counts[node]),
        )


def _usage(view: View, _: ConvertOptions) -> Found:
    """Recorded lengths against those the engine reported."""
    numbers, valid = view.node_numbers("node_completion_tokens")
    for node in np.flatnonzero(valid & view.node_sampled & (numbers != view.node_sampled_tokens)):
        row, index = place_of(view, int(node))
        tokens = int(view.node_sampled_tokens[node])
        if tokens:
            yield finding(
                view,
                row,
                "usage",
                f"node {index} has {counted(int(tokens), 'sampled token')}, but "
                f"{counted(int(numbers[node]), 'completion token')} reported; was an "
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
        row, index = place_of(view, int(node))
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
            row, index = place_of(view, int(node))
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
            row, index = place_of(view, int(node))
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
            f"{counted(len(nodes), 'node')}, from node {index} on, added after scoring had begun, so the reward was "
            "given without them; a longer timeout.rollout, or a shorter one at the engine, avoids it",
            node=index,
            found=len(nodes),
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
        row, index = place_of(view, int(node))
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


NODE_CHECKS = (_counts, _parents, _logprobs, _ids, _sampled_places, _usage, _texts, _clock, _aborts)
