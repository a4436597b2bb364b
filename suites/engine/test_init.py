"""What a wrapped model is like to hold: equal starts, what is left alone, names, apply, printing."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.assertions import Tolerance, assert_named_close, assert_same_across_ranks
from harness.conformance.models import NestedWrappedModule
from harness.engine import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    groups,
)

pytestmark = pytest.mark.ranks(2)

FULL, GRAD_OP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
F16, F32 = torch.float16, torch.float32
EXACT = Tolerance(0, 0)
summon = FullyShardedDataParallel.summon_full_params


def nested(world, **arguments):
    torch.manual_seed(0)
    return FullyShardedDataParallel(NestedWrappedModule().to(world.device), **arguments)


def batch(world):
    return torch.arange(32.0, device=world.device).view(4, 8) * (world.rank + 1)


# where it starts


def test_sync_module_states_broadcasts_rank_zeros_values(world):
    torch.manual_seed(world.rank)
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    bare[1].running_mean.fill_(world.rank)
    model = FullyShardedDataParallel(bare, sync_module_states=True, auto_wrap_policy=always_wrap_policy)
    assert_same_across_ranks(model.state_dict())
    assert not model.state_dict()["1.running_mean"].any()


# what is left alone


def test_ignored_modules_are_not_sharded_cast_or_synchronised(world):
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    bare[1].running_mean.fill_(world.rank)
    precision = MixedPrecision(buffer_dtype=F16)
    model = FullyShardedDataParallel(
        bare, mixed_precision=precision, ignored_modules=[bare[1]], sync_module_states=True
    )
    assert bare[1].running_mean[0] == world.rank
    model(batch(world)).sum().backward()
    assert (bare[1].weight.shape, bare[1].running_mean.dtype) == ((8,), F32)
    assert [group.parameters for group in groups(model)] == [("0.weight", "0.bias")]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_gradient_of_an_ignored_parameter_is_not_reduced(world, use_orig_params):
    bare = nn.Linear(2, 1, device=world.device)
    weight, x = bare.weight.detach().clone(), torch.ones(1, 2, device=world.device) * (world.rank + 1)
    ignored = bare.weight
    model = FullyShardedDataParallel(bare, ignored_states=[ignored], use_orig_params=use_orig_params)
    (model(x) * (world.rank + 1)).sum().backward()
    assert ignored is bare.weight
    assert torch.equal(ignored, weight)
    assert ignored.grad.tolist() == [[(world.rank + 1.0) ** 2] * 2]
    with summon(model, writeback=False, with_grads=True):
        assert model.bias.grad.tolist() == [1.5]


def test_an_ignored_module_shared_by_units_is_left_alone(world):
    shared = nn.Linear(2, 2, bias=False, device=world.device)
    inner = nn.Sequential(nn.Linear(2, 2, device=world.device), shared)
    unit = FullyShardedDataParallel(inner, ignored_modules=[shared], use_orig_params=True)
    model = FullyShardedDataParallel(nn.Sequential(unit, shared), use_orig_params=True)
    model(torch.ones(1, 2, device=world.device) * world.rank).sum().backward()
    assert [group.parameters for group in groups(model)] == [("0.0.weight", "0.0.bias")]
    assert shared.weight.shape == (2, 2)
    assert len({str(grad) for grad in world.gather(shared.weight.grad.tolist())}) == 2


def test_ignoring_the_wrapped_module_warns_and_makes_no_group(world):
    bare = nn.Linear(8, 8, device=world.device)
    with pytest.warns(UserWarning, match=r"\(Linear\): the module is itself in ignored_modules") as caught:
        model = FullyShardedDataParallel(bare, ignored_modules=[bare])
    assert caught[0].filename == __file__
    assert (groups(model), bare.weight.shape) == ((), (8, 8))


# names and attributes


class Outer(nn.Module):
    """No unit itself, but around units."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.head = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))


def test_modules_around_units_see_clean_names(world):
    bare = Outer(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).to(world.device)
    parameters = [name for name, _ in bare.named_parameters()]
    buffers = [name for name, _ in bare.named_buffers()]
    bare.inside = FullyShardedDataParallel(
        bare.inside, auto_wrap_policy=always_wrap_policy, use_orig_params=True
    )
    assert [name for name, _ in bare.named_parameters()] == parameters
    assert [name for name, _ in bare.named_buffers()] == buffers
    assert {name for name, _ in bare.named_modules()} == {"", "inside", "inside.0", "inside.1", "head"}


def test_get_parameter_and_get_submodule_take_clean_names(world):
    bare = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))).to(world.device)
    model = FullyShardedDataParallel(bare, auto_wrap_policy=always_wrap_policy, use_orig_params=True)
    assert [model.get_parameter(name) is p for name, p in model.named_parameters()] == [True] * 4
    assert model.get_submodule("1.0") is bare[1][0]


