"""A file that one rank cannot import."""

import os

import pytest

if os.environ.get("RANK") == "1":
    import nowhere_to_be_found  # noqa: F401

pytestmark = pytest.mark.ranks(2)


def test_a(world):
    pass
