"""States, dtypes and bytes of groups at each moment of a step."""

import dataclasses
import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.assertions import local_part
from lockstep.conformance import Capability, Precision, offers, require
from lockstep.conformance.models import NestedWrappedModule

pytestmark = pytest.mark.ranks(2)

BF16, F32 = torch.bfloat16, torch.float32
ROOT, MIDDLE, INNER, LAST = "", "module.1", "module.1.0", "module.2"
NUMEL = {ROOT: 76, MIDDLE: 272, INNER: 80, LAST: 68}
AFTER_FORWARD = {"FULL_SHARD": "SHARDED", "SHARD_GRAD_OP": "RETAINED", "NO_SHARD": "RETAINED"}


class Watched(NestedWrappedModule):
    """The nested model; it records what `look` returns as each layer begins, in forward and in backward."""

    def __init__(self):
        super().__init__()
        self.look, self.seen = None, {}
        for name in ("module.0", "module.1.0", "module.1.1", "module.2", "module.3"):
            layer = self.get_submodule(name)
            layer.register_forward_pre_hook(lambda *_, name=name: self.record(f"forward {name}"))
            layer.register_full_backward_pre_hook(lambda *_, name=name: self.record(f"backward {name}"))

    def record(self, moment):
        self.seen[moment] = self.look()


@pytest.fixture
def watch(engine, shard):
    """Return the sharded model and what it will record: the states of its groups by moment."""

    def watch(strategy, **spec):
        bare = Watched()
        model = shard(bare, strategy, **spec)
        bare.look = lambda: states(engine, model)
        return model, bare.seen

    return watch


def states(engine, model):
    return {group.name: group.state.name for group in engine.groups(model)}


@pytest.fixture
def batch(batch):
    """Make the same inputs, with gradients: torch warns of backward hooks where no input needs one."""
    return lambda: batch().requires_grad_()


def all_in(state):
    return dict.fromkeys(NUMEL, state)


def gathered(rest, *names):
    """Return the states when groups of these names are gathered; `rest` has those of the others."""
    return rest | dict.fromkeys(names, "UNSHARDED")


@pytest.mark.inside
def test_forward_gathers_a_group_for_its_own_modules_only(engine, batch, watch, strategy, use_orig_params):
    model, seen = watch(strategy, use_orig_params=use_orig_params, backward_prefetch=None)
    assert states(engine, model) == all_in("SHARDED")
    model(batch())
    after = AFTER_FORWARD[strategy]
    start, inner_done = all_in("SHARDED"), {**all_in("SHARDED"), INNER: after}
    unit_done = {**inner_done, MIDDLE: after}
    assert seen == {
        "forward module.0": gathered(start, ROOT),
        "forward module.1.0": gathered(start, ROOT, MIDDLE, INNER),
        "forward module.1.1": gathered(inner_done, ROOT, MIDDLE),
        "forward module.2": gathered(unit_done, ROOT, LAST),
        "forward module.3": gathered({**unit_done, LAST: after}, ROOT),
    }
    assert states(engine, model) == all_in(after)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.inside
def test_backward_frees_a_group_when_it_has_its_gradients(
    engine, batch, watch, strategy, use_orig_params, sync
):
    require(engine, Capability.EARLY_REDUCTION)
    model, seen = watch(strategy, use_orig_params=use_orig_params, backward_prefetch=None)
    loss = model(batch()).sum()
    seen.clear()
    if sync:
        engine.backward(model, loss)
    else:
        with engine.no_sync(model):
            engine.backward(model, loss)
    before = all_in(AFTER_FORWARD[strategy])
    assert seen == {
        "backward module.3": gathered(before, ROOT),
        "backward module.2": gathered(before, ROOT, LAST),
        "backward module.1.1": gathered({**before, LAST: "SHARDED"}, ROOT, MIDDLE),
        "backward module.1.0": gathered({**before, LAST: "SHARDED", MIDDLE: "SHARDED"}, ROOT, INNER),
        "backward module.0": gathered({**before, **all_in("SHARDED")}, ROOT),
    }
    assert states(engine, model) == all_in("SHARDED")


class Chain(nn.Module):
    """Two units; it looks on as backward goes from the second to the first, to which it may be cut."""

    units = ("first", "last")

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 2)
        self.look = self.seen = None
        self.is_cut = False

    def forward(self, x):
        x = self.first(x).tanh()
        if x.requires_grad:
            x.register_hook(self.record)
        return self.last((x.detach() if self.is_cut else x) * 2)

    def record(self, _):
        self.seen = self.look()


