"""What was raised where pytest does not report it: the text that the rank sends instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest._code.code import filter_traceback

_NOT_THE_USERS = (str(Path(__file__).parent), "<frozen")


def describe_raised(error: BaseException) -> str:
    """Return a traceback as pytest shows those of collection, without its own frames and ours."""
    if isinstance(error, pytest.UsageError):
        return str(error)
    excinfo = pytest.ExceptionInfo.from_exception(error)
    excinfo.traceback = excinfo.traceback.filter(
        lambda entry: filter_traceback(entry) and not str(entry.path).startswith(_NOT_THE_USERS)
    )
    return str(excinfo.getrepr(style="short") if excinfo.traceback else excinfo.exconly())
