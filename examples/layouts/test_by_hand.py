import pytest
import vocab_parallel
from by_hand import SHARDS, Plan
from model import VOCAB, build, build_tied, loss

from lockstep.layouts import assert_same_as_unsharded, keep_labels, witness_batches

BATCHES = witness_batches(VOCAB)


# at_most=8 adds 4 layouts, on 8 ranks.
@pytest.mark.layouts(dp=(1, 2), ep=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
def test_plan(layout):
    assert_same_as_unsharded(layout, build, Plan, BATCHES, loss, shards=SHARDS, parts=keep_labels)


@pytest.mark.layouts(cp=(1, 2), tp=(1, 2), at_most=4)
def test_tied_embeddings(layout):
    assert_same_as_unsharded(layout, build_tied, Plan, BATCHES, loss, shards=SHARDS)


@pytest.mark.parametrize("make", [build, build_tied], ids=["apart", "tied"])
@pytest.mark.layouts(ep=(1, 2), cp=(1, 2), tp=(2,), at_most=4)
def test_vocab_parallel(layout, make):
    plan = vocab_parallel.Plan
    assert_same_as_unsharded(layout, make, plan, BATCHES, loss, shards=plan.shards)
