"""`shard_placement_fn`: each parameter is sharded along the dim that it returns, evenly or not."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import Replicate, Shard

from lockstep.assertions import assert_named_close, assert_sharded_parity
from lockstep.assertions.closeness import EXACT

pytestmark = pytest.mark.ranks(2)

FULL = StateDictOptions(full_state_dict=True)


class Convolutions(nn.Module):
    """Parameters of one to four dims; their sizes are multiples of `size`, the classes and kernels apart."""

    units = ("first",)

    def __init__(self, size, classes):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(size, 2 * size, size, padding=size // 2), nn.Tanh())
        self.second = nn.Conv2d(2 * size, size, size, padding=size // 2, bias=False)
        self.last = nn.Linear(size, classes)

    def forward(self, images):
        return self.last(self.second(self.first(images)).mean((2, 3)))


def last(parameter):
    return Shard(-1)


def second(parameter):
    return Shard(1) if parameter.dim() > 1 else None


def third(parameter):
    return Shard(2) if parameter.dim() == 4 else Shard(0)


PLACEMENTS = pytest.mark.parametrize("placement", [last, second, third])
SIZES = pytest.mark.parametrize("uneven", [0, 1], ids=["even", "uneven"])


def convolutions(world, uneven):
    torch.manual_seed(world.seed)
    return Convolutions(world.size + uneven, 2 * world.size + uneven).to(world.device)


def dims(model, placement):
    """Return the dim that each parameter of the bare `model` is sharded along."""
    wanted = {name: placement(p) or Shard(0) for name, p in model.named_parameters()}
    return {name: wanted[name].dim % p.dim() for name, p in model.named_parameters()}


def images(world, model, seed=0):
    """Return a batch for all ranks, and this rank's part of it."""
    channels = model.second.out_channels
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(2 * world.size, channels, 4, 4, generator=generator).to(world.device)
    return batch, batch.chunk(world.size)[world.rank]


@pytest.mark.ranks(1, 2, 3)
@SIZES
@PLACEMENTS
def test_each_rank_holds_its_chunk_along_the_dim(world, fully_shard, uneven, placement):
    bare = convolutions(world, uneven)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    wanted = dims(bare, placement)
    model = fully_shard.shard(bare, shard_placement_fn=placement)
    for name, p in model.named_parameters():
        assert p.placements == (Shard(wanted[name]),)
        assert p.to_local().is_contiguous()
        chunks = full[name].chunk(world.size, wanted[name])
        mine = chunks[world.rank] if world.rank < len(chunks) else full[name].narrow(wanted[name], 0, 0)
        assert_named_close({name: p.to_local().detach()}, {name: mine})
        assert_named_close({name: p.detach().full_tensor()}, {name: full[name]})


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kept", [False, True], ids=["resharded", "kept"])
@SIZES
@PLACEMENTS
def test_gradients_and_steps_equal_the_unsharded_ones(world, fully_shard, uneven, placement, kept):
    reference = convolutions(world, uneven)
    settings = {"shard_placement_fn": placement, "reshard_after_forward": not kept}
    model = fully_shard.shard(copy.deepcopy(reference), **settings)
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (reference, model)]
    for step in range(2):
        batch, own = images(world, reference, step)
        reference(batch).square().mean().backward()
        model(own).square().mean().backward()
        assert_sharded_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_sharded_parity(model, reference)


@SIZES
def test_modules_compute_with_contiguous_parameters(world, fully_shard, uneven):
    """A user's `view` of a weight works as it does without sharding."""
    model = fully_shard.shard(convolutions(world, uneven), shard_placement_fn=last)
    seen = []
    model.second.register_forward_pre_hook(lambda module, _: seen.append(module.weight.is_contiguous()))
    model(images(world, model)[1])
    assert seen == [True]


@SIZES
def test_the_dim_makes_no_difference_in_low_precision(world, fully_shard, uneven):
    policy = fully_shard.precision(torch.bfloat16, torch.float32)
    found = []
    for placement in (last, None):
        model = fully_shard.shard(convolutions(world, uneven), shard_placement_fn=placement, **policy)
        model(images(world, model)[1]).float().square().mean().backward()
        found.append(fully_shard.full_gradients(model))
    assert_named_close(found[0], found[1], EXACT)


@SIZES
def test_accumulated_gradients_are_sharded_along_the_dim(world, fully_shard, uneven):
    reference = convolutions(world, uneven)
    model = fully_shard.shard(copy.deepcopy(reference), shard_placement_fn=last)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        batch, own = images(world, reference, step)
        reference(batch).square().mean().backward()
        model(own).square().mean().backward()
    assert_sharded_parity(model, reference)


@pytest.mark.ranks(4)
@SIZES
def test_replicas_are_sharded_along_the_dim(world, fully_shard, uneven):
    reference = convolutions(world, uneven)
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    wanted = dims(reference, last)
    model = fully_shard.shard(copy.deepcopy(reference), shard_placement_fn=last, mesh=mesh)
    for name, p in model.named_parameters():
        assert p.placements == (Replicate(), Shard(wanted[name]))
    batch, own = images(world, reference)
    reference(batch).square().mean().backward()
    model(own).square().mean().backward()
    assert_sharded_parity(model, reference)


@SIZES
def test_a_full_state_dict_does_not_show_the_dim(world, fully_shard, uneven):
    bare = convolutions(world, uneven)
    expected = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    model = fully_shard.shard(bare, shard_placement_fn=last)
    assert_named_close(get_model_state_dict(model, options=FULL), expected)


@pytest.mark.ranks(2, 3)
@SIZES
def test_a_checkpoint_loads_along_another_dim(world, fully_shard, uneven):
    saved = fully_shard.shard(convolutions(world, uneven), shard_placement_fn=last)
    dcp.save(saved.state_dict(), checkpoint_id=world.shared_tmp_path / "saved")
    torch.manual_seed(world.seed + 1)
    bare = convolutions(world, uneven)
    for p in bare.parameters():
        nn.init.zeros_(p)
    loaded = fully_shard.shard(bare, shard_placement_fn=second)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=world.shared_tmp_path / "saved")
    loaded.load_state_dict(state)
    assert_named_close(fully_shard.full_parameters(loaded), fully_shard.full_parameters(saved))


def test_a_dim_that_a_parameter_does_not_have_is_refused(world, fully_shard):
    with pytest.raises((ValueError, AssertionError, IndexError), match=r"Shard|dim"):
        fully_shard(nn.Linear(4, 4).to(world.device), shard_placement_fn=lambda _: Shard(1))


def test_ranks_that_choose_different_dims_learn_which(world, fully_shard):
    bare = nn.Linear(4, 4, bias=False).to(world.device)
    with pytest.raises(ValueError, match=rf"'weight'.*\((dim=)?{world.rank}\) here"):
        fully_shard(bare, shard_placement_fn=lambda _: Shard(world.rank))


def test_something_else_than_a_shard_is_refused(world, fully_shard):
    with pytest.raises((ValueError, TypeError), match="shard_placement_fn"):
        fully_shard(nn.Linear(4, 4).to(world.device), shard_placement_fn=lambda _: Replicate())
