"""Two tests that use one golden."""

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("value", [1, 2])
def test_one_name(golden, value):
    with golden("shared") as run:
        run.record("value", value)
