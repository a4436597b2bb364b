"""Training that resumes from state dicts of each type, also at other world sizes, units and strategies."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.assertions import assert_named_close, local_part
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, Precision, ShardSpec, offers, require
from lockstep.conformance.models import UnevenShapes
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(1, 2, 3)

KINDS = ["FULL", "SHARDED", "LOCAL"]
STRATEGIES = ["FULL_SHARD", "NO_SHARD"]  # SHARD_GRAD_OP shards as FULL_SHARD does
OTHER = {"units": ("body.linear",), "strategy": "SHARD_GRAD_OP"}
adamw = partial(torch.optim.AdamW, lr=0.01)


class Training:
    """A model and its optimizer after some steps; ranks train on the same batches unless `apart`."""

    def __init__(self, engine, world, steps, bare=UnevenShapes, make=adamw, apart=0, group=None, **spec):
        self.engine, self.device, self.apart = engine, world.device, apart * world.rank
        self.group = None if isinstance(group, tuple) else group
        torch.manual_seed(steps)
        spec = {"units": UnevenShapes.units, "device": world.device, "process_group": group, **spec}
        self.model = engine.shard(bare().to(world.device), ShardSpec(**spec))
        self.optimizer = engine.optimizer(self.model, make)
        self.both = self.model, self.optimizer
        for number in range(steps):
            self.step(number)

    def step(self, number):
        generator = torch.Generator().manual_seed(100 * number + self.apart)
        batch = UnevenShapes.batch(generator).to(self.device)
        self.optimizer.zero_grad()
        self.engine.backward(self.model, UnevenShapes.loss(self.model(batch)))
        self.optimizer.step()


def unsharded(world):
    """Train one step as a `Training` with ranks apart, unsharded on all ranks' data; return its state."""
    torch.manual_seed(1)
    bare = UnevenShapes().to(world.device)
    optimizer = adamw(list(bare.parameters()))
    for rank in range(world.size):
        batch = UnevenShapes.batch(torch.Generator().manual_seed(rank)).to(world.device)
        (UnevenShapes.loss(bare(batch)) / world.size).backward()
    optimizer.step()
    names = [name for name, _ in bare.named_parameters()]
    state = {names[number]: one for number, one in optimizer.state_dict()["state"].items()}
    state.pop("empty")  # original parameters without elements are never stepped
    moments = {f"{name} {key}": value for name, one in state.items() for key, value in one.items()}
    return bare.state_dict() | moments


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_state_is_that_of_unsharded_training(world, engine, states, strategy, use_orig_params):
    training = Training(engine, world, 1, apart=1, strategy=strategy, use_orig_params=use_orig_params)
    expected = unsharded(world)
    found = states.values(*training.both)
    assert list(states.model(training.model)) == [name for name in expected if " " not in name]
    assert_named_close(found, expected)


def test_sharded_state_is_chunked_like_torch_chunk(world, engine, states, use_orig_params):
    training = Training(engine, world, 1, use_orig_params=use_orig_params)
    whole, sharded = (states.all(*training.both, kind) for kind in ("FULL", "SHARDED"))
    pairs = [(sharded["model"][name], whole["model"][name]) for name, _ in UnevenShapes().named_parameters()]
    moments = whole["optimizer"]["state"]
    pairs += [(sharded["optimizer"]["state"][name]["exp_avg"], moments[name]["exp_avg"]) for name in moments]
    assert len(pairs) > len(moments) > 3
    for tensor, full in pairs:
        if full.dim():
            chunks = full.chunk(world.size)
            chunk = chunks[world.rank] if world.rank < len(chunks) else full[:0]
            assert (tensor.placements, tensor.shape) == ((Shard(0),), full.shape)
            local = tensor.to_local()
            assert torch.equal(local, chunk)
            assert local.untyped_storage().nbytes() == chunk.nbytes  # not that of the full tensor
        elif isinstance(tensor, DTensor):
            assert tensor.placements == (Replicate(),)
    assert {name for name, t in sharded["model"].items() if not isinstance(t, DTensor)} == {"offset", "count"}


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_sharded_state_of_any_number_of_rows_is_chunked(world, engine, states, rows):
    """As torch.chunk does, which leaves less to the last ranks than an even division would."""
    bare = nn.Linear(3, rows).to(world.device)
    full = bare.weight.detach().clone()
    model = engine.shard(bare, ShardSpec(device=world.device))
    chunks = full.chunk(world.size)
    chunk = chunks[world.rank] if world.rank < len(chunks) else full[:0]
    assert torch.equal(states.model(model, "SHARDED")["weight"].to_local(), chunk)


