"""The fixture `faults`: what is injected, what a report says of it, and what is refused."""

from __future__ import annotations

import datetime
import functools
import re
import threading
from collections.abc import Callable
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lockstep.features.injection.faults import Fault, corrupt
from lockstep.features.injection.injector import Faults, Injection
from lockstep.features.injection.work import Watched
from suites.selftest.project import PROJECTS, Run, line_of

PROJECT = "injected"
OPTIONS = ("test_injected.py",)
INI = "filterwarnings = ignore::FutureWarning"
FILE = PROJECTS / "injected" / "test_injected.py"
ON_EACH = pytest.mark.parametrize("backend", ["gloo", "shm"])


RIGHT = [
    *("test_delay", "test_fail", "test_corrupt", "test_drop", "test_functional", "test_matching"),
    *("test_temporaries", "test_with_skew", "test_waited_for_after_the_injection", "test_memory"),
    *("test_polled", "test_source_rank"),
]


@ON_EACH
@pytest.mark.parametrize("name", RIGHT)
def test_faults_strike_where_they_match(run: Run, name: str, backend: str) -> None:
    assert run.outcome(f"{name}[{backend}]") == "passed", run.output


@ON_EACH
@pytest.mark.parametrize("kind", ["fail", "late", "corrupt", "drop"])
def test_faults_strike_in_the_reducer_of_ddp(run: Run, kind: str, backend: str) -> None:
    assert run.outcome(f"test_ddp[{kind}-{backend}]") == "passed", run.output


VERDICTS = {
    "test_kill": (
        "rank 1 of 2 died: SIGKILL",
        "injected by the test: rank 1 is killed (SIGKILL) before all_reduce #2 (float32[3], 2 ranks) at ",
    ),
    "test_stop": (
        "rank 1 waits in barrier #1, which rank 0 did not reach: it is stopped",
        "injected by the test: rank 0 is stopped (SIGSTOP) before barrier #1 (2 ranks) at ",
    ),
    "test_fail_of_one_rank": (
        "rank 1 of 2 failed",
        "injected by the test: rank 1 raises InjectedFault before broadcast #1 (2 ranks) at ",
    ),
}


@ON_EACH
@pytest.mark.parametrize("name", VERDICTS)
def test_a_report_says_what_was_injected(run: Run, name: str, backend: str) -> None:
    verdict, cause = VERDICTS[name]
    text = run.failure(f"{name}[{backend}]")
    assert text.startswith(verdict)
    assert cause in text


def test_a_hang_names_the_injection(run: Run) -> None:
    text = run.failure("test_hang")
    place = f"test_injected.py:{line_of('work = dist.all_reduce(tensor, async_op=is_async)', FILE)} in total"
    assert f"which rank 1 never reached: it is in an injected hang at {place}" in text
    assert "in injected_hang" in text


NEVER = {
    "test_never": 'faults.kill(rank=1, before="all_reduce", nth=3) never struck: 2 collectives have matched; '
    "since it was injected, rank 1 ran all_reduce #1 (float32[3], 2 ranks), all_reduce #2 (float32[3], ",
    "test_never_in_a_context": 'faults.fail(after="all_reduce", nth=1, dtype=torch.int64) never struck: no '
    "collective has matched; since it was injected, rank 0 ran all_reduce #1 (float32[3], 2 ranks)",
    "test_never_in_a_fixture_by_name": 'faults.kill(rank=1, before="barrier", nth=1) never struck: no',
    "test_never_in_unittest": 'faults.kill(rank=1, before="barrier", nth=1) never struck: no',
    "test_never_waited_for": "never struck: its collective was begun, and its handle never waited for",
}


@pytest.mark.parametrize("name", NEVER)
def test_a_fault_that_never_struck_fails_its_test(run: Run, name: str) -> None:
    assert NEVER[name] in run.failure(name)


def test_a_failure_in_unittest_stays_what_it_is(run: Run) -> None:
    text = run.failure("test_failed_in_unittest")
    assert "its own failure" in text
    assert "never struck" not in text


