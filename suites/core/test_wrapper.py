"""The wrapper itself: attributes, copies, full parameters, the ranks that it is given, defaults."""

import copy
import inspect
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close, local_part
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, offers, require
from lockstep.conformance.models import NestedWrappedModule
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(2)


# attributes


class Scaled(nn.Sequential):
    """Layers with an attribute that forward reads."""

    def __init__(self):
        super().__init__(nn.Linear(8, 4), nn.Linear(4, 8))
        self.scale = 2.0

    def forward(self, x):
        return self.scale * super().forward(x)


def test_attributes_are_those_of_the_module(world, wrap):
    reference = Scaled().to(world.device)
    model = wrap(copy.deepcopy(reference))
    assert (model.scale, model.module.scale) == (2.0, 2.0)
    assert type(model[0]) is nn.Linear
    assert not hasattr(model, "nothing")
    model.note = "own"
    assert (model.note, hasattr(model.module, "note")) == ("own", False)
    assert model.training
    assert not model.eval().module.training
    assert not model.training
    x = torch.ones(2, 8, device=world.device)
    torch.testing.assert_close(model(x), reference(x))


def test_an_attribute_that_is_set_is_computed_with(world, wrap):
    model = wrap(Scaled().to(world.device))
    x = torch.ones(2, 8, device=world.device)
    before = model(x).detach()
    model.scale = 4.0
    assert (model.scale, model.module.scale) == (4.0, 4.0)
    torch.testing.assert_close(model(x), 2 * before)


def test_what_the_wrapper_has_itself_is_set_there(wrap):
    """Methods, and names that are private."""
    model = wrap(Scaled())
    model.module._note = "inner"
    model._note, model.extra_repr = "outer", lambda: "words"
    assert (model._note, model.module._note) == ("outer", "inner")
    assert "extra_repr" not in vars(model.module)


