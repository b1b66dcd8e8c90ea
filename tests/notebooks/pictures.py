"""Draws the pictures in notebooks/README.md: `uv run python tests/notebooks/pictures.py`. It takes a minute or two.

They show two made-up runs of 200 steps (see lifelike.py): a run of three demo steps has little to draw.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "replay")]

from lifelike import Life, record_run  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from rolltape.notebooks import NOTEBOOKS  # noqa: E402
from rolltape.notebooks.page import run_notebook  # noqa: E402
from rolltape.notebooks.plots import figure  # noqa: E402

FOLDER = HERE.parents[1] / "notebooks" / "pictures"
CHOSEN = {
    "look": {"tries": "What became of the tries", "length": "Length of a rollout"},
    "reward": {
        "made-of": "What the change of the reward is made of",
        "by-length": "Reward by length",
        "by-task": "Reward of each task",
    },
    "groups": {"signal": "Signal of the groups", "pass": "pass@k"},
    "drift": {
        "entropy": "Entropy, estimated",
        "weights": "Weight versions behind the newest of the step",
        "trainer": "Other log-probs minus recorded ones",
    },
    "compare": {"reward": "Reward", "tasks": "Tasks that changed most, B - A"},
}
"""By notebook: the titles of the pictures to keep, by what their files are called."""


def main() -> None:
    """Record two runs into a temporary folder and draw what is chosen."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        before = record_run(Path(folder) / "before", Life())
        after = record_run(Path(folder) / "after", Life(seed=1, learning=2.4, growth=0.2))
        for name, chosen in CHOSEN.items():
            runs = [str(before), str(after)][: NOTEBOOKS[name].runs]
            outputs, _ = run_notebook(NOTEBOOKS[name], runs)
            pictures = {ax.get_title(loc="left"): ax for ax in outputs if isinstance(ax, Axes)}
            for file, title in chosen.items():
                path = FOLDER / f"{name}-{file}.png"
                figure(pictures[title]).savefig(path, pil_kwargs={"optimize": True}, metadata={"Software": None})
                print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
