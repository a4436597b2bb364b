"""Hybrid sharding: cut inside a replica, averaged across replicas, of which there are two unless told."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.assertions import (
    Trainee,
    Training,
    assert_named_close,
    assert_parity,
    assert_same_across_ranks,
    named_gradients,
    per_rank_batches,
    train,
)
from harness.assertions.closeness import EXACT
from harness.conformance import Capability, Precision, ShardSpec, offers
from harness.conformance.models import (
    KnownGradient,
    KnownGradients,
    NestedWrappedModule,
    TransformerWithSharedParams,
)

pytestmark = pytest.mark.ranks(4)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
REPLICAS = 2

STRATEGIES = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)

# Of the nested model: groups by name, in order of forward, and the orders of backward.
NUMEL = {"": 76, "module.1": 272, "module.1.0": 80, "module.2": 68}
BACKWARD = ("", "module.2", "module.1", "module.1.0")
REDUCED = ("module.2", "module.1", "module.1.0", "")  # the root last: it holds the first layer

# precision -> dtype of gathers, dtype of reductions
DTYPES = {
    Precision(): (F32, F32),
    Precision(param_dtype=F16): (F16, F16),
    Precision(param_dtype=BF16, reduce_dtype=F32): (BF16, F32),
    Precision(reduce_dtype=BF16): (F32, BF16),
}
EVERY_DTYPE = pytest.mark.parametrize(
    "precision", DTYPES, ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_bf16"]
)


def axes(world, replicas=REPLICAS):
    """Return the groups that this rank shares a replica and a shard with."""
    mesh = world.mesh(replicas, world.size // replicas)
    return mesh.get_group(1), mesh.get_group(0)


def shard(world, engine, bare, strategy, replicas=REPLICAS, **more):
    more = {"units": getattr(bare, "units", ()), "process_group": axes(world, replicas)} | more
    return engine.shard(bare.to(world.device), ShardSpec(strategy, device=world.device, **more))


def step(world, model, number=0):
    """Run forward and backward of the nested model on a batch that differs by rank and by number."""
    batch = per_rank_batches(NestedWrappedModule.batch, world.seed, world.rank)(number)
    NestedWrappedModule.loss(model(batch.to(world.device)).float().square()).backward()


def values(engine, model):
    """Return the elements of each full gradient."""
    return [gradient.tolist() for gradient in engine.full_gradients(model).values()]


# values


class Parity:
    """What a model learns under DDP, to hold hybrid runs of it to."""

    def __init__(self, world, bare, loss):
        self.bare = bare
        batches = per_rank_batches(bare.batch, world.seed, world.rank)
        self.training = Training(lambda number: to(world.device, batches(number)), loss)
        reference = DistributedDataParallel(copy.deepcopy(bare).to(world.device))
        self.learned = train(Trainee(reference, full_gradients=named_gradients), self.training)

    def check(self, world, engine, **settings):
        model = shard(world, engine, copy.deepcopy(self.bare), **settings)
        candidate = Trainee(model, engine.full_parameters, engine.full_gradients)
        assert_parity(self.learned, candidate, self.training)
        assert_same_across_ranks(engine.full_parameters(model))


def to(device, batch):
    return batch.to(device) if isinstance(batch, torch.Tensor) else tuple(part.to(device) for part in batch)


def nested_loss(model, batch):
    return NestedWrappedModule.loss(model(batch).square())


def transformer_loss(model, batch):
    return TransformerWithSharedParams.loss(model(*batch), batch[1])


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@EVERY_STRATEGY
@pytest.mark.parametrize(
    ("model", "loss"),
    [(NestedWrappedModule, nested_loss), (TransformerWithSharedParams, transformer_loss)],
    ids=["nested", "tied_transformer"],
)
def test_it_learns_what_ddp_learns(world, engine, run_subtests, model, loss, strategy, offload):
    settings = {
        "use_orig_params": [False, True],
        "backward_prefetch": [None, "BACKWARD_PRE", "BACKWARD_POST"],
        "forward_prefetch": [False, True],
    }
    parity = Parity(world, model(), loss)
    run_subtests(settings, parity.check, world, engine, strategy=strategy, offload=offload)


@pytest.mark.ranks(2, 4)
@EVERY_STRATEGY
@pytest.mark.parametrize("replicas", [1, 2])
def test_it_learns_the_same_with_one_replica_or_one_shard(world, engine, strategy, replicas):
    parity = Parity(world, NestedWrappedModule(), nested_loss)
    parity.check(world, engine, strategy=strategy, replicas=replicas)


@EVERY_STRATEGY
@EVERY_DTYPE
def test_replicas_are_bit_equal_after_steps(world, engine, strategy, precision):
    """Each rank that holds a shard has the same bits as those that hold it in other replicas."""
    groups = axes(world)
    model = shard(world, engine, NestedWrappedModule(), strategy, precision=precision, process_group=groups)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(3):
        optimizer.zero_grad()
        step(world, model, number)
        optimizer.step()
    assert not any(map(torch.equal, start, model.parameters()))
    assert_same_across_ranks(dict(model.named_parameters()), groups[1])
    assert_same_across_ranks(engine.full_parameters(model))


@pytest.mark.ranks(2, 4)
@EVERY_STRATEGY
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_a_mean_within_the_range_of_its_dtype_is_exact(world, engine, strategy, replicas, dtype):
    more = {"precision": Precision(reduce_dtype=dtype), "replicas": replicas}
    model = shard(world, engine, KnownGradient(3), strategy, **more)
    # Any two of them add up to more than 65,504, the largest fp16 number; their mean is below it.
    own = 49152.0 + 4096 * world.rank
    model(torch.tensor(own, device=world.device)).backward()
    assert values(engine, model) == [[49152.0 + 2048 * (world.size - 1)] * 3]


@EVERY_STRATEGY
def test_reduce_dtype_holds_inside_a_replica_and_across(world, engine, strategy):
    precision = Precision(F16, F32, cast_root_forward_inputs=False)
    model = shard(world, engine, KnownGradients(3), strategy, precision=precision)
    # One of four ranks adds the last bit that 1 has in fp16; the mean needs two bits more.
    witness = torch.tensor(1 + (world.rank == 3) * 2**-10, device=world.device, dtype=F16)
    model(witness).backward()
    assert values(engine, model) == [[1 + 2**-12] * 3] * 4


@EVERY_STRATEGY
@pytest.mark.parametrize("sync", [True, False], ids=["synced", "no_sync"])
def test_accumulating_twice_is_exactly_twice(world, engine, strategy, sync):
    model = shard(world, engine, NestedWrappedModule(), strategy)
    step(world, model)
    once = engine.full_gradients(model)
    model.zero_grad()
    if sync:
        step(world, model)
    else:
        with engine.no_sync(model):
            step(world, model)
    step(world, model)
    twice = {name: 2 * gradient for name, gradient in once.items()}
    assert_named_close(engine.full_gradients(model), twice, EXACT)
    assert all(gradient.any() for gradient in once.values())


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_to_clip_by_is_the_unsharded_one(world, engine, strategy, use_orig_params, norm_type):
    bare = NestedWrappedModule().to(world.device)
    reference = DistributedDataParallel(copy.deepcopy(bare))
    model = shard(world, engine, bare, strategy, use_orig_params=use_orig_params)
    for one in (reference, model):
        step(world, one)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    norm = engine.clip_grad_norm_(model, 0.5, norm_type)
    assert expected > 0.5
    torch.testing.assert_close(norm.float(), expected)
    world.assert_same(norm)
    assert_named_close(engine.full_gradients(model), named_gradients(reference))


@pytest.mark.ranks(2, 4)
@EVERY_STRATEGY
def test_ranks_seeded_differently_start_from_rank_zero_with_buffers(world, engine, strategy):
    """pytorch#178569: buffers were made equal inside each replica only."""
    torch.manual_seed(world.rank)
    bare = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8)))
    bare[1][0].running_mean.fill_(world.rank + 1)
    bare[1][0].num_batches_tracked.fill_(world.rank + 1)
    mine = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    expected = world.gather(mine)[0]
    model = shard(world, engine, bare, strategy, units=("1",), sync_module_states=True)
    found = dict(engine.full_parameters(model)) | dict(model.named_buffers())
    assert_named_close(found, expected, EXACT)


