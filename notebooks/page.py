"""A notebook as one page that holds everything: pictures as they are, no scripts, nothing loaded from anywhere.

marimo's own export keeps a notebook alive and folds its code, but its pages load marimo from the network when they are opened.
"""

from __future__ import annotations

import base64
import html
import importlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import marimo as mo
from matplotlib.axes import Axes

from rolltape.notebooks import Notebook
from rolltape.notebooks.plots import figure
from rolltape.schema.errors import BadInput

_STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: #222 }
img { max-width: 100%; display: block } h2 { margin: 2.2rem 0 0 } .paragraph { display: block; margin: 0.6rem 0 }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em } table { border-collapse: collapse; font-size: 0.9em }
th { text-align: left; padding-right: 0.9em; border-bottom: 1px solid #aaa }
"""


def run_notebook(notebook: Notebook, runs: Sequence[str], split: str = "train") -> tuple[list[Any], Mapping[str, Any]]:
    """Run a notebook in this process: what its cells show, and the names they define.

    Raises what its cells raise; BadInput where it opens another number of runs.
    """
    if len(runs) != notebook.runs:
        raise BadInput(f"{notebook.name} opens {notebook.runs} run{'s'[: notebook.runs > 1]}; {len(runs)} are given.")
    app = importlib.import_module(f"rolltape.notebooks.{notebook.name}").app
    outputs, names = app.run(
        defs={**dict(zip(("A", "B") if len(runs) == 2 else ("RUN",), runs, strict=True)), "SPLIT": split}
    )
    return [o for o in outputs if o is not None], names


def write_page(notebook: Notebook, runs: Sequence[str], target: Path, split: str = "train") -> int:
    """Write a notebook on `runs` as a page; returns its size in bytes. Raises what `run_notebook` and the file system raise."""
    outputs, _ = run_notebook(notebook, runs, split)
    source = html.escape(notebook.path.read_text(encoding="utf-8"))
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(notebook.title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{''.join(_shown(outputs))}"
        f"<details><summary>The notebook</summary><pre>{source}</pre></details>\n</body></html>\n"
    ).encode()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(page)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(page)


def _shown(outputs: Sequence[Any]) -> Iterator[str]:
    """Outputs as HTML; what needs a running notebook, such as a choice, is left out."""
    for output in outputs:
        if isinstance(output, Axes):
            yield f'<img alt="{html.escape(output.get_title(loc="left"))}" src="{_png(output)}">\n'
        elif "<marimo-" not in (text := mo.as_html(output).text):
            yield f"<div>{text}</div>\n"


def _png(ax: Axes) -> str:
    image = io.BytesIO()
    figure(ax).savefig(image, format="png")
    return f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
