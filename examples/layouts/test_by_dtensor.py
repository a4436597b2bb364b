import pytest
from by_dtensor import Plan
from model import VOCAB, build, loss

from lockstep.layouts import assert_same_as_unsharded, witness_batches


@pytest.mark.layouts(dp=(1, 2), fsdp=(1, 2), tp=(1, 2), at_most=4)
def test_plan(layout):
    assert_same_as_unsharded(layout, build, Plan, witness_batches(VOCAB), loss)
