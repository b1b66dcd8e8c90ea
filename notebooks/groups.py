import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Groups and signal", sql_output="native")

with app.setup:
    import marimo as mo
    import numpy as np

    from rolltape.notebooks import places, plots
    from rolltape.replay import open_run
    from rolltape.replay.sql import connect
    from rolltape.replay.stats import pass_at


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
    return con, run


@app.cell(hide_code=True)
def _(SPLIT, run):
    mo.md(f"""
    # Groups and signal

    {places.about(run, SPLIT)}

    A group is the rollouts of one task in one step. Training compares them with each other, so a group in which all got
    the same reward teaches nothing.
    """)
    return


@app.cell
def _():
    PASSED = "CAST(reward AS FLOAT) >= 1"  # what counts as passed, in SQL; or: rewards['correct'] >= 1
    return (PASSED,)


@app.cell
def _(PASSED, con):
    # A row a group, of scored rollouts only: null, NaN and infinity are in no count here.
    # Rewards are compared as a trainer sees them, as float32.
    GROUPS = f"""(
        SELECT step, group_index, count(*) AS scored, count(*) FILTER ({PASSED}) AS passed, stddev_pop(reward) AS spread,
               min(CAST(reward AS FLOAT)) = max(CAST(reward AS FLOAT)) AS flat
        FROM rollouts WHERE isfinite(reward) AND group_index IS NOT NULL GROUP BY step, group_index
    )"""
    scored = con.sql(f"FROM {GROUPS} ORDER BY step, group_index").to_arrow_table()
    return GROUPS, scored


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Which groups carry a signal?

    Look for colours that grow. `none passed`: too hard, at least for so few rollouts. `all passed`: learned, and no longer
    worth sampling. Both cost as much to sample as a group that teaches.
    """)
    return


@app.cell
def _(GROUPS, con):
    signal = mo.sql(
        f"""
        SELECT step, count(*) AS groups,
               CASE WHEN scored < 2 THEN 'fewer than two scored' WHEN NOT flat THEN 'rewards differ'
                    WHEN passed = scored THEN 'all equal, all passed' WHEN passed = 0 THEN 'all equal, none passed'
                    ELSE 'all equal' END AS signal
        FROM {GROUPS} GROUP BY ALL ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (signal,)


@app.cell
def _(signal):
    _s = plots.columns(signal)
    _ax = plots.axes("Signal of the groups", y="groups")
    plots.stack_by(_ax, _s, "signal", "groups", first=("rewards differ",), faint=("rewards differ",))
    _flat = sum(n for said, n in zip(_s["signal"], _s["groups"], strict=True) if said.startswith("all equal"))
    plots.note(_ax, f"{_flat:.0f} of {_s['groups'].sum():.0f} groups carry no signal")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## How many of a group pass?

    Groups by how many of their rollouts passed; only those of the usual size, so that counts compare. Most is learned
    from the middle. Mass that stays at the bottom is out of reach; mass that gathers on top is done.
    """)
    return


@app.cell
def _(scored):
    # about forty columns, each a whole number of steps
    _steps = scored.column("step").to_numpy() if scored.num_rows else np.zeros(1, int)
    WIDE = max(1, round((_steps.max() - _steps.min() + 1) / 40))
    COLUMN = f"{_steps.min()} + (step - {_steps.min()}) // {WIDE} * {WIDE}"
    SIZE = int(np.bincount(scored.column("scored").to_numpy()).argmax()) if scored.num_rows else 0
    return COLUMN, SIZE, WIDE


@app.cell
def _(COLUMN, GROUPS, SIZE, con):
    passes = mo.sql(
        f"""
        SELECT step, passed, count(*) / sum(count(*)) OVER (PARTITION BY step) AS share
        FROM (SELECT {COLUMN} AS step, passed FROM {GROUPS} WHERE scored = {SIZE}) GROUP BY step, passed ORDER BY ALL
        """,
        output=False,
        engine=con,
    )
    return (passes,)


@app.cell
def _(SIZE, WIDE, passes):
    _p = plots.columns(passes)
    _ax = plots.axes(
        f"How many of {SIZE} rollouts pass",
        x="step" if WIDE == 1 else f"step ({WIDE} together)",
        y="passed",
        height=3.4,
    )
    if len(_p["step"]):
        _steps = np.arange(_p["step"].min(), _p["step"].max() + WIDE, WIDE)
        _grid = np.full((SIZE + 1, len(_steps)), np.nan)
        _columns = ((_p["step"] - _steps[0]) // WIDE).astype(int)
        _grid[:, np.unique(_columns)] = 0.0  # groups were counted in these steps, and none of the others
        _grid[_p["passed"].astype(int), _columns] = _p["share"]
        plots.heat(
            _ax, _steps.tolist(), [str(n) for n in range(SIZE + 1)], _grid, "share of groups", wide=WIDE, upwards=True
        )
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## pass@k

    The chance that at least one of k rollouts passes: the unbiased estimate of each group, 1 - C(n-c, k) / C(n, k) with c
    of n passed, averaged over groups of at least k. Look at the room between the curves: pass@1 that catches up with
    pass@k means the policy finds more surely what it found before, not more than before.
    """)
    return


