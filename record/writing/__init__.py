"""A run written: its folder, the journal, the parts that are committed, and what a writer that died left behind."""
