"""Schema version 1: the four records, declared once.

Everything else that speaks about columns (Arrow schemas, the printed table, JSON, Parquet settings, SQL views) is derived
from the declarations here. Minor versions only add nullable columns; older readers accept them. Major versions are
refused with a sentence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from rolltape.schema.errors import UnsupportedVersion

SCHEMA_VERSION = (1, 0)
"""(major, minor) of the file format."""

TEXT = pa.large_string()
"""Text of any length: 64-bit offsets, because one batch may hold more than 2 GiB of tool output."""

Shape = Literal["scalar", "token", "node", "turn", "error", "sample", "name", "trace"]


@dataclass(frozen=True)
class Field:
    """One column: its Arrow type (of one value, or of one element where `shape` is a list), meaning, unit and source."""

    name: str
    type: pa.DataType
    description: str
    source: str
    unit: str = ""
    shape: Shape = "scalar"
    nullable: bool = True

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's Arrow type: the element type, or a list (or MAP, for `name`) of it."""
        if self.shape == "scalar":
            return self.type
        if self.shape == "name":
            return pa.map_(pa.string(), self.type)
        return pa.list_(self.type)

    @property
    def arrow(self) -> pa.Field:
        """The column as an Arrow field with description, unit and source as metadata."""
        meta = {"description": self.description, "source": self.source}
        if self.unit:
            meta["unit"] = self.unit
        return pa.field(self.name, self.arrow_type, self.nullable, meta)

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain JSON values."""
        return {
            "name": self.name,
            "type": str(self.arrow_type),
            "nullable": self.nullable,
            "shape": self.shape,
            "unit": self.unit,
            "source": self.source,
            "description": self.description,
        }


@dataclass(frozen=True)
class Record:
    """A named list of fields."""

    name: str
    description: str
    fields: tuple[Field, ...]

    @cached_property
    def arrow(self) -> pa.Schema:
        """The record as an Arrow schema."""
        return pa.schema([f.arrow for f in self.fields])

    @cached_property
    def by_name(self) -> dict[str, Field]:
        """Fields by column name, in order."""
        return {f.name: f for f in self.fields}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over names, types and nullability: equal exactly where files can be read as one table."""
        text = "\n".join(f"{f.name} {f.arrow_type} {f.nullable}" for f in self.fields)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _f(
    name: str,
    type_: pa.DataType,
    description: str,
    source: str,
    *,
    unit: str = "",
    shape: Shape = "scalar",
    nullable: bool = True,
) -> Field:
    return Field(name, type_, description, source, unit, shape, nullable)


_i32, _i64, _f64, _str, _bool = pa.int32(), pa.int64(), pa.float64(), pa.string(), pa.bool_()
_VF, _RT, _ENGINE = "Verifiers trace", "rolltape", "engine reply"

