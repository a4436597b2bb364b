"""Fixtures that plugins look for."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def one():
    return 1
