"""How the notebooks draw: matplotlib, with one look, colours that colour-blind eyes tell apart, and gaps for what is missing.

A value that is null or not a number is never drawn, joined over, or taken for 0. Texts from a run are drawn as they are.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import marimo as mo
import matplotlib
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

if TYPE_CHECKING:
    import duckdb

Floats = npt.NDArray[np.float64]

BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
SKY, PINK, YELLOW = "#56b4e9", "#cc79a7", "#f0e442"
COLORS = (BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW)
"""Okabe and Ito's palette."""
GREY, FAINT = "#6b6b6b", "#d9d9d9"
DASHES = ("-", "--", "-.", ":")
"""So that curves differ also where colours do not."""
MANY = 60
"""Points above which a curve is drawn with its moving mean."""

matplotlib.rcParams.update(
    {
        "font.size": 10,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "legend.frameon": False,
        "text.parse_math": False,  # a name such as cost_$ is no formula
        "savefig.dpi": 110,
        "figure.dpi": 110,
    }
)


def axes(title: str, *, x: str = "step", y: str = "", height: float = 3.0, width: float = 8.4) -> Axes:
    """Axes of a figure of their own. `x` and `y` name what is drawn, with its unit; sizes in inches."""
    found: Axes = Figure(figsize=(width, height), layout="constrained").subplots()
    found.set(title=title, xlabel=x, ylabel=y)
    if x == "step":
        found.xaxis.set_major_locator(MaxNLocator(integer=True))
    return found


def figure(ax: Axes) -> Figure:
    """The figure that axes are in."""
    found = ax.get_figure(root=True)
    assert found is not None
    return found


def columns(answer: duckdb.DuckDBPyRelation) -> dict[str, npt.NDArray[Any]]:
    """Columns of an answer by name. Numbers are float64 [rows], NaN where null; texts are objects, None where null."""
    table = answer.to_arrow_table()
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(values: pa.ChunkedArray) -> npt.NDArray[Any]:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
    if any(numeric(values.type) for numeric in kinds):
        return np.array([np.nan if v is None else float(v) for v in values.to_pylist()], np.float64)
    return np.array(values.to_pylist(), object)


def groups(found: Mapping[str, npt.NDArray[Any]], by: str) -> dict[Any, dict[str, npt.NDArray[Any]]]:
    """Rows of `found` by the value of one of its columns, in order of first appearance."""
    values = found[by].tolist()
    return {
        value: {name: column[found[by] == value] for name, column in found.items()} for value in dict.fromkeys(values)
    }


def shade(number: int, of: int) -> str:
    """One of several colours that go from dark to bright, for curves that have an order."""
    return matplotlib.colors.to_hex(matplotlib.colormaps["viridis"](0.9 * number / max(1, of - 1)))


# -- curves


def line(ax: Axes, x: npt.ArrayLike, y: npt.ArrayLike, label: str = "", number: int = 0, **style: Any) -> None:
    """A curve over steps, with a gap where a step or its value is missing.

    `number` chooses colour and dashes. Of more than `MANY` points, the curve is their moving mean, the points lie behind.
    """
    steps, values = _with_gaps(x, y)
    color = style.pop("color", COLORS[number % len(COLORS)])
    dashes = style.pop("linestyle", DASHES[number % len(DASHES)])
    drawn = {"color": color, "linestyle": dashes, "label": _said(label), "linewidth": 1.8, **style}
    if len(steps) > MANY:
        ax.set_xlabel(f"step (dots: each step; curves: mean of {window(len(steps))} steps)")
        ax.plot(steps, values, ".", color=color, alpha=0.3, markersize=3)
        ax.plot(steps, smooth(values, window(len(steps))), **drawn)
    else:
        ax.plot(steps, values, marker="o", markersize=4, **drawn)


def window(points: int) -> int:
    """Odd number of points that the moving mean of a curve is taken over."""
    return points // 20 // 2 * 2 + 1


