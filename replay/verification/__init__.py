"""Whether a run is as it was written, as it was expected, and gives what it gave: `rolltape verify`, `rolltape approve`."""
