"""An option, a setting and a fixture of a plugin."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--of-the-plugin")
    parser.addini("of_the_ini", "a setting")


@pytest.fixture
def from_the_plugin():
    return 5
