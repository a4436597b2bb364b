"""Tests that remove the directory of their ranks."""

import os
import pathlib

import pytest

pytestmark = pytest.mark.ranks(2)


def clean(world):
    world.barrier()  # all have begun: the controller needs the directory for that
    if world.rank == 0:
        (directory,) = pathlib.Path(os.environ["TMPDIR"]).glob("pymp-*")
        directory.rename(f"cleaned-{os.getpid()}")
    world.barrier()


def test_cleans(world):
    clean(world)


def test_b(world):
    pass


def test_cleans_and_fails(world):
    clean(world)
    assert world.rank == 0


def test_d(world):
    pass