def test_a_model_can_be_printed_at_any_time(world, engine, wrap):
    model = wrap(nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    texts = [repr(model)]
    loss = model(torch.ones(2, 8, device=world.device)).sum()
    texts.append(repr(model))
    engine.backward(model, loss)
    for text in [*texts, repr(model)]:
        assert "Linear(in_features=8" in text


def test_a_debugger_may_look_at_a_wrapper_that_is_half_built(wrapper_front):
    """One whose `__init__` is under way, or has failed."""
    wrapper = wrapper_front.FullyShardedDataParallel
    model = wrapper.__new__(wrapper)
    nn.Module.__init__(model)
    assert "FullyShardedDataParallel" in repr(model)
    with pytest.raises(AttributeError, match=r"FullyShardedDataParallel.*'nothing'"):
        _ = model.nothing


def test_a_printed_model_says_how_it_is_sharded(wrap):
    """The strategy, and how many of how many elements this rank has."""
    for bare, words in [(nn.Linear(8, 8), ("36", "72")), (nn.ReLU(), ("no parameters",))]:
        text = repr(wrap(bare))
        assert all(word in text for word in ("FULL_SHARD", *words)), text


WAYS = {"copy": copy.copy, "save": lambda model: torch.save(model, "/dev/null")}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_sharded_model_is_neither_pickled_nor_half_copied(wrap, way):
    model = wrap(nn.Linear(8, 8))
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        way(model)


def test_functions_are_applied_to_full_parameters(world, engine, wrapper_front, wrap, use_orig_params):
    def fill(module):
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            gradients.append(module.weight.grad)
            nn.init.constant_(module.weight, float(len(shapes)))

    shapes, gradients = [], []
    policy = wrapper_front.ModuleWrapPolicy({nn.Linear})
    bare = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    model = wrap(bare, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    engine.backward(model, model(torch.ones(2, 8, device=world.device)).sum())
    assert model.apply(fill) is model
    assert (shapes, gradients) == ([(4, 8), (8, 4)], [None, None])
    found = engine.full_parameters(model)
    assert [found[f"{i}.weight"].unique().tolist() for i in range(2)] == [[1.0], [2.0]]


def test_units_are_listed_outer_before_inner(world, wrapper_front, wrap):
    wrapper = wrapper_front.FullyShardedDataParallel
    inner = wrap(nn.Linear(8, 8))
    alone = wrap(nn.Linear(8, 8))
    model = wrap(nn.Sequential(inner, nn.ReLU()))
    around = nn.ModuleList([model, alone])
    assert wrapper.fsdp_modules(around) == [model, inner, alone]
    model(torch.ones(2, 8, device=world.device))
    assert wrapper.fsdp_modules(around, root_only=True) == [model, alone]


def test_only_the_root_clips_and_accumulates(world, engine, wrap):
    inner = wrap(nn.Linear(8, 8))
    model = wrap(nn.Sequential(inner, nn.Linear(8, 8), wrap(nn.ReLU())))
    engine.backward(model, model(torch.ones(2, 8, device=world.device)).sum())
    with pytest.raises(RuntimeError):
        inner.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError), inner.no_sync():
        pass
    assert model.clip_grad_norm_(1.0) > 1


def test_what_no_sync_has_left_is_not_clipped(world, engine, wrap):
    """The norm of one rank's own gradients is not that of their mean."""
    model = wrap(nn.Linear(8, 8))
    x = torch.full((2, 8), world.rank + 1.0, device=world.device)
    with model.no_sync():
        engine.backward(model, model(x).sum())
    with pytest.raises(RuntimeError):
        model.clip_grad_norm_(1.0)
    engine.backward(model, model(x).sum())
    assert model.clip_grad_norm_(1.0) > 1


# full parameters in place


@pytest.fixture
def nested(world, wrapper_front, wrap):
    """Return a unit around two, with settings of the wrapper, and its bare model."""

    def nested(**settings):
        bare = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2), nn.Linear(2, 2)).to(world.device)
        chosen = [bare[0], bare[1]]
        policy = wrapper_front.CustomPolicy(lambda module: any(module is each for each in chosen))
        reference = copy.deepcopy(bare)
        return wrap(bare, auto_wrap_policy=policy, **settings), reference

    return nested


def shown(model):
    """Return the parameters that modules show, by clean names."""
    return {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}


def test_full_parameters_are_shown_as_the_flags_say(
    world, wrapper_front, nested, run_subtests, use_orig_params
):
    summon = wrapper_front.FullyShardedDataParallel.summon_full_params

    def claim(flags):
        model, reference = nested(use_orig_params=use_orig_params)
        expected = {name: p.detach() for name, p in reference.named_parameters()}
        before = {name: p.shape for name, p in shown(model).items()}
        with summon(model, **flags):
            found = {name: tensor.clone() for name, tensor in shown(model).items()}
        if flags.get("rank0_only") and world.rank:
            if use_orig_params:  # as shards are shown outside
                assert {name: tensor.shape for name, tensor in found.items()} == before
            else:
                assert not found.keys() & expected.keys()
        elif not flags.get("recurse", True):
            own = {name: expected[name] for name in ("2.weight", "2.bias")}
            assert_named_close({name: found[name] for name in own}, own, EXACT)
            assert "0.weight" not in found or found["0.weight"].shape != (4, 8)
        else:
            assert_named_close(found, expected, EXACT)
        assert {name: p.shape for name, p in shown(model).items()} == before

    flags = [
        {},
        {"recurse": False},
        {"rank0_only": True, "writeback": False},
        {"rank0_only": True, "writeback": False, "offload_to_cpu": True},
    ]
    run_subtests({"flags": flags}, claim)


def test_of_a_module_around_units_nothing_is_shown_without_them(wrapper_front, wrap):
    around = nn.Sequential(wrap(nn.Linear(8, 8)))
    before = {name: p.shape for name, p in around.named_parameters()}
    with wrapper_front.FullyShardedDataParallel.summon_full_params(around, recurse=False):
        assert {name: p.shape for name, p in around.named_parameters()} == before


