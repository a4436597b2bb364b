"""Settings of modules that are sharded in place: defaults, how far they reach, and what they leave alone."""

import copy
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close, assert_sharded_parity
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import KnownGradient, NestedWrappedModule

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def defaults(function):
    """Return the names and values of arguments that may be left out."""
    given = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in given if p.default is not p.empty}


def test_what_is_left_out_is_as_documented_by_torch(world, engine, front):
    policy = engine.composable.MixedPrecisionPolicy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
    assert policy.cast_forward_inputs
    found = defaults(getattr(engine.composable, front.name))
    expected = {"mesh": None, "mp_policy": policy, "ignored_params": None}
    if front.shards:
        expected |= {"reshard_after_forward": None, "shard_placement_fn": None}
    assert {name: found.get(name, "nothing") for name in expected} == expected
    model = front.shard(NestedWrappedModule())
    recursive = {
        "set_requires_gradient_sync": True,
        "set_requires_all_reduce": True,
        "set_reshard_after_backward": True,
    }
    if front.shards:
        recursive["set_reshard_after_forward"] = True
    for name, value in recursive.items():
        setter = getattr(model, name)
        setter(value)
        assert defaults(setter) == {"recurse": True}
    assert model.unshard() is None
    assert defaults(model.unshard) == {"async_op": False}
    model.reshard()


def test_a_setting_reaches_the_groups_below_unless_declined(front, step, run_subtests):
    def claim(recurse):
        model = front.shard(NestedWrappedModule())
        model.module[1].set_requires_gradient_sync(False, recurse=recurse)
        step(model)
        without = [name for name, p in model.named_parameters() if p.grad is None]
        below = ["module.1.0.weight", "module.1.0.bias"] * recurse
        assert without == [*below, "module.1.1.weight", "module.1.1.bias"]

    run_subtests({"recurse": [True, False]}, claim)


def test_modules_without_parameters_take_settings_and_train(world, front):
    """They are units that have no group."""
    reference = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Linear(6, 2))
    reference.to(world.device)
    model = front.shard(copy.deepcopy(reference), ("0", "1", "1.1"))
    empty = model[1]
    empty.set_requires_gradient_sync(True)
    empty.set_requires_all_reduce(True)
    empty.set_reshard_after_backward(True)
    empty.set_gradient_divide_factor(2.0)
    empty.unshard(async_op=True).wait()
    empty.unshard()
    empty.reshard()
    x = torch.arange(12.0, device=world.device).view(2, 6)
    for module in (reference, model):
        module(x).square().sum().backward()
    assert_sharded_parity(model, reference)


def test_modules_without_parameters_may_be_copied(world, front):
    reference = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).to(world.device)
    model = copy.deepcopy(front.shard(copy.deepcopy(reference), ("0", "1")))
    x = torch.arange(12.0, device=world.device).view(2, 6)
    for module in (reference, model):
        module(x).square().sum().backward()
    assert_sharded_parity(model, reference)


def test_a_copy_of_what_was_gathered_trains_apart(world, front, step):
    """And gradients are left out."""
    model = front.shard(NestedWrappedModule())
    step(model)
    for name in ("", *NestedWrappedModule.units):
        model.get_submodule(name).unshard()
    copied = copy.deepcopy(model)
    assert all(isinstance(p, DTensor) for p in (*model.parameters(), *copied.parameters()))
    assert {p.grad for p in copied.parameters()} == {None}
    expected = front.full_gradients(model)
    step(copied)
    assert_named_close(front.full_gradients(copied), expected, EXACT)
    step(copied)
    assert_named_close(front.full_gradients(model), expected, EXACT)


def test_a_copy_of_a_list_of_nested_modules_trains(world, front):
    reference = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(world.device)
    model = copy.deepcopy(reference)
    front([model, model[2]])
    model.set_requires_gradient_sync(False)
    copied = copy.deepcopy(model)
    x = torch.arange(12.0, device=world.device).view(2, 6) / 12
    for sync in (False, True):
        for module in (reference, copied):
            module(x).square().sum().backward()
        if not sync:  # as its original
            assert {p.grad for p in copied.parameters()} == {None}
            copied.set_requires_gradient_sync(True)
    assert_sharded_parity(copied, reference)


def test_a_slice_of_a_sharded_model_is_a_plain_module(world, engine, front):
    bare = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).to(world.device)
    model = front.shard(bare, ("0",))
    part = model[1:]
    assert type(part) is nn.Sequential
    assert part[1] is model[2]
    assert isinstance(model[0], engine.composable.FSDPModule)


