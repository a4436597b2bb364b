"""Property tests on ranks: examples pass, fail and shrink on all ranks together; what ends that is named."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession

PLUGINS = ("hypothesispytest",)
INI = "[pytest]\nranks_preload = hypothesis.stateful"
FAULTS = """
import os, signal, time
import pytest
if "RANK" in os.environ:
    import torch, torch.distributed as dist
from hypothesis import Phase, assume, example, given, note, settings, target, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

pytestmark = pytest.mark.ranks(2)
quick = [phase for phase in Phase if phase is not Phase.explain]
settings.register_profile("here", max_examples=30, derandomize=True, database=None, phases=quick)
settings.load_profile("here")
few = settings(max_examples=10)

@few
@given(st.lists(st.integers()), st.data())
def test_same_examples(world, numbers, data):
    drawn = data.draw(st.floats(allow_nan=False))
    target(float(len(numbers) * world.rank))
    assert world.gather([numbers, drawn]) == [[numbers, drawn]] * 2

@settings(phases=tuple(Phase))
@given(st.integers())
def test_one_rank(world, number):
    dist.all_reduce(torch.ones(1))
    assert world.rank == 0 or number < 100  # on rank 1

@settings(phases=tuple(Phase))
@given(st.integers())
def test_before_a_collective(world, number):
    assert world.rank == 0 or number < 100
    dist.all_reduce(torch.ones(1))

@given(st.data())
def test_unlike_progress(world, data):
    first = data.draw(st.integers(0, 1000), label="first")
    assert world.rank == 0 or first < 10
    rest = data.draw(st.lists(st.integers(), min_size=2, max_size=2))
    world.barrier()
    assert world.rank == 1 or sum(rest) < 10**6

@given(st.integers())
def test_all_ranks(number):
    note(f"seen {number}")
    assert number < 100

@given(st.integers(0, 10), st.integers(0, 10))
def test_unlike_bugs(world, first, second):
    assert (first, second)[world.rank] < 5

COUNT = []

@given(st.integers())
def test_noise_beside(world, number):
    COUNT.append(number)
    assert world.rank == 1 or number < 100  # on rank 0
    if number >= 100:
        raise (ValueError, TypeError)[len(COUNT) % 2]("noise")

@pytest.mark.ranks(2, timeout=0.8)
@few
@given(st.integers())
def test_long_in_all(world, number):
    time.sleep(0.1)

@given(st.data())
def test_lonely_draw(world, data):
    data.draw(st.integers(0, 5), label="shared")
    if world.rank == 0:
        data.draw(st.booleans(), label="mine")

@given(st.data())
def test_unlike_bounds(world, data):
    data.draw(st.integers(0, world.rank + 1))

@given(st.integers())
def test_lonely_assume(world, number):
    assume(world.rank == 0 or number % 2)

@given(st.integers())
def test_lonely_skip(world, number):
    if world.rank == 1:
        pytest.skip("not here")

@given(st.integers())
def test_skip(number):
    pytest.skip("nowhere")

@settings(deadline=300)
@given(st.integers(0, 10))
def test_slow_rank(world, number):
    time.sleep(0.4 if world.rank == 1 and number > 5 else 0)

@example(7)
@given(st.integers(0, 5))
def test_explicit(world, number):
    assert world.rank == 0 or number != 7

@few
@given(st.integers(0, 6))
def test_death(world, number):
    if world.rank == 1 and number > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()

@few
@given(st.data())
def test_death_between_draws(world, data):
    first = data.draw(st.integers(0, 6), label="first")
    if world.rank == 1 and first > 4:
        os._exit(3)
    data.draw(st.booleans())

@pytest.mark.ranks(2, timeout=0.7)
@few
@given(st.integers(0, 5))
def test_hang(world, number):
    while world.rank == 1 and number > 4: time.sleep(0.01)  # for ever

@few
@given(st.integers(0, 5))
def test_deadlock(world, number):
    if world.rank == 0 or number <= 4:
        world.barrier()  # of both?

