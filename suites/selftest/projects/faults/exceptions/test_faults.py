"""Exceptions of every kind on one rank; skips and expected failures of one rank."""

import os
import sys
import threading
import time
import unittest

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def one_fails(world, error):
    if world.rank == 1:
        raise error  # of one rank
    dist.barrier()


# What is raised


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


def test_unpicklable(world):
    one_fails(world, Unpicklable(1, 2))


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def test_mute(world):
    one_fails(world, Mute("x"))


class Leaves(Exception):
    def __str__(self):
        raise SystemExit(4)

    __repr__ = __str__


def test_repr_that_exits(world):
    one_fails(world, Leaves("x"))


def test_local_without_repr(world):
    local = Mute()
    assert world.rank == 0 or local == 5


def show(world, weight):
    assert world.rank == 0


def test_argument_that_was_freed(world):
    weight = torch.ones(4)
    weight.untyped_storage().resize_(0)
    show(world, weight)


def test_huge(world):
    one_fails(world, ValueError("begin " + "x" * 10_000_000 + " end"))


def test_cause(world):
    try:
        raise KeyError("deep")
    except KeyError as error:
        if world.rank == 1:
            raise ValueError("above") from error
    dist.barrier()


def test_notes(world):
    error = ValueError("noted")
    error.add_note("a note on it")
    one_fails(world, error)


def test_group(world):
    inner = ExceptionGroup("inner", [KeyError("two")])
    one_fails(world, ExceptionGroup("outer", [ValueError("one"), inner]))


class Base(BaseException):
    pass


def test_base(world):
    one_fails(world, Base("low"))


def test_base_group(world):
    one_fails(world, BaseExceptionGroup("outer", [KeyError("one"), KeyboardInterrupt("two")]))


def test_generator_exit(world):
    one_fails(world, GeneratorExit("of no generator"))


def test_sys_exit_0(world):
    if world.rank == 1:
        sys.exit(0)
    dist.barrier()


def test_sys_exit_text(world):
    if world.rank == 1:
        sys.exit("a reason")
    dist.barrier()


def test_keyboard_interrupt(world):
    one_fails(world, KeyboardInterrupt("pressed"))


def test_pytest_exit(world):
    if world.rank == 1:
        pytest.exit("enough", returncode=3)
    dist.barrier()


def test_pytest_fail(world):
    if world.rank == 1:
        pytest.fail("a plain sentence", pytrace=False)
    dist.barrier()


def test_binary_text(world):
    one_fails(world, ValueError("zero \x00 escape \x1b[31m lone \udcff"))


# Where it is raised


def in_phase(error, world, late):
    yield from [None] if late else []
    if world.rank == 1:
        raise error
    dist.barrier()
    yield from [] if late else [None]


@pytest.fixture
def interrupts_set_up(world):
    yield from in_phase(KeyboardInterrupt("early"), world, late=False)


def test_interrupt_in_set_up(interrupts_set_up):
    pass


@pytest.fixture
def interrupts_tear_down(world):
    yield from in_phase(KeyboardInterrupt("late"), world, late=True)


def test_interrupt_in_tear_down(interrupts_tear_down):
    pass


@pytest.fixture
def exits_set_up(world):
    yield from in_phase(pytest.exit.Exception("early"), world, late=False)


def test_pytest_exit_in_set_up(exits_set_up):
    pass


@pytest.fixture(scope="module")
def of_the_module(world):
    if world.rank == 1:
        raise ValueError("wide")
    dist.barrier()


def test_module_fixture(of_the_module):
    pass


@pytest.fixture
def of_one_rank(world, request):
    if world.rank == 1:
        request.getfixturevalue("no_such_fixture")
    dist.barrier()


def test_fixture_that_is_not_there(of_one_rank):
    pass


# Threads and finalisers


def raises_in_a_thread(world):
    def run():
        raise ValueError("in a thread")

    if world.rank == 1:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def test_thread(world):
    raises_in_a_thread(world)


@pytest.mark.filterwarnings("error")
def test_thread_as_error(world):
    raises_in_a_thread(world)


class Unraisable:
    def __del__(self):
        raise ValueError("in a finaliser")


@pytest.mark.filterwarnings("error")
def test_unraisable_as_error(world):
    if world.rank == 1:
        Unraisable()


# Ranks that disagree on whether the test is one


def test_skip(world):
    if world.rank == 1:
        pytest.skip("not here")
    dist.barrier()  # never joined


def test_unittest_skip(world):
    if world.rank == 1:
        raise unittest.SkipTest("not here")


def test_importorskip(world):
    if world.rank == 1:
        pytest.importorskip("no_such_module")


@pytest.fixture
def skips(world):
    if world.rank == 1:
        pytest.skip("not here")


def test_skip_in_set_up(world, skips):
    pass


@pytest.fixture
def skips_late(world):
    yield
    if world.rank == 1:
        pytest.skip("not here")


def test_skip_in_tear_down(world, skips_late):
    pass


def test_xfail(world):
    if world.rank == 1:
        pytest.xfail("not yet")


def test_xfail_while_the_other_waits(world):
    if world.rank == 1:
        pytest.xfail("not yet")
    dist.barrier()  # never returns


@pytest.fixture
def xfails(world):
    if world.rank == 1:
        pytest.xfail("not yet")


def test_xfail_in_set_up(world, xfails):
    pass


def test_xfail_and_failure(world):
    if world.rank == 1:
        pytest.xfail("not yet")
    raise ValueError("of rank 0")


def test_xfail_on_all(world):
    pytest.xfail("not yet")


@pytest.mark.xfail(raises=ValueError, strict=True)
def test_marked(world):
    one_fails(world, ValueError("expected"))


@pytest.mark.xfail(raises=ValueError, strict=True)
def test_marked_and_late_on_one_rank(world):
    if world.rank == 1:
        time.sleep(1)  # longer than ranks are given once another has failed
        raise ValueError("expected")


@pytest.mark.xfail
def test_marked_and_called(world):
    if world.rank == 1:
        pytest.xfail("not yet")


def test_marked_by_one_rank(world, request):
    if world.rank == 1:
        request.applymarker(pytest.mark.xfail)
    one_fails(world, ValueError("expected"))


@pytest.mark.xfail(raises=ValueError)
def test_expected_and_unexpected(world):
    raise [KeyError("surprise"), ValueError("expected")][world.rank]
