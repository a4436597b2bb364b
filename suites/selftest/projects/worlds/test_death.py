"""Ranks that die, and children that are left."""

import os
import subprocess

import pytest

pytestmark = pytest.mark.ranks(2)


def test_dies(world):
    os._exit(1)


def test_leaves_a_child(world):
    subprocess.Popen(["sleep", "300"])
