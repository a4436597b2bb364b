"""What all tests of this suite share."""

import pytest


@pytest.fixture(autouse=True)
def _nan_in_freed_memory(monkeypatch):
    """Let the built-in engine fill what it has freed or sent with NaN, so that a late reader shows."""
    monkeypatch.setenv("LOCKSTEP_ENGINE_DEBUG", "1")
