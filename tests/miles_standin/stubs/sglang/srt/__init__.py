"""Stands in for a package of SGLang, which Miles imports at its base types."""
