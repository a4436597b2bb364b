"""Dims that tensor parallelism and `fully_shard` both divide, on many ranks: none but one is there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.engine import fully_shard
from lockstep.engine.config import Ignored
from lockstep.engine.dtensor_param import DTensorPlacement, divides_alike
from lockstep.engine.fully_shard import mesh_of

NAMES = ("data", "tensor", "inner")


@pytest.fixture
def weight_of_rank():
    """Make a weight of `size` rows, divided by the last axes of a mesh of `shape`, sharded by the first."""

    def make(rank, shape, size, **settings):
        numel = torch.Size(shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=numel)
        try:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)])
            model = nn.Linear(12, size, bias=False)
            with torch.no_grad():
                model.weight.copy_(torch.arange(float(size)).view(-1, 1).expand(size, 12))
            places = [Shard(0)] * (len(shape) - 1)
            tensor = mesh[NAMES[1 : len(shape)]]
            model.weight = nn.Parameter(
                distribute_tensor(model.weight.detach(), tensor, places, src_data_rank=None)
            )
            return fully_shard(model, mesh=mesh["data"], **settings).weight
        finally:
            dist.destroy_process_group()

    return make


@pytest.mark.parametrize(("shape", "size"), [((3, 2), 8), ((3, 2), 5), ((4, 2), 10), ((2, 2, 2), 11)])
def test_every_rank_holds_what_its_placement_says(weight_of_rank, shape, size):
    rows = []
    for rank in range(torch.Size(shape).numel()):
        weight = weight_of_rank(rank, shape, size)
        local = weight.to_local().detach()
        rows += local[:, 0].tolist()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(shape).numel())
        found = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        dist.destroy_process_group()
        assert found[0] == tuple(local.shape)
        if local.numel():
            assert found[1][0] == local[0, 0]
    assert sorted(rows) == list(range(size))


@pytest.mark.parametrize(("shape", "size"), [((3, 2), 7), ((4, 2), 9), ((2, 2, 2), 10)])
def test_a_dim_that_no_placement_describes_is_refused(weight_of_rank, shape, size):
    for rank in range(torch.Size(shape).numel()):
        with pytest.raises(ValueError, match=f"'weight' has {size} elements along dim 0.* a multiple of"):
            weight_of_rank(rank, shape, size)
    along = weight_of_rank(0, shape, size, shard_placement_fn=lambda parameter: Shard(1))
    assert along.placements[0] == Shard(1)


def test_one_or_two_shards_of_one_axis_always_have_a_placement():
    assert all(divides_alike(size, [parts], n) for size in range(40) for parts in range(1, 9) for n in (1, 2))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_an_offloaded_piece_is_shown_where_it_lies(placement):
    """The optimizer steps the shard itself, also where the mesh is of GPUs."""
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=0)
    piece = torch.arange(4.0)
    shown = DTensorPlacement(mesh, [placement], torch.Size([8])).tensor(piece)
    assert (shown.shape, shown.stride(), shown.dtype, shown.device.type) == ((8,), (1,), torch.float32, "cpu")
    shown.to_local().add_(1.0)
    assert piece.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.ranks(2)
def test_a_mesh_by_default_is_of_the_device_of_the_parameters(world, monkeypatch):
    """Under gloo they may be on GPUs, too, or offloaded by an inner unit; ignored ones do not count."""
    monkeypatch.setattr(DeviceMesh, "from_group", lambda group, device_type: device_type)
    model, outer = nn.Module(), nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, device="cuda:0"))
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=0)
    offloaded = DTensorPlacement(mesh, [Shard(0)], torch.Size([4])).tensor(torch.arange(2.0))
    outer.weight = nn.Parameter(offloaded)

    def device_type(module, *ignored):
        return mesh_of(None, [module], "fully_shard", 2, Ignored(parameters=frozenset(ignored)))

    assert device_type(model) == device_type(outer) == "cuda"
    assert device_type(model, model.weight) == device_type(nn.Linear(2, 2)) == "cpu"
