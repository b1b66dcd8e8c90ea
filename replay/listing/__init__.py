"""The runs below a folder, found and summed up: `rolltape list`."""
