"""Property tests whose examples fail, kill, hang or diverge on one rank."""

import os
import signal
import time

import pytest
from healthy import test_healthy as test_healthy

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist
from hypothesis import Phase, assume, example, given, note, settings, target
from hypothesis import strategies as st
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
    if world.rank == 1 and number >= 100:
        assert number < 100  # run by failing examples alone
    dist.all_reduce(torch.ones(1))


@given(st.data())
def test_unlike_progress(world, data):
    first = data.draw(st.integers(0, 1000), label="first")
    assert world.rank == 0 or first < 10
    rest = data.draw(st.lists(st.integers(), min_size=2, max_size=2))
    world.barrier()
    assert world.rank == 1 or sum(rest) < 10**6


@settings(phases=[Phase.generate, Phase.shrink])
@given(st.integers(0, 1000))
def test_ranks_part(world, number):
    from lockstep.assertions import assert_same_across_ranks

    layer = torch.nn.Linear(2, 2)
    if world.rank == 1 and number >= 10:
        torch.nn.init.zeros_(layer.bias)
    layer(torch.ones(1, 2))
    assert_same_across_ranks(dict(layer.named_parameters()))


@given(st.integers())
def test_all_ranks(number):
    note(f"seen {number}")
    assert number < 100


@given(st.integers(0, 10), st.integers(0, 10))
def test_unlike_bugs(world, first, second):
    assert (first, second)[world.rank] < 5


COUNT = []


@given(st.integers())
def test_noise_of_the_other(world, number):
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
    while world.rank == 1 and number > 4:
        time.sleep(0.01)  # for ever


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