@app.cell
def _(SIZE, scored):
    _step, _n, _c = (scored.column(name).to_numpy() for name in ("step", "scored", "passed"))
    _ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= SIZE]
    _ax = plots.axes("pass@k", y="share of groups")
    for _i, _k in enumerate(_ks):
        _steps = np.unique(_step[_n >= _k])
        _at = [pass_at(_k, _n[_step == s], _c[_step == s]) for s in _steps]
        plots.line(_ax, _steps, _at, f"pass@{_k}", color=plots.shade(_i, len(_ks)), linestyle="-")
    plots.percent(_ax.yaxis)
    plots.done(_ax, reverse=True)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## How far apart are the rewards of a group?

    The standard deviation of the reward inside a group: its mean over groups, and where the middle 80 % of them lie. Where
    it falls to 0, advantages are noise divided by nearly nothing.
    """)
    return


@app.cell
def _(GROUPS, con):
    spread = mo.sql(
        f"""
        SELECT step, avg(spread) AS mean, quantile_cont(spread, 0.1) AS low, quantile_cont(spread, 0.9) AS high
        FROM {GROUPS} WHERE scored >= 2 GROUP BY step ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (spread,)


@app.cell
def _(spread):
    _s = plots.columns(spread)
    _ax = plots.axes("Spread inside a group", y="standard deviation of the reward")
    plots.band(_ax, _s["step"], _s["low"], _s["high"], "middle 80 % of groups")
    plots.line(_ax, _s["step"], _s["mean"], "mean")
    _ax.set_ylim(bottom=0)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Reward sums

    What each reward paid to a group in all, as the live run recorded it; a group has a sum where every rollout was
    scored. A race that pays the same sum to every group (one winner, or a rank) must show as a straight line: it cannot
    lift the mean reward, it only decides who gets it.
    """)
    return


@app.cell
def _(con):
    sums = mo.sql(
        f"""
        SELECT step, e.key AS name, avg(e.value) AS mean, min(e.value) AS least, max(e.value) AS most,
               count(e.value) AS groups, count(*) - count(e.value) AS incomplete
        FROM (SELECT step, unnest(map_entries(reward_sums)) AS e FROM groups)
        WHERE e.value IS NULL OR isfinite(e.value) GROUP BY ALL ORDER BY name, step
        """,
        output=False,
        engine=con,
    )
    return (sums,)


@app.cell
def _(sums):
    _s = plots.columns(sums)
    _ax = plots.axes("What a reward pays to a group", y="mean sum of a group")
    for _i, (_name, _of) in enumerate(plots.groups(_s, "name").items()):
        plots.line(_ax, _of["step"], _of["mean"], _name, _i)
    plots.note(
        _ax, f"{_s['groups'].sum():.0f} sums; {_s['incomplete'].sum():.0f} left out, for not every rollout was scored"
    )
    plots.done(_ax)
    return


@app.cell
def _(con):
    sums_by_name = con.sql("""
        SELECT e.key AS name, count(e.value) AS groups, count(*) - count(e.value) AS incomplete,
               min(e.value) FILTER (isfinite(e.value)) AS least, avg(e.value) FILTER (isfinite(e.value)) AS mean,
               max(e.value) FILTER (isfinite(e.value)) AS most, count(*) FILTER (NOT isfinite(e.value)) AS "NaN or infinite"
        FROM (SELECT unnest(map_entries(reward_sums)) AS e FROM groups) GROUP BY name ORDER BY name
    """)
    plots.table(plots.columns(sums_by_name))
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Short groups

    Groups with fewer sound rollouts than were asked for, by how many are missing. With group rewards they cannot be
    trained at all; otherwise `min_group_size` says from which size on they may.
    """)
    return


@app.cell
def _(con):
    sizes = mo.sql(
        f"""
        SELECT step, count(*) AS groups,
               CASE WHEN missing <= 0 THEN 'full' WHEN missing <= 2 THEN missing || ' missing' ELSE '3 or more' END AS missing
        FROM (
            SELECT step, expected_size - coalesce(sound, 0) AS missing
            FROM groups LEFT JOIN (SELECT step, group_index, count(*) AS sound FROM rollouts GROUP BY ALL)
            USING (step, group_index)
        )
        GROUP BY ALL ORDER BY step
        """,
        output=False,
        engine=con,
    )
    return (sizes,)


@app.cell
def _(sizes):
    _ax = plots.axes("Rollouts that are missing from a group", y="groups", height=2.6)
    plots.stack_by(
        _ax,
        plots.columns(sizes),
        "missing",
        "groups",
        first=("full", "1 missing", "2 missing", "3 or more"),
        faint=("full",),
    )
    plots.done(_ax)
    return


if __name__ == "__main__":
    app.run()
