"""Collectives that ranks do not issue alike, forward and backward, and a process group that is gone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession, Project

INI = "[pytest]\nranks_preload = harness.engine torch._dynamo"  # which DistributedDataParallel imports
FAULTS = """
import datetime, os, threading, time
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from harness.engine import FullyShardedDataParallel

pytestmark = pytest.mark.ranks(2, timeout=30)

def test_order(world):
    tensor = torch.ones(3)
    steps = [lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 0)]
    for step in steps if world.rank == 0 else reversed(steps):
        step()

def test_one_missing(world):
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))
    dist.barrier()

class Disagrees(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if os.environ["RANK"] == "1":
            dist.all_reduce(grad.clone())
        else:
            dist.all_gather([torch.empty_like(grad) for _ in range(2)], grad)
        return grad

def test_operation_in_backward(world):
    Disagrees.apply(torch.ones(3, requires_grad=True)).sum().backward()

def test_one_missing_in_backward(world):
    x = torch.ones(3, requires_grad=True)
    if world.rank == 1:
        x.register_hook(lambda grad: dist.all_reduce(grad))  # a hook
    x.sum().backward()

def test_failure_in_backward(world):
    def hook(grad):
        if world.rank == 1:
            raise ValueError("in a hook")
        dist.all_reduce(grad)
    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skips):
        return self.first(x) if skips else self.second(self.first(x))

def test_ddp_with_an_unused_parameter(world):
    model = DistributedDataParallel(Layers())
    for _ in range(2):
        model(torch.ones(2, 4), skips=world.rank == 1).sum().backward()

def test_engine_with_a_skipped_unit(world):
    model = Layers()
    model.first, model.second = map(FullyShardedDataParallel, (model.first, model.second))
    model = FullyShardedDataParallel(model)
    for _ in range(2):
        model(torch.ones(2, 4), skips=world.rank == 1).sum().backward()

def test_two_groups_in_opposite_order(world):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups[:: 1 - 2 * world.rank]:
        dist.all_reduce(torch.ones(1), group=group)

def test_patient(world):
    # They wait for each other, but not in vain: an operation of each is in flight all the time.
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    works = []
    for group in groups[:: 1 - 2 * world.rank]:
        works.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.01)
    for work in works:
        work.wait()

def test_timeout_of_a_group(world):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if world.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()

