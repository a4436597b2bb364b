import fsdp_by_hand
import pytest
import six_axes
from model import VOCAB, build, loss

from lockstep.layouts import assert_same_as_unsharded, witness_batches

BATCHES = witness_batches(VOCAB)
PLANS = {"by-hand": fsdp_by_hand.Plan, "fsdp2": six_axes.Plan, "engine": six_axes.PlanWithOurs}


# at_most=8 adds those of 8 ranks.
@pytest.mark.parametrize("kind", PLANS.values(), ids=PLANS)
@pytest.mark.layouts(pp=(1, 2), dp=(1, 2), fsdp=(2,), ep=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
def test_plan(layout, kind):
    assert_same_as_unsharded(layout, build, kind, BATCHES, loss, shards=kind.shards)
