"""Bad input of the fronts that shard in place is refused by an error, on all ranks alike."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import ForeignTensor, OddParameter

pytestmark = pytest.mark.ranks(2)

BAD = (TypeError, ValueError, NotImplementedError)


def linear():
    return nn.Linear(4, 4)


def partial(w):
    return DTensor.from_local(torch.zeros(4), w.other, [Partial()])


OF_ARGUMENTS = {
    "nothing": lambda w: w.front([]),
    "twice": lambda w: w.front([layer := linear(), layer]),
    "no_module": lambda w: w.front("Linear"),
    "group_again": lambda w: w.front(w.front(linear())),
    "no_forward": lambda w: w.front(nn.ModuleList([linear()])),
    "mesh": lambda w: w.front(linear(), mesh="cpu"),
    "axes": lambda w: w.front(linear(), mesh=w.grid),
    "policy": lambda w: w.front(linear(), mp_policy=torch.bfloat16),
    "offload": lambda w: w.front(linear(), offload_policy=True),
    "param_dtype": lambda w: w.engine.composable.MixedPrecisionPolicy(param_dtype=torch.int32),
    "reduce_dtype": lambda w: w.engine.composable.MixedPrecisionPolicy(reduce_dtype="bf16"),
    "output_dtype": lambda w: w.engine.composable.MixedPrecisionPolicy(output_dtype=torch.bool),
    "ignored": lambda w: w.front(linear(), ignored_params=nn.Parameter(torch.zeros(1))),
    "ignored_kind": lambda w: w.front(linear(), ignored_params=[linear()]),
    "lazy": lambda w: w.front(nn.LazyLinear(4)),
    "integers": lambda w: w.front(OddParameter(torch.zeros(4, dtype=torch.int32))),
    "dtypes": lambda w: w.front(OddParameter(torch.zeros(4, dtype=torch.float64), True)),
    "subclass": lambda w: w.front(OddParameter(torch.zeros(4).as_subclass(ForeignTensor))),
    "devices": lambda w: w.front(OddParameter(torch.zeros(4, device="meta"), True)),
    "partial": lambda w: w.front(OddParameter(partial(w), True), mesh=w.mesh),
    "no_method": lambda w: w.engine.composable.register_fsdp_forward_method(w.front(linear()), "nothing"),
    "attribute": lambda w: w.engine.composable.register_fsdp_forward_method(w.front(linear()), "training"),
    "divisor": lambda w: w.front(linear()).set_gradient_divide_factor(0.0),
    "kept": lambda w: w.front(linear()).set_reshard_after_forward(2),
    "forward_prefetch": lambda w: w.front(linear()).set_modules_to_forward_prefetch([linear()]),
    "backward_prefetch": lambda w: w.front(linear()).set_modules_to_backward_prefetch([linear()]),
    "shared_streams": lambda w: w.engine.composable.share_comm_ctx([w.front(linear()), linear()]),
    "in_a_unit": lambda w: (
        w.front([inner := linear()]),
        setattr(inner, "__class__", nn.Linear),
        w.front(inner),
    ),
}
OF_SHARDS = {
    "neighbours": lambda w: w.front(linear(), reshard_after_forward=3),
    "no_neighbours": lambda w: w.front(linear(), reshard_after_forward=0),
    "neighbours_kind": lambda w: w.front(linear(), reshard_after_forward="all"),
    "no_dimensions": lambda w: w.front(OddParameter(torch.tensor(1.0), True)),
}


@pytest.fixture
def at_hand(world, engine, front):
    """A front, and meshes of one axis, of another one, and of one more than the front takes."""
    pair = world.mesh(1, 2, names=("other", "data"))
    grid = world.mesh(1, 1, 2) if front.shards else pair
    return SimpleNamespace(front=front, engine=engine, mesh=pair["data"], other=pair["other"], grid=grid)


def test_bad_arguments_are_refused(at_hand, run_subtests):
    cases = OF_ARGUMENTS | (OF_SHARDS if at_hand.front.shards else {})

    def claim(what):
        with pytest.raises(BAD) as caught:
            cases[what](at_hand)
        assert str(caught.value)

    run_subtests({"what": list(cases)}, claim)
    at_hand.front(linear())(torch.ones(2, 4))


NAMED = {
    "integers": "'odd'",
    "dtypes": "'odd' has torch.float64",
    "devices": "'odd' has meta",
    "subclass": "'odd' is a ForeignTensor",
    "partial": "'odd' has the placements",
    "lazy": "'weight' has no shape",
    "no_method": "Linear has no method 'nothing'",
    "ignored_kind": "number 0 is a Linear",
    "axes": r"^fully_shard: .* one axis, or two .*, got 3|^replicate: .* one axis, got 2",
}


def test_what_is_refused_is_named(at_hand, run_subtests):
    def claim(what):
        with pytest.raises(BAD, match=NAMED[what]):
            OF_ARGUMENTS[what](at_hand)

    run_subtests({"what": list(NAMED)}, claim)


def test_ranks_that_freeze_different_parameters_learn_which(world, front):
    bare = linear()
    bare.bias.requires_grad_(world.rank == 0)
    own, other = ("", "frozen ") if world.rank == 0 else ("frozen ", "")
    bias = r"'bias' \[4\] torch\.float32 "
    found = rf"{bias}{own}here, {bias}{other}on rank {1 - world.rank}"
    with pytest.raises(ValueError, match=found) as caught:
        front(bare)
    assert "ignores" not in str(caught.value)


class Alone(nn.Module):
    """A module with one parameter."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd

    def forward(self, x):
        return x


