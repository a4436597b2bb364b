"""Ranks that fail in the middle of a step: the others notice, and resume from the checkpoint, bit for bit.

On three ranks, of which rank 1 raises an exception or dies. Those that are left rebuild the world.
"""

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import ShardSpec
from lockstep.conformance.models import NestedWrappedModule

pytestmark = pytest.mark.ranks(3)

STRATEGIES = ["FULL_SHARD", "NO_SHARD"]


class Broken(Exception):
    """The exception of one rank."""


@dataclass
class Strike:
    """A call at one moment of a training, from the time that it is due."""

    happen: Callable[[], None]
    is_due: bool = False

    def __call__(self, *_):
        if self.is_due:
            self.happen()


def nothing():
    pass


def fail():
    raise Broken("on purpose")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Training:
    """A model that learns by a rank's batches, its optimizer, and what is saved of both.

    That is the state of both where the engine has state dicts by type, and that of the model, by an
    optimizer that keeps none, where it has not.

    Attributes:
        states: state dicts by type, None if there are none.
        spec: of the model.
        number: of the rank among those that train.
        planted: what happens at which moment: "forward", "backward", "step", "save" or "load".
    """

    engine: Any
    states: Any
    spec: ShardSpec
    number: int
    planted: dict[str, Strike] = field(default_factory=dict)

    def start(self, saved=None):
        """Make the model and the optimizer, and load what was saved."""
        torch.manual_seed(0)
        bare = NestedWrappedModule()
        self._plant(bare)
        if saved and not self.states:
            bare.load_state_dict(saved)
        self.model = self.engine.shard(bare.to(self.spec.device), self.spec)
        self.optimizer = self.engine.optimizer(self.model, self._make_optimizer)
        if saved and self.states:
            self.states.load_all(self.model, self.optimizer, saved)
        return self

    def _plant(self, bare):
        """Let it happen in a unit that is neither the first nor the last to compute."""
        unit = bare.module[1]

        def in_backward(module, args, output):
            output.register_hook(self.planted["backward"])

        for moment, strike in self.planted.items():
            match moment:
                case "forward":
                    unit.register_forward_pre_hook(strike)
                case "backward":
                    unit.register_forward_hook(in_backward)
                case "save":
                    unit.register_state_dict_pre_hook(strike)
                case "load":
                    unit.register_load_state_dict_pre_hook(strike)

    def _make_optimizer(self, parameters):
        if self.states:
            optimizer = torch.optim.AdamW(parameters, lr=0.01)
        else:
            optimizer = torch.optim.SGD(parameters, lr=0.01)
        if strike := self.planted.get("step"):
            optimizer.register_step_post_hook(strike)
        return optimizer

    def step(self, step):
        generator = torch.Generator().manual_seed(10 * step + self.number)
        batch = NestedWrappedModule.batch(generator).to(self.spec.device)
        self.optimizer.zero_grad()
        loss = self.model(batch).square().sum()
        self.engine.backward(self.model, loss)
        self.optimizer.step()
        return loss.detach()

    def save(self):
        whole = self.states.all(self.model, self.optimizer) if self.states else self._full_state()
        return copy.deepcopy(whole)

    def _full_state(self):
        return dict(self.engine.full_state(self.model))

    def learned(self, steps):
        """Train for these steps; return the losses, and all that was learned, by name."""
        losses = {f"loss {step}": self.step(step) for step in steps}
        whole = self.states.values(self.model, self.optimizer) if self.states else self._full_state()
        return losses | {name: tensor.clone() for name, tensor in whole.items()}


@pytest.fixture
def trainings(world, engine, states_if_any):
    """Return a function that describes a training on ranks; what this rank has of it starts with `start`."""

    def make(strategy, number, group=None, **planted):
        spec = ShardSpec(
            strategy=strategy, units=NestedWrappedModule.units, device=world.device, process_group=group
        )
        return Training(engine, states_if_any, spec, number, planted)

    return make


@pytest.fixture
def check(world, faults, trainings):
    """Return a function that disturbs a training, and compares what resumes it with an undisturbed one.

    `check(strategy, cause, disturb, **planted)`: `disturb(trained, saved)` meets what is planted, which is
    due on rank 1 alone, or a fault.
    """

    def check(strategy, cause, disturb, **planted):
        left = [0, 2] if "died" in cause else [0, 1, 2]
        strikes = {at: Strike(happen if world.rank == 1 else nothing) for at, happen in planted.items()}
        trained = trainings(strategy, world.rank, **strikes).start()
        trained.step(0)
        saved = trained.save()

        # On as many ranks, before anything has gone wrong.
        group, expected = dist.new_group(left), None
        if world.rank in left:
            undisturbed = trainings(strategy, left.index(world.rank), group).start(saved)
            expected = undisturbed.learned((1, 2))
        world.barrier()

        with faults.expect(cause) as seen:
            for strike in strikes.values():
                strike.is_due = True
            disturb(trained, saved)
            trained.step(2)  # by now a rank has noticed that another is gone
        assert isinstance(seen.error, Broken) == (world.rank == 1)
        assert seen.error is not None

        new = world.rebuild()
        assert new.old_ranks == tuple(left)
        resumed = trainings(strategy, new.rank).start(saved)
        assert_named_close(resumed.learned((1, 2)), expected, EXACT)

    return check


def train(trained, saved):
    trained.step(1)


def save(trained, saved):
    trained.save()


def load(trained, saved):
    trained.start(saved)


RAISED = "rank 1 of 3 failed: Broken: on purpose"
DIED = "rank 1 of 3 died: SIGKILL"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_an_exception_in_a_step_ends_it_on_all_ranks(check, strategy, moment):
    """In the forward or the backward of a unit, or as the optimizer has stepped."""
    check(strategy, RAISED, train, **{moment: fail})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("moment", ["save", "load"])
def test_an_exception_while_state_is_saved_or_loaded_leaves_the_checkpoint(check, strategy, moment):
    check(strategy, RAISED, {"save": save, "load": load}[moment], **{moment: fail})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_death_in_forward_leaves_ranks_that_go_on(check, strategy):
    check(strategy, DIED, train, forward=die)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_death_at_a_reduction_leaves_ranks_that_go_on(check, faults, strategy):
    def disturb(trained, saved):
        faults.kill(rank=1, where=lambda collective: collective.in_backward)
        trained.step(1)

    check(strategy, DIED, disturb)
