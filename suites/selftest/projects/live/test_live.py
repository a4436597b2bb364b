"""Tests that print and log, for options that show it at once."""

import logging
import os
import sys

import pytest

pytestmark = pytest.mark.ranks(2)
log = logging.getLogger("mine")


@pytest.fixture
def thing(world):
    return world.rank


def test_a(world, thing):
    print(f"first {thing}\nsecond", end=" ")
    print(thing)
    print("to stderr", thing, file=sys.stderr)
    log.info("info by %d", thing)
    log.debug("debug")


def test_in_a_fork(world):
    if (pid := os.fork()) == 0:
        log.info("by the child")
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.ranks(64, backend="fake", as_rank=[63])
def test_of_a_fake_world(world):
    log.info("info by %d", world.rank)