def smooth(values: Floats, over: int) -> Floats:
    """Mean of the finite values among `over` neighbours, where there is a value itself; NaN elsewhere."""
    known = np.isfinite(values)
    kernel = np.ones(over)
    with np.errstate(invalid="ignore"):
        sums = np.convolve(np.where(known, values, 0.0), kernel, "same")
        means = sums / np.convolve(known.astype(float), kernel, "same")
    return np.where(known, means, np.nan)


def band(
    ax: Axes, x: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike, label: str = "", color: str = BLUE
) -> None:
    """The room between two curves, with the same gaps."""
    steps, below = _with_gaps(x, low)
    _, above = _with_gaps(x, high)
    if len(steps) > MANY:
        below, above = smooth(below, window(len(steps))), smooth(above, window(len(steps)))
    ax.fill_between(steps, below, above, color=color, alpha=0.18, linewidth=0, label=_said(label))
    alone = _alone(below)
    ax.vlines(steps[alone], below[alone], above[alone], color=color, alpha=0.18, linewidth=6)


def _with_gaps(x: npt.ArrayLike, y: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Points in order of x, with NaN put between those that are further apart than their neighbours are."""
    steps, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], np.where(np.isfinite(values[order]), values[order], np.nan)
    apart = np.diff(steps)
    if not len(apart):
        return steps, values
    holes = np.flatnonzero(apart > 1.5 * apart.min()) + 1
    return np.insert(steps, holes, steps[holes] - apart.min()), np.insert(values, holes, np.nan)


def _alone(values: Floats) -> npt.NDArray[np.bool_]:
    """Which values have no neighbour, so that no line would show them."""
    known = np.pad(np.isfinite(values), 1)
    return np.asarray(known[1:-1] & ~known[:-2] & ~known[2:])


# -- areas


def stack(ax: Axes, x: npt.ArrayLike, parts: Mapping[str, npt.ArrayLike], colors: Sequence[str] = COLORS) -> None:
    """Bars, one a step, of parts that lie on each other. Where nothing is known of a step, nothing stands there."""
    steps = np.asarray(x, np.float64)
    apart = float(np.diff(np.sort(steps)).min()) if len(steps) > 1 else 1.0
    width = apart if len(steps) > MANY else 0.8 * apart
    below = np.zeros(len(steps))
    for i, (label, values) in enumerate(parts.items()):
        heights = np.nan_to_num(np.asarray(values, np.float64))
        color = colors[i % len(colors)]
        some = heights > 0
        ax.bar(steps[some], heights[some], width, below[some], color=color, ec=color, linewidth=0.3, label=_said(label))
        below = below + heights
    if len(steps):
        ax.set_xlim(steps.min() - 0.6 * apart, steps.max() + 0.6 * apart)
    ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.grid(visible=False, axis="x")


def stack_by(
    ax: Axes,
    found: Mapping[str, npt.NDArray[Any]],
    by: str,
    value: str,
    *,
    x: str = "step",
    first: Sequence[str] = (),
    faint: Sequence[str] = (),
    most: int = 7,
    shares: bool = False,
) -> None:
    """`stack` of the sums of a column, by step and by another column; the parts beyond `most` as one.

    Parts come as in `first`, then the largest first; those of `faint` in grey. `shares`: of the sum of each step.
    """
    steps = np.unique(found[x])
    parts: dict[str, Floats] = {}
    for name, rows in groups(found, by).items():
        if name is not None:
            parts[str(name)] = np.bincount(np.searchsorted(steps, rows[x]), rows[value], len(steps)).astype(np.float64)
    if shares:
        total = np.sum(list(parts.values()), axis=0) if parts else 1.0
        parts = {name: values / total for name, values in parts.items()}
    ranked = sorted(parts, key=lambda n: (first.index(n) if n in first else len(first), -parts[n].sum()))
    if len(ranked) > most:
        parts["others"] = np.sum([parts.pop(n) for n in ranked[most - 1 :]], axis=0)
        ranked = [*ranked[: most - 1], "others"]
    bright = iter([RED, ORANGE, BLUE, GREEN, PINK, SKY, YELLOW])
    stack(ax, steps, {n: parts[n] for n in ranked}, [FAINT if n in faint else next(bright) for n in ranked])
    if shares:
        ax.yaxis.set_major_locator(MaxNLocator(5))
        percent(ax.yaxis)


def bars(
    ax: Axes,
    names: Sequence[str],
    values: npt.ArrayLike,
    *,
    errors: npt.ArrayLike | None = None,
    color: str = BLUE,
    signed: bool = False,
) -> None:
    """Horizontal bars, the first on top, each with its number; `errors` are half-widths of whiskers, NaN for none.

    `signed`: values are changes.
    """
    heights = np.asarray(values, np.float64)
    spread = None if errors is None else np.nan_to_num(np.asarray(errors, np.float64))
    places = np.arange(len(names))
    ax.barh(places, np.nan_to_num(heights), color=color, height=0.7)
    ends = heights + np.where(heights < 0, -1, 1) * (0.0 if spread is None else spread)
    if spread is not None:
        ax.errorbar(heights, places, xerr=spread, fmt="none", ecolor="#333333", elinewidth=1.2, capsize=3)
    for place, value, end in zip(places, heights, ends, strict=True):
        said = (f"{value:+.3f}" if signed else f"{value:.3g}") if np.isfinite(value) else "no value"
        side = "right" if value < 0 else "left"
        where = (end if np.isfinite(end) else 0.0, place)
        ax.annotate(
            said, where, (-4 if value < 0 else 4, 0), textcoords="offset points", va="center", ha=side, color=GREY
        )
    ax.set_yticks(places, [_said(_short(name)) for name in names])
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.grid(visible=False, axis="y")


def beside(ax: Axes, names: Sequence[str], values: npt.ArrayLike, label: str, number: int, *, of: int) -> None:
    """Horizontal bars of one of several sides, each beside those of the others; the first name on top."""
    heights, thick = np.asarray(values, np.float64), 0.8 / of
    places = np.arange(len(names)) - 0.4 + thick * (number + 0.5)
    ax.barh(places, np.nan_to_num(heights), thick, color=COLORS[number], label=_said(label))
    for place, value in zip(places, heights, strict=True):
        said = f"{100 * value:.1f} %" if np.isfinite(value) else "no value"
        where = (np.nan_to_num(value), place)
        ax.annotate(said, where, (4, 0), textcoords="offset points", va="center", fontsize=8.5, color=GREY)
    ax.set_yticks(np.arange(len(names)), [_said(_short(n)) for n in names])
    if not ax.yaxis_inverted():
        ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.grid(visible=False, axis="y")


def heat(
    ax: Axes,
    x: Sequence[float],
    rows: Sequence[str],
    grid: npt.ArrayLike,
    label: str,
    *,
    wide: float = 1,
    colors: str = "viridis",
    low: float | None = None,
    high: float | None = None,
    upwards: bool = False,
) -> None:
    """A field of colours [rows, x]; grey where there is no value. `x` are first steps, each of `wide` steps.

    The first row is on top, or with `upwards` at the bottom.
    """
    values = np.ma.masked_invalid(np.asarray(grid, np.float64).reshape(len(rows), len(x)))
    chosen: Colormap = matplotlib.colormaps[colors].with_extremes(bad=FAINT)
    edges = np.append(np.asarray(x, np.float64), x[-1] + wide) - 0.5
    mesh = ax.pcolormesh(edges, np.arange(len(rows) + 1), values, cmap=chosen, vmin=low, vmax=high, edgecolors="none")
    bar = figure(ax).colorbar(mesh, ax=ax, pad=0.01, aspect=30)
    bar.set_label(label)
    bar.outline.set_visible(False)
    every = -(-len(rows) // 60)
    size = 7.5 if len(rows) > 24 else None
    ax.set_yticks(np.arange(0, len(rows), every) + 0.5, [_said(_short(r)) for r in rows[::every]], fontsize=size)
    if not upwards:
        ax.invert_yaxis()
    ax.grid(visible=False)


def heat_by(
    ax: Axes, found: Mapping[str, npt.NDArray[Any]], by: str, value: str, *, label: str, wide: int = 1, **colors: Any
) -> None:
    """`heat` of a column, with a row for each value of the column `by`: the lowest at the end on top.

    `wide`: steps that each column of the field stands for.
    """
    if not len(found["step"]):
        return
    steps = np.arange(found["step"].min(), found["step"].max() + wide, wide)
    rows = {}
    for name, of in groups(found, by).items():
        rows[str(name)] = np.full(len(steps), np.nan)
        rows[str(name)][((of["step"] - steps[0]) // wide).astype(int)] = of[value]
    figure(ax).set_figheight(min(9.0, max(2.6, 1.0 + (0.14 if len(rows) > 24 else 0.22) * len(rows))))
    ranked = sorted(rows, key=lambda n: rows[n][np.isfinite(rows[n])][-1])
    heat(ax, steps.tolist(), ranked, [rows[n] for n in ranked], label, wide=wide, **colors)


# -- the rest of a picture


def done(ax: Axes, title: str = "", *, reverse: bool = False) -> Axes:
    """A finished picture: what colours mean stands to the right of it, under a `title`; or that nothing is there to see."""
    if not np.isfinite(ax.dataLim.get_points()).all():
        empty(ax, "no values")
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.02),
            title=title,
            alignment="left",
            reverse=reverse,
        )
    return ax


def note(ax: Axes, text: str) -> None:
    """A sentence in grey below the title: what is left out, or how to read the picture."""
    ax.set_title(ax.get_title(loc="left"), pad=24)
    ax.annotate(text, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=GREY)


def empty(ax: Axes, why: str) -> None:
    """Say why there is nothing to see."""
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", color=GREY, wrap=True)
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)


def percent(axis: Any) -> None:
    """Write an axis of shares in percent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def logarithmic(ax: Axes, *, shares: bool = False) -> None:
    """Make the y axis of what is drawn logarithmic, written in plain numbers or in percent."""
    if not np.isfinite([*ax.dataLim.bounds, ax.dataLim.minposy]).all():
        return  # nothing above 0, which a logarithmic axis could show
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(
        MaxNLocator(5) if high < 4 * low else LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
    )
    ax.yaxis.set_minor_formatter(lambda *_: "")
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %" if shares else f"{value:.3g}")


def _said(label: str) -> str:
    """A label as it is: matplotlib hides those that begin with `_`."""
    return f" {label}" if label.startswith("_") else label


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


# -- tables


def table(found: Mapping[str, Iterable[Any]], most: int = 20) -> mo.Html:
    """Columns as a plain table of at most `most` rows; a dash where there is no value."""
    rows = list(zip(*found.values(), strict=True))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in found)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:most])
    rest = f"<p>{len(rows) - most:,} more rows</p>" if len(rows) > most else ""
    return mo.Html(
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}" if rows else "<p>None.</p>"
    )


