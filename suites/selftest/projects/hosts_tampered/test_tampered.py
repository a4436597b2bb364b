"""Messages between hosts that count wrong: as if one of them had been taken out on its way."""

from __future__ import annotations

import gc

import pytest

from lockstep.features.hosts.wire import SignedConnection


def wire_of_this_rank() -> SignedConnection:
    (wire,) = (each for each in gc.get_objects() if isinstance(each, SignedConnection))
    return wire


@pytest.mark.ranks(2, hosts=2)
def test_from_a_rank(world):
    if world.rank == 1:
        wire_of_this_rank()._sent += 1
    while True:  # until the controller asks for what it does
        pass


@pytest.mark.ranks(2, hosts=2)
def test_to_a_rank(world):
    if world.rank == 1:
        wire_of_this_rank()._received += 1
    while True:
        pass


@pytest.mark.ranks(2, hosts=2)
def test_healthy(world):
    assert world.gather(world.rank) == [0, 1]
