"""Modules of leases, which are not imported without a bound, but for the plugin."""

import sys

import pytest


def of_leases():
    of_feature = [name for name in sys.modules if name.startswith("lockstep.features.leases.")]
    return [name for name in of_feature if not name.endswith(".plugin")]


@pytest.mark.ranks(1)
def test_unbound_on_a_rank(world):
    assert of_leases() == []


def test_unbound_in_the_controller():
    assert of_leases() == []