def test_full_parameters_are_gathered_and_nothing_else_is_sent(engine, wrapper_front, nested):
    require(engine, Capability.TRAFFIC)
    model, _ = nested()
    with CollectivesLog() as log, wrapper_front.FullyShardedDataParallel.summon_full_params(model):
        pass
    traffic = engine.traffic(log)
    assert (len(traffic.gathers + traffic.others), traffic.reductions) == (3, ())


def test_a_conversion_reaches_all_that_a_unit_contains(world, engine, wrapper_front, wrap):
    bare = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(world.device)
    policy = wrapper_front.CustomPolicy(lambda module: module is bare[0])
    model = wrap(bare, auto_wrap_policy=policy, ignored_modules=[bare[2]]).double()
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float64}
    loss = model(torch.ones(3, 4, dtype=torch.float64, device=world.device)).sum()
    engine.backward(model, loss)
    assert {gradient.dtype for gradient in engine.full_gradients(model).values()} == {torch.float64}


def test_gradients_are_shown_on_the_cpu_as_well(world, engine, wrapper_front, wrap):
    bare = nn.Linear(4, 2, bias=False)
    bare.idle = nn.Parameter(torch.ones(3))
    model = wrap(bare.to(world.device), use_orig_params=True)
    engine.backward(model, model(torch.ones(1, 4, device=world.device)).sum())
    model.module.idle.grad = None
    settings = {"offload_to_cpu": True, "with_grads": True}
    with wrapper_front.FullyShardedDataParallel.summon_full_params(model, **settings):
        weight, idle = model.module.weight.grad, model.module.idle.grad
        assert (weight.device.type, weight.tolist(), idle) == ("cpu", [[1.0] * 4] * 2, None)


def test_changes_of_full_parameters_are_kept_unless_declined(engine, wrapper_front, nested, run_subtests):
    def claim(writeback):
        model, _ = nested(use_orig_params=True)
        given = {} if writeback is None else {"writeback": writeback}
        before = engine.full_parameters(model)
        with wrapper_front.FullyShardedDataParallel.summon_full_params(model, **given), torch.no_grad():
            model.module[2].weight.add_(1)
        change = 0 if writeback is False else 1
        found = engine.full_parameters(model)
        assert_named_close({"2.weight": found["2.weight"]}, {"2.weight": before["2.weight"] + change}, EXACT)

    run_subtests({"writeback": [None, True, False]}, claim)


def test_a_piece_without_a_gradient_counts_as_zeros(world, engine, wrap):
    """Where one rank has dropped its part and another has not."""
    model = wrap(nn.Linear(4, 2, bias=False), use_orig_params=True)
    x = torch.full((1, 4), 1.0, device=world.device)
    engine.backward(model, model(x).sum())
    if world.rank:
        for parameter in model.parameters():
            parameter.grad = None
    assert engine.full_gradients(model)["weight"].tolist() == [[1.0] * 4, [0.0] * 4]


# copies


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_copy_trains_as_its_original_and_apart_from_it(world, engine, shard, strategy, use_orig_params):
    """Also with the optimizer of the same call; gradients are left out."""
    require(engine, Capability.WRAPPER)
    make = partial(torch.optim.SGD, lr=0.1)
    x = torch.full((2, 8), world.rank + 1.0, device=world.device)
    model = shard(NestedWrappedModule(), strategy, use_orig_params=use_orig_params)
    optimizer = engine.optimizer(model, make)

    def step(model, optimizer):
        optimizer.zero_grad()
        engine.backward(model, model(x).square().sum())
        optimizer.step()

    step(model, optimizer)
    model.note, model.around = ["kept"], [model]
    for parameter in model.parameters() if use_orig_params else ():
        parameter.data = parameter.data + 1
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    assert (copied.note, copied.note is model.note) == (["kept"], False)
    assert copied.around[0] is copied
    assert all(parameter.grad is None for parameter in copied.parameters())
    assert [n for n, _ in copied.named_parameters()] == [n for n, _ in model.named_parameters()]
    before = engine.full_parameters(model)
    assert_named_close(engine.full_parameters(copied), before, EXACT)
    step(copied, copied_optimizer)
    assert_named_close(engine.full_parameters(model), before, EXACT)
    step(model, optimizer)
    assert_named_close(engine.full_parameters(model), engine.full_parameters(copied), EXACT)
    assert any(not torch.equal(value, before[name]) for name, value in engine.full_parameters(model).items())


