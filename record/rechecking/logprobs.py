"""Log-probs of recorded tokens, recomputed on an engine: does it still give them the probability they were sampled with?

    branch ─► its ids ─► /generate, nothing sampled ─► log-prob of each given token ─► compared where a turn was sampled

One request a branch scores all its turns, for a token's log-prob depends on nothing behind it. A turn that branches
share is scored once. The entries of a reply are taken from its end and must carry the ids that were sent: engines pad or
cut the list at its beginning.

Log-probs are taken at the temperature they were recorded at. Engines differ there: SGLang scales the log-probs of what it
samples by the temperature and those of given tokens not. So the first trace of each temperature is scored twice, and where
the engine does not care, its traces are named and left out: nothing could be said of them.

The k3 estimate of KL(recorded || recomputed), over tokens sampled from the recorded policy: the mean of r - 1 - log r with
log r = recomputed - recorded (Schulman, "Approximating KL divergence", 2020). Never negative, 0 where both agree.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from verifiers.v1.errors import ProviderError

from rolltape.record.rechecking.picked import Picked, left_out
from rolltape.record.transport import RetryPolicy, SGLangTransport
from rolltape.replay.branches import leaves, path_to
from rolltape.replay.checks.findings import Finding
from rolltape.replay.run import Run
from rolltape.replay.view import View, views
from rolltape.schema.errors import BadInput, RolltapeError

Floats = npt.NDArray[np.float32]

EDGES = (0, 256, 1024, 4096, 16384, 65536)
"""Beginnings of the buckets of positions: tokens before the one scored, in its branch."""
WORST = 10
GIVE_UP = 16
"""Requests that may fail one after the other before the engine is given up."""
_GREEDY = 1e-6
"""Below it an engine takes the likeliest token and gives log-probs at temperature 1."""
_NEUTRAL = {"frequency_penalty": (0, None), "presence_penalty": (0, None), "repetition_penalty": (1, None)}
"""Settings that change what is sampled from, and that no engine applies to given tokens."""
_COLUMNS = (
    *("split", "step", "group_index", "trace_id", "sampling", "turn_weight_version", "logprob_decimals"),
    *("token_ids", "sampled", "logprobs", "node_parent", "node_tokens", "node_sampled"),
)


class EngineGivenUp(RolltapeError, ConnectionError):
    """An engine does not answer, or answers nothing that can be used."""


@dataclass(frozen=True, kw_only=True)
class LogprobOptions:
    """How to recompute."""

    engine: str
    """Address of an SGLang server or router that serves the recorded weights."""
    temperature: float | None = None
    """Temperature of traces whose sampling settings are not recorded; None leaves them out."""
    concurrency: int = 32
    """Requests at once."""
    limit: int | None = None
    """Only so many traces of each step."""
    strict: bool = False
    """Whether a trace that cannot be scored is an error."""
    lora: str | None = None
    """Adapter to score with."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    request_seconds: float | None = 1800.0

    def __post_init__(self) -> None:
        if not self.engine.startswith(("http://", "https://")):
            raise BadInput(f"The engine is {self.engine!r}; expected an address such as http://127.0.0.1:30000.")
        for name in ("concurrency", "limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; expected 1 or more.")


@dataclass
class Gap:
    """Recomputed against recorded log-probs, over some tokens."""

    tokens: int = 0
    absolute: float = 0.0
    """Sum of absolute differences."""
    largest: float = 0.0
    signed: float = 0.0
    """Sum of recomputed - recorded."""
    k3: float = 0.0
    """Sum of r - 1 - log r."""

    def add(self, difference: npt.NDArray[np.float64]) -> None:
        """Enter recomputed - recorded of some tokens."""
        if not len(difference):
            return
        self.tokens += len(difference)
        self.absolute += float(np.abs(difference).sum())
        self.largest = max(self.largest, float(np.abs(difference).max()))
        self.signed += float(difference.sum())
        with np.errstate(over="ignore"):
            self.k3 += float((np.expm1(difference) - difference).sum())

    def to_dict(self) -> dict[str, Any]:
        """Means and the largest difference; null where there is no token."""
        n = self.tokens
        return {
            "tokens": n,
            "mean_absolute": self.absolute / n if n else None,
            "max_absolute": self.largest if n else None,
            "mean": self.signed / n if n else None,
            "k3": self.k3 / n if n else None,
        }


