import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Log-probs and drift", sql_output="native")

with app.setup:
    import marimo as mo
    import numpy as np

    from rolltape.notebooks import places, plots
    from rolltape.replay import open_run
    from rolltape.replay.sql import connect


@app.cell
def _():
    RUN = places.one()  # a folder or URL; `-- --run FOLDER` gives it, else it is a demo run
    SPLIT = places.split()
    return RUN, SPLIT


@app.cell
def _(RUN, SPLIT):
    run = open_run(RUN)
    con = connect(run, split=SPLIT)  # the views that `rolltape sql --schema` prints
    # what came to its end: the last try of a rollout, without an error
    _ = con.execute("""
        CREATE TEMP VIEW rollouts AS FROM traces
        WHERE coalesce(disposition NOT IN ('retried', 'cancelled'), true) AND coalesce(len(error_types), 0) = 0
    """)
    # questions about single tokens read every EVERYth step, so that they read about 20 million tokens at most
    [(_first, _last, _tokens)] = con.sql("""
        SELECT coalesce(min(step), 0), coalesce(max(step), 0), coalesce(sum(num_sampled), 0) FROM rollouts
    """).fetchall()
    EVERY = max(1, -(-int(_tokens) // 20_000_000))
    _ = con.execute(f"CREATE TEMP VIEW chosen AS FROM rollouts WHERE (step - {_first}) % {EVERY} = 0")
    # the first and the last fifth of the steps
    _fifth = max(1, (_last - _first + 1) // 5)
    ENDS = f"CASE WHEN step < {_first + _fifth} THEN 'first' WHEN step > {_last - _fifth} THEN 'last' END"
    return ENDS, EVERY, con, run


@app.cell(hide_code=True)
def _(SPLIT, run):
    mo.md(f"""
    # Log-probs and drift

    {places.about(run, SPLIT)}
    """)
    return


@app.cell(hide_code=True)
def _(EVERY):
    mo.md(f"""
    ## How sure is the policy?

    Minus the log-prob of a sampled token, averaged: an estimate of the policy's entropy at the temperature it sampled
    with. Look for a slow fall, which is learning, and for a collapse towards 0, after which all rollouts of a group are
    alike. A sudden rise often is the first sign of a run that falls apart.
    {"" if EVERY == 1 else f"Of every {EVERY}th step."}
    """)
    return


@app.cell
def _(con):
    surprise = mo.sql(
        f"""
        SELECT step, sum(list_sum(logprobs)) / -sum(list_count(logprobs)) AS mean,
               quantile_cont(-list_avg(logprobs), 0.1) AS low, quantile_cont(-list_avg(logprobs), 0.9) AS high,
               coalesce(sum(num_sampled - list_count(logprobs)), 0) AS without,
               coalesce(sum(num_sampled) FILTER (logprobs IS NULL), 0) AS pruned
        FROM chosen GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (surprise,)


@app.cell
def _(surprise):
    _s = plots.columns(surprise)
    _ax = plots.axes("Entropy, estimated", y="nats a sampled token")
    plots.band(_ax, _s["step"], _s["low"], _s["high"], "middle 80 % of rollouts")
    plots.line(_ax, _s["step"], _s["mean"], "mean over tokens")
    _ax.set_ylim(bottom=0)
    _gone = f", {_s['pruned'].sum():,.0f} whose log-probs were pruned" if _s["pruned"].any() else ""
    plots.note(_ax, f"left out: {_s['without'].sum():,.0f} sampled tokens without a log-prob{_gone}")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Where do log-probs lie?

    Sampled tokens by their log-prob, in the first and the last fifth of the steps; each mark on the left axis is ten
    times the one below. Look at the tail on the left: unlikely tokens that do not get rarer as the policy gets surer come
    from sampling (temperature, a rewritten template), or from weights that are not those that are trained.
    """)
    return


@app.cell
def _(ENDS, con):
    spread = mo.sql(
        f"""
        SELECT part, greatest(-16, least(-0.5, floor(logprob * 2) / 2)) AS low, count(*) AS tokens
        FROM (SELECT {ENDS} AS part, unnest(logprobs) AS logprob FROM chosen)
        WHERE part IS NOT NULL AND isfinite(logprob) GROUP BY ALL ORDER BY ALL
        """,
        output=False,
        engine=con,
    )
    return (spread,)


@app.cell
def _(spread):
    _ax = plots.axes(
        "Log-probs of sampled tokens", x="log-prob [nats]; the leftmost bin holds everything below", y="share of tokens"
    )
    for _i, (_part, _of) in enumerate(plots.groups(plots.columns(spread), "part").items()):
        _shares = np.full(32, np.nan)
        _shares[((_of["low"] + 16) * 2).astype(int)] = _of["tokens"] / _of["tokens"].sum()
        _ax.step(
            np.arange(-16, 0, 0.5) + 0.25,
            _shares,
            where="mid",
            color=plots.COLORS[1 - _i],
            ls=plots.DASHES[1 - _i],
            label=f"{_part} fifth of the steps",
        )
    plots.logarithmic(_ax, shares=True)
    for _p in (0.1, 0.01, 0.001, 0.0001) if _ax.lines else ():
        _ax.axvline(np.log(_p), color=plots.FAINT, linewidth=1, zorder=0)
        _ax.text(np.log(_p), 0.99, f" {100 * _p:g} %", transform=_ax.get_xaxis_transform(), va="top", color=plots.GREY)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Certain and unlikely tokens

    Tokens that were sampled with a probability above 99 %, and below 1 %. The first is what entropy is lost to. The
    second should be rare and steady: it is what importance ratios blow up on.
    """)
    return


@app.cell
def _(con):
    extremes = mo.sql(
        f"""
        SELECT step, count(*) FILTER (logprob > ln(0.99)) / count(*) AS certain,
               count(*) FILTER (logprob < ln(0.01)) / count(*) AS unlikely
        FROM (SELECT step, unnest(logprobs) AS logprob FROM chosen) WHERE isfinite(logprob) GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (extremes,)


@app.cell
def _(extremes):
    _e = plots.columns(extremes)
    _ax = plots.axes("Certain and unlikely tokens", y="share of sampled tokens")
    plots.line(_ax, _e["step"], _e["certain"], "probability > 99 %", 0)
    plots.line(_ax, _e["step"], _e["unlikely"], "probability < 1 %", 3)
    plots.logarithmic(_ax, shares=True)
    plots.note(
        _ax, f"{(_e['unlikely'] == 0).sum()} steps have no token below 1 %; a logarithmic axis has no place for 0"
    )
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## How old are the weights that sampled?

    Turns by the number of weight versions that they are behind the newest of their step. Look for colours that grow: the
    trainer runs ahead of the engines, or an engine missed an update.
    """)
    return


@app.cell
def _(con):
    ages = mo.sql(
        f"""
        WITH numbered AS (SELECT step, try_cast(weight_version AS BIGINT) AS version FROM turns),
             aged AS (SELECT step, max(version) OVER (PARTITION BY step) - version AS behind FROM numbered)
        SELECT step, count(*) AS turns,
               CASE WHEN behind IS NULL THEN 'not known' WHEN behind >= 4 THEN '4 or more'
                    ELSE CAST(behind AS VARCHAR) END AS behind
        FROM aged GROUP BY ALL ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (ages,)


@app.cell
def _(ages):
    _ax = plots.axes("Weight versions behind the newest of the step", y="share of turns")
    plots.stack_by(
        _ax,
        plots.columns(ages),
        "behind",
        "turns",
        first=("0", "1", "2", "3", "4 or more", "not known"),
        faint=("0",),
        shares=True,
    )
    plots.done(_ax, "versions behind")
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Rollouts of several weights

    The share of rollouts whose turns come from more than one weight version. Their log-probs are those of a policy that
    never was one: nothing is wrong with that, as long as the trainer corrects for it.
    """)
    return


@app.cell
def _(con):
    mixed = mo.sql(
        f"""
        SELECT step, avg(CAST(len(list_distinct(turn_weight_version)) > 1 AS INTEGER)) AS share
        FROM rollouts WHERE list_count(turn_weight_version) > 0 GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (mixed,)


@app.cell
def _(mixed):
    _m = plots.columns(mixed)
    _ax = plots.axes("Rollouts of more than one weight version", y="share of rollouts", height=2.4)
    plots.line(_ax, _m["step"], _m["share"], color=plots.ORANGE)
    plots.percent(_ax.yaxis)
    _ax.set_ylim(bottom=0)
    plots.done(_ax)
    return


@app.cell
def _(con):
    # log-probs of the same tokens from elsewhere: those that the trainer recomputed, and annotations (`rolltape annotate`)
    SOURCES = {}
    [(_recomputed,)] = con.sql("SELECT count(recomputed_logprobs) FROM chosen").fetchall()
    if _recomputed:
        # over the response, from the first sampled token on; of traces with one branch, where that is the whole rest
        SOURCES["recomputed by the trainer"] = """
            SELECT step, trace_id, unnest(logprobs[first:]) AS recorded, unnest(recomputed_logprobs) AS other
            FROM (SELECT *, list_position(sampled, true) AS first FROM chosen)
            WHERE num_branches = 1 AND len(recomputed_logprobs) = num_tokens - first + 1
        """
    _annotated = con.sql("""
        SELECT table_name, column_name, data_type LIKE '%[]' FROM duckdb_columns()
        WHERE table_name LIKE 'annotation_%' AND data_type IN ('FLOAT', 'DOUBLE', 'FLOAT[]', 'DOUBLE[]')
          AND concat(table_name, column_name) ILIKE '%log%prob%' ORDER BY ALL
    """).fetchall()
    for _view, _name, _is_list in _annotated:
        _column = _name.replace('"', '""')
        _list = f"""
            SELECT chosen.step, trace_id, unnest(chosen.logprobs) AS recorded, unnest(a."{_column}") AS other
            FROM chosen JOIN {_view} a USING (run, trace_id)
        """
        _token = f"""
            SELECT tokens.step, trace_id, tokens.logprob AS recorded, a."{_column}" AS other
            FROM tokens JOIN {_view} a USING (run, trace_id, position) WHERE trace_id IN (SELECT trace_id FROM chosen)
        """
        SOURCES[f"{_view}.{_name}"] = _list if _is_list else _token
    source = mo.ui.dropdown(
        list(SOURCES), value=next(iter(SOURCES), None), label="compared with the recorded log-probs"
    )
    source
    return SOURCES, source


@app.cell(hide_code=True)
def _(source):
    mo.md(f"""
    ## Does the trainer see the same log-probs?

    {
        f"Log-probs {places.code(source.value)} minus the recorded ones, token by token."
        if source.value
        else "This run holds no other log-probs than those it was sampled with: the trainer recomputed none, and no "
        "annotation has any (`rolltape annotate` adds some). The pictures from here on stay empty."
    }
    The same weights should give differences of a few hundredths around 0. A mean off 0 is something systematic: other
    weights, another temperature, other token ids. A room that opens is drift.
    """)
    return


@app.cell
def _(SOURCES, source):
    _none = "SELECT 0 AS step, '' AS trace_id, 0.0 AS recorded, 0.0 AS other WHERE false"
    PAIRS = f"""(
        SELECT step, trace_id, CAST(other AS DOUBLE) - recorded AS difference
        FROM ({SOURCES.get(source.value, _none)}) WHERE isfinite(recorded) AND isfinite(other)
    )"""
    return (PAIRS,)


@app.cell
def _(PAIRS, con):
    differences = mo.sql(
        f"""
        SELECT step, avg(difference) AS mean,
               quantile_cont(difference, 0.01) AS low, quantile_cont(difference, 0.99) AS high,
               avg(exp(difference) - 1 - difference) AS k3, count(*) AS tokens, count(DISTINCT trace_id) AS traces
        FROM {PAIRS} GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (differences,)


@app.cell
def _(differences, source):
    _d = plots.columns(differences)
    _ax = plots.axes("Other log-probs minus recorded ones", y="nats a token")
    if len(_d["step"]):
        _ax.axhline(0, color=plots.GREY, linewidth=1)
        plots.band(_ax, _d["step"], _d["low"], _d["high"], "middle 98 % of tokens")
        plots.line(_ax, _d["step"], _d["mean"], "mean")
        plots.note(_ax, f"{source.value}: {_d['tokens'].sum():,.0f} tokens of {_d['traces'].sum():,.0f} traces")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## One number for it

    The k3 estimate of the KL divergence of the two: the mean of r - 1 - log r, with r the ratio of the other probability
    to the recorded one (Schulman 2020). 0 where both agree, and never below. Steps that stand out are worth a look with
    `rolltape show`.
    """)
    return


@app.cell
def _(differences):
    _d = plots.columns(differences)
    _ax = plots.axes("KL divergence, estimated", y="nats a token", height=2.6)
    plots.line(_ax, _d["step"], _d["k3"], color=plots.PINK)
    plots.logarithmic(_ax)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Is it the age of the weights?

    The mean size of the difference, by the number of versions that the oldest turn of a rollout is behind the newest of
    its step. Bars that grow: the drift is staleness, and fewer steps of lead would cure it. Bars that are all alike:
    look for it elsewhere, such as in kernels, precision, or temperature.
    """)
    return


@app.cell
def _(PAIRS, con):
    by_age = mo.sql(
        f"""
        WITH oldest AS (SELECT step, trace_id, min(try_cast(weight_version AS BIGINT)) AS version FROM turns GROUP BY ALL),
             newest AS (SELECT step, max(try_cast(weight_version AS BIGINT)) AS newest FROM turns GROUP BY step),
             aged AS (SELECT trace_id, newest - version AS behind FROM oldest JOIN newest USING (step))
        SELECT behind, avg(abs(difference)) AS size, count(*) AS tokens FROM {PAIRS} JOIN aged USING (trace_id)
        GROUP BY behind ORDER BY behind NULLS LAST
        """,
        output=False,
        engine=con,
    )
    return (by_age,)


@app.cell
def _(by_age):
    _b = plots.columns(by_age)
    _names = ["not known" if np.isnan(age) else f"{age:.0f} behind" for age in _b["behind"]]
    _ax = plots.axes(
        "Difference by age of the weights",
        x="mean size of the difference [nats]",
        height=1.2 + 0.3 * max(2, len(_names)),
    )
    plots.bars(
        _ax, [f"{name} ({n:,.0f})" for name, n in zip(_names, _b["tokens"], strict=True)], _b["size"], color=plots.PINK
    )
    plots.note(_ax, "in brackets: tokens")
    plots.done(_ax)
    return


if __name__ == "__main__":
    app.run()
