"""A fixture `engine` that has nothing to do with engines under test."""

import pytest


@pytest.fixture(params=["steam", "diesel"])
def engine(request):
    return request.param


def test_an_engine_runs(engine):
    assert engine in ("steam", "diesel")
