"""Failures of every kind that a CI system shows."""

import os
import signal

import pytest
from checks import expect

on_two_ranks = pytest.mark.ranks(2)


@on_two_ranks
def test_passes(world, record_property, record_testsuite_property, record_xml_attribute):
    record_testsuite_property("backend", world.backend)
    record_testsuite_property("of rank", world.rank)
    record_property("bad\x00name", "bad\x01value")


@on_two_ranks
def test_fails(world, record_testsuite_property):
    record_testsuite_property("backend", world.backend)
    print("bell \a, escape \x1b[0m, null \0, half a pair \ud800, not utf-8:", flush=True)
    os.write(1, b"\xff\xfe\n")
    assert world.rank == 0, "100%, at 1:2\n\ud800 and \0"


@on_two_ranks
def test_fails_elsewhere(world):
    expect(world.rank == 0)


@on_two_ranks
def test_dies(world):
    print("dying")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@on_two_ranks
def test_cases(world, run_subtests):
    run_subtests({"n": [1, 2]}, lambda n: expect(n == 1))


@on_two_ranks
def test_fails_twice(world, request):
    request.addfinalizer(lambda: expect(world.rank == 0))
    assert world.rank == 1


@on_two_ranks
def test_prints_100_megabytes(world):
    line = b"x" * 99 + b"\n"
    for _ in range(100):
        os.write(1, line * 10_000)


@on_two_ranks
def test_says_too_much(world):
    raise ValueError("boom " * 2_000_000)


@on_two_ranks
def test_says_too_much_in_lines(world):
    raise ValueError(("boom " * 19 + "\n") * 100_000)


def test_without_ranks():
    expect(False)
