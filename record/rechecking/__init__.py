"""Recorded messages rendered again, recorded tokens weighed again: `rolltape verify --retokenize`, `--logprobs`."""