def test_a_copy_trains_as_its_original_with_units_without_parameters(world, engine, wrap):
    model = wrap(nn.Sequential(wrap(nn.ReLU()), nn.Linear(8, 8)))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        engine.backward(each, each(torch.ones(2, 8, device=world.device)).sum())
    assert_named_close(engine.full_gradients(copied), engine.full_gradients(model), EXACT)


# where


def test_all_ranks_start_from_the_first_ones_values(world, engine, shard, strategy, use_orig_params):
    """Whatever their layout in memory."""

    def turned(first):
        return torch.arange(first, first + 12.0, device=world.device).view(3, 4).t()

    bare = nn.Linear(3, 4, bias=False).to(world.device)
    bare.weight = nn.Parameter(turned(100.0 * world.rank))
    bare.register_buffer("offset", turned(7.0 + world.rank))
    bare.register_buffer("nothing", torch.empty(0))
    model = shard(bare, strategy, sync_module_states=True, use_orig_params=use_orig_params)
    assert torch.equal(engine.full_parameters(model)["weight"], turned(0.0))
    assert torch.equal(engine.full_state(model)["offset"], turned(7.0))


@pytest.mark.ranks(4)
def test_ranks_are_given_by_a_group_or_a_mesh(world, engine, wrapper_front, wrap, run_subtests):
    """Two of four, which hold halves and not quarters."""

    def claim(way):
        mesh = world.mesh(2, 2, names=("other", "shard"))["shard"]
        given = {"device_mesh": mesh} if way == "mesh" else {"process_group": mesh.get_group()}
        bare = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))
        policy = wrapper_front.ModuleWrapPolicy({nn.Linear})
        model = wrap(bare, auto_wrap_policy=policy, **given)
        engine.backward(model, model(torch.full((1, 4), world.rank + 1.0, device=world.device)).sum())
        assert [local_part(p).numel() for p in model.parameters()] == [4, 2]
        assert all(gradient.any() for gradient in engine.full_gradients(model).values())

    run_subtests({"way": ["mesh", "group"]}, claim)


@pytest.mark.ranks(4)
def test_a_mesh_of_two_axes_replicates_along_the_first(world, engine, wrapper_front, wrap):
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    bare = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))
    model = wrap(
        bare,
        device_mesh=mesh,
        auto_wrap_policy=wrapper_front.ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=wrapper_front.ShardingStrategy.HYBRID_SHARD,
    )
    assert [local_part(p).numel() for p in model.parameters()] == [4, 2]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    engine.backward(model, model(torch.full((1, 4), world.rank + 1.0, device=world.device)).sum())
    assert engine.full_gradients(model)["0.weight"].tolist() == [[5.0] * 4] * 2


def test_without_a_device_arguments_stay_where_they_are(world, wrapper_front):
    class Like(nn.Linear):
        def forward(self, x, like):
            return super().forward(x).expand_as(like), like

    model = wrapper_front.FullyShardedDataParallel(Like(2, 2).to(world.device))
    found, like = model(torch.ones(1, 2, device=world.device), torch.empty(3, 2, device="meta"))
    assert (found.shape, like.is_meta) == ((3, 2), True)


