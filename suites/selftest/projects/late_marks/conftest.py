"""A hook that marks an item when it is already collected."""

import pytest


def pytest_itemcollected(item):
    if item.name == "test_hooked":
        item.add_marker(pytest.mark.ranks(0))
