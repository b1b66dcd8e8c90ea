"""Which runs a notebook opens on: those it was given, else the demo run here, else one that is recorded for it."""

from __future__ import annotations

import atexit
import html
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import marimo as mo

from rolltape.replay.printing.words import count, numbers, size
from rolltape.replay.run import Run, open_run
from rolltape.replay.sql.connection import ask
from rolltape.schema.errors import BadInput

DEMO = "demo-run"
"""Folder that `rolltape demo` records into, looked for where the notebook was started."""


def one() -> str:
    """The run given with `-- --run FOLDER`, else a demo run. Raises BadInput where several are given."""
    given = _given("run")
    if len(given) > 1:
        raise BadInput(f"{len(given)} runs are given; this notebook opens one. `compare` opens two.")
    return given[0] if given else demo()


def two() -> tuple[str, str]:
    """The runs given with `-- --run A --run B`, else two demo runs. Raises BadInput where there is another number."""
    given = _given("run")
    if len(given) not in (0, 2):
        raise BadInput(f"{len(given)} runs are given; expected two, the one before and the one after.")
    return (given[0], given[1]) if given else (demo(), demo(seed=1))


def split() -> str:
    """The split given with `-- --split NAME`, else train."""
    return (_given("split") or ["train"])[-1]


def _given(name: str) -> list[str]:
    return [str(value) for value in mo.cli_args().get_all(name)]


@cache
def demo(seed: int = 0) -> str:
    """`demo-run/` where it is here and `seed` is 0, else a demo run in a temporary folder, gone when the notebook ends.

    Raises BadInput where none can be recorded.
    """
    if seed == 0 and Path(DEMO, "run.json").exists():
        return DEMO
    folder = Path(tempfile.mkdtemp(prefix="rolltape-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run = folder / (DEMO if seed == 0 else f"{DEMO}-{seed}")
    command = [sys.executable, "-m", "rolltape.replay.cli", "demo", "--run", str(run), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not (run / "run.json").exists():
        said = done.stderr.strip().removeprefix("Error: ") or f"`rolltape demo` ended with {done.returncode}"
        raise BadInput(f"no run was given, {DEMO}/ is not here, and none could be recorded: {said}")
    return str(run)


def about(run: Run | str, split: str = "train") -> str:
    """Markdown: which run this is, how much of it there is, and what is left out of the answers here."""
    run = open_run(run) if isinstance(run, str) else run
    answer = ask(run, "FROM steps", split=split)
    steps = answer.table()
    total = {name: sum(steps.column(name).to_pylist()) for name in ("rows", "bytes")}
    tokens = [n for n in steps.column("sampled_tokens").to_pylist() if n is not None]
    said = [
        f"{code(run.paths.root)}, {code(split)}: {count(total['rows'])} tries in steps "
        f"{numbers(steps.column('step').to_pylist()) or 'none'}, {count(sum(tokens))} sampled tokens, {size(total['bytes'])}.",
        ", ".join(f"{k} {code(run.info[k])}" for k in ("model", "taskset") if run.info.get(k)),
        *(f"Left out: {code(note)}" for note in answer.notes),
    ]
    if Path(tempfile.gettempdir()) in Path(str(run.paths.root)).parents and DEMO in str(run.paths.root):
        said.append(
            f"No run was given and there is no {code(DEMO)} here, so a demo run was recorded in a temporary folder, which is "
            "removed when the notebook ends."
        )
    return "\n\n".join(line for line in said if line)


def code(text: object) -> str:
    """Any text as it is, for Markdown: what a run says is never taken for markup."""
    return f"<code>{_MARKUP.sub(lambda found: f'&#{ord(found[0])};', html.escape(str(text)))}</code>"


_MARKUP = re.compile(r"[\\`*_{}\[\]()#+.!|~$:\n-]")
