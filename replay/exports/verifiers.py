"""Traces as Verifiers writes them: a line of traces.jsonl each, in the form of the release that produced them.

Verifiers 0.2 wrote a Trace a line, later releases an Episode that holds its traces. No release reads the lines of another,
so a file holds those of one. A line is the record as it was (see `decode`), but for what the release's own reader refuses:

- A task without a prompt: 0.2 asks for the key and its own writer leaves it out where the prompt is null. It is put back.
- A reward or metric that is null: 0.2 knows numbers only, its writer makes null of NaN. The name is left out: not scored.
- Raw arrays (routed experts, image tensors), which no release puts into JSON. They are left out.

What was changed is said in the line (see `readable`), so that an import of it gives the row as it was; arrays are gone.
"""

from __future__ import annotations

import gzip
import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import zstandard

from rolltape.replay.exports.config import scored_again, write_config
from rolltape.replay.exports.exported import Exported, ExportedFile, Told
from rolltape.replay.exports.readable import make_readable, own_episode, unscored, without_prompt
from rolltape.replay.run import Run
from rolltape.replay.whole import check_targets, whole_file
from rolltape.schema.commits import Commit
from rolltape.schema.decoding import decode
from rolltape.schema.episodes import Episode, episode_of, line_of
from rolltape.schema.errors import BadInput
from rolltape.schema.fields import TRACE

Record = dict[str, Any]

TOKENS_AT_ONCE = 2_000_000
"""Tokens decoded at a time: about 300 MB as Python values."""
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_RAW = ("routed_experts", "multi_modal_data")
_JSON = json.JSONEncoder(separators=(",", ":"))

PROMPT = "`prompt: null` put back, which Verifiers 0.2 leaves out and then asks for; an import takes it out again"
UNSCORED = "rewards or metrics that are null left out, as Verifiers 0.2 reads numbers only; an import puts them back"
ARRAYS = "raw arrays (routed experts, image data) left out, as Verifiers keeps them out of its lines"
OWN_EPISODE = "an Episode of its own, with the trace's id, as the run holds none"
INCOMPLETE = "their Episode held more traces than the chosen steps do"


def write_verifiers(
    run: Run, commits: Sequence[Commit], pattern: str, *, overwrite: bool = False, told: Told = lambda *_: None
) -> Exported:
    """Write the traces of `commits` as lines of the release that each came from.

    `pattern`: a file ending in .jsonl (also .jsonl.gz and .jsonl.zst, which Verifiers does not read as they are), with
    `{release}` in its name where the run holds traces of several. Raises BadInput for a pattern that does not fit, and
    RunConflict for a file that exists.
    """
    counts = _releases(run, commits)
    if not counts:
        raise BadInput(f"{run.paths.root}: the chosen steps hold no trace.")
    paths = _paths(pattern, counts)
    check_targets(run, paths.values(), overwrite)
    result, done, total = Exported(), 0, counts.total()
    with ExitStack() as stack:
        files = {release: _File(stack, path) for release, path in paths.items()}
        for release, line, traces in _lines(_records(run, commits), result):
            files[release].write(_json(line, result), traces)
            done += traces
            told(done, total)
    result.files = [ExportedFile(file.path, file.traces, file.lines) for file in files.values()]
    configs = (write_config(run, commits, path, release) for release, path in paths.items())
    result.configs = [path for path in configs if path is not None]
    result.next = [scored_again(run, commits, path) for path in result.configs]
    return result


def release_of(version: str | None) -> str:
    """The release whose line format a row has: 0.2.0 where nothing is said, as only 0.2.0 does not name itself."""
    return version or "0.2.0"


def writes_episodes(release: str) -> bool:
    """Whether a release writes Episodes: all from 0.3 on."""
    numbers = release.split(".")
    return not (numbers[0] == "0" and numbers[1:2] in (["1"], ["2"]))


