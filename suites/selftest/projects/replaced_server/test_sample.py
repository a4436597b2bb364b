"""Worlds of several servers, each of which is killed."""

import os
import pathlib
import signal
import time

import pytest
from notes import note

pytestmark = pytest.mark.ranks(2)
server = os.getppid()


def test_kills_the_server(world):
    note(world, "living")
    world.barrier()  # every rank knows by now which process the server is
    if world.rank == 0:
        os.kill(server, signal.SIGKILL)
    while os.getppid() == server:
        time.sleep(0.01)
    world.barrier()


def test_goes_on(world):
    note(world, "living")
    world.barrier()


@pytest.mark.ranks(3)
def test_on_a_world_of_a_new_server(world):
    world.barrier()


@pytest.mark.ranks(2, fresh=True)
def test_dies(world):
    if world.rank == 1:
        pathlib.Path("armed").touch()
        os._exit(7)


@pytest.mark.ranks(2, fresh=True)
def test_kills_the_server_as_its_world_starts(world):
    pass


def test_outlives_it(world):
    note(world, "living")
    world.barrier()


@pytest.mark.ranks(2, fresh=True)
def test_on_a_world_of_a_third_server(world):
    world.barrier()
