"""Hooks that mark, skip and record."""

import os

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_marked_by_hook":
            item.add_marker(pytest.mark.ranks(1))


def pytest_runtest_setup(item):
    if item.name == "test_skip_by_hook":
        pytest.skip("hook")


def pytest_runtest_call(item):
    item.user_properties.append(("hook", "RANK" in os.environ))
