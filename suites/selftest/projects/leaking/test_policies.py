"""Tests whose outcome depends on the policy."""

import os
import subprocess

import pytest
from pids import SLEEP, note

pytestmark = pytest.mark.ranks(2)
kept = []


def test_leaves(only):
    if only:
        note(subprocess.Popen(SLEEP).pid)
        kept.append(open("kept.txt", "w"))


def test_leaves_state(only):
    if only:
        os.environ["LEFT"] = "1"


def test_fails_and_leaves(only):
    if only:
        note(subprocess.Popen(SLEEP).pid)
        assert not only, "its own failure"


def test_leaves_nothing(world):
    assert world.gather(world.rank) == [0, 1]
