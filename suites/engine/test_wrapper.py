"""The wrapper as its user sees it: names, states, full parameters, apply, printing, attributes."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import NestedWrappedModule
from lockstep.engine import (
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
summon = FullyShardedDataParallel.summon_full_params


def states(model):
    return [group.state.name for group in groups(model)]


# names, sizes, states


def test_original_parameters_keep_identity_and_show_the_shard(world):
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(world.device)
    before = dict(bare.named_parameters())
    model = FullyShardedDataParallel(
        bare, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True
    )
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sizes == {
        "0.weight": ((3,), (1,))[world.rank],
        "0.bias": ((0,), (2,))[world.rank],
        "1.weight": ((2,), (0,))[world.rank],
        "1.bias": ((0,), (1,))[world.rank],
    }


def test_without_use_orig_params_each_group_has_a_flat_parameter(nested):
    model = nested(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sizes == {
        "module.0.flat_param": 18,
        "module.1.0.flat_param": 40,
        "module.1.1.flat_param": 136,
        "module.2.flat_param": 34,
        "module.3.flat_param": 20,
    }


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrapping_frees_the_unsharded_parameters(world, use_orig_params):
    bare = nn.Linear(8, 7).to(world.device)
    originals = list(bare.parameters())
    model = FullyShardedDataParallel(bare, use_orig_params=use_orig_params)
    (group,) = groups(model)
    for parameter in [*originals, *model.parameters()]:
        assert parameter.untyped_storage().nbytes() == group.local_bytes == 4 * 32


@pytest.mark.ranks(3)
def test_group_info_has_names_and_sizes(world):
    (group,) = groups(FullyShardedDataParallel(nn.Linear(3, 1).to(world.device)))
    assert (group.name, group.parameters) == ("", ("weight", "bias"))
    assert (group.local_numel, group.full_numel, group.padding) == (2, 6, 2)
    assert (group.local_bytes, group.gathered_bytes, group.gradient_dtype) == (8, 0, None)


@pytest.mark.parametrize(
    ("strategy", "after"), [(FULL, "SHARDED"), (GRAD_OP, "RETAINED"), (NONE, "RETAINED")]
)
def test_the_strategy_decides_whether_groups_stay_until_backward(nested, batch, strategy, after):
    model = nested(sharding_strategy=strategy, use_orig_params=True)
    seen = []
    model.module.module[1].register_forward_hook(lambda *_: seen.extend(states(model)))
    shapes = [p.shape for p in model.parameters()]
    loss = model(batch).sum()
    assert (seen, states(model)) == (["UNSHARDED"], [after])
    assert [p.shape for p in model.parameters()] == shapes
    loss.backward()
    assert states(model) == ["SHARDED"]


def test_modules_compute_with_plain_tensors_autograd_tracks(nested, batch):
    model = nested(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, *_: seen.append((type(m.weight), m.weight.requires_grad)))
    model(batch)
    assert seen == [(torch.Tensor, True)] * 5


# dtypes


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_cast_after_wrapping_casts_gradients_and_buffers(world, batch, use_orig_params):
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    model = FullyShardedDataParallel(bare, use_orig_params=use_orig_params)
    model(batch).sum().backward()
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}
    model(batch.double()).sum().backward()
    assert {b.dtype for b in model.buffers()} == {torch.float64, torch.int64}


# full parameters and state


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_summoned_parameters_are_originals_and_changes_are_kept(world, use_orig_params):
    bare = NestedWrappedModule().to(world.device)
    expected = {name: p.detach().clone() for name, p in bare.named_parameters()}
    world.assert_same({name: p.sum().item() for name, p in expected.items()})
    model = FullyShardedDataParallel(
        bare, auto_wrap_policy=always_wrap_policy, use_orig_params=use_orig_params
    )
    with summon(model):
        assert_named_close(dict(model.named_parameters()), expected)
        for parameter in model.parameters():
            parameter.data.add_(1)
    with summon(model, writeback=False):
        assert_named_close(dict(model.named_parameters()), {n: p + 1 for n, p in expected.items()})


def test_summoned_changes_are_dropped_without_writeback(nested):
    model = nested()
    with summon(model, writeback=False):
        model.module.module[0].weight.data.zero_()
    with summon(model):
        assert model.module.module[0].weight.any()


def test_rank0_only_summons_on_rank_zero(world, nested):
    model = nested(use_orig_params=True)
    with summon(model, writeback=False, rank0_only=True):
        assert states(model) == [("SUMMONED", "SHARDED")[world.rank]]


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_a_parameter_overwritten_in_place_changes_the_output(world, strategy):
    bare = nn.Linear(8, 8, bias=False).to(world.device)
    model = FullyShardedDataParallel(bare, sharding_strategy=strategy, use_orig_params=True)
    with torch.no_grad():
        model.weight.fill_(2)
    ones = torch.ones(4, 8, device=world.device)
    assert model(ones).unique().tolist() == [16]
    model.weight.data = torch.full((8, 8), 3.0, device=world.device)
    assert model(ones).unique().tolist() == [24]


def test_saved_state_carries_the_versions_of_modules(world):
    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            self.loaded = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    inner = Versioned(2, 2).to(world.device)
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(inner)))
    model.load_state_dict(model.state_dict())
    assert inner.loaded == 3


def test_loading_reports_missing_and_unexpected_names(nested):
    model = nested(auto_wrap_policy=always_wrap_policy)
    state = model.state_dict()
    state["module.9.weight"] = state.pop("module.0.weight")
    with pytest.raises(
        RuntimeError, match=r"Missing key.*\"module\.0\.weight\"[^U]*Unexpected key.*\"module\.9\.weight\""
    ):
        model.load_state_dict(state)
    assert set(states(model)) == {"SHARDED"}


# names and attributes


class Outer(nn.Module):
    """A plain module around units."""

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


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_named_modules_may_have_a_prefix_and_duplicates(world, remove_duplicate):
    shared = nn.Linear(8, 8)
    bare = nn.Sequential(shared, nn.Sequential(shared)).to(world.device)

    def names(model):
        named = model.named_modules(prefix="model", remove_duplicate=remove_duplicate)
        return [name for name, module in named if not isinstance(module, FullyShardedDataParallel)]

    expected = names(bare)
    assert expected == ["model", "model.0", "model.1", "model.1.0"][: 3 if remove_duplicate else 4]
    assert names(FullyShardedDataParallel(bare, auto_wrap_policy=always_wrap_policy)) == expected


def test_get_parameter_and_get_submodule_take_clean_names(world):
    bare = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))).to(world.device)
    model = FullyShardedDataParallel(bare, auto_wrap_policy=always_wrap_policy, use_orig_params=True)
    assert [model.get_parameter(name) is p for name, p in model.named_parameters()] == [True] * 4
    assert model.get_submodule("1.0") is bare[1][0]


def test_setting_an_attribute_of_the_module_reaches_the_module(world, batch):
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model = FullyShardedDataParallel(Scaled(8, 8).to(world.device))
    before = model(batch)
    model.scale = 2.0
    assert torch.equal(model(batch), 2 * before)
    assert model.module.scale == 2.0


def test_new_attributes_are_set_on_the_unit_alone(nested):
    model = nested()
    model.note = "mine"
    model.forward = model.forward
    assert model.note == "mine"
    assert {"note", "forward"}.isdisjoint(vars(model.module))


def test_fsdp_modules_lists_outer_units_first_or_roots_alone(world, nested):
    first = nested(auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    second = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device))
    around = nn.Sequential(first, second)
    found = FullyShardedDataParallel.fsdp_modules(around)
    assert found == [first, first.module.module, first.module.module.module[1], second]
    assert FullyShardedDataParallel.fsdp_modules(around, root_only=True) == [first, second]
    assert [unit.check_is_root() for unit in found] == [True, False, False, True]


# apply


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_apply_initialises_unsharded_parameters_of_all_units(world, nested, strategy, use_orig_params):
    def init(module):
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            nn.init.constant_(module.bias, 5)

    bare, seen = NestedWrappedModule().to(world.device), []
    bare.apply(init)
    expected, order, seen = bare.state_dict(), seen, []
    arguments = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = nested(auto_wrap_policy=always_wrap_policy, **arguments)
    assert model.apply(init) is model
    assert [name for name in seen if name != "FullyShardedDataParallel"] == order
    assert_named_close(model.state_dict(), expected, EXACT)


def test_apply_of_a_module_around_units_sees_full_parameters(nested):
    model = nn.Sequential(nested())
    model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    assert model.state_dict()["0.module.0.weight"].unique().tolist() == [1]


def test_apply_and_copies_are_illegal_inside_forward_and_summon(nested, batch):
    model = nested()

    def use(*_):
        with pytest.raises(RuntimeError, match="apply is illegal inside forward and backward"):
            model.apply(lambda _: None)
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy is illegal inside forward and backward"):
            copy.deepcopy(model)

    model.module.module[1].register_forward_hook(use)
    model(batch)
    with summon(model):
        with pytest.raises(RuntimeError, match="apply is illegal inside summon_full_params"):
            model.apply(lambda _: None)
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy is illegal inside summon_full_params"):
            copy.deepcopy(model)


# printing


def test_printing_shows_strategy_dtypes_and_sizes(world, nested):
    low = MixedPrecision(param_dtype=F16, reduce_dtype=F32)
    model = FullyShardedDataParallel(
        nn.Linear(8, 8).to(world.device), sharding_strategy=GRAD_OP, mixed_precision=low
    )
    dtypes = "dtype=torch.float32, compute=torch.float16, reduce=torch.float32"
    assert str(model).splitlines()[1].strip() == f"SHARD_GRAD_OP, SHARDED, numel=36/72, {dtypes}"
    offloaded = FullyShardedDataParallel(nn.Linear(8, 8).to(world.device), cpu_offload=CPUOffload(True))
    assert "reduce=torch.float32, offloaded\n" in str(offloaded)
    assert "FULL_SHARD, no parameters of its own" in str(nested(auto_wrap_policy=always_wrap_policy))


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_can_be_printed_in_every_state(world, batch, strategy, use_orig_params):
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
    loss = model(batch).sum()
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
    dist.barrier()  # a rank may not end the group while the other still connects to it
    dist.destroy_process_group(group)
    assert "numel=36/72" in str(model)
    unfinished = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(unfinished)
    assert str(unfinished) == "FullyShardedDataParallel()"


# errors


def test_reading_an_unknown_attribute_names_the_wrapped_class(nested):
    with pytest.raises(AttributeError, match="'NestedWrappedModule' object has no attribute 'nothing'"):
        nested().nothing  # noqa: B018


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_a_dropped_model_frees_its_memory(nested, batch, strategy):
    model = nested(sharding_strategy=strategy, auto_wrap_policy=always_wrap_policy, use_orig_params=True)
    model(batch).sum().backward()
    model(batch)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * 10


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("unsynced", [False, True], ids=["", "no_sync"])
def test_summoned_gradients_that_are_changed_are_kept(world, use_orig_params, unsynced):
    model = FullyShardedDataParallel(nn.Linear(3, 2, device=world.device), use_orig_params=use_orig_params)
    with model.no_sync() if unsynced else nullcontext():
        model(torch.ones(1, 3, device=world.device)).sum().backward()
    for writeback, factor in ((True, 5), (False, 7)):
        with FullyShardedDataParallel.summon_full_params(model, writeback=writeback, with_grads=True):
            for parameter in model.parameters():
                parameter.grad *= factor
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        assert [p.grad.tolist() for p in model.parameters()] == [[[5.0] * 3] * 2, [5.0] * 2]


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_summoned_gradients_that_are_only_read_do_not_count_as_zeroed(world, use_orig_params):
    model = FullyShardedDataParallel(nn.Linear(3, 2, device=world.device), use_orig_params=use_orig_params)
    x = torch.ones(1, 3, device=world.device)
    model(x).sum().backward()
    with model.no_sync():
        (model(x) * 0).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        assert [p.grad.tolist() for p in model.parameters()] == [[[0.0] * 3] * 2, [0.0] * 2]
    model(x).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        assert [p.grad.tolist() for p in model.parameters()] == [[[2.0] * 3] * 2, [2.0] * 2]


def test_a_summoned_gradient_that_is_dropped_is_gone(world):
    model = FullyShardedDataParallel(nn.Linear(3, 2, device=world.device), use_orig_params=True)
    model(torch.ones(1, 3, device=world.device)).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        model.weight.grad = None
    assert model.weight.grad is None
    assert sum(world.gather(model.bias.grad.numel() if model.bias.grad is not None else 0)) == 2


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_a_forward_finds_its_parameters_registered(world, use_orig_params):
    found = {}

    class Looking(nn.Linear):
        def forward(self, x):
            found.update({name: tuple(p.shape) for name, p in self.named_parameters()})
            return super().forward(x)

    model = FullyShardedDataParallel(Looking(3, 2, device=world.device), use_orig_params=use_orig_params)
    outside = [name for name, _ in model.named_parameters()]
    model(torch.ones(1, 3, device=world.device)).sum().backward()
    assert found == {"weight": (2, 3), "bias": (2,)}
    assert [name for name, _ in model.named_parameters()] == outside
