"""State that does not fit is refused, by the names of the unsharded model, and changes nothing."""

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep.assertions import assert_named_close, local_part
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import ShardSpec

pytestmark = pytest.mark.ranks(2)

KINDS = ["FULL", "SHARDED", "LOCAL"]
adamw = partial(torch.optim.AdamW, lr=0.01)
REFUSED = (RuntimeError, ValueError, KeyError, TypeError)


class Training:
    """Two layers, each a unit, and their optimizer after a step."""

    def __init__(self, world, engine, make=adamw, **spec):
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)).to(world.device)
        self.world, self.engine = world, engine
        spec = {"units": ("0",), "device": world.device, **spec}
        self.model = engine.shard(bare, ShardSpec(**spec))
        self.optimizer = engine.optimizer(self.model, make)
        self.both = self.model, self.optimizer
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        x = torch.ones(2, 4, device=self.world.device)
        self.engine.backward(self.model, self.model(x).square().sum())
        self.optimizer.step()


@pytest.fixture
def train(world, engine, states):
    """Make a `Training`, with settings of its `ShardSpec`."""
    return partial(Training, world, engine)


def check_unchanged(training, states, act, text):
    """Check that `act` is refused with a text, and that training goes on from where it was."""
    before = states.values(*training.both)
    with pytest.raises(REFUSED, match=text) as caught:
        act()
    assert "_module." not in str(caught.value)
    assert_named_close(states.values(*training.both), before, EXACT)
    training.step()
    after = states.values(*training.both)
    assert not torch.equal(after["0.weight"], before["0.weight"])


# the model's


def missing(state):
    del state["0.weight"]


def unexpected(state):
    state["2.weight"] = state["0.weight"]


def other_shape(state):
    state["0.bias"] = torch.zeros(7)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_a_state_dict_of_another_model_is_refused(train, states, run_subtests, use_orig_params, kind):
    def claim(what):
        training = train(use_orig_params=use_orig_params)
        state = copy.deepcopy(dict(states.model(training.model, kind)))
        change, text = {
            "missing": (missing, r'Missing .*"0\.weight"'),
            "unexpected": (unexpected, r'Unexpected .*"2\.weight"'),
            "shape": (other_shape, r"0\.bias"),
        }[what]
        change(state)
        check_unchanged(training, states, lambda: states.load_model(training.model, state, kind), text)

    run_subtests({"what": ["missing", "unexpected", "shape"]}, claim)


def test_local_state_of_another_rank_or_wrapping_is_refused(world, train, states, run_subtests):
    """That of another rank would fit, as shards have one size."""

    def claim(what):
        training, other = train(), train(units=() if what == "wrapping" else ("0",))
        saved = states.model(other.model, "LOCAL")
        state = OrderedDict((name, local_part(value)) for name, value in saved.items())
        if what == "rank":
            state = world.gather(state)[1 - world.rank]
            state._metadata = world.gather(saved._metadata)[1 - world.rank]
        if what == "inner":
            state["0.flat_param"] = world.gather(state["0.flat_param"])[1 - world.rank]
            state._metadata = saved._metadata | {"0": world.gather(saved._metadata["0"])[1 - world.rank]}
        if what == "nothing":
            state.clear()
        if what == "size":
            state["flat_param"] = state["flat_param"][:1]
        given = {
            "rank": rf"flat_param: .* given shard {1 - world.rank} of 2",
            "inner": rf"0\.flat_param: .* given shard {1 - world.rank} of 2",
            "nothing": "flat_param: .* given nothing",
            "size": "flat_param: .* 1 elements",
            "wrapping": "flat_param",
        }[what]
        # Strict or not: names are not what is wrong.
        check_unchanged(
            training, states, lambda: states.load_model(training.model, state, "LOCAL", strict=False), given
        )

    run_subtests({"what": ["rank", "inner", "wrapping", "nothing", "size"]}, claim)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_middle_of_a_load_comes_as_it_is(train, states, run_subtests, use_orig_params, kind):
    """Of a hook, here. What was not written yet keeps its values, and training goes on."""

    def fail(*_):
        raise KeyError("a hook")

    def claim(strategy):
        spec = {"strategy": strategy, "use_orig_params": use_orig_params}
        training, other = train(**spec), train(**spec)
        other.step()
        before, state = states.values(*training.both), states.model(other.model, kind)
        shown = [(name, parameter.shape) for name, parameter in training.model.named_parameters()]
        handle = training.model.module[1].register_load_state_dict_post_hook(fail)
        with pytest.raises(KeyError, match="a hook"):
            states.load_model(training.model, state, kind)
        handle.remove()
        assert [(name, parameter.shape) for name, parameter in training.model.named_parameters()] == shown
        if kind != "LOCAL":  # which is loaded in place
            after = states.model(training.model)
            assert_named_close(
                {n: after[n] for n in after if "1." in n}, {n: before[n] for n in after if "1." in n}, EXACT
            )
        training.step()

    run_subtests({"strategy": ["FULL_SHARD", "NO_SHARD"]}, claim)


