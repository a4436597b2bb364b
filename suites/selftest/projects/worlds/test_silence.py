"""Ranks that report nothing, or other subtests than the others."""

import pytest

pytestmark = pytest.mark.ranks(2)


def test_silent(world):
    assert world.rank == 0


def test_subtests_disagree(world, subtests):
    with subtests.test("sometimes"):
        if world.rank == 1:
            pytest.skip("no")
    if world.rank == 0:
        with subtests.test("here only"):
            pass
