"""The private names of pytest that both sides use, seen in pytest 9.0 to 9.2. Must not import torch."""

from __future__ import annotations

import pytest


def is_xfail_call(report: pytest.TestReport) -> bool:
    """Return whether a phase ended by `pytest.xfail()`; reports show it in the exception's name alone."""
    crash = getattr(report.longrepr, "reprcrash", None)
    name = str(crash.message).partition(":")[0] if crash is not None else ""
    return hasattr(report, "wasxfail") and name.split(".")[-1] == "XFailed"
