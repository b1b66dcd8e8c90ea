import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Compare two runs", sql_output="native")

with app.setup:
    import marimo as mo
    import numpy as np

    from rolltape.notebooks import places, plots
    from rolltape.replay import open_run
    from rolltape.replay.diff import Diff
    from rolltape.replay.diff_side import read_side
    from rolltape.replay.sql import connect
    from rolltape.replay.sql.source import labelled


@app.cell
def _():
    A, B = places.two()  # folders or URLs; `-- --run A --run B` gives them, else they are two demo runs
    SPLIT = places.split()
    return A, B, SPLIT


@app.cell
def _(A, B, SPLIT):
    runs = open_run(A), open_run(B)
    sides = [read_side(run, SPLIT) for run in runs]
    diff = Diff(*sides)  # what `rolltape diff A B` prints
    con = connect(runs, split=SPLIT)  # the views of both, told apart by the column run
    _ = con.execute("""
        CREATE TEMP VIEW rollouts AS FROM traces
        WHERE coalesce(disposition NOT IN ('retried', 'cancelled'), true) AND coalesce(len(error_types), 0) = 0
    """)
    NAMES = list(labelled(runs))  # what the column run calls A and B: as much of a path as tells the two apart
    return NAMES, con, diff, runs


@app.cell(hide_code=True)
def _(SPLIT, diff, runs):
    mo.md(f"""
    # Compare two runs

    **A** {places.about(runs[0], SPLIT)}

    **B** {places.about(runs[1], SPLIT)}

    {"".join(f"- {places.code(note)}" + chr(10) for note in diff.notes)}
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## What is set otherwise?

    Settings that differ, every value that each run had. Look here first: a difference below that one of them explains
    needs no other explanation.
    """)
    return


@app.cell
def _(diff):
    plots.table(
        {
            "setting": diff.settings,
            "A": (", ".join(a) or None for a, _ in diff.settings.values()),
            "B": (", ".join(b) or None for _, b in diff.settings.values()),
        },
        most=40,
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Reward, step by step

    The mean over rollouts that were scored. Look where the curves part, and whether they part for good. Steps that only
    one run has are drawn for that one.
    """)
    return


@app.cell
def _(con):
    by_step = mo.sql(
        f"""
        SELECT run, step, avg(reward) FILTER (isfinite(reward)) AS reward, avg(num_sampled) FILTER (num_sampled > 0) AS length,
               avg(CAST(is_truncated AS INTEGER)) AS cut, count(*) - count(reward) AS unscored,
               count(*) FILTER (NOT isfinite(reward)) AS not_finite
        FROM rollouts GROUP BY ALL ORDER BY run, step
        """,
        output=False,
        engine=con,
    )
    return (by_step,)


@app.cell
def _(NAMES, by_step):
    _s = plots.columns(by_step)
    _ax = plots.axes("Reward", y="mean reward of a rollout")
    for _i, (_letter, _run) in enumerate(zip("AB", NAMES, strict=True)):
        _mine = _s["run"] == _run
        plots.line(_ax, _s["step"][_mine], _s["reward"][_mine], f"{_letter}: {_run}", _i)
    plots.note(_ax, f"left out: {_s['unscored'].sum():.0f} not scored, {_s['not_finite'].sum():.0f} NaN or infinite")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Length, step by step

    Sampled tokens of a rollout, the mean. A run that gets the same reward with fewer tokens is the better one.
    """)
    return


