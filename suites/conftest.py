"""What the suites that hold an engine to its behaviour share."""

import pytest


@pytest.fixture(autouse=True)
def freed_memory_is_nan(request, monkeypatch):
    """Let the built-in engine fill memory that is freed or sent with NaN, so that a late reader fails a test.

    Not in selftest: its tests turn the switch on where it is what they are about.
    """
    if "selftest" not in request.path.parts:
        monkeypatch.setenv("LOCKSTEP_ENGINE_DEBUG", "1")
