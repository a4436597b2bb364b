"""Twenty claims that fail, and one that the arguments leave out."""

import time

import pytest


@pytest.mark.parametrize("n", range(20))
def test_it(engine, n):
    time.sleep(0.1)
    assert n == 20


def test_left_out(engine):
    pass
