"""The folder of a demo run: what the demo puts in it, and when it may be replaced."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from rolltape.record.engine.tokenizer import write_tokenizer
from rolltape.schema.errors import BadInput, RunConflict
from rolltape.schema.jsontext import read_json
from rolltape.schema.paths import ENTRIES
from rolltape.schema.storage import AnyPath, StorePath

TASKSET = "rolltape.record.demo"
"""The id of the demo's taskset, which bundles its harness."""

MARK = "# Written by `rolltape demo`."
EXPECTATION = """{mark} For `rolltape verify`: in each group one rollout wins the race.
[group_reward_sum]
fastest = 0.5
"""
ENVIRONMENT = """{mark} The demo's environment, for `rolltape record`.
[taskset]
id = "{taskset}"
seed = {seed}
"""


@dataclass(frozen=True)
class DemoFolder:
    """Paths of a demo run: the run itself, and beside it a folder with what it was made from."""

    run: AnyPath

    @property
    def setup(self) -> Path:
        """Folder of the demo's own files: beside the run, or in this folder where the run lies in an object store."""
        name = f"{self.run.name}-setup"
        return Path(name) if isinstance(self.run, StorePath) else self.run.with_name(name)

    @property
    def environment(self) -> Path:
        """EnvConfig as TOML."""
        return self.setup / "env.toml"

    @property
    def expectation(self) -> Path:
        """What `rolltape verify --expect` reads."""
        return self.setup / "expect.toml"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.setup / "tokenizer"

    def prepare(self, *, seed: int, overwrite: bool) -> None:
        """Make room for the run and write the demo's own files.

        Raises:
            RunConflict: There is something already, and `overwrite` is not set or it is no demo run.
            BadInput: The path is a file, or cannot be written.
        """
        try:
            self._refuse_foreign_setup()
            if self._occupied():
                self._remove(overwrite)
            self.setup.mkdir(parents=True, exist_ok=True)
            self.environment.write_text(ENVIRONMENT.format(mark=MARK, taskset=TASKSET, seed=seed), encoding="utf-8")
            self.expectation.write_text(EXPECTATION.format(mark=MARK), encoding="utf-8")
            write_tokenizer(self.tokenizer)
        except (RunConflict, BadInput):
            raise
        except OSError as error:
            raise BadInput(f"{self.run} cannot be written: {error.strerror or error}. Choose another --run.") from error

    def _refuse_foreign_setup(self) -> None:
        """The setup folder is written over where the demo made it, and never removed."""
        if not self.setup.exists():
            return
        made_here = self.environment.is_file() and self.environment.read_text(encoding="utf-8").startswith(MARK)
        if not made_here and (not self.setup.is_dir() or any(self.setup.iterdir())):
            raise RunConflict(f"{self.setup} is not the demo's, so it stays as it is. Choose another --run.")

    def _occupied(self) -> bool:
        if self.run.exists() and not self.run.is_dir():
            raise BadInput(f"{self.run} is a file, expected a folder or nothing. Choose another --run.")
        return self.run.is_dir() and any(self.run.iterdir())

    def _remove(self, overwrite: bool) -> None:
        if isinstance(self.run, StorePath):
            raise RunConflict(f"{self.run} holds something already, which stays as it is. Choose another --run.")
        strange = self._why_not_a_demo(self.run)
        if strange is not None:
            raise RunConflict(f"{self.run} is not a demo run ({strange}), so it stays as it is. Choose another --run.")
        if not overwrite:
            raise RunConflict(
                f"{self.run} holds an earlier demo run. Add --overwrite to replace it, or choose another --run."
            )
        shutil.rmtree(self.run)

    @staticmethod
    def _why_not_a_demo(run: Path) -> str | None:
        """What speaks against the folder being a demo run and nothing else; None if nothing does."""
        if run.is_symlink():
            return "it is a link"
        others = sorted(entry.name for entry in run.iterdir() if entry.name not in ENTRIES)
        if others:
            return f"it holds {others[0]}"
        try:
            identity = read_json((run / "run.json").read_bytes())
        except (OSError, ValueError):
            return "it has no readable run.json"
        taskset = identity.get("taskset") if isinstance(identity, dict) else None
        return None if taskset == TASKSET else f"its run.json names the taskset {taskset}"
