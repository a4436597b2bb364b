"""Compiled models learn what others learn, in as few graphs, and compile in their first step alone."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import Trainee, Training, assert_parity, train
from lockstep.conformance import Capability, Precision, require

pytestmark = [
    pytest.mark.ranks(2),
    # torch's compiler raises these, and hides them, where warnings are no errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

WAYS = ("whole", "around units", "blocks in place")


class Block(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.widen, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.checkpoints = checkpoints

    def forward(self, x):
        if self.checkpoints:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x):
        return self.narrow(self.widen(self.norm(x)).relu())


class Blocks(nn.Module):
    units = (Block,)

    def __init__(self, checkpoints=False):
        super().__init__()
        self.first = nn.Linear(8, 8)  # so that what blocks get requires gradients, in the first of them, too
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(front, way=None, backend="aot_eager", checkpoints=False, **spec):
    """Return a sharded model, and how it is called: compiled in one of the WAYS, or not at all."""
    torch.manual_seed(0)
    bare = Blocks(checkpoints)
    if way == "blocks in place":
        for block in bare.blocks:
            block.compile(backend=backend)
    model = front.shard(bare, **spec)
    if way == "around units":
        blocks = front.unwrapped(model).blocks
        for index, block in enumerate(blocks):
            blocks[index] = torch.compile(block, backend=backend)
    return model, torch.compile(model, backend=backend) if way == "whole" else model


def trainee(front, *args, **kwargs):
    model, called = sharded(front, *args, **kwargs)
    return Trainee(
        called,
        full_parameters=lambda _: front.full_parameters(model),
        backward=lambda _, loss: front.backward(model, loss),
        optimizer=lambda _, make: front.optimizer(model, make),
    )


@pytest.fixture
def training(batches):
    inputs = batches(lambda generator: torch.randn(4, 8, generator=generator))
    return Training(inputs, lambda model, batch: model(batch).float().square().mean(), steps=3)


SETTINGS = {
    "plain": {},
    "checkpoints": {"checkpoints": True},
    "bf16": {"precision": Precision(torch.bfloat16, torch.float32)},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_compiled_model_learns_what_others_learn(front, training, compiles, setting, run_subtests):
    """As without the compiler: losses and parameters, names included."""
    if "precision" in SETTINGS[setting]:
        require(front, Capability.MIXED_PRECISION)
    reference = train(trainee(front, **SETTINGS[setting]), training)
    before = len(compiles.frames)

    def claim(way):
        assert_parity(reference, trainee(front, way, **SETTINGS[setting]), training)
        assert len(compiles.frames) > before

    run_subtests({"way": WAYS}, claim)


def test_no_step_after_the_first_compiles_anything(front, training, compiles, run_subtests):
    def claim(way):
        model, called = sharded(front, way)
        optimizer = front.optimizer(model, training.optimizer)

        def step(number):
            front.backward(model, training.loss(called, training.batches(number)))
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        with compiles.assert_nothing_compiled():
            step(1)
            step(2)

    run_subtests({"way": WAYS}, claim)


@pytest.mark.parametrize("way", WAYS)
def test_no_frame_is_compiled_twice(front, training, compiles, way):
    train(trainee(front, way), training)
    assert compiles.graphs
    compiles.assert_none_recompiled()


@pytest.mark.parametrize("way", ["around units", "blocks in place"])
def test_blocks_have_one_graph_without_a_break(front, training, compiles, way):
    """All blocks share it, as their code is the same, and whatever is around their forwards is not in it."""
    model, called = sharded(front, way)
    front.backward(model, training.loss(called, training.batches(0)))
    assert [frame.function for frame in compiles.graphs] == ["forward"]
    assert not compiles.breaks


def test_the_whole_model_breaks_at_its_units_alone(front, training, compiles):
    model, called = sharded(front, "whole")
    front.backward(model, training.loss(called, training.batches(0)))
    here = f"{__file__.rpartition('/')[2]}:"
    assert all(here in found.line for found in compiles.breaks), compiles.breaks
    assert len({found.line for found in compiles.breaks}) <= 1  # where the model calls its blocks
    assert all(here in frame.line for frame in compiles.graphs), compiles.graphs


@pytest.mark.inductor
@pytest.mark.parametrize("way", WAYS)
def test_inductors_code_learns_what_others_learn(front, training, compiles, way):
    compiles.require_compiler()
    reference = train(trainee(front), training)
    assert_parity(reference, trainee(front, way, backend="inductor"), training)
    assert any(frame.caches for frame in compiles.graphs)