def test_sharded_state_of_what_is_whole_is_replicated(world, engine, states):
    training = Training(engine, world, 1, strategy="NO_SHARD", use_orig_params=True)
    state = states.all(*training.both, "SHARDED")
    assert state["model"]["first.weight"].placements == (Replicate(),)
    assert type(state["optimizer"]["state"]["scalar"]["step"]) is torch.Tensor


@pytest.mark.ranks(2)
def test_sharded_state_lies_on_the_mesh_that_was_given(world, engine, states, run_subtests):
    """Of all units, and of the optimizer, too."""

    def claim(axes):
        front = engine.wrapper
        mesh = world.mesh(*axes, names=("replicate", "shard")[-len(axes) :])
        strategy = front.ShardingStrategy["HYBRID_SHARD" if len(axes) > 1 else "FULL_SHARD"]
        model = front.FullyShardedDataParallel(
            nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).to(world.device),
            device_mesh=mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=front.CustomPolicy(lambda module: getattr(module, "in_features", 0) == 4),
            device_id=world.device,
        )
        optimizer = engine.optimizer(model, adamw)
        engine.backward(model, model(torch.ones(1, 4, device=world.device)).sum())
        optimizer.step()
        state = states.all(model, optimizer, "SHARDED")
        tensors = [
            *state["model"].values(),
            *(one["exp_avg"] for one in state["optimizer"]["state"].values()),
        ]
        assert len(tensors) == 8
        assert all(tensor.device_mesh is mesh for tensor in tensors)
        assert {tensor.placements for tensor in tensors} == {(Replicate(),) * (len(axes) - 1) + (Shard(0),)}

    run_subtests({"axes": [(2,), (1, 2), (2, 1)]}, claim)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "num", "num_loading"), [("FULL", 2, 0), ("SHARDED", 2, 4), ("LOCAL", 0, 0)])
def test_a_state_gathers_each_unit_once_and_sends_nothing_else(world, engine, states, kind, num, num_loading):
    """To load it gathers each sharded parameter."""
    require(engine, Capability.TRAFFIC)
    bare = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    model = engine.shard(bare.to(world.device), ShardSpec(units=("0",), device=world.device))
    with CollectivesLog() as log:
        state = states.model(model, kind)
    traffic = engine.traffic(log)
    assert (len(traffic.gathers), traffic.reductions, traffic.others) == (num, (), ())
    with CollectivesLog() as log:
        states.load_model(model, state, kind)
    assert len(log) == num_loading


@pytest.mark.parametrize(
    ("use_orig_params", "strategy", "kind"),  # in pairs: each value of one with each of the others
    [
        *((False, "FULL_SHARD", "FULL"), (True, "FULL_SHARD", "SHARDED"), (True, "FULL_SHARD", "LOCAL")),
        *((True, "NO_SHARD", "FULL"), (False, "NO_SHARD", "SHARDED"), (False, "NO_SHARD", "LOCAL")),
    ],
)
def test_uneven_and_empty_shards_resume_with_the_same_bits(
    world, engine, states, use_orig_params, strategy, kind
):
    """torchtitan#1136: the loss was another one."""
    spec = {"use_orig_params": use_orig_params, "strategy": strategy, "apart": 1}
    trained, resumed = Training(engine, world, 2, **spec), Training(engine, world, 3, **spec)
    saved = copy.deepcopy(states.all(*trained.both, kind)) if kind != "LOCAL" else None
    states.load_all(*resumed.both, saved or states.all(*trained.both, kind), kind)
    for number in (2, 3):
        assert_named_close(states.values(*resumed.both), states.values(*trained.both), EXACT)
        for each in (trained, resumed):
            each.step(number)
    assert_named_close(states.values(*resumed.both), states.values(*trained.both), EXACT)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("first", [False, True], ids=["from_flat", "from_original"])