def test_a_tensor_of_ranks_without_this_one_is_refused_by_its_name(world, train, states):
    training = train()
    state = copy.deepcopy(dict(states.model(training.model)))
    mesh = DeviceMesh(world.device.type, [0])
    state["0.weight"] = DTensor.from_local(state["0.weight"], mesh, [Replicate()], run_check=False)
    if world.rank == 0:
        states.load_model(training.model, state)
    else:
        with pytest.raises(ValueError, match=r"'0\.weight' is a DTensor"):
            states.load_model(training.model, state)
    training.step()


def test_local_state_may_be_assigned(train, states, use_orig_params):
    first, second = train(use_orig_params=use_orig_params), train(use_orig_params=use_orig_params)
    shown = [name for name, _ in second.model.named_parameters()]
    second.step()
    state = copy.deepcopy({n: local_part(v).clone() for n, v in states.model(first.model, "LOCAL").items()})
    expected = states.values(*first.both)
    versions = states.model(first.model, "LOCAL")
    for name in state:
        versions[name] = state[name]
    states.load_model(second.model, versions, "LOCAL", assign=True)
    found = states.values(*second.both)
    names = [name for name in expected if " " not in name]
    assert_named_close({n: found[n] for n in names}, {n: expected[n] for n in names}, EXACT)
    assert [name for name, _ in second.model.named_parameters()] == shown
    second.step()


def test_rank_zero_alone_cannot_load(world, train, states):
    """The others would wait for what they are not given."""
    training = train()
    front = states.front
    config = front.FullStateDictConfig(rank0_only=True)
    whole = dict(states.model(training.model))
    state = whole if world.rank == 0 else {}

    def load():
        with states.static.state_dict_type(training.model, front.StateDictType.FULL_STATE_DICT, config):
            training.model.load_state_dict(state)

    check_unchanged(training, states, load, None)


def test_a_type_of_state_is_set_with_its_own_options(train, states, run_subtests):
    front, static = states.front, states.static
    model = train().model
    full, local = front.StateDictType.FULL_STATE_DICT, front.StateDictType.LOCAL_STATE_DICT
    bad = {
        "kind": lambda: static.set_state_dict_type(model, "FULL_STATE_DICT"),
        "config": lambda: static.set_state_dict_type(model, full, front.LocalStateDictConfig()),
        "optimizer": lambda: static.set_state_dict_type(
            model, local, front.LocalStateDictConfig(), front.FullOptimStateDictConfig()
        ),
        "no_unit": lambda: static.get_state_dict_type(nn.Linear(2, 2)),
    }

    def claim(what):
        with pytest.raises((*REFUSED, AttributeError), match="StateDictType" if what == "kind" else None):
            bad[what]()

    run_subtests({"what": list(bad)}, claim)
    assert static.set_state_dict_type(model, local).state_dict_type is full
    found = static.get_state_dict_type(model)
    assert found.state_dict_type is local
    assert type(found.state_dict_config) is front.LocalStateDictConfig
    assert type(found.optim_state_dict_config) is front.LocalOptimStateDictConfig
    assert set(model.state_dict()) == {"flat_param", "0.flat_param"}
    with static.state_dict_type(model, front.StateDictType.SHARDED_STATE_DICT):
        assert static.get_state_dict_type(model[0]).state_dict_type is front.StateDictType.SHARDED_STATE_DICT
    assert static.get_state_dict_type(model).state_dict_type is local


