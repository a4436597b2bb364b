"""State of a model: its buffers, its extra state, and units without parameters."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.assertions import assert_named_close, local_part
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, Precision, ShardSpec, offers, require
from lockstep.conformance.models import UnevenShapes

pytestmark = pytest.mark.ranks(1, 2, 3)

KINDS = ["FULL", "SHARDED", "LOCAL"]
adamw = partial(torch.optim.AdamW, lr=0.01)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
def test_state_in_parts_is_refused_while_parameters_are_full(engine, train, states, kind):
    model = train(0).model
    with engine.summon(model), pytest.raises(RuntimeError, match="state_dict"):
        states.model(model, kind)
    assert states.model(model, kind)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_cast_buffers_are_saved_in_their_dtype_under_every_name(world, engine, states, kind):
    bare, norm = UnevenShapes(), nn.BatchNorm1d(5)
    bare.norms = nn.ModuleList([norm, norm])
    bare.register_buffer("table", torch.ones(5), persistent=False)
    half = Precision(param_dtype=torch.float16, buffer_dtype=torch.float16)
    model = engine.shard(bare.to(world.device), ShardSpec(precision=half, device=world.device))
    model(torch.ones(4, 8, device=world.device))
    state = states.model(model, kind)
    dtypes = {name: tensor.dtype for name, tensor in state.items() if tensor.is_floating_point()}
    assert set(dtypes.values()) == {torch.float32}
    assert state["count"].dtype == torch.int64
    assert {"offset", "norms.0.running_mean", "norms.1.running_mean"} <= set(dtypes)
    assert "table" not in state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_parameters_missing_from_the_state_keep_their_values(train, states, kind):
    model = train(0).model
    state = {name: value for name, value in states.model(model, kind).items() if name == "first.bias"}
    state["first.bias"] = state["first.bias"] + 1
    before = {name: tensor.clone() for name, tensor in states.model(model).items()}
    found = states.load_model(model, state, kind, strict=False)
    assert sorted(found.missing_keys) == sorted(set(before) - {"first.bias"})
    expected = before | {"first.bias": before["first.bias"] + 1}
    assert_named_close(states.model(model), expected, EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_leaves_nothing_of_what_was_there(world, engine, train, states, kind):
    """Neither what a forward has kept for its backward, nor data that the user has put in."""
    spec = {"use_orig_params": True, "strategy": "SHARD_GRAD_OP"}
    saving, loading = (train(steps, **spec) for steps in (0, 1))
    before = states.model(saving.model)
    batch = torch.ones(4, 8, device=world.device)
    stale = loading.model(batch)
    for model, change in ((saving.model, 1), (loading.model, 7)):
        for parameter in model.parameters():
            parameter.data = parameter.data + change
    states.load_model(loading.model, states.model(saving.model, kind), kind)
    if offers(engine, Capability.GROUPS):
        assert {group.state.name for group in engine.groups(loading.model)} == {"SHARDED"}
    expected = {name: value if name in ("offset", "count") else value + 1 for name, value in before.items()}
    assert_named_close(states.model(loading.model), expected, EXACT)
    found = loading.model(batch)
    assert torch.equal(found, saving.model(batch))
    assert not torch.equal(found, stale)


@pytest.mark.ranks(2)
def test_ranks_that_keep_no_state_see_no_parameters_for_it(world, engine, states):
    bare, seen = nn.Linear(4, 4).to(world.device), []
    bare.register_state_dict_pre_hook(lambda module, *_: seen.append(getattr(module, "weight", None)))
    states.model(engine.shard(bare, ShardSpec(device=world.device)), rank0=True)
    assert [weight is not None and tuple(weight.shape) for weight in seen] == [world.rank == 0 and (4, 4)]


class Noted(nn.Linear):
    """A layer with state of another kind, and with a buffer that is saved as a number."""

    def __init__(self, *shape):
        super().__init__(*shape)
        self.register_buffer("count", torch.ones(()))
        self.register_state_dict_post_hook(self.save_count)
        self.register_load_state_dict_pre_hook(self.load_count)

    @staticmethod
    def save_count(module, state, prefix, _):
        if f"{prefix}count" in state:
            state[f"{prefix}count"] = state[f"{prefix}count"].item()

    @staticmethod
    def load_count(module, state, prefix, *_):
        state[f"{prefix}count"] = torch.tensor(state[f"{prefix}count"])

    def get_extra_state(self):
        return {"note": 1}

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.ranks(2)
def test_state_of_another_kind_stays_as_it_is(world, engine, states):
    model = engine.shard(Noted(2, 2).to(world.device), ShardSpec(device=world.device))
    found = states.model(model, rank0=True).get("_extra_state")
    assert found == (None if world.rank else {"note": 1})
    saved = states.model(model)
    assert saved["count"] == 1
    states.load_model(model, saved | {"count": 2})
    assert (model.state, model.count.item()) == ({"note": 1}, 2.0)


def test_local_state_is_the_live_shard(world, engine, train, states, use_orig_params):
    require(engine, Capability.GROUPS)
    model = train(0, use_orig_params=use_orig_params).model
    state = states.model(model, "LOCAL")
    assert not any(value.requires_grad for value in state.values())
    sizes = {f"{group.name}.flat_param".strip("."): group.local_numel for group in engine.groups(model)}
    # What torch.distributed.checkpoint is to keep apart is a DTensor.
    assert {isinstance(state[name], DTensor) for name in sizes} == {world.size > 1}
    with states.of_kind(model, "LOCAL"):
        kept = model.state_dict(keep_vars=True)
    assert all(isinstance(kept[name], nn.Parameter) and kept[name].requires_grad for name in sizes)
    assert {name: local_part(state[name]).numel() for name in sizes} == sizes
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    after = states.model(model, "LOCAL")
    assert torch.equal(local_part(after["flat_param"]), local_part(state["flat_param"]))


class Plain(nn.Module):
    """A unit without parameters, with buffers alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x):
        return x + self.offset


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("root", ["plain", "full"])
def test_units_without_parameters_have_state(world, engine, states, kind, root):
    inner = nn.Sequential(Plain(), nn.Linear(2, 2) if root == "plain" else Plain())
    bare = nn.Sequential(inner, *([] if root == "plain" else [nn.Linear(2, 2)])).to(world.device)
    model = engine.shard(bare, ShardSpec(units=("0", "0.0", "0.1"), device=world.device))
    optimizer = engine.optimizer(model, adamw)
    engine.backward(model, model(torch.ones(1, 2, device=world.device)).sum())
    optimizer.step()
    state = copy.deepcopy(states.values(model, optimizer))
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    assert not states.values(model, optimizer)["0.0.offset"].any()
    saved = states.all(model, optimizer, kind)
    assert states.load_model(model, saved["model"], kind).missing_keys == []
    states.load_model(model, {n: v for n, v in state.items() if " " not in n})
    states.load_optimizer(model, optimizer, saved["optimizer"], kind)
    assert_named_close(states.values(model, optimizer), state, EXACT)
    with pytest.raises(RuntimeError, match=r"0\.0\.offset"):
        states.load_model(model, {n: v for n, v in saved["model"].items() if "offset" not in n}, kind)
    of_first = states.all(model, optimizer, rank0=True)
    assert [bool(part) for part in of_first.values()] == [world.rank == 0] * 2


@pytest.mark.ranks(2)
def test_state_of_a_model_without_parameters_is_that_of_rank_zero(world, engine, states):
    model = engine.shard(Plain().to(world.device), ShardSpec(device=world.device))
    assert list(states.model(model, rank0=True)) == ([] if world.rank else ["offset"])