# traffic


def gathers(engine, log, in_backward):
    """Return dtype, bytes and group size of the gathers, in order."""
    found = engine.traffic(log).gathers
    return [(e.dtype, e.nbytes, e.group_size) for e in found if e.in_backward == in_backward]


def reductions(engine, log):
    return [(e.dtype, e.nbytes, e.group_size) for e in engine.traffic(log).reductions]


def gathered(world, engine, model, dtype, names):
    """Return what to expect of gathers: a rank's shard, told inside the replica."""
    num_shards = world.size // REPLICAS
    numel = {group.name: group.local_numel for group in engine.groups(model)}
    if offers(engine, Capability.ONE_PADDING):
        assert numel == {name: -(-number // num_shards) for name, number in NUMEL.items()}
    return [(dtype, numel[name] * dtype.itemsize, num_shards) for name in names]


def reduced(world, engine, model, log, dtype):
    """Return what to expect of reductions: of each group the whole inside a replica, then a shard across."""
    expected = []
    for _, nbytes, num_shards in gathered(world, engine, model, dtype, REDUCED):
        # Replicas that exchange pieces have as much for each.
        unit = 1 if "all_reduce" in log.counts() else REPLICAS * dtype.itemsize
        across = (dtype, -(-nbytes // unit) * unit, REPLICAS)
        expected += [(dtype, nbytes * num_shards, num_shards), across]
    return expected


def check_reductions(world, engine, model, log, dtype):
    found, expected = reductions(engine, log), reduced(world, engine, model, log, dtype)
    if not offers(engine, Capability.EARLY_REDUCTION):  # a group waits for all that is inside its modules
        found, expected = sorted(found, key=str), sorted(expected, key=str)
    assert found == expected, log


# On six ranks a replica has three, so that no exchange across can be taken for one inside.
@pytest.mark.ranks(4, 6)
@EVERY_STRATEGY
@EVERY_DTYPE
def test_it_gathers_inside_a_replica_and_reduces_inside_then_across(
    world, engine, collectives, strategy, precision
):
    model = shard(world, engine, NestedWrappedModule(), strategy, precision=precision)
    step(world, model)
    dtype, reduce_dtype = DTYPES[precision]
    again = BACKWARD if strategy == "HYBRID_SHARD" else ()
    assert gathers(engine, collectives, in_backward=False) == gathered(world, engine, model, dtype, NUMEL), (
        collectives
    )
    assert gathers(engine, collectives, in_backward=True) == gathered(world, engine, model, dtype, again), (
        collectives
    )
    check_reductions(world, engine, model, collectives, reduce_dtype)
    assert engine.traffic(collectives).others == (), collectives


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_no_sync_reduces_nothing_and_the_next_backward_reduces_each_group_once(
    world, engine, collectives, strategy, use_orig_params
):
    model = shard(world, engine, NestedWrappedModule(), strategy, use_orig_params=use_orig_params)
    with engine.no_sync(model):
        for number in range(2):
            step(world, model, number)
    traffic = engine.traffic(collectives)
    assert (traffic.reductions, traffic.others) == ((), ()), collectives
    step(world, model, 2)
    check_reductions(world, engine, model, collectives, F32)
