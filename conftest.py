"""What all suites share: pytester, for the harness's tests of itself."""

pytest_plugins = ["pytester"]
