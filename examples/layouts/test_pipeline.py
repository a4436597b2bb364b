import pytest
from model import VOCAB, build, build_tied, loss
from pipeline import SHARDS, TIED, Plan, PlanWith1F1B

from lockstep.layouts import assert_same_as_unsharded, witness_batches

BATCHES = witness_batches(VOCAB)


# at_most=8 adds 6 layouts, on 8 ranks.
@pytest.mark.layouts(pp=(2,), dp=(1, 2), ep=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
def test_gpipe(layout):
    assert_same_as_unsharded(layout, build, Plan, BATCHES, loss, shards=SHARDS)


@pytest.mark.layouts(pp=(2,), tp=(1, 2), at_most=4)
def test_tied_embeddings(layout):
    assert_same_as_unsharded(layout, build_tied, Plan, BATCHES, loss, shards=TIED)


@pytest.mark.layouts(pp=(2,), dp=(1, 2), at_most=4)
def test_1f1b(layout):
    # It wants at least as many microbatches as stages.
    few = (2, 3, 2)
    assert_same_as_unsharded(layout, build, PlanWith1F1B, BATCHES, loss, shards=SHARDS, microbatches=few)
