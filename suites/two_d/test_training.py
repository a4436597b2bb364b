"""Tensor parallel parameters under `fully_shard` and `replicate` learn what the unsharded model learns."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close, assert_sharded_parity
from lockstep.conformance.models import TensorParallelModel
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(4)

PLANS = pytest.mark.parametrize("plan", TensorParallelModel.plans)
ON_TWO = pytest.mark.ranks(2)
GRIDS = pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 1), marks=pytest.mark.ranks(1)),
        pytest.param((1, 2), marks=ON_TWO),
        pytest.param((2, 1), marks=ON_TWO),
        pytest.param((3, 1), marks=pytest.mark.ranks(3)),
        (2, 2),
        (1, 2, 2),
        (2, 1, 2),
        (2, 2, 1),
    ],
    ids=lambda shape: "x".join(map(str, shape)),
)


def bare(world):
    torch.manual_seed(world.seed)
    return TensorParallelModel().to(world.device)


def train(grid, reference, model, steps=2, optimizer=torch.optim.SGD):
    """Train both alike, with momentum; compare gradients at each step, and parameters at the end."""
    optimizers = [optimizer(m.parameters(), 0.1) for m in (reference, model)]
    for step in range(steps):
        batch = reference.batch(torch.Generator().manual_seed(step), size=2 * grid.data.size())
        batch = batch.to(next(reference.parameters()).device)
        reference(batch).square().mean().backward()
        model(grid.own(batch)).square().mean().backward()
        assert_sharded_parity(model, reference)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_sharded_parity(model, reference)


@GRIDS
@PLANS
def test_training_equals_the_unsharded_one(world, grid, fully_shard, shape, plan):
    reference, axes = bare(world), grid(*shape)
    model = copy.deepcopy(reference).parallelize(axes.tensor, plan)
    train(axes, reference, fully_shard.shard(model, mesh=axes.data))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 2), marks=ON_TWO),
        pytest.param((2, 1), marks=ON_TWO),
        (2, 2),
    ],
    ids=lambda shape: "x".join(map(str, shape)),
)
@PLANS
def test_replicas_train_as_the_unsharded_model(world, grid, replicate, shape, plan):
    reference, axes = bare(world), grid(*shape)
    model = copy.deepcopy(reference).parallelize(axes.tensor, plan)
    train(axes, reference, replicate.shard(model, mesh=axes.data))


@PLANS
@pytest.mark.ranks(2)
def test_a_forward_sends_no_more_over_the_tensor_axis_than_unsharded(world, grid, fully_shard, plan):
    """The data axis has one rank, so all that two ranks send is of tensor parallelism."""
    axes = grid(1, 2)
    batch = TensorParallelModel.batch(torch.Generator().manual_seed(0)).to(world.device)
    sent = []
    for sharded in (False, True):
        model = bare(world).parallelize(axes.tensor, plan)
        if sharded:
            fully_shard.shard(model, mesh=axes.data)
        with CollectivesLog() as log:
            model(batch)
        sent.append([(each.op, each.nbytes) for each in log if each.group_size == 2])
    assert sent[1] == sent[0] != []


@pytest.mark.parametrize("reshard", [False, True])
@PLANS
def test_parameters_may_be_kept_after_forward(world, grid, fully_shard, reshard, plan):
    reference, axes = bare(world), grid(2, 2)
    model = copy.deepcopy(reference).parallelize(axes.tensor, plan)
    train(axes, reference, fully_shard.shard(model, mesh=axes.data, reshard_after_forward=reshard))


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_may_be_divided_twice_along_any_dim(world, grid, fully_shard, dim):
    """Along the dim of the tensor axis, evenly and not, and along the other one."""
    reference, axes = bare(world), grid(2, 2)
    model = copy.deepcopy(reference).parallelize(axes.tensor, "sequence")
    settings = {"shard_placement_fn": lambda p: Shard(min(dim, p.dim() - 1))}
    train(axes, reference, fully_shard.shard(model, mesh=axes.data, **settings))


def test_parameters_may_be_divided_along_two_tensor_axes(world, grid, fully_shard):
    axes = grid(1, 2, 2, num_tensor=2)
    torch.manual_seed(world.seed)
    reference = nn.Linear(6, 10, bias=False).to(world.device)
    model = copy.deepcopy(reference)
    placed = distribute_tensor(model.weight.detach(), axes.tensor, [Shard(0), Shard(0)])
    model.weight = nn.Parameter(placed)
    fully_shard(model, mesh=axes.data)
    batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(world.device)
    reference(batch).square().mean().backward()
    inputs = distribute_tensor(batch, axes.tensor, [Replicate(), Replicate()])
    model(inputs).full_tensor().square().mean().backward()
    assert_sharded_parity(model, reference)


@PLANS
def test_gradients_accumulate_until_they_are_reduced(world, grid, fully_shard, plan):
    reference, axes = bare(world), grid(2, 2)
    model = copy.deepcopy(reference).parallelize(axes.tensor, plan)
    fully_shard.shard(model, mesh=axes.data)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        batch = reference.batch(torch.Generator().manual_seed(step)).to(world.device)
        reference(batch).square().mean().backward()
        model(axes.own(batch)).square().mean().backward()
    assert_sharded_parity(model, reference)


def test_replicas_of_tensor_parallel_shards_may_wait_with_their_sum(world, grid, fully_shard):
    reference, axes = bare(world), grid(2, 1, 2)
    model = copy.deepcopy(reference).parallelize(axes.tensor, "sequence")
    fully_shard.shard(model, mesh=axes.data)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        batch = reference.batch(torch.Generator().manual_seed(step)).to(world.device)
        reference(batch).square().mean().backward()
        model(axes.own(batch)).square().mean().backward()
    assert_sharded_parity(model, reference)


@PLANS
def test_modules_compute_with_tensor_parallel_parameters(world, grid, fully_shard, plan):
    """In forward a parameter is a `DTensor` over the tensor axis alone, in the dtype of computation."""
    axes = grid(2, 2)
    model = bare(world).parallelize(axes.tensor, plan)
    fully_shard.shard(model, mesh=axes.data, **fully_shard.precision(torch.bfloat16, torch.float32))
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(model.batch(torch.Generator()).to(world.device)).float().sum().backward()
    weight = seen[0]
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.placements, weight.dtype) == ((10, 6), (Shard(0),), torch.bfloat16)
    assert weight.device_mesh == axes.tensor
    assert (
        {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    )


@PLANS
def test_unsharded_parameters_are_tensor_parallel(world, grid, fully_shard, plan):
    axes, full = grid(2, 2), dict(bare(world).named_parameters())
    model = bare(world).parallelize(axes.tensor, plan)
    fully_shard.shard(model, mesh=axes.data)
    unit = model.blocks[0]
    unit.unshard()
    weight = unit.down.weight
    assert (weight.placements, weight.device_mesh) == ((Shard(1),), axes.tensor)
    assert_named_close({"": weight.detach().full_tensor()}, {"": full["blocks.0.down.weight"].detach()})
    unit.reshard()
    assert unit.down.weight.placements == (Shard(0), Shard(1))


def test_bf16_gradients_are_close_to_unsharded_ones(world, grid, fully_shard):
    reference, axes = bare(world), grid(2, 2)
    model = copy.deepcopy(reference).parallelize(axes.tensor, "sequence")
    fully_shard.shard(model, mesh=axes.data, **fully_shard.precision(torch.bfloat16, torch.float32))
    batch = reference.batch(torch.Generator().manual_seed(0)).to(world.device)
    reference(batch).square().mean().backward()
    model(axes.own(batch)).float().square().mean().backward()
    for name, gradient in fully_shard.full_gradients(model).items():
        expected = dict(reference.named_parameters())[name].grad
        # Rounded in each layer, forward and backward: some units of 2^-8 of the largest element.
        assert (gradient - expected).abs().max() < 0.1 * expected.abs().max(), name


@PLANS
def test_frozen_parameters_stay_and_others_learn(world, grid, fully_shard, plan):
    reference, axes = bare(world), grid(2, 2)
    for name, p in reference.named_parameters():
        p.requires_grad_("down" in name or "norm" in name)
    model = copy.deepcopy(reference).parallelize(axes.tensor, plan)
    train(axes, reference, fully_shard.shard(model, mesh=axes.data))


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointed_blocks_train_the_same(world, grid, fully_shard, reentrant):
    reference, axes = bare(world), grid(2, 2)
    model = copy.deepcopy(reference).parallelize(axes.tensor, "sequence")
    fully_shard.shard(model, mesh=axes.data)
    batch = reference.batch(torch.Generator().manual_seed(0)).to(world.device)
    reference(batch).square().mean().backward()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    model(axes.own(batch)).square().mean().backward()
    assert_sharded_parity(model, reference)


@PLANS
def test_a_copy_trains_as_its_original(world, grid, fully_shard, plan):
    reference, axes = bare(world), grid(2, 2)
    model = fully_shard.shard(copy.deepcopy(reference).parallelize(axes.tensor, plan), mesh=axes.data)
    train(axes, reference, copy.deepcopy(model))
    assert_sharded_parity(model, bare(world))


def test_a_model_made_on_the_meta_device_gets_its_values_afterwards(world, grid, fully_shard):
    reference, axes = bare(world), grid(2, 2)
    with torch.device("meta"):
        model = TensorParallelModel().parallelize(axes.tensor, "sequence")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=axes.data)
    model.to_empty(device=world.device)
    with torch.no_grad():
        for p, full in zip(model.parameters(), reference.parameters(), strict=True):
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None))
    train(axes, reference, model)


def test_axes_of_different_meshes_are_refused(world, grid, fully_shard):
    model = bare(world).parallelize(grid(2, 2).tensor, "sequence")
    with pytest.raises((ValueError, RuntimeError), match=r"different|mesh"):
        fully_shard(model, mesh=world.mesh(4, names=("all",)))


def test_the_axis_of_the_parameters_themselves_is_refused(world, grid, fully_shard):
    axes = grid(2, 2)
    model = bare(world).parallelize(axes.tensor, "sequence")
    with pytest.raises((ValueError, RuntimeError), match=r"different|overlapping"):
        fully_shard(model, mesh=axes.tensor)