def _releases(run: Run, commits: Sequence[Commit]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for commit in commits:
        for table in run.part_batches(commit, ["verifiers_version"]):
            counts.update(release_of(v) for v in table.column(0).to_pylist())
    return counts


def _paths(pattern: str, counts: Counter[str]) -> dict[str, Path]:
    if not pattern.endswith(ENDINGS):
        raise BadInput(f"{pattern!r}: Verifiers' lines go to a file that ends in {', '.join(ENDINGS)}.")
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except ValueError as error:
        raise BadInput(f"{pattern!r} is no pattern ({error}); write braces only around release.") from error
    if fields - {"release"}:
        raise BadInput(f"{pattern!r} holds {sorted(fields - {'release'})}; the only field is {{release}}.")
    if any(spec or how for _, name, spec, how in string.Formatter().parse(pattern) if name is not None):
        raise BadInput(f"{pattern!r} formats a field; write {{release}} as it is.")
    if len(counts) > 1 and not fields:
        found = ", ".join(f"{n} of {release}" for release, n in sorted(counts.items()))
        raise BadInput(
            f"the run holds traces of several Verifiers releases ({found}), and none reads the lines of another; write "
            "{release} into the name, such as 'traces-{release}.jsonl', for a file each."
        )
    paths = {release: Path(pattern.format(release=_safe(release))) for release in sorted(counts)}
    if len(set(paths.values())) < len(paths):
        raise BadInput(
            f"the releases {', '.join(map(repr, paths))} would share a file, as not every character is taken."
        )
    return paths


def _safe(release: str) -> str:
    """A release as a part of a name: what traces say of themselves must not choose another folder."""
    return re.sub(r"^\.+|[^A-Za-z0-9.+-]", "_", release)


def _records(run: Run, commits: Sequence[Commit]) -> Iterator[tuple[str, Episode | None, Record]]:
    """(release, Episode it came in, record) of each row, in the run's order."""
    for commit in commits:
        for table in run.part_batches(commit, TRACE.arrow.names):
            for piece in _pieces(table):
                releases = map(release_of, piece.column("verifiers_version").to_pylist())
                episodes = map(episode_of, piece.column("extra").to_pylist())
                yield from zip(releases, episodes, decode(piece), strict=True)


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    """`table` in slices of about TOKENS_AT_ONCE."""
    start, tokens = 0, 0
    for i, n in enumerate(table.column("num_tokens").to_pylist()):
        if tokens and tokens + (n or 0) > TOKENS_AT_ONCE:
            yield table.slice(start, i - start)
            start, tokens = i, 0
        tokens += n or 0
    yield table.slice(start)


def _lines(rows: Iterator[tuple[str, Episode | None, Record]], result: Exported) -> Iterator[tuple[str, Record, int]]:
    """(release, line, traces in it). An Episode of several traces waits until the last of them has come."""
    waiting: dict[Any, _Parts] = {}
    for release, episode, record in rows:
        if episode is None or episode.traces == 1:
            yield release, _alone(record, episode, release, result), 1
            continue
        key = (release, episode.id, episode.traces)
        if key in waiting and episode.index in waiting[key].records:
            yield waiting.pop(key).line(result)
        parts = waiting.setdefault(key, _Parts(release))
        parts.records[episode.index] = episode, record
        if len(parts.records) == episode.traces:
            yield waiting.pop(key).line(result)
    for parts in waiting.values():
        yield parts.line(result)


@dataclass
class _Parts:
    """The traces of an Episode that have come."""

    release: str
    records: dict[int, tuple[Episode, Record]] = field(default_factory=dict)
    """By their place in the Episode."""

    def line(self, result: Exported) -> tuple[str, Record, int]:
        episodes, records = zip(*(self.records[i] for i in sorted(self.records)), strict=True)
        first: Episode = episodes[0]
        result.note(INCOMPLETE, len(records) if len(records) < first.traces else 0)
        return self.release, line_of(first, records), len(records)


def _alone(record: Record, episode: Episode | None, release: str, result: Exported) -> Record:
    """The line of a trace that shares none."""
    if episode is not None:
        return line_of(episode, [record])
    if writes_episodes(release):
        result.note(OWN_EPISODE)
        return own_episode(record)
    result.note(PROMPT, without_prompt(record))
    result.note(UNSCORED, bool(unscored(record)))
    make_readable(record)
    return record


def _json(line: Record, result: Exported) -> bytes:
    """`line` as ASCII JSON: U+2028 and halves of surrogates are escaped."""
    try:
        text = _JSON.encode(line)
    except TypeError:  # raw arrays
        for record in line.get("traces", [line]):
            for node in record.get("nodes", ()):
                for key in _RAW:
                    node.pop(key, None)
        result.note(ARRAYS)
        text = _JSON.encode(line)
    return text.encode("ascii") + b"\n"


class _File:
    """A file of lines that appears when the stack it is entered on ends well."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        self.path, self.lines, self.traces = path, 0, 0
        part = stack.enter_context(whole_file(path))
        if path.suffix == ".gz":
            opened: Any = gzip.open(part, "wb", compresslevel=6)  # noqa: SIM115
        elif path.suffix == ".zst":
            opened = zstandard.open(part, "wb")
        else:
            opened = part.open("wb")
        self.file: BinaryIO = stack.enter_context(cast(BinaryIO, opened))

    def write(self, line: bytes, traces: int) -> None:
        """Append a line that holds so many traces."""
        self.file.write(line)
        self.lines, self.traces = self.lines + 1, self.traces + traces
