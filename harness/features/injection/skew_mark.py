"""Refusals of the mark `skew` where it would do nothing. Runs in the controller; must not import torch."""

from __future__ import annotations

import unittest

import pytest

from lockstep.controller.requests import Refusal


class SkewMark:
    """A plugin of a session with the mark."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        is_doctest = isinstance(item, pytest.DoctestItem)  # which has the mark of its module
        if not is_doctest and item.get_closest_marker("skew") is not None:
            pytest.fail(
                "skew: the test has no ranks to delay; write @pytest.mark.ranks(2), too", pytrace=False
            )

    def pytest_ranks_request(self, item: pytest.Item) -> Refusal | None:
        is_of_unittest = issubclass(getattr(item, "cls", None) or object, unittest.TestCase)
        has_option = item.config.getoption("ranks_skew") is not None
        if not is_of_unittest or has_option or item.get_closest_marker("skew") is None:
            return None
        why = "the mark is for functions and plain classes; run this method of unittest with --skew 7"
        return Refusal("failed", f"skew: {why}")
