"""Modules of leases, which are not imported without a bound."""

import sys

import pytest


def of_leases():
    return [name for name in sys.modules if name.startswith("harness.") and "leas" in name]


@pytest.mark.ranks(1)
def test_unbound_on_a_rank(world):
    assert of_leases() == []


def test_unbound_in_the_controller():
    assert of_leases() == []