@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias")], ids=["", "wholly"])
@pytest.mark.inside
def test_backward_frees_a_frozen_group_when_it_has_its_gradients(engine, batch, shard, frozen):
    """Also after a backward in which none came out at the inputs of the group."""
    require(engine, Capability.EARLY_REDUCTION)
    bare = Chain()
    for name in frozen:
        bare.last.get_parameter(name).requires_grad_(False)
    model = shard(bare, use_orig_params=True, backward_prefetch=None)
    bare.look = lambda: states(engine, model)["last"]
    for bare.is_cut in (False, True, False) if frozen == ("weight",) else (False, False):
        bare.seen = None
        engine.backward(model, model(batch()).sum())
        assert bare.seen == (None if bare.is_cut else "SHARDED")
        assert set(states(engine, model).values()) == {"SHARDED"}


@pytest.mark.parametrize(
    ("param_dtype", "itemsize"), [(None, 0), (F32, 0), (BF16, 2)], ids=["none", "original", "bf16"]
)
@pytest.mark.inside
def test_a_cast_shard_exists_only_while_its_gather_is_under_way(
    world, engine, shard, batch, offload, param_dtype, itemsize
):
    bare = Watched().to(world.device)
    spec = {"precision": Precision(param_dtype), "offload": offload}
    model = shard(bare, **spec)

    def cast():
        return {(g.state.name, g.low_precision_bytes / g.local_numel) for g in engine.groups(model)}

    bare.look = cast
    engine.backward(model, model(batch()).float().sum())
    under_way = {("SHARDED", 0), ("PREFETCHED", itemsize), ("UNSHARDED", 0)}
    assert bare.seen["backward module.2"] == bare.seen["backward module.1.1"] == under_way
    for moment in ("backward module.0", "forward module.2"):
        assert bare.seen[moment] == {("SHARDED", 0), ("UNSHARDED", 0)}
    assert cast() == {("SHARDED", 0)}


