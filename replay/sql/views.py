"""The views, each declared once: what `rolltape sql --schema` prints is what the database is asked.

They select from tables that `connection` fills: `rows` (the rows of the Parquet files, what is known of each in `_run`,
`_run_id`, `_superseded` and `_journaled`, and the entries of rewards and metrics in `_rewards` and `_metrics`), `groups` and
`steps` (the records of the commits), `samples` (what was handed over). They are in a schema of their own, which no query has to
know.

A list is taken apart by numbering its places and then asking for the one at each place: of several lists unnested side by
side all would be read, whatever the query wants, and a trace's text would be copied for each of its tokens.
"""

from __future__ import annotations

from rolltape.replay.sql.declare import HIDDEN, Column, View, columns_of
from rolltape.replay.sql.examples import EXAMPLES
from rolltape.schema.fields import GROUP, ROW, STEP

_ROWS = f"{HIDDEN}.rows"
_RUN = (
    Column("run", "VARCHAR", "folder name of the run, as much of its path as tells the given runs apart", "_run"),
    Column("run_id", "VARCHAR", "id the run has in its run.json", "_run_id"),
)
_SUPERSEDED = Column(
    "superseded",
    "BOOLEAN",
    "whether a newer attempt took the step back; false unless all attempts are asked for",
    "_superseded",
)
_ENDED = Column(
    "ended",
    "BOOLEAN",
    "whether the rollout came to its end: a last try, neither cancelled nor with an error; means of rewards are taken of these",
    "coalesce(len(error_types), 0) = 0 AND coalesce(disposition NOT IN ('retried', 'cancelled'), true)",
)
_KEYS = (
    _RUN[0],
    *columns_of(ROW, "split", "eval_name", "step", "attempt"),
    _SUPERSEDED,
    *columns_of(ROW, "group_index", "rollout_index", "trace_id", "task_idx", "task_name", "disposition"),
    _ENDED,
)
"""First columns of every view that takes traces apart."""


def _counted(length: str, number: str, condition: str = "") -> str:
    """The rows, each as often as `length` says, numbered from 0 in the column `number`."""
    return f"(SELECT *, unnest(range(coalesce({length}, 0))) AS {number} FROM {_ROWS}{condition})"


def _of_node(name: str, column: str, meaning: str = "") -> Column:
    field = ROW.by_name[column]
    declared = columns_of(ROW, column)[0]
    return Column(
        name, declared.type.removesuffix("[]"), meaning or declared.meaning, f"{field.name}[CAST(_node AS BIGINT) + 1]"
    )


_TRACES = View(
    "traces",
    "One try of one rollout, with everything its Parquet file holds. Tries that failed are here too, and may have a reward: "
    "`WHERE ended` leaves them out, as `rolltape stats` does. Lists over tokens run over the whole trace in "
    "node order, lists over nodes in node order. Functions such as list_avg skip nulls, so unsampled tokens count nowhere.",
    (
        *_RUN,
        *(c for c in columns_of(ROW) if c.name != "run"),
        _ENDED,
        _SUPERSEDED,
        Column(
            "journaled", "BOOLEAN", "read from a journal (live), not committed yet: no outcome is known", "_journaled"
        ),
    ),
    _ROWS,
    EXAMPLES["traces"],
)

_NODES = View(
    "nodes",
    "One message of a trace. A trace without nodes has no row here.",
    (
        *_KEYS,
        Column("node", "BIGINT", "index of the node in its trace, from 0", "_node"),
        _of_node("parent", "node_parent"),
        _of_node("role", "node_role"),
        _of_node("content", "node_content"),
        _of_node("parts", "node_parts"),
        _of_node("reasoning", "node_reasoning"),
        _of_node("tool_calls", "node_tool_calls"),
        _of_node("tool_call_id", "node_tool_call_id"),
        _of_node("name", "node_name"),
        _of_node("sampled", "node_sampled"),
        _of_node("tokens", "node_tokens"),
        _of_node("logprobs", "node_logprobs"),
        Column(
            "first_token",
            "BIGINT",
            "position of its first token in the trace (see tokens.position)",
            "CAST(coalesce(list_sum(node_tokens[1:_node]), 0) AS BIGINT)",
        ),
        _of_node(
            "finish_reason", "node_finish_reason", "finish reason as Verifiers recorded it; null where not sampled"
        ),
        _of_node("timestamp", "node_timestamp"),
        _of_node("prompt_tokens", "node_prompt_tokens", "prompt tokens reported, without cached ones; null: no usage"),
        _of_node("completion_tokens", "node_completion_tokens", "completion tokens reported; null: no usage"),
        _of_node("cached_tokens", "node_cached_tokens", "cached input tokens reported; null: not reported"),
        _of_node("reasoning_tokens", "node_reasoning_tokens", "reasoning tokens reported; null: not reported"),
        _of_node("cost", "node_cost", "cost reported, in the provider's currency; null: not reported"),
    ),
    _counted("num_nodes", "_node"),
    EXAMPLES["nodes"],
)

