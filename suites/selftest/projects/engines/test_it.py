"""Tests of an engine: by fixture, by fixture of a fixture, by subtests, by name; and one of none."""

import os

import pytest


@pytest.fixture
def model(engine):
    return engine.name


@pytest.mark.ranks(1, 2)
def test_sizes(world, model):
    with open(f"ran-{world.size}-{world.rank}.txt", "a") as file:
        print(model, os.getpid(), file=file)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("a", [1, 2])
def test_points(world, run_subtests, engine, a):
    def claim(b):
        assert (a, b, engine.name) != (2, 3, "other")

    run_subtests({"b": [3, 4]}, claim)


@pytest.mark.ranks(2)
def test_by_name(world, request):
    request.getfixturevalue("engine")


def test_of_no_engine():
    assert 0
