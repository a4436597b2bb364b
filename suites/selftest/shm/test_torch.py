"""Torch's own libraries on a process group: functional collectives, DTensor, DDP, FSDP, checkpoints, Join."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from suites.selftest.shm.samples import same, sample

pytestmark = [
    # torch 2.13 gave three collectives new names, torch 2.11 does not have those yet.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    # Of torch's own engines, which say what they will not be.
    pytest.mark.filterwarnings("ignore:.*FSDP.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=generator) for _ in range(3)]


def train(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in inputs:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(world: object) -> nn.Module:
    """Return the network after steps on the batches of all ranks, of which the gradient is the mean."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in zip(*(batches(rank) for rank in range(world.size)), strict=True):
        for part in parts:
            (model(part).square().sum() / world.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_trained(world: object, got: dict[str, torch.Tensor]) -> None:
    expected = reference(world).state_dict()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)


# functional collectives


@pytest.mark.ranks(2)
def test_functional_collectives(world, group):
    mine, both = sample(world.rank), [sample(0), sample(1)]
    assert same(functional.all_reduce(mine, "sum", group).wait(), sum(both))
    assert same(functional.all_gather_tensor(mine, 0, group).wait(), torch.cat(both))
    assert same(
        functional.reduce_scatter_tensor(mine, "sum", 0, group).wait(), sum(both).view(2, 3)[world.rank]
    )
    assert same(functional.broadcast(mine, 1, group).wait(), both[1])
    exchanged = functional.all_to_all_single(mine, [3, 3], [3, 3], group).wait()
    assert same(exchanged, torch.cat([piece.view(2, 3)[world.rank] for piece in both]))
    first, second = functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
    assert same(second + 0, sum(both) * 2)
    assert same(first + 0, sum(both))
    gathered = functional.all_gather_into_tensor_coalesced([mine, mine * 2], group)
    assert same(gathered[1] + 0, torch.cat(both) * 2)
    assert same(gathered[0] + 0, torch.cat(both))
    scattered = functional.reduce_scatter_tensor_coalesced([mine, mine * 2], "sum", [0, 0], group)
    assert same(scattered[1] + 0, sum(both).view(2, 3)[world.rank] * 2)
    assert same(scattered[0] + 0, sum(both).view(2, 3)[world.rank])


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.ranks(2)
def test_average_of_a_functional_collective(world, group):
    assert functional.all_reduce(torch.tensor([world.rank + 1.0]), "avg", group).wait().item() == 1.5


@pytest.mark.ranks(2)
def test_collectives_that_autograd_knows(world, group):
    mine = sample(world.rank).requires_grad_()
    differentiable.all_reduce(mine * 2, group=group).sum().backward()
    assert mine.grad.tolist() == [4.0] * 6
    mine.grad = None
    torch.cat(differentiable.all_gather(mine, group=group)).sum().backward()
    assert mine.grad.tolist() == [2.0] * 6


# DTensor


@pytest.mark.ranks(2)
def test_dtensor_redistributes(world, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    full = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    assert same(sharded.to_local(), full[world.rank * 2 :][:2])
    assert same(sharded.full_tensor(), full)
    assert same(sharded.redistribute(placements=[Shard(1)]).full_tensor(), full)
    partial = DTensor.from_local(full * (world.rank + 1), mesh, [Partial()])
    assert same(partial.redistribute(placements=[Replicate()]).to_local(), full * 3)
    assert same(partial.redistribute(placements=[Shard(0)]).to_local(), (full * 3)[world.rank * 2 :][:2])
    assert same(
        (sharded @ distribute_tensor(torch.ones(3, 1), mesh, [Replicate()])).full_tensor(),
        full.sum(1, keepdim=True),
    )


@pytest.mark.ranks(2)
def test_dtensor_of_uneven_shards(world, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    full = torch.arange(15.0).view(5, 3)
    assert same(distribute_tensor(full, mesh, [Shard(0)]).full_tensor(), full)
    assert same(distribute_tensor(full[:1], mesh, [Shard(0)]).full_tensor(), full[:1])


# DistributedDataParallel


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.0001},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
@pytest.mark.ranks(2)
def test_ddp_trains(world, group, options):
    model = DistributedDataParallel(network(), process_group=group, **options)
    train(model, batches(world.rank))
    assert_trained(world, model.module.state_dict())


@pytest.mark.ranks(2)
def test_ddp_broadcasts_the_first_rank_s_parameters_and_buffers(world, group):
    module = nn.BatchNorm1d(4)
    nn.init.constant_(module.weight, world.rank + 3.0)
    nn.init.constant_(module.running_mean, world.rank + 5.0)
    DistributedDataParallel(module, process_group=group)
    assert module.weight.tolist() == [3.0] * 4
    assert module.running_mean.tolist() == [5.0] * 4


@pytest.mark.ranks(2)
def test_ddp_with_parameters_that_one_rank_does_not_use(world, group):
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

        def forward(self, x):
            return self.paths[world.rank](x)

    torch.manual_seed(0)
    model = DistributedDataParallel(Fork(), process_group=group, find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert [path.weight.grad.tolist() for path in model.module.paths] == [[[1.0, 1.0]] * 2] * 2


@pytest.mark.ranks(2)
def test_ddp_no_sync_accumulates(world, group):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group)
    with model.no_sync():
        model(torch.full((1, 2), world.rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[world.rank + 1.0] * 2]
    model(torch.full((1, 2), world.rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "python", "powersgd"])
@pytest.mark.ranks(2)
def test_ddp_communication_hooks(world, group, hook):
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False), process_group=group)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "python":

        def halve(group, bucket):
            future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / 2)

        model.register_comm_hook(group, halve)
    else:
        name = "allreduce_hook" if hook == "allreduce" else f"{hook}_compress_hook"
        model.register_comm_hook(group, getattr(default_hooks, name))
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), world.rank + 1.0)).sum().backward()
        torch.testing.assert_close(model.module.weight.grad, torch.full((2, 2), 1.5))


@pytest.mark.ranks(2)
def test_ddp_join_with_uneven_inputs(world, group):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    nn.init.ones_(model.module.weight)
    steps = 0
    with Join([model]):
        for _ in range(3 + world.rank * 2):
            model(torch.ones(1, 1)).sum().backward()
            steps += 1
    assert steps == 3 + world.rank * 2
    world.assert_same(model.module.weight.detach())


# torch's sharding engines


@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}], ids=str)
@pytest.mark.ranks(2)
def test_fsdp1_trains(world, group, options):
    model = FullyShardedDataParallel(network(), process_group=group, device_id=torch.device("cpu"), **options)
    train(model, batches(world.rank))
    with FullyShardedDataParallel.summon_full_params(model):
        full = {name: value.clone() for name, value in model.module.state_dict().items()}
    assert_trained(world, full)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.ranks(2)
def test_fsdp2_trains(world, group, reshard):
    model, mesh = network(), DeviceMesh.from_group(group, "cpu")
    for module in [model[0], model[2], model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    train(model, batches(world.rank))
    assert_trained(world, {name: value.full_tensor() for name, value in model.state_dict().items()})


@pytest.mark.ranks(2)
def test_a_checkpoint_is_saved_and_loaded(world, group):
    model, mesh = network(), DeviceMesh.from_group(group, "cpu")
    fully_shard(model, mesh=mesh)
    path = world.shared_tmp_path / "checkpoint"
    dcp.save(get_model_state_dict(model), checkpoint_id=path, process_group=group)
    expected = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path, process_group=group)
    for name, value in state.items():
        assert same(value.full_tensor(), expected[name])
