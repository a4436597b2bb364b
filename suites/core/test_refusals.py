"""Bad input of the wrapper is refused by an error, on all ranks alike, and nothing hangs."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import ForeignTensor, OddParameter

pytestmark = pytest.mark.ranks(2)

BAD = (TypeError, ValueError, NotImplementedError)
"""What is raised for arguments: no error of Python's own, as AttributeError."""


def tied(wrap):
    """Wrap a layer, and then a module that has its weight, too."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return wrap(first), wrap(second)


def sub(wrap):
    """Wrap a module that is a unit already, under another wrapper that does not know it."""
    inner = nn.Linear(4, 4)
    wrap(inner)
    return wrap(nn.Sequential(inner))


def tied_without_values(wrap):
    """As `tied`, of a weight that gets its values when it is wrapped."""
    with torch.device("meta"):
        bare = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    bare[1].weight = bare[0].weight
    return wrap(bare[0]), wrap(bare[1])


def tied_below_ignored(wrap):
    """Wrap a layer that has the weight of a unit, which is below an ignored module."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    ignored = nn.Sequential(wrap(first, use_orig_params=True))
    return wrap(nn.Sequential(ignored, second), use_orig_params=True, ignored_modules=[ignored])


def again(wrap):
    """Wrap what is in a unit already."""
    inner = nn.Linear(4, 4)
    return wrap(inner), wrap(inner)


def chooses(answer):
    return lambda f: f.CustomPolicy(lambda module: answer)


OF_ARGUMENTS = {
    "strategy": lambda w: w.wrap(sharding_strategy="FULL_SHARD"),
    "offload": lambda w: w.wrap(cpu_offload=True),
    "precision": lambda w: w.wrap(mixed_precision=torch.float16),
    "prefetch": lambda w: w.wrap(backward_prefetch="BACKWARD_PRE"),
    "init": lambda w: w.wrap(param_init_fn="zeros"),
    "eval": lambda w: w.wrap(full_precision_in_eval="yes"),
    "no_module": lambda w: w.wrap("Linear"),
    "unit_again": lambda w: w.wrap(w.wrap()),
    "no_forward": lambda w: w.wrap(nn.ModuleList([nn.Linear(4, 4)])),
    "policy": lambda w: w.wrap(auto_wrap_policy="all"),
    "policy_class": lambda w: w.wrap(auto_wrap_policy=w.front.ModuleWrapPolicy),
    "classes": lambda w: w.front.ModuleWrapPolicy(nn.Linear),
    "answer": lambda w: w.wrap(nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=chooses("yes")(w.front)),
    "wrapped_by_hand": lambda w: w.wrap(
        nn.Sequential(w.wrap(nn.Sequential(nn.Linear(4, 4)))),
        auto_wrap_policy=w.front.ModuleWrapPolicy({nn.Linear}),
    ),
    "mark": lambda w: w.front.enable_wrap(wrapper_cls="wrapper").__enter__(),
    "param_dtype": lambda w: w.front.MixedPrecision(param_dtype=torch.int32),
    "reduce_dtype": lambda w: w.front.MixedPrecision(reduce_dtype="bf16"),
    "buffer_dtype": lambda w: w.front.MixedPrecision(buffer_dtype=torch.bool),
    "device_name": lambda w: w.wrap(device_id="nowhere"),
    "device_kind": lambda w: w.wrap(device_id=1.5),
    "device_number": lambda w: w.wrap(device_id=99),
    "device_type": lambda w: w.wrap(device_id=torch.device("meta")),
    "group": lambda w: w.wrap(process_group="world"),
    "group_in_pair": lambda w: w.wrap(process_group=("a", "b"), strategy="HYBRID_SHARD"),
    "pair": lambda w: w.wrap(process_group=(dist.group.WORLD, dist.group.WORLD)),
    "no_pair": lambda w: w.wrap(process_group=dist.group.WORLD, strategy="HYBRID_SHARD"),
    "not_in_group": lambda w: w.wrap(process_group=dist.GroupMember.NON_GROUP_MEMBER),
    "group_and_mesh": lambda w: w.wrap(process_group=dist.group.WORLD, device_mesh=w.mesh),
    "axes": lambda w: w.wrap(device_mesh=w.grid),
    "axis": lambda w: w.wrap(device_mesh=w.mesh, strategy="HYBRID_SHARD"),
    "both_ignored": lambda w: w.wrap(ignored_modules=[nn.Linear(4, 4)], ignored_states=[nn.Linear(4, 4)]),
    "ignored_module": lambda w: w.wrap(ignored_modules=nn.Linear(4, 4)),
    "ignored_kind": lambda w: w.wrap(ignored_modules=[nn.Parameter(torch.zeros(1))]),
    "ignored_name": lambda w: w.wrap(ignored_states="weight"),
    "ignored_parameter": lambda w: w.wrap(ignored_states=nn.Parameter(torch.zeros(1))),
    "ignored_unit": lambda w: w.wrap(nn.Sequential(unit := w.wrap()), ignored_modules=[unit]),
    "lazy": lambda w: w.wrap(nn.LazyLinear(4)),
    "integers": lambda w: w.wrap(OddParameter(torch.zeros(4, dtype=torch.int32))),
    "dtypes": lambda w: w.wrap(OddParameter(torch.zeros(4, dtype=torch.float64), True)),
    "frozen": lambda w: w.wrap(OddParameter(torch.zeros(4))),
    "dtensor": lambda w: w.wrap(OddParameter(distribute_tensor(torch.zeros(4), w.mesh, [Replicate()]))),
    "subclass": lambda w: w.wrap(OddParameter(torch.zeros(4).as_subclass(ForeignTensor))),
    "tied": lambda w: tied(w.wrap),
    "tied_without_values": lambda w: tied_without_values(w.wrap),
    "tied_below_ignored": lambda w: tied_below_ignored(w.wrap),
    "in_a_unit": lambda w: sub(w.wrap),
    "again": lambda w: again(w.wrap),
    "both_flags": lambda w: w.wrapper.summon_full_params(
        w.wrap(), writeback=True, rank0_only=True
    ).__enter__(),
}