_TURN = "[CAST(_turn AS BIGINT) + 1]"
_TURNS = View(
    "turns",
    "One model call of a trace: a node that the model sampled, with what the engine said of the reply. What only engines "
    "say (weight_version, latency …) is null where the trace was not recorded live.",
    (
        *_KEYS,
        Column("turn", "BIGINT", "number of the turn in its trace, from 0", "_turn"),
        Column("node", "BIGINT", "index of its node (see nodes)", f"_sampled_nodes{_TURN}"),
        Column("weight_version", "VARCHAR", "weight version that produced it", f"turn_weight_version{_TURN}"),
        Column("cached_tokens", "INTEGER", "prompt tokens found in the engine's cache", f"turn_cached_tokens{_TURN}"),
        Column("latency", "DOUBLE", "end-to-end latency of the request [s]", f"turn_latency{_TURN}"),
        Column("engine", "VARCHAR", "request id the engine gave", f"turn_engine{_TURN}"),
        Column(
            "finish_reason",
            "VARCHAR",
            "finish reason in the engine's words, or as Verifiers recorded it where the engine's are not known",
            f"coalesce(turn_finish_reason{_TURN}, node_finish_reason[_sampled_nodes{_TURN} + 1])",
        ),
        Column("retries", "INTEGER", "requests before the one that was answered", f"turn_retries{_TURN}"),
        Column(
            "tokens",
            "INTEGER",
            "token ids of the node: the sampled ones and those of the template",
            f"node_tokens[_sampled_nodes{_TURN} + 1]",
        ),
        Column(
            "sampled_tokens",
            "INTEGER",
            "log-probs of the node, one a sampled token",
            f"node_logprobs[_sampled_nodes{_TURN} + 1]",
        ),
        Column(
            "prompt_tokens",
            "BIGINT",
            "prompt tokens reported, without cached ones; null: no usage",
            f"node_prompt_tokens[_sampled_nodes{_TURN} + 1]",
        ),
        Column(
            "completion_tokens",
            "BIGINT",
            "completion tokens reported; null: no usage",
            f"node_completion_tokens[_sampled_nodes{_TURN} + 1]",
        ),
    ),
    "(SELECT *, unnest(range(len(_sampled_nodes))) AS _turn FROM (SELECT *, "
    f"[i FOR i IN range(num_nodes) IF node_sampled[i + 1]] AS _sampled_nodes FROM {_ROWS}))",
    EXAMPLES["turns"],
)

_TOKENS = View(
    "tokens",
    "One stored token of a trace, each node once. A run holds many: choose steps or traces first, or use list functions "
    "over traces where they do.",
    (
        *_KEYS,
        Column("position", "BIGINT", "place of the token in its trace, from 0, in node order", "_token"),
        Column(
            "node",
            "BIGINT",
            "index of its node (see nodes)",
            "flatten([list_transform(range(node_tokens[i + 1]), lambda _: i) FOR i IN range(num_nodes)])[_token + 1]",
        ),
        Column("token_id", "INTEGER", "token id", "token_ids[_token + 1]"),
        Column("sampled", "BOOLEAN", "whether the model sampled it", "sampled[_token + 1]"),
        Column(
            "is_content", "BOOLEAN", "message body (true) or template (false); null: unknown", "is_content[_token + 1]"
        ),
        Column(
            "logprob",
            "FLOAT",
            "log-prob when it was sampled [nats]; null: not sampled, or none recorded, never 0 for that",
            "logprobs[_token + 1]",
        ),
    ),
    _counted("num_tokens", "_token"),
    EXAMPLES["tokens"],
)

_REWARDS = View(
    "rewards",
    "One named reward of a trace. Three things differ: a value of 0 was scored 0; a null value is named but was not scored; "
    "where there is no row, the trace has no reward of that name. avg and count(value) skip nulls, count(*) does not. A try "
    "that failed may have rewards: `WHERE ended` leaves them out. NaN "
    "is a value: it makes avg NaN and counts as the largest; `WHERE isfinite(value)` leaves it and infinity out.",
    (
        *_KEYS,
        Column(
            "name", "VARCHAR", "name of the reward, as it is: dots, spaces and capitals are part of it", "_entry.key"
        ),
        Column("value", "DOUBLE", "weighted contribution to the trace's reward; null: not scored", "_entry.value"),
        Column(
            "score", "DOUBLE", "score before weighting; null where the release does not tell it", "scores[_entry.key]"
        ),
        Column("weight", "DOUBLE", "weight; null where the release does not tell it", "weights[_entry.key]"),
    ),
    f"(SELECT *, unnest(_rewards) AS _entry FROM {_ROWS})",
    EXAMPLES["rewards"],
)

_METRICS = View(
    "metrics",
    "One named metric of a trace. A null value is named but was not measured; where there is no row, nobody measured it.",
    (
        *_KEYS,
        Column("name", "VARCHAR", "name of the metric, as it is", "_entry.key"),
        Column("value", "DOUBLE", "the metric; null: not measured", "_entry.value"),
    ),
    f"(SELECT *, unnest(_metrics) AS _entry FROM {_ROWS})",
    EXAMPLES["metrics"],
)