def test_state_goes_to_other_units_and_back(world, engine, states, kind, first):
    one = Training(engine, world, 1, use_orig_params=first)
    other = Training(engine, world, 2, use_orig_params=not first, units=("body.linear",), strategy="NO_SHARD")
    expected = states.values(*one.both)
    states.load_all(*other.both, states.all(*one.both, kind), kind)
    assert_named_close(states.values(*other.both), expected, EXACT)
    saved = states.all(*other.both, kind)
    one.step(1)
    states.load_all(*one.both, saved, kind)
    assert_named_close(states.values(*one.both), expected, EXACT)


def test_state_of_rank_zero_alone_loads_on_all(world, engine, states, use_orig_params):
    saving = Training(engine, world, 1, use_orig_params=use_orig_params)
    loading = Training(engine, world, 2, use_orig_params=use_orig_params)
    state = states.all(*saving.both, rank0=True)
    assert [bool(part) for part in state.values()] == [world.rank == 0] * 2
    expected = states.values(*saving.both)
    states.load_optimizer(*loading.both, state["optimizer"], rank0=True)
    found = states.values(*loading.both)
    assert_named_close(
        {name: found[name] for name in found if " " in name},
        {name: expected[name] for name in expected if " " in name},
        EXACT,
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_ranks_may_give_the_optimizer_parameters_in_other_orders(world, engine, states, kind):
    """pytorch's test_fsdp_optim_state.py reverses them on odd ranks."""

    def make(parameters):
        return adamw(list(parameters)[:: -1 if world.rank % 2 else 1])

    trained, plain = (Training(engine, world, 1, use_orig_params=True, make=each) for each in (make, adamw))
    expected = states.values(*plain.both)
    resumed = Training(engine, world, 2, use_orig_params=True, make=make)
    states.load_all(*resumed.both, states.all(*trained.both, kind), kind)
    assert_named_close(states.values(*resumed.both), expected, EXACT)


@pytest.mark.inside
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_what_an_optimizer_does_not_have_is_passed_by(world, engine, states, kind):
    """Where no param groups say whose it is."""

    def some(parameters):
        return adamw(list(parameters)[:3])

    spec = {"use_orig_params": True}
    trained, part = (Training(engine, world, 1, make=make, **spec) for make in (adamw, some))
    with states.of_kind(trained.model, kind):
        given = {"state": trained.optimizer.state_dict()["state"]}
        saved = states.static.optim_state_dict(*trained.both, given)
    with states.of_kind(part.model, kind), CollectivesLog() as log:
        loaded = states.static.optim_state_dict_to_load(*part.both, saved)
    own = part.optimizer.state_dict()["state"]
    for number, one in loaded["state"].items():
        assert_named_close(one, own[number], EXACT)
    assert len(saved["state"]) > len(loaded["state"]) == len(own)
    assert len(log) <= (2 * 3 if kind == "SHARDED" else 0)


# What an optimizer keeps, and where


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_shares_no_memory_with_the_optimizer(world, engine, states, kind):
    training = Training(engine, world, 1, strategy="NO_SHARD", use_orig_params=True, ignored=("first",))
    state = states.optimizer(*training.both, kind)
    before = copy.deepcopy(state["state"])
    training.step(1)
    states.load_optimizer(*training.both, state, kind)
    training.step(1)
    for name, one in state["state"].items():
        assert_named_close(one, before[name], EXACT)


def two_groups(parameters):
    """Give the parameters of one dim, and the rest, options of their own."""
    parameters = list(parameters)
    single = [p for p in parameters if p.dim() < 2]
    groups = [{"params": single, "lr": 0.5}, {"params": [p for p in parameters if p.dim() > 1]}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


@pytest.mark.ranks(2)
def test_options_of_param_groups_follow_the_parameters(world, engine, states):
    """Of a strategy that keeps the shapes, by which the groups are made."""
    spec = {"make": two_groups, "strategy": "NO_SHARD", "use_orig_params": True}
    trained, resumed = Training(engine, world, 1, **spec), Training(engine, world, 2, **spec)
    state = states.optimizer(*trained.both)
    assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.01]
    single = {name for name, p in UnevenShapes().named_parameters() if p.dim() < 2}
    assert set(state["param_groups"][0]["params"]) == single
    for group in resumed.optimizer.param_groups:
        group["lr"] = 7.0
    states.load_optimizer(*resumed.both, state)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.5, 0.01]


