"""A trace as people read it: what it is and what became of it, then the conversation, forks as a tree, tokens on request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rolltape.replay.printing.console import printable, table
from rolltape.replay.printing.fitting import left_out, no_room
from rolltape.replay.printing.words import (
    MISSING,
    alike,
    count,
    counted,
    decimal,
    duration,
    moment,
    of_steps,
    shortened,
)
from rolltape.replay.show.list import Chosen, Wanted
from rolltape.replay.show.lookup import distinct
from rolltape.replay.show.trace import Message, Token, Trace, parsed
from rolltape.schema.fields import DISPOSITIONS
from rolltape.schema.records import Group as GroupRecord

UNLIKELY = 0.1
"""Sampled tokens below this probability are marked."""
LINES, LENGTH, TOKENS = 12, 1200, 150
"""Lines, characters and tokens of a message that are shown unless everything is asked for."""
_ROLES = {"system": "yellow", "user": "green", "assistant": "cyan", "tool": "magenta"}
_SHADES = ((0.5, "green"), (UNLIKELY, "yellow"), (0.01, "dark_orange"), (0.0, "bold red"))
_WORST, _DEEPEST = 5, 6


@dataclass(frozen=True)
class Look:
    """What of a trace is shown."""

    full: bool = False
    tokens: bool = False
    logprobs: bool = False
    text_of: Callable[[int], str] | None = None
    """Text of a token id, where a tokenizer is known."""


# -- one trace


def render_trace(trace: Trace, path: str, look: Look) -> RenderableType:
    """Everything there is to see of a trace."""
    return Group(_head(trace, path, look), Text(), *_conversation(trace, look))


def _head(trace: Trace, path: str, look: Look) -> Table:
    """What the trace is, as two columns."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _facts(trace, path, look):
        grid.add_row(name, value if isinstance(value, Text) else Text(printable(value)))
    return grid


def _facts(trace: Trace, path: str, look: Look) -> Iterator[tuple[str, str | Text]]:
    row = trace.row
    yield "trace", Text(printable(trace.place.trace_id), style="bold")
    yield "where", _where(trace, path)
    yield "task", _task(row)
    yield "outcome", _outcome(row)
    if row["reason"]:
        yield "why", _cut(row["reason"], look)
    yield from _errors(row, look)
    yield "reward", _reward(trace)
    if row["handed_reward"] is not None:
        yield "handed", f"{row['handed_reward']}, changed by a hook of the trainer"
    if row["remove_sample"] and any(row["remove_sample"]):
        yield (
            "removed",
            f"{sum(row['remove_sample'])} of {counted(len(row['remove_sample']), 'Sample')}, by a hook of the trainer",
        )
    if trace.place.group is not None:
        yield "group", _group(trace.place.group)
    if row["metrics"]:
        yield "metrics", ", ".join(f"{name} {_number(value)}" for name, value in row["metrics"].items())
    yield "size", _size(row)
    yield "model", _model(row)
    yield "time", _time(row)
    if trace.tokens_gone:
        yield "tokens", Text("not there any more: their columns were pruned", style="yellow")
    for problem in row["problems"] or ():
        yield "not exact", problem
    if look.full and row["info"] not in (None, "{}"):
        yield "info", row["info"]


def _where(trace: Trace, path: str) -> str:
    row, part = trace.row, trace.place.commit.part
    told = [f"{path}, {part.split} step {part.step}"]
    told += [f"{n} {row[f'{n}_index']}" for n in ("group", "rollout") if row[f"{n}_index"] is not None]
    told += [f"try {row['try_number']}"] if row["try_number"] else []
    told += [f"attempt {part.attempt}"] if part.attempt or trace.place.superseded else []
    told += [f"writer {part.writer}"] if part.writer != "main" else []
    told += ["recorded again by a newer attempt"] if trace.place.superseded else []
    return ", ".join(told)


def _task(row: Mapping[str, Any]) -> str:
    name = row["task_name"] or row["task_key"] or row["task_idx"]
    place = "" if row["task_idx"] is None else f", index {row['task_idx']}"
    label = "" if row["task_label"] is None else f", label {shortened(row['task_label'], 60)}"
    return f"{MISSING if name is None else name} ({row['task_type'] or 'no type'}{place}){label}"


def _outcome(row: Mapping[str, Any]) -> Text:
    said = row["disposition"]
    if said is None:
        return Text("not known: the trace was imported, or its step did not end")
    style = "green" if said in ("emitted", "eval") else "yellow"
    shown = Text().append(printable(said.replace("_", " ")), style=style)
    return shown.append(f": {DISPOSITIONS.get(said, '')}", style="dim")


