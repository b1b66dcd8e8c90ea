import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Why did the reward rise?", sql_output="native")

with app.setup:
    import marimo as mo
    import numpy as np

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
    # Why did the reward rise?

    {places.about(run, SPLIT)}
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Its parts

    The total is the sum of the named rewards, each weighted. Look for the part that carries the rise, and for one that
    begins later: a reward that was added lifts the total without anything having been learned. A curve has a gap where
    nobody scored that part.
    """)
    return


@app.cell
def _(con):
    parts = mo.sql(
        f"""
        SELECT step, name, avg(value) FILTER (isfinite(value)) AS mean, count(*) - count(value) AS unscored,
               count(*) FILTER (NOT isfinite(value)) AS not_finite
        FROM (SELECT step, unnest(map_keys(rewards)) AS name, unnest(map_values(rewards)) AS value FROM rollouts)
        GROUP BY ALL ORDER BY name, step
        """,
        output=False,
        engine=con,
    )
    return (parts,)


@app.cell
def _(parts):
    _p = plots.columns(parts)
    _ax = plots.axes("The parts of the reward", y="mean contribution")
    for _i, (_name, _of) in enumerate(plots.groups(_p, "name").items()):
        plots.line(_ax, _of["step"], _of["mean"], _name, _i)
    plots.note(_ax, f"left out: {_p['unscored'].sum():.0f} not scored, {_p['not_finite'].sum():.0f} NaN or infinite")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## What the rise is made of

    The last fifth of the steps against the first: what each part adds to the change of the mean total. The bars add up
    to the whole change. Whiskers are two standard errors; a bar within its whiskers may be chance. A part that did not
    exist in one of the two is marked: there it added nothing to the total.
    """)
    return


