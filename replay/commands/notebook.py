"""`rolltape notebook`. The notebooks and what they need are imported only where one is opened."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.replay.printing.console import err, out, print_json, table
from rolltape.replay.printing.words import size
from rolltape.replay.run import open_run
from rolltape.schema.errors import BadInput, MissingExtra, RunConflict, RunNotFound, install
from rolltape.schema.storage import is_url

if TYPE_CHECKING:
    from rolltape.notebooks import Notebook


def notebook_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|RUN", help="Which notebook, and the folder or URL of each run.", show_default=False
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write it as one page without scripts, and open nothing.", show_default=False),
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Copy the notebook to this .py file, to change it, and open nothing.", show_default=False
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to look at: train, eval, eval-NAME.")] = "train",
    headless: Annotated[bool, typer.Option("--headless", help="Serve it without opening a browser.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Port on 127.0.0.1 to serve it on; by default a free one.", show_default=False)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file that --html or --out names.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the list, or what was written.")] = False,
) -> None:
    """Open a notebook on a run; without a word, list them.

    For example:

        rolltape notebook                             # the list
        rolltape notebook reward demo-run             # in the browser
        rolltape notebook compare runs/a runs/b
        rolltape notebook drift runs/first --html drift.html
        rolltape notebook groups runs/first --out mine.py

    Without NAME, one run opens `look` and two open `compare`. Without RUN it
    is demo-run/, or a demo run that is recorded for it in a temporary folder.
    A folder that is called like a notebook is given as ./NAME.

    It is served on 127.0.0.1 until Ctrl-C; what is opened in the browser
    shows its code and changes nothing. Needs the extra 'notebooks'.

    Exit code: 0 listed, written or served, 2 refused.
    """
    from rolltape.notebooks import NOTEBOOKS

    if not words and page is None and copy is None:
        _list(list(NOTEBOOKS.values()), as_json)
        return
    notebook, runs = _chosen(NOTEBOOKS, words or [])
    if as_json and page is None and copy is None:
        raise BadInput(
            "--json prints the list, or what --html or --out wrote; a notebook that is served prints nothing."
        )
    if page is not None and copy is not None:
        raise BadInput("--html and --out are both given; write a page, or copy the notebook.")
    if (page or copy) and (headless or port is not None):
        raise BadInput(
            "--headless and --port say how a notebook is served; with --html and --out none is. Leave them out."
        )
    for run in runs:
        _check(run, split)
    _check_target(page or copy, ".html" if page else ".py", overwrite, runs)
    if copy is not None:
        _copy(notebook, runs, copy, split, as_json)
        return
    missing = [m for m in ("marimo", "matplotlib") if find_spec(m) is None]
    if missing:
        raise MissingExtra(
            f"`rolltape notebook` needs the extra 'notebooks' ({' and '.join(missing)} missing): "
            f"{install('notebooks')}."
        )
    runs = runs or _demo_runs(notebook.runs)
    if page is not None:
        _write(notebook, runs, page, split, as_json)
        return
    raise typer.Exit(_serve(notebook.path, runs, split, headless=headless, port=port))


def _list(notebooks: Sequence[Notebook], as_json: bool) -> None:
    if as_json:
        print_json(
            {"notebooks": [{"name": n.name, "title": n.title, "answers": n.answers, "runs": n.runs} for n in notebooks]}
        )
        return
    rows = [(n.name, n.title, n.answers) for n in notebooks]
    out.print(table("", ("name", "notebook", "what it answers"), rows, dense=True))
    out.print("\nrolltape notebook NAME RUN opens one; compare takes two runs.", markup=False, highlight=False)


def _chosen(notebooks: dict[str, Notebook], words: Sequence[str]) -> tuple[Notebook, list[str]]:
    """The notebook that is meant, and the runs to open it on."""
    named = bool(words) and words[0] in notebooks
    runs = list(words[1:] if named else words)
    notebook = notebooks[words[0] if named else "compare" if len(runs) == 2 else "look"]
    if runs and len(runs) != notebook.runs:
        raise BadInput(
            f"{notebook.name} opens {notebook.runs} run{'s' if notebook.runs > 1 else ''}, but {len(runs)} are given"
            f"{'' if named else f' (the notebooks are {_names(notebooks)})'}."
        )
    if not named and len(words) == 2 and "/" not in words[0] and not Path(words[0]).exists():
        raise RunNotFound(f"{words[0]} is no notebook ({_names(notebooks)}), and no folder of a run.")
    return notebook, runs


def _names(notebooks: dict[str, Notebook]) -> str:
    return ", ".join(notebooks)


def _check(run: str, split: str) -> None:
    """Refuse what is no run, before anything is started."""
    recorded = open_run(run).splits()
    if recorded and split not in recorded:
        raise BadInput(
            f"{run}: no split {split!r} was recorded; recorded are {', '.join(recorded)}: choose with --split."
        )


def _check_target(target: Path | None, ending: str, overwrite: bool, runs: Sequence[str]) -> None:
    if target is None:
        return
    for run in runs:
        if not is_url(run) and target.resolve().is_relative_to(Path(run).resolve()):
            raise BadInput(
                f"{target} lies inside the run; nothing but recordings belongs there. Choose another folder."
            )
    if target.suffix != ending:
        raise BadInput(f"{target}: expected a name that ends in {ending}.")
    if target.exists() and not overwrite:
        raise RunConflict(f"{target} is there already; choose another name, or set --overwrite.")
    if not target.parent.is_dir():
        raise BadInput(f"{target}: the folder {target.parent} does not exist.")


def _demo_runs(number: int) -> list[str]:
    from rolltape.notebooks.places import DEMO, demo

    if number > 1 or not Path(DEMO, "run.json").exists():
        err.print("No run is given: recording a demo run for it.", highlight=False)
    return [demo(seed) for seed in range(number)]


def _write(notebook: Notebook, runs: Sequence[str], page: Path, split: str, as_json: bool) -> None:
    from rolltape.notebooks.page import write_page

    written = write_page(notebook, runs, page, split)
    if as_json:
        print_json({"notebook": notebook.name, "runs": list(runs), "split": split, "path": str(page), "bytes": written})
    else:
        out.print(f"{page}: {notebook.title}, {size(written)}", markup=False, highlight=False, soft_wrap=True)


def _copy(notebook: Notebook, runs: Sequence[str], copy: Path, split: str, as_json: bool) -> None:
    """Copy a notebook, and say how the copy is opened."""
    shutil.copyfile(notebook.path, copy)
    command = shlex.join(["marimo", "edit", str(copy), "--", *_words(runs, split)])
    if as_json:
        print_json({"notebook": notebook.name, "runs": list(runs), "split": split, "path": str(copy), "open": command})
        return
    out.print(f"{copy}: a copy of {notebook.title}. To open it:", markup=False, highlight=False, soft_wrap=True)
    out.print(command, markup=False, highlight=False, soft_wrap=True)


def _words(runs: Sequence[str], split: str) -> list[str]:
    """What a notebook is called with."""
    return ["--split", split, *(word for run in runs for word in ("--run", run))]


def _serve(file: Path, runs: Sequence[str], split: str, *, headless: bool, port: int | None) -> int:
    """Serve a notebook until Ctrl-C, or until this process is ended; its exit code."""
    command = [sys.executable, "-m", "marimo", "run", "--include-code", str(file)]
    command += [
        "--host",
        "127.0.0.1",
        *(("--headless",) if headless else ()),
        *(() if port is None else ("--port", str(port))),
    ]
    command += ["--", *_words(runs, split)]
    try:
        with subprocess.Popen(command, env={**os.environ, "MARIMO_SKIP_UPDATE_CHECK": "1"}) as server:
            signal.signal(signal.SIGTERM, lambda *_: server.terminate())
            return server.wait()
    except KeyboardInterrupt:
        return 0
