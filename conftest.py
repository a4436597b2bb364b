"""Plugins of all suites: engines under test, and pytester for the harness's tests of itself."""

from lockstep.names import package

pytest_plugins = [f"{package()}.conformance.plugin", "pytester"]
