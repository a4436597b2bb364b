"""Hybrid sharding: sharded inside a replica, averaged across replicas, of which there are two by default."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions import (
    Trainee,
    Training,
    assert_named_close,
    assert_parity,
    assert_same_across_ranks,
    assert_sharded_parity,
    local_part,
    named_gradients,
    train,
)
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, Precision, offers, trainee
from lockstep.conformance.models import (
    KnownGradient,
    KnownGradients,
    NestedWrappedModule,
    TransformerWithSharedParams,
    copier,
)

pytestmark = pytest.mark.ranks(4)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
REPLICAS = 2
STRATEGIES = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
OF_STRATEGIES = pytest.mark.parametrize("hybrid_front", STRATEGIES, indirect=True)

# Of the nested model: groups by name, in order of forward, and the orders of backward.
NUMEL = {"": 76, "module.1": 272, "module.1.0": 80, "module.2": 68}
BACKWARD = ("", "module.2", "module.1", "module.1.0")
GATHERED = {"HYBRID_SHARD": BACKWARD, "_HYBRID_SHARD_ZERO2": (), "fully_shard": BACKWARD[1:]}
REDUCED = ("module.2", "module.1", "module.1.0", "")  # the root last: it holds the first layer

# precision -> dtype of gathers, dtype of reductions
DTYPES = {
    Precision(): (F32, F32),
    Precision(param_dtype=F16): (F16, F16),
    Precision(param_dtype=BF16, reduce_dtype=F32): (BF16, F32),
    Precision(reduce_dtype=BF16): (F32, BF16),
}


@pytest.fixture
def shard(world, hybrid_front):
    """Shard a bare model on a mesh of so many replicas."""

    def shard(bare, replicas=REPLICAS, **spec):
        mesh = world.mesh(replicas, world.size // replicas, names=("replicate", "shard"))
        return hybrid_front.shard(bare, mesh=mesh, **spec)

    return shard


def values(front, model):
    """Return the elements of each full gradient."""
    return [gradient.tolist() for gradient in front.full_gradients(model).values()]


# values


@pytest.fixture
def check_parity(world, batches, hybrid_front, shard):
    """Train a bare model under DDP; return a check that it learns the same in a hybrid run."""

    def make(bare, loss):
        training, copied = Training(batches(bare.batch), loss, steps=2), copier(bare)
        reference = DistributedDataParallel(copied().to(world.device))
        learned = train(Trainee(reference, full_gradients=named_gradients), training)

        def check(**settings):
            model = shard(copied(), **settings)
            candidate = trainee(hybrid_front, model)
            assert_parity(learned, candidate, training)
            assert_same_across_ranks(hybrid_front.full_parameters(model))

        return check

    return make


def nested_loss(model, batch):
    return NestedWrappedModule.loss(model(batch).square())


def transformer_loss(model, batch):
    return TransformerWithSharedParams.loss(model(*batch), batch[1])


@pytest.mark.parametrize(
    ("hybrid_front", "model", "loss"),
    [
        *((name, NestedWrappedModule, nested_loss) for name in (*STRATEGIES, "fully_shard")),
        *((name, TransformerWithSharedParams, transformer_loss) for name in STRATEGIES),
    ],
    indirect=["hybrid_front"],
)
def test_it_learns_what_ddp_learns(check_parity, run_subtests, hybrid_front, model, loss):
    own = {
        "offload": [False, True],
        "use_orig_params": [False, True],
        "backward_prefetch": [None, "BACKWARD_PRE", "BACKWARD_POST"],
        "forward_prefetch": [False, True],
    }
    composable = {"reshard_after_forward": [None, True, False]}
    run_subtests(composable if hybrid_front.is_composable else own, check_parity(model(), loss))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("replicas", [1, 2])
def test_it_learns_the_same_with_one_replica_or_one_shard(check_parity, replicas):
    check_parity(NestedWrappedModule(), nested_loss)(replicas=replicas)


@pytest.mark.parametrize(
    "precision",
    [*DTYPES, Precision(BF16)],
    ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_bf16", "bf16"],
)
def test_replicas_are_bit_equal_after_steps(world, step, hybrid_front, precision):
    """Each rank that holds a shard has the same bits as those that hold it in other replicas."""
    mesh = world.mesh(REPLICAS, world.size // REPLICAS, names=("replicate", "shard"))
    model = hybrid_front.shard(NestedWrappedModule(), mesh=mesh, precision=precision)
    start = [local_part(parameter).detach().clone() for parameter in model.parameters()]
    optimizer = hybrid_front.optimizer(model, partial(torch.optim.Adam, lr=0.01))
    for number in range(2):
        optimizer.zero_grad()
        step(model, number)
        optimizer.step()
    assert not any(map(torch.equal, start, map(local_part, model.parameters())))
    assert_same_across_ranks(dict(model.named_parameters()), mesh.get_group("replicate"))
    assert_same_across_ranks(hybrid_front.full_parameters(model))


@pytest.mark.ranks(2, 4)
@OF_STRATEGIES
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_a_mean_within_the_range_of_its_dtype_is_exact(world, shard, hybrid_front, replicas, dtype):
    model = shard(KnownGradient(3), replicas, precision=Precision(reduce_dtype=dtype))
    # Any two of them add up to more than 65,504, the largest fp16 number; their mean is below it.
    own = 49152.0 + 4096 * world.rank
    hybrid_front.backward(model, model(torch.tensor(own, device=world.device)))
    assert values(hybrid_front, model) == [[49152.0 + 2048 * (world.size - 1)] * 3]


def test_reduce_dtype_holds_inside_a_replica_and_across(world, shard, hybrid_front):
    model = shard(KnownGradients(3), precision=Precision(F16, F32, cast_root_forward_inputs=False))
    # One of four ranks adds the last bit that 1 has in fp16; the mean needs two bits more.
    witness = torch.tensor(1 + (world.rank == 3) * 2**-10, device=world.device, dtype=F16)
    hybrid_front.backward(model, model(witness))
    assert values(hybrid_front, model) == [[1 + 2**-12] * 3] * 4


@pytest.mark.parametrize("sync", [True, False], ids=["synced", "no_sync"])
def test_accumulating_twice_is_exactly_twice(shard, step, hybrid_front, sync):
    model = shard(NestedWrappedModule())
    step(model)
    once = hybrid_front.full_gradients(model)
    model.zero_grad()
    with nullcontext() if sync else hybrid_front.no_sync(model):
        step(model)
    step(model)
    twice = {name: 2 * gradient for name, gradient in once.items()}
    assert_named_close(hybrid_front.full_gradients(model), twice, EXACT)
    assert all(gradient.any() for gradient in once.values())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_to_clip_by_is_the_unsharded_one(world, shard, step, run_subtests, hybrid_front, norm_type):
    """pytorch#88955: the norm was counted once for each replica."""

    def check(foreach=None, **spec):
        bare = NestedWrappedModule().to(world.device)
        reference = DistributedDataParallel(copy.deepcopy(bare))
        model = shard(bare, **spec)
        for one in (reference, model):
            step(one)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
        how = {} if foreach is None else {"foreach": foreach}
        norm = hybrid_front.clip_grad_norm_(model, 0.5, norm_type, **how)
        assert expected > 0.5
        torch.testing.assert_close(norm.float(), expected)
        world.assert_same(norm)
        assert_named_close(hybrid_front.full_gradients(model), named_gradients(reference))
        if hybrid_front.is_composable:
            assert_sharded_parity(model, reference.module)

    setting = "foreach" if hybrid_front.is_composable else "use_orig_params"
    run_subtests({setting: [False, True]}, check)


