"""A sharded model's state dict of each type: contents, loading and refusals."""

import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.assertions import assert_named_close, local_part
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import ShardSpec
from lockstep.conformance.models import NestedWrappedModule, UnevenShapes
from lockstep.engine import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    collectives,
)
from lockstep.engine.param_group import ParamGroup
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(1, 2, 3)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
kind_of = FullyShardedDataParallel.state_dict_type


def bare(world, seed=0):
    torch.manual_seed(seed)
    return UnevenShapes().to(world.device)


def shard(engine, world, units=UnevenShapes.units, seed=0, **spec):
    return engine.shard(bare(world, seed), ShardSpec(units=units, device=world.device, **spec))


def values(state):
    """Return full copies of all tensors in a state dict."""
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}


def full_state(model):
    with kind_of(model, FULL):
        return values(model.state_dict())


def saved(model, kind, config=None):
    with kind_of(model, kind, config):
        return model.state_dict()


def load(model, kind, state, **arguments):
    with kind_of(model, kind):
        return model.load_state_dict(state, **arguments)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_state_is_that_of_the_unsharded_model(world, engine, strategy, use_orig_params, offload):
    expected = bare(world).state_dict()
    model = shard(engine, world, strategy=strategy, use_orig_params=use_orig_params, offload=offload)
    assert list(model.state_dict()) == list(expected)
    assert_named_close(model.state_dict(), expected, EXACT)


def test_rank0_only_state_is_empty_on_other_ranks(world, engine):
    model = shard(engine, world)
    state = saved(model, FULL, FullStateDictConfig(rank0_only=True, offload_to_cpu=True))
    assert list(state) == (list(bare(world).state_dict()) if world.rank == 0 else [])
    assert {tensor.device.type for tensor in state.values()} <= {"cpu"}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_sharded_state_is_chunked_like_torch_chunk(world, engine, strategy, use_orig_params):
    expected = bare(world)
    state = saved(shard(engine, world, strategy=strategy, use_orig_params=use_orig_params), SHARDED)
    assert list(state) == list(expected.state_dict())
    for name, tensor in expected.named_parameters(remove_duplicate=False):
        chunks = tensor.chunk(world.size) if tensor.dim() else [tensor] * world.size
        chunk = chunks[world.rank] if world.rank < len(chunks) else tensor[:0]
        assert state[name].placements == (Shard(0) if tensor.dim() else Replicate(),), name
        assert torch.equal(state[name].to_local(), chunk), name
        assert state[name].shape == tensor.shape, name
    assert not any(isinstance(state[name], DTensor) for name, _ in expected.named_buffers())


def test_sharded_state_of_no_shard_is_replicated(world, engine):
    state = saved(shard(engine, world, strategy="NO_SHARD"), SHARDED)
    assert state["first.weight"].placements == (Replicate(),)
    assert_named_close(values(state), bare(world).state_dict(), EXACT)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_local_state_is_the_live_shard_and_whole_buffers(world, engine, use_orig_params):
    model = shard(engine, world, use_orig_params=use_orig_params)
    state = saved(model, LOCAL)
    numels = {name: local_part(tensor).numel() for name, tensor in state.items()}
    sizes = {group.name: group.local_numel for group in engine.groups(model)}
    assert numels == {
        "offset": 5,
        "count": 1,
        "body.gate.flat_param": sizes["body.gate"],
        "body.flat_param": sizes["body"],
        "flat_param": sizes[""],
    }
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    after = saved(model, LOCAL)
    assert torch.equal(local_part(after["flat_param"]), local_part(state["flat_param"]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", StateDictType)
def test_keep_vars_keeps_parameters(world, engine, kind):
    model, names = shard(engine, world), {name for name, _ in bare(world).named_buffers()}
    with kind_of(model, kind):
        for keep_vars in (False, True):
            state = model.state_dict(keep_vars=keep_vars)
            kept = {isinstance(value, nn.Parameter) for name, value in state.items() if name not in names}
            assert kept == {keep_vars}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_state_round_trips_between_wrappings(world, engine, kind, strategy):
    first = shard(engine, world, strategy=strategy)
    second = shard(engine, world, units=("body.linear",), seed=1, use_orig_params=True)
    load(second, kind, saved(first, kind))
    assert_named_close(full_state(second), bare(world).state_dict(), EXACT)
    load(first, kind, values(saved(second, kind)))
    assert_named_close(full_state(first), bare(world).state_dict(), EXACT)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_local_state_loads_onto_the_same_wrapping(world, engine, strategy, use_orig_params):
    spec = {"strategy": strategy, "use_orig_params": use_orig_params}
    second = shard(engine, world, seed=1, **spec)
    names = [name for name, _ in second.named_parameters()]
    load(second, LOCAL, saved(shard(engine, world, **spec), LOCAL))
    assert_named_close(full_state(second), bare(world).state_dict(), EXACT)
    assert [name for name, _ in second.named_parameters()] == names


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "HYBRID_SHARD"])
def test_local_state_goes_through_torchs_checkpoint(world, engine, strategy):
    """It takes a plain tensor for one that all ranks have, and each would load that of one rank."""
    groups = None
    if strategy == "HYBRID_SHARD":
        mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
        groups = mesh.get_group("shard"), mesh.get_group("replicate")
    first, second = (
        shard(engine, world, seed=seed, strategy=strategy, process_group=groups) for seed in (0, 1)
    )
    dcp.save(saved(first, LOCAL), checkpoint_id=world.shared_tmp_path)
    state = saved(second, LOCAL)
    dcp.load(state, checkpoint_id=world.shared_tmp_path)
    load(second, LOCAL, state)
    assert_named_close(full_state(second), bare(world).state_dict(), EXACT)