@pytest.mark.parametrize("name", ["test_skewed_in_unittest", "test_skewed_without_ranks"])
def test_a_mark_that_would_do_nothing_is_refused(run: Run, name: str) -> None:
    assert "skew: the " in run.failure(name, "error")


WRONG = (
    "allreduce",
    "other name",
    "nth",
    "rank",
    "both",
    "seconds",
    "no name",
    "ever",
    "overflow",
    "no digits",
    "op",
    "before",
    "error",
    "dtype",
    "group",
    "where",
    "value",
    "too wide",
    "text",
    "output",
    "no text",
    "no words",
    "no time",
)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_fault_is_refused(run: Run, name: str) -> None:
    assert run.outcome(f"test_wrong[{name}]") == "passed", run.output


MOMENT = "rank, nth, group, dtype, where, before, after"
A_FAULT = 'it takes values such as Fault("kill", rank=1, before="all_reduce")'
MISUSED: list[tuple[Callable[[Faults], object], str]] = [
    (
        lambda faults: faults.kill(signal=9),  # type: ignore[call-arg]
        f"faults.kill(signal=9): there is no argument signal; faults.kill takes {MOMENT}",
    ),
    (
        lambda faults: faults.kill(ranks=1),  # type: ignore[call-arg]
        f"faults.kill(ranks=1): there is no argument ranks; faults.kill takes {MOMENT}",
    ),
    (
        lambda faults: faults.delay(1, until=2),  # type: ignore[call-arg]
        f"faults.delay(until=2): there is no argument until; faults.delay takes seconds, {MOMENT}",
    ),
    (
        lambda faults: faults.corrupt(ranks=1),  # type: ignore[call-arg]
        "faults.corrupt(ranks=1): there is no argument ranks; faults.corrupt takes value, rank, nth, group, "
        "dtype, where, op",
    ),
    (
        lambda faults: faults.delay(before=3),  # type: ignore[arg-type]
        "faults.delay(before=3, nth=1): before is the name of an operation, such as 'all_reduce'",
    ),
    (
        lambda faults: faults.delay(before="all_reduce"),
        'faults.delay(before="all_reduce", nth=1): a delay has seconds above 0, at most 1000000, and '
        "nothing else has",
    ),
    (
        lambda faults: faults.drop(op=["barrier"]),  # type: ignore[arg-type]
        "faults.drop(op=['barrier'], nth=1): op is the name of an operation, such as 'all_reduce'",
    ),
    (
        lambda faults: Fault("lose", 1),  # type: ignore[arg-type]
        "faults.lose(rank=1, nth=1): the kinds of faults are delay, fail, kill, stop, hang, corrupt, drop",
    ),
    (lambda faults: Fault("kill", value=1), "faults.kill(nth=1, value=1): value= is for faults.corrupt"),
    (
        lambda faults: Fault("drop", error=OSError),
        "faults.drop(nth=1, error=OSError): error= is for faults.fail",
    ),
    (
        lambda faults: faults.kill(op="barrier"),  # type: ignore[call-arg]
        'faults.kill(op="barrier", nth=1): write before= or after= in the place of op=',
    ),
    (
        lambda faults: Fault("drop", before="barrier"),
        'faults.drop(before="barrier", nth=1): write op= in the place of before=',
    ),
    (
        lambda faults: Fault("kill", before="barrier", after="send"),
        'faults.kill(before="barrier", after="send", nth=1): either before= or after=',
    ),
    (
        lambda faults: Fault("kill", before="isend"),
        'faults.kill(before="isend", nth=1): isend is recorded as send: write that',
    ),
    (
        lambda faults: Fault("corrupt", op="send"),
        'faults.corrupt(op="send", nth=1): send has no output',
    ),
    (
        lambda faults: Fault("corrupt", value=2**64),
        f"faults.corrupt(nth=1, value={2**64}): value is a number of 64 bits at most",
    ),
    (lambda faults: Fault("kill", nth=0), "faults.kill(nth=0): nth counts from 1"),
    (
        lambda faults: Fault("kill", -1),
        "faults.kill(rank=-1, nth=1): rank is the number of a rank, or None for every one",
    ),
    (
        lambda faults: Fault("kill", seconds=1),
        "faults.kill(nth=1, seconds=1): a delay has seconds above 0, at most 1000000, and nothing else has",
    ),
    (
        lambda faults: Fault("delay", seconds=True),
        "faults.delay(nth=1, seconds=True): seconds is a number of seconds",
    ),
    (
        lambda faults: Fault("fail", error=int),  # type: ignore[arg-type]
        "faults.fail(nth=1, error=int): error is an exception or a class of one",
    ),
    (lambda faults: faults.inject("x"), f"faults.inject('x'): {A_FAULT}"),  # type: ignore[arg-type]
    (lambda faults: faults.inject(None), f"faults.inject(None): {A_FAULT}"),  # type: ignore[arg-type]
    (
        lambda faults: faults.inject([]),  # type: ignore[arg-type]
        f"faults.inject([]): {A_FAULT}; write faults.inject(*schedule)",
    ),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSED, ids=[message for _, message in MISUSED])
