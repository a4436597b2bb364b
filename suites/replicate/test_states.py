"""State of the model and of its optimizer, by torch.distributed.checkpoint and at other world sizes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, require

pytestmark = pytest.mark.ranks(3)

FULL = StateDictOptions(full_state_dict=True)
FRONTS = ["fully_shard", "replicate"]


class Uneven(nn.Module):
    """Parameters that few worlds divide evenly, one of a single element, a tied weight, and buffers."""

    units = ("first", "gate")

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 5)
        self.gate = nn.PReLU()
        self.last = nn.Linear(5, 4, bias=False)
        self.tied = nn.Linear(5, 4)
        self.tied.weight = self.last.weight
        self.register_buffer("offset", torch.full((5,), 1 + 2**-12))
        self.register_buffer("count", torch.tensor(3 + seed))

    def forward(self, x):
        x = self.gate(self.first(x) + self.offset)
        return self.last(x) + self.tied(x)


class Training:
    """A model and its optimizer, some steps on; every rank trains on the same batches."""

    def __init__(self, world, engine, front="fully_shard", mesh=None, steps=0, policy=()):
        self.device = world.device
        self.model = Uneven(seed=steps).to(world.device)
        mp_policy = engine.composable.MixedPrecisionPolicy(*policy)
        for module in (self.model.first, self.model.gate, self.model):
            getattr(engine.composable, front)(module, mesh=mesh, mp_policy=mp_policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for number in range(steps):
            self.step(number)

    def step(self, number):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(self.device)
        self.optimizer.zero_grad()
        self.model(batch).float().square().sum().backward()
        self.optimizer.step()

    def state(self):
        """Return the state as checkpoints hold it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def values(self):
        """Return parameters, buffers and the optimizer's state in full, by name."""
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            of_optimizer = self.optimizer.state[parameter]
            found |= {f"{name}.{key}": value for key, value in of_optimizer.items()}
        return {name: full(value).clone() for name, value in found.items()}


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.fixture
def meshes(world, engine):
    """The first rank, the first two, and all three, as meshes by their sizes."""
    require(engine, Capability.COMPOSABLE)  # on all ranks, also those that have no part in what is sharded
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    yield {
        size: DeviceMesh.from_group(group, world.device.type)
        for size, group in groups.items()
        if world.rank < size
    }
    world.barrier()
    for size, group in groups.items():
        if world.rank < size:
            dist.destroy_process_group(group)


def test_state_dict_holds_sharded_parameters_by_their_bare_names(world, front):
    bare = Uneven()
    expected = {name: tensor.clone().to(world.device) for name, tensor in bare.state_dict().items()}
    model = front.shard(bare, **front.precision(torch.bfloat16))
    model(torch.ones(2, 8, device=world.device)).float().sum().backward()
    state = model.state_dict()
    assert_named_close({name: full(value) for name, value in state.items()}, expected, EXACT)
    placements = {name: v.placements for name, v in state.items() if isinstance(v, DTensor)}
    parameters = dict(bare.named_parameters(remove_duplicate=False))
    assert placements == dict.fromkeys(parameters, front.placements)


def test_a_full_state_dict_is_plain_and_the_same_everywhere(world, front):
    expected = {name: tensor.clone().to(world.device) for name, tensor in Uneven().state_dict().items()}
    model = front.shard(Uneven())
    state = get_model_state_dict(model, options=FULL)
    assert_named_close(state, expected, EXACT)
    assert not any(isinstance(value, DTensor) for value in state.values())


def test_a_full_state_dict_of_rank_zero_is_sharded_for_all(world, front):
    expected = {name: tensor.clone().to(world.device) for name, tensor in Uneven(seed=1).state_dict().items()}
    model = front.shard(Uneven())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(expected) if world.rank == 0 else {}, options=options)
    found = {name: full(value) for name, value in model.state_dict().items()}
    assert_named_close(found, expected, EXACT)
    reference = Uneven(seed=1).to(world.device)
    x = torch.ones(2, 8, device=world.device)
    torch.testing.assert_close(model(x), reference(x))


def test_a_state_dict_is_written_and_read_by_torch_as_well(front, tmp_path):
    model = front.shard(Uneven(seed=1))
    expected = {name: full(value).clone() for name, value in model.state_dict().items()}
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = front.shard(Uneven())
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    assert_named_close({name: full(value) for name, value in loaded.state_dict().items()}, expected, EXACT)