def other_wrapping(engine, world):
    return saved(shard(engine, world, units=("body.linear",)), LOCAL)


def other_rank(engine, world):
    torch.save(saved(shard(engine, world), LOCAL), world.shared_tmp_path / str(world.rank))
    world.barrier()
    return torch.load(world.shared_tmp_path / str(1 - world.rank))


def full(engine, world):
    return saved(shard(engine, world), FULL)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [other_wrapping, other_rank, full])
def test_local_state_of_another_shard_is_refused_unchanged(world, engine, make):
    model = shard(engine, world, seed=1)
    with pytest.raises(RuntimeError, match="loads on the same rank, world size and wrapping only"):
        load(model, LOCAL, make(engine, world))
    expected = dict(bare(world, seed=1).named_parameters(remove_duplicate=False))
    found = {name: tensor for name, tensor in full_state(model).items() if name in expected}
    assert_named_close(found, expected, EXACT)


@pytest.mark.parametrize("kind", StateDictType)
def test_an_inner_unit_saves_and_loads_its_own_state(world, engine, kind):
    model = shard(engine, world)
    unit = model.body
    before = full_state(unit)
    assert list(before) == ["linear.weight", "linear.bias", "gate.weight"]
    state = {name: tensor * 2 for name, tensor in saved(unit, kind).items()}
    load(unit, kind, state)
    assert_named_close(full_state(unit), {n: t * 2 for n, t in before.items()}, EXACT)
    assert torch.equal(full_state(model)["body.linear.bias"], before["linear.bias"] * 2)


@pytest.mark.parametrize("kind", StateDictType)
def test_modules_outside_units_and_ignored_ones_save_and_load(world, engine, kind):
    def model(seed):
        inner = bare(world, seed)
        unit = FullyShardedDataParallel(inner, ignored_modules=[inner.first])
        return nn.Sequential(nn.Linear(8, 8).to(world.device), unit)

    first, second = model(0), model(1)
    state = saved(first, kind)
    assert torch.equal(state["1.first.weight"], bare(world).first.weight)
    load(second, kind, state)
    assert_named_close(full_state(second), full_state(first), EXACT)


@pytest.mark.parametrize("kind", StateDictType)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_loading_with_assign_keeps_the_values(world, engine, use_orig_params, kind):
    first, second = (shard(engine, world, seed=s, use_orig_params=use_orig_params) for s in (0, 1))
    load(second, kind, saved(first, kind), assign=True)
    assert_named_close(full_state(second), full_state(first), EXACT)
    assert {group.state.name for group in engine.groups(second)} == {"SHARDED"}


@pytest.mark.parametrize("kind", StateDictType)
def test_recurrent_modules_compute_with_loaded_state(world, engine, kind):
    def model(seed):
        torch.manual_seed(seed)
        return engine.shard(nn.LSTM(8, 4), ShardSpec(use_orig_params=True, device=world.device))

    first, second = model(0), model(1)
    load(second, kind, saved(first, kind))
    x = torch.ones(3, 2, 8, device=world.device)
    assert torch.equal(second(x)[0], first(x)[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "gathers"), [(FULL, 3), (SHARDED, 3), (LOCAL, 0)])
def test_saving_gathers_each_group_once(world, engine, kind, gathers):
    model = shard(engine, world)
    with kind_of(model, kind), CollectivesLog() as log:
        model.state_dict()
    traffic = engine.traffic(log)
    assert (len(traffic.gathers), traffic.reductions, traffic.others) == (gathers, (), ())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [FULL, LOCAL])
def test_loading_full_or_local_state_communicates_nothing(world, engine, kind):
    model = shard(engine, world)
    with kind_of(model, kind):
        state = model.state_dict()
        with CollectivesLog() as log:
            model.load_state_dict(state)
    assert log.counts() == {}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "config"),
    [(SHARDED, None), (FULL, FullStateDictConfig(rank0_only=True))],
    ids=["sharded", "rank0_only"],
)
def test_saving_unshards_one_group_at_a_time(world, engine, monkeypatch, kind, config):
    model = shard(engine, world)
    gather, fulls, alive = ParamGroup.gather_original, [], []

    def counted(group):
        # Views keep the tensor that they show alive.
        alive.append(sum(full() is not None for full in fulls))
        full = gather(group)
        fulls.append(weakref.ref(full.untyped_storage()))
        return full

    monkeypatch.setattr(ParamGroup, "gather_original", counted)
    # gloo's threads release the tensors of a finished gather with a delay.
    monkeypatch.setattr(collectives, "start_gather", lambda full, shard, axis: full.zero_)
    saved(model, kind, config)
    keeps = kind is FULL and world.rank == 0
    assert alive == ([0, 1, 2] if keeps else [0, 0, 0])


