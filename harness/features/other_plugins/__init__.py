"""Plugins of others: what they expect of a worker of pytest-xdist, and what does not work on ranks."""

FEATURE = "other plugins"

Raised = tuple[tuple[tuple[str, str], ...], str, bool]
"""Module and name of an exception's class and of its bases; its text; whether the next one is its cause."""

PRELOADED = (
    *("platformdirs.pytest_plugin", "pytest_cov.plugin", "pytest_rerunfailures", "pytest_timeout"),
    *("xdist.plugin", "xdist.looponfail"),
)
"""Plugins that a server can import for its ranks: no thread starts, and nothing is kept that differs."""
