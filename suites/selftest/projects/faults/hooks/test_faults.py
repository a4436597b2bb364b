"""Tests that pass but for the hooks around them."""

import os

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def some():
    pass


def test_setup(world, some):
    dist.barrier()


def test_call(world, some):
    dist.barrier()


def test_teardown(world, some):
    dist.barrier()


def test_makereport(world, some):
    dist.barrier()


def test_logreport(world, some):
    dist.barrier()


def test_logstart(world, some):
    dist.barrier()


def test_logfinish(world, some):
    dist.barrier()


def test_protocol(world, some):
    dist.barrier()


def test_protocol_exits(world, some):
    dist.barrier()


def test_protocol_stops(world, some):
    dist.barrier()


def test_fixture_setup(world, some):
    dist.barrier()


def test_serialise(world, some):
    dist.barrier()
