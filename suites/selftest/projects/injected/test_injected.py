"""Faults that tests inject: each kind, at calls from Python and C++, synchronous and asynchronous ones."""

import ctypes
import time
import unittest
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import lockstep.shm  # noqa: F401
from lockstep import Fault, InjectedFault

BACKENDS = [pytest.param(name, marks=pytest.mark.ranks(2, backend=name)) for name in ("gloo", "shm")]
on_each = pytest.mark.parametrize("backend", BACKENDS)


def total(is_async=False):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        work.wait()
    return tensor


@on_each
def test_delay(world, faults, backend):
    with faults.delay(rank=1, before="all_reduce", nth=2, seconds=0.3) as injected:
        total()
        assert not injected.has_struck or world.rank == 0
        began = time.monotonic()
        total()
        assert time.monotonic() - began >= 0.2
    with faults.delay(rank=0, after="all_reduce", seconds=0.2):
        began = time.monotonic()
        total(is_async=True)
        assert world.rank == 1 or time.monotonic() - began >= 0.2


@on_each
def test_fail(world, faults, backend):
    faults.fail(before="all_reduce", nth=2)
    total()
    with pytest.raises(InjectedFault, match=r"injected before all_reduce #2 \(float32\[3\], 2 ranks\)"):
        total()
    assert total().tolist() == [2, 2, 2]
    with (
        faults.fail(ConnectionError("lost"), after="all_reduce"),
        pytest.raises(ConnectionError, match="lost"),
    ):
        total()
    with faults.fail(TimeoutError, after="all_reduce"):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(TimeoutError, match="injected after all_reduce"):
            work.wait()


@on_each
def test_fail_of_one_rank(world, faults, backend):
    faults.fail(rank=1, before="broadcast", dtype=torch.int64)
    dist.broadcast(torch.ones(2), 0)
    dist.broadcast(torch.ones(2, dtype=torch.int64), 0)


@on_each
def test_kill(world, faults, backend):
    faults.kill(rank=1, before="all_reduce", nth=2)
    total()
    total()


@on_each
def test_stop(world, faults, backend):
    faults.stop(rank=0, before="barrier")
    dist.barrier()


@pytest.mark.ranks(2, timeout=2)
def test_hang(world, faults):
    faults.hang(rank=1, before="all_reduce")
    total()


@on_each
def test_corrupt(world, faults, backend):
    for is_async in (False, True):
        with faults.corrupt(rank=1, op="all_reduce"):
            assert total(is_async).tolist() == ([2, 2, 2] if world.rank == 0 else [4, 2, 2])
        assert total(is_async).tolist() == [2, 2, 2]
    with faults.corrupt(op="all_gather", value=float("nan")):
        pieces = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(pieces, torch.ones(1))
        assert pieces[0].isnan()
        assert pieces[1] == 1
    with faults.corrupt(op="all_reduce"):
        numbers = torch.tensor([[4, 8]])
        dist.all_reduce(numbers)
        assert numbers.tolist() == [[9, 16]]
    with faults.corrupt(op="all_reduce"):
        numbers = torch.ones(2, dtype=torch.bfloat16)
        dist.all_reduce(numbers)
        assert numbers.tolist() == [4, 2]


@on_each
def test_drop(world, faults, backend):
    faults.drop(op="all_reduce", nth=2)
    assert [total(is_async)[0].item() for is_async in (False, False, True)] == [2, 1, 2]
    with faults.drop(op="all_reduce"):
        assert total(is_async=True).tolist() == [1, 1, 1]


@on_each
def test_functional(world, faults, backend):
    group = dist.group.WORLD
    with faults.corrupt(op="all_reduce"):
        assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [4, 2]
    with faults.corrupt(op="all_gather_into_tensor"):
        assert functional.all_gather_tensor(torch.ones(1), 0, group).tolist() == [0.5, 1]
    with faults.fail(before="reduce_scatter_tensor"), pytest.raises(InjectedFault):
        functional.reduce_scatter_tensor(torch.ones(2), "sum", 0, group)


