"""Where the program `rolltape` begins: Ctrl-C ends it without a word also while the command line is imported, for a second."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Entry point of the program."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else Ctrl-C is ignored, and stays so
    if heard:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from rolltape.replay import cli

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()
