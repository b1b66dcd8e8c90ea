"""Lines of traces.jsonl to rows: what one process does with one block, whichever process that is.

The rows of a block go to a file of their own (Arrow IPC, not compressed, one batch), because the traces of a group may lie
far apart and memory is bounded: what stays is a few bytes about each. `steps` puts the groups together.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.replay.exports.readable import as_written, is_own_episode
from rolltape.replay.imports.groups import GroupBy, group_key, is_trained
from rolltape.replay.imports.sources import Block, Loader, Source
from rolltape.schema.encoding import Row, row_of
from rolltape.schema.episodes import KEY, envelope, is_episode
from rolltape.schema.errors import BadInput, RolltapeError
from rolltape.schema.fields import TRACE
from rolltape.schema.jsontext import clean_text, fits_extra
from rolltape.schema.records import Context, as_mapping
from rolltape.schema.releases import version_of
from rolltape.schema.table import rows_to_table, uncollected

try:
    import msgspec
except ImportError:  # the extra 'fast'
    _fast = None
else:
    _fast = msgspec.json.Decoder().decode

FLUSH_BYTES = 32 << 20
"""Text of which the rows are written to one file."""
FLUSH_ROWS = 4096
"""Rows after which the file is written anyway: those of small traces take eight times their text."""
IS_FAST = _fast is not None
"""Whether JSON is read by msgspec."""
_PLAIN = pa.schema([f.remove_metadata() for f in TRACE.arrow])
_NOT_TAKEN_APART = (RolltapeError, ValueError, TypeError, OverflowError, RecursionError)


def parse(line: bytes | memoryview) -> Any:
    """The value of a line, exactly as `json` reads it. Raises ValueError or RecursionError.

    msgspec reads three times as fast and, tried on two million numbers and on strings of every kind, gives the same values bit
    for bit, integers of any size included (orjson makes floats of those). What it refuses (NaN, halves of surrogates, numbers
    beyond a float, other encodings) is left to `json`.
    """
    if _fast is not None:
        try:
            return _fast(line)
        except Exception:  # whatever it is, json says it better or reads it
            pass
    return json.loads(bytes(line))


@dataclass(slots=True)
class Found:
    """A trace of a block."""

    line: int
    """Counted from 1 in the block."""
    trace_id: str
    group: bytes
    """Its key: see `group_key`."""
    release: str | None
    trained: bool
    rollouts: int
    """Size its group should have; 0 where that is not known."""
    row: int = -1
    """Its row in the file that comes next; -1 where the run has the trace already, and it was not encoded."""
    bytes: int = 0
    """Length of its text."""
    tokens: int = 0
    model: str | None = None
    rounded: bool = False
    """Whether its log-probs were rounded."""
    prompt: int = 0
    """A checksum of its task's prompt."""


@dataclass
class Taken:
    """What a block holds."""

    source: int
    read: int
    lines: int = 0
    blank: int = 0
    found: list[Found] = field(default_factory=list)
    skipped: list[tuple[int, str | None, str]] = field(default_factory=list)
    """(line in the block, trace id where there is one, why) of what holds no trace that can be taken."""
    file: Path | None = None
    """The rows of this block and of those before it that had no file; None where they are still to come."""


class Skip(Exception):
    """Why a line, or a trace in it, is left out."""

    def __init__(self, why: str, trace: str | None = None) -> None:
        super().__init__(why)
        self.trace = trace


