import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Look at a run", sql_output="native")

with app.setup:
    import marimo as mo

    from rolltape.notebooks import places, plots
    from rolltape.notebooks.tasks import add_task
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
    add_task(con)  # rollouts_by_task: with a column that says which task, by the rule of `rolltape stats --by task`
    return con, run


@app.cell(hide_code=True)
def _(SPLIT, run):
    mo.md(f"""
    # Look at a run

    {places.about(run, SPLIT)}
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## What became of the tries

    Every try is a row, failed ones too. Look for colours that grow: one bad rollout (`error`, `failed_check`) costs its
    whole group (`incomplete_group`), so a few errors may cost many rollouts.
    """)
    return


@app.cell
def _(con):
    fates = mo.sql(
        f"""
        SELECT step, coalesce(disposition, 'not known') AS became, count(*) AS tries
        FROM traces GROUP BY ALL ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (fates,)


@app.cell
def _(fates):
    _ax = plots.axes("What became of the tries", y="tries")
    plots.stack_by(_ax, plots.columns(fates), "became", "tries", first=("emitted", "eval"), faint=("emitted", "eval"))
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Reward

    The mean over rollouts, and the room in which the middle 80 % of them lie. Look for a mean that rises while the
    spread stays: where the room closes, groups have nothing left to compare.
    """)
    return


@app.cell
def _(con):
    reward_by_step = mo.sql(
        f"""
        SELECT step, avg(reward) FILTER (isfinite(reward)) AS mean,
               quantile_cont(reward, 0.1) FILTER (isfinite(reward)) AS low,
               quantile_cont(reward, 0.9) FILTER (isfinite(reward)) AS high,
               count(*) - count(reward) AS unscored, count(*) FILTER (NOT isfinite(reward)) AS not_finite
        FROM rollouts GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (reward_by_step,)


@app.cell
def _(reward_by_step):
    _r = plots.columns(reward_by_step)
    _ax = plots.axes("Reward", y="reward of a rollout")
    plots.band(_ax, _r["step"], _r["low"], _r["high"], "middle 80 %")
    plots.line(_ax, _r["step"], _r["mean"], "mean")
    plots.note(_ax, f"left out: {_r['unscored'].sum():.0f} not scored, {_r['not_finite'].sum():.0f} NaN or infinite")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Length

    Tokens the model sampled in a rollout. Look for a long tail that runs away from the middle: it decides how long a
    step takes, and it is cut off first.
    """)
    return


@app.cell
def _(con):
    lengths = mo.sql(
        f"""
        SELECT step, quantile_cont(num_sampled, 0.5) AS median, quantile_cont(num_sampled, 0.95) AS p95,
               max(num_sampled) AS longest
        FROM rollouts WHERE num_sampled > 0 GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (lengths,)


@app.cell
def _(lengths):
    _n = plots.columns(lengths)
    _ax = plots.axes("Length of a rollout", y="sampled tokens")
    for _i, _name in enumerate(("longest", "p95", "median")):
        plots.line(_ax, _n["step"], _n[_name], {"p95": "95th percentile"}.get(_name, _name), 2 - _i)
    _ax.set_ylim(bottom=0)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Cut off

    The share of rollouts that ended at a limit. Look at it together with length: a limit that more and more answers
    reach teaches the policy to be short, whatever the reward says.
    """)
    return


@app.cell
def _(con):
    cut = mo.sql(
        f"""
        SELECT step, avg(CAST(is_truncated AS INTEGER)) AS share, count(*) - count(is_truncated) AS unknown
        FROM rollouts GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (cut,)


@app.cell
def _(cut):
    _c = plots.columns(cut)
    _ax = plots.axes("Rollouts that were cut off", y="share of rollouts", height=2.4)
    plots.line(_ax, _c["step"], _c["share"], color=plots.RED)
    plots.percent(_ax.yaxis)
    _ax.set_ylim(bottom=0)
    plots.note(_ax, f"not known of {_c['unknown'].sum():.0f} rollouts")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Errors

    Errors by class; a try that was run again counts too. Look for bursts (something was down) and for a level that
    stays (something is wrong).
    """)
    return


@app.cell
def _(con):
    failures = mo.sql(
        f"""
        SELECT step, type, count(e.trace_id) AS errors
        FROM (SELECT DISTINCT step FROM traces) LEFT JOIN errors e USING (step) GROUP BY ALL ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (failures,)


@app.cell
def _(failures):
    _e = plots.columns(failures)
    _ax = plots.axes("Errors", y="errors", height=2.4)
    if _e["errors"].sum():
        plots.stack_by(_ax, _e, "type", "errors")
    else:
        plots.empty(_ax, "no errors")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Speed

    Sampled tokens by the time from the start of a step to its end. Look for steps that fall out: retries, a lost
    engine, a few endless rollouts.
    """)
    return


@app.cell
def _(con):
    speed = mo.sql(
        f"""
        SELECT step, sum(sampled_tokens) / (max(ended_at) - min(started_at)) AS per_second
        FROM steps GROUP BY step
        HAVING count(*) = count(started_at) AND count(*) = count(ended_at) AND count(*) = count(sampled_tokens)
        ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (speed,)


@app.cell
def _(speed):
    _s = plots.columns(speed)
    _ax = plots.axes("Speed", y="sampled tokens per second", height=2.4)
    plots.line(_ax, _s["step"], _s["per_second"], color=plots.GREEN)
    _ax.set_ylim(bottom=0)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Which tasks still fail?

    Mean reward of the lowest tasks over the last quarter of the steps. Look for what they have in common; a task that
    nobody solves teaches nothing, one that half of the rollouts solve teaches most.
    """)
    return


@app.cell
def _(con):
    lowest = mo.sql(
        f"""
        SELECT of_task AS task, avg(reward) AS reward, count(reward) AS rollouts
        FROM rollouts_by_task, (SELECT max(step) - (max(step) - min(step)) // 4 AS first FROM rollouts)
        WHERE step >= first AND isfinite(reward) AND of_task IS NOT NULL GROUP BY ALL ORDER BY reward, task LIMIT 15
        """,
        output=False,
        engine=con,
    )
    return (lowest,)


@app.cell
def _(lowest):
    _t = plots.columns(lowest)
    _ax = plots.axes(
        "The lowest tasks, last quarter of the steps", x="mean reward", height=1.2 + 0.24 * max(len(_t["task"]), 3)
    )
    plots.bars(_ax, [f"{task} ({n:.0f})" for task, n in zip(_t["task"], _t["rollouts"], strict=True)], _t["reward"])
    plots.note(_ax, "in brackets: scored rollouts")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Read one

    A number says that something changed, a conversation says what. The rollouts of the last step, the lowest reward
    first. `rolltape show` prints more of each.
    """)
    return


@app.cell
def _(con):
    _last = con.sql("""
        SELECT trace_id, of_task, reward, num_sampled FROM rollouts_by_task
        WHERE step = (SELECT max(step) FROM rollouts) ORDER BY reward NULLS FIRST, trace_id LIMIT 200
    """).fetchall()
    _said = {f"{task} · reward {reward} · {n} tokens · {id}": id for id, task, reward, n in _last}
    trace = mo.ui.dropdown(_said, value=next(iter(_said), None), label="rollout", searchable=True)
    trace
    return (trace,)


@app.cell
def _(con, trace):
    _nodes = con.execute(
        "SELECT role, reasoning, content, tool_calls FROM nodes WHERE trace_id = ? ORDER BY step, node", [trace.value]
    ).fetchall()
    plots.conversation(_nodes)
    return


if __name__ == "__main__":
    app.run()