TRACE = Record(
    "trace",
    "One try of one rollout: also a failed, retried or cancelled one. Immutable once written.",
    (
        # identity
        _f("run", _str, "run id", _RT),
        _f("split", _str, "train or eval", _RT),
        _f("eval_name", _str, "name of the evaluation set; null in training", _RT),
        _f("step", _i64, "number of the rollout call that recorded the trace", _RT),
        _f("attempt", _i32, "start of the recording process that wrote the row, counted from 0", _RT),
        _f("writer", _str, "name of the writer within the attempt", _RT),
        _f("group_index", _i64, "group the rollout belongs to, unique within the run", _RT),
        _f("rollout_index", _i32, "place of the rollout in its group", _RT),
        _f("try_number", _i32, "try of that rollout, counted from 0", _RT),
        _f("trace_id", _str, "id that Verifiers gave the trace", _VF),
        _f("layout", _str, "release whose key order the record follows", _RT),
        _f("verifiers_version", _str, "release of Verifiers that produced the trace, where known", _VF),
        # task
        _f("task_type", _str, "name of the Task class", _VF),
        _f("task_idx", _i64, "index of the task in its taskset", _VF),
        _f("task_key", _str, "key of the task, where the release has one", _VF),
        _f("task_name", _str, "name of the task", _VF),
        _f("task_prompt", TEXT, "prompt: its text, or JSON where it is a list of messages", _VF),
        _f("task_prompt_is_json", _bool, "whether task_prompt is JSON; null where there is no prompt", _RT),
        _f("task_label", TEXT, "label of the task row, else its answer: its text, or JSON where it is no string", _VF),
        _f("task_label_is_json", _bool, "whether task_label is JSON; null where there is no label", _RT),
        _f("task", TEXT, "the whole task row as JSON", _VF),
        # result
        _f("reward", _f64, "sum of the weighted rewards; null where nothing was scored", _VF),
        _f("rewards", _f64, "weighted contribution by reward name; null means not scored", _VF, shape="name"),
        _f("scores", _f64, "raw score by reward name, where the release has it", _VF, shape="name"),
        _f("weights", _f64, "weight by reward name, where the release has it", _VF, shape="name"),
        _f("metrics", _f64, "metric by name; null means not measured", _VF, shape="name"),
        _f("is_completed", _bool, "whether the rollout ended", _VF),
        _f("is_truncated", _bool, "ended by a limit, or its last reply by length", _VF),
        _f("stop_condition", _str, "why the rollout stopped", _VF),
        _f("error_types", _str, "class of each error, oldest first", _VF, shape="error"),
        _f("error_messages", TEXT, "message of each error", _VF, shape="error"),
        _f("error_tracebacks", TEXT, "traceback of each error; null where there is none", _VF, shape="error"),
        _f("info", TEXT, "the trace's info as JSON", _VF),
        _f("runtime", TEXT, "the runtime as JSON", _VF),
        _f("extra_usage", TEXT, "usage outside the conversation (judges) as JSON", _VF),
        _f("agent", TEXT, "the agent (model, sampling, harness) as JSON, where the release has it", _VF),
        _f("tools", TEXT, "tool schemas as JSON, where the release has them", _VF),
        _f("calls", TEXT, "model calls as JSON, where the release has them", _VF),
        _f("problems", TEXT, "what the recorder could not keep exactly, each with its path", _RT, shape="error"),
        # timing
        _f("started_at", _f64, "start of the rollout", _VF, unit="s since epoch"),
        _f("setup_start", _f64, "start of setup; 0 means it never came to it", _VF, unit="s since epoch"),
        _f("setup_end", _f64, "end of setup", _VF, unit="s since epoch"),
        _f("generation_start", _f64, "start of the conversation", _VF, unit="s since epoch"),
        _f("generation_end", _f64, "end of the conversation", _VF, unit="s since epoch"),
        _f("finalize_start", _f64, "start of finalize", _VF, unit="s since epoch"),
        _f("finalize_end", _f64, "end of finalize", _VF, unit="s since epoch"),
        _f("scoring_start", _f64, "start of scoring", _VF, unit="s since epoch"),
        _f("scoring_end", _f64, "end of scoring", _VF, unit="s since epoch"),
        # settings
        _f("model", _str, "model the engine served", _RT),
        _f("tokenizer", _str, "tokenizer the renderer used", _RT),
        _f("sampling", _str, "sampling settings as JSON; null means unknown", _RT),
        _f("renderer", _str, "renderer settings as JSON; null means unknown", _RT),
        # per turn
        _f("turn_weight_version", _str, "weight version that produced the turn", _ENGINE, shape="turn"),
        _f(
            "turn_cached_tokens",
            _i32,
            "prompt tokens found in the engine's cache",
            _ENGINE,
            unit="tokens",
            shape="turn",
        ),
        _f("turn_latency", _f64, "end-to-end latency of the request", _ENGINE, unit="s", shape="turn"),
        _f("turn_engine", _str, "request id the engine gave", _ENGINE, shape="turn"),
        _f("turn_finish_reason", _str, "finish reason in the engine's words", _ENGINE, shape="turn"),
        _f("turn_retries", _i32, "requests before the one that was answered", _RT, shape="turn"),
        # per token, over the whole trace in node order
        _f("token_ids", _i32, "token ids", _VF, shape="token"),
        _f("sampled", _bool, "whether the model sampled the token", _VF, shape="token"),
        _f("is_content", _bool, "message body (true) or template (false); null where unknown", _VF, shape="token"),
        _f(
            "logprobs", pa.float32(), "log-prob when sampled; null where there is none", _VF, unit="nats", shape="token"
        ),
        _f("logprob_decimals", _i32, "decimals the release rounded log-probs to; null where it did not", _RT),
        # per node
        _f("node_parent", _i32, "index of the parent node; null for a root", _VF, shape="node"),
        _f("node_role", _str, "role of the message", _VF, shape="node"),
        _f("node_content", TEXT, "text of the message; of its text parts where it has parts", _VF, shape="node"),
        _f("node_parts", TEXT, "content parts as JSON, where the content is a list", _VF, shape="node"),
        _f("node_reasoning", TEXT, "reasoning content", _VF, shape="node"),
        _f("node_tool_calls", TEXT, "tool calls as JSON", _VF, shape="node"),
        _f("node_tool_call_id", _str, "tool call that a tool message answers", _VF, shape="node"),
        _f("node_name", _str, "name of the tool, on tool messages that carry it", _VF, shape="node"),
        _f("node_tokens", _i32, "token ids of the node", _VF, unit="tokens", shape="node"),
        _f("node_logprobs", _i32, "log-probs of the node", _VF, unit="tokens", shape="node"),
        _f("node_sampled", _bool, "whether a model call produced the message", _VF, shape="node"),
        _f("node_finish_reason", _str, "finish reason as Verifiers recorded it", _VF, shape="node"),
        _f("node_timestamp", _f64, "creation of the node", _VF, unit="s since epoch", shape="node"),
        _f("node_prompt_tokens", _i64, "prompt tokens reported, without cached ones", _VF, unit="tokens", shape="node"),
        _f("node_completion_tokens", _i64, "completion tokens reported", _VF, unit="tokens", shape="node"),
        _f("node_cached_tokens", _i64, "cached input tokens reported", _VF, unit="tokens", shape="node"),
        _f("node_reasoning_tokens", _i64, "reasoning tokens reported", _VF, unit="tokens", shape="node"),
        _f("node_cost", _f64, "cost reported", _VF, unit="provider's currency", shape="node"),
        _f("node_raw", _bool, "whether a list of the node fits no column and lies in extra", _RT, shape="node"),
        # counts
        _f("num_nodes", _i32, "nodes", _RT),
        _f("num_turns", _i32, "sampled nodes", _RT),
        _f("num_branches", _i32, "leaves of the message graph", _RT),
        _f("num_tokens", _i64, "stored tokens, each node once", _RT, unit="tokens"),
        _f("num_sampled", _i64, "sampled tokens, each node once", _RT, unit="tokens"),
        # the rest
        _f("extra", pa.large_binary(), "zstd JSON of what no column holds exactly; null where nothing is left", _RT),
    ),
)