# the optimizer's


def of_other_parameters(training, states, kind):
    other = adamw([nn.Parameter(torch.zeros(2))])
    return lambda: states.optimizer(training.model, other, kind)


def without_state(training, states, kind):
    return lambda: states.load_optimizer(*training.both, {"param_groups": []}, kind)


def without_a_parameter(training, states, kind):
    state = copy.deepcopy(states.optimizer(*training.both, kind))
    for group in state["param_groups"]:
        group["params"] = group["params"][1:]
    return lambda: states.load_optimizer(*training.both, state, kind)


def with_another_parameter(training, states, kind):
    state = copy.deepcopy(states.optimizer(*training.both, kind))
    state["param_groups"][0]["params"].append("2.weight")
    return lambda: states.load_optimizer(*training.both, state, kind)


def in_other_groups(training, states, kind):
    state = copy.deepcopy(states.optimizer(*training.both, kind))
    group = state["param_groups"][0]
    state["param_groups"] = [group | {"params": group["params"][:1]}, group | {"params": group["params"][1:]}]
    return lambda: states.load_optimizer(*training.both, state, kind)


def of_other_shapes(training, states, kind):
    state = copy.deepcopy(states.optimizer(*training.both, kind))
    state["state"]["0.weight"]["exp_avg"] = torch.zeros(7)
    return lambda: states.load_optimizer(*training.both, state, kind)


def with_fewer_groups(training, states, kind):
    given = training.optimizer.state_dict() | {"param_groups": []}
    return lambda: saved(training, states, kind, given)


def with_fewer_parameters(training, states, kind):
    given = training.optimizer.state_dict()
    group = given["param_groups"][0]
    given["param_groups"] = [group | {"params": group["params"][1:]}]
    return lambda: saved(training, states, kind, given)


def without_parameters(training, states, kind):
    given = training.optimizer.state_dict()
    given["param_groups"] = [given["param_groups"][0] | {"params": []}]
    return lambda: saved(training, states, kind, given)


def of_another_rank(training, states, kind):
    state = training.world.gather(states.optimizer(*training.both, kind))[1 - training.world.rank]
    return lambda: states.load_optimizer(*training.both, state, kind)


def nowhere(training, states, kind):
    return lambda: states.load_optimizer(*training.both, {}, kind, rank0=True)


def with_other_names(training, states, kind):
    given = training.optimizer.state_dict()
    group = given["param_groups"][0]
    given["param_groups"] = [group | {"params": [f"{number}.nothing" for number in group["params"]]}]
    return lambda: saved(training, states, kind, given)


def with_names_and_numbers(training, states, kind):
    given = training.optimizer.state_dict()
    group = given["param_groups"][0]
    given["param_groups"] = [group | {"params": ["nothing", *group["params"][1:]]}]
    return lambda: saved(training, states, kind, given)


def saved(training, states, kind, given):
    with states.of_kind(training.model, kind):
        return states.static.optim_state_dict(*training.both, given)