@pytest.mark.parametrize("policy", [(), (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FRONTS)
def test_training_goes_on_from_a_checkpoint_to_the_bit(world, engine, name, policy):
    trained = Training(world, engine, name, steps=2, policy=policy)
    dcp.save(trained.state(), checkpoint_id=world.shared_tmp_path / "checkpoint")
    loaded = Training(world, engine, name, steps=1, policy=policy)
    state = loaded.state()
    dcp.load(state, checkpoint_id=world.shared_tmp_path / "checkpoint")
    loaded.load(state)
    assert_named_close(loaded.values(), trained.values(), EXACT)
    for training in (trained, loaded):
        training.step(2)
    assert_named_close(loaded.values(), trained.values(), EXACT)


@pytest.mark.parametrize(("size", "other"), [(2, 3), (3, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(
    ("name", "other_name"),
    [("fully_shard", "fully_shard"), ("fully_shard", "replicate"), ("replicate", "fully_shard")],
)
def test_a_checkpoint_loads_at_another_size_and_other_front(
    world, engine, meshes, size, other, name, other_name
):
    """pytorch#102821: with uneven or empty shards it failed, or loaded other values."""
    path, values, expected = world.shared_tmp_path / "checkpoint", None, None
    if world.rank < size:
        trained = Training(world, engine, name, meshes[size], steps=2)
        dcp.save(trained.state(), checkpoint_id=path, process_group=meshes[size].get_group())
        expected = trained.values()
        trained.step(2)
        expected |= {f"next {key}": value for key, value in trained.values().items()}
    world.barrier()
    if world.rank < other:
        loaded = Training(world, engine, other_name, meshes[other], steps=1)
        state = loaded.state()
        dcp.load(state, checkpoint_id=path, process_group=meshes[other].get_group())
        loaded.load(state)
        values = loaded.values()
        loaded.step(2)
        values |= {f"next {key}": value for key, value in loaded.values().items()}
    (expected, *_), (values, *_) = world.gather(expected), world.gather(values)
    exact = [name for name in expected if not name.startswith("next ")]
    assert_named_close({n: values[n] for n in exact}, {n: expected[n] for n in exact}, EXACT)
    assert_named_close(values, expected)


def test_names_in_the_optimizers_state_are_those_of_parameters(world, engine):
    trained = Training(world, engine, steps=1)
    _, optimizer = get_state_dict(trained.model, trained.optimizer, options=FULL)
    names = [name for name, _ in Uneven().named_parameters()]
    assert sorted(optimizer["state"]) == sorted(names)
    assert {name: s["exp_avg"].shape for name, s in optimizer["state"].items()} == {
        name: p.shape for name, p in Uneven().named_parameters()
    }


@pytest.mark.parametrize("policy", [(), (torch.bfloat16,)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 3, 5])  # on three ranks: one has nothing, even, padded
def test_a_state_dict_that_was_taken_follows_the_model(world, front, size, policy):
    """After PyTorch's test of cached state dicts: trainers take one, and write a checkpoint into it later."""
    model = front(nn.Linear(size, size, bias=False).to(world.device), **front.precision(*policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = model.state_dict()
    check_shared(model, state, 3.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, size, device=world.device)).sum().backward()
        optimizer.step()
        assert torch.equal(full(state["weight"]), full(model.weight))
    check_shared(model, state, 5.0)


def check_shared(model, state, value):
    """Check that `model` computes with what is written into `state`, local part and whole."""
    size = state["weight"].shape[0]
    x = torch.ones(1, size, device=state["weight"].device)
    with torch.no_grad():
        state["weight"].to_local().fill_(value)
        assert model(x).tolist() == [[value * size] * size]
        model.reshard()  # torch would compute with what that forward has unsharded
        state["weight"].mul_(2.0)
        assert model(x).tolist() == [[2 * value * size] * size]
    model.reshard()
    assert torch.equal(full(model.weight), torch.full_like(full(model.weight), 2 * value))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_loaded_state_dict_is_what_the_next_step_computes_with(world, front, assign):
    source = front.shard(Uneven(seed=1))
    model = front.shard(Uneven())
    x = torch.ones(2, 8, device=world.device)
    model(x).sum().backward()
    model.load_state_dict(source.state_dict(), assign=assign)
    reference = Uneven(seed=1).to(world.device)
    torch.testing.assert_close(model(x), reference(x))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("offload", [False, True], ids=["on_device", "offloaded"])
def test_a_model_made_on_meta_is_filled_after_it_was_sharded(world, front, assign, offload):
    with torch.device("meta"):
        bare = Uneven()
    composable = front.engine.composable
    policy = composable.CPUOffloadPolicy(pin_memory=False) if offload else composable.OffloadPolicy()
    for module in (bare.first, bare.gate, bare):
        model = front(module, offload_policy=policy)
    if not assign:
        model.to_empty(device="cpu" if offload else world.device)
    source = front.shard(Uneven(seed=1))
    model.load_state_dict(source.state_dict(), assign=assign)
    x = torch.ones(2, 8, device=world.device)
    for module in (model, source):
        module(x).sum().backward()
    assert_named_close(
        {name: full(p.grad) for name, p in model.named_parameters()},
        {name: full(p.grad) for name, p in source.named_parameters()},
        EXACT,
    )
    torch.testing.assert_close(model(x), Uneven(seed=1).to(world.device)(x))
