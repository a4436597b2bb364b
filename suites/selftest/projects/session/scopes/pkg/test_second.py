"""The last module of the package."""

import pytest
from notes import note


@pytest.mark.ranks(2)
def test_d(world, module, package):
    assert package == "the package's own"
    note(world, "d")