@pytest.fixture
def at_hand(world, wrap, wrapper_front):
    """The front, a function that wraps a linear layer by default, and two meshes."""
    mesh, grid = world.mesh(2, names=("shard",)), world.mesh(1, 2, names=("replicate", "shard"))

    def wrap_one(module=None, strategy=None, **settings):
        if strategy:
            settings["sharding_strategy"] = wrapper_front.ShardingStrategy[strategy]
        return wrap(nn.Linear(4, 4) if module is None else module, **settings)

    return SimpleNamespace(
        front=wrapper_front,
        wrapper=wrapper_front.FullyShardedDataParallel,
        wrap=wrap_one,
        mesh=mesh,
        grid=grid,
    )


# A name of an ignored parameter that the model does not have is no error, and the model is not on a GPU.
@pytest.mark.filterwarnings("ignore:.*ignored")
def test_bad_arguments_are_refused(at_hand, run_subtests):
    def claim(what):
        with pytest.raises(BAD) as caught:
            OF_ARGUMENTS[what](at_hand)
        assert str(caught.value)

    run_subtests({"what": list(OF_ARGUMENTS)}, claim)
    at_hand.wrap()(torch.ones(2, 4))


NAMED = {
    "integers": "'odd'",
    "dtypes": "'odd' has torch.float64",
    "frozen": "'odd' has False",
    "dtensor": "'odd' is a DTensor",
    "subclass": "'odd' is a ForeignTensor",
    "tied": "'weight' is tied to weight of .*Linear",
    "tied_without_values": "'weight' is tied to weight of .*Linear",
    "tied_below_ignored": "'1.weight' is tied to weight of .*Linear",
    "in_a_unit": r"module '0' \(Linear\) is inside .*Linear",
    "again": r"^(?!.*'').*: Linear is inside .*Linear",
    "lazy": "'weight' has no shape",
    "ignored_unit": r"\(Linear\)",
    "wrapped_by_hand": "a Linear in '0'",
    "policy": "auto_wrap_policy: .*'all'",
    "policy_class": "auto_wrap_policy: .*ModuleWrapPolicy'",
    "mark": "wrapper_cls",
    "ignored_kind": "number 0 is a Parameter",
    "classes": "Linear",
    "not_in_group": r"rank \d is not in it",
}


