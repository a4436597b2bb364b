"""Fixtures of a package, its modules and their classes."""

import pytest
from notes import note


@pytest.fixture(scope="package")
def package(world):
    note(world, "package up")
    yield "the package's own"
    note(world, "package down")


@pytest.fixture(scope="module")
def module(world, package, request):
    note(world, f"{request.module.__name__} up")
    yield
    note(world, f"{request.module.__name__} down")


@pytest.fixture(scope="class")
def of_class(world, module):
    note(world, "class up")
    yield
    note(world, "class down")
