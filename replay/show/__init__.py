"""One recorded trace, found and taken apart, and which traces are listed: `rolltape show`."""
