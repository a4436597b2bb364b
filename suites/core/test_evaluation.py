"""Training and evaluation by turns: every forward computes with the weights that the last step left."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close
from lockstep.conformance import Capability, Precision, require

pytestmark = pytest.mark.ranks(2)


class Skipping(nn.Sequential):
    """Units of which a training step may skip one, or leave its output unused; an evaluation needs all."""

    units = ("0", "1")

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.skipped = self.unused = None

    def forward(self, x):
        for index, layer in enumerate(self):
            if not (self.training and index == self.skipped):
                output = layer(x)
                x = x if self.training and index == self.unused else output
        return x


@torch.no_grad()
def evaluate(model, x):
    output = model.eval()(x)
    model.train()
    return {"output": output}


@pytest.mark.ranks(2, 3)
@pytest.mark.basic(5)
def test_an_evaluation_has_the_weights_of_the_last_step(world, front, run_subtests):
    """The weights that one evaluation gathered do not serve the next: the step moved them."""

    def check(evaluated_before):
        bare = Skipping()
        reference = copy.deepcopy(bare).to(world.device)
        model = front.shard(bare)
        # Momentum and zeros for gradients move a layer in the steps that skip it.
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizers = sgd(reference.parameters()), front.optimizer(model, sgd)
        x = torch.randn(4, 8, device=world.device)

        def compare(moment):
            if moment in (evaluated_before, "next step"):
                assert_named_close(evaluate(model, x), evaluate(reference, x))

        for step in range(4):
            reference.skipped = bare.skipped = step % 2
            batch = torch.randn(2 * world.size, 8, device=world.device)
            compare("forward")
            own = model(batch.chunk(world.size)[world.rank]).square().mean()
            compare("backward")
            front.backward(model, own)
            reference(batch).square().mean().backward()
            compare("step")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            compare("next step")

    run_subtests({"evaluated_before": ["forward", "backward", "step"]}, check)


def test_an_evaluation_has_the_weights_that_were_loaded(world, front):
    bare = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(world.device)
    reference = copy.deepcopy(bare)
    model = front.shard(bare, units=("0",))
    x = torch.randn(4, 8, device=world.device)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_named_close(evaluate(model, x), evaluate(reference, x))
    with torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.mul_(2)
    assert_named_close(evaluate(model, x), evaluate(reference, x))
    model.load_state_dict(saved)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.div_(2)
    assert_named_close(evaluate(model, x), evaluate(reference, x))


def check_steps_that_leave_units_out(world, front, left_out, prepare=lambda bare: None, **spec):
    """Check the outputs of steps of which every second one leaves a unit out, in the way `left_out`."""
    torch.manual_seed(0)
    bare = Skipping()
    reference = copy.deepcopy(bare).to(world.device)
    model = front.shard(bare, **spec)
    prepare(bare)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = sgd(reference.parameters()), front.optimizer(model, sgd)
    for unit in (None, 1, None, 0, None):
        for each in (bare, reference):
            setattr(each, left_out, unit)
        batch = torch.randn(2 * world.size, 8, device=world.device)
        own = batch.chunk(world.size)[world.rank]
        output = model(own)
        assert_named_close({"output": output.detach()}, {"output": reference(own).detach()})
        front.backward(model, output.square().mean())
        reference(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


LEFT_OUT = pytest.mark.parametrize("left_out", ["skipped", "unused"])


@LEFT_OUT
@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.parametrize("forward_prefetch", [False, True], ids=["", "forward_prefetch"])
def test_unused_gathers_serve_no_later_step(
    world, fronts, strategy, left_out, backward_prefetch, forward_prefetch
):
    """pytorch#137348: a unit that a step gathered and did not run computed the next with those weights."""
    spec = {"backward_prefetch": backward_prefetch, "forward_prefetch": forward_prefetch}
    front = fronts[f"{strategy}-flat"]
    check_steps_that_leave_units_out(world, front, left_out, **spec)


@LEFT_OUT
def test_unused_prefetches_by_choice_serve_no_later_step(world, fully_shard, left_out):
    def prefetch(bare):
        bare[0].set_modules_to_forward_prefetch([bare[1]])
        bare[1].set_modules_to_backward_prefetch([bare[0]])

    check_steps_that_leave_units_out(world, fully_shard, left_out, prefetch)


@pytest.mark.inside
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_unused_gathers_are_given_up_after_forward(world, engine, shard, strategy, collectives):
    require(engine, Capability.GROUPS)
    bare = Skipping()
    model = shard(
        bare, strategy, forward_prefetch=True, units=("0", "1"), precision=Precision(torch.bfloat16)
    )
    x = torch.ones(2, 8, device=world.device)
    with torch.no_grad():
        for bare.skipped in (None, 1):
            before = len(collectives)
            model(x)
    if Capability.TRAFFIC in engine.capabilities:
        # The units that ran are "0" and the root: one more was gathered ahead.
        assert len(engine.traffic(list(collectives)[before:]).gathers) == 3
    (skipped,) = (group for group in engine.groups(model) if group.name == "1")
    assert (skipped.state.name, skipped.gathered_bytes, skipped.low_precision_bytes) == ("SHARDED", 0, 0)
