"""The hooks of a project that launches its distributed tests itself."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: None


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    if getattr(fixturedef.func, "is_dist_fixture", False):
        fixturedef.func()(request)


def pytest_collection(session):
    """pytest 9 takes no class for a fixture, unless it is registered."""
    from launcher import FIXTURES

    for fixture in FIXTURES:
        pytest.register_fixture(name=fixture.__name__, func=fixture, node=session)
