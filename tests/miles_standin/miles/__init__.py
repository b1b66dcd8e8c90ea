"""A small stand-in for Miles, for tests where it is not installed: its base types, and what it does with a batch.

Written from its documented behaviour; where the real one is importable, tests use that.
"""

STANDIN = True