@pytest.mark.parametrize("precision", [Precision(), Precision(BF16, F32)], ids=["fp32", "bf16"])
@pytest.mark.inside
def test_groups_show_dtypes_and_bytes_at_every_moment(
    world, engine, shard, batch, strategy, offload, precision
):
    bare = NestedWrappedModule().to(world.device)
    spec = {"precision": precision, "offload": offload}
    model = shard(bare, strategy, **spec)
    num_shards = 1 if strategy == "NO_SHARD" else world.size
    compute = precision.param_dtype or F32

    def check(gathered, gradient_dtype):
        for group in engine.groups(model):
            numel = NUMEL[group.name]
            dtypes = (group.original_dtype, group.compute_dtype, group.reduce_dtype, group.flat_dtype)
            assert dtypes == (F32, compute, F32, F32)
            assert (group.local_numel, group.full_numel, group.padding) == (numel // num_shards, numel, 0)
            assert group.local_bytes == 4 * numel // num_shards
            assert group.gathered_bytes == (numel * compute.itemsize if group.name in gathered else 0)
            assert group.low_precision_bytes == 0
            assert group.gradient_dtype == gradient_dtype

    kept = set(NUMEL) if strategy != "FULL_SHARD" else set()
    bare.module[3].register_forward_pre_hook(lambda *_: check({ROOT} | kept, None))
    check(set(), None)
    loss = model(batch()).float().sum()
    check(kept, None)
    engine.backward(model, loss)
    check(set(), F32)
    model.zero_grad()
    check(set(), None)


@pytest.mark.parametrize(("strategy", "after_forward"), [("FULL_SHARD", 0), ("SHARD_GRAD_OP", 1)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.inside
def test_full_parameters_give_their_memory_back(
    monkeypatch, world, engine, shard, batch, strategy, after_forward, dtype
):
    # It would fill the memory with NaN and hold it.
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    bare = NestedWrappedModule().to(world.device)
    model = shard(bare, strategy, precision=Precision(dtype))
    inside = {}
    bare.module[0].register_forward_pre_hook(lambda layer, _: inside.update(weight=layer.weight))
    loss = model(batch()).float().sum()
    memory = inside["weight"].untyped_storage()
    numels = {NUMEL[ROOT]}
    if not offers(engine, Capability.PLAIN_PARAMETERS):  # each parameter may have memory of its own
        numels.add(bare.module[0].weight.numel())
    assert memory.nbytes() in {after_forward * numel * dtype.itemsize for numel in numels}
    engine.backward(model, loss)
    assert memory.nbytes() == 0


@pytest.mark.inside
def test_what_is_kept_of_full_parameters_is_empty_or_nan(world, engine, shard, batch):
    """Once they are resharded: NaN of an engine that holds the memory, to show who reads it."""
    bare = NestedWrappedModule().to(world.device)
    model, kept = shard(bare), []
    bare.module[0].register_forward_pre_hook(lambda layer, _: kept.append(layer.weight.detach()))
    model(batch())
    assert kept[0].untyped_storage().nbytes() == 0 or kept[0].isnan().all()


@pytest.mark.inside
def test_visible_parameters_are_sharded_outside_forward(
    world, engine, batch, watch, strategy, use_orig_params
):
    model, _ = watch(strategy, use_orig_params=use_orig_params)
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    local = sum(NUMEL.values()) // (1 if strategy == "NO_SHARD" else world.size)
    assert sum(local_part(p).numel() for p in model.parameters()) == local
    loss = model(batch()).sum()
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    engine.backward(model, loss)
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before


def test_a_layer_has_its_parameters_in_forward(engine, batch, shard, run_subtests):
    """A decay term over `self.parameters()` must not lack them."""

    def claim(**spec):
        bare = NestedWrappedModule()
        seen = []
        for layer in (module for module in bare.modules() if isinstance(module, nn.Linear)):
            layer.register_forward_pre_hook(
                lambda layer, _: seen.append({name: p.numel() for name, p in layer.named_parameters()})
            )
        model = shard(bare, **spec)
        engine.backward(model, model(batch()).sum())
        numels = [(32, 4), (64, 16), (256, 16), (64, 4), (32, 8)]
        assert seen == [{"weight": weight, "bias": bias} for weight, bias in numels]

    run_subtests({"strategy": list(AFTER_FORWARD), "use_orig_params": [False, True]}, claim)


@dataclasses.dataclass
class Result:
    """An output that has a tensor deep inside."""

    values: dict[str, list[torch.Tensor]]


@pytest.mark.parametrize(
    "wrap",
    [lambda y: (y,), lambda y: [y], lambda y: {"y": [y]}, lambda y: Result({"y": [y]})],
    ids=["tuple", "list", "dict", "dataclass"],
)
@pytest.mark.inside
def test_a_unit_frees_after_forward_whatever_its_output_lies_in(engine, shard, batch, strategy, wrap):
    class Wrapping(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    model = shard(Wrapping(8, 8), strategy)
    model(batch())
    assert states(engine, model) == {"": AFTER_FORWARD[strategy]}


@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_an_optimizer_built_after_a_forward_moves_the_weights(
    world, engine, shard, strategy, use_orig_params, grad
):
    """pytorch#149205: it got tensors that nothing reads."""
    bare = nn.Linear(8, 8).to(world.device)
    model = shard(bare, strategy, use_orig_params=use_orig_params)
    x = torch.ones(2, 8, device=world.device)
    with torch.set_grad_enabled(grad):
        before = model(x).detach()
    optimizer = engine.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    engine.backward(model, (model(x) * 2 * world.rank).sum())
    optimizer.step()
    # In the mean d(loss)/d(weight) is 2 everywhere: each of 8 weights of a row takes off 0.2, and the bias.
    torch.testing.assert_close(model(x), before - 9 * 0.2)


def test_evaluation_and_inference_mode_leave_training_possible(
    world, engine, shard, strategy, use_orig_params
):
    bare = nn.Linear(8, 8).to(world.device)
    model = shard(bare, strategy, use_orig_params=use_orig_params).eval()
    x = torch.ones(2, 8, device=world.device)
    with torch.inference_mode():
        inferred = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), inferred)
    engine.backward(model, (model.train()(x) * 2 * world.rank).sum())
    assert engine.full_gradients(model)["bias"].tolist() == [2.0] * 8


LAYERS = ("used", "unused", "skipped")


def test_units_skipped_or_left_out_of_the_loss_have_no_gradient(
    engine, shard, batch, strategy, use_orig_params
):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.skipped = (nn.Linear(8, 8) for _ in LAYERS)

        def forward(self, x):
            return self.used(x), self.unused(x)

    model = shard(Branches(), strategy, units=(nn.Linear,), use_orig_params=use_orig_params)
    engine.backward(model, model(batch())[0].sum())
    gradients = {name: g is not None and bool(g.any()) for name, g in engine.full_gradients(model).items()}
    assert gradients == {f"{layer}.{p}": layer == "used" for layer in LAYERS for p in ("weight", "bias")}
    if offers(engine, Capability.GROUPS):
        held = {group.name: group.gradient_dtype for group in engine.groups(model)}
        assert held == {"used": F32, "unused": None, "skipped": None}
        assert {group.gathered_bytes for group in engine.groups(model)} == {0}


@pytest.mark.ranks(1, 2, 3)
def test_a_step_after_save_and_load_has_the_same_bits(engine, shard, batch, strategy, use_orig_params):
    spec = {"use_orig_params": use_orig_params}
    saved, loaded = (shard(NestedWrappedModule(), strategy, **spec) for _ in range(2))
    engine.backward(saved, saved(batch()).square().sum())
    engine.optimizer(saved, partial(torch.optim.SGD, lr=0.1)).step()
    loaded.load_state_dict(saved.state_dict())
    saved.zero_grad()
    x = batch()
    for model in (saved, loaded):
        engine.backward(model, model(x).square().sum())
    expected = engine.full_gradients(saved)
    for name, gradient in engine.full_gradients(loaded).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_changes_of_full_gradients_are_kept_on_request(
    world, engine, shard, run_subtests, strategy, use_orig_params
):
    """Of reduced gradients, and of a rank's own inside no_sync: a synced backward adds to what was kept."""
    require(engine, Capability.SUMMON)

    def check(writeback, sync):
        bare = nn.Linear(3, 5)
        bare.weight = bare._parameters.pop("weight")  # after the bias, which is dropped
        model = shard(bare, strategy, use_orig_params=use_orig_params)
        x = torch.full((1, 3), world.rank + 1.0, device=world.device)
        with nullcontext() if sync else engine.no_sync(model):
            engine.backward(model, model(x).sum())
        with engine.summon(model, writeback=writeback, with_grads=True):
            bare = engine.unwrapped(model)
            bare.weight.grad.mul_(3)
            bare.bias.grad = None
        engine.backward(model, model(x).sum())
        found = engine.full_gradients(model)
        # A backward alone gives each weight the mean of 1, 2 and 3, and the bias 1.
        assert found["weight"].tolist() == [[8.0 if writeback else 4.0] * 3] * 5
        assert found["bias"].tolist() == [1.0 if writeback else 2.0] * 5

    run_subtests({"writeback": [True, False], "sync": [True, False]}, check)


def test_what_was_changed_in_full_goes_back_to_the_shards_and_is_freed(world, engine, shard, strategy):
    require(engine, Capability.SUMMON)
    model = shard(nn.Linear(3, 4), strategy)
    with engine.summon(model, writeback=True):
        seen = [weakref.ref(parameter) for parameter in model.parameters()]
        with torch.no_grad():
            engine.unwrapped(model).weight.fill_(2.0)
    gc.collect()
    assert [parameter() for parameter in seen] == [None] * 2
    assert engine.full_parameters(model)["weight"].tolist() == [[2.0] * 3] * 4


def test_zeros_that_were_looked_at_forget_nothing(world, engine, shard, use_orig_params):
    """Inside no_sync, behind which gradients wait: those that the user writes do forget these."""
    require(engine, Capability.SUMMON)
    model = shard(nn.Linear(3, 4, bias=False), use_orig_params=use_orig_params)
    x = torch.full((1, 3), world.rank + 1.0, device=world.device)
    engine.backward(model, model(x).sum())
    with engine.no_sync(model):
        engine.backward(model, 0 * model(x).sum())
    with engine.summon(model, writeback=True, with_grads=True):
        assert not engine.unwrapped(model).weight.grad.any()
    engine.backward(model, model(x).sum())
    assert engine.full_gradients(model)["weight"].tolist() == [[3.0] * 3] * 4


def test_a_model_may_be_collected_while_an_optimizer_steps(world, shard, strategy):
    """Also one of other parameters; what an engine hooks into the steps of all goes with the last model."""
    kept = [shard(nn.Linear(4, 4), strategy)]
    plain = nn.Linear(2, 1, bias=False)
    before, plain.weight.grad = plain.weight.detach().clone(), torch.ones(1, 2)
    step = partial(torch.optim.SGD, lr=0.5)(plain.parameters()).step

    def drop(*_):
        kept.clear()
        gc.collect()

    # A dict of hooks that changes as torch goes through it is an error, if one is still to come.
    handles = [register_optimizer_step_pre_hook(hook) for hook in (drop, lambda *_: None)]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(plain.weight, before - 0.5)


@pytest.mark.inside
def test_hooks_on_optimizers_are_there_once_and_go_with_the_last_model(shard):
    def hooks():
        gc.collect()
        handles = [
            hook(lambda *_: None)
            for hook in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
        ]
        found = [len(handle.hooks_dict_ref()) - 1 for handle in handles]
        for handle in handles:
            handle.remove()
        return found

    models = [shard(nn.Linear(4, 4))]
    models.clear()
    before = hooks()
    models.append(shard(nn.Linear(4, 4)))
    one = hooks()
    models.append(shard(nn.Linear(4, 4)))
    assert hooks() == one
    models.clear()
    assert hooks() <= before  # fewer, where a model of an earlier test has gone only now


@pytest.mark.parametrize("what", ["shape", "units"])
def test_ranks_that_shard_different_models_are_refused(world, shard, what):
    """As the model is sharded: a collective of ranks that differ would hang, or mix up values."""
    bare = nn.Sequential(nn.Linear(3, 4 + world.rank * (what == "shape")), nn.Linear(4, 4))
    units = (str(world.rank),) if what == "units" else ()
    with pytest.raises((ValueError, RuntimeError)):
        shard(bare, units=units)