@app.cell
def _(con):
    # the first and the last fifth of the steps
    [(_first, _last)] = con.sql("SELECT coalesce(min(step), 0), coalesce(max(step), 0) FROM rollouts").fetchall()
    _fifth = max(1, (_last - _first + 1) // 5)
    ENDS = f"CASE WHEN step < {_first + _fifth} THEN 'first' WHEN step > {_last - _fifth} THEN 'last' END"
    [(_rollouts,)] = con.sql(f"SELECT count({ENDS}) FROM rollouts").fetchall()
    BINS = max(2, min(8, _rollouts // 32))  # of rollouts of about the same length
    return BINS, ENDS


@app.cell
def _(ENDS, con):
    shares = mo.sql(
        f"""
        WITH scored AS (SELECT *, {ENDS} AS part FROM rollouts WHERE isfinite(reward) AND part IS NOT NULL),
             sizes AS (SELECT part, count(*) AS rollouts FROM scored GROUP BY part)
        SELECT part, name, sum(value) / any_value(rollouts) AS adds, count(value) AS scored,
               sqrt(greatest(sum(value * value) / any_value(rollouts) - adds * adds, 0) / any_value(rollouts)) AS error
        FROM (SELECT part, unnest(map_keys(rewards)) AS name, unnest(map_values(rewards)) AS value FROM scored)
        JOIN sizes USING (part) GROUP BY ALL ORDER BY name, part
        """,
        output=False,
        engine=con,
    )
    return (shares,)


@app.cell
def _(shares):
    _changes = {}
    for _name, _of in plots.groups(plots.columns(shares), "name").items():
        _at = dict(zip(_of["part"], zip(_of["adds"], _of["error"], strict=True), strict=True))
        _said = _name if len(_at) == 2 else f"{_name} ({'added' if 'last' in _at else 'gone'})"
        (_a, _e), (_b, _f) = _at.get("first", (0.0, 0.0)), _at.get("last", (0.0, 0.0))
        _changes[_said] = (_b - _a, 2 * np.hypot(_e, _f))
    _changes = dict(sorted(_changes.items(), key=lambda item: -abs(item[1][0])))
    _ax = plots.axes(
        "What the change of the reward is made of",
        x="change of the mean reward, last fifth - first fifth",
        height=1.2 + 0.34 * max(2, len(_changes)),
    )
    plots.bars(
        _ax, list(_changes), [c for c, _ in _changes.values()], errors=[e for _, e in _changes.values()], signed=True
    )
    plots.note(_ax, f"together {sum(c for c, _ in _changes.values()):+.3f}")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Near the ceiling?

    Each part as a share of the most that any rollout got for it. A part near 100 % has nothing left to give: what rises
    after that comes from the others. Look for format and the like, which are learned first.
    """)
    return


@app.cell
def _(con):
    most = mo.sql(
        f"""
        SELECT name, max(value) AS most
        FROM (SELECT unnest(map_keys(rewards)) AS name, unnest(map_values(rewards)) AS value FROM rollouts)
        WHERE isfinite(value) GROUP BY name
        """,
        output=False,
        engine=con,
    )
    return (most,)


@app.cell
def _(most, parts):
    _most = dict(most.fetchall())
    _ax = plots.axes("The parts as a share of the most that was paid", y="mean / most")
    for _i, (_name, _of) in enumerate(plots.groups(plots.columns(parts), "name").items()):
        if _most.get(_name, 0.0) > 0:
            plots.line(_ax, _of["step"], _of["mean"] / _most[_name], _name, _i)
    plots.percent(_ax.yaxis)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Bought with length?

    Mean reward of rollouts of about the same length, in the first and the last fifth of the steps. Where the later curve
    lies above the earlier one, answers of the same length got better. Where both lie on each other and only the points
    moved to the right, the reward was bought with length.
    """)
    return


@app.cell
def _(BINS, ENDS, con):
    by_length = mo.sql(
        f"""
        SELECT part, bin, avg(num_sampled) AS length, avg(reward) AS reward, count(*) AS rollouts,
               2 * stddev_samp(reward) / sqrt(count(*)) AS error
        FROM (
            SELECT *, {ENDS} AS part, ntile({BINS}) OVER (PARTITION BY part ORDER BY num_sampled, trace_id) AS bin
            FROM rollouts WHERE isfinite(reward) AND num_sampled > 0
        )
        WHERE part IS NOT NULL GROUP BY ALL ORDER BY part, bin
        """,
        output=False,
        engine=con,
    )
    return (by_length,)


@app.cell
def _(BINS, by_length):
    _ax = plots.axes(
        "Reward by length", x=f"sampled tokens of a rollout (each point: 1/{BINS} of the rollouts)", y="mean reward"
    )
    for _i, (_part, _of) in enumerate(plots.groups(plots.columns(by_length), "part").items()):
        _ax.errorbar(
            _of["length"],
            _of["reward"],
            yerr=np.nan_to_num(_of["error"]),
            color=plots.COLORS[1 - _i],
            marker="os"[_i],
            ls=plots.DASHES[1 - _i],
            capsize=2,
            label=f"{_part} fifth of the steps",
        )
    plots.note(_ax, "whiskers: two standard errors")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Which way does length pull?

    Within a group only differences count: the correlation of reward and length among the rollouts of one task. Above 0
    the longer answers win and training makes answers longer, below 0 it makes them shorter, whatever was meant.
    """)
    return


@app.cell
def _(con):
    pull = mo.sql(
        f"""
        SELECT step, corr(reward - mean, num_sampled - length) AS pull
        FROM (
            SELECT step, reward, num_sampled, avg(reward) OVER same_task AS mean, avg(num_sampled) OVER same_task AS length
            FROM rollouts WHERE isfinite(reward) AND num_sampled > 0 AND group_index IS NOT NULL
            WINDOW same_task AS (PARTITION BY step, group_index)
        )
        GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (pull,)


@app.cell
def _(pull):
    _p = plots.columns(pull)
    _ax = plots.axes("Does the longer answer of a group win?", y="correlation with length", height=2.6)
    _ax.axhline(0, color=plots.GREY, linewidth=1)
    plots.line(_ax, _p["step"], _p["pull"], color=plots.PINK)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Task by task

    Mean reward of each task over time, the worst at the end on top. Look whether everything brightens or only what was
    bright before, and for tasks that darken again. Grey: not run, or not scored.
    """)
    return


@app.cell
def _(con):
    # about forty columns, each a whole number of steps
    [(_first, _last)] = con.sql("SELECT coalesce(min(step), 0), coalesce(max(step), 0) FROM rollouts").fetchall()
    WIDE = max(1, round((_last - _first + 1) / 40))
    COLUMN = f"{_first} + (step - {_first}) // {WIDE} * {WIDE}"
    return COLUMN, WIDE


@app.cell
def _(COLUMN, con):
    tasks = mo.sql(
        f"""
        SELECT of_task AS task, {COLUMN} AS step, avg(reward) AS reward
        FROM rollouts_by_task WHERE isfinite(reward) AND of_task IS NOT NULL GROUP BY ALL ORDER BY task, step
        """,
        output=False,
        engine=con,
    )
    return (tasks,)


@app.cell
def _(WIDE, tasks):
    _ax = plots.axes("Reward of each task", x="step" if WIDE == 1 else f"step ({WIDE} together)")
    plots.heat_by(_ax, plots.columns(tasks), "task", "reward", label="mean reward", wide=WIDE)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Or are the tasks others?

    The change of the mean again, last fifth against first fifth: once over everything, once over tasks that were run in
    both, each counted once. What is left comes from other tasks being run, or the same ones more or less often.
    """)
    return


@app.cell
def _(ENDS, con):
    mix = mo.sql(
        f"""
        WITH scored AS (SELECT *, {ENDS} AS part FROM rollouts_by_task WHERE isfinite(reward) AND part IS NOT NULL),
             each AS (
                 SELECT avg(reward) FILTER (part = 'last') - avg(reward) FILTER (part = 'first') AS change
                 FROM scored WHERE of_task IS NOT NULL GROUP BY of_task
             )
        SELECT avg(reward) FILTER (part = 'last') - avg(reward) FILTER (part = 'first') AS overall,
               (SELECT avg(change) FROM each) AS same_tasks, (SELECT count(change) FROM each) AS tasks
        FROM scored
        """,
        output=False,
        engine=con,
    )
    return (mix,)


@app.cell
def _(mix):
    _m = {name: values[0] for name, values in plots.columns(mix).items()}
    _ax = plots.axes(
        "The change, and the change on the same tasks",
        x="change of the mean reward, last fifth - first fifth",
        height=1.9,
    )
    _names = ["over everything", f"on the same tasks ({_m['tasks']:.0f})", "the rest: other tasks"]
    plots.bars(
        _ax, _names, [_m["overall"], _m["same_tasks"], _m["overall"] - _m["same_tasks"]], color=plots.GREEN, signed=True
    )
    plots.done(_ax)
    return


if __name__ == "__main__":
    app.run()
