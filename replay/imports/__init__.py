"""Verifiers' files of any release into a run: `rolltape import`."""