def test_what_is_refused_is_named(at_hand, run_subtests):
    def claim(what):
        with pytest.raises(BAD, match=NAMED[what]):
            OF_ARGUMENTS[what](at_hand)

    run_subtests({"what": list(NAMED)}, claim)


def test_what_was_refused_may_be_wrapped_after_the_remedy(at_hand):
    bare = OddParameter(torch.zeros(4, dtype=torch.float64), True)
    with pytest.raises(ValueError):
        at_hand.wrap(bare)
    assert at_hand.wrap(bare.float())(torch.ones(2, 4)).shape == (2, 4)


def test_replicas_of_hosts_of_unknown_size_are_refused(at_hand, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        at_hand.wrap(strategy="HYBRID_SHARD")


def test_a_warning_says_that_a_model_ignores_itself(world, at_hand):
    bare = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="Linear.* is itself in ignored_modules") as caught:
        model = at_hand.wrapper(bare, ignored_modules=[bare], device_id=world.device)
    assert caught[0].filename == __file__  # the line that wraps
    assert [p.shape for p in model.parameters()] == [(4, 4), (4,)]
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_ranks_that_ignore_different_parameters_learn_which(world, at_hand):
    bare = OddParameter(torch.zeros(4), True)
    with pytest.raises(ValueError, match=r"ignores ('odd'.*nothing|nothing.*'odd')"):
        at_hand.wrap(bare, ignored_states=[bare.odd] if world.rank else [])


# at the wrong moment


AT_A_TIME = {
    "state_dict": lambda w, model, state: model.state_dict(),
    "load_state_dict": lambda w, model, state: model.load_state_dict(state),
    "load_around": lambda w, model, state: nn.ModuleDict({"all": model}).load_state_dict(
        {f"all.{name}": value for name, value in state.items()}
    ),
    "summon": lambda w, model, state: w.wrapper.summon_full_params(model).__enter__(),
    "apply": lambda w, model, state: model.apply(lambda module: None),
    "copy": lambda w, model, state: copy.deepcopy(model),
    "convert": lambda w, model, state: model.half(),
}


def test_states_are_left_alone_inside_forward_and_backward(world, engine, at_hand, run_subtests):
    def claim(what, when, use_orig_params):
        bare = nn.Sequential(nn.Linear(4, 4))
        model = at_hand.wrap(bare, use_orig_params=use_orig_params)
        before, state = engine.full_parameters(model), copy.deepcopy(model.state_dict())
        x, errors = torch.full((2, 4), world.rank + 1.0, requires_grad=True), []

        def act(*_):
            try:
                AT_A_TIME[what](at_hand, model, state)
            except (RuntimeError, AssertionError) as error:
                errors.append(str(error))

        if when == "forward":
            bare[0].register_forward_pre_hook(act)
        output = model(x)
        if when == "backward":
            output.register_hook(act)
        engine.backward(model, output.sum())
        assert len(errors) == 1
        assert_named_close(engine.full_parameters(model), before, EXACT)
        assert engine.full_gradients(model)["0.weight"].tolist() == [[3.0] * 4] * 4

    settings = {"what": list(AT_A_TIME), "when": ["forward", "backward"], "use_orig_params": [False, True]}
    run_subtests(settings, claim)


