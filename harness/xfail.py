"""Tells a call of `pytest.xfail()` from a failure that an xfail mark expects.

Used on both sides: a rank that gives up by itself is no failure that others have to hear of, and is one that
they must agree with. Must not import torch.
"""

from __future__ import annotations

import pytest


def is_xfail_call(report: pytest.TestReport) -> bool:
    """Whether a phase ended by `pytest.xfail()`. Reports have no mark of it but the exception's name."""
    crash = getattr(report.longrepr, "reprcrash", None)
    name = str(crash.message).partition(":")[0] if crash is not None else ""
    return hasattr(report, "wasxfail") and name.split(".")[-1] == "XFailed"
