"""Recorded traces scored again by a taskset, into a new run: `rolltape rescore`."""
