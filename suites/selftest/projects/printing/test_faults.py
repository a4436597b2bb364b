"""Ranks that print before they pass, die or hang."""

import logging
import os
import signal
import sys
import time

import pytest

pytestmark = pytest.mark.ranks(2)
print("an import of", os.environ.get("RANK"))


def say(world, *, what):
    print(what, "out", world.rank)
    print(what, "err", world.rank, file=sys.stderr)


@pytest.fixture
def prepared(world):
    say(world, what="prepared")


def test_dies(world, prepared):
    say(world, what="dying")
    os.write(2, b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_dies_in_a_subtest(world, run_subtests):
    def claim(n):
        say(world, what=f"case {n}")
        if (world.rank, n) == (1, 3):
            os._exit(3)

    say(world, what="before")
    run_subtests({"n": [2, 3]}, claim)


def test_dies_late(world, request):
    def die():
        say(world, what="tearing down")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    request.addfinalizer(die)
    say(world, what="calling")


@pytest.mark.ranks(2, timeout=2)
def test_hangs(world, prepared):
    print("".join(f"line {n}\n" for n in range(100_000)), end="")
    print("stuck err", world.rank, file=sys.stderr)
    if world.rank == 1:
        time.sleep(100)


def test_passes(world, prepared):
    say(world, what="calling")
    logging.warning("logged by %d", world.rank)


def test_subtests(world, subtests):
    say(world, what="before")
    with subtests.test("one"):
        say(world, what="within")


@pytest.mark.parametrize("text", ["a/../b::c"])
def test_parameters(world, text):
    print(text)