def test_a_device_is_given_by_name_or_as_it_is(world, wrapper_front, run_subtests):
    def claim(kind):
        model = wrapper_front.FullyShardedDataParallel(nn.Linear(4, 4), device_id=kind(world.device))
        assert next(model.parameters()).device.type == world.device.type
        assert model(torch.ones(2, 4, device=world.device)).device.type == world.device.type

    run_subtests({"kind": [str, torch.device]}, claim)


# defaults


def defaults(function):
    """Return the names and values of arguments that may be left out; of enums the names."""
    given = inspect.signature(function).parameters.values()
    return {p.name: getattr(p.default, "name", p.default) for p in given if p.default is not p.empty}


def test_what_is_left_out_is_as_documented_by_torch(world, engine, wrapper_front, wrap):
    wrapper = wrapper_front.FullyShardedDataParallel
    expected = {
        "cpu_offload": None,
        "backward_prefetch": "BACKWARD_PRE",
        "mixed_precision": None,
        "sync_module_states": False,
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "use_orig_params": False,
        "ignored_states": None,
    }
    found = defaults(wrapper)
    assert {name: found[name] for name in expected} == expected
    model = wrap(nn.Linear(8, 8))
    assert len(list(model.parameters())) == 1
    with wrapper.summon_full_params(model):
        assert [p.shape for p in model.parameters()] == [(8, 8), (8,)]
    assert defaults(wrapper.summon_full_params) == {
        "recurse": True,
        "writeback": True,
        "rank0_only": False,
        "offload_to_cpu": False,
        "with_grads": False,
    }
    engine.backward(model, model(torch.ones(2, 8, device=world.device)).sum())
    assert model.clip_grad_norm_(1.0) > 1
    assert defaults(wrapper.clip_grad_norm_) == {"norm_type": 2.0}
    assert not any(value.requires_grad for value in model.state_dict().values())
    assert defaults(wrapper_front.CPUOffload) == {"offload_params": False}
    assert defaults(wrapper.load_state_dict) == {"strict": True, "assign": False}
    assert defaults(wrapper.state_dict) == {"destination": None, "prefix": "", "keep_vars": False}
    loads = {"is_named_optimizer": False, "load_directly": False, "group": None}
    assert defaults(wrapper.optim_state_dict_to_load) == loads
    assert defaults(wrapper.optim_state_dict) == {"optim_state_dict": None, "group": None}
    assert defaults(wrapper.state_dict_type) == {"state_dict_config": None, "optim_state_dict_config": None}
    sizes = {"min_num_params": 10**8, "force_leaf_modules": None, "exclude_wrap_modules": None}
    assert defaults(wrapper_front.size_based_auto_wrap_policy) == sizes
    precision = defaults(wrapper_front.MixedPrecision)
    assert precision.pop("_module_classes_to_ignore") == (nn.modules.batchnorm._BatchNorm,)
    assert precision == {
        "param_dtype": None,
        "reduce_dtype": None,
        "buffer_dtype": None,
        "keep_low_precision_grads": False,
        "cast_forward_inputs": False,
        "cast_root_forward_inputs": True,
    }
    states = engine.state_dicts
    assert defaults(states.FullStateDictConfig) == {"offload_to_cpu": False, "rank0_only": False}
    assert defaults(states.LocalStateDictConfig) == {"offload_to_cpu": False}
    assert defaults(states.FullOptimStateDictConfig) == {"offload_to_cpu": True, "rank0_only": False}
    assert defaults(states.LocalOptimStateDictConfig) == {"offload_to_cpu": False}
    assert defaults(states.ShardedOptimStateDictConfig)["offload_to_cpu"] is True
    if offers(engine, Capability.COMPOSABLE):
        dtypes = dict.fromkeys(["param_dtype", "reduce_dtype", "output_dtype"])
        assert defaults(engine.composable.MixedPrecisionPolicy) == dtypes | {"cast_forward_inputs": True}
        assert defaults(engine.composable.CPUOffloadPolicy) == {"pin_memory": True}
