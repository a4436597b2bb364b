"""The coverage of a rank, as pytest-cov measures that of the controller. Inside a rank."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest

SAVE_EVERY = 1.0
"""Seconds. A rank that is killed loses what it has measured since; saving takes longer than a small test."""
# Of no use in a rank: other processes run what this one does not, and the server imports some of it first.
_DISABLED_WARNINGS = ["already-imported", "module-not-imported", "module-not-measured", "no-data-collected"]


class RankCoverage:
    """Measures this process as pytest-cov would, with the same options, into its own file."""

    def __init__(self, config: pytest.Config) -> None:
        options = config.option
        coverage: Any = importlib.import_module("coverage")
        self._coverage = coverage.Coverage(
            source=None if True in options.cov_source else options.cov_source,  # a plain `--cov`
            branch=options.cov_branch,
            config_file=options.cov_config,
            data_suffix=True,
        )
        disabled = self._coverage.get_option("run:disable_warnings")
        self._coverage.set_option("run:disable_warnings", [*disabled, *_DISABLED_WARNINGS])
        self._coverage.start()
        self._saved = time.monotonic()

    def pytest_runtest_logfinish(self) -> None:
        if time.monotonic() > self._saved + SAVE_EVERY:
            self._coverage.save()
            self._saved = time.monotonic()

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