def _errors(row: Mapping[str, Any], look: Look) -> Iterator[tuple[str, Text]]:
    tracebacks = row["error_tracebacks"] or []
    for i, (kind, message) in enumerate(zip(row["error_types"] or (), row["error_messages"] or (), strict=False)):
        text = Text(printable(f"{kind}: {_cut(message or '', look)}"), style="red")
        if look.full and i < len(tracebacks) and tracebacks[i]:
            text.append("\n" + printable(tracebacks[i].rstrip()), style="dim")
        yield "error", text


def _reward(trace: Trace) -> str:
    total, parts = trace.row["reward"], trace.parts
    if total is None and not parts:
        return "not scored"
    told = " + ".join(_part(*part) for part in parts)
    differs = trace.reward_differs
    wrong = "" if differs is None else f"; the parts add up to {_number(differs)}"
    return f"{'not scored' if total is None else _number(total)}{f' = {told}' if told else ''}{wrong}"


def _part(name: str, value: float | None, score: float | None, weight: float | None) -> str:
    made = "" if score is None and weight is None else f" ({_number(score)} x {_number(weight)})"
    return f"{name} {'not scored' if value is None else _number(value)}{made}"


def _group(group: GroupRecord) -> str:
    """What the group record says: its size, and the sums of the live traces."""
    sums = ", ".join(
        f"{name} {_number(r.sum)}" if r.sum is not None else f"{name} none ({r.count} of {len(group.trace_ids)} scored)"
        for name, r in group.rewards.items()
    )
    size = f"{len(group.trace_ids):,} of {counted(group.expected_size, 'rollout')}"
    return f"{size}; sums: {sums}" if sums else size


def _size(row: Mapping[str, Any]) -> str:
    branches = f", {row['num_branches']} branches" if (row["num_branches"] or 0) > 1 else ""
    ended = f"ended by {row['stop_condition']}" if row["stop_condition"] else "how it ended is not recorded"
    cut = ", truncated" if row["is_truncated"] else ""
    counts = f"{counted(row['num_turns'], 'turn')} in {counted(row['num_nodes'], 'message')}{branches}"
    return f"{counts}; {counted(row['num_tokens'], 'token')}, {_exact(row['num_sampled'])} sampled; {ended}{cut}"


