"""The state of a sharded model's optimizer in each `StateDictType`, saved, loaded and refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import ShardSpec
from lockstep.conformance.models import UnevenShapes
from lockstep.engine import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(1, 2, 3)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
STRATEGIES = ["FULL_SHARD", "NO_SHARD"]  # SHARD_GRAD_OP shards as FULL_SHARD does


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, world, number):
    """Train one step, on data that differs by rank and by step."""
    generator = torch.Generator(world.device).manual_seed(100 * number + world.rank)
    optimizer.zero_grad()
    UnevenShapes.loss(model(UnevenShapes.batch(generator))).backward()
    optimizer.step()


def trained(engine, world, make=adam, bare=UnevenShapes, units=UnevenShapes.units, steps=1, **spec):
    torch.manual_seed(0)
    model = engine.shard(bare(), ShardSpec(units=units, device=world.device, **spec))
    optimizer = make(model)
    for number in range(steps):
        step(model, optimizer, world, number)
    return model, optimizer


def save(model, optimizer, kind=FULL, config=None, **arguments):
    with FullyShardedDataParallel.state_dict_type(model, kind, optim_state_dict_config=config):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer, **arguments)


def load(model, optimizer, state, kind=FULL, config=None, **arguments):
    with FullyShardedDataParallel.state_dict_type(model, kind, optim_state_dict_config=config):
        return FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, state, load_directly=True, **arguments
        )


def values(state):
    """Return all tensors of an optimizer's state dict in full, by "parameter key"."""
    return {
        f"{name} {key}": v.full_tensor() if isinstance(v, DTensor) else v
        for name, one in state["state"].items()
        for key, v in one.items()
    }


def unsharded(world):
    """Train as `trained` does, unsharded on all ranks' data, and return the state under names."""
    torch.manual_seed(0)
    model = UnevenShapes().to(world.device)
    optimizer = adam(model)
    for rank in range(world.size):
        generator = torch.Generator(world.device).manual_seed(rank)
        (UnevenShapes.loss(model(UnevenShapes.batch(generator))) / world.size).backward()
    optimizer.step()
    return model, by_names(model, optimizer)