def test_methods_of_plain_modules_stay_as_they_are(engine):
    plain = nn.Linear(2, 2)
    engine.composable.register_fsdp_forward_method(plain, "forward")
    assert "forward" not in vars(plain)
    engine.composable.register_fsdp_forward_method(plain, "nothing")


def test_models_that_share_streams_train_as_each_alone(world, engine, front):
    x = torch.ones(2, 6, device=world.device)
    references = [nn.Linear(6, 6).to(world.device) for _ in range(2)]
    models = [front(copy.deepcopy(reference)) for reference in references]
    engine.composable.share_comm_ctx(models)
    for stages in (references, models):
        stages[1](stages[0](x)).square().sum().backward()
    for model, reference in zip(models, references, strict=True):
        assert_sharded_parity(model, reference)


class Event:
    """An event that counts how often it is waited for."""

    waits = 0

    def wait(self, *_):
        self.waits += 1


def test_an_event_of_the_optimizer_is_waited_for_once(world, front):
    model, event = front.shard(KnownGradient(4)), Event()
    model.set_post_optim_event(event)
    for _ in range(2):
        model(torch.tensor(1.0, device=world.device)).backward()
    assert event.waits == 1


@pytest.mark.parametrize("dtype", [F64, BF16], ids=["fp64", "bf16"])
def test_gradients_are_converted_with_their_parameters(world, front, dtype):
    model = front.shard(KnownGradient(4, 2))
    with torch.no_grad():
        model.weight.fill_(1.0)
    model(torch.tensor(2.0 + world.rank, device=world.device)).backward()
    model.to(dtype)
    assert (model.weight.dtype, model.weight.grad.dtype) == (dtype, dtype)
    assert (model.weight.to_local().dtype, model.weight.grad.to_local().dtype) == (dtype, dtype)
    assert model.weight.grad.full_tensor().tolist() == [[2.5] * 2] * 4
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert model.weight.full_tensor().tolist() == [[-1.5] * 2] * 4
    assert model(torch.ones((), dtype=dtype, device=world.device)).dtype == dtype


def test_a_conversion_reaches_all_that_a_module_contains(world, front):
    bare = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(world.device)
    model = front.shard(bare, ("0",), ignored_params=set(bare[2].parameters())).double()
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {F64}
    model(torch.ones(3, 4, dtype=F64, device=world.device)).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {F64}


class Three(nn.Module):
    """Three parameters in one group, all used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (KnownGradient(3, 2) for _ in range(3))

    def forward(self, gradient):
        return self.first(gradient) + self.second(gradient) + self.third(gradient)


def values(model):
    """Return the one value of each gradient, None without one."""
    return [p.grad if p.grad is None else p.grad.full_tensor().unique().item() for p in model.parameters()]


def test_a_parameter_frozen_between_steps_stops_to_travel(world, front, collectives):
    model = front.shard(Three())
    gradient = torch.tensor(1.0 + 2 * world.rank, device=world.device)
    model(gradient).backward()
    assert values(model) == [2.0] * 3
    model.second.requires_grad_(False)
    model.zero_grad()
    model(gradient).backward()
    assert values(model) == [2.0, None, 2.0]
    first, second = (entry.nbytes for entry in front.engine.traffic(collectives).reductions)
    assert second * 3 == first * 2, collectives


@pytest.mark.parametrize("late", [False, True], ids=["frozen", "trained"])
def test_trained_parameters_may_change_between_microbatches(world, front, late):
    """A gradient that was accumulated is reduced though its parameter is frozen by then."""
    model = front.shard(Three())
    gradient = torch.tensor(1.0 + 2 * world.rank, device=world.device)
    model.second.requires_grad_(not late)
    model.set_requires_gradient_sync(False)
    model(gradient).backward()
    model.second.requires_grad_(late)
    model.set_requires_gradient_sync(True)
    model(gradient).backward()
    assert values(model) == [4.0, 2.0, 4.0]


class Empty(nn.Module):
    """Parameters without elements, which a layer may have before it grows."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3, 0)), nn.Parameter(torch.empty(0))

    def forward(self, x):
        return x + self.weight.sum() + self.bias.sum()


def check_empty(world, front, mesh=None, across=True):
    bare = nn.Sequential(Empty(), KnownGradient(4)).to(world.device)
    model = front.shard(bare, ("0",), mesh=mesh)
    for last in (False, True):
        model.set_requires_all_reduce(last or across)
        model(torch.tensor(1.0 + 2 * world.rank, device=world.device)).backward()
    mean = 2.0 * world.size
    assert model[1].weight.grad.full_tensor().tolist() == [mean] * 4
    assert [tuple(p.shape) for p in model[0].parameters()] == [(3, 0), (0,)]
    for p in model[0].parameters():
        assert p.grad is None or p.grad.shape == p.shape