@pytest.mark.ranks(6)
def test_a_dim_that_two_axes_divide_unevenly_is_refused(world, fully_shard):
    """Where a placement cannot say which rank has what."""
    mesh = world.mesh(3, 2, names=("data", "tensor"))

    def place(size):
        whole = torch.arange(2.0 * size).view(size, 2).to(world.device)
        module = Alone(nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)])))
        assert fully_shard(module, mesh=mesh["data"]).odd.full_tensor().equal(whole)

    place(12)
    with pytest.raises((ValueError, NotImplementedError), match=r"\d"):
        place(7)


# at the wrong moment


AT_A_TIME = {
    "state_dict": lambda model, state: model.state_dict(),
    "load_state_dict": lambda model, state: model.load_state_dict(state),
    "copy": lambda model, state: copy.deepcopy(model),
    "convert": lambda model, state: model.half(),
    "reset": lambda model, state: model.reset_iter_state(),
}


def test_states_are_left_alone_inside_forward_and_backward(world, front, run_subtests):
    def claim(what, when):
        model = front.shard(nn.Sequential(nn.Linear(4, 4)))
        before, state = front.full_parameters(model), copy.deepcopy(model.state_dict())
        x, errors = torch.full((2, 4), world.rank + 1.0, device=world.device, requires_grad=True), []

        def act(*_):
            try:
                AT_A_TIME[what](model, state)
            except RuntimeError as error:
                errors.append(str(error))

        if when == "forward":
            model[0].register_forward_pre_hook(act)
        output = model(x)
        if when == "backward":
            output.register_hook(act)
        output.sum().backward()
        assert len(errors) == 1
        assert_named_close(front.full_parameters(model), before, EXACT)
        assert front.full_gradients(model)["0.weight"].tolist() == [[3.0] * 4] * 4

    run_subtests({"what": list(AT_A_TIME), "when": ["forward", "backward"]}, claim)


def early(front, bare):
    """Return an optimizer of the parameters before sharding, and the model."""
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    return optimizer, front(bare)


def between(front, bare):
    """Return one of those that are there between unshard and reshard."""
    model = front(bare)
    model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    return optimizer, model


def test_an_optimizer_of_what_gets_no_gradient_is_refused(world, front, run_subtests):
    def claim(when):
        make = {"before": early, "between": between}[when]
        optimizer, model = make(front, nn.Linear(4, 4).to(world.device))
        model(torch.ones(2, 4, device=world.device)).sum().backward()
        with pytest.raises(RuntimeError):
            optimizer.step()

    run_subtests({"when": ["before", "between"]}, claim)


def test_a_sharded_model_is_neither_pickled_nor_half_copied(front, run_subtests):
    def claim(way):
        with pytest.raises((TypeError, RuntimeError, AttributeError)):
            {"copy": copy.copy, "save": lambda model: torch.save(model, "/dev/null")}[way](model)

    model = front(linear())
    run_subtests({"way": ["copy", "save"]}, claim)


def test_second_derivatives_are_refused(world, front):
    """They would read what is freed by then."""
    model = front.shard(linear())
    x = torch.ones(2, 4, device=world.device, requires_grad=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()
    assert all(gradient.any() for gradient in front.full_gradients(model).values())


def test_a_conversion_between_forward_and_backward_is_refused(world, front):
    model = front.shard(linear())
    loss = model(torch.ones(2, 4, device=world.device)).sum()
    model.double()
    with pytest.raises(RuntimeError):
        loss.backward()
    model(torch.ones(2, 4, dtype=torch.float64, device=world.device)).sum().backward()
    assert front.full_gradients(model)["weight"].dtype == torch.float64


def test_parameters_that_were_changed_by_force_are_refused(world, front, run_subtests):
    def exchange(model):
        model.weight = nn.Parameter(torch.zeros(4, 4))

    def wider(model):
        model.weight = nn.Parameter(
            distribute_tensor(torch.zeros(6, 4), model.weight.device_mesh, [Replicate()])
        )

    def elsewhere(model):
        place = Replicate() if front.shards else Shard(1)
        mesh = model.weight.device_mesh
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [place]))

    def claim(change):
        model = front.shard(linear())
        {"exchange": exchange, "wider": wider, "elsewhere": elsewhere}[change](model)
        with pytest.raises((RuntimeError, ValueError), match="weight"):
            model(torch.ones(2, 4, device=world.device))

    run_subtests({"change": ["exchange", "wider", "elsewhere"]}, claim)


def test_a_forward_without_values_is_refused(world, front):
    with torch.device("meta"):
        bare = linear()
    model = front(bare)
    with pytest.raises(RuntimeError, match="meta"):
        model(torch.ones(2, 4, device=world.device))
    model.to_empty(device=world.device)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    assert model(torch.ones(1, 4, device=world.device)).tolist() == [[5.0] * 4]


def test_what_was_left_unfinished_may_be_forgotten(world, front):
    """Gradients that were not reduced, and unsharded parameters; what the user sees stays."""
    model = front.shard(nn.Sequential(nn.Identity(), linear()), ("0", "1"))
    x = torch.ones(1, 4, device=world.device)
    model(x).sum().backward()
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model[1].unshard()
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    assert front.full_gradients(model)["1.weight"].tolist() == [[2.0] * 4] * 4
