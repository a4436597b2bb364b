import pytest
import ring
import ulysses
from by_hand import SHARDS
from model import VOCAB, build, loss

from lockstep.layouts import assert_same_as_unsharded, keep_labels, witness_batches

BATCHES = witness_batches(VOCAB)


@pytest.mark.parametrize("kind", [ulysses, ring], ids=["ulysses", "ring"])
@pytest.mark.layouts(cp=(2, 4), tp=(1, 2), at_most=4)
def test_plan(layout, kind):
    assert_same_as_unsharded(layout, build, kind.Plan, BATCHES, loss, shards=SHARDS, parts=keep_labels)
