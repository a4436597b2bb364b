"""Exceptions of every kind on one rank; skips and expected failures of one rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession

FAULTS = """
import os, sys, threading, unittest
import pytest
if "RANK" in os.environ:
    import torch, torch.distributed as dist

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
    one_fails(world, ValueError("zero \\x00 escape \\x1b[31m lone \\udcff"))

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
    dist.barrier()

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
    dist.barrier()  # in vain

@pytest.fixture
def xfails(world):
    if world.rank == 1:
        pytest.xfail("not yet")

def test_xfail_in_set_up(world, xfails):
    pass

def test_xfail_beside_a_failure(world):
    if world.rank == 1:
        pytest.xfail("not yet")
    raise ValueError("of rank 0")

def test_xfail_on_all(world):
    pytest.xfail("not yet")

@pytest.mark.xfail
def test_marked(world):
    one_fails(world, ValueError("expected"))

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
"""


def test_the_next_test_of_the_file_runs_on_a_healthy_world(session: FaultSession) -> None:
    session.assert_healthy()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("test_unpicklable", "test_faults.Unpicklable: 1 and 2"),
        ("test_mute", "test_faults.Mute: <exception str() failed>"),
        ("test_repr_that_exits", "SystemExit: 4"),
        ("test_huge", "ValueError: begin xxx"),
        ("test_cause", "ValueError: above"),
        ("test_notes", "ValueError: noted"),
        ("test_group", "ExceptionGroup: outer (2 sub-exceptions)"),
        ("test_base", "test_faults.Base: low"),
        ("test_base_group", "BaseExceptionGroup: outer (2 sub-exceptions)"),
        ("test_generator_exit", "GeneratorExit: of no generator"),
        ("test_sys_exit_0", "SystemExit: 0"),
        ("test_sys_exit_text", "SystemExit: a reason"),
        ("test_keyboard_interrupt", "KeyboardInterrupt: pressed"),
        ("test_pytest_exit", "_pytest.outcomes.Exit: enough"),
        ("test_pytest_fail", "Failed: a plain sentence"),
        ("test_binary_text", "ValueError: zero #x00 escape #x1B[31m lone #xDCFF"),  # as XML may have it
    ],
)
def test_an_exception_of_any_kind_is_the_failure_of_its_rank(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert re.match(r"rank 0: (cut off by that at|was in) ", verdict.head()[1])  # where, if there was time
    assert verdict.message.startswith(f"rank 1: {what}")
    assert verdict.seconds < 15  # the deadline is 30


def test_what_an_exception_carries_is_shown(session: FaultSession) -> None:
    assert "The above exception was the direct cause" in session["test_cause"].text
    assert "KeyError: 'deep'" in session["test_cause"].text
    assert "a note on it" in session["test_notes"].text
    for part in ("ValueError: one", "ExceptionGroup: inner (1 sub-exception)", "KeyError: 'two'"):
        assert part in session["test_group"].text
    assert "KeyboardInterrupt: two" in session["test_base_group"].text
    assert "x" * 10_000_000 in session["test_huge"].text or "[" in session["test_huge"].text


def test_a_failure_names_its_line(session: FaultSession) -> None:
    assert f"{session.place('# of one rank')}: Unpicklable" in session["test_unpicklable"].text


def test_a_local_without_a_repr_is_shown_as_pytest_shows_it(session: FaultSession) -> None:
    verdict = session["test_local_without_repr"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "<[RuntimeError('no words') raised in repr()] Mute object at 0x" in verdict.message


@pytest.mark.parametrize(
    ("name", "phase", "what"),
    [
        ("test_interrupt_in_set_up", "setup", "KeyboardInterrupt: early"),
        ("test_interrupt_in_tear_down", "teardown", "KeyboardInterrupt: late"),
        ("test_pytest_exit_in_set_up", "setup", "_pytest.outcomes.Exit: early"),
        ("test_module_fixture", "setup", "ValueError: wide"),
    ],
)
def test_what_a_fixture_of_one_rank_raises_fails_the_phase_it_is_of(
    session: FaultSession, name: str, phase: str, what: str
) -> None:
    assert session[name].outcomes == ["error"]
    assert session[name].head()[0] == "rank 1 of 2 failed"
    assert session[name].message == f'failed on {phase} with "rank 1: {what}"'


def test_a_fixture_that_is_not_there_is_named(session: FaultSession) -> None:
    verdict = session["test_fixture_that_is_not_there"]
    assert verdict.outcomes == ["error"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "fixture 'no_such_fixture' not found" in verdict.text


def test_an_exception_in_a_thread_is_a_warning_as_in_pytest(session: FaultSession) -> None:
    assert session["test_thread"].outcomes == ["passed"]
    assert "PytestUnhandledThreadExceptionWarning: Exception in thread" in session.output


@pytest.mark.parametrize(
    ("name", "what"), [("test_thread", "in a thread"), ("test_unraisable", "in a finaliser")]
)
def test_an_exception_outside_of_the_test_is_a_failure_where_warnings_are_errors(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[f"{name}_as_error"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert f"       ValueError: {what}" in verdict.text


@pytest.mark.parametrize(
    ("name", "outcome", "what"),
    [
        ("test_skip", "failure", "skipped (not here)"),
        ("test_unittest_skip", "failure", "skipped (not here)"),
        ("test_importorskip", "failure", "skipped (could not import 'no_such_module'"),
        ("test_skip_in_set_up", "error", "skipped (not here)"),
        ("test_skip_in_tear_down", "error", "skipped (not here)"),
        ("test_xfail", "failure", "xfailed (not yet)"),
        ("test_xfail_while_the_other_waits", "failure", "xfailed (not yet)"),
        ("test_xfail_in_set_up", "error", "xfailed (not yet)"),
    ],
)
def test_a_rank_that_leaves_the_test_alone_disagrees(
    session: FaultSession, name: str, outcome: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == [outcome]
    assert verdict.head()[0].startswith(f"rank 1 of 2 {what}")
    assert verdict.head()[0].endswith(" and others did not: ranks disagree")


def test_a_rank_that_waits_for_one_that_xfailed_is_shown_where_it_waits(session: FaultSession) -> None:
    head = session["test_xfail_while_the_other_waits"].head()
    assert head[1].startswith("rank 0: was in barrier #")
    assert f"at {session.place('# in vain')}" in head[1]


def test_a_failure_beside_an_xfail_is_the_failure(session: FaultSession) -> None:
    verdict = session["test_xfail_beside_a_failure"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 0 of 2 failed", "rank 1: xfailed (not yet)"]


@pytest.mark.parametrize(
    "name", ["test_xfail_on_all", "test_marked", "test_marked_and_called", "test_marked_by_one_rank"]
)
def test_a_failure_that_is_expected_of_all_ranks_or_of_the_one_is_expected(
    session: FaultSession, name: str
) -> None:
    assert session[name].outcomes == ["skipped"]
    assert f"XFAIL test_faults.py::{name}" in session.output


def test_an_unexpected_failure_beside_an_expected_one_is_a_failure(session: FaultSession) -> None:
    verdict = session["test_expected_and_unexpected"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 0 of 2 failed", "rank 1: failed as expected"]
    assert "KeyError: 'surprise'" in verdict.message
