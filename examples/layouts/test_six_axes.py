import pytest
import six_axes
from by_hand import SHARDS
from model import VOCAB, build, loss

from lockstep.layouts import assert_same_as_unsharded, witness_batches

BATCHES = witness_batches(VOCAB)


# at_most=8 adds those of 8 ranks.
@pytest.mark.parametrize("kind", [six_axes.Plan, six_axes.PlanWithOurs], ids=["fsdp2", "engine"])
@pytest.mark.layouts(pp=(1, 2), dp=(1, 2), fsdp=(2,), ep=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
def test_plan(layout, kind):
    assert_same_as_unsharded(layout, build, kind, BATCHES, loss, shards=SHARDS)