OUTCOME = Record(
    "outcome",
    "What became of a trace once the trainer's hooks had run. Columns of the same Parquet row, null until then.",
    (
        _f("disposition", _str, "emitted, or why not", _RT),
        _f("reason", TEXT, "the sentence behind the disposition", _RT),
        _f("handed_reward", TEXT, "reward handed to the trainer as JSON; null where no hook changed it", "trainer"),
        _f("remove_sample", _bool, "whether the trainer was told to leave the sample out", "trainer", shape="sample"),
        _f(
            "recomputed_logprobs",
            pa.float32(),
            "log-probs the trainer recomputed, responses of the trace's samples one after the other",
            "trainer",
            unit="nats",
            shape="token",
        ),
    ),
)

GROUP = Record(
    "group",
    "The rollouts of one task in one step, known when all of them have ended.",
    (
        _f("split", _str, "train or eval", _RT, nullable=False),
        _f("eval_name", _str, "name of the evaluation set", _RT),
        _f("step", _i64, "number of the rollout call", _RT, nullable=False),
        _f("group_index", _i64, "unique within the run", _RT, nullable=False),
        _f("task_index", _i64, "place of the task in the taskset", _VF),
        _f("task_key", _str, "key of the task, where the release has one", _VF),
        _f("expected_size", _i32, "rollouts that were asked for", _RT, nullable=False),
        _f("actual_size", _i32, "traces in the group", _RT, nullable=False),
        _f("trace_ids", _str, "last try of each rollout, in rollout order", _RT, shape="trace", nullable=False),
        _f("reward_counts", _i64, "traces scored, by reward name", "live traces", shape="name", nullable=False),
        _f(
            "reward_sums",
            _f64,
            "correctly rounded sum of the contributions by reward name; null unless every trace was scored",
            "live traces",
            shape="name",
            nullable=False,
        ),
        _f(
            "group_reward_names",
            _str,
            "names of the group rewards of the task, which compare its rollouts; null where unknown",
            _VF,
            shape="trace",
        ),
        _f("first_sample_index", _i64, "index of the group's first sample", _RT),
    ),
)