def test_an_optimizer_keeps_names_of_its_own_and_a_group_without_parameters(world, engine, states):
    def named(parameters):
        return adamw([(f"number {number}", p) for number, p in enumerate(parameters)])

    def empty(parameters):
        return adamw([{"params": list(parameters)}, {"params": [], "lr": 0.5}])

    loaded = []
    for make in (named, empty):
        training = Training(engine, world, 1, make=make)
        state = states.optimizer(*training.both)
        assert not any("param_names" in group for group in state["param_groups"])
        with states.of_kind(training.model, "FULL"):
            loaded.append(states.static.optim_state_dict_to_load(*training.both, state)["param_groups"])
    assert loaded[0][0]["param_names"] == [f"number {number}" for number in range(3)]
    assert [group["lr"] for group in loaded[1]] == [0.01, 0.5]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_may_be_given_by_names_or_without_options(world, engine, states, kind):
    """As optimizers have it that know their parameters by name."""
    training = Training(engine, world, 1, use_orig_params=True)
    given, expected = training.optimizer.state_dict(), states.optimizer(*training.both, kind)
    names = [name for name, _ in training.model.named_parameters()]
    (group,) = given["param_groups"]
    by_name = {
        "state": {names[number]: one for number, one in given["state"].items()},
        "param_groups": [group | {"params": sorted(names)}],
    }

    def values(state):
        return {
            f"{name} {key}": local_part(value)
            for name, one in state["state"].items()
            for key, value in one.items()
        }

    with states.of_kind(training.model, kind):
        named = states.static.optim_state_dict(*training.both, by_name)
        bare = states.static.optim_state_dict(*training.both, {"state": given["state"]})
        loaded = states.static.optim_state_dict_to_load(*training.both, bare)
    assert sorted(named["param_groups"][0]["params"]) == sorted(expected["param_groups"][0]["params"])
    assert_named_close(values(named), values(expected), EXACT)
    assert_named_close(values(bare), values(expected), EXACT)
    assert ("param_groups" in bare, list(loaded)) == (False, ["state"])
    assert_named_close(values(loaded), values(given), EXACT)


@pytest.mark.ranks(2)
def test_parts_without_state_count_as_zeros(world, engine, states):
    """Those of one rank, and those of a parameter that lacks what others in its unit have."""
    saving = Training(engine, world, 1, use_orig_params=True)
    if world.rank:
        saving.optimizer.state.clear()
    moment = states.optimizer(*saving.both)["state"]["first.weight"]["exp_avg"]
    assert (moment.flatten()[0].item() != 0, moment.flatten()[-1].item()) == (True, 0.0)
    flat = Training(engine, world, 1)
    state = states.optimizer(*flat.both)
    expected = copy.deepcopy(state["state"])
    expected["first.bias"]["exp_avg"].zero_()
    del state["state"]["first.bias"]["exp_avg"]
    states.load_optimizer(*flat.both, state)
    found = states.optimizer(*flat.both)["state"]
    for name in ("first.weight", "first.bias"):
        assert_named_close(found[name], expected[name], EXACT)


@pytest.mark.ranks(2)
def test_state_of_a_rank_alone_may_be_that_of_a_group(world, engine, states):
    """The group that is given: here each rank is the first of its own."""
    own = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    training = Training(engine, world, 1)
    with states.of_kind(training.model, "FULL", rank0=True):
        state = states.static.optim_state_dict(*training.both, group=own)
        assert state["state"]["first.weight"]["exp_avg"].shape == (5, 8)
        state["param_groups"][0]["lr"] = float(world.rank)
        loaded = states.static.optim_state_dict_to_load(*training.both, state, group=own)
    assert loaded["param_groups"][0]["lr"] == world.rank
    alone = Training(engine, world, 1, group=own)
    assert all(states.all(*alone.both, rank0=True).values())
    dist.destroy_process_group(own)


@pytest.mark.inside
@pytest.mark.ranks(2)
def test_state_of_rank_zero_is_sent_tensor_by_tensor(world, engine, states):
    """No message is larger than the largest tensor: rank 0 does not make one of all of them."""
    training = Training(engine, world, 1)
    state = states.optimizer(*training.both, rank0=True)
    with CollectivesLog() as log:
        states.load_optimizer(*training.both, state, rank0=True)
    saved = [each["exp_avg"].nbytes for each in state["state"].values()] if world.rank == 0 else [0]
    sent = max(entry.nbytes for entry in log if entry.dtype == torch.float32)
    assert 0 < sent <= max(world.gather(max(saved)))