def test_a_group_without_elements_trains(world, front):
    check_empty(world, front)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("across", [True, False], ids=["", "across_later"])
def test_a_replicated_group_without_elements_trains(world, fully_shard, across):
    check_empty(world, fully_shard, world.mesh(2, 2, names=("replicate", "shard")), across)


class Sides(nn.Module):
    """Three parameters, of which a rank uses those that it is given the names of; gradients are as given."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(3))

    def forward(self, gradient, *names):
        return sum((getattr(self, name) * gradient).sum() for name in names)


ZEROS = {"negative": (-0.0, F32), "low_precision": (-0.0, F16), "rounded": (-(2.0**-24), F16)}
"""Gradients of one rank, the last of which has a mean that fp16 rounds to -0.0, and a parameter's dtype."""


def check_used(world, front, kind, mesh=None):
    value, dtype = ZEROS[kind]
    settings = front.precision(reduce_dtype=F32) | ({} if mesh is None else {"mesh": mesh})
    model = front(Sides(dtype).to(world.device), **settings)
    names = ("third",) if world.rank else ("first", "third")
    model(torch.full((4,), value, dtype=dtype, device=world.device), *names).backward()
    assert model.second.grad is None
    assert model.first.grad is not None
    assert not model.first.grad.full_tensor().any()


def test_a_gradient_of_zeros_is_one(world, front, run_subtests):
    """A parameter that a rank has used has a gradient, also where that is -0.0, or rounded to it."""
    run_subtests({"kind": list(ZEROS)}, lambda kind: check_used(world, front, kind))


@pytest.mark.parametrize("dtype", [F32, F16], ids=["fp32", "fp16"])
def test_a_gradient_of_zeros_is_one_where_ranks_use_all(world, front, dtype):
    model = front(Sides(dtype).to(world.device), **front.precision(reduce_dtype=F32))
    value = -0.0 if dtype == F32 or world.rank else -(2.0**-24)
    gradient = torch.full((4,), value, dtype=dtype, device=world.device)
    model(gradient, "first", "second", "third").backward()
    for p in model.parameters():
        assert not p.grad.full_tensor().any()


@pytest.mark.ranks(4)
def test_a_gradient_of_zeros_is_one_among_replicas(world, fully_shard, run_subtests):
    def claim(kind):
        check_used(world, fully_shard, kind, world.mesh(2, 2, names=("replicate", "shard")))

    run_subtests({"kind": list(ZEROS)}, claim)


