import time

import pytest


@pytest.mark.parametrize("n", range(4))
def test_plain(n, worker_id):
    assert worker_id in ("gw0", "gw1")
    time.sleep(0.1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("n", range(8))
def test_marked(world, n, worker_id):
    world.assert_same(worker_id)
    time.sleep(0.2)
    assert world.rank + n != 8
