"""Faults that are injected for a context alone."""

import math

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def test_a_fault_ends_with_its_context_however_that_ends(world, faults):
    with pytest.raises(KeyError), faults.corrupt(op="all_reduce", value=math.nan) as injected:
        raise KeyError("before any collective")
    assert not injected.has_struck
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    assert not injected.has_struck
