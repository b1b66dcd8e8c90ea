"""Queries that teach the views. Each is run by the tests, on the demo run too, against a plain count in Python."""

from __future__ import annotations

from rolltape.replay.sql.declare import Example

EXAMPLES: dict[str, tuple[Example, ...]] = {
    "traces": (
        Example(
            "How does the reward move, and what is it bought with?",
            "SELECT step, count(*) AS traces, count(*) FILTER (ended) AS ended,\n"
            "       avg(reward) FILTER (ended AND isfinite(reward)) AS reward,\n"
            "       avg(num_sampled) FILTER (ended AND num_sampled > 0) AS sampled,\n"
            "       avg(CAST(is_truncated AS INTEGER)) FILTER (ended) AS truncated\n"
            "FROM traces GROUP BY step ORDER BY step",
        ),
        Example(
            "Which tasks still fail?",
            "SELECT task_idx, task_name, count(*) AS traces, count(*) FILTER (ended) AS ended,\n"
            "       avg(reward) FILTER (ended AND isfinite(reward)) AS reward,\n"
            "       max(reward) FILTER (ended AND isfinite(reward)) AS best\n"
            "FROM traces GROUP BY ALL ORDER BY reward NULLS FIRST, task_idx LIMIT 20",
        ),
        Example(
            "What do rollouts that fail have in common?",
            "SELECT ended AND isfinite(reward) AND reward >= 1 AS passed, count(*) AS traces,\n"
            "       avg(num_turns) AS turns, avg(num_sampled) AS sampled,\n"
            "       avg(CAST(is_truncated AS INTEGER)) AS truncated, avg(len(error_types)) AS errors\n"
            "FROM traces GROUP BY passed ORDER BY passed",
        ),
        Example(
            "Where do rollouts stop?",
            "SELECT stop_condition, count(*) AS traces, avg(num_turns) AS turns FROM traces\n"
            "GROUP BY ALL ORDER BY traces DESC, stop_condition",
        ),
        Example(
            "How sure was the model of what it sampled, step by step?",
            "SELECT step, sum(list_sum(logprobs)) / sum(list_count(logprobs)) AS mean_logprob,\n"
            "       sum(list_count(logprobs)) AS tokens\n"
            "FROM traces GROUP BY step ORDER BY step",
        ),
    ),
    "nodes": (
        Example(
            "How many messages and tokens does each role have?",
            "SELECT role, count(*) AS messages, sum(tokens) AS tokens FROM nodes GROUP BY role ORDER BY role",
        ),
        Example(
            "What did trace … say? (here: the first of the run)",
            "SELECT node, role, content FROM nodes\nWHERE trace_id = (SELECT min(trace_id) FROM traces) ORDER BY node",
        ),
    ),
    "turns": (
        Example(
            "Which weight versions produced a step's replies?",
            "SELECT step, weight_version, count(*) AS turns FROM turns GROUP BY ALL ORDER BY ALL",
        ),
        Example(
            "Which turns were cut by length?",
            "SELECT step, count(*) AS turns, count(*) FILTER (finish_reason = 'length') AS cut\n"
            "FROM turns GROUP BY step ORDER BY step",
        ),
    ),
    "tokens": (
        Example(
            "Which sampled tokens were the least likely?",
            "SELECT trace_id, position, token_id, logprob FROM tokens WHERE logprob IS NOT NULL\n"
            "ORDER BY logprob, trace_id, position LIMIT 10",
        ),
        Example(
            "How many tokens of each kind are stored?",
            "SELECT sampled, is_content, count(*) AS tokens, count(logprob) AS with_logprob\n"
            "FROM tokens GROUP BY ALL ORDER BY ALL",
        ),
    ),
    "rewards": (
        Example(
            "How does each reward move?",
            "SELECT step, name, count(*) FILTER (isfinite(value)) AS scored, avg(value) FILTER (isfinite(value)) AS mean\n"
            "FROM rewards WHERE ended GROUP BY ALL ORDER BY ALL",
        ),
        Example(
            "At which step did which reward change most?",
            "SELECT step, name, mean, mean - lag(mean) OVER (PARTITION BY name ORDER BY step) AS change\n"
            "FROM (SELECT step, name, avg(value) AS mean FROM rewards WHERE ended AND isfinite(value) GROUP BY step, name)\n"
            "ORDER BY abs(change) DESC NULLS LAST, name, step LIMIT 20",
        ),
        Example(
            "Which rewards were not scored, and where is NaN or infinity?",
            "SELECT name, count(*) AS named, count(*) FILTER (value IS NULL) AS unscored,\n"
            "       count(*) FILTER (NOT isfinite(value)) AS not_finite\n"
            "FROM rewards GROUP BY name ORDER BY name",
        ),
        Example(
            "One column a reward, side by side",
            "PIVOT (SELECT step, name, value FROM rewards WHERE ended AND isfinite(value)) ON name USING avg(value)\n"
            "GROUP BY step ORDER BY step",
        ),
    ),
    "metrics": (
        Example(
            "How many traces measured each metric, and what came out?",
            "SELECT name, count(*) AS measured, avg(value) AS mean, min(value) AS least, max(value) AS most\n"
            "FROM metrics WHERE ended AND isfinite(value) GROUP BY name ORDER BY name",
        ),
    ),
    "groups": (
        Example(
            "Which groups carry no signal: all their rewards are equal?",
            "SELECT step, group_index, task_idx, count(*) AS rollouts, min(reward) AS reward\n"
            "FROM traces WHERE ended AND isfinite(reward) GROUP BY ALL\n"
            "HAVING count(*) > 1 AND TRY_CAST(min(reward) AS FLOAT) = TRY_CAST(max(reward) AS FLOAT) ORDER BY ALL",
        ),
        Example(
            "Which groups are short?",
            "SELECT step, group_index, task_index, expected_size, actual_size FROM groups\n"
            "WHERE actual_size < expected_size ORDER BY ALL",
        ),
        Example(
            "What does a race among rollouts pay out in a group?",
            "SELECT step, group_index, e.key AS name, e.value AS total\n"
            "FROM (SELECT step, group_index, unnest(map_entries(reward_sums)) AS e FROM groups) ORDER BY ALL",
        ),
    ),
    "steps": (
        Example(
            "What became of the tries of each step?",
            "SELECT step, writer, counts['started'] AS started, coalesce(counts['emitted'], 0) AS emitted,\n"
            "       coalesce(counts['lost'], 0) AS lost\n"
            "FROM steps ORDER BY step, writer",
        ),
        Example(
            "How many tokens were sampled, and how fast?",
            "SELECT step, sum(sampled_tokens) AS sampled,\n"
            "       sum(sampled_tokens) / nullif(max(ended_at) - min(started_at), 0) AS per_second\n"
            "FROM steps GROUP BY step ORDER BY step",
        ),
    ),
    "outcomes": (
        Example(
            "Why were traces not trained?",
            "SELECT disposition, reason, count(*) AS traces FROM outcomes\n"
            "WHERE disposition <> 'emitted' GROUP BY ALL ORDER BY traces DESC, disposition, reason",
        ),
    ),
    "samples": (
        Example(
            "How large is each batch?",
            "SELECT step, count(*) AS samples, sum(trained_tokens) AS trained, avg(response_length) AS response_length\n"
            "FROM samples GROUP BY step ORDER BY step",
        ),
        Example(
            "In what order were the first samples handed over?",
            "SELECT step, place, sample_index, trace_id, reward FROM samples ORDER BY step, place LIMIT 10",
        ),
    ),
    "errors": (
        Example(
            "Which errors come up, and in how many traces?",
            "SELECT type, count(*) AS errors, count(DISTINCT trace_id) AS traces FROM errors\n"
            "GROUP BY type ORDER BY errors DESC, type",
        ),
        Example(
            "What did they say?",
            "SELECT step, trace_id, type, message FROM errors ORDER BY step, trace_id, number LIMIT 20",
        ),
    ),
}
"""Examples by view."""
