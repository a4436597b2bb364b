"""Parameters that some ranks use: marks in the reduction tell those that no rank has used."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lockstep.engine import MixedPrecisionPolicy, fully_shard, replicate

pytestmark = pytest.mark.ranks(2)

# So small that dividing by the number of ranks, or casting to the dtype of the reduction, makes -0.0 of it.
TINY = {None: -1e-45, torch.bfloat16: -1e-40, torch.float16: -6e-8}
DTYPES = pytest.mark.parametrize("dtype", TINY, ids=str)


class SomeUsed(nn.Module):
    """Layers of which all ranks use one, and one rank one more; a single row is on the first rank alone."""

    def __init__(self):
        super().__init__()
        self.used_by_all, self.used_by_one, self.not_used = (nn.Linear(4, 3) for _ in range(3))
        self.row = nn.Linear(4, 1)

    def forward(self, x, wants_more):
        output = self.used_by_all(x)
        return output + self.used_by_one(x) + self.row(x) if wants_more else output


def check_used(model, expected):
    found = {name: p.grad is not None for name, p in model.named_parameters()}
    assert found == {name: name.split(".")[0] in expected for name in found}


@DTYPES
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("front", [fully_shard, replicate])
def test_what_any_rank_used_has_a_gradient_on_all(world, front, dtype):
    model = front(SomeUsed().to(world.device), mp_policy=MixedPrecisionPolicy(dtype))
    x = torch.full((1, 4), TINY[dtype], device=world.device)
    model(x, world.rank == world.size - 1).sum().backward()
    check_used(model, ("used_by_all", "used_by_one", "row"))


@DTYPES
@pytest.mark.ranks(4)
@pytest.mark.parametrize("across", [(True,), (False, True)], ids=["at_once", "later"])
def test_what_a_rank_of_any_replica_used_has_a_gradient_on_all(world, dtype, across):
    mesh = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(SomeUsed().to(world.device), mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype))
    x = torch.full((1, 4), TINY[dtype], device=world.device)
    for number, everywhere in enumerate(across):
        model.set_requires_all_reduce(everywhere)
        model(x, number == 0 and world.rank == 3).sum().backward()
    check_used(model, ("used_by_all", "used_by_one", "row"))


def test_a_divide_factor_makes_no_used_parameter_unused(world):
    model = fully_shard(SomeUsed().to(world.device), mp_policy=MixedPrecisionPolicy(torch.float16))
    model.set_gradient_divide_factor(1e12)
    model(-torch.ones(1, 4, device=world.device), world.rank == 1).sum().backward()
    check_used(model, ("used_by_all", "used_by_one", "row"))
    assert not model.used_by_one.weight.grad.full_tensor().any()


@pytest.mark.parametrize("front", [fully_shard, replicate])
def test_parameters_may_be_frozen_and_thawed_between_microbatches(world, front):
    model = SomeUsed().to(world.device)
    bare = copy.deepcopy(model)
    front(model)
    for number in range(3):
        for each in (model, bare):
            each.used_by_all.weight.requires_grad_(number != 1)
            each.used_by_one.requires_grad_(number == 2)
        model.set_requires_gradient_sync(number == 2)
        batches = torch.arange(1.0, 1 + 4 * world.size, device=world.device).view(world.size, 1, 4)
        model(batches[world.rank], True).sum().backward()
        bare(batches, True).sum((1, 2)).mean().backward()
    for name, parameter in bare.named_parameters():
        found = model.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            torch.testing.assert_close(found.full_tensor(), parameter.grad)
