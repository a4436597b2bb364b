"""Plugins of all suites: engines under test, and pytester for the harness's tests of itself."""

pytest_plugins = ["lockstep.conformance.plugin", "pytester"]