def test_a_call_that_makes_no_fault_names_the_method(
    misuse: Callable[[Faults], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        misuse(Faults(Mock(), Mock(), Mock()))


AFTER_A_DEATH: list[tuple[Fault, type[Exception], str]] = [
    (
        Fault("delay", 1, seconds=1),
        ValueError,
        "faults.delay(rank=1, nth=1, seconds=1): rank 1 has died; rank= is a number of the fixture `world`, "
        "of which these are left: 0, 2",
    ),
    (
        Fault("hang", 2),
        RuntimeError,
        "faults.hang(rank=2, nth=1): a rank has died, and no standstill is found before the others have "
        "called world.rebuild()",
    ),
]


@pytest.mark.parametrize(("fault", "kind", "message"), AFTER_A_DEATH, ids=["dead", "hang"])
def test_a_fault_that_makes_no_sense_after_a_death_is_refused(
    fault: Fault, kind: type[Exception], message: str
) -> None:
    faults = Faults(Mock(dead={1}, left_behind=set()), Mock(size=3, rank=0), Mock())
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        faults.inject(fault)


def test_a_rank_may_hang_in_a_world_without_the_dead_one() -> None:
    faults = Faults(Mock(dead={1}, left_behind={1}), Mock(size=3, rank=0), Mock())
    assert isinstance(faults.inject(Fault("hang", 2)), Injection)


def test_a_rank_may_fail_after_the_death_of_another() -> None:
    faults = Faults(Mock(dead={1}, left_behind=set()), Mock(size=3, rank=0), Mock())
    assert isinstance(faults.inject(Fault("fail", 2)), Injection)


def test_an_example_needs_all_ranks() -> None:
    faults = Faults(Mock(dead={2, 1}), Mock(size=3, rank=0), Mock())
    example: Any = faults.example()
    with pytest.raises(pytest.fail.Exception, match=r"^rank 1, 2 died, as the test expects"):
        example.__enter__()


def test_a_value_that_a_dtype_does_not_have_is_refused() -> None:
    numbers = torch.tensor([4, 8])
    with pytest.raises(ValueError, match=r"^faults.corrupt\(value=0.5\): the output is of int64$"):
        corrupt([numbers], 0.5)
    corrupt([torch.ones(0), numbers], 3.0)
    assert numbers.tolist() == [3, 8]


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        (torch.float64, 3.0, 6.0),
        (torch.float32, 3.0, 6.0),
        (torch.float16, 3.0, 6.0),
        (torch.bfloat16, 3.0, 6.0),
        (torch.float32, 4.0, 2.0),
        (torch.complex64, 3.0, 6.0),
        (torch.int64, 6, 7),
        (torch.uint8, 7, 6),
    ],
)
def test_a_flipped_bit_doubles_or_halves_a_float(dtype: torch.dtype, before: Any, after: Any) -> None:
    tensor = torch.full((2, 2), before, dtype=dtype)
    corrupt([torch.ones(0), tensor, torch.ones(1)], None)
    assert tensor.tolist() == [[after, before], [before, before]]


