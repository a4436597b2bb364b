import os

import pytest

if os.environ.get("RANK") == "1":
    pytest.exit("at import")


@pytest.mark.ranks(2)
def test_import_stops(world):
    world.barrier()