def _exact(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _model(row: Mapping[str, Any]) -> str:
    told = [row["model"] or "model not recorded"]
    versions = dict.fromkeys(v for v in row["turn_weight_version"] or () if v is not None)
    told += [f"weights {', '.join(versions)}"] if versions else []
    told += _settings(row["sampling"], "") + _settings(row["renderer"], "renderer ")
    return "; ".join(told)


def _settings(text: str | None, head: str) -> list[str]:
    values = parsed(text)
    if not isinstance(values, Mapping):
        return [f"{head}{values}"] if values else []
    return [head + ", ".join(f"{k} {v}" for k, v in values.items() if v is not None)] if values else []


def _time(row: Mapping[str, Any]) -> str:
    told = []
    for name in ("setup", "generation", "finalize", "scoring"):
        begin, end = row[f"{name}_start"], row[f"{name}_end"]
        if begin and end:
            told.append(f"{name} {duration(end - begin)}")
    began = f"began {moment(row['started_at'])}" if row["started_at"] else "start not recorded"
    return ", ".join([began, *told])


def _number(value: float | None) -> str:
    """A number as it is, without zeros that say nothing."""
    if value is None:
        return MISSING
    return str(value) if not math.isfinite(value) else f"{value:.6g}"


def _cut(text: str, look: Look) -> str:
    """A text, or its beginning and how much is left."""
    if look.full:
        return text
    lines = text[:LENGTH].split("\n")
    begin = "\n".join(lines[:LINES])
    left = len(text) - len(begin)
    return text if left <= 0 else f"{begin.rstrip()} … {left:,} more characters (--full)"


# -- the conversation


def _conversation(trace: Trace, look: Look) -> Iterator[RenderableType]:
    roots = trace.children.get(None, [])
    if not roots:
        yield Text("its messages were pruned" if trace.row["num_nodes"] else "no messages")
    if len(roots) == 1:
        yield from _stretch(trace, roots[0], look)
    elif roots:
        yield _fork(trace, roots, look, "conversation")


def _stretch(trace: Trace, start: int, look: Look) -> Iterator[RenderableType]:
    """Messages up to a fork, and the fork as a tree."""
    last = start
    for message in trace.chain(start):
        yield _message(message, look)
        last = message.index
    following = trace.children.get(last, [])
    if following:
        yield _fork(trace, following, look, "branch")


def _fork(trace: Trace, starts: Sequence[int], look: Look, what: str) -> Tree:
    """Every branch in turn, without recursion: a conversation may fork a thousand times. Deep ones are not indented more."""
    top = Tree(Text(f"{len(starts)} {'conversations' if what == 'conversation' else 'ways on'}", style="bold"))
    waiting = [(top, 1, start, f"{what} {i + 1}") for i, start in reversed(list(enumerate(starts)))]
    while waiting:
        tree, depth, start, name = waiting.pop()
        messages = list(trace.chain(start))
        here = tree.add(Group(Text(name, style="bold"), *(_message(m, look) for m in messages)))
        following = list(enumerate(trace.children.get(messages[-1].index, [])))
        below = here if depth < _DEEPEST else tree
        waiting += [(below, depth + 1, node, f"{name}.{i + 1}") for i, node in reversed(following)]
    return top


def _message(message: Message, look: Look) -> RenderableType:
    """One message: a line about it, then what it says."""
    fields = message.fields
    body: list[RenderableType] = []
    if fields["reasoning"]:
        body.append(Text(printable(_cut(fields["reasoning"], look)), style="dim italic"))
    if fields["content"]:
        body.append(Text(printable(_cut(fields["content"], look))))
    body += [Text(f"[{printable(kind)}]", style="dim") for kind in message.other_parts]
    body += [
        Text(printable(f"→ {name}({_cut(arguments, look)})"), style="cyan") for name, arguments in message.tool_calls
    ]
    if message.tokens is not None:
        body += _tokens(message.tokens, look)
    return Group(_line(message), *(Padding(part, (0, 0, 0, 2), expand=False) for part in body), Text())


def _line(message: Message) -> Text:
    fields, role = message.fields, str(message.fields["role"])
    line = Text().append(printable(role), style=f"bold {_ROLES.get(role, 'white')}")
    if fields["name"] or fields["tool_call_id"]:
        line.append(printable(f" {fields['name'] or ''} ← {fields['tool_call_id'] or '?'}"))
    told = [f"#{message.index}", counted(fields["tokens"], "token")]
    if fields["sampled"]:
        told[-1] += f", {_exact(fields['logprobs'])} sampled"
        told += [str(reason)] if (reason := fields["finish_reason"]) else []
        told += _turn(message.turn or {})
    if fields["raw"]:
        told.append("lists that fit no column are kept beside")
    return line.append(printable("  " + "; ".join(told)), style="dim")


def _turn(turn: Mapping[str, Any]) -> list[str]:
    """What the engine said of a reply."""
    told = []
    if turn.get("latency") is not None:
        told.append(f"took {duration(turn['latency'])}")
    if turn.get("cached_tokens") is not None:
        told.append(f"{turn['cached_tokens']:,} cached")
    if turn.get("weight_version") is not None:
        told.append(f"weights {turn['weight_version']}")
    if turn.get("retries"):
        told.append(f"{counted(turn['retries'], 'request')} before it failed")
    return told


# -- tokens


def _tokens(tokens: Sequence[Token], look: Look) -> list[RenderableType]:
    """Tokens in order: those that were not sampled dim, sampled ones by probability, unlikely ones in brackets."""
    shown = tokens if look.full else tokens[:TOKENS]
    text = Text()
    for token in shown:
        text.append(_piece(token, look), style=_shade(token)).append(" ")
    if len(shown) < len(tokens):
        text.append(f"… {len(tokens) - len(shown):,} more tokens (--full)", style="dim")
    parts: list[RenderableType] = [text] if tokens else []
    if look.logprobs and any(t.sampled for t in tokens):
        parts.append(_likelihood(tokens, look))
    return parts


def _piece(token: Token, look: Look) -> str:
    text = _text(token, look)
    if not token.sampled:
        return text
    chance = _chance(token)
    if look.logprobs:
        text += f":{MISSING if token.logprob is None else f'{token.logprob:.2f}'.replace('-0.00', '0')}"
    elif chance is not None and chance < UNLIKELY:
        text += f" {_percent(chance)}"
    return f"‹{text}›" if chance is None or not chance >= UNLIKELY else text


def _text(token: Token, look: Look) -> str:
    """A token's text with its spaces visible, so that a space between two tokens is one that parts them; else its id."""
    return str(token.id) if look.text_of is None else printable(look.text_of(token.id), one_line=True).replace(" ", "␣")


def _chance(token: Token) -> float | None:
    """Probability that the token was sampled with; None where no log-prob was recorded."""
    if token.logprob is None:
        return None
    return math.exp(min(token.logprob, 0.0)) if token.logprob == token.logprob else math.nan


def _percent(chance: float) -> str:
    return f"{100 * chance:.0f}%" if chance >= 0.01 else f"{100 * chance:.1g}%"


def _shade(token: Token) -> str:
    chance = _chance(token)
    if not token.sampled:
        return "dim"
    if chance is None or chance != chance:
        return "reverse"
    return next(style for least, style in _SHADES if chance >= least)


def _likelihood(tokens: Sequence[Token], look: Look) -> Text:
    """How likely the sampled tokens of a message were."""
    known = [(t.logprob, t) for t in tokens if t.sampled and t.logprob is not None and math.isfinite(t.logprob)]
    without = sum(t.sampled for t in tokens) - len(known)
    told = []
    if known:
        mean = math.fsum(p for p, _ in known) / len(known)
        unlikely = sum(math.exp(min(p, 0.0)) < UNLIKELY for p, _ in known)
        told.append(f"{len(known):,} log-probs, mean {mean:.3f}, {unlikely:,} below {100 * UNLIKELY:.0f}%")
        worst = [(p, t) for p, t in sorted(known, key=lambda k: k[0])[:_WORST] if p < math.log(0.5)]
        if worst:
            told.append("least likely " + ", ".join(f"{_text(t, look)} {_percent(math.exp(p))}" for p, t in worst))
    if without:
        told.append(f"{counted(without, 'sampled token')} without a finite log-prob")
    return Text("; ".join(told), style="dim")


# -- traces in a list


def render_list(path: str, chosen: Chosen, wanted: Wanted, width: int) -> RenderableType:
    """Traces, a line each, and why those of them that were dropped were. What has no room is left out, and said."""
    rows, several = chosen.rows, len(chosen.steps) > 1
    short = distinct([row["trace_id"] for row in rows])
    columns = {name: [cell(row, short) for row in rows] for name, cell in _CELLS.items() if several or name != "step"}
    gone = left_out(columns, width, _SPARE, _GIVES)
    lines = list(zip(*columns.values(), strict=True))
    parts: list[RenderableType] = [Text(printable(_title(path, chosen, wanted)), overflow="fold"), Text()]
    if rows:
        parts.append(table("", list(columns), lines, _RIGHT, cut=("task", "ended"), dense=True))
    told = [no_room(gone)] if gone else []
    reasons = Counter(f"{_fate(row)}: {row['reason']}" for row in rows if row["reason"])
    told += [kind.line(width) for kind in alike(reasons)]
    if rows and all(row["disposition"] is None for row in rows):
        told.append("what became of them is not known: they were imported, or the step did not end")
    if chosen.without:
        what = f"no outcome is known of {chosen.without:,} of these {counted(chosen.total, 'trace')}"
        told.append(f"{what}: they were imported, or their step did not end; --errors finds those with an error")
    if told:
        parts += [Text(), *(Text(printable(line), style="dim", overflow="fold") for line in told)]
    return Group(*parts)


def _title(path: str, chosen: Chosen, wanted: Wanted) -> str:
    where = f"{path}  {chosen.split} {of_steps(chosen.steps)}: "
    conditions = f" ({', '.join(wanted.said())})" if wanted.chooses else ""
    many = f"{chosen.found:,} of {counted(chosen.total, 'trace')}" if wanted.chooses else counted(chosen.total, "trace")
    shown = f"; the first {len(chosen.rows):,}" if len(chosen.rows) < chosen.found else ""
    return f"{where}{many}{conditions}{shown}"


def _fate(row: Mapping[str, Any]) -> str:
    return (row["disposition"] or MISSING).replace("_", " ")


def _fate_cell(row: Mapping[str, Any], short: int) -> Text:  # noqa: ARG001
    said = _fate(row)
    return Text(printable(said), style="" if said in ("emitted", "eval") else "yellow")


def _task_cell(row: Mapping[str, Any], short: int) -> str:  # noqa: ARG001
    task = row["task_name"] or row["task_key"] or row["task_idx"]
    return MISSING if task is None else str(task)


_CELLS: dict[str, Callable[[Mapping[str, Any], int], Any]] = {
    "trace": lambda row, short: row["trace_id"][:short],
    "step": lambda row, _: row["step"],
    "group": lambda row, _: MISSING if row["group_index"] is None else row["group_index"],
    "task": _task_cell,
    "reward": lambda row, _: decimal(row["reward"]),
    "turns": lambda row, _: row["num_turns"],
    "sampled": lambda row, _: count(row["num_sampled"]),
    "ended": lambda row, _: _ended(row),
    "became": _fate_cell,
}
_RIGHT = ("step", "group", "reward", "turns", "sampled")
_SPARE = ("turns", "group", "sampled")
"""Columns that are left out first where there is no room."""
_GIVES = {"task": 12, "ended": 14}
"""Columns whose ends may be cut, and characters that must be left."""


def _ended(row: Mapping[str, Any]) -> str:
    """How a trace ended: by an error, by a limit, or by what it says."""
    if row["error_types"]:
        return str(row["error_types"][-1])
    stop = row["stop_condition"] or MISSING
    return f"truncated ({stop})" if row["is_truncated"] else str(stop)
