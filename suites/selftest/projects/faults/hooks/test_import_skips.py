import os

import pytest

if os.environ.get("RANK") == "1":
    pytest.skip("at import", allow_module_level=True)


@pytest.mark.ranks(2)
def test_import_skips(world):
    world.barrier()
