"""Checkpoints that ranks crash in: the old one or the new one is there, bit for bit, and never a mixture."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import ShardSpec

pytestmark = pytest.mark.ranks(2)

momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture
def folder(world):
    path = world.shared_tmp_path / "checkpoints"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def train(world, engine):
    """Make a model and its optimizer that have trained some steps."""

    def train(steps):
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(world.device)
        model = engine.shard(bare, ShardSpec(units=("0",), device=world.device))
        optimizer = engine.optimizer(model, momentum)
        for number in range(steps):
            batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(number)).to(world.device)
            optimizer.zero_grad()
            engine.backward(model, model(batch).square().mean())
            optimizer.step()
        return model, optimizer

    return train


@pytest.mark.inside
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_a_checkpoint_of_torch_is_whole_or_absent(sweep, train, states, folder, kind, is_async):
    expected = {steps: states.values(*train(steps)) for steps in (1, 2)}
    trained = []

    def write(steps, both):
        state, path = states.all(*both, kind), folder / str(steps)
        if is_async:
            dcp.async_save(state, checkpoint_id=path).result()
        else:
            dcp.save(state, checkpoint_id=path)

    def prepare():
        dcp.save(states.all(*train(1), kind), checkpoint_id=folder / "1")
        trained[:] = train(2)

    def claim(crash):
        latest = max(int(path.parent.name) for path in folder.glob("*/.metadata"))
        assert latest == 2 or crash.kind is not None
        resumed = train(3)
        state = states.all(*resumed, kind)
        dcp.load(state, checkpoint_id=folder / str(latest))
        states.load_all(*resumed, state, kind)
        assert_named_close(states.values(*resumed), expected[latest], EXACT)

    sweep(lambda: write(2, trained), prepare=prepare, then=claim, files=folder)