OF_OPTIMIZERS = {
    "with_fewer_groups": with_fewer_groups,
    "with_fewer_parameters": with_fewer_parameters,
    "without_parameters": without_parameters,
    "with_other_names": with_other_names,
    "with_names_and_numbers": with_names_and_numbers,
    "of_other_parameters": of_other_parameters,
    "without_state": without_state,
    "without_a_parameter": without_a_parameter,
    "with_another_parameter": with_another_parameter,
    "in_other_groups": in_other_groups,
}
OF_KIND = {
    "FULL": OF_OPTIMIZERS | {"of_other_shapes": of_other_shapes, "nowhere": nowhere},
    "SHARDED": OF_OPTIMIZERS,
    "LOCAL": OF_OPTIMIZERS | {"of_another_rank": of_another_rank},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizers_state_that_does_not_fit_is_refused(train, states, run_subtests, use_orig_params, kind):
    def claim(what):
        training = train(use_orig_params=use_orig_params)
        act = OF_KIND[kind][what](training, states, kind)
        with pytest.raises((ValueError, NotImplementedError)):
            act()
        training.step()

    run_subtests({"what": list(OF_KIND[kind])}, claim)


def test_what_one_flat_parameter_cannot_hold_is_refused(train, states):
    """A step count that differs between the originals in it; originals keep each their own."""
    training = train(use_orig_params=True)
    state = copy.deepcopy(states.optimizer(*training.both))
    state["state"]["0.weight"]["step"] += 1
    states.load_optimizer(*training.both, state)
    found = states.optimizer(*training.both)["state"]
    assert [found[name]["step"].item() for name in ("0.weight", "0.bias")] == [2.0, 1.0]
    flat = train(use_orig_params=False)
    for step in (torch.tensor(2.0), 1):
        state["state"]["0.weight"]["step"] = step
        with pytest.raises((ValueError, AssertionError), match="step"):
            states.load_optimizer(*flat.both, state)


class Matrices(torch.optim.SGD):
    """Keeps a matrix for each parameter, and nothing says how it belongs to its elements."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter] = {"matrix": torch.zeros(2, 2)}


def test_state_of_a_shape_that_cannot_be_sharded_is_refused(train, states, use_orig_params):
    for strategy in ("FULL_SHARD",) if use_orig_params else ("FULL_SHARD", "NO_SHARD"):
        spec = {"use_orig_params": use_orig_params, "strategy": strategy}
        training = train(make=partial(Matrices, lr=0.1), **spec)
        with pytest.raises((NotImplementedError, ValueError, AssertionError), match=r"matrix|shape"):
            states.optimizer(*training.both)


def test_state_may_be_loaded_at_once_and_by_names(train, states, use_orig_params):
    first, second = train(use_orig_params=use_orig_params), train(use_orig_params=use_orig_params)
    second.step()
    state, expected = states.optimizer(*first.both), states.values(*first.both)
    before = states.values(*second.both)
    states.static.optim_state_dict_to_load(*second.both, copy.deepcopy(state))
    assert_named_close(states.values(*second.both), before, EXACT)
    loaded = states.static.optim_state_dict_to_load(*second.both, copy.deepcopy(state), load_directly=True)
    found = states.values(*second.both)
    names = [name for name in expected if " " in name]
    assert_named_close({n: found[n] for n in names}, {n: expected[n] for n in names}, EXACT)
    assert all(isinstance(key, int) for key in loaded["state"])
    named = states.static.optim_state_dict_to_load(*second.both, state, is_named_optimizer=True)
    own = ["0.weight", "0.bias", "1.weight", "1.bias"] if use_orig_params else ["flat_param", "0.flat_param"]
    given, held = (
        [name.replace("_fsdp_wrapped_module.", "") for name in names]
        for names in (named["param_groups"][0]["params"], named["state"])
    )
    assert sorted(given) == sorted(own)
    assert set() < set(held) <= set(own)


def test_state_is_on_the_cpu_or_where_it_was(world, train, states, run_subtests):
    """By the options of its type; the numbers are the same."""
    front, static = states.front, states.static
    training = train()
    expected = {name: tensor.cpu() for name, tensor in states.values(*training.both).items()}

    def claim(offload):
        config = front.FullOptimStateDictConfig(offload_to_cpu=offload)
        kind = front.StateDictType.FULL_STATE_DICT
        with static.state_dict_type(training.model, kind, front.FullStateDictConfig(offload), config):
            one = static.optim_state_dict(*training.both)["state"]["0.weight"]["exp_avg"]
            value = training.model.state_dict()["0.weight"]
        assert {one.device.type, value.device.type} == {"cpu" if offload else world.device.type}
        found = {"0.weight exp_avg": one.cpu(), "0.weight": value.cpu()}
        assert_named_close(found, {name: expected[name] for name in found}, EXACT)

    run_subtests({"offload": [True, False]}, claim)
