"""A session fixture on ranks."""

import os

import pytest
from notes import note


@pytest.fixture(scope="session", autouse=True)
def session(request):
    world = request.getfixturevalue("world") if "RANK" in os.environ else None
    if world:
        note(world, "session up")
    yield
    if world:
        note(world, "session down")
