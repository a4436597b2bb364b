"""Bugs that depend on the order of two threads, which properties over schedules find.

No clock decides: a thread that sleeps lets the other one go on, and nothing else does.
"""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lockstep import Fault, schedules

pytestmark = pytest.mark.ranks(2)

few = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine may take long for a draw
)


class Trainer:
    """Counts samples and labels by a collective each; its other thread saves both, whenever it runs."""

    def __init__(self):
        self.counts = [0, 0]
        self.saved = []

    def step(self):
        for place in (0, 1):
            total = torch.ones(1)
            dist.all_reduce(total)
            self.counts[place] += int(total)

    def save(self, seconds):  # of the other thread, which runs while this one sleeps
        self.saved.append(tuple(self.counts))


@few
@given(schedule=schedules(2, 6))
def test_saved_counts(world, faults, schedule):
    trainer = Trainer()
    with pytest.MonkeyPatch.context() as patch, faults.inject(*schedule, required=False):
        trainer.step()
        if world.rank == 1:
            patch.setattr(time, "sleep", trainer.save)
        trainer.step()
        trainer.step()
    assert all(samples == labels for samples, labels in trainer.saved)


@settings(few, max_examples=6)
@given(number=st.integers(0, 5))
def test_no_leak(world, faults, number):
    if number % 2 == 0:
        faults.inject(Fault("drop", op="all_reduce", nth=2), required=False)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


@settings(few, max_examples=6)
@given(number=st.integers(0, 5))
def test_never(world, faults, number):
    fault = Fault("fail", before="barrier") if number == 5 else Fault("delay", before="any", seconds=0.001)
    faults.inject(fault)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("kind", ["fail", "corrupt", "drop"])
@settings(few, max_examples=10)
@given(data=st.data())
def test_sums(world, faults, kind, data):
    with faults.inject(*data.draw(schedules(2, 4, kinds=[kind])), required=False):
        for _ in range(4):
            value = torch.ones(1)
            dist.all_reduce(value)
            assert value == 2


@settings(few, max_examples=4)
@given(number=st.integers(0, 5))
def test_death(world, faults, number):
    faults.kill(rank=1, before="barrier")
    with faults.expect("died: SIGKILL"):
        dist.barrier()
    world.rebuild()


def test_after_it(world, faults):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
