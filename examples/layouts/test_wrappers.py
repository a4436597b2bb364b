import pytest
import with_ddp
import with_fsdp2
import with_fully_shard
from model import VOCAB, build, build_tied, loss

from lockstep.layouts import assert_same_as_unsharded, witness_batches

BATCHES = witness_batches(VOCAB)


@pytest.mark.parametrize("make", [build, build_tied], ids=["apart", "tied"])
@pytest.mark.parametrize("kind", [with_fsdp2, with_fully_shard], ids=["fsdp2", "engine"])
@pytest.mark.layouts(dp=(1, 2), fsdp=(2,), at_most=4)
def test_fully_shard(layout, kind, make):
    assert_same_as_unsharded(layout, make, kind.Plan, BATCHES, loss)


@pytest.mark.layouts(dp=(2, 4), at_most=4)
def test_ddp(layout):
    assert_same_as_unsharded(layout, build, with_ddp.Plan, BATCHES, loss)
