"""Models of blocks whose compiled code is wrong in one block, by a backend that is planted."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep import engine
from lockstep.assertions import Tolerance, Trainee, Training, assert_parity, per_rank_batches

pytestmark = pytest.mark.ranks(2)
WIDE = 7
"""Width of the inner layer of the block that goes wrong, by which the backend knows it."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.widen, self.narrow = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return x + self.narrow(self.widen(x).relu())


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Blocks(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([block(5), block(WIDE)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def is_of_block(node):
    """Whether a node is the `relu` of the block that goes wrong."""
    value = node.meta.get("example_value")
    return "relu" in node.name and value is not None and value.shape[-1] == WIDE


def change(module, after):
    """Put a call of a function behind the `relu` of one block, in the graphs of checkpoints, too."""
    for graph in [each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)]:
        for node in [*graph.nodes]:
            if is_of_block(node):
                with graph.inserting_after(node):
                    more = graph.call_function(after, (node,))
                node.replace_all_uses_with(more, delete_user_cb=lambda user, more=more: user is not more)
        graph.owning_module.recompile()
    return module


def wrong(graph, inputs):
    """A backend whose code is wrong in one block."""
    return change(graph, more).forward


def wrong_aot(graph, inputs):
    """The same, by torch's AOT autograd."""
    return torch._dynamo.lookup_backend("aot_eager")(change(graph, more), inputs)


def wrong_backward(graph, inputs):
    """A backend whose values are right and whose gradients, in one block, are not."""
    return change(graph, half_gradient).forward


def more(x):
    return x + 0.125


def half_gradient(x):
    return x / 2 + (x / 2).detach()


def wrong_together(graph, inputs):
    """A backend that is wrong where one graph has several blocks."""
    widths = {node.meta["example_value"].shape[-1] for node in graph.graph.nodes if "relu" in node.name}
    return (lambda *args: tuple(each * 1.125 for each in graph(*args))) if len(widths) > 1 else graph.forward


def ahead(graph, inputs):
    """A backend that is off by less than the tolerance."""
    return lambda *args: tuple(each * (1 + 5e-7) for each in graph(*args))


@pytest.fixture
def check(world):
    """Hold a model to DDP: compiled by block, in place or around it, or as a whole."""

    def check(way, backend, shard=None, block=Block, tolerance=None):
        torch.manual_seed(0)
        reference = Blocks(block)
        model = copy.deepcopy(reference)
        for number, each in enumerate(model.blocks):
            if way == "in place":
                each.compile(backend=backend)
            if way == "around":
                model.blocks[number] = torch.compile(each, backend=backend)
            if shard:
                shard(model.blocks[number])
        model = shard(model) if shard else DistributedDataParallel(model)
        called = torch.compile(model, backend=backend) if way == "whole" else model
        batches = per_rank_batches(lambda generator: torch.randn(3, 4, generator=generator), 0, world.rank)
        training = Training(
            batches, lambda model, batch: model(batch).square().mean(), 1, tolerance=tolerance
        )
        assert_parity(Trainee(DistributedDataParallel(reference)), Trainee(called), training)

    return check


def test_around(check):
    check("around", wrong, engine.fully_shard)


def test_whole(check):
    check("whole", wrong, fully_shard)


def test_one_graph(check):
    check("whole", wrong)


def test_checkpointed(check):
    check("in place", wrong_aot, engine.fully_shard, block=Checkpointed)


def test_backward(check):
    check("in place", wrong_backward)


def test_together(check):
    check("whole", wrong_together)


def test_small(check):
    check("in place", ahead, tolerance=Tolerance(0.0, 0.0))


def test_cases(check, run_subtests):
    run_subtests({"backend": ["eager", wrong]}, lambda backend: check("in place", backend))