@app.cell
def _(NAMES, by_step):
    _ax = plots.axes("Length", y="sampled tokens of a rollout")
    _s = plots.columns(by_step)
    for _i, (_letter, _run) in enumerate(zip("AB", NAMES, strict=True)):
        _mine = _s["run"] == _run
        plots.line(_ax, _s["step"][_mine], _s["length"][_mine], f"{_letter}: {_run}", _i)
    _ax.set_ylim(bottom=0)
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## What the rewards differ in

    B minus A over all rollouts: the total, and each named reward. Whiskers are two standard errors. A reward that only one
    run knows cannot be compared, and is named below.
    """)
    return


@app.cell
def _(diff):
    _rewards = {name: c for name, c in diff.quantities.items() if name == "reward" or name.startswith("rewards.")}
    _both = {name.removeprefix("rewards."): c for name, c in _rewards.items() if c.change is not None}
    _one = [name.removeprefix("rewards.") for name, c in _rewards.items() if c.change is None]
    _ax = plots.axes("Rewards, B - A", x="change of the mean", height=1.2 + 0.34 * max(2, len(_both)))
    _errors = [np.nan if c.se is None else 2 * c.se for c in _both.values()]
    plots.bars(
        _ax,
        ["total" if n == "reward" else n for n in _both],
        [c.change for c in _both.values()],
        errors=_errors,
        signed=True,
    )
    if _one:
        plots.note(_ax, f"values in one run only, or in none: {', '.join(_one)}")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Everything else

    Means over rollouts; `change` is B - A with its standard error, `same tasks` the mean change over tasks of both, each
    counted once. Trust `same tasks` where the runs did not see the same ones equally often.
    """)
    return


@app.cell
def _(diff):
    _rows = [
        (n, c, diff.paired(n) if n not in ("emitted_rate", "lost_rate") else None) for n, c in diff.quantities.items()
    ]
    plots.table(
        {
            "quantity": (n for n, _, _ in _rows),
            "A": (c.a.mean for _, c, _ in _rows),
            "B": (c.b.mean for _, c, _ in _rows),
            "change": (c.change for _, c, _ in _rows),
            "standard error": (c.se for _, c, _ in _rows),
            "same tasks": (None if p is None else p.change for _, _, p in _rows),
            "no value in A": (c.a.unscored + c.a.not_finite for _, c, _ in _rows),
            "no value in B": (c.b.unscored + c.b.not_finite for _, c, _ in _rows),
        },
        most=60,
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Task by task

    Each point is a task that both runs have. Above the line it went better in B. A cloud that moved as a whole is another
    policy; a few points far from the line are tasks worth reading, and the next picture names them.
    """)
    return


@app.cell
def _(diff):
    _rows = [r for r in diff.tasks.rows if r.changes["reward"].change is not None]
    _a, _b = ([getattr(r.changes["reward"], side).mean for r in _rows] for side in "ab")
    _ax = plots.axes("Mean reward of each task", x="mean reward in A", y="mean reward in B", height=4.6, width=5.6)
    if _rows:
        _low, _high = min(_a + _b), max(_a + _b)
        _ax.plot([_low, _high], [_low, _high], color=plots.GREY, linewidth=1)
        _ax.scatter(_a, _b, color=plots.BLUE, alpha=0.7, s=24, edgecolors="none")
        _ax.set_aspect("equal", adjustable="datalim")
    plots.note(_ax, f"{len(_rows)} tasks; only in A: {len(diff.tasks.only_a)}, only in B: {len(diff.tasks.only_b)}")
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## The tasks that changed most

    B minus A, the largest changes on top, with two standard errors. `rolltape diff A B --by task` prints them all.
    """)
    return


@app.cell
def _(diff):
    _rows = diff.tasks.by_size("reward")[:15]
    _changes = [r.changes["reward"] for r in _rows]
    _ax = plots.axes(
        "Tasks that changed most, B - A", x="change of the mean reward", height=1.2 + 0.26 * max(3, len(_rows))
    )
    _errors = [np.nan if c.se is None else 2 * c.se for c in _changes]
    plots.bars(
        _ax, [r.name for r in _rows], [c.change for c in _changes], errors=_errors, color=plots.GREEN, signed=True
    )
    plots.done(_ax)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## What became of the tries

    Shares of the tries that were started. What one run loses and the other does not, it cannot learn from.
    """)
    return


@app.cell
def _(diff):
    _all = diff.coverage["started"]
    _kinds = [k for k, n in diff.coverage.items() if k != "started" and any(n)]
    _ax = plots.axes(
        "What became of the tries", x="share of the tries started", height=1.2 + 0.42 * max(2, len(_kinds))
    )
    for _i, _letter in enumerate("AB"):
        _shares = [diff.coverage[k][_i] / _all[_i] if _all[_i] else np.nan for k in _kinds]
        plots.beside(_ax, _kinds, _shares, _letter, _i, of=2)
    plots.percent(_ax.xaxis)
    plots.done(_ax)
    return


if __name__ == "__main__":
    app.run()