class Alternating(nn.Module):
    """Two layers in turn, twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(2):
            x = self.second(self.first(x))
        return x


@pytest.mark.inside
def test_modules_in_one_list_are_gathered_once_for_each_round(world, fully_shard, collectives):
    reference = Alternating().to(world.device)
    model = copy.deepcopy(reference)
    fully_shard([model.first, model.second])
    fully_shard(model)
    x = torch.arange(12.0, device=world.device).view(2, 6) / 12
    for module in (reference, model):
        module(x).square().sum().backward()
    assert_sharded_parity(model, reference)
    gathers = fully_shard.engine.traffic(collectives).gathers
    assert sum(not entry.in_backward for entry in gathers) == 2, collectives


class InOrder(Alternating):
    """The two layers in the order that is given, recomputed in backward."""

    def forward(self, x, *names):
        def compute(x):
            for name in names:
                x = self.get_submodule(name)(x)
            return x

        return checkpoint(compute, x, use_reentrant=False)


@pytest.mark.inside
def test_modules_in_one_list_are_gathered_once_after_what_was_skipped_or_recomputed(
    world, fully_shard, collectives
):
    model = InOrder().to(world.device)
    fully_shard([model.first, model.second])
    fully_shard(model)
    x = torch.ones(2, 6, device=world.device)
    for names in (("first", "second"), ("first",), ("second", "first")):
        before = len(collectives)
        model(x, *names).sum().backward()
        gathers = fully_shard.engine.traffic(list(collectives)[before:]).gathers
        assert sum(not entry.in_backward for entry in gathers) == 1, collectives


def test_a_forward_may_skip_some_modules_of_a_list(world, fully_shard):
    """Their group is resharded all the same, when the forward ends."""

    class First(Alternating):
        def forward(self, x):
            return self.first(x)

    reference = First().to(world.device)
    model = copy.deepcopy(reference)
    fully_shard([model.first, model.second])
    fully_shard(model)
    before = list(model.parameters())
    x = torch.arange(12.0, device=world.device).view(2, 6) / 12
    loss = model(x).square().sum()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    loss.backward()
    reference(x).square().sum().backward()
    assert_sharded_parity(model, reference)


# The engine makes a process group of the few ranks, which lives as long as the process.
@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.ranks(4)
def test_few_ranks_may_hold_parameters_inside_of_a_transform(world, fully_shard):
    """From a forward there to its backward."""
    reference = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(world.device)
    model = fully_shard.shard(copy.deepcopy(reference), ("0",), reshard_after_forward=2)
    x, direction = (torch.full((2, 8), value, device=world.device) for value in (0.5, 1.0))
    for module in (reference, model):
        output, derivative = torch.func.jvp(module, (x,), (direction,))
        (output.sum() + derivative.sum() + torch.vmap(module)(x).square().sum()).backward()
    assert_sharded_parity(model, reference)
    world.barrier()


@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
@pytest.mark.ranks(4)
@pytest.mark.inside
def test_few_ranks_hold_parameters_until_the_next_step(world, fully_shard):
    """Half of them each of two ranks; a forward without a backward leaves nothing that is used later."""
    reference = NestedWrappedModule().to(world.device)
    model = fully_shard.shard(copy.deepcopy(reference), reshard_after_forward=2)
    x = torch.ones(2, 8, device=world.device)
    model(x)
    for group in fully_shard.engine.groups(model):
        assert group.gathered_bytes == group.full_numel * F32.itemsize // 2
    with torch.no_grad():
        for p in (*model.parameters(), *reference.parameters()):
            p.add_(1.0)
    for module in (reference, model):
        module(x).sum().backward()
    assert_sharded_parity(model, reference)
    assert {group.gathered_bytes for group in fully_shard.engine.groups(model)} == {0}
    world.barrier()


@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
@pytest.mark.ranks(4)
@pytest.mark.inside
def test_all_ranks_may_hold_what_few_ranks_held(world, fully_shard, collectives, step):
    model = fully_shard.shard(NestedWrappedModule(), reshard_after_forward=2)
    step(model)
    model.set_reshard_after_forward(True)
    before = len(fully_shard.engine.traffic(collectives).gathers)
    step(model, 1)
    gathers = fully_shard.engine.traffic(collectives).gathers[before:]
    assert {entry.group_size for entry in gathers} == {4}, collectives
    world.barrier()


def test_some_parameters_may_be_assigned(world, front):
    """A state dict that has not all of them, loaded with `assign=True`."""
    model = front.shard(NestedWrappedModule())
    expected = front.full_parameters(model)
    name = "module.0.weight"
    state = {name: (model.state_dict()[name].detach() + 1)}
    found = model.load_state_dict(state, strict=False, assign=True)
    assert name not in found.missing_keys
    expected[name] = expected[name] + 1
    assert_named_close(front.full_parameters(model), expected, EXACT)
    reference = NestedWrappedModule().to(world.device)
    reference.load_state_dict(expected)
    x = torch.ones(2, 8, device=world.device)
    torch.testing.assert_close(model(x), reference(x))


def test_a_model_without_values_may_be_given_all_of_them(world, front):
    """By `load_state_dict` with `assign=True`, after it was sharded on the meta device."""

    def make():
        return nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 4))

    reference = make().to(world.device)
    state = front.shard(copy.deepcopy(reference), ("0",)).state_dict()
    with torch.device("meta"):
        empty = make()
    front(empty[0])
    model = front(empty)
    model.load_state_dict({name: value.detach().clone() for name, value in state.items()}, assign=True)
    x = torch.arange(16.0, device=world.device).view(2, 8) / 16
    for module in (reference, model):
        module(x).square().sum().backward()
    assert_sharded_parity(model, reference)
    assert_named_close(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_a_module_without_parameters_that_is_deleted_gives_its_memory_back(world, front):
    model = front.shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)))
    x = torch.ones(3, 2, device=world.device)
    model(x).sum().backward()
    statistics = weakref.ref(model[1].running_mean)
    del model[1]
    gc.collect()
    assert statistics() is None
    model(x).sum().backward()


def test_parameters_keep_their_order_beside_one_that_is_ignored(world, front, step):
    bare = nn.Linear(8, 8).to(world.device)
    model = front.shard(bare, ignored_params={bare.bias})
    step(model)
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