def test_threads_with_a_group_each(world):
    groups = [dist.new_group() for _ in range(2)]
    def late(number):
        threading.Event().wait(2 if number == world.rank else 0)
        dist.all_reduce(torch.ones(1), group=groups[number])
    threads = [threading.Thread(target=late, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def test_sleep_with_work_in_flight(world):
    groups = [dist.new_group() for _ in range(2)]
    work = dist.all_reduce(torch.ones(1), group=groups[world.rank], async_op=True)
    time.sleep(2)
    dist.all_reduce(torch.ones(1), group=groups[1 - world.rank])
    work.wait()

@pytest.mark.ranks(3)
def test_outside_of_a_group(world):
    dist.new_group([0, 1])
    if world.rank == 0:
        dist.barrier()

def test_points(world, run_subtests):
    def claim(n):
        if (world.rank, n) != (0, 2):
            dist.all_reduce(torch.ones(n))
    run_subtests({"n": [1, 2, 3]}, claim)

def test_rescue_in_a_point(world, run_subtests):
    def claim(n):
        if n != 2:
            world.barrier()
        elif world.rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(5))
    run_subtests({"n": [1, 2, 3]}, claim)

def test_one_missing_after_points(world, run_subtests):
    run_subtests({"n": [1, 2]}, lambda n: world.barrier())
    if world.rank == 1:
        dist.all_reduce(torch.ones(6))

def test_group_destroyed_before_a_collective(world):
    if world.rank == 1:
        dist.destroy_process_group()
    dist.barrier()

def test_group_destroyed_at_the_end(world):
    if world.rank == 1:
        dist.destroy_process_group()

def test_group_destroyed_by_all(world):
    dist.destroy_process_group()
"""


def test_the_next_test_of_the_file_runs_on_a_healthy_world(session: FaultSession) -> None:
    session.assert_healthy()


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("test_order", ("all_reduce", "broadcast")),
        ("test_one_missing", ("all_reduce", "barrier")),
        ("test_operation_in_backward", ("all_gather", "all_reduce")),
    ],
)
def test_a_mismatch_names_what_each_rank_is_in(
    session: FaultSession, name: str, operations: tuple[str, str]
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    first, second = (rf"rank {rank} is in {name} #\d+( .*)?" for rank, name in enumerate(operations))
    # The rank that arrived later may be named first.
    sentence = rf"mismatch: ({first} while {second}|{second} while {first})"
    assert re.fullmatch(sentence, verdict.message)
    assert verdict.head()[0] == verdict.message
    assert verdict.seconds < 20  # far from the deadline


def test_a_collective_that_a_hook_of_backward_issues_alone_names_both(session: FaultSession) -> None:
    head = session["test_one_missing_in_backward"].head()
    sentence = r"rank 1 waits in all_reduce #\d+ .*, which rank 0 never reached: it has ended the test"
    assert re.fullmatch(sentence, head[0])
    assert session.place("# a hook") in head[1]


def test_two_groups_in_opposite_order_are_a_deadlock(session: FaultSession) -> None:
    sentence = session["test_two_groups_in_opposite_order"].message
    assert sentence.startswith("deadlock: rank 0 waits in all_reduce #1 (float [1]) of group ")
    assert "(ranks 0, 1) for rank 1; rank 1 waits in all_reduce #1 (float [1]) of group " in sentence


@pytest.mark.parametrize(
    "name", ["patient", "timeout_of_a_group", "threads_with_a_group_each", "sleep_with_work_in_flight"]
)
def test_ranks_that_do_not_wait_in_vain_are_left_alone(session: FaultSession, name: str) -> None:
    assert session[f"test_{name}"].outcomes == ["passed"]


def test_a_rank_that_is_no_member_of_a_group_can_be_asked(session: FaultSession) -> None:
    sentence = "rank 0 waits in barrier #1, which rank 1 never reached: it has ended the test; rank 2 never"
    assert session["test_outside_of_a_group"].message.startswith(sentence)


def test_a_point_that_stands_still_is_named_and_the_others_run(session: FaultSession) -> None:
    verdict = session["test_points"]
    assert "rank 1 waits in all_reduce #2 (float [2]), which rank 0 never reached: " in verdict.text
    assert "it has ended the subtest [n=2]" in verdict.text
    assert "--subtest n=2" in verdict.text
    assert "contains 1 failed subtest" in verdict.text


def test_a_point_that_stands_still_fails_though_it_catches_what_frees_it(session: FaultSession) -> None:
    verdict = session["test_rescue_in_a_point"]
    assert "rank 0 waits in all_reduce #2 (float [5]), which rank 1 never reached: " in verdict.text
    assert "contains 1 failed subtest" in verdict.text  # the next point runs in a new group


def test_what_follows_points_is_in_none_of_them(session: FaultSession) -> None:
    verdict = session["test_one_missing_after_points"]
    sentence = "rank 1 waits in all_reduce #3 (float [6]), which rank 0 never reached: it has ended the test"
    assert verdict.head()[0] == sentence
    assert "--subtest" not in verdict.text


def test_a_failure_in_a_hook_of_backward_is_the_cause(session: FaultSession) -> None:
    verdict = session["test_failure_in_backward"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert verdict.head()[1].startswith("rank 0: ")  # and no cause
    assert verdict.message == "rank 1: ValueError: in a hook"


def test_ddp_says_which_rank_did_not_use_a_parameter(session: FaultSession) -> None:
    verdict = session["test_ddp_with_an_unused_parameter"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "RuntimeError: Expected to have finished reduction in the prior iteration" in verdict.message


def test_an_engine_whose_unit_one_rank_skips_is_told_with_the_collective(session: FaultSession) -> None:
    verdict = session["test_engine_with_a_skipped_unit"]
    assert verdict.outcomes == ["failure"]
    sentence = r"rank 0 waits in all_to_all #\d+ .*, which rank 1 never reached: it has ended the test"
    assert re.fullmatch(sentence, verdict.head()[0])
    assert verdict.seconds < 20  # a bound against hanging


def test_a_rank_that_destroyed_the_group_is_the_cause(session: FaultSession) -> None:
    verdict = session["test_group_destroyed_before_a_collective"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "Default process group has not been initialized" in verdict.message


@pytest.mark.parametrize("when", ["at_the_end", "by_all"])
def test_a_group_that_nobody_needs_any_more_may_go(session: FaultSession, when: str) -> None:
    assert session[f"test_group_destroyed_{when}"].outcomes == ["passed"]


UNNOTICED = """
def sum_up(world):
    dist.all_reduce(torch.ones(2, dtype=torch.int32 if world.rank else torch.float32))

def test_alike(world):
    assert world.gather(world.rank) == [0, 1]

def test_unlike(world):
    sum_up(world)

@pytest.mark.xfail(strict=True)
def test_expected(world):
    sum_up(world)
    assert world.size == 3
"""


def test_a_mismatch_that_nobody_notices_is_found_on_request_in_tests_that_pass(project: Project) -> None:
    project.write(UNNOTICED)
    said = project.run("--check-collectives")
    assert "= 1 failed, 1 passed, 1 xfailed in " in said
    sentence = "mismatch: rank 0 called all_reduce #1 (float [2]) while rank 1 called all_reduce #1 (int [2])"
    assert sentence in said
