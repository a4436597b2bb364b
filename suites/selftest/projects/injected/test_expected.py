"""Faults that tests expect, and what they do after them."""

import gc
import unittest

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep.shm  # noqa: F401
from lockstep.engine import FullyShardedDataParallel

BACKENDS = ["gloo", "shm"]
on_2 = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.ranks(2, backend=name)) for name in BACKENDS]
)
on_3 = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.ranks(3, backend=name)) for name in BACKENDS]
)


def total(*groups):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, *groups)
    return tensor.tolist()


@on_2
def test_kill(world, faults, backend):
    faults.kill(rank=1, before="all_reduce", nth=2)
    with faults.expect("rank 1 of 2 died: SIGKILL") as seen:
        total()
        total()
    assert world.rank == 0
    assert isinstance(seen.error, RuntimeError)
    assert 0 <= seen.seconds < 30
    assert seen.cause == "rank 1 of 2 died: SIGKILL"


@on_3
def test_rebuild(world, faults, backend, run_subtests):
    faults.kill(rank=1, before="barrier")
    with faults.expect("rank 1 of 3 died: SIGKILL"):
        total()
        dist.barrier()
    new = world.rebuild()
    assert (new.rank, new.size, new.old_ranks) == (world.rank // 2, 2, (0, 2))
    assert total() == [2, 2, 2]
    assert new.gather(world.rank) == [0, 2]
    group = dist.new_group([0, 1])
    assert total(dist.ReduceOp.SUM, group) == [2, 2, 2]
    dist.barrier(group)
    dist.destroy_process_group(group)
    run_subtests({"value": [1, 2]}, new.assert_same)


@on_3
def test_stop(world, faults, backend):
    faults.stop(rank=0, before="all_reduce")
    with faults.expect("rank 0 did not reach: it is stopped") as seen:
        total()
    assert "wait in all_reduce #1" in seen.cause
    new = world.rebuild()
    assert new.gather(new.old_ranks[new.rank]) == [1, 2]


@on_2
def test_hang(world, faults, backend):
    faults.hang(rank=1, before="all_reduce")
    with faults.expect("it is in an injected hang at test_expected.py", within=0.5) as seen:
        total()
    assert seen.seconds >= 0.5
    assert world.rebuild().size == 1


@on_2
def test_fail(world, faults, backend):
    faults.fail(ValueError("broken disk"), rank=1, before="all_reduce")
    with faults.expect("rank 1 of 2 failed: ValueError: broken disk") as seen:
        total()
    assert isinstance(seen.error, ValueError) == (world.rank == 1)
    assert seen.cause == "rank 1 of 2 failed: ValueError: broken disk"
    assert world.rebuild().gather(world.rank) == [0, 1]


@pytest.fixture
def stay_connected(faults, monkeypatch):
    """Let ranks close no connection when they fail: a collective with them never ends, as one of gloo may."""
    monkeypatch.setattr("lockstep.features.injection.lost_peers.GIVES_UP_AFTER", 0.5)
    monkeypatch.setattr(faults._rank.group, "abort", lambda: None)
    return monkeypatch


@pytest.mark.ranks(2)
def test_collectives_without_end(world, faults, stay_connected):
    text = "gloo: Connection closed by peer: {} did not end within 0.5 s of the loss of rank 1"
    message, part = torch.full((1,), float(world.rank)), torch.zeros(1)
    with faults.expect("rank 1 of 2 failed: ValueError") as seen:
        dist.send(message, 1) if world.rank == 0 else dist.recv(message, 0)
        dist.reduce_scatter_tensor(part, torch.ones(2), dist.ReduceOp.SUM)
        assert (message.item(), part.item()) == (0, 2)
        if world.rank == 1:
            raise ValueError
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(RuntimeError) as raised:
            work.wait()
        assert str(raised.value) == text.format("all_reduce #3 (float32[3], 2 ranks)")
        dist.reduce_scatter_tensor(part, torch.ones(2))
    if world.rank == 0:
        assert str(seen.error) == text.format("reduce_scatter_tensor #4 (float32[2], 2 ranks)")
    stay_connected.undo()
    assert world.rebuild().gather(world.rank) == [0, 1]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError


@pytest.mark.ranks(2)
def test_ddp_without_end(world, faults, stay_connected):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with faults.expect("rank 1 of 2 failed: ValueError") as seen:
        outputs = model(torch.ones(1, 2))
        (Fails.apply(outputs) if world.rank == 1 else outputs).sum().backward()
    if world.rank == 0:  # which waits for the future of a handle
        assert "did not end within 0.5 s of the loss of rank 1" in str(seen.error)
    stay_connected.undo()
    assert world.rebuild().gather(world.rank) == [0, 1]


@pytest.mark.ranks(2)
def test_group_that_never_ends(world, faults, stay_connected):
    groups = [dist.group.WORLD]
    if world.rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    new = world.rebuild()
    if world.rank == 0:
        groups.clear()  # its destructor would wait for the collective
        gc.collect()
    assert new.gather(world.rank) == [0, 1]


@on_2
def test_two_after_each_other(world, faults, backend):
    with faults.fail(rank=0, before="barrier"), faults.expect("failed: InjectedFault"):
        dist.barrier()
    new = world.rebuild()
    assert world.gather(world.rank) == [0, 1]  # no rank has died: the fixture is as good as the new one
    faults.kill(rank=0, before="barrier")
    with faults.expect("rank 0 of 2 died: SIGKILL"):
        dist.barrier()
    assert (world.rank, new.rank, new.rebuild().rank) == (1, 1, 0)
    world.barrier()
    for communicate in (new.mesh, lambda: new.gather(1), lambda: new.assert_same(1)):
        with pytest.raises(RuntimeError, match=r"use the world that rebuild\(\) returned"):
            communicate()


@on_2
def test_without_an_error(world, faults, backend):
    faults.kill(rank=1, before="barrier")
    with faults.expect("rank 1 of 2 died: SIGKILL") as seen:
        if world.rank == 1:
            dist.barrier()
    assert (seen.error, seen.cause) == (None, "rank 1 of 2 died: SIGKILL")


@pytest.mark.ranks(3)
class TestUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def on_ranks(self, world, faults):
        self.world, self.faults = world, faults

    def test_in_unittest(self):
        self.faults.kill(rank=1, before="all_reduce")
        with self.faults.expect("rank 1 of 3 died: SIGKILL"):
            total()
        self.assertEqual(self.world.rebuild().old_ranks, (0, 2))
        self.assertEqual(total(), [2, 2, 2])


class TestWrong:
    @on_2
    def test_other_words(self, world, faults, backend):
        faults.kill(rank=1, before="all_reduce")
        with faults.expect("rank 0 of 2 died: SIGKILL"):
            total()

    @on_2
    def test_nothing(self, world, faults, backend):
        with faults.expect("rank 1 of 2 died: SIGKILL"):
            total()

    @on_2
    def test_an_assertion(self, world, faults, backend):
        faults.kill(rank=1, before="all_reduce")
        with faults.expect("rank 1 of 2 died: SIGKILL"):
            assert world.rank == 1, "a claim of this test"
            total()

    @on_2
    def test_an_error_of_its_own(self, world, faults, backend):
        faults.kill(rank=1, before="all_reduce")
        with faults.expect("rank 1 of 2 died: SIGKILL"):
            if world.rank == 0:
                raise KeyError("own")
            total()

    @on_2
    def test_failure_after_it(self, world, faults, backend):
        faults.kill(rank=1, before="all_reduce")
        with faults.expect("rank 1 of 2 died: SIGKILL"):
            total()
        assert world.rebuild().size == 3

    @on_3
    def test_a_case_after_it(self, world, faults, backend, run_subtests):
        faults.kill(rank=1, before="all_reduce")
        with faults.expect("rank 1 of 3 died: SIGKILL"):
            total()
        new = world.rebuild()

        def claim(value, again):
            assert new.gather(value + new.rank) == [value, 1]

        run_subtests({"value": [0, 5], "again": [1, 2]}, claim)

    @on_2
    def test_only_one_rebuilds(self, world, faults, backend):
        if world.rank == 0:
            world.rebuild()

    @on_2
    def test_all_die(self, world, faults, backend):
        faults.kill(before="all_reduce")
        with faults.expect("died: SIGKILL"):
            total()


@pytest.mark.parametrize("turn", ["fails", "next"])
@on_2
def test_all_fail(world, faults, backend, turn):
    if turn == "next":
        assert total() == [2, 2, 2]
        return
    faults.fail(before="all_reduce")
    with faults.expect("InjectedFault"):
        total()


@on_2
def test_healthy(world, backend):
    assert total() == [2, 2, 2]


def step(world, model, optimizer, number):
    torch.manual_seed(10 * number + world.rank)
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def sharded(state=None):
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)))
    if state is not None:
        model.load_state_dict(state)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@on_3
def test_training(world, faults, backend, pytestconfig):
    model, optimizer = sharded()
    for number in range(3):
        step(world, model, optimizer, number)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    faults.kill(rank=1, where=lambda collective: collective.in_backward)
    with faults.expect("rank 1 of 3 died: SIGKILL"):
        step(world, model, optimizer, 3)
    world = world.rebuild()
    model, optimizer = sharded(state)
    losses = world.gather([step(world, model, optimizer, number) for number in range(3, 6)])
    if world.rank == 0:
        torch.save((state, losses), pytestconfig.rootpath / f"{backend}.pt")


@on_2
def test_training_undisturbed(world, backend, pytestconfig):
    state, losses = torch.load(pytestconfig.rootpath / f"{backend}.pt")
    model, optimizer = sharded(state)
    assert world.gather([step(world, model, optimizer, number) for number in range(3, 6)]) == losses
