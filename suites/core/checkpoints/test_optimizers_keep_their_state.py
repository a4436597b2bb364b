"""State of an optimizer: every type of it, its options, and parameters that have none."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.assertions import assert_named_close, local_part
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import UnevenShapes
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(1, 2, 3)

KINDS = ["FULL", "SHARDED", "LOCAL"]
adamw = partial(torch.optim.AdamW, lr=0.01)


@pytest.mark.inside
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_what_an_optimizer_does_not_have_is_passed_by(train, states, kind):
    """Where no param groups say whose it is."""

    def some(parameters):
        return adamw(list(parameters)[:3])

    spec = {"use_orig_params": True}
    trained, part = (train(1, make=make, **spec) for make in (adamw, some))
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_shares_no_memory_with_the_optimizer(train, states, kind):
    training = train(1, strategy="NO_SHARD", use_orig_params=True, ignored=("first",))
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
def test_options_of_param_groups_follow_the_parameters(train, states):
    """Of a strategy that keeps the shapes, by which the groups are made."""
    spec = {"make": two_groups, "strategy": "NO_SHARD", "use_orig_params": True}
    trained, resumed = train(1, **spec), train(2, **spec)
    state = states.optimizer(*trained.both)
    assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.01]
    single = {name for name, p in UnevenShapes().named_parameters() if p.dim() < 2}
    assert set(state["param_groups"][0]["params"]) == single
    for group in resumed.optimizer.param_groups:
        group["lr"] = 7.0
    states.load_optimizer(*resumed.both, state)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.5, 0.01]


def test_an_optimizer_keeps_names_of_its_own_and_a_group_without_parameters(train, states):
    def named(parameters):
        return adamw([(f"number {number}", p) for number, p in enumerate(parameters)])

    def empty(parameters):
        return adamw([{"params": list(parameters)}, {"params": [], "lr": 0.5}])

    loaded = []
    for make in (named, empty):
        training = train(1, make=make)
        state = states.optimizer(*training.both)
        assert not any("param_names" in group for group in state["param_groups"])
        with states.of_kind(training.model, "FULL"):
            loaded.append(states.static.optim_state_dict_to_load(*training.both, state)["param_groups"])
    assert loaded[0][0]["param_names"] == [f"number {number}" for number in range(3)]
    assert [group["lr"] for group in loaded[1]] == [0.01, 0.5]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_may_be_given_by_names_or_without_options(train, states, kind):
    """As optimizers have it that know their parameters by name."""
    training = train(1, use_orig_params=True)
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
def test_parts_without_state_count_as_zeros(world, train, states):
    """Those of one rank, and those of a parameter that lacks what others in its unit have."""
    saving = train(1, use_orig_params=True)
    if world.rank:
        saving.optimizer.state.clear()
    moment = states.optimizer(*saving.both)["state"]["first.weight"]["exp_avg"]
    assert (moment.flatten()[0].item() != 0, moment.flatten()[-1].item()) == (True, 0.0)
    flat = train(1)
    state = states.optimizer(*flat.both)
    expected = copy.deepcopy(state["state"])
    expected["first.bias"]["exp_avg"].zero_()
    del state["state"]["first.bias"]["exp_avg"]
    states.load_optimizer(*flat.both, state)
    found = states.optimizer(*flat.both)["state"]
    for name in ("first.weight", "first.bias"):
        assert_named_close(found[name], expected[name], EXACT)


@pytest.mark.ranks(2)
def test_state_of_a_rank_alone_may_be_that_of_a_group(world, train, states):
    """The group that is given: here each rank is the first of its own."""
    own = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    training = train(1)
    with states.of_kind(training.model, "FULL", rank0=True):
        state = states.static.optim_state_dict(*training.both, group=own)
        assert state["state"]["first.weight"]["exp_avg"].shape == (5, 8)
        state["param_groups"][0]["lr"] = float(world.rank)
        loaded = states.static.optim_state_dict_to_load(*training.both, state, group=own)
    assert loaded["param_groups"][0]["lr"] == world.rank
    alone = train(1, group=own)
    assert all(states.all(*alone.both, rank0=True).values())
    dist.destroy_process_group(own)


@pytest.mark.inside
@pytest.mark.ranks(2)
def test_state_of_rank_zero_is_sent_tensor_by_tensor(world, train, states):
    """No message is larger than the largest tensor: rank 0 does not make one of all of them."""
    training = train(1)
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
def test_state_of_any_type_is_kept(world, train, states, use_orig_params, kind, rank0):
    spec = {"use_orig_params": use_orig_params, "ignored": ("last",)}
    training = train(1, make=Strange, **spec)
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
def test_parameters_that_were_never_stepped_have_no_state(train, states, kind):
    spec = {"bare": Partly, "units": Partly.units, "use_orig_params": True}
    trained, fresh = (train(steps, **spec) for steps in (1, 0))
    state = states.optimizer(*trained.both, kind)
    assert {"idle.weight", "first.bias"} <= set(state["param_groups"][0]["params"])
    assert not {"idle.weight", "first.bias"} & set(state["state"])
    states.load_all(*fresh.both, states.all(*trained.both, kind), kind)
    assert_named_close(states.values(*fresh.both), states.values(*trained.both), EXACT)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_of_ignored_parameters_is_whole(train, states, kind):
    """They are in no unit: every rank has all of their state, and saves and loads it as it is."""
    spec = {"ignored": ("first",), "use_orig_params": True}
    trained, resumed = (train(steps, **spec) for steps in (1, 2))
    state = states.all(*trained.both, kind)
    one = state["optimizer"]["state"]["first.weight"]
    assert (type(one["exp_avg"]), one["exp_avg"].shape) == (torch.Tensor, (5, 8))
    states.load_all(*resumed.both, copy.deepcopy(state) if kind != "LOCAL" else state, kind)
    expected = states.values(*trained.both)
    assert "first.weight exp_avg" in expected
    assert_named_close(states.values(*resumed.both), expected, EXACT)