@on_each
@pytest.mark.parametrize("kind", ["fail", "corrupt", "drop", "late"])
def test_ddp(world, faults, backend, kind):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    loss = model(torch.full((1, 2), world.rank + 1.0)).sum()
    match kind:
        case "fail":
            with (
                faults.fail(before="all_reduce"),
                pytest.raises(Exception, match="injected before all_reduce"),
            ):
                loss.backward()
        case "late":
            with faults.fail(after="all_reduce"), pytest.raises(Exception, match="injected after all_reduce"):
                loss.backward()
        case "corrupt":
            with faults.corrupt(op="all_reduce"):
                loss.backward()
            assert model.module.weight.grad.tolist() in ([[3, 1.5]], [[0.75, 1.5]])
        case "drop":
            with faults.drop(op="all_reduce"):
                loss.backward()


@on_each
def test_matching(world, faults, backend):
    group = dist.new_group([0, 1])
    with faults.fail(group=group):
        total()
        with pytest.raises(InjectedFault):
            dist.barrier(group)
    with faults.fail(where=lambda each: each.shapes == ((5,),)):
        total()
        with pytest.raises(InjectedFault):
            dist.all_reduce(torch.ones(5))
    with faults.inject(Fault("fail", rank=1, nth=9), required=False) as injected:
        total()
    assert injected.has_struck == (world.rank == 0)
    dist.barrier(group)
    dist.destroy_process_group(group)


@on_each
def test_temporaries(world, faults, backend):
    with faults.inject(Fault("fail", nth=10**6), required=False):
        for _ in range(300):
            pieces = [torch.zeros(1), torch.zeros(1)]
            dist.all_gather(pieces, torch.ones(1))
    assert pieces == [1, 1]


@on_each
@pytest.mark.skew(seeds=1)
def test_with_skew(world, faults, backend):
    with faults.corrupt(op="all_reduce"):
        assert total(is_async=True).tolist() == [4, 2, 2]
    with faults.fail(before="all_reduce"), pytest.raises(InjectedFault):
        total(is_async=True)


@on_each
def test_waited_for_after_the_injection(world, faults, backend):
    name = dist.group.WORLD.group_name
    operators = torch.ops._c10d_functional
    with faults.inject(Fault("corrupt"), required=False):
        one = operators.all_reduce(torch.ones(2), "sum", name)
    with faults.inject(Fault("corrupt"), required=False):
        several = operators.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", name)
        first = operators.wait_tensor(several[0])
        total()
    assert operators.wait_tensor(one).tolist() == [4, 2]
    assert first.tolist() == [4, 2]
    assert operators.wait_tensor(several[1]).tolist() == [2, 2, 2]


class Mallinfo2(ctypes.Structure):
    """The result of `mallinfo2` of glibc; the fifth is `hblkhd`, the eighth `uordblks`."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def allocated():
    """Return the bytes that are in use, without what the allocator keeps between blocks that are."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = Mallinfo2
    numbers = mallinfo2().numbers
    return numbers[4] + numbers[7]


@on_each
@pytest.mark.skew(seeds=1, milliseconds=0.01)
def test_memory(world, backend):
    for number in range(150):
        tensor = torch.ones(1 << 18)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert work.result()[0] is tensor
        work.wait()
        if number == 5:
            before = allocated()
    assert allocated() - before < 20_000_000  # 2 MB each would be 300


@on_each
def test_polled(world, faults, backend):
    faults.corrupt(op="all_reduce")
    tensor = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            pass
    assert tensor.tolist() == [4, 2]
    assert work.get_future().wait()[0] is tensor


@on_each
def test_source_rank(world, faults, backend):
    with faults.inject(Fault("corrupt", op="recv", rank=1)):
        tensor = torch.ones(2)
        if world.rank == 0:
            dist.send(tensor, 1)
        else:
            assert dist.recv(tensor) == 0
            assert tensor.tolist() == [0.5, 1]


@pytest.mark.ranks(2)
def test_never(world, faults):
    faults.kill(rank=1, before="all_reduce", nth=3)
    total()
    total()
    dist.barrier()


@pytest.mark.ranks(2)
def test_never_in_a_context(world, faults):
    with faults.fail(after="all_reduce", dtype=torch.int64):
        total()


@pytest.mark.ranks(2)
def test_never_waited_for(world, faults):
    with faults.corrupt(op="all_reduce"):
        work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()


