"""Fixtures for tests of features that only the two composable fronts have."""

import pytest


@pytest.fixture(params=["fully_shard", "replicate"])
def front(fronts, request):
    """Each of the two composable fronts."""
    return fronts[request.param]
