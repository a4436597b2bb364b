"""Tests that note their processes, random numbers and modules."""

import os
import sys

import pytest
from notes import note

pytestmark = pytest.mark.ranks(2, timeout=60)


def test_a_first(world):
    note(world, "pids")


def test_a_second(world):
    note(world, "pids")


def test_a_module(world):
    import heavy

    assert heavy.pid == os.getppid()
    assert "torch.distributed.fsdp" not in sys.modules  # which is preloaded where nothing else is asked for


def test_a_failure(world, run_subtests):
    assert False


def test_not_chosen(world):
    note(world, "pids")
