"""Merging files, and removing what is no longer wanted: `rolltape compact`, `rolltape prune`."""
