"""The plugins of requirements.txt, in a folder of their own: no other test of the harness sees them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def plugin_path() -> dict[str, str]:
    """Return the variables by which pytest finds those plugins, and loads none that is not named."""
    folder = os.environ.get("LOCKSTEP_PLUGINS")
    if folder is None:
        pytest.skip("LOCKSTEP_PLUGINS is not set: see suites/selftest/other_plugins/requirements.txt")
    return {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": folder}
