"""A fixture of all self-tests of property tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import core


@pytest.fixture(autouse=True)
def _own_seeds() -> Iterator[None]:
    """Leave the seeds of other property tests in this process as they are."""
    before = core.threadlocal._hypothesis_global_random
    yield
    core.threadlocal._hypothesis_global_random = before
