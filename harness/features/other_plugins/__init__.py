"""Plugins of others: what they expect of a worker of pytest-xdist, and what does not work on ranks."""

FEATURE = "other plugins"

Raised = tuple[tuple[tuple[str, str], ...], str, bool]
"""Module and name of an exception's class and of its bases; its text; whether the next one is its cause."""
