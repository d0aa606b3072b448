"""Placeholder docstring, replaced by the package contents."""