class Strange(torch.optim.SGD):
    """Keeps nothing, a number, a 0-dim part of a tensor and a tensor of the parameter's shape."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                values = {"nothing": None, "number": 3, "single": torch.full((9,), 2.5)[0]}
                self.state[parameter] = values | {"like": parameter.grad.clone()}


@pytest.mark.parametrize(("kind", "rank0"), [("FULL", False), ("SHARDED", False), ("FULL", True)])
def test_state_of_any_type_is_kept(world, engine, states, use_orig_params, kind, rank0):
    spec = {"use_orig_params": use_orig_params, "ignored": ("last",)}
    training = Training(engine, world, 1, make=Strange, **spec)
    state = states.optimizer(*training.both, kind)
    for name in ("first.weight", "scalar", "body.gate.weight"):
        one = state["state"][name]
        assert list(one) == ["nothing", "number", "single", "like"]
        assert [one["nothing"], one["number"], one["single"].item()] == [None, 3, 2.5]
        assert one["single"].untyped_storage().nbytes() == 4  # not that of what it is a part of
    before = copy.deepcopy(training.optimizer.state_dict()["state"])
    training.optimizer.state.clear()
    states.load_optimizer(*training.both, {} if rank0 and world.rank else state, kind, rank0)
    for number, one in training.optimizer.state_dict()["state"].items():
        assert torch.equal(one.pop("like"), before[number].pop("like"))
        assert one == before[number]


class Partly(UnevenShapes):
    """A model with a frozen parameter and an unused unit."""

    units = (*UnevenShapes.units, "idle")

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(7, 1, bias=False)
        self.first.bias.requires_grad_(False)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_parameters_that_were_never_stepped_have_no_state(world, engine, states, kind):
    spec = {"bare": Partly, "units": Partly.units, "use_orig_params": True}
    trained, fresh = (Training(engine, world, steps, **spec) for steps in (1, 0))
    state = states.optimizer(*trained.both, kind)
    assert {"idle.weight", "first.bias"} <= set(state["param_groups"][0]["params"])
    assert not {"idle.weight", "first.bias"} & set(state["state"])
    states.load_all(*fresh.both, states.all(*trained.both, kind), kind)
    assert_named_close(states.values(*fresh.both), states.values(*trained.both), EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_of_ignored_parameters_is_whole(world, engine, states, kind):
    """They are in no unit: every rank has all of their state, and saves and loads it as it is."""
    spec = {"ignored": ("first",), "use_orig_params": True}
    trained, resumed = (Training(engine, world, steps, **spec) for steps in (1, 2))
    state = states.all(*trained.both, kind)
    one = state["optimizer"]["state"]["first.weight"]
    assert (type(one["exp_avg"]), one["exp_avg"].shape) == (torch.Tensor, (5, 8))
    states.load_all(*resumed.both, copy.deepcopy(state) if kind != "LOCAL" else state, kind)
    expected = states.values(*trained.both)
    assert "first.weight exp_avg" in expected
    assert_named_close(states.values(*resumed.both), expected, EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
def test_state_in_parts_is_refused_while_parameters_are_full(world, engine, states, kind):
    model = Training(engine, world, 0).model
    with engine.summon(model), pytest.raises(RuntimeError, match="state_dict"):
        states.model(model, kind)
    assert states.model(model, kind)


@pytest.mark.ranks(2)
def test_modules_of_activation_checkpointing_are_left_out_of_names(world, engine, states, use_orig_params):
    """They save the module in them under its own name, and optimizers with or without them exchange state."""

    def checkpointed():
        bare = UnevenShapes()
        apply_activation_checkpointing(bare, check_fn=lambda module: isinstance(module, nn.Linear))
        return bare

    spec = {"units": (), "use_orig_params": use_orig_params}
    trained, plain = Training(engine, world, 1, bare=checkpointed, **spec), Training(engine, world, 1, **spec)
    expected = states.values(*plain.both)
    assert any("_checkpoint_wrapped_module" in name for name, _ in trained.model.named_modules())
    assert_named_close(states.values(*trained.both), expected, EXACT)
    plain.step(1)
    states.load_all(*plain.both, states.all(*trained.both))
    assert_named_close(states.values(*plain.both), expected, EXACT)


# The model's own


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
def test_parameters_missing_from_the_state_keep_their_values(world, engine, states, kind):
    model = Training(engine, world, 0).model
    state = {name: value for name, value in states.model(model, kind).items() if name == "first.bias"}
    state["first.bias"] = state["first.bias"] + 1
    before = {name: tensor.clone() for name, tensor in states.model(model).items()}
    found = states.load_model(model, state, kind, strict=False)
    assert sorted(found.missing_keys) == sorted(set(before) - {"first.bias"})
    expected = before | {"first.bias": before["first.bias"] + 1}
    assert_named_close(states.model(model), expected, EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_leaves_nothing_of_what_was_there(world, engine, states, kind):
    """Neither what a forward has kept for its backward, nor data that the user has put in."""
    spec = {"use_orig_params": True, "strategy": "SHARD_GRAD_OP"}
    saving, loading = (Training(engine, world, steps, **spec) for steps in (0, 1))
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


def test_local_state_is_the_live_shard(world, engine, states, use_orig_params):
    require(engine, Capability.GROUPS)
    model = Training(engine, world, 0, use_orig_params=use_orig_params).model
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


# Other world sizes, through files and through the hands of rank 0


@pytest.fixture
def groups(world, engine):
    """Process groups of the first rank, the first two and all three, by size."""
    # On all ranks, also those that have no part in what is sharded.
    require(engine, Capability.STATE_DICTS, Capability.SCALARS)
    made = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    yield made
    world.barrier()
    for size, group in made.items():
        if world.rank < size:
            dist.destroy_process_group(group)


def through_files(world, states, saving, make):
    """Save and load sharded state with torch's checkpoint, on the ranks that have a model."""
    path = world.shared_tmp_path / "checkpoint"
    if saving:
        dcp.save(states.all(*saving.both, "SHARDED"), checkpoint_id=path, process_group=saving.group)
    world.barrier()
    loading = make()
    if loading:
        state = states.all(*loading.both, "SHARDED")
        dcp.load(state, checkpoint_id=path, process_group=loading.group)
        states.load_all(*loading.both, state, "SHARDED")
    return loading


