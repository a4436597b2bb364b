import pathlib

import pytest


@pytest.mark.ranks(1)
def test_b(module):
    assert pathlib.Path("ended.txt").read_text() == "test_first "


@pytest.mark.ranks(1)
def test_reported():
    pass
