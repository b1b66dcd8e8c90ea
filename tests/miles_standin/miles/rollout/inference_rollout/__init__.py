"""Stands in for a package of Miles."""