STEP = Record(
    "step",
    "One rollout call of one writer, known when it ends.",
    (
        _f("split", _str, "train or eval", _RT, nullable=False),
        _f("eval_name", _str, "name of the evaluation set", _RT),
        _f("step", _i64, "number of the rollout call", _RT, nullable=False),
        _f("attempt", _i32, "start of the recording process", _RT, nullable=False),
        _f("writer", _str, "name of the writer", _RT, nullable=False),
        _f("cursor", _i64, "tasks drawn from the taskset after the step", _RT),
        _f("next_group_index", _i64, "first group index of the next step", _RT),
        _f("next_sample_index", _i64, "first sample index of the next step", _RT),
        _f("options", TEXT, "conversion options as JSON", _RT),
        _f("batch", _i64, "sample indices in the order they were handed over", "trainer", shape="sample"),
        _f("digest_converted", _str, "digest of the converted Samples", _RT),
        _f("digest_handed", _str, "digest of the Samples handed over", _RT),
        _f("counts", _i64, "tries started, and ended by disposition", _RT, shape="name"),
        _f("started_at", _f64, "start of the step", _RT, unit="s since epoch"),
        _f("ended_at", _f64, "end of the step", _RT, unit="s since epoch"),
    ),
)

RECORDS = (TRACE, GROUP, OUTCOME, STEP)

ROW = Record("row", "A row of a Parquet file: a trace and its outcome.", TRACE.fields + OUTCOME.fields)

DISPOSITIONS = {
    "emitted": "became Samples that were handed to the trainer",
    "eval": "recorded by an evaluation, which hands nothing to the trainer",
    "error": "ended in an error",
    "retried": "was run again; a later try of the rollout counts",
    "cancelled": "was cancelled before it ended",
    "interrupted": "ended, but its process died before the step did",
    "empty": "holds no trainable token",
    "failed_check": "failed a check",
    "incomplete_group": "is sound, but its group is not",
    "filtered": "was dropped by a filter of the trainer",
    "leftover": "was sampled beyond what the trainer took",
}
"""Every disposition and what it says of a trace."""


def check_version(found: str | None, where: str, supported: tuple[int, int] = SCHEMA_VERSION) -> None:
    """Refuse a file whose major version is not that of `supported`.

    Raises UnsupportedVersion, naming `where`, the version found and the one known.
    """
    known = ".".join(map(str, supported))
    try:
        major = int((found or "").split(".")[0])
    except ValueError:
        raise UnsupportedVersion(
            f"{where}: schema version {found!r} is not a version; was it written by rolltape? Known is {known}."
        ) from None
    if major != supported[0]:
        todo = "install a newer rolltape" if major > supported[0] else "export it with the rolltape that wrote it"
        raise UnsupportedVersion(f"{where}: schema version {found} was found, this rolltape knows {known}; {todo}.")