def test_setting_an_attribute_of_the_module_reaches_the_module(world):
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model = FullyShardedDataParallel(Scaled(8, 8).to(world.device))
    before = model(batch(world))
    model.scale = 2.0
    assert torch.equal(model(batch(world)), 2 * before)
    assert model.module.scale == 2.0


def test_new_attributes_are_set_on_the_unit_alone(world):
    model = nested(world)
    model.note = "mine"
    model.forward = model.forward
    assert model.note == "mine"
    assert {"note", "forward"}.isdisjoint(vars(model.module))


def test_fsdp_modules_lists_outer_units_first_or_roots_alone(world):
    first = nested(world, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    second = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device))
    around = nn.Sequential(first, second)
    found = FullyShardedDataParallel.fsdp_modules(around)
    assert found == [first, first.module.module, first.module.module.module[1], second]
    assert FullyShardedDataParallel.fsdp_modules(around, root_only=True) == [first, second]
    assert [unit.check_is_root() for unit in found] == [True, False, False, True]


# apply


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_apply_initialises_unsharded_parameters_of_all_units(world, strategy, use_orig_params):
    def init(module):
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            nn.init.constant_(module.bias, 5)

    bare, seen = NestedWrappedModule().to(world.device), []
    bare.apply(init)
    expected, order, seen = bare.state_dict(), seen, []
    arguments = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = nested(world, auto_wrap_policy=always_wrap_policy, **arguments)
    assert model.apply(init) is model
    assert [name for name in seen if name != "FullyShardedDataParallel"] == order
    assert_named_close(model.state_dict(), expected, EXACT)


def test_apply_of_a_module_around_units_sees_full_parameters(world):
    model = nn.Sequential(nested(world))
    model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    assert model.state_dict()["0.module.0.weight"].unique().tolist() == [1]


def test_apply_and_copies_are_illegal_inside_forward_and_summon(world):
    model = nested(world)

    def use(*_):
        with pytest.raises(RuntimeError, match="apply is illegal inside forward and backward"):
            model.apply(lambda _: None)
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy is illegal inside forward and backward"):
            copy.deepcopy(model)

    model.module.module[1].register_forward_hook(use)
    model(batch(world))
    with summon(model):
        with pytest.raises(RuntimeError, match="apply is illegal inside summon_full_params"):
            model.apply(lambda _: None)
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy is illegal inside summon_full_params"):
            copy.deepcopy(model)


# printing


def test_printing_shows_strategy_dtypes_and_sizes(world):
    low = MixedPrecision(param_dtype=F16, reduce_dtype=F32)
    model = FullyShardedDataParallel(
        nn.Linear(8, 8).to(world.device), sharding_strategy=GRAD_OP, mixed_precision=low
    )
    dtypes = "dtype=torch.float32, compute=torch.float16, reduce=torch.float32"
    assert str(model).splitlines()[1].strip() == f"SHARD_GRAD_OP, SHARDED, numel=36/72, {dtypes}"
    offloaded = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device), cpu_offload=CPUOffload(True))
    assert "reduce=torch.float32, offloaded\n" in str(offloaded)
    assert "FULL_SHARD, no parameters of its own" in str(nested(world, auto_wrap_policy=always_wrap_policy))


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_can_be_printed_in_every_state(world, strategy, use_orig_params):
    class Holding(nn.Linear):
        def extra_repr(self):
            return f"{super().extra_repr()}, mean={self.weight.mean():.3f}"

    bare = nn.Sequential(Holding(8, 8), nn.ParameterList([torch.zeros(8)]))
    bare.forward = lambda x: bare[0](x) + bare[1][0]
    model = FullyShardedDataParallel(
        bare.to(world.device), sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    seen = [str(model)]
    bare[0].register_forward_hook(lambda *_: seen.append(str(model)))
    loss = model(batch(world)).sum()
    seen.append(str(model))
    loss.register_hook(lambda _: seen.append(str(model)))
    loss.backward()
    with summon(model):
        seen.append(str(model))
    after = "SHARDED" if strategy is FULL else "RETAINED"
    states = [text.splitlines()[1].split(", ")[1] for text in seen]
    assert states == ["SHARDED", "UNSHARDED", after, after, "SUMMONED"]


def test_a_model_can_be_printed_without_group_and_half_built():
    model = FullyShardedDataParallel(nn.Linear(8, 8), process_group=(group := dist.new_group()))
    dist.destroy_process_group(group)
    assert "numel=36/72" in str(model)
    unfinished = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(unfinished)
    assert str(unfinished) == "FullyShardedDataParallel()"