_OUTCOMES = View(
    "outcomes",
    "What became of a trace: one row a trace.",
    (
        *_KEYS[:-2],
        Column("disposition", "VARCHAR", "emitted, or why not; null: imported, or not committed yet"),
        _ENDED,
        *columns_of(ROW, "reason", "reward"),
        Column("handed_reward", "VARCHAR", "reward a trainer's hook put in its place, as JSON; null: none did"),
        Column(
            "removed_samples",
            "BIGINT",
            "samples the trainer was told to leave out",
            "len([r FOR r IN remove_sample IF r])",
        ),
        Column(
            "recomputed_logprobs",
            "BIGINT",
            "log-probs the trainer recomputed; 0: none",
            "coalesce(len(recomputed_logprobs), 0)",
        ),
    ),
    _ROWS,
    EXAMPLES["outcomes"],
)

_ERRORS = View(
    "errors",
    "One error of a trace. A trace without an error has no row here.",
    (
        *_KEYS,
        Column("number", "BIGINT", "place of the error in its trace, from 0, oldest first", "_number"),
        Column("type", "VARCHAR", "class of the error", "error_types[_number + 1]"),
        Column("message", "VARCHAR", "its message", "error_messages[_number + 1]"),
        Column("traceback", "VARCHAR", "its traceback; null: none", "error_tracebacks[_number + 1]"),
    ),
    _counted("len(error_types)", "_number"),
    EXAMPLES["errors"],
)

_GROUPS = View(
    "groups",
    "The rollouts of one task in one step, as the commit records them.",
    (
        *_RUN,
        *columns_of(GROUP, "split", "eval_name", "step"),
        Column("attempt", "INTEGER", "start of the recording process"),
        Column("writer", "VARCHAR", "name of the writer"),
        _SUPERSEDED,
        *(c for c in columns_of(GROUP) if c.name not in ("split", "eval_name", "step")),
    ),
    f"{HIDDEN}.groups",
    EXAMPLES["groups"],
)

_STEPS = View(
    "steps",
    "One rollout call of one writer: one row a commit.",
    (
        *_RUN,
        *columns_of(STEP, "split", "eval_name", "step", "attempt", "writer"),
        _SUPERSEDED,
        *(c for c in columns_of(STEP) if c.name not in ("split", "eval_name", "step", "attempt", "writer")),
        Column("rows", "BIGINT", "traces in the part's Parquet file"),
        Column("bytes", "BIGINT", "size of that file"),
        Column("tokens", "BIGINT", "stored tokens of its traces, as the writer counted them; null: not counted"),
        Column("sampled_tokens", "BIGINT", "sampled tokens of its traces; null: not counted"),
        Column("committed_at", "DOUBLE", "when it was committed [s since epoch]"),
    ),
    f"{HIDDEN}.steps",
    EXAMPLES["steps"],
)

_SAMPLES = View(
    "samples",
    "One Sample that was handed to the trainer. Evaluations and imports hand none over. With the branch policy `siblings` "
    "a trace may have several, and their steps are converted again to tell them.",
    (
        *_KEYS,
        Column("place", "BIGINT", "place in the batch of its step and writer, from 0", "_place"),
        Column("sample_index", "BIGINT", "index the Sample has (Sample.index)", "_index"),
        Column("branch", "BIGINT", "branch of the trace it is made of", "_branch"),
        Column("tokens", "BIGINT", "tokens, prompt and response", "coalesce(_tokens, num_tokens)"),
        Column(
            "response_length",
            "BIGINT",
            "tokens from the first trained one to the end, tool output included",
            "coalesce(_response_length, num_tokens - list_position(sampled, true) + 1)",
        ),
        Column("trained_tokens", "BIGINT", "tokens with loss mask 1", "coalesce(_trained_tokens, num_sampled)"),
        Column(
            "status",
            "VARCHAR",
            "completed or truncated",
            "CASE WHEN is_truncated THEN 'truncated' ELSE 'completed' END",
        ),
        Column(
            "reward",
            "DOUBLE",
            "total reward handed over: a hook's where one changed it; null: not scored, or a hook gave no total",
            "CASE WHEN handed_reward IS NULL THEN reward WHEN json_type(handed_reward) = 'OBJECT' "
            "THEN try_cast(json_extract_string(handed_reward, '$.reward') AS DOUBLE) "
            "ELSE try_cast(json_extract_string(handed_reward, '$') AS DOUBLE) END",
        ),
        Column(
            "remove_sample",
            "BOOLEAN",
            "whether the trainer was told to leave it out",
            "coalesce(remove_sample[_sibling + 1], false)",
        ),
    ),
    f"{HIDDEN}.samples JOIN {_ROWS} ON _trace = trace_id AND _of = _run AND _step = step AND _attempt = attempt",
    EXAMPLES["samples"],
)

VIEWS = {
    v.name: v
    for v in (*(_TRACES, _NODES, _TURNS, _TOKENS, _REWARDS, _METRICS, _GROUPS, _STEPS, _OUTCOMES, _SAMPLES, _ERRORS),)
}
"""Every view by name."""
