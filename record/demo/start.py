"""`rolltape demo --write`: a folder to start an environment of one's own from."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from rolltape.record.engine.tokenizer import write_tokenizer
from rolltape.schema.errors import BadInput, RunConflict

CONFIG = """\
# Verifiers' EnvConfig: what `rolltape record` runs.
[taskset]
{id:<43} # {module}.py beside this file; the name of an installed package works the same
size = 20                                   # a setting of this taskset

[harness]                                   # left out: the harness of the taskset, else Verifiers' own
id = "rolltape.record.inprocess"            # conversations in this process: no sandbox, and quick
tools = ["rolltape.record.demo.calculator:calculator"]     # functions; one of yours: "{module}:look_up"
max_turns = 6                               # model turns of a rollout

[timeout]
scoring = 60.0                              # seconds that the rewards of a rollout may take

[retries.rollout]
max_retries = 1                             # tries more of a rollout that failed; each is recorded
"""


@dataclass(frozen=True)
class Start:
    """Paths of such a folder."""

    folder: Path

    @property
    def module(self) -> str:
        """Name of the module with the taskset, after the folder."""
        return re.sub(r"\W", "_", self.folder.resolve().name).lower()

    @property
    def config(self) -> Path:
        """EnvConfig as TOML."""
        return self.folder / "config.toml"

    @property
    def taskset(self) -> Path:
        """The module with the taskset."""
        return self.folder / f"{self.module}.py"

    @property
    def tokenizer(self) -> Path:
        """Folder of the demo engine's tokenizer."""
        return self.folder / "tokenizer"

    def write(self) -> None:
        """Write the files. Raises RunConflict where one is there, BadInput for a folder that no module can be named after."""
        self._refuse_name()
        there = next((p for p in (self.config, self.taskset, self.tokenizer) if p.exists()), None)
        if there is not None:
            raise RunConflict(f"{there} is there already, and stays as it is. Choose another folder for --write.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            template = Path(__file__).with_name("template.py").read_text(encoding="utf-8")
            self.taskset.write_text(template, encoding="utf-8")
            text = CONFIG.format(id=f'id = "{self.module.replace("_", "-")}"', module=self.module)
            self.config.write_text(text, encoding="utf-8")
            write_tokenizer(self.tokenizer)
        except OSError as error:
            raise BadInput(f"{self.folder} cannot be written: {error.strerror or error}.") from error

    def _refuse_name(self) -> None:
        if not self.module.isascii() or not self.module.isidentifier():
            raise BadInput(
                f"The taskset is named after its folder, and {self.folder.resolve().name!r} is no name of a module; choose a "
                "folder named with letters, digits and -, such as my-env."
            )
        if importlib.util.find_spec(self.module) is not None:
            raise BadInput(
                f"The taskset is named after its folder, and there is a module {self.module!r} already; choose another name."
            )
