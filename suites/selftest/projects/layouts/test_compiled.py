"""Compiled plans, held to a model that is not compiled."""

import pytest
from plan import CompiledPlan, CompiledPlanWithoutReduction, batches, build, loss

from lockstep.layouts import assert_same_as_unsharded

pytestmark = pytest.mark.layouts(dp=(1, 2))


def test_right(layout, compiles):
    assert_same_as_unsharded(layout, build, CompiledPlan, batches(), loss)
    assert len(compiles.graphs) == 1
    compiles.assert_none_recompiled()


def test_without_reduction(layout):
    assert_same_as_unsharded(layout, build, CompiledPlanWithoutReduction, batches(), loss)
