"""Wrapping a module: its first values, what is ignored, and what is refused before anything changes."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.assertions import assert_named_close, assert_same_across_ranks
from lockstep.engine import (
    CustomPolicy,
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


# first values


def test_sync_module_states_broadcasts_rank_zeros_values(world):
    torch.manual_seed(world.rank)
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    bare[1].running_mean.fill_(world.rank)
    model = FullyShardedDataParallel(bare, sync_module_states=True, auto_wrap_policy=always_wrap_policy)
    assert_same_across_ranks(model.state_dict())
    assert not model.state_dict()["1.running_mean"].any()


# ignored


def test_ignored_modules_are_not_sharded_cast_or_synchronised(world, batch):
    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(world.device)
    bare[1].running_mean.fill_(world.rank)
    precision = MixedPrecision(buffer_dtype=F16)
    model = FullyShardedDataParallel(
        bare, mixed_precision=precision, ignored_modules=[bare[1]], sync_module_states=True
    )
    assert bare[1].running_mean[0] == world.rank
    model(batch).sum().backward()
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


@pytest.mark.parametrize("by_policy", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_units_inside_ignored_modules_stay_units(world, use_orig_params, by_policy):
    """torch refuses every unit below a module that it wraps by a policy."""
    reference = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)).to(
        world.device
    )
    bare = copy.deepcopy(reference)
    bare[0][0] = FullyShardedDataParallel(bare[0][0], use_orig_params=use_orig_params)
    ignored = list(bare[0][1].parameters())
    policy = ModuleWrapPolicy({nn.Linear}) if by_policy else None
    model = FullyShardedDataParallel(
        bare, ignored_modules=[bare[0]], use_orig_params=use_orig_params, auto_wrap_policy=policy
    )
    of_root = {"1": ("1.weight", "1.bias")} if by_policy else {"": ("1.weight", "1.bias")}
    assert {g.name: g.parameters for g in groups(model)} == {**of_root, "0.0": ("0.0.weight", "0.0.bias")}
    assert list(bare[0][1].parameters()) == ignored
    assert [p.numel() for p in ignored] == [4, 2]
    x = torch.ones(1, 2, device=world.device)  # the same on all ranks: ignored gradients are this rank's own
    for module in (model, reference):
        module(x).square().sum().backward()
    with summon(model, with_grads=True, writeback=False):
        found = {name: p.grad for name, p in model.named_parameters()}
    assert_named_close(found, {name: p.grad for name, p in reference.named_parameters()})


def test_ranks_that_ignore_other_parameters_are_refused_by_name(world):
    """torch averages the gradients of one with those of the other, without a word."""
    bare = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"}).to(world.device)
    bare.forward = lambda x: bare["b"](bare["a"](x))
    mine, other = "ab" if world.rank == 0 else "ba"
    claim = rf"'{other}.weight' .* here, '{mine}.weight' .* This rank ignores '{mine}.weight', .*, that one '"
    with pytest.raises(ValueError, match=claim):
        FullyShardedDataParallel(bare, ignored_modules=[bare[mine]])


def test_a_rank_may_ignore_what_other_ranks_do_not_have(world):
    bare = nn.Sequential(nn.Linear(2, 2), *(nn.Linear(2, 2) for _ in range(world.rank))).to(world.device)
    model = FullyShardedDataParallel(bare, ignored_modules=list(bare)[1:], use_orig_params=True)
    model(torch.ones(1, 2, device=world.device)).sum().backward()
    assert [group.parameters for group in groups(model)] == [("0.weight", "0.bias")]
    assert bool(bare[0].weight.grad.numel())


def test_a_device_may_be_given_by_its_name(world):
    bare = nn.Linear(2, 2)
    model = FullyShardedDataParallel(bare, device_id=str(world.device))
    assert model(torch.ones(1, 2)).device.type == world.device.type


def test_a_batch_norm_says_that_it_computes_in_another_dtype(world):
    model = FullyShardedDataParallel(nn.BatchNorm1d(2), mixed_precision=MixedPrecision(param_dtype=F16))
    with pytest.warns(UserWarning, match=r"BatchNorm1d: on CPU it computes with torch.float32 copies of its"):
        model(torch.ones(3, 2)).sum().backward()
    copied = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="BatchNorm1d: on CPU"):
        assert torch.equal(copied(torch.ones(3, 2)), torch.zeros(3, 2, dtype=F16))
    assert [p.dtype for p in (*model.parameters(), *copied.parameters())] == [F32, F32]


def test_ignoring_the_wrapped_module_warns_and_makes_no_group(world):
    bare = nn.Linear(8, 8, device=world.device)
    with pytest.warns(UserWarning, match=r"\(Linear\): the module is itself in ignored_modules") as caught:
        model = FullyShardedDataParallel(bare, ignored_modules=[bare])
    assert caught[0].filename == __file__
    assert (groups(model), bare.weight.shape) == ((), (8, 8))


# refused


def mixed_dtypes():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())


def partly_frozen():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))


def quantized():
    bare = nn.Linear(2, 2)
    bare.scale = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    return bare


def tied_across_units():
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bare[1].weight = bare[0].weight
    return nn.Sequential(FullyShardedDataParallel(bare[0]), bare[1])


def shared_with_a_unit():
    shared = nn.Linear(2, 2)
    return nn.Sequential(FullyShardedDataParallel(shared), shared)


def tensor_parallel():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(distribute_tensor(module.weight, DeviceMesh("cpu", [0, 1]), [Shard(0)]))
    return module


def linear():
    return nn.Linear(2, 2)


def with_a_unit():
    return nn.Sequential(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))), nn.Linear(2, 2))


REFUSED = {
    "dtypes": (
        mixed_dtypes,
        {},
        r"agree in dtype, but '0.weight' has torch.float32, '1.weight' has torch.float16",
    ),
    "frozen": (partly_frozen, {}, r"'0.weight' has True, '1.weight' has False; pass use_orig_params=True"),
    "tied": (
        tied_across_units,
        {},
        r"'1.weight' is tied to weight of .*Linear.*Wrap one module that contains both",
    ),
    "container": (lambda: nn.ModuleList([nn.Linear(2, 2)]), {}, "cannot wrap ModuleList: it has no forward"),
    "lazy": (lambda: nn.LazyLinear(2), {}, "'weight' has no shape yet; run a forward before wrapping"),
    "integers": (quantized, {}, r"'scale' has dtype torch.int8; .*Pass it in ignored_states"),
    "tensor_parallel": (
        tensor_parallel,
        {},
        "'weight' is a DTensor, which .* not shard any further: .* by fully_shard, over another axis",
    ),
    "unit": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2)),
        {},
        r"\(Linear\) is a unit already; use it as it is",
    ),
    "inside_a_unit": (
        lambda: FullyShardedDataParallel(nn.Linear(2, 2)).module,
        {},
        r"Linear is inside FullyShardedDataParallel\(Linear\) already; wrap a module once",
    ),
    "shared_with_a_unit": (
        shared_with_a_unit,
        {},
        r"module '1' \(Linear\) is inside FullyShardedDataParallel\(Linear\) already",
    ),
    "pair": (lambda: nn.Linear(2, 2), {"process_group": (1, 2)}, "FULL_SHARD needs one group"),
    "not_a_group": (lambda: nn.Linear(2, 2), {"process_group": 1}, "expected a ProcessGroup, got int"),
    "not_a_module": (lambda: torch.zeros(2), {}, "wraps an nn.Module, got Tensor"),
}


ARGUMENTS = {
    "sharding_strategy": (
        "FULL_SHARD",
        "expected None or a ShardingStrategy of lockstep.engine",
    ),
    "cpu_offload": (True, "expected None or a CPUOffload of lockstep.engine, got True, a bool"),
    "mixed_precision": (
        theirs.MixedPrecision(),
        "expected None or a MixedPrecision of lockstep.engine, got .* of torch.distributed.fsdp.api",
    ),
    "backward_prefetch": (True, "expected None or a BackwardPrefetch of lockstep.engine, got True"),
    "auto_wrap_policy": ({nn.Linear}, r"expected a wrap policy such as .*, or a function .* got \{<class"),
    "device_id": (0.5, "expected an int, a torch.device or its name, got 0.5"),
    "ignored_modules": (3, "expected a list of modules, got one int; put it into a list"),
    "ignored_states": (
        [nn.Linear(2, 2), 3],
        "expected a list of modules or parameters, but number 1 is a int",
    ),
    "param_init_fn": (3, "expected a function that takes a module, got 3"),
    "full_precision_in_eval": (1, "expected True, False or None, got 1"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_refused_by_name(name):
    value, message = ARGUMENTS[name]
    with pytest.raises(TypeError, match=f"{name}: {message}"):
        FullyShardedDataParallel(linear(), **{name: value})


CONTRADICTIONS = {
    "policy_class": ({"auto_wrap_policy": ModuleWrapPolicy}, "expected a wrap policy such as"),
    "one_module": ({"ignored_modules": nn.Linear(2, 2)}, "got one Linear; put it into a list"),
    "parameter_as_module": (
        {"ignored_modules": [nn.Parameter(torch.zeros(2))]},
        "ignored_modules: expected a list of modules, but number 0 is a Parameter",
    ),
    "both_ignored": (
        {"ignored_modules": [], "ignored_states": []},
        "both given; put all .* into ignored_states",
    ),
    "ignored_unit": (
        {"ignored_modules": "unit"},
        r"they contain FullyShardedDataParallel\(Linear\)",
    ),
    "policy_inside": (
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
        r"chooses a Linear in '0\.0', which is a FullyShardedDataParallel already; wrap a module by hand or",
    ),
    "function_inside": ({"auto_wrap_policy": always_wrap_policy}, r"chooses a Linear in '0\.0'"),
    "policy_answer": (
        {"auto_wrap_policy": CustomPolicy(lambda _: None)},
        "must return a bool or a dict of arguments, but for Linear it returned None",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradicting_arguments_are_refused(case):
    arguments, message = CONTRADICTIONS[case]
    bare = with_a_unit()
    if case == "ignored_unit":
        arguments = {"ignored_modules": [bare[0][0]]}
    with pytest.raises((ValueError, TypeError), match=message):
        FullyShardedDataParallel(bare, **arguments)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (torch.device("meta"), "device_id=meta: this host has .* pass torch.device"),
        (torch.device("xla", 0), "device_id=xla:0: this host has"),
        (99, "device_id=99: this host has"),
        ("xla:0", "device_id=xla:0: this host has"),
        ("cqu", "device_id='cqu' is no name of a device: Expected one of cpu"),
    ],
)
def test_a_device_the_host_lacks_is_refused(device, message):
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallel(linear(), device_id=device)


def test_a_device_the_backend_does_not_serve_is_refused():
    group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(ValueError, match="device_id=cpu: the process group communicates on cuda:gloo only"):
        FullyShardedDataParallel(linear(), process_group=group, device_id=torch.device("cpu"))
    dist.barrier()  # a rank may not end the group while the other still connects to it
    dist.destroy_process_group(group)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sharded_is_refused_by_name_with_a_remedy(case):
    make, arguments, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        FullyShardedDataParallel(make(), **arguments)


def test_module_wrap_policy_refuses_a_class_outside_a_set():
    with pytest.raises(TypeError, match=r"expected classes, got Linear alone; pass \{Linear\}"):
        ModuleWrapPolicy(nn.Linear)


def test_another_shape_on_one_rank_is_refused_at_once(world):
    module = nn.Linear(3, 4 + world.rank, device=world.device)
    claim = rf"'weight' \[{4 + world.rank}, 3\] torch.float32 here, 'weight' \[{5 - world.rank}, 3\]"
    with pytest.raises(ValueError, match=claim):
        FullyShardedDataParallel(module)


def test_a_module_wrapped_on_one_rank_alone_is_refused_at_once(world):
    module = nn.Sequential(nn.Linear(2, 2, device=world.device))
    with pytest.raises(ValueError, match=r"ranks wrap different things: .*\((Linear|Sequential)\) here"):
        FullyShardedDataParallel(module[0] if world.rank == 0 else module)


def test_a_refused_argument_leaves_the_module_unchanged():
    bare = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="sharding_strategy"):
        FullyShardedDataParallel(bare, auto_wrap_policy=always_wrap_policy, sharding_strategy="FULL_SHARD")
    assert [type(module) for module in bare.modules()] == [nn.Sequential, nn.Linear]


def test_a_module_on_another_device_is_refused_by_parameter_name():
    bare = nn.Linear(2, 2, bias=False)
    with FakeTensorMode():
        bare.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
    with pytest.raises(ValueError, match="'weight' is on cuda:0, but device_id is cpu; move the module"):
        FullyShardedDataParallel(bare, device_id=torch.device("cpu"))


def test_ranks_that_differ_are_refused_before_one_moves_its_module(world):
    """An error of one rank alone, as it moved its module, left the others waiting."""
    bare = nn.Linear(2, 2 + world.rank, bias=False)
    if world.rank == 0:
        with FakeTensorMode():
            bare.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
    with pytest.raises(ValueError, match="ranks wrap different things"):
        FullyShardedDataParallel(bare, device_id=torch.device("cpu"))


def test_a_unit_keeps_nothing_that_only_made_it():
    class Init:
        """Stands for a function that has a whole checkpoint in its closure."""

        def __call__(self, module):
            module.to_empty(device="cpu").reset_parameters()

    init = Init()
    alive = weakref.ref(init)
    model = FullyShardedDataParallel(nn.Linear(2, 2, device="meta"), param_init_fn=init)
    twin = copy.deepcopy(model)
    del init
    gc.collect()
    assert alive() is None
    assert not twin.module.weight.is_meta
