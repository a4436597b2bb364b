import os

import pytest

if os.environ.get("RANK") == "1":
    raise SystemExit(3)


@pytest.mark.ranks(2)
def test_import_exits(world):
    world.barrier()