def test_a_fault_says_how_long_a_rank_waits_and_what_it_raises() -> None:
    assert str(Fault("delay", seconds=1)) == "every rank waits 1 s before collective #1"
    assert str(Fault("delay", seconds=0.999)) == "every rank waits 999 ms before collective #1"
    assert str(Fault("fail", 0, after="send", error=OSError(1))) == "rank 0 raises OSError after send #1"
    assert str(Fault("fail", dtype=torch.int8)) == (
        "every rank raises InjectedFault before collective #1 with int8"
    )
    printed: list[str] = []
    Fault("kill", 0)._repr_pretty_(Mock(text=printed.append), cycle=False)
    assert printed == ["faults.kill(rank=0, nth=1)"]


def test_a_fake_world_is_refused(run: Run) -> None:
    text = run.failure("test_fake", "error")
    assert "the fixture `faults` has nothing to disturb in a fake world" in text


@pytest.mark.parametrize("name", ["test_fake_rebuild", "test_rebuild_without_a_group"])
def test_a_world_without_a_group_is_not_rebuilt(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed", run.output


def test_a_report_names_the_module_or_backward(run: Run) -> None:
    text = run.failure("test_in_a_module")
    what = "injected by the test: rank 1 waits 1 ms before all_reduce"
    assert f"{what} #1 (float32[1, 2], 2 ranks) in forward of 1.0 at test_injected.py:" in text
    assert f"{what} #2 (float32[1, 2], 2 ranks) in backward at test_injected.py:" in text


class NcclWork(dist.Work):
    """A handle that is over, and refuses what that of nccl refuses."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        raise NotImplementedError

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        return True


class FailedWork(NcclWork):
    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        raise RuntimeError("lost")


def test_a_handle_that_is_polled_settles_without_asking_for_success() -> None:
    settled: list[str] = []
    assert Watched(NcclWork(), [], lambda: settled.append("nccl")).is_completed()
    failed = Watched(FailedWork(), [], lambda: settled.append("failed"))
    assert failed.is_completed()
    with pytest.raises(RuntimeError, match="lost"):
        failed.wait()
    assert settled == ["nccl"]


def test_a_wait_with_a_timeout_is_that_of_the_collective() -> None:
    work = Mock(spec=dist.Work)
    watched, begun = Watched(work, [], begin_wait=lambda: begun.append(work.wait.call_count)), list[int]()
    watched.wait(datetime.timedelta(seconds=3))
    assert begun == []
    watched.wait()
    assert begun == [1]
    assert [call.args for call in work.wait.call_args_list] == [
        (datetime.timedelta(seconds=3),),
        (datetime.timedelta(0),),
    ]


@pytest.mark.parametrize("method", ["synchronize", "block_current_stream"])
def test_a_handle_that_orders_streams_settles(method: str) -> None:
    settled: list[str] = []
    work = Mock(spec=dist.Work)
    for each in (work, None):
        getattr(Watched(each, [], lambda: settled.append(method)), method)()
    assert settled == [method, method]
    getattr(work, method).assert_called_once_with()


def test_a_handle_answers_what_the_collective_answers_until_it_is_released() -> None:
    work = Mock(spec=dist.Work, _source_rank=lambda: 2)
    work.is_success.return_value, work.exception.return_value = False, "lost"
    watched = Watched(work, [])
    assert not watched.is_success()
    assert watched.exception() == "lost"
    watched.wait()
    assert watched.release()
    assert watched.is_success()
    assert watched.exception() is None
    assert watched.source_rank() == 2


def test_a_released_handle_has_its_outputs_as_long_as_others_hold_them() -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    watched = Watched(None, list(tensors))
    assert not watched.release()  # no one has waited for it
    watched.wait()
    assert watched.release()
    assert all(one is other for one, other in zip(watched.result(), tensors, strict=True))
    assert watched.get_future().wait()[1] is tensors[1]
    del tensors[0]
    with pytest.raises(RuntimeError, match=r"^the outputs of this collective were freed after it "):
        watched.result()


def test_a_future_has_the_outputs_once_its_wait_is_over() -> None:
    begun, settled = list[str](), list[str]()
    theirs: torch.futures.Future[None] = torch.futures.Future()
    work = Mock(spec=dist.Work)
    work.get_future.return_value = theirs
    tensor = torch.ones(1)
    watched = Watched(
        work, [tensor], lambda: settled.append("over"), begin_wait=lambda: begun.append("begins")
    )
    found = watched.get_future()
    assert settled == []
    theirs.set_result(None)
    assert found.wait()[0] is tensor
    assert (begun, settled) == (["begins"], ["over"])


def test_a_future_raises_what_its_wait_or_the_collective_has_met() -> None:
    def gives_up() -> None:
        raise RuntimeError("given up")

    work = Mock(spec=dist.Work)
    work.get_future.return_value = torch.futures.Future()
    with pytest.raises(RuntimeError, match="given up"):
        Watched(work, [], begin_wait=gives_up).get_future().wait()
    settled: list[str] = []
    failed: torch.futures.Future[None] = torch.futures.Future()
    failed.set_exception(ValueError("lost"))
    work.get_future.return_value = failed
    with pytest.raises(RuntimeError, match="lost"):
        Watched(work, [], lambda: settled.append("over")).get_future().wait()
    assert settled == []


def test_a_handle_says_when_a_wait_returned_and_whether_it_is_over() -> None:
    work, waited = Mock(spec=dist.Work), list[str]()
    work.is_completed.return_value = False
    watched = Watched(work, [], waited=lambda: waited.append("waited"))
    assert not watched.is_completed()
    watched.wait()
    watched.wait()
    assert waited == ["waited"] * 2


def test_a_handle_is_not_released_while_a_fault_holds_up_the_thread_that_waits() -> None:
    holds, goes_on = threading.Event(), threading.Event()

    def over() -> None:
        holds.set()
        goes_on.wait(60)

    watched = Watched(None, [], over)
    thread = threading.Thread(target=watched.wait)
    thread.start()
    holds.wait(60)
    was_released = watched.release()
    goes_on.set()
    thread.join(60)
    assert not was_released
    assert watched.release()


def test_a_fault_reads_as_a_line_and_as_a_call() -> None:
    fault = Fault("delay", 1, before="reduce_scatter_tensor", nth=4, seconds=0.02)
    assert str(fault) == "rank 1 waits 20 ms before reduce_scatter_tensor #4"
    assert repr(fault) == 'faults.delay(rank=1, before="reduce_scatter_tensor", nth=4, seconds=0.02)'
    fault = Fault("corrupt", op="all_reduce", value=float("nan"))
    assert str(fault) == "every rank gets nan from all_reduce #1"
    assert repr(fault) == 'faults.corrupt(op="all_reduce", nth=1, value=float("nan"))'
    assert str(Fault("drop", 0, where=torch.Tensor.dim)) == "rank 0 leaves out collective #1 where dim"
    partial = functools.partial(torch.Tensor.size, dim=0)
    assert str(Fault("drop", 0, where=partial)) == "rank 0 leaves out collective #1 where partial"
    group = Mock(spec=dist.ProcessGroup, group_name="7")
    fault = Fault("fail", group=group, where=torch.Tensor.dim, error=ValueError)
    assert str(fault) == "every rank raises ValueError before collective #1 of group 7 where dim"
    assert repr(fault) == "faults.fail(nth=1, group=<group 7>, where=dim, error=ValueError)"


@pytest.mark.parametrize(
    ("kind", "words"),
    [("kill", "is killed (SIGKILL)"), ("stop", "is stopped (SIGSTOP)"), ("hang", "hangs")],
)
def test_a_fault_that_ends_a_rank_reads_as_a_line(kind: Literal["kill", "stop", "hang"], words: str) -> None:
    assert str(Fault(kind, 1, before="barrier")) == f"rank 1 {words} before barrier #1"
    assert str(Fault(kind, 1, after="any")) == f"rank 1 {words} after collective #1"
