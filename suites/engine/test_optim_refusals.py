"""What an optimizer's state cannot be saved from or loaded onto is refused, with what differs and a cure."""

import pytest
import torch
from torch import nn

from harness.conformance import ShardSpec
from harness.conformance.models import UnevenShapes
from harness.engine import FullyShardedDataParallel, StateDictType

pytestmark = pytest.mark.ranks(2)

FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(engine, world, units=UnevenShapes.units, **spec):
    model = engine.shard(UnevenShapes(), ShardSpec(units=units, device=world.device, **spec))
    optimizer = adam(model)
    model(torch.ones(4, 8, device=world.device)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(model, optimizer, kind=FULL):
    with FullyShardedDataParallel.state_dict_type(model, kind):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def load(model, optimizer, state, kind=FULL):
    with FullyShardedDataParallel.state_dict_type(model, kind):
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)


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


@pytest.mark.parametrize("change", REFUSED)
def test_state_that_does_not_fit_is_refused(world, engine, change):
    model, optimizer = trained(engine, world)
    with pytest.raises(ValueError, match=REFUSED[change]):
        load(model, optimizer, change(save(model, optimizer)))


def test_local_state_of_another_wrapping_is_refused(world, engine):
    model, optimizer = trained(engine, world)
    other, other_optimizer = trained(engine, world, units=("body",))
    with pytest.raises(ValueError, match=r"Missing.*Unexpected"):
        load(model, optimizer, save(other, other_optimizer, LOCAL), LOCAL)


def test_state_of_unknown_shape_is_refused_by_name(world, engine):
    model, optimizer = trained(engine, world)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["rows"] = torch.zeros(2)
    with pytest.raises(NotImplementedError, match=r"'rows' of 'flat_param' has shape"):
        save(model, optimizer)
