"""The two hosts of these tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.selftest.hosts.bed import Bed, two_hosts


@pytest.fixture
def bed() -> Iterator[Bed]:
    """Two hosts for one test; nothing stays behind on either."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path), warm=True) as bed:
        yield bed
        bed.assert_nothing_is_left()


@pytest.fixture(scope="module")
def shared_bed() -> Iterator[Bed]:
    """Two hosts for all tests of a file."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path), warm=True) as bed:
        yield bed
