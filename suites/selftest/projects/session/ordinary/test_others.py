"""A test that a hook marks, and one without a mark."""

import os


def test_marked_by_hook():
    assert os.environ["RANK"] == "0"


def test_in_the_controller():
    assert "RANK" not in os.environ
