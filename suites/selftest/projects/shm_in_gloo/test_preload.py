"""The collector knows nothing of what the server had imported when it forked this rank."""

import gc

import pytest


@pytest.mark.ranks(2, backend="shm")
def test_is_preloaded(world):
    import lockstep.shm

    known = [each for each in gc.get_objects() if isinstance(each, dict)]
    assert any(each is globals() for each in known)
    assert not any(each is vars(lockstep.shm) for each in known)
