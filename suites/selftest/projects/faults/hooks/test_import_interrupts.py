import os

import pytest

if os.environ.get("RANK") == "1":
    raise KeyboardInterrupt("at import")


@pytest.mark.ranks(2)
def test_import_interrupts(world):
    world.barrier()
