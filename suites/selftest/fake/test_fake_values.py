"""Values that collectives of a fake world return: NaN, with which training code goes on, and no test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions import assert_equal, assert_same_across_ranks
from lockstep.exceptions import FakeValueError
from lockstep.rank.world_fixture import RankWorld

pytestmark = pytest.mark.ranks(1024, backend="fake", as_rank=511)
OTHER = 512


def received(dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.ones(4, dtype=dtype)
    dist.all_reduce(tensor)
    return tensor


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda value: value[0].item(),
    "float": lambda value: float(value[0]),
    "bool": lambda value: bool((value == 1).all()),
    "tolist": lambda value: value.tolist(),
    "numpy": lambda value: value.numpy(),
    "asarray": lambda value: numpy.asarray(value),
    "assert_allclose": lambda value: numpy.testing.assert_allclose(value, 1),
    "equal": lambda value: torch.equal(value, torch.ones(4)),
    "assert_close": lambda value: torch.testing.assert_close(value, torch.ones(4)),
    "assert_equal": lambda value: assert_equal(value, torch.ones(4)),
    "derived": lambda value: (value.double() * 0 + 1).sum().tolist(),
    "added": lambda value: torch.zeros(4).add_(value).tolist(),
    "copied": lambda value: torch.zeros(4).copy_(value).tolist(),
    "deepcopy": lambda value: copy.deepcopy(value).max().item(),
    "max": lambda value: max(value),
    "allclose": lambda value: torch.allclose(torch.ones(4), value),
    "nonzero": lambda value: len(value.nonzero()),
    "mask": lambda value: len(torch.ones(4)[value > 0]),
    "unique": lambda value: len(value.unique()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_value_that_a_peer_would_send_is_not_read(read: Callable[[Tensor], object]) -> None:
    value = received()
    with pytest.raises(FakeValueError, match=r"from all_reduce at .*test_fake_values.py:\d+, which"):
        read(value)


def test_a_value_that_owes_nothing_to_a_peer_is_read() -> None:
    value = received()
    assert (value.shape, value.dtype) == ((4,), torch.float32)
    assert torch.zeros_like(value).tolist() == value.new_ones(4).sub(1).tolist() == [0.0] * 4
    assert value[torch.tensor([True, False, True, False])].shape == value[torch.tensor([0, 2])].shape == (2,)
    assert value.fill_(3).tolist() == [3.0] * 4
    assert received().copy_(torch.ones(4)).tolist() == [1.0] * 4


def test_what_is_added_to_a_value_of_a_peer_is_still_known() -> None:
    known = torch.ones(4)
    with pytest.raises(FakeValueError):
        (received() + known).tolist()
    received().add_(known)
    assert known.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("dtype", "filled"),
    [
        *((dtype, None) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)),
        (torch.int64, -(2**63)),
        (torch.uint8, 255),
        (torch.bool, True),
    ],
)
def test_outputs_are_filled_with_nan_or_the_extreme(dtype: torch.dtype, filled: float | None) -> None:
    shown = repr(received(dtype)[0])  # a report may show what a test may not read
    assert ("nan" if filled is None else str(filled)) in shown


def of_all(call: Callable[[list[Tensor]], object], count: int = 1024) -> list[Tensor]:
    tensors = [torch.zeros(2) for _ in range(count)]
    call(tensors)
    return tensors


@pytest.mark.parametrize(
    "output",
    [
        lambda: of_all(lambda out: dist.all_gather(out, torch.ones(2)))[OTHER],
        lambda: of_all(lambda out: dist.all_to_all(out, list(torch.ones(1024, 2))))[OTHER],
        lambda: of_all(lambda out: dist.broadcast(out[0], 0), 1)[0],
        lambda: of_all(lambda out: dist.scatter(out[0], None, 0), 1)[0],
        lambda: of_all(lambda out: dist.recv(out[0], 3), 1)[0],
        lambda: of_all(lambda out: dist.reduce_scatter(out[0], list(torch.ones(1024, 2))), 1)[0],
        lambda: of_all(lambda out: dist.all_reduce(out[0], async_op=True).wait(), 1)[0],
        lambda: torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD),
        lambda: distribute_tensor(
            torch.ones(2048), dist.init_device_mesh("cpu", (1024,)), [Shard(0)]
        ).full_tensor(),
    ],
    ids=[
        *(
            "all_gather",
            "all_to_all",
            "broadcast",
            "scatter",
            "recv",
            "reduce_scatter",
            "async",
            "functional",
        ),
        "dtensor",
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_outputs_of_every_collective_count(output: Callable[[], Tensor]) -> None:
    value = output()
    assert "nan" in repr(value)
    with pytest.raises(FakeValueError):
        value.tolist()


def test_what_a_rank_sends_itself_is_true(world: RankWorld) -> None:
    gathered = of_all(lambda out: dist.all_gather(out, torch.full((2,), 7.0)))
    assert gathered[world.rank].tolist() == [7.0, 7.0]
    tensor = torch.ones(2)
    dist.broadcast(tensor, world.rank)
    assert tensor.tolist() == [1.0, 1.0]
    alone = dist.new_group([world.rank])
    dist.all_reduce(tensor, group=alone)
    assert tensor.tolist() == [1.0, 1.0]
    dist.destroy_process_group(alone)


@pytest.mark.parametrize(
    "call",
    [
        lambda world: world.gather(1),
        lambda world: world.assert_same(1),
        lambda world: dist.broadcast_object_list([1], 0),
        lambda world: assert_same_across_ranks({"weight": torch.ones(2)}),
    ],
    ids=["gather", "assert_same", "broadcast_object_list", "assert_same_across_ranks"],
)
def test_what_needs_the_words_of_peers_is_refused(world: RankWorld, call: Callable[[Any], object]) -> None:
    with pytest.raises(FakeValueError, match="the test runs as rank 511 of 1024 in a fake world"):
        call(world)


def test_a_barrier_returns_and_a_mesh_has_its_coordinates(world: RankWorld) -> None:
    world.barrier()
    assert world.mesh(32, 32).get_coordinate() == (15, 31)
    assert (dist.get_rank(), dist.get_world_size(), world.group.size()) == (511, 1024, 1024)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))


def shard(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("wrap", [shard, DistributedDataParallel])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_torchs_engines_train(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(layers())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    loss = model(torch.randn(2, 8)).sum()
    with pytest.raises(FakeValueError, match="comes from"):
        loss.item()


def test_a_scaler_sees_an_overflow_of_a_peer() -> None:
    model = shard(layers())
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.to_local().detach().clone()
    scaler.scale(model(torch.randn(2, 8)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(model[0].weight.to_local(), before)


def test_a_mode_of_the_test_is_not_taken_for_the_reader() -> None:
    """The engine reads under it what it has compared."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lockstep.engine import FullyShardedDataParallel

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Passes():
        FullyShardedDataParallel(layers())


@pytest.mark.ranks(4, backend="fake", as_rank=[0, 3], made_up_values=True)
def test_values_are_read_where_the_mark_asks_for_them() -> None:
    """torch's fake group leaves in an output what this rank has sent."""
    assert received().tolist() == [1.0] * 4
    model = DistributedDataParallel(layers())
    model(torch.ones(2, 8)).sum().backward()
    assert model.module[1].bias.grad.tolist() == [2.0 / 4] * 8


def test_a_model_on_meta_is_sharded() -> None:
    with torch.device("meta"):
        model = layers()
    shard(model)
    weight = model[0].weight
    assert (weight.shape, weight.to_local().shape, weight.device.type) == ((64, 8), (0, 8), "meta")
    assert weight.placements == (Shard(0),) != (Replicate(),)
