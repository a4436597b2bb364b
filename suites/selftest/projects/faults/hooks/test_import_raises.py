import os

import pytest

if os.environ.get("RANK") == "1":
    raise ValueError("at import")


@pytest.mark.ranks(2)
def test_import_raises(world):
    world.barrier()