@dataclass
class Recomputed:
    """What recomputing the log-probs of a run gave."""

    total: Gap = field(default_factory=Gap)
    steps: dict[tuple[str, int], Gap] = field(default_factory=dict)
    """By split and step."""
    positions: dict[int, Gap] = field(default_factory=dict)
    """By the beginning of the bucket."""
    worst: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """The largest differences and where they are."""
    counts: Counter[str] = field(default_factory=Counter)
    """Traces, requests, and traces that failed."""
    notes: Counter[str] = field(default_factory=Counter)
    """What was left out and what there is to know, by the number of traces."""
    findings: list[Finding] = field(default_factory=list)
    recorded_versions: Counter[str] = field(default_factory=Counter)
    """Sampled turns by the weight version recorded with them."""
    engine_versions: Counter[str] = field(default_factory=Counter)
    """Replies by the weight version of the engine."""

    @property
    def compared(self) -> int:
        """Tokens that were compared; where it is 0, nothing was checked."""
        return self.total.tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Findings stand among the verification's."""
        return {
            "compared": self.compared,
            "k3_direction": "KL(recorded || recomputed), of tokens sampled from the recorded policy",
            "total": self.total.to_dict(),
            "steps": [{"split": s, "step": n, **gap.to_dict()} for (s, n), gap in sorted(self.steps.items())],
            "positions": [{"from": start, **gap.to_dict()} for start, gap in sorted(self.positions.items())],
            "worst": [place for _, place in sorted(self.worst, key=lambda item: -item[0])],
            "counts": {"traces": 0, "requests": 0, **self.counts},
            "notes": dict(self.notes),
            "weight_versions": {"recorded": dict(self.recorded_versions), "engine": dict(self.engine_versions)},
        }


def recompute(run: Run, options: LogprobOptions, progress: Callable[[int, int], None] | None = None) -> Recomputed:
    """Score the recorded tokens of the newest attempt of each step on an engine.

    `progress` is called with traces done and traces in all. Raises EngineGivenUp where the engine does not answer, or
    fails many times in a row.
    """
    return asyncio.run(_Job(run, options, progress).run())


# -- what is sent


@dataclass(frozen=True)
class Trace:
    """What of a trace is needed to score it. `T` tokens, `N` nodes."""

    place: Mapping[str, Any]
    """split, step, group_index, trace_id."""
    temperature: float
    ids: npt.NDArray[np.int32]
    """[T] in node order."""
    wanted: npt.NDArray[np.bool_]
    """[T] tokens that were sampled and have a log-prob."""
    logprobs: Floats
    """[T] recorded log-probs where wanted."""
    starts: npt.NDArray[np.int64]
    """[N + 1] first token of each node."""
    parents: list[int]

    def requests(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
        """([n] places of a branch's tokens in node order, [n] which are scored by it), a branch that adds something each."""
        taken = np.zeros(len(self.ids), np.bool_)
        for leaf in leaves(self.parents):
            spans = [np.arange(self.starts[n], self.starts[n + 1]) for n in path_to(leaf, self.parents)]
            places = np.concatenate(spans) if spans else np.zeros(0, np.int64)
            mine = self.wanted[places] & ~taken[places]
            mine[:1] = False  # a first token has no context, and no engine a log-prob for it
            taken[places] = True
            if mine.any():
                end = int(np.flatnonzero(mine)[-1]) + 1
                yield places[:end], mine[:end]

    def node_of(self, place: int) -> tuple[int, int]:
        """(node, position in it) of a token."""
        node = int(np.searchsorted(self.starts, place, side="right")) - 1
        return node, place - int(self.starts[node])


def read_scores(raw: bytes, ids: Sequence[int], wanted: npt.NDArray[np.bool_]) -> tuple[Floats, dict[str, Any]]:
    """(log-probs of the wanted tokens, meta_info) in an engine's answer to `ids`.

    `wanted`: [n] which of the ids; never the first, which has no log-prob. Raises BadInput where the answer is cut, belongs
    to other ids, or has no finite number for a wanted token.
    """
    try:
        meta = dict(json.loads(raw)["meta_info"])
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"the engine's reply has no meta_info ({type(error).__name__}: {error})") from None
    reason = meta.get("finish_reason")
    if isinstance(reason, Mapping) and reason.get("type") == "abort":
        raise BadInput(f"the engine aborted the request: {reason.get('message') or 'it gave no message'}")
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list):
        raise BadInput(f"the engine's reply has {type(entries).__name__} for input_token_logprobs; expected a list")
    first = int(np.flatnonzero(wanted)[0])
    tail = entries[max(0, len(entries) - (len(ids) - first)) :]
    if len(tail) != len(ids) - first:
        raise BadInput(f"the engine scored {len(tail)} tokens where {len(ids) - first} were asked for")
    if not all(isinstance(entry, Sequence) and len(entry) > 1 for entry in tail):
        raise BadInput("the engine's input_token_logprobs hold what is no pair of log-prob and id")
    given = [entry[1] for entry in tail]
    if given != list(ids[first:]):
        place = next(i for i, (a, b) in enumerate(zip(given, ids[first:], strict=True)) if a != b)
        raise BadInput(
            f"the engine's scores belong to other ids: {given[place]} for {ids[first + place]} at {first + place}"
        )
    scores = [tail[i - first][0] for i in np.flatnonzero(wanted).tolist()]
    if bad := sum(type(score) not in (int, float) or not math.isfinite(score) for score in scores):
        raise BadInput(f"the engine gives no finite log-prob for {bad} of {len(scores)} sampled tokens")
    return np.array(scores, np.float32), meta