class Taker:
    """Takes blocks. `known`: ids of traces that the run has.

    A file is written when blocks of `flush_bytes` were taken, or FLUSH_ROWS, as a table costs 3 ms however few rows it has.
    """

    def __init__(
        self,
        folder: Path,
        sources: list[Source],
        by: GroupBy,
        known: frozenset[str],
        run: str,
        *,
        flush_bytes: int = FLUSH_BYTES,
    ) -> None:
        self.folder, self.by, self.known, self.flush_bytes = folder, by, known, flush_bytes
        self.loader = Loader(sources)
        self.rows: list[Row] = []
        self.waiting = 0
        self.empty = Context(run=run, writer="import")
        self.contexts = [replace(s.context, run=run, writer="import") for s in sources]
        self.identities = [s.identity for s in sources]
        self.rollouts = [s.rollouts for s in sources]

    @uncollected()
    def take(self, block: Block) -> Taken:
        """Encode the lines of a block. Raises BadInput where they cannot be read any more."""
        taken = Taken(block.source, block.read)
        for text in _lines(*self.loader.text(block)):
            taken.lines += 1
            if not text or (text[0] in b" \t\r\v\f" and bytes(text).isspace()):
                taken.blank += 1
                continue
            try:
                for item in self._traces(_Line(taken.lines, len(text), block.source, _parsed(text))):
                    if isinstance(item, Skip):
                        taken.skipped.append((taken.lines, item.trace, str(item)))
                    else:
                        taken.found.append(item)
            except Skip as skip:
                taken.skipped.append((taken.lines, skip.trace, str(skip)))
        self.waiting += block.end - block.start
        if self.waiting >= self.flush_bytes or len(self.rows) >= FLUSH_ROWS:
            self._flush(taken)
        return taken

    def rest(self) -> Taken | None:
        """What was taken and has no file yet, where there is something."""
        taken = Taken(0, 0)
        self._flush(taken)
        return None if taken.file is None else taken

    def _flush(self, taken: Taken) -> None:
        """Write the rows to a file."""
        if self.rows:
            table = rows_to_table(self.rows)
            taken.file = self.folder / f"{uuid.uuid4().hex}.arrow"
            write_rows(taken.file, table)
        self.rows, self.waiting = [], 0

    def _traces(self, line: _Line) -> Iterator[Found | Skip]:
        """The traces of a line. Raises Skip where it holds none."""
        if not is_episode(line.value):
            yield self._trace(line, line.value, None)
            return
        traces = line.value["traces"]
        if not isinstance(traces, list) or not traces:
            raise Skip(_without_traces(line.value))
        if is_own_episode(line.value):
            yield self._trace(replace(line, value=traces[0]), traces[0], None)
            return
        for index, record in enumerate(traces):
            try:
                yield self._trace(line, record, index)
            except Skip as skip:
                yield skip

    def _trace(self, line: _Line, record: Any, index: int | None) -> Found:
        """Trace `index` of an Episode, or the line itself. Raises Skip where it is none."""
        trace = _id_of(record, index)
        try:
            return self._encoded(trace, line, record, index)
        except _NOT_TAKEN_APART as error:
            raise Skip(f"cannot be taken apart ({error})", trace) from error

    def _encoded(self, trace: str, line: _Line, record: dict[str, Any], index: int | None) -> Found:
        written = as_written(record)
        if written is not record and index is None:
            line = replace(line, value=written)
        record = written
        siblings = 1 if index is None else len(line.value["traces"])
        found = Found(
            line=line.number,
            trace_id=trace,
            group=group_key(self.by, record, line.value, self.identities[line.source]),
            release=version_of(record),
            trained=is_trained(record),
            rollouts=self.rollouts[line.source] if siblings == 1 else 0,
        )
        if trace in self.known:
            return found
        row = row_of(record, self.empty if "agent" in record else self.contexts[line.source])
        if index is not None:
            row.extra[KEY] = envelope(line.value, index)
            if not fits_extra(row.extra):
                raise BadInput("the Episode is nested too deeply")
        found.row, found.bytes, found.tokens = len(self.rows), line.size // siblings, row.values["num_tokens"]
        found.model, found.rounded = row.values["model"], row.values["logprob_decimals"] is not None
        found.prompt = zlib.crc32((row.values["task_prompt"] or "").encode("utf-8", "surrogatepass"))
        self.rows.append(row)
        return found


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that is a JSON object. `number` is counted in its block, `size` in bytes."""

    number: int
    size: int
    source: int
    value: dict[str, Any]


def _lines(data: bytes | bytearray, start: int, stop: int) -> Iterator[memoryview]:
    """The lines of a block without a copy. What follows the last newline is a line where there is something."""
    view = memoryview(data)
    while (end := data.find(b"\n", start, stop)) >= 0:
        yield view[start:end]
        start = end + 1
    if start < stop:
        yield view[start:stop]


def _parsed(text: memoryview) -> dict[str, Any]:
    """The object of a line. Raises Skip where it is none."""
    try:
        value = parse(text)
    except (ValueError, RecursionError) as error:
        raise Skip(f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise Skip(f"a JSON {type(value).__name__}; expected an object")
    return value


def _id_of(record: Any, index: int | None) -> str:
    """The id of a trace, as its row has it. Raises Skip where `record` is none; `index` is its place in an Episode."""
    where = "" if index is None else f"trace {index} of the Episode: "
    if not isinstance(record, dict):
        raise Skip(f"{where}a JSON {type(record).__name__}; expected an object")
    trace = record.get("id")
    if not isinstance(record.get("task"), dict):
        raise Skip(
            f"{where}no task; expected a trace or an Episode of Verifiers", trace if isinstance(trace, str) else None
        )
    if not isinstance(trace, str):
        raise Skip(f"{where}trace id {trace!r}; expected text")
    return clean_text(trace)[0]


def _without_traces(line: Mapping[str, Any]) -> str:
    errors = line.get("errors")
    last = as_mapping(errors[-1]) if isinstance(errors, list) and errors else {}
    why = f", which ended in an error ({last.get('type')}: {last.get('message')})" if last else ""
    return f"an Episode without traces{why}"


def write_rows(path: Path, table: pa.Table) -> None:
    """Write rows of the trace record to a file of one batch."""
    [batch] = table.select(_PLAIN.names).combine_chunks().to_batches()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _PLAIN) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=_PLAIN))


def read_rows(path: Path) -> pa.RecordBatch:
    """The rows of such a file, without a copy: they lie in the file."""
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