@pytest.mark.ranks(2, 4)
@OF_STRATEGIES
def test_ranks_seeded_differently_start_from_rank_zero(world, shard, hybrid_front):
    """pytorch#178569: buffers were made equal inside each replica only."""
    torch.manual_seed(world.rank)
    bare = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8)))
    bare[1][0].running_mean.fill_(world.rank + 1)
    bare[1][0].num_batches_tracked.fill_(world.rank + 1)
    mine = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    expected = world.gather(mine)[0]
    model = shard(bare, units=("1",), sync_module_states=True)
    found = dict(hybrid_front.full_parameters(model)) | dict(model.named_buffers())
    assert_named_close(found, expected, EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("front", ["FULL_SHARD-orig", "fully_shard"], indirect=True)
def test_unless_requested_each_rank_starts_from_its_own_part(world, front):
    bare = KnownGradient(4)
    with torch.no_grad():
        bare.weight.fill_(world.rank)
    assert front.full_parameters(front.shard(bare))["weight"].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("hybrid_front", "per_host"), [("HYBRID_SHARD", 2), ("_HYBRID_SHARD_ZERO2", 4)], indirect=["hybrid_front"]
)
@pytest.mark.filterwarnings("ignore:the test left behind 2 process group")
def test_without_groups_a_host_shards_and_hosts_replicate(world, hybrid_front, monkeypatch, per_host):
    """A host has as many ranks as torchrun says of this one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_host))
    weight = torch.arange(8.0).view(2, 4)
    bare = nn.Sequential(nn.Linear(4, 2, bias=False))
    bare[0].weight = nn.Parameter(weight.clone())
    model = hybrid_front.shard(bare, units=("0",))
    own = torch.cat([local_part(parameter).detach().flatten() for parameter in model.parameters()])
    assert own.tolist() == weight.flatten().chunk(per_host)[world.rank % per_host].tolist()
    hybrid_front.backward(model, model(torch.full((1, 4), world.rank + 1.0, device=world.device)).sum())
    assert values(hybrid_front, model) == [[[2.5] * 4] * 2]
    world.barrier()  # the engine's groups end with the test: no rank may be still connecting one


@pytest.mark.parametrize("hybrid_front", ["HYBRID_SHARD"], indirect=True)
def test_hosts_that_ranks_do_not_fill_are_refused(world, hybrid_front, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3"):
        hybrid_front.shard(nn.Sequential(nn.Linear(4, 2)), units=("0",))


# traffic


def gathers(engine, log, in_backward):
    """Return dtype, bytes and group size of the gathers, in order."""
    found = engine.traffic(log).gathers
    return [(e.dtype, e.nbytes, e.group_size) for e in found if e.in_backward == in_backward]


def reductions(engine, log):
    return [(e.dtype, e.nbytes, e.group_size) for e in engine.traffic(log).reductions]


def gathered(world, front, model, dtype, names):
    """Return what to expect of gathers: a rank's shard, sent inside the replica."""
    num_shards = world.size // REPLICAS
    numel = {group.name: group.local_numel for group in front.engine.groups(model)}
    # On two shards nothing is padded.
    if offers(front, Capability.ONE_PADDING) or (front.is_composable and num_shards == 2):
        assert numel == {name: -(-number // num_shards) for name, number in NUMEL.items()}
    return [(dtype, numel[name] * dtype.itemsize, num_shards) for name in names]


def reduced(world, front, model, log, dtype):
    """Return what to expect of reductions: of each group the whole inside a replica, then a shard across."""
    expected, ops = [], {entry.op for entry in front.engine.traffic(log).reductions}
    for _, nbytes, num_shards in gathered(world, front, model, dtype, REDUCED):
        # Replicas that exchange pieces have as much for each.
        unit = 1 if "all_reduce" in ops else REPLICAS * dtype.itemsize
        across = (dtype, -(-nbytes // unit) * unit, REPLICAS)
        expected += [(dtype, nbytes * num_shards, num_shards), across]
    return expected


def check_reductions(world, front, model, log, dtype):
    found, expected = reductions(front.engine, log), reduced(world, front, model, log, dtype)
    if not offers(front, Capability.EARLY_REDUCTION):  # a group waits for all that is inside its modules
        found, expected = sorted(found, key=str), sorted(expected, key=str)
    assert found == expected, log


# On six ranks a replica has three, so that no exchange across can be taken for one inside.
@pytest.mark.ranks(4, 6)
@pytest.mark.parametrize("precision", DTYPES, ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_bf16"])
@pytest.mark.inside
def test_it_gathers_inside_and_reduces_inside_and_across(
    world, engine, shard, step, collectives, hybrid_front, precision
):
    model = shard(NestedWrappedModule(), precision=precision)
    step(model)
    dtype, reduce_dtype = DTYPES[precision]
    for in_backward, names in ((False, NUMEL), (True, GATHERED[hybrid_front.name])):
        expected = gathered(world, hybrid_front, model, dtype, names)
        assert gathers(engine, collectives, in_backward) == expected, collectives
    check_reductions(world, hybrid_front, model, collectives, reduce_dtype)
    assert engine.traffic(collectives).others == (), collectives


@OF_STRATEGIES
@pytest.mark.inside
def test_no_sync_reduces_nothing_and_the_next_backward_all(
    world, engine, shard, step, collectives, use_orig_params, hybrid_front
):
    model = shard(NestedWrappedModule(), use_orig_params=use_orig_params)
    with hybrid_front.no_sync(model):
        for number in range(2):
            step(model, number)
    traffic = engine.traffic(collectives)
    assert (traffic.reductions, traffic.others) == ((), ()), collectives
    step(model, 2)
    check_reductions(world, hybrid_front, model, collectives, F32)
