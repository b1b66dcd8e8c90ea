"""Rendering recorded messages again: do today's renderer and tokenizer still give the recorded token ids?

    branch ─► messages ─► Renderers ─► ids, told apart by message ─► compared node by node with the recorded ones

What differs is one of these, and nothing but the second is worth a look where nothing was changed:

- `noncanonical`: the model sampled ids that its own text would not be tokenised into. Usual, and harmless: the sampled
  ids are recorded and trained.
- `drift`: ids that nobody sampled (a prompt, a tool's answer, the template) come out otherwise than they were sent. The
  tokenizer, the template, the renderer's settings or Renderers itself is another one than at the recording.
- `rewritten`: the template writes a reply otherwise than the model did (reasoning dropped, a tool call spelled anew), so
  that a conversation which is rendered anew instead of bridged forks there.

`fork` says that it did: a message stands twice under one parent, with other ids. A branch that begins with another
message (an edit, a compaction, a second conversation) is counted and no finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import message_hash

from rolltape.record.rechecking.picked import Picked, left_out
from rolltape.record.rechecking.renderings import Renderings, RetokenizeOptions
from rolltape.record.retrace import message_of
from rolltape.replay.branches import leaves, path_to
from rolltape.replay.checks.findings import Finding
from rolltape.replay.run import Run
from rolltape.schema.decoding import decode
from rolltape.schema.fields import TRACE

Ids = Sequence[int]
_BEFORE, _AFTER = 3, 8
"""Ids shown before and from the first that differs."""
_LIGHT = ("trace_id", "step", "group_index", "model", "tokenizer", "renderer", "tools")


@dataclass
class Retokenized:
    """What rendering a run again gave."""

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Traces, branches, nodes compared and their verdicts, tokens, forks by cause."""
    notes: Counter[str] = field(default_factory=Counter)
    """Settings that are not recorded, and what was not compared, by the number of traces."""

    tokenizers: list[str] = field(default_factory=list)
    """Folders or ids of the tokenizers that were used."""

    @property
    def compared(self) -> int:
        """Nodes that were compared with what is rendered today; where it is 0, nothing was checked."""
        return self.counts["nodes"] - self.counts["unknown"]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Findings stand among the verification's."""
        return {
            "compared": self.compared,
            "counts": dict(self.counts),
            "notes": dict(self.notes),
            "tokenizers": self.tokenizers,
        }


def retokenize(
    run: Run, options: RetokenizeOptions | None = None, progress: Callable[[int, int], None] | None = None
) -> Retokenized:
    """Render every trace of the newest attempt of each step again and compare.

    `progress` is called with traces done and traces in all. Raises BadInput where there is no tokenizer, no renderer, or
    no readable file of tools. Findings are warnings unless `strict` is set; differences in what was sampled always are.
    """
    options = options or RetokenizeOptions()
    renderings, result, picked = Renderings(options, run.paths.root), Retokenized(), Picked(run, options.limit)
    total = picked.total
    done = 0
    for table in picked.tables(TRACE.arrow.names):
        rows = table.select(list(_LIGHT)).to_pylist()
        for record, row in zip(decode(table), rows, strict=True):
            _Checked(record, row, renderings, options, result).check()
            done += 1
            if progress is not None:
                progress(done, total)
    result.notes.update(left_out(picked))
    result.tokenizers = renderings.used
    return result


# -- one trace


@dataclass(frozen=True)
class Difference:
    """Where two lists of ids part, and what stands there."""

    position: int
    recorded: dict[str, Any]
    rendered: dict[str, Any]
    same_text: bool


