"""State dicts of each type: which values they have, in which parts, and what they send."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.assertions import assert_named_close
from lockstep.conformance import Capability, ShardSpec, require
from lockstep.conformance.models import UnevenShapes
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(1, 2, 3)

STRATEGIES = ["FULL_SHARD", "NO_SHARD"]  # SHARD_GRAD_OP shards as FULL_SHARD does
adamw = partial(torch.optim.AdamW, lr=0.01)


def unsharded(world):
    """Train one step as a `Training` with ranks apart, unsharded on all ranks' data; return its state."""
    torch.manual_seed(1)
    bare = UnevenShapes().to(world.device)
    optimizer = adamw(list(bare.parameters()))
    for rank in range(world.size):
        batch = UnevenShapes.batch(torch.Generator().manual_seed(rank)).to(world.device)
        (UnevenShapes.loss(bare(batch)) / world.size).backward()
    optimizer.step()
    names = [name for name, _ in bare.named_parameters()]
    state = {names[number]: one for number, one in optimizer.state_dict()["state"].items()}
    state.pop("empty")  # original parameters without elements are never stepped
    moments = {f"{name} {key}": value for name, one in state.items() for key, value in one.items()}
    return bare.state_dict() | moments


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_state_is_that_of_unsharded_training(world, train, states, strategy, use_orig_params):
    training = train(1, apart=1, strategy=strategy, use_orig_params=use_orig_params)
    expected = unsharded(world)
    found = states.values(*training.both)
    assert list(states.model(training.model)) == [name for name in expected if " " not in name]
    assert_named_close(found, expected)


def test_sharded_state_is_chunked_like_torch_chunk(world, train, states, use_orig_params):
    training = train(1, use_orig_params=use_orig_params)
    whole, sharded = (states.all(*training.both, kind) for kind in ("FULL", "SHARDED"))
    pairs = [(sharded["model"][name], whole["model"][name]) for name, _ in UnevenShapes().named_parameters()]
    moments = whole["optimizer"]["state"]
    pairs += [(sharded["optimizer"]["state"][name]["exp_avg"], moments[name]["exp_avg"]) for name in moments]
    assert len(pairs) > len(moments) > 3
    for tensor, full in pairs:
        if full.dim():
            chunks = full.chunk(world.size)
            chunk = chunks[world.rank] if world.rank < len(chunks) else full[:0]
            assert (tensor.placements, tensor.shape) == ((Shard(0),), full.shape)
            local = tensor.to_local()
            assert torch.equal(local, chunk)
            assert local.untyped_storage().nbytes() == chunk.nbytes  # not that of the full tensor
        elif isinstance(tensor, DTensor):
            assert tensor.placements == (Replicate(),)
    assert {name for name, t in sharded["model"].items() if not isinstance(t, DTensor)} == {"offset", "count"}


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_sharded_state_of_any_number_of_rows_is_chunked(world, engine, states, rows):
    """As torch.chunk does, which leaves less to the last ranks than an even division would."""
    bare = nn.Linear(3, rows).to(world.device)
    full = bare.weight.detach().clone()
    model = engine.shard(bare, ShardSpec(device=world.device))
    chunks = full.chunk(world.size)
    chunk = chunks[world.rank] if world.rank < len(chunks) else full[:0]
    assert torch.equal(states.model(model, "SHARDED")["weight"].to_local(), chunk)


def test_sharded_state_of_what_is_whole_is_replicated(train, states):
    training = train(1, strategy="NO_SHARD", use_orig_params=True)
    state = states.all(*training.both, "SHARDED")
    assert state["model"]["first.weight"].placements == (Replicate(),)
    assert type(state["optimizer"]["state"]["scalar"]["step"]) is torch.Tensor


@pytest.mark.ranks(2)
def test_sharded_state_lies_on_the_mesh_that_was_given(world, engine, states, run_subtests):
    """Of all units, and of the optimizer, too."""

    def claim(axes):
        front = engine.wrapper
        mesh = world.mesh(*axes, names=("replicate", "shard")[-len(axes) :])
        strategy = front.ShardingStrategy["HYBRID_SHARD" if len(axes) > 1 else "FULL_SHARD"]
        model = front.FullyShardedDataParallel(
            nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).to(world.device),
            device_mesh=mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=front.CustomPolicy(lambda module: getattr(module, "in_features", 0) == 4),
            device_id=world.device,
        )
        optimizer = engine.optimizer(model, adamw)
        engine.backward(model, model(torch.ones(1, 4, device=world.device)).sum())
        optimizer.step()
        state = states.all(model, optimizer, "SHARDED")
        tensors = [
            *state["model"].values(),
            *(one["exp_avg"] for one in state["optimizer"]["state"].values()),
        ]
        assert len(tensors) == 8
        assert all(tensor.device_mesh is mesh for tensor in tensors)
        assert {tensor.placements for tensor in tensors} == {(Replicate(),) * (len(axes) - 1) + (Shard(0),)}

    run_subtests({"axes": [(2,), (1, 2), (2, 1)]}, claim)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "num", "num_loading"), [("FULL", 2, 0), ("SHARDED", 2, 4), ("LOCAL", 0, 0)])
def test_a_state_gathers_each_unit_once_and_sends_nothing_else(world, engine, states, kind, num, num_loading):
    """To load it gathers each sharded parameter."""
    require(engine, Capability.TRAFFIC)
    bare = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    model = engine.shard(bare.to(world.device), ShardSpec(units=("0",), device=world.device))
    with CollectivesLog() as log:
        state = states.model(model, kind)
    traffic = engine.traffic(log)
    assert (len(traffic.gathers), traffic.reductions, traffic.others) == (num, (), ())
    with CollectivesLog() as log:
        states.load_model(model, state, kind)
    assert len(log) == num_loading
