"""The harness `rolltape.record.inprocess`: the chat loop and its tools inside the process."""

from __future__ import annotations

from rolltape.record.inprocess.harness import InProcessHarness, InProcessHarnessConfig

__all__ = ["InProcessHarness", "InProcessHarnessConfig"]
