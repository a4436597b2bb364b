"""Parameters of awkward shapes, tied, ignored and in lists of modules: how they are laid out."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.assertions import assert_named_close, assert_same_across_ranks, assert_sharded_parity
from lockstep.conformance.models import NestedWrappedModule

pytestmark = pytest.mark.ranks(2)


class Odd(nn.Sequential):
    """Parameters of no, one and few elements, and a tied weight."""

    units = ("inner", "tiny")

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(8, 5)
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.tiny = nn.Linear(1, 1, bias=False)
        self.last = nn.Linear(5, 7, bias=False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.last.weight


@pytest.mark.ranks(1, 2, 3, 4)
def test_each_rank_holds_its_chunk_along_dim_0(world, fully_shard):
    bare = Odd().to(world.device)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    model = fully_shard.shard(bare)
    local = {name: p.to_local().detach() for name, p in model.named_parameters()}
    for name, whole in full.items():
        chunks = whole.chunk(world.size)
        mine = chunks[world.rank] if world.rank < len(chunks) else whole[:0]
        assert_named_close({name: local[name]}, {name: mine})
    assert {name: p.shape for name, p in model.named_parameters()} == {n: t.shape for n, t in full.items()}


def test_parameters_are_dtensors_with_the_same_full_values(world, front):
    bare = Odd().to(world.device)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    model = front.shard(bare)
    found = dict(model.named_parameters())
    assert {(type(p.data), p.placements, p.device_mesh.shape) for p in found.values()} == {
        (DTensor, front.placements, (2,))
    }
    assert_named_close({name: p.full_tensor() for name, p in found.items()}, full)
    assert all(isinstance(p, nn.Parameter) for p in found.values())


def test_replicas_are_bit_equal_after_steps(replicate, step):
    model = replicate.shard(NestedWrappedModule())
    start = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(3):
        step(model, number)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(p.full_tensor(), start[name]) for name, p in model.named_parameters())
    assert_same_across_ranks(dict(model.named_parameters()))


def test_modules_in_one_list_train_as_one_group(world, front):
    reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(world.device)
    reference[2].weight = reference[0].weight  # tied: so they must be in one group
    model = copy.deepcopy(reference)
    front([model[0], model[2]])
    front(model)
    batch = torch.randn(2 * world.size, 8, generator=torch.Generator().manual_seed(1)).to(world.device)
    reference(batch).square().mean().backward()
    model(batch.chunk(world.size)[world.rank]).square().mean().backward()
    assert_sharded_parity(model, reference)


class Tied(nn.Sequential):
    """A layer's weight under a second name in another."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.PReLU())
        self[1].kernel = self[0].weight


def test_a_parameter_in_two_groups_is_an_error_naming_both(world, front):
    """torch 2.13 names it in one of the two."""
    with pytest.raises((ValueError, RuntimeError), match=r"weight.*kernel|kernel.*weight"):
        front.shard(Tied(), ("0", "1"))(torch.ones(2, 8, device=world.device))


def test_parameters_without_dimensions_cannot_be_sharded(world, fully_shard):
    model = nn.Linear(2, 2).to(world.device)
    model.scalar = nn.Parameter(torch.tensor(1.0, device=world.device))
    with pytest.raises(ValueError, match=r"scalar|0-dim"):
        fully_shard(model)


class Scaled(nn.Linear):
    """A layer with a parameter without dimensions."""

    def __init__(self):
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * super().forward(x)


def test_parameters_without_dimensions_may_be_replicated(world, replicate):
    reference = Scaled().to(world.device)
    model = replicate.shard(copy.deepcopy(reference))
    for module in (reference, model):
        module(torch.ones(1, 2, device=world.device)).sum().backward()
    assert (model.scale.shape, model.scale.grad.shape) == ((), ())
    assert_sharded_parity(model, reference)


def test_ignored_parameters_are_left_alone(world, front, step, collectives):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(world.device)
    ignored = set(model[0].parameters())
    before = {p: p.detach().clone() for p in ignored}
    front(model, ignored_params=ignored)
    step(model)
    assert set(model[0].parameters()) == ignored
    assert all(torch.equal(p, before[p]) for p in ignored)
    assert not any(isinstance(p, DTensor) for p in ignored)
    numel = 8 * 8 + 8
    assert [e.nbytes for e in front.engine.traffic(collectives).reductions] == [4 * numel], collectives
    gradients = world.gather([p.grad.cpu() for p in model[0].parameters()])
    assert not any(torch.equal(*pair) for pair in zip(*gradients, strict=True))