class _Checked:
    """The check of one trace. A class only to share what its parts look at."""

    def __init__(
        self,
        record: Mapping[str, Any],
        row: Mapping[str, Any],
        renderings: Renderings,
        options: RetokenizeOptions,
        result: Retokenized,
    ) -> None:
        nodes = record.get("nodes") or []
        self.sound = isinstance(nodes, list) and all(map(_is_sound, nodes))
        self.nodes = [_with_defaults(node) for node in nodes] if self.sound else []
        self.row, self.renderings, self.options, self.result = row, renderings, options, result
        self.parents = [-1 if node["parent"] is None else node["parent"] for node in self.nodes]
        self.done: set[int] = set()
        self._found: set[tuple[str, int]] = set()

    def check(self) -> None:
        """Compare the branches, then look where they fork."""
        why = self._why_not()
        if why is not None:
            self.result.notes[f"traces not compared: {why}"] += 1
            return
        self.renderer, self.tokenizer, missing = self.renderings.of(self.row)
        first = next(node["token_ids"] for node in self.nodes if node["token_ids"])
        used = any(m.get("role") == "tool" or m.get("tool_calls") for m in self.wire)
        self.tools, unknown = self.renderings.tools(self.row, self._text(first), used=used)
        self.unknown_tools = self.tools is None and bool(unknown)
        self.result.counts["traces"] += 1
        for note in [*missing, *unknown]:
            self.result.notes[note] += 1
        for leaf in leaves(self.parents):
            self.result.counts["branches"] += 1
            self._branch(path_to(leaf, self.parents))
        self._forks()

    def _why_not(self) -> str | None:
        if not self.sound:
            return "a node holds what is no token id, mask or parent"
        if not any(node["token_ids"] for node in self.nodes):
            return "no token is recorded"
        if any(_has_image(node["message"]) for node in self.nodes):
            return "a message holds an image"
        if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
            return "its nodes make no conversation"
        try:
            self.messages = [message_of(node["message"]) for node in self.nodes]
            self.hashes = [message_hash(message) for message in self.messages]
        except UnicodeEncodeError:
            return "a message holds half of a surrogate pair, which no tokenizer takes"
        except (ValidationError, KeyError, TypeError, AttributeError):
            return "a message is none that the installed Verifiers knows"
        self.wire = [message_to_wire(message) for message in self.messages]
        return None

    # -- one branch, node by node

    def _branch(self, path: tuple[int, ...]) -> None:
        """Compare the prompt of the branch's last turn, which is all of the branch but its last reply, and that reply."""
        leaf = path[-1] if self.nodes[path[-1]]["sampled"] else None
        prompt = path if leaf is None else path[:-1]
        try:
            wire = [self.wire[n] for n in prompt]
            rendered = self.renderer.render(wire, tools=self.tools, add_generation_prompt=leaf is not None)
        except Exception as error:  # a renderer of somebody else's
            refused = f"the renderer refuses the conversation ({type(error).__name__}: {error})"
            self._find("unrendered", path[-1], None, refused)
            return
        ids = list(rendered.token_ids)
        ends = _ends(rendered, [bool(self.nodes[n]["sampled"]) for n in prompt])
        at: int | None = 0
        for i in range(len(prompt)):
            if at is None:
                self.result.notes[
                    "nodes behind a difference not compared: the renderer does not tell messages apart"
                ] += 1
                return
            at = self._prompt_node(prompt, i, ids, at, None if ends is None else ends[i])
        if leaf is not None and at is not None:
            self._reply(leaf, ids[at:])

    def _prompt_node(self, path: tuple[int, ...], i: int, ids: Ids, at: int, end: int | None) -> int | None:
        """Compare one node with the rendered ids from `at` on; where the next node's begin, None where that is unknown."""
        node = path[i]
        recorded = self.nodes[node]["token_ids"]
        if ids[at : at + len(recorded)] == recorded:
            self._count(node, "same" if not self.nodes[node]["sampled"] else self._sampling(node))
            return at + len(recorded)
        if not self.nodes[node]["sampled"] and self._bridged(path, i):
            self._count(node, "same")
            return end
        rendered = ids[at : at + len(recorded) + _AFTER] if end is None else ids[at : max(at, end)]
        if self.nodes[node]["sampled"]:
            self._rewritten(node, rendered)
        else:
            self._drift(node, recorded, rendered)
        return end

    def _bridged(self, path: tuple[int, ...], i: int) -> bool:
        """Whether the live side, which extends a sampled turn without rendering it again, would have sent the node's ids."""
        last = next((k for k in range(i - 1, -1, -1) if self.nodes[path[k]]["sampled"]), None)
        if last is None:
            return False
        before = [t for n in path[:last] for t in self.nodes[n]["token_ids"]]
        turn = self.nodes[path[last]]["token_ids"]
        scaffold = self._scaffold(path[last])
        end = next((k for k in range(i, len(path)) if self.nodes[path[k]]["sampled"]), len(path))
        tail = [self.wire[n] for n in path[last + 1 : end]]
        try:
            bridged = self.renderer.bridge_to_next_turn(
                before + turn[:scaffold], turn[scaffold:], tail, tools=self.tools
            )
        except (NotImplementedError, AttributeError):
            return False
        if bridged is None:
            return False
        recorded = [t for n in path[last + 1 : i + 1] for t in self.nodes[n]["token_ids"]]
        start = len(before) + len(turn)
        return list(bridged.token_ids[start : start + len(recorded)]) == recorded

    def _scaffold(self, node: int) -> int:
        """Ids of a node before the first that was sampled."""
        mask = self.nodes[node]["mask"]
        return mask.index(True) if True in mask else len(mask)

    def _reply(self, node: int, generation: Ids) -> None:
        """The last reply of a branch: the generation prompt before it, and what was sampled."""
        scaffold = self.nodes[node]["token_ids"][: self._scaffold(node)]
        if list(generation) != scaffold:
            self._drift(node, scaffold, generation)
        else:
            self._count(node, self._sampling(node))

    def _sampling(self, node: int) -> str:
        """Whether the sampled ids of a node are those of their own text: `same` or `noncanonical`."""
        scaffold = self._scaffold(node)
        recorded = self.nodes[node]["token_ids"][scaffold:]
        again = self.tokenizer.encode(self._text(recorded), add_special_tokens=False)
        if again == recorded:
            return "same"
        found = self._difference(recorded, again, scaffold)
        self._find("noncanonical", node, found, "the model sampled ids that their text is not tokenised into")
        return "noncanonical"

    def _rewritten(self, node: int, rendered: Ids) -> None:
        found = self._difference(self.nodes[node]["token_ids"], rendered)
        if found.same_text:
            self._count(node, self._sampling(node))
            return
        self._count(node, "rewritten")
        self._find("rewritten", node, found, "the template writes the reply otherwise than the model did")

    def _drift(self, node: int, recorded: Ids, rendered: Ids) -> None:
        if self.unknown_tools and self.parents[node] < 0:
            self._count(node, "unknown")
            return
        found = self._difference(recorded, rendered)
        why = "in the same text: another tokenizer" if found.same_text else "in other text: another template or setting"
        self._count(node, "drift")
        self._find("drift", node, found, f"what nobody sampled is rendered otherwise, {why}", strict=True)

    # -- forks

    def _forks(self) -> None:
        """Messages that stand twice under one parent with other ids, and branches that begin with another message."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        for siblings in children.values():
            first: dict[str, int] = {}
            for node in siblings:
                earlier = first.setdefault(self.hashes[node], node)
                if earlier == node:
                    self.result.counts["forks by another message"] += node != siblings[0]
                elif not self.nodes[node]["sampled"]:
                    self._fork(earlier, node)

    def _fork(self, earlier: int, node: int) -> None:
        recorded, again = self.nodes[earlier]["token_ids"], self.nodes[node]["token_ids"]
        found = self._difference(recorded, again)
        sampled = self.nodes[earlier]["sampled"]
        if found.same_text:
            kind = "by sampling" if sampled else "by tokenisation"
            why = "with other ids of the same text" + (": its ids were not canonical" if sampled else "")
        else:
            kind, why = "by rendering", "with other text: the template rewrote it"
        self.result.counts[f"forks {kind}"] += 1
        self._find(
            "fork", node, found, f"a branch begins: the message of node {earlier} was rendered again {why}", strict=True
        )

    # -- findings

    def _difference(self, recorded: Ids, rendered: Ids, start: int = 0) -> Difference:
        """Where the ids part, `start` being the place of the first in its node. Line breaks at the end are no text: those
        behind a reply belong to the next node."""
        place = next((i for i, (a, b) in enumerate(zip(recorded, rendered, strict=False)) if a != b), None)
        position = min(len(recorded), len(rendered)) if place is None else place
        same = self._text(recorded).rstrip("\n") == self._text(rendered).rstrip("\n")
        return Difference(start + position, self._shown(recorded, position), self._shown(rendered, position), same)

    def _shown(self, ids: Ids, position: int) -> dict[str, Any]:
        """Ids from shortly before a position, and the text from there."""
        return {
            "before": list(ids[max(0, position - _BEFORE) : position]),
            "ids": list(ids[position : position + _AFTER]),
            "text": self._text(ids[position : position + _AFTER]),
        }

    def _text(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _count(self, node: int, verdict: str) -> None:
        if node in self.done:
            return
        self.done.add(node)
        self.result.counts["nodes"] += 1
        self.result.counts["tokens"] += len(self.nodes[node]["token_ids"])
        self.result.counts[verdict] += 1

    def _find(self, code: str, node: int, found: Difference | None, message: str, *, strict: bool = False) -> None:
        """Enter a finding, unless the node has this one already, from another branch."""
        shown = "" if found is None else f": recorded {_said(found.recorded)}, now {_said(found.rendered)}"
        finding = Finding(
            code=code,
            severity="error" if strict and self.options.strict else "warning",
            message=message + shown,
            step=self.row["step"],
            group_index=self.row["group_index"],
            trace_id=self.row["trace_id"],
            node=node,
            position=None if found is None else found.position,
            expected=None if found is None else found.recorded,
            found=None if found is None else found.rendered,
        )
        key = (code, node)
        if key not in self._found:
            self._found.add(key)
            self.result.findings.append(finding)


def _is_sound(node: Any) -> bool:
    """Whether a node is one that can be looked at: any JSON may stand in an imported record."""
    if not isinstance(node, Mapping) or type(node.get("parent")) not in (int, type(None)):
        return False
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    return (
        isinstance(ids, list)
        and isinstance(mask, list)
        and len(mask) in (0, len(ids))
        and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    )


def _with_defaults(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node with every key that is looked at: later releases leave out what has its default."""
    ids = node.get("token_ids") or []
    mask = node.get("mask") or [False] * len(ids)
    kept = {"parent": node.get("parent"), "sampled": bool(node.get("sampled")), "message": node.get("message")}
    return {**kept, "token_ids": list(ids), "mask": list(mask)}


