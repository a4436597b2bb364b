"""Checkpoints that ranks crash in: the old one or the new one is there, bit for bit, and never a mixture."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
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


# A saver of forty lines, and what it must not leave out


def write(path, data, is_synced=True):
    aside = path.with_suffix(".tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())
    aside.rename(path)


def save(folder, step, bug=""):
    """Write this rank's part; once all have, rank 0 writes the marker.

    Raises:
        RuntimeError: a rank could not write its part.
    """
    here, rank = folder / str(step), dist.get_rank()
    here.mkdir(exist_ok=True)
    if bug == "marker first" and rank == 0:
        write(here / "done", b"1")
    error = None
    try:
        write(here / f"part-{rank}", bytes([step]) * 64, is_synced=bug != "not synced")
    except OSError as raised:
        error = raised
    if bug != "alone":
        is_saved = torch.tensor([error is None])
        dist.all_reduce(is_saved, dist.ReduceOp.MIN)
        error = error if is_saved.item() else error or OSError("another rank could not write its part")
    if error is not None:
        raise RuntimeError(f"step {step} was not saved") from error
    if bug != "marker first" and rank == 0:
        write(here / "done", b"1")


def load(folder):
    latest = max(int(path.parent.name) for path in folder.glob("*/done"))
    return latest, [
        (folder / str(latest) / f"part-{rank}").read_bytes() for rank in range(dist.get_world_size())
    ]


@pytest.fixture
def sweep_saver(sweep, folder):
    """Hold the saver, with a bug, to the claim."""

    def claim(crash):
        latest, parts = load(folder)
        assert latest == 2 or crash.kind is not None
        assert parts == [bytes([latest]) * 64] * 2

    def sweep_saver(bug, **kinds):
        prepare = partial(save, folder, 1)
        sweep(partial(save, folder, 2, bug), prepare=prepare, then=claim, files=folder, **kinds)

    return sweep_saver


def test_a_marker_that_is_written_last_makes_a_checkpoint_whole(sweep_saver):
    sweep_saver("", kinds=["kill", "all", "power", "fail", "full", "delay", "invisible"])


@pytest.mark.parametrize(
    ("bug", "kind", "what"),
    [
        ("marker first", "kill", "is killed"),
        ("alone", "fail", "rank 1 gets an exception"),
        ("not synced", "power", "lose power: what was not synced is lost at the end"),
    ],
)
def test_a_saver_that_leaves_a_step_out_is_found(sweep_saver, bug, kind, what):
    with pytest.raises(pytest.fail.Exception, match=f"not hold; the smallest: .*{what}"):
        sweep_saver(bug, kinds=[kind])