def through_dict(world, states, saving, make):
    """Pass the full state of rank 0 to all ranks that have a model."""
    state = world.gather(saving and states.all(*saving.both))[0]
    loading = make()
    if loading:
        states.load_all(*loading.both, state)
    return loading


def check_resumed(world, states, saving, loading, tolerance=EXACT):
    """Check that both have the same values, to the bit now, and after another step."""
    for number in (2, None):
        mine = [each and states.values(*each.both) for each in (saving, loading)]
        found = world.gather(mine)
        for _, values in found:
            if values:
                assert_named_close(values, found[0][0], EXACT if number else tolerance)
        for each in (saving, loading):
            if each and number:
                each.step(number)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("size", "carry", "use_orig_params"),  # in pairs
    [
        *((1, through_files, False), (2, through_files, True), (3, through_files, True)),
        *((1, through_dict, True), (2, through_dict, False), (3, through_dict, False)),
    ],
)
def test_training_saved_on_two_ranks_resumes_on_one_to_three(
    world, engine, states, groups, size, use_orig_params, carry
):
    def make(size, steps, **spec):
        return Training(engine, world, steps, group=groups[size], **spec) if world.rank < size else None

    saving = make(2, 2, use_orig_params=use_orig_params)
    other = {"use_orig_params": not use_orig_params, **OTHER}
    loading = carry(world, states, saving, lambda: make(size, 3, **other))
    # The mean of one or two equal gradients is exact; a third of a sum of three is not.
    check_resumed(world, states, saving, loading, torch.float32 if size == 3 else EXACT)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_training_resumes_from_each_type(world, engine, states, kind):
    mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
    pair = mesh.get_group("shard"), mesh.get_group("replicate")
    saving, loading = (
        Training(engine, world, steps, group=pair, strategy="HYBRID_SHARD") for steps in (2, 3)
    )
    states.load_all(*loading.both, states.all(*saving.both, kind), kind)
    check_resumed(world, states, saving, loading)
    if kind == "FULL":
        of_first = states.all(*saving.both, rank0=True)
        assert [bool(part) for part in of_first.values()] == [world.rank == 0] * 2