def _ends(rendered: Any, sampled: Sequence[bool]) -> list[int] | None:
    """Where each message ends among the rendered ids: a sampled reply where its last sampled token does, for the line break
    behind it belongs to the next node. None where the renderer does not tell messages apart."""
    indices = np.asarray(rendered.message_indices, np.int64)
    if not len(indices) or indices.max() < 0:
        return None
    places = np.arange(1, len(indices) + 1)
    mask = np.asarray(rendered.sampled_mask or [True] * len(indices), np.bool_)
    last, whole = np.zeros(len(sampled), np.int64), np.zeros(len(sampled), np.int64)
    for ends, mine in ((whole, indices >= 0), (last, (indices >= 0) & mask)):
        np.maximum.at(ends, indices[mine], places[mine])
    chosen = np.where(np.asarray(sampled, np.bool_) & (last > 0), last, whole)
    result: list[int] = np.maximum.accumulate(chosen).tolist()
    return result


def _said(shown: Mapping[str, Any]) -> str:
    """Text and ids from the first that differs, for a sentence."""
    ids = shown["ids"]
    return f"{shown['text']!r} {ids[:4]}{'…' if len(ids) > 4 else ''}" if ids else "nothing more"


def _has_image(message: Any) -> bool:
    parts = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(parts, list) and any(isinstance(p, dict) and p.get("type") == "image_url" for p in parts)
