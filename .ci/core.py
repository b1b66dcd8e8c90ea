"""Checks an install without extras: reading packages import fast, live commands say what is missing."""

import subprocess
import sys
import time

started = time.perf_counter()
import rolltape.schema  # noqa: E402
from rolltape.replay import *  # noqa: E402, F403

seconds = time.perf_counter() - started
live = [m for m in ("verifiers", "renderers", "transformers", "aiohttp", "torch", "pydantic") if m in sys.modules]
print(f"imported in {seconds:.2f} s: {rolltape.schema.__name__}, rolltape.replay")
if live:
    sys.exit(f"the core imports {live}")

record = [sys.executable, "-m", "rolltape.replay.cli", "record", "x.toml"]
said = subprocess.run(
    [*record, "--run", "x", "--engine", "http://127.0.0.1:1", "--model", "m"], capture_output=True, text=True
)
print(said.stderr.strip())
if said.returncode != 2 or "rolltape[live]" not in said.stderr:
    sys.exit(f"`rolltape record` without the live extra ended with {said.returncode}: {said.stdout}{said.stderr}")