class Counter(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)

    @rule(number=st.integers(0, 10))
    def add(self, number):
        addend = torch.tensor([float(number)])
        dist.all_reduce(addend)
        self.total += addend

    @invariant()
    def is_small(self):
        assert dist.get_rank() == 0 or self.total.item() < 10

TestMachine = Counter.TestCase
TestMachine.settings = settings(max_examples=10, stateful_step_count=5)

class Mortal(RuleBasedStateMachine):
    @rule(number=st.integers(0, 3))
    def step(self, number):
        if number > 1 and dist.get_rank() == 1:
            os._exit(4)

def test_machine_that_dies(world):
    run_state_machine_as_test(Mortal, settings=settings(max_examples=10, stateful_step_count=2))

def test_two_properties(world):
    @given(st.integers())
    def first(number):
        assert world.gather(number) == [number] * 2
    @given(st.integers())
    def second(number):
        assert world.rank or number < 3
    first()
    second()
"""

LONE_FAULTS = ("test_lonely_draw", "test_unlike_bounds", "test_lonely_assume", "test_lonely_skip")


def _example(session: FaultSession, name: str) -> str:
    """The failing example as it is told, without the margin that pytest puts before it."""
    text = re.sub(r"^E? +", "", session[name].text, flags=re.MULTILINE)
    assert text.count("Failing") == 1
    return text.partition("Failing ")[2].partition("\n\n")[0]


def test_ranks_see_the_same_examples(session: FaultSession) -> None:
    assert session["test_same_examples"].outcomes == ["passed"]


def test_a_failure_on_one_rank_is_shrunk_and_told_with_that_ranks_traceback(session: FaultSession) -> None:
    verdict = session["test_one_rank"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed this example"]
    assert "number=100," in _example(session, "test_one_rank")
    assert "assert (1 == 0 or 100 < 100)" in verdict.text
    assert session.place("# on rank 1") in verdict.text
    assert "harness/rank" not in verdict.text  # of lines that only failing examples have run


def test_a_failure_is_told_with_what_reproduces_it(session: FaultSession) -> None:
    assert len(re.findall(r"@reproduce_failure\('[\d.]+', b'AEFk'\)", session["test_one_rank"].text)) == 1


def test_ranks_that_wait_for_the_failed_one_search_on_with_it(session: FaultSession) -> None:
    verdict = session["test_before_a_collective"]
    assert "distributed_c10d.py" not in verdict.text  # of lines that only failing examples have run
    assert "number=100," in _example(session, "test_before_a_collective")
    assert verdict.head()[0] == "rank 1 of 2 failed"


def test_ranks_that_have_drawn_on_take_the_failed_ones_draws(session: FaultSession) -> None:
    text = session["test_unlike_progress"].text
    assert "Draw 1 (first): 10\n" in text
    assert "Draw 2" not in text


def test_a_failure_on_all_ranks_is_told_once(session: FaultSession) -> None:
    verdict = session["test_all_ranks"]
    assert verdict.head()[0].startswith("all 2 ranks failed, with the same traceback")
    assert verdict.text.count("seen 100") == 1


def test_the_smallest_of_several_bugs_is_told(session: FaultSession) -> None:
    told = _example(session, "test_unlike_bugs")
    assert ("first=5," in told) != ("second=5," in told)


def test_the_first_rank_that_fails_says_which_bug_an_example_has_found(session: FaultSession) -> None:
    text = re.sub(r"(?m)^E? +", "", session["test_noise_beside"].text)
    assert "number=100," in text
    assert "Flaky" not in text


def test_the_deadline_counts_for_each_example(session: FaultSession) -> None:
    assert session["test_long_in_all"].outcomes == ["passed"]


def test_a_draw_on_one_rank_is_named(session: FaultSession) -> None:
    text = session["test_lonely_draw"].text
    assert "rank 0 drew False (boolean) for Draw 2 (mine); rank 1 drew nothing more" in text
    assert "world.pick" in text


def test_a_draw_in_unlike_bounds_is_named(session: FaultSession) -> None:
    text = session["test_unlike_bounds"].text
    assert "rank 0 drew 0 (integer of 0 to 1) for Draw 1; rank 1 drew 0 (integer of 0 to 2)" in text


def test_an_assumption_of_one_rank_is_named(session: FaultSession) -> None:
    text = session["test_lonely_assume"].text
    assert "rank 0 passed it; rank 1 rejected it (failed to satisfy assume() in test_lonely_assume" in text


def test_a_skip_on_one_rank_is_named(session: FaultSession) -> None:
    assert "rank 0 passed it; rank 1 skipped it (not here)" in session["test_lonely_skip"].text


@pytest.mark.parametrize("name", LONE_FAULTS)
def test_what_is_wrong_between_ranks_is_told_by_all_at_once(session: FaultSession, name: str) -> None:
    assert session[name].head()[0].startswith("all 2 ranks failed, with the same traceback")


def test_a_skip_on_all_ranks_skips(session: FaultSession) -> None:
    assert session["test_skip"].outcomes == ["skipped"]


def test_a_deadline_that_one_rank_exceeds_is_exceeded_on_all(session: FaultSession) -> None:
    verdict = session["test_slow_rank"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed this example"]
    assert "DeadlineExceeded" in verdict.message
    assert "number=6," in _example(session, "test_slow_rank")


def test_an_explicit_example_fails_on_all_ranks(session: FaultSession) -> None:
    assert session["test_explicit"].head() == ["rank 1 of 2 failed", "rank 0: passed this example"]
    assert _example(session, "test_explicit").startswith("explicit example: test_explicit(")


def test_an_example_that_kills_a_rank_is_shrunk(session: FaultSession) -> None:
    assert session["test_death"].head()[0] == "rank 1 of 2 died: SIGKILL"
    assert "number=5," in _example(session, "test_death")


def test_an_example_that_kills_a_rank_between_draws_is_shrunk(session: FaultSession) -> None:
    assert session["test_death_between_draws"].head()[0] == "rank 1 of 2 exited with code 3"
    assert "Draw 1 (first): 5\n" in session["test_death_between_draws"].text


def test_an_example_that_hangs_is_shrunk_and_told_with_its_line(session: FaultSession) -> None:
    verdict = session["test_hang"]
    place = session.place("# for ever")
    sentence, culprit, waiting = verdict.head()[:3]
    assert re.match(r"rank 0 waits at the end of \[example \d+\] for rank 1: rank 1 is at ", sentence)
    assert culprit.startswith(f"rank 1 of 2 still ran at the deadline of 0.7 s, in {place}")
    assert waiting.startswith("rank 0: was in a wait for the others after [example ")
    assert "number=5," in _example(session, "test_hang")


def test_an_example_in_which_no_rank_can_get_on_is_shrunk_in_the_same_world(session: FaultSession) -> None:
    verdict = session["test_deadlock"]
    assert re.match(r"rank 0 waits in barrier #\d+, which rank 1 never reached", verdict.head()[0])
    assert verdict.head()[1:] == ["rank 0 of 2 failed", "rank 1: passed this example"]
    assert "number=5," in _example(session, "test_deadlock")


def test_a_state_machine_runs_in_step(session: FaultSession) -> None:
    verdict = session["runTest"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert re.sub(r"(?m)^E? +", "", verdict.text).count("state.add(number=5)\n") == 1


def test_a_state_machine_that_kills_a_rank_is_shrunk(session: FaultSession) -> None:
    verdict = session["test_machine_that_dies"]
    assert verdict.head()[0] == "rank 1 of 2 exited with code 4"
    assert "state = Mortal()\nstate.step(number=2)\nstate.teardown()" in verdict.text


def test_a_second_property_of_a_test_runs_in_step(session: FaultSession) -> None:
    assert "number=3," in _example(session, "test_two_properties")


def test_the_test_after_a_property_finds_a_healthy_world(session: FaultSession) -> None:
    session.assert_healthy()
