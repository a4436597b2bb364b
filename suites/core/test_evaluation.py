"""Training and evaluation by turns: every forward computes with the weights that the last step left."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close

pytestmark = pytest.mark.ranks(2)


class Skipping(nn.Sequential):
    """Units of which a training step leaves one out, each step another; an evaluation needs all of them."""

    units = ("0", "1")

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.skipped = None

    def forward(self, x):
        for index, layer in enumerate(self):
            if not (self.training and index == self.skipped):
                x = layer(x)
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