@pytest.mark.ranks(2)
def test_never_in_a_fixture_by_name(world, request):
    request.getfixturevalue("faults").kill(rank=1, before="barrier")


class TestOfUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def injecting(self, faults):
        self.faults = faults

    @pytest.mark.ranks(2)
    def test_never_in_unittest(self):
        self.faults.kill(rank=1, before="barrier")

    @pytest.mark.ranks(2)
    def test_failed_in_unittest(self):
        self.faults.kill(rank=1, before="barrier")
        self.fail("its own failure")

    @pytest.mark.ranks(2)
    @pytest.mark.skew(seeds=2)
    def test_skewed_in_unittest(self):
        pass


@pytest.mark.skew(seeds=2)
def test_skewed_without_ranks():
    pass


WRONG = {
    "allreduce": (lambda faults: faults.kill(before="allreduce"), "did you mean all_reduce"),
    "other name": (lambda faults: faults.kill(before="isend"), "isend is recorded as send: write that"),
    "nth": (lambda faults: faults.kill(nth=0), "nth counts from 1"),
    "rank": (lambda faults: faults.kill(rank=2), "the world has ranks 0 to 1"),
    "both": (lambda faults: faults.kill(before="barrier", after="barrier"), "either before= or after="),
    "seconds": (lambda faults: faults.delay(0), "a delay has seconds above 0"),
    "no name": (lambda faults: faults.kill(before=3), "before is the name of an operation, such as"),
    "ever": (lambda faults: faults.delay(float("inf")), "a delay has seconds above 0, at most 1000000"),
    "overflow": (lambda faults: faults.delay(10**400), "a delay has seconds above 0, at most 1000000"),
    "no digits": (lambda faults: faults.kill(nth=10**5000), r"nth=<int .*nth counts from 1"),
    "op": (lambda faults: faults.kill(op="barrier"), "write before= or after= in the place of op="),
    "before": (lambda faults: faults.drop(before="barrier"), "write op= in the place of before="),
    "error": (lambda faults: faults.fail(error=3), "error is an exception"),
    "dtype": (lambda faults: faults.kill(dtype="float32"), "dtype is a dtype, such as torch.float32"),
    "group": (lambda faults: faults.kill(group=0), "group is a process group"),
    "where": (lambda faults: faults.kill(where="in_backward"), "where is a function"),
    "value": (lambda faults: faults.corrupt(value="nan"), "value is a number"),
    "too wide": (lambda faults: faults.corrupt(value=10**400), "value is a number of 64 bits at most"),
    "text": (lambda faults: faults.delay("1"), "seconds is a number"),
    "output": (lambda faults: faults.corrupt(op="barrier"), "barrier has no output"),
    "no text": (lambda faults: faults.expect(3), r"faults.expect\(3\): the text is a part of a report"),
    "no words": (lambda faults: faults.expect(" "), r"faults.expect\(' '\): the text is a part of a report"),
    "no time": (
        lambda faults: faults.expect("died", within="2"),
        "within='2'.*: within is a number of seconds above 0",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_wrong(world, faults, name):
    inject, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        inject(faults)


@pytest.mark.ranks(2, backend="fake", as_rank=0)
def test_fake(world, faults):
    pass


@pytest.mark.ranks(2, backend="fake", as_rank=0)
def test_fake_rebuild(world):
    with pytest.raises(RuntimeError, match="a fake world is one process"):
        world.rebuild()


@pytest.mark.ranks(1, group=False)
def test_rebuild_without_a_group(world):
    with pytest.raises(RuntimeError, match=r"starts without a default process group \(group=False\)"):
        world.rebuild()


class Reduced(nn.Module):
    def forward(self, value):
        dist.all_reduce(value.detach())
        value.register_hook(lambda gradient: dist.all_reduce(gradient))
        return value


@pytest.mark.ranks(2)
def test_in_a_module(world, faults):
    for nth in (1, 2):
        faults.delay(rank=1, before="all_reduce", nth=nth, seconds=0.001)
    nn.Sequential(nn.Linear(2, 2), nn.Sequential(Reduced()))(torch.ones(1, 2)).sum().backward()
    raise AssertionError("a claim of this test")
