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
from lockstep.conformance import Capability, Precision, ShardSpec, require
from lockstep.conformance.models import UnevenShapes

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
            assert torch.equal(tensor.to_local(), chunk)
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
    state = states.model(Training(engine, world, 0, strategy="NO_SHARD").model, "SHARDED")
    assert state["first.weight"].placements == (Replicate(),)


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


# What an optimizer keeps, and where


@pytest.mark.ranks(2)
def test_optimizer_state_shares_no_memory_with_the_optimizer(world, engine, states):
    training = Training(engine, world, 1, strategy="NO_SHARD", use_orig_params=True)
    state = states.optimizer(*training.both)
    before = copy.deepcopy(state["state"])
    states.load_optimizer(*training.both, state)
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


class Strange(torch.optim.SGD):
    """Keeps nothing, a number, a 0-dim tensor and one of the parameter's shape."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                values = {"nothing": None, "number": 3, "single": torch.tensor(2.5)}
                self.state[parameter] = values | {"like": parameter.grad.clone()}


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_state_of_any_type_is_kept(world, engine, states, use_orig_params, kind):
    training = Training(engine, world, 1, make=Strange, use_orig_params=use_orig_params)
    state = states.optimizer(*training.both, kind)
    for name in ("first.weight", "scalar", "body.gate.weight"):
        one = state["state"][name]
        assert list(one) == ["nothing", "number", "single", "like"]
        assert [one["nothing"], one["number"], one["single"].item()] == [None, 3, 2.5]
    before = copy.deepcopy(training.optimizer.state_dict()["state"])
    training.optimizer.state.clear()
    states.load_optimizer(*training.both, state, kind)
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
    half = Precision(param_dtype=torch.float16, buffer_dtype=torch.float16)
    model = engine.shard(bare.to(world.device), ShardSpec(precision=half, device=world.device))
    model(torch.ones(4, 8, device=world.device))
    state = states.model(model, kind)
    dtypes = {name: tensor.dtype for name, tensor in state.items() if tensor.is_floating_point()}
    assert set(dtypes.values()) == {torch.float32}
    assert state["count"].dtype == torch.int64
    assert {"offset", "norms.0.running_mean", "norms.1.running_mean"} <= set(dtypes)


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


def test_local_state_is_the_live_shard(world, engine, states, use_orig_params):
    require(engine, Capability.GROUPS)
    model = Training(engine, world, 0, use_orig_params=use_orig_params).model
    state = states.model(model, "LOCAL")
    sizes = {f"{group.name}.flat_param".strip("."): group.local_numel for group in engine.groups(model)}
    assert {name: local_part(state[name]).numel() for name in sizes} == sizes
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    after = states.model(model, "LOCAL")
    assert torch.equal(local_part(after["flat_param"]), local_part(state["flat_param"]))


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
