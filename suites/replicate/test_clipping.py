"""The norm that `torch.nn.utils.clip_grad_norm_` clips by: each gradient counts once, however it lies."""

import copy

import pytest
import torch
from torch import nn

from harness.assertions import assert_sharded_parity
from harness.conformance.models import KnownGradient, KnownGradients, NestedWrappedModule

pytestmark = pytest.mark.ranks(2)

INF = float("inf")
FINITE_NORMS = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
EACH_WAY = pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one_by_one"])


def clip(model, largest, norm_type=2.0, **more):
    """Clip, and return the norm over all ranks."""
    return nn.utils.clip_grad_norm_(model.parameters(), largest, norm_type, **more).full_tensor()


@pytest.mark.ranks(1, 2, 3)
@FINITE_NORMS
@EACH_WAY
def test_norm_and_clipped_gradients_equal_the_unsharded_ones(world, front, norm_type, foreach):
    """pytorch#88955: the norm was not reduced, or counted once per rank."""
    check_clipping(world, front, norm_type, foreach)


# On three ranks one has an empty shard, of which torch's largest norm is an error.
@pytest.mark.ranks(1, 2)
@EACH_WAY
def test_the_largest_element_and_clipped_gradients_equal_the_unsharded_ones(world, front, foreach):
    check_clipping(world, front, INF, foreach)


def check_clipping(world, front, norm_type, foreach):
    reference = NestedWrappedModule().to(world.device)
    model = front.apply(copy.deepcopy(reference), NestedWrappedModule.units)
    generator = torch.Generator().manual_seed(world.seed)
    batch = torch.randn(4 * world.size, 8, generator=generator).to(world.device)
    reference(batch).square().mean().backward()
    model(batch.chunk(world.size)[world.rank]).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    norm = clip(model, 0.01, norm_type, foreach=foreach)
    assert (norm.shape, expected.item() > 0.01) == ((), True)
    torch.testing.assert_close(norm, expected)
    world.assert_same(norm)
    assert_sharded_parity(model, reference)


@pytest.mark.ranks(1, 2, 4)
@FINITE_NORMS
def test_a_rank_without_elements_takes_part(world, front, norm_type):
    """pytorch#99174: a rank with only empty shards did not join."""
    model = front(KnownGradient(1).to(world.device))
    model(torch.tensor(-4.0, device=world.device)).backward()
    norm = clip(model, 1.0, norm_type)
    assert norm.item() == pytest.approx(4.0)
    assert model.weight.grad.full_tensor().item() == pytest.approx(-1.0, rel=1e-5)


def test_gradients_below_the_largest_norm_keep_every_bit(world, front):
    model = front.apply(KnownGradients(3).to(world.device), KnownGradients.units)
    model(torch.tensor(3.0 * world.rank, device=world.device)).backward()
    assert clip(model, 1e4).item() == pytest.approx(1.5 * 12**0.5)
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [[1.5] * 3] * 4


@FINITE_NORMS  # of the largest norm DTensor makes a MAX, in which gloo drops a NaN
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_nonfinite_gradient_in_one_shard_is_seen_by_all_ranks(world, front, norm_type, bad):
    model = front(KnownGradient(4).to(world.device))
    model(torch.tensor([1.0, 1.0, 1.0, bad if world.rank else 1.0], device=world.device)).backward()
    assert world.gather(repr(clip(model, 1.0, norm_type).item())) == [repr(bad)] * 2
