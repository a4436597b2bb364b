"""A plugin for pytest-rerunfailures: the second try of a test makes the fixtures of its module again.

Many of these tests look at one session from different sides, which a fixture of their module has run. What
was wrong in that session would be as wrong in the second try.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """End the fixtures of the module of a test that is tried again."""
    if getattr(item, "execution_count", 1) > 1:
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                if definition.scope == "module":
                    definition.finish(item._request)
