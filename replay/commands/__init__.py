"""The commands of `rolltape`, a module each; `rolltape.replay.cli` loads a command's when it is called."""