# -- the job


class _Job:
    """Scores trace after trace, several at once."""

    def __init__(self, run: Run, options: LogprobOptions, progress: Callable[[int, int], None] | None) -> None:
        self.picked, self.options, self.progress = Picked(run, options.limit), options, progress
        self.transport = SGLangTransport(
            options.engine, retry=options.retry, request_seconds=options.request_seconds, lora_path=options.lora
        )
        self.result = Recomputed()
        self.scaled: dict[float, asyncio.Task[bool]] = {}
        self.failed_in_a_row = 0
        self.done = 0
        self.total = self.picked.total

    async def run(self) -> Recomputed:
        """All of it."""
        try:
            problem = await self.transport.healthy()
            if problem is not None:
                raise EngineGivenUp(
                    f"The engine {self.options.engine} does not answer: {problem}. Start it, or give its address."
                )
            await self._all()
        finally:
            await self.transport.close()
        if self.failed_in_a_row and not self.result.total.tokens:
            self._give_up(self.result.findings[-1].message)
        self.result.notes.update(left_out(self.picked))
        return self.result

    async def _all(self) -> None:
        room = asyncio.Semaphore(self.options.concurrency)

        async def one(trace: Trace) -> None:
            try:
                await self._trace(trace)
                self._tell()
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                for trace in self._traces():
                    await room.acquire()
                    tasks.create_task(one(trace))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _tell(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _traces(self) -> Iterator[Trace]:
        """Traces with something to score; the others are counted with their reason."""
        for table in self.picked.tables(_COLUMNS):
            for view in views(table):
                columns = {name: view.pylist(name) for name in _COLUMNS[:7]}
                for i in range(view.n):
                    row = {name: values[i] for name, values in columns.items()}
                    trace, why = self._readable(view, i, row)
                    if trace is not None:
                        yield trace
                    else:
                        self.result.notes[f"traces left out: {why}"] += 1
                        self._tell()

    def _readable(self, view: View, i: int, row: Mapping[str, Any]) -> tuple[Trace | None, str]:
        first, end = int(view.node_starts[i]), int(view.node_starts[i + 1])
        start, stop = int(view.token_starts[i]), int(view.token_starts[i + 1])
        parents = view.parents[first:end].tolist()
        wanted = view.sampled[start:stop].copy()
        if view.known is not None:
            wanted &= view.known[start:stop]
        logprobs = view.logprobs[start:stop]
        finite = np.isfinite(logprobs) | ~wanted
        wanted &= finite
        temperature, why = self._temperature(row["sampling"])
        if not wanted.any():
            why = "no sampled token with a log-prob"
        elif any(not -1 <= parent < node for node, parent in enumerate(parents)):
            why = "its nodes make no conversation"
        if why:
            return None, why
        if row["logprob_decimals"] is not None:
            self.result.notes[f"traces whose log-probs were rounded to {row['logprob_decimals']} decimals"] += 1
        if not finite.all():
            self.result.notes["traces with recorded log-probs that are no finite numbers, which are left out"] += 1
        self.result.recorded_versions.update(v for v in row["turn_weight_version"] or () if v is not None)
        place = {name: row[name] for name in ("split", "step", "group_index", "trace_id")}
        starts = view.node_token_starts[first : end + 1] - start
        return Trace(place, temperature, view.ids[start:stop], wanted, logprobs, starts, parents), ""

    def _temperature(self, text: str | None) -> tuple[float, str]:
        """(temperature of the log-probs, why they cannot be recomputed; empty where they can)."""
        settings = {} if text is None else json.loads(text)
        found = settings.get("temperature")
        found = self.options.temperature if found is None else found
        if found is None:
            return 0.0, "their temperature is not recorded; give it with --temperature"
        odd = [name for name, neutral in _NEUTRAL.items() if settings.get(name) not in neutral]
        if odd:
            return 0.0, f"sampled with {' and '.join(odd)}, which an engine does not apply to given tokens"
        return 1.0 if found < _GREEDY else float(found), ""

    # -- one trace

    async def _trace(self, trace: Trace) -> None:
        try:
            if trace.temperature != 1.0 and not await self._scales(trace):
                note = f"traces left out: sampled at temperature {trace.temperature:g}, and the engine scores given tokens at 1"
                self.result.notes[note] += 1
                return
            for places, mine in trace.requests():
                scores, meta = await self._scores(trace, places, mine, trace.temperature)
                self._enter(trace, places[mine], np.flatnonzero(mine), scores)
                if (version := meta.get("weight_version")) is not None:
                    self.result.engine_versions[str(version)] += 1
            self.result.counts["traces"] += 1
        except (ProviderError, BadInput) as error:
            self._fail(trace, str(error))

    async def _scores(
        self, trace: Trace, places: npt.NDArray[np.int64], mine: npt.NDArray[np.bool_], temperature: float
    ) -> tuple[Floats, dict[str, Any]]:
        """Ask the engine for a branch, from one token before the first that is wanted."""
        ids = trace.ids[places].tolist()
        payload: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"temperature": temperature, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": int(np.flatnonzero(mine)[0]) - 1,
        }
        if self.options.lora is not None:
            payload["lora_path"] = self.options.lora
        self.result.counts["requests"] += 1
        raw = await self.transport.ask(payload)
        scores = read_scores(raw, ids, mine)
        self.failed_in_a_row = 0
        return scores

    async def _scales(self, trace: Trace) -> bool:
        """Whether the engine takes given tokens at the temperature asked for: whether another one gives other log-probs."""
        known = self.scaled.get(trace.temperature)
        if known is None or (known.done() and known.exception() is not None):
            known = self.scaled[trace.temperature] = asyncio.ensure_future(self._probe(trace))
        return await known

    async def _probe(self, trace: Trace) -> bool:
        """Score a branch at the temperature and twice at 1: the one must differ by more than the others between them."""
        places, mine = next(trace.requests())
        plain, here, again = [
            (await self._scores(trace, places, mine, temperature))[0].astype(np.float64)
            for temperature in (1.0, trace.temperature, 1.0)
        ]
        noise = float(np.abs(again - plain).mean())
        return float(np.abs(here - plain).mean()) > 1e-6 + 4 * noise

    def _enter(
        self, trace: Trace, places: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], scores: Floats
    ) -> None:
        """Enter the scores of tokens at `places` of the trace, `positions` of its branch."""
        recorded = trace.logprobs[places]
        difference = scores.astype(np.float64) - recorded.astype(np.float64)
        step = (str(trace.place["split"]), int(trace.place["step"]))
        self.result.total.add(difference)
        self.result.steps.setdefault(step, Gap()).add(difference)
        buckets = np.searchsorted(EDGES, positions, side="right") - 1
        for bucket in np.unique(buckets).tolist():
            self.result.positions.setdefault(EDGES[bucket], Gap()).add(difference[buckets == bucket])
        size = np.abs(difference)
        for i in np.argsort(-size, kind="stable")[:WORST].tolist():
            if size[i] == 0:
                break
            node, position = trace.node_of(int(places[i]))
            found = {"recorded": float(recorded[i]), "recomputed": float(scores[i])}
            token = {"node": node, "position": position, "token_id": int(trace.ids[places[i]])}
            self.result.worst.append((float(size[i]), {**trace.place, **token, **found}))
        self.result.worst = heapq.nlargest(WORST, self.result.worst, key=lambda item: item[0])

    def _fail(self, trace: Trace, message: str) -> None:
        """Name a trace that could not be scored. Raises EngineGivenUp where nothing else happens any more."""
        self.result.counts["failed"] += 1
        self.failed_in_a_row += 1
        self.result.findings.append(
            Finding(
                code="logprobs",
                severity="error" if self.options.strict else "warning",
                message=f"its log-probs could not be recomputed: {message}",
                **{name: trace.place[name] for name in ("step", "group_index", "trace_id")},
            )
        )
        if self.failed_in_a_row >= GIVE_UP:
            self._give_up(message)

    def _give_up(self, last: str) -> NoReturn:
        raise EngineGivenUp(
            f"{self.failed_in_a_row} requests to {self.options.engine} failed one after the other; the last: {last}"
        )
