"""Lockstep: a pytest-native, multi-rank test harness for PyTorch.

PYTEST_DONT_REWRITE: ranks are forked from a server that has imported this package before pytest could
rewrite its asserts; the package raises its own messages and needs no rewriting.
"""