INSIDE = {
    "forward": lambda w, model, state: model(torch.ones(2, 4)),
    "summon": AT_A_TIME["summon"],
    "apply": AT_A_TIME["apply"],
    "copy": AT_A_TIME["copy"],
    "convert": AT_A_TIME["convert"],
    "load_state_dict": AT_A_TIME["load_state_dict"],
    "load_around": AT_A_TIME["load_around"],
}


def test_full_parameters_are_left_alone_while_they_are_shown(engine, at_hand, run_subtests):
    def claim(what):
        model = at_hand.wrap()
        before, state = engine.full_parameters(model), copy.deepcopy(model.state_dict())
        with at_hand.wrapper.summon_full_params(model):
            with torch.no_grad():
                model.module.bias.add_(1)
            before["bias"] += 1
            with pytest.raises((RuntimeError, AssertionError)):
                INSIDE[what](at_hand, model, state)
            # Full state consists of what is shown.
            assert_named_close(model.state_dict(), before, EXACT)
        assert_named_close(engine.full_parameters(model), before, EXACT)
        assert model(torch.ones(2, 4)).shape == (2, 4)

    run_subtests({"what": list(INSIDE)}, claim)


def test_what_cannot_be_trained_is_refused_by_the_step(engine, at_hand, run_subtests):
    """An optimizer of tensors that get no gradient would idle, and full gradients fit no shard."""
    sgd = partial(torch.optim.SGD, lr=0.1)

    def claim(what):
        bare = nn.Linear(4, 4)
        bare.idle = nn.Parameter(torch.ones(4))
        early = sgd(list(bare.parameters()))
        model = at_hand.wrap(bare, use_orig_params=what == "unreduced")
        if what == "unreduced":
            with model.no_sync():
                engine.backward(model, model(torch.ones(2, 4)).sum())
            early = engine.optimizer(model, sgd)
        else:
            engine.backward(model, model(torch.ones(2, 4)).sum())
        with pytest.raises(RuntimeError, match="no_sync" if what == "unreduced" else None):
            early.step()

    run_subtests({"what": ["made_before", "unreduced"]}, claim)


def test_second_derivatives_are_refused(engine, at_hand):
    """They would read what is freed by then."""
    model = at_hand.wrap()
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    engine.backward(model, model(x).sum())
    assert all(gradient.any() for gradient in engine.full_gradients(model).values())


def test_a_conversion_between_forward_and_backward_is_refused(engine, at_hand):
    model = at_hand.wrap()
    loss = model(torch.ones(2, 4)).sum()
    assert model.double() is model
    with pytest.raises(RuntimeError):
        engine.backward(model, loss)
    engine.backward(model, model(torch.ones(2, 4, dtype=torch.float64)).sum())
    assert engine.full_gradients(model)["weight"].dtype == torch.float64


def test_parameters_that_were_changed_by_force_are_refused(engine, at_hand, run_subtests):
    def exchange(model):
        model.module.weight = nn.Parameter(torch.zeros(8))

    def reshape(model):
        model.module.weight.data = torch.zeros(1)

    def claim(change):
        model = at_hand.wrap(use_orig_params=True)
        {"exchange": exchange, "reshape": reshape}[change](model)
        with pytest.raises((RuntimeError, ValueError), match=r"weight|shape"):
            model(torch.ones(2, 4))

    run_subtests({"change": ["exchange", "reshape"]}, claim)


def test_full_parameters_keep_their_shape(at_hand, run_subtests):
    def claim(weight, with_grads):
        def change(model):
            with at_hand.wrapper.summon_full_params(model, with_grads=with_grads):
                if weight is None:
                    model.module.weight = None
                else:
                    model.module.weight.data = weight

        model = at_hand.wrap()
        with pytest.raises((RuntimeError, ValueError)):
            change(model)
        assert model(torch.ones(2, 4)).shape == (2, 4)

    run_subtests({"weight": [torch.zeros(1), None], "with_grads": [False, True]}, claim)