@pytest.mark.ranks(2)
def test_loading_from_rank_zero_alone_is_refused_on_all_ranks(world, engine):
    model = shard(engine, world)
    with kind_of(model, FULL, FullStateDictConfig(rank0_only=True)):
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="some ranks were given nothing to load"):
            model.load_state_dict(state)
        model.load_state_dict(bare(world, seed=1).state_dict())
    assert_named_close(full_state(model), bare(world, seed=1).state_dict(), EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", StateDictType)
def test_an_exception_while_loading_leaves_the_model_usable(world, engine, kind):
    class Refusing(UnevenShapes):
        def _load_from_state_dict(self, *_):
            raise ValueError("planted")

    torch.manual_seed(0)
    model = engine.shard(Refusing(), ShardSpec(units=Refusing.units, device=world.device))
    with pytest.raises(ValueError, match="planted"):
        load(model, kind, saved(model, kind))
    assert {group.state.name for group in engine.groups(model)} == {"SHARDED"}
    assert_named_close(full_state(model), bare(world).state_dict(), EXACT)


# which kind


def test_the_type_is_set_for_all_units_and_restored(world, engine):
    model = shard(engine, world)
    default = FullyShardedDataParallel.get_state_dict_type(model)
    optim = FullOptimStateDictConfig(rank0_only=True)
    before = FullyShardedDataParallel.set_state_dict_type(model, FULL, FullStateDictConfig(), optim)
    assert (before, default.state_dict_type) == (default, FULL)
    with kind_of(model, LOCAL):
        inner = FullyShardedDataParallel.get_state_dict_type(model.body)
    with pytest.raises(ValueError, match="planted"), kind_of(model, LOCAL):
        raise ValueError("planted")
    assert (inner.state_dict_type, inner.state_dict_config) == (LOCAL, LocalStateDictConfig())
    assert FullyShardedDataParallel.get_state_dict_type(model).optim_state_dict_config == optim


def test_a_config_of_another_type_is_refused(world, engine):
    model = shard(engine, world)
    with pytest.raises(
        TypeError, match=r"FULL_STATE_DICT goes with FullStateDictConfig of lockstep\.engine, got Sharded"
    ):
        FullyShardedDataParallel.set_state_dict_type(model, FULL, ShardedStateDictConfig())
    with pytest.raises(ValueError, match="Linear contains no FullyShardedDataParallel"):
        FullyShardedDataParallel.get_state_dict_type(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
def test_sharded_and_local_state_is_illegal_inside_summon(world, engine, kind):
    model = shard(engine, world)
    with (
        kind_of(model, kind),
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(RuntimeError, match="state_dict is illegal inside summon_full_params"),
    ):
        model.state_dict()


def reads(engine, model):
    return engine.full_parameters(model), engine.full_gradients(model)


def shown(engine, model):
    """Return what `reads` does, as `summon_full_params` shows it."""
    with engine.summon(model, with_grads=True):
        parameters = dict(model.named_parameters())
        gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        return {name: p.detach().clone() for name, p in parameters.items()}, gradients


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("kind", "ignored"), [(NestedWrappedModule, ("module.0",)), (UnevenShapes, ())])
def test_full_reads_are_what_summon_shows(engine, world, strategy, use_orig_params, synced, kind, ignored):
    torch.manual_seed(0)
    bare = kind().to(world.device)
    settings = {"strategy": strategy, "use_orig_params": use_orig_params, "ignored": ignored}
    model = engine.shard(bare, ShardSpec(units=bare.units, device=world.device, **settings))
    before = reads(engine, model)
    assert set(before[1].values()) == {None}
    with nullcontext() if synced else engine.no_sync(model):
        engine.backward(model, model(torch.ones(2, 8, device=world.device) * (1 + world.rank)).sum())
    found, expected = reads(engine, model), shown(engine, model)
    for actual, wanted in zip(found, expected, strict=True):
        assert list(actual) == list(wanted)
        assert_named_close(actual, wanted, EXACT)
    assert any(gradient.any() for gradient in found[1].values())
    for value in found[0].values():
        value.zero_()
    assert_named_close(engine.full_parameters(model), before[0], EXACT)


@pytest.mark.ranks(2)
def test_full_reads_gather_units_together(engine, world):
    model = shard(engine, world)
    with CollectivesLog() as log:
        engine.full_parameters(model)
    assert sum(log.counts().values()) == 1


def test_full_reads_are_refused_in_a_forward(engine, world):
    model = shard(engine, world)
    inner = engine.unwrapped(model)
    inner.register_forward_hook(lambda *_: engine.full_parameters(model))
    with pytest.raises(RuntimeError, match="full_parameters is illegal inside forward"):
        model(torch.ones(2, 8, device=world.device))