def _cell(value: Any) -> str:
    style = "padding: 0.15em 0.9em 0.15em 0"
    if isinstance(value, (int, float)):
        said = "–" if np.isnan(value) else f"{value:,.0f}" if value == round(value) else f"{value:.3g}"
        return f'<td style="{style}; text-align: right">{said}</td>'
    return f'<td style="{style}">{html.escape("–" if value is None else str(value))}</td>'


_BLOCK = "margin: 0.3em 0; padding: 0.4em 0.8em; border-left: 3px solid"
_ROLES = {"system": GREY, "user": BLUE, "assistant": GREEN, "tool": ORANGE}


def conversation(messages: Sequence[tuple[str | None, ...]]) -> mo.Html:
    """(role, reasoning, content, tool calls) of each message as blocks of text, exactly as recorded."""
    blocks = []
    for role, *texts in messages:
        said = "".join(
            f'<pre style="white-space: pre-wrap; margin: 0{"; color: " + GREY if kind != "content" else ""}">'
            f"{'' if kind == 'content' else kind + ': '}{html.escape(text)}</pre>"
            for kind, text in zip(("reasoning", "content", "tool calls"), texts, strict=True)
            if text
        )
        name = html.escape(role or "no role")
        blocks.append(f'<div style="{_BLOCK} {_ROLES.get(role or "", GREY)}"><small>{name}</small>{said}</div>')
    return mo.Html("".join(blocks) or "<p>Nothing was said.</p>")