def by_names(model, optimizer):
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    groups = [group | {"params": names} for group in state["param_groups"]]
    return {"state": {names[n]: one for n, one in state["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_unsharded_optimizers_state_loads(world, engine, use_orig_params):
    model, optimizer = trained(engine, world, steps=2, use_orig_params=use_orig_params)
    bare, state = unsharded(world)
    model.load_state_dict(bare.state_dict())
    load(model, optimizer, state)
    state["state"].pop("empty")
    assert_named_close(values(save(model, optimizer)), values(state), EXACT)


@pytest.mark.ranks(2)
def test_optimizer_state_shares_no_memory_with_the_optimizer(world, engine):
    model, optimizer = trained(engine, world, strategy="NO_SHARD", use_orig_params=True)
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    for kind, given in ((FULL, None), (SHARDED, config), (LOCAL, None)):
        state = save(model, optimizer, kind, given)
        before = copy.deepcopy(values(state))
        load(model, optimizer, state, kind)
        step(model, optimizer, world, 1)
        assert_named_close(values(state), before, EXACT)


# param groups, and state of other kinds


def two_groups(model):
    last = [p for name, p in model.named_parameters() if name.startswith("body")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("body")]
    groups = [{"params": last, "lr": 0.5, "weight_decay": 0.25}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=0.01)


def two_groups_reversed(model):
    return torch.optim.AdamW(two_groups(model).param_groups[::-1])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_param_group_options_follow_the_parameters(world, engine, use_orig_params):
    model, optimizer = trained(engine, world, two_groups, use_orig_params=use_orig_params)
    state = save(model, optimizer)
    assert [(g["lr"], g["weight_decay"]) for g in state["param_groups"]] == [(0.5, 0.25), (0.01, 0.01)]
    assert sorted(state["param_groups"][0]["params"]) == [
        "body.gate.weight",
        "body.linear.bias",
        "body.linear.weight",
    ]
    other, reversed_ = trained(engine, world, two_groups_reversed, use_orig_params=not use_orig_params)
    for group in reversed_.param_groups:
        group["lr"] = 7.0
    load(other, reversed_, state)
    assert [group["lr"] for group in reversed_.param_groups] == [0.01, 0.5]


def test_a_flat_parameter_gets_zero_state_for_unstepped_parts(world, engine):
    class Idle(UnevenShapes):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(7, 1, bias=False)

    model, optimizer = trained(engine, world, bare=Idle, units=("idle",))
    flat, flat_optimizer = trained(engine, world, bare=Idle, units=(), steps=2)
    load(flat, flat_optimizer, save(model, optimizer))
    found = save(flat, flat_optimizer)["state"]
    assert (found["idle.weight"]["exp_avg"].tolist(), found["idle.weight"]["step"]) == ([[0.0] * 7], 1)
    assert found["scalar"]["exp_avg"] == save(model, optimizer)["state"]["scalar"]["exp_avg"]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameters_outside_units_are_saved_as_they_are(world, engine, use_orig_params):
    def model(seed):
        torch.manual_seed(seed)
        unit = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device), use_orig_params=use_orig_params)
        return nn.Sequential(unit, nn.Linear(8, 8).to(world.device))

    first, second = model(0), model(1)
    optimizers = [adam(first), adam(second)]
    first(torch.ones(2, 8, device=world.device)).sum().backward()
    optimizers[0].step()
    state = save(first, optimizers[0])
    assert sorted(state["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    load(second, optimizers[1], state)
    assert_named_close(values(save(second, optimizers[1])), values(state), EXACT)


@pytest.mark.ranks(2)
def test_optim_state_dict_takes_a_dict_and_returns_names(world, engine):
    model, optimizer = trained(engine, world)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] += 41
    given = save(model, optimizer, optim_state_dict=state)
    assert given["state"]["scalar"]["step"] == 42
    with FullyShardedDataParallel.state_dict_type(model, FULL):
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, given, is_named_optimizer=True
        )
    assert loaded["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert loaded["state"]["flat_param"]["step"] == 42


@pytest.mark.parametrize("config", [None, FullOptimStateDictConfig(rank0_only=True)], ids=["all", "rank0"])
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_ranks_may_give_the_optimizer_parameters_in_other_orders(
    world, engine, use_orig_params, kind, config
):
    """pytorch's test_fsdp_optim_state.py reverses them on odd ranks."""
    if config and kind is SHARDED:
        return

    def make(model):
        order = list(model.parameters())
        return torch.optim.AdamW(order[:: -1 if world.rank % 2 else 1], lr=0.01)

    model, optimizer = trained(engine, world, make, use_orig_params=use_orig_params)
    expected = values(save(*trained(engine, world, use_orig_params=use_orig_params)))
    state = save(model, optimizer, kind, config)
    if not config:
        assert list(values(state)) == list(expected)  # in one order on all ranks
        assert_named_close(values(state), expected, EXACT)
    again, other = trained(engine, world, make, use_orig_params=use_orig_params, steps=2)
    load(again, other, state, kind, config)
    assert_named_close(values(save(again, other)), expected, EXACT)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_modules_of_activation_checkpointing_are_left_out_of_names(world, engine, use_orig_params, when):
    """They save the module in them under its own name, and optimizers with or without them exchange state."""

    def checkpointed(model):
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        return model

    bare = UnevenShapes if when == "after" else lambda: checkpointed(UnevenShapes())
    units = UnevenShapes.units if when == "after" else ()
    make = (lambda model: adam(checkpointed(model))) if when == "after" else adam
    model, optimizer = trained(engine, world, make, bare, units, use_orig_params=use_orig_params)
    plain = trained(engine, world, units=units, use_orig_params=use_orig_params)
    expected = values(save(*plain))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    assert_named_close(values(save(model, optimizer)), expected, EXACT)
    step(*plain, world, 1)
    load(*plain, save(model, optimizer))
    assert_named_close(values(save(*plain)), expected, EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_state_under_names_is_found_by_name(world, engine, use_orig_params):
    """Optimizers such as torch's _NamedOptimizer key state by name, and sort the names."""
    model, optimizer = trained(engine, world, use_orig_params=use_orig_params)
    names = {number: name for number, (name, _) in enumerate(model.named_parameters())}
    plain = optimizer.state_dict()
    (group,) = plain["param_groups"]
    named = {
        "state": {names[number]: state for number, state in plain["state"].items()},
        "param_groups": [{**group, "params": sorted(names.values())}],
    }
    expected = values(save(model, optimizer))
    found = save(model, optimizer, optim_state_dict=named)
    assert_named_close(values(found), expected, EXACT)
    (params,) = (group["params"] for group in save(model, optimizer)["param_groups"])
    assert sorted(found["param_groups"][0]["params"]) == sorted(params)
    del named["param_groups"][0]["params"][0]
    named["param_groups"][0]["params"].append("elsewhere")
    with pytest.raises(ValueError, match=r"state names \['elsewhere'\], which the model lacks"):
        save(model, optimizer, optim_state_dict=named)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_state_without_param_groups_is_saved_and_loaded(world, engine, use_orig_params):
    """As torch's, for those who keep an optimizer's options elsewhere."""
    model, optimizer = trained(engine, world, use_orig_params=use_orig_params)
    expected = values(save(model, optimizer))
    state = save(model, optimizer, optim_state_dict={"state": optimizer.state_dict()["state"]})
    assert list(state) == ["state"]
    step(model, optimizer, world, 1)
    with FullyShardedDataParallel.state_dict_type(model, FULL):
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
    assert list(loaded) == ["state"]
    optimizer.load_state_dict(loaded | {"param_groups": optimizer.state_dict()["param_groups"]})
    assert_named_close(values(save(model, optimizer)), expected, EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_tensor_of_a_group_is_gathered_once(world, engine, strategy):
    model, optimizer = trained(engine, world, strategy=strategy)
    with CollectivesLog() as log:
        save(model, optimizer)
    gathers = 0 if strategy == "NO_SHARD" else 3 * 2  # three groups, two moments
    assert len(engine.traffic(log).gathers) == gathers


# refusals


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_optimizer_of_other_parameters_is_refused(world, engine, use_orig_params):
    model, optimizer = trained(engine, world, use_orig_params=use_orig_params)
    state = save(model, optimizer)
    other = adam(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"param group 0 .* shape \(2, 3\) that is not one of the model's"):
        save(model, other)
    with pytest.raises(ValueError, match="that is not one of the model's"):
        load(model, other, state)


def renamed(state):
    state["param_groups"][0]["params"][0] = "other"
    return state


def with_another_step(state):
    state["state"]["one"]["step"] = torch.tensor(9.0)
    return state


def in_two_groups(state):
    (group,) = state["param_groups"]
    names = group["params"]
    return state | {"param_groups": [group | {"params": names[:1]}, group | {"params": names[1:]}]}


def with_another_shape(state):
    state["state"]["one"]["exp_avg"] = torch.zeros(2)
    return state


REFUSED = {
    renamed: r"Missing: \['scalar'\]. Unexpected: \['other'\]",
    with_another_step: "'step' is .* for 'scalar' and .* for 'one', but 'flat_param' holds both",
    in_two_groups: r"param group 0 .* holds parameters of the saved groups \[0, 1\]",
    with_another_shape: r"'exp_avg' of 'one' has shape \(2,\), the parameter \(1,\)",
    lambda _: {}: r"expected the keys 'state' and 'param_groups', got \[\]",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", REFUSED)
def test_state_that_does_not_fit_is_refused(world, engine, change):
    model, optimizer = trained(engine, world)
    with pytest.raises(ValueError, match=REFUSED[change]):
        load(model, optimizer, change(save(model, optimizer)))


@pytest.mark.ranks(2)
def test_local_state_of_another_wrapping_is_refused(world, engine):
    model, optimizer = trained(engine, world)
    other, other_optimizer = trained(engine, world, units=("body",))
    with pytest.raises(ValueError, match=r"Missing.*Unexpected"):
        load(model, optimizer, save(other, other_optimizer, LOCAL), LOCAL)


@pytest.mark.ranks(2)
def test_state_of_unknown_shape_is_refused_by_name(world, engine):
    model, optimizer = trained(engine, world)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["rows"] = torch.zeros(2)
    with pytest.raises(NotImplementedError, match=r"'rows' of 'flat_param' has shape"):
        save(model, optimizer)
