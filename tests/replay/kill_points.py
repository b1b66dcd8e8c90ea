"""Does one piece of work on copies of a run, and kills itself before each change to the disk, one after the other.

    python kill_points.py RUN FOLDER compact|prune …

leaves FOLDER/1, FOLDER/2 … as they were at the death of the process; the last one is that of the work which was done.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolltape.replay import open_run
from rolltape.replay.housekeeping.compact import compact
from rolltape.replay.housekeeping.prune import Wish, prune
from rolltape.replay.housekeeping.rewrite import same_rows


def dies_at(moment: int) -> None:
    """Have this process die at a moment, counted over calls that change the disk."""
    moments = itertools.count(1)

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            if next(moments) == moment:
                os._exit(9)
            return call(*args, **kwargs)

        return watching

    for name in ("fsync", "replace", "link", "unlink", "rename"):
        setattr(os, name, watched(getattr(os, name)))


def work(run: Path, what: str, wishes: dict[str, Any]) -> None:
    """Do it."""
    if what == "compact":
        compact(open_run(run), 10**6)
    else:
        prune(open_run(run), Wish(**wishes))


def main() -> None:
    """Die once at each moment."""
    seed, folder, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    wishes: dict[str, Any] = dict.fromkeys(sys.argv[4:], True)
    table = open_run(seed).table("train").combine_chunks()
    same_rows(table, table)  # pyarrow imports pandas when it first computes: once here, not in each child
    for moment in itertools.count(1):
        copy = folder / str(moment)
        shutil.copytree(seed, copy)
        child = os.fork()
        if not child:
            dies_at(moment)
            work(copy, what, wishes)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 9:
            sys.exit(code)


if __name__ == "__main__":
    main()
