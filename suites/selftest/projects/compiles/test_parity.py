"""Compiled candidates that part from their reference: by the compiler's code, or without it, too."""

import pytest
import torch
from torch import nn

from lockstep.assertions import Trainee, Training, assert_parity, per_rank_batches

pytestmark = pytest.mark.ranks(2)


def doubles_less(graph, inputs):
    """A backend whose code has a bug: it multiplies by less than the graph says."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.args[1:] == (2.0,):
            node.args = (node.args[0], 1.5)
    graph.recompile()
    return graph.forward


class Doubled(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        return self.inner(x) * self.factor


def model(factor=2.0):
    torch.manual_seed(0)
    return nn.Sequential(Doubled(factor), nn.Linear(4, 2))


def compiled(backend, factor=2.0):
    made = model(factor)
    made[0] = torch.compile(made[0], backend=backend)
    return Trainee(made)


@pytest.fixture
def training(world):
    batches = per_rank_batches(lambda generator: torch.randn(3, 4, generator=generator), 0, world.rank)
    return Training(batches, lambda model, batch: model(batch).square().mean(), steps=2)


def test_names_are_those_of_the_model(training):
    assert_parity(Trainee(model()), compiled("eager"), training)


def test_wrong_code(training):
    assert_parity(Trainee(model()), compiled(doubles_less), training)


def test_wrong_without_the_compiler(training):
    assert_parity(Trainee(model()), compiled("eager", factor=1.5), training)
