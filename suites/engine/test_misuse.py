"""Calls of the wrapper at a wrong time or on a wrong unit, refused with a remedy."""

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn

from lockstep.engine import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    StateDictType,
)

pytestmark = pytest.mark.ranks(2)

summon = FullyShardedDataParallel.summon_full_params


def test_no_sync_and_clipping_are_for_the_root(nested):
    model = nested(auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    with (
        pytest.raises(
            RuntimeError, match=r"no_sync is for the root unit only; .*\(Sequential\) is a unit below"
        ),
        model.module.module.no_sync(),
    ):
        pass
    with pytest.raises(RuntimeError, match="clip_grad_norm_ is for the root unit only"):
        model.module.module.clip_grad_norm_(1.0)


def test_summoning_is_illegal_inside_forward_and_backward(nested, batch):
    model = nested()

    def use(*_):
        with summon(model):
            pass

    model.module.module[1].register_forward_hook(use)
    with pytest.raises(RuntimeError, match="summon_full_params is illegal inside forward and backward"):
        model(batch)


def test_forward_inside_summon_is_refused(nested, batch):
    model = nested()
    with summon(model), pytest.raises(RuntimeError, match="forward or backward inside summon_full_params"):
        model(batch)


def test_writeback_with_rank0_only_is_refused(nested):
    with pytest.raises(ValueError, match="writeback with rank0_only"):
        summon(nested(), rank0_only=True)


def test_a_replaced_parameter_is_refused_by_name(world, nested, batch):
    model = nested(use_orig_params=True)
    model.module.module[0].weight = nn.Parameter(torch.zeros(4, 8, device=world.device))
    with pytest.raises(RuntimeError, match=r"parameter 'module\.0\.weight' was exchanged"):
        model(batch)


def test_a_parameter_behind_a_plain_attribute_is_refused(nested, batch):
    model = nested(use_orig_params=True)
    layer = model.module.module[0]
    layer.__dict__["weight"] = layer.weight.detach().clone()  # what the module reads from now on
    with pytest.raises(RuntimeError, match=r"parameter 'module\.0\.weight' was exchanged"):
        model(batch)


def test_second_derivatives_are_refused(nested, batch):
    loss = nested()(batch).sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        loss.backward(create_graph=True)


def test_an_optimizer_of_replaced_parameters_refuses_to_step(world):
    bare = nn.Linear(8, 8, device=world.device)
    early = torch.optim.SGD(bare.parameters(), lr=0.1)
    model = FullyShardedDataParallel(bare)
    with pytest.raises(RuntimeError, match=r"holds parameters of .*\(Linear\) as they were.* Make it from"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_made_earlier_trains_original_parameters(world, batch):
    bare = nn.Linear(8, 8, device=world.device)
    early = torch.optim.SGD(bare.parameters(), lr=0.1)
    model = FullyShardedDataParallel(bare, use_orig_params=True)
    with summon(model):
        before = bare.bias.clone()
    model(batch).sum().backward()
    early.step()
    with summon(model):
        torch.testing.assert_close(bare.bias, before - 0.4)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_stepping_on_unreduced_gradients_is_refused(nested, batch, use_orig_params):
    model = nested(use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(batch).sum().backward()
    with pytest.raises(RuntimeError, match=r"no_sync left them unreduced.* outside no_sync"):
        optimizer.step()
    model(batch).sum().backward()
    optimizer.step()


def test_torchs_state_dict_types_and_configs_are_refused(nested):
    model = nested()
    kind = "state_dict_type: expected a StateDictType of lockstep.engine, got .* of torch.distributed"
    with pytest.raises(TypeError, match=kind):
        FullyShardedDataParallel.set_state_dict_type(model, theirs.StateDictType.FULL_STATE_DICT)
    with pytest.raises(
        TypeError, match=r"FullStateDictConfig of lockstep.engine, got .* of torch.distributed"
    ):
        FullyShardedDataParallel.set_state_dict_type(
            model, StateDictType.FULL_STATE_DICT, theirs.FullStateDictConfig()
        )


def test_a_cast_between_forward_and_backward_is_refused(nested, batch):
    model = nested()
    loss = model(batch).sum()
    model.half()
    with pytest.raises(RuntimeError, match="converted or moved between forward and backward"):
        loss.backward()
