"""Finding recorded runs below a folder. Reads no file and imports nothing: the pytest plugin does this in every test run."""

from __future__ import annotations

import os
from pathlib import Path


def runs_in(folder: Path) -> list[Path]:
    """`folder` where it is a run, else the runs below it, in order of their names; empty where there are none.

    A folder with a run.json, or with traces and commits, is a run: one that lost its run.json is damaged, and must not be
    passed over. Links to folders are followed, each folder once.
    """
    if not folder.is_dir():
        return []
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or "run.json" in files or {"traces", "commits"} <= {*folders}:
            found += [] if real in seen else [Path(place)]
            folders.clear()
        seen.add(real)
        folders.sort()
    return found


def need_runs(folder: Path) -> list[Path]:
    """The same. Raises FileNotFoundError with a sentence where there is no run."""
    found = runs_in(folder)
    if not found:
        what = "holds no recorded run" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"{folder} {what}; give the folder of a run, or one that holds runs.")
    return found
