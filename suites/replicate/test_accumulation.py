"""Gradients of several backwards under the switches of composable fronts: sync, last backward, reshard."""

from collections import Counter

import pytest
import torch
from torch import nn

from lockstep.conformance.models import KnownGradients
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POLICIES = {"policy": [(), (F16,), (BF16, F32), (None, BF16)]}
EVERY_WEIGHT = [f"{index}.weight" for index in range(4)]


def backward(model, world, value, *more):
    """Give every weight the gradient `value`, in the mean of half and one and a half of it."""
    gradient = torch.tensor(value * (0.5 + world.rank), device=world.device)
    model(gradient, *more).backward()


def gradients_of(model):
    """Return the one value that all elements of each full gradient have, by name; None without one."""
    found = {}
    for name, p in model.named_parameters():
        values = None if p.grad is None else p.grad.full_tensor().unique().tolist()
        assert values is None or len(values) == 1, (name, values)
        found[name] = values and values[0]
    return found


def every_weight(value):
    return dict.fromkeys(EVERY_WEIGHT, value)


def known(world, front, **settings):
    return front.shard(KnownGradients(3), **settings)


def test_without_sync_gradients_stay_out_of_sight(world, front):
    model = known(world, front)
    model.set_requires_gradient_sync(False)
    backward(model, world, 1.0)
    assert gradients_of(model) == every_weight(None)
    model.set_requires_gradient_sync(True)
    backward(model, world, 2.0)
    assert gradients_of(model) == every_weight(3.0)


def test_backwards_that_are_not_the_last_leave_the_same_sum(world, front):
    model = known(world, front)
    for index in range(3):
        model.set_is_last_backward(index == 2)
        backward(model, world, 2.0**index)
    assert gradients_of(model) == every_weight(7.0)


def test_parameters_kept_between_microbatches_see_the_step(world, front):
    model = known(world, front)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        for index in range(3):
            is_last = index == 2
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            backward(model, world, 2.0**index)
        assert gradients_of(model) == every_weight(7.0)
        optimizer.step()
        optimizer.zero_grad()
    # The weights are -14 now: so is each of the four sums over three elements, times the gradient.
    assert model(torch.tensor(1.0, device=world.device)).item() == -14.0 * 3 * 4


@pytest.mark.parametrize("policy", [(), (BF16,)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(torch.optim.SGD, {"foreach": True}), (torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True})],
    ids=["foreach", "one_by_one", "fused"],
)
def test_parameters_that_are_always_kept_see_the_step(world, front, policy, kind, way):
    """torch 2.13 goes on with what it gathered before the step."""
    model = known(world, front, **front.precision(*policy))
    model.set_reshard_after_backward(False)
    optimizer = kind(model.parameters(), lr=1.0, **way)
    for number in (1, 2):
        backward(model, world, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        output = model(torch.tensor(1.0, device=world.device))
        assert output.item() == pytest.approx(-number * 3 * 4, rel=1e-2)  # one unit of bf16


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_a_step_begins_with_no_gradient_of_the_one_before(world, front, set_to_none):
    model = known(world, front)
    for value in (1.0, 5.0):
        model.zero_grad(set_to_none)
        backward(model, world, value)
        assert gradients_of(model) == every_weight(value)


# The counts: which collectives a microbatch may do without, by the switches set for it.

UNITS = ("1", "2", "3")  # each a group, and the root one with the layer before them
SWITCHED = {"all": ("", *UNITS), "root_only": ("",), "some": UNITS[:2]}
"""The groups whose switches are off until the last microbatch, by PyTorch's name of the way."""


def expected_counts(reshard_after_forward, switched, last, kept, hybrid, inside):
    """Return how many gathers in forward and in backward and how many reductions a microbatch has.

    Args:
        kept: groups that the backward before has left unsharded.
        inside: the switch is that of all-reduces, and not of all reductions.
    """
    synced = 4 if last else 4 - len(switched)
    counts = {"forward": 4 - len(kept), "backward": 4 if reshard_after_forward else 0}
    counts["reduce_scatter"] = 4 if inside else synced
    counts["all_reduce"] = synced if hybrid else 0
    return +Counter(counts)


@pytest.mark.ranks(4)
# The engine makes a process group of the few ranks, which lives as long as the process.
@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
@pytest.mark.parametrize("hybrid", [False, True], ids=["one_axis", "hybrid"])
def test_a_microbatch_sends_what_its_switches_say_and_no_more(world, fully_shard, run_subtests, hybrid):
    """After PyTorch's TestFullyShardGradientAccumulation.

    Its file of version 2.6 counts the gathers of a root that is never resharded after forward; since then
    one that was given `reshard_after_forward=True` is.
    """
    mesh = world.mesh(2, 2, names=("replicate", "shard")) if hybrid else world.mesh(4)
    points = {
        "reshard_after_forward": [True, False] if hybrid else [True, False, 2],
        "reshard_after_backward": [True, False],
        "mode": list(SWITCHED),
        "inside": [False, True] if hybrid else [False],
    }
    run_subtests(points, check_counts, world, fully_shard, mesh)


def check_counts(world, fully_shard, mesh, reshard_after_forward, reshard_after_backward, mode, inside):
    bare = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = fully_shard.shard(bare, UNITS, mesh=mesh, reshard_after_forward=reshard_after_forward)
    switched, kept = SWITCHED[mode], set()
    for microbatch in range(3):
        last = microbatch == 2
        for module in map(model.get_submodule, switched):
            switch = module.set_requires_all_reduce if inside else module.set_requires_gradient_sync
            switch(last, recurse=False)
            if not reshard_after_backward:
                module.set_reshard_after_backward(last, recurse=False)
        with CollectivesLog() as log:
            model(torch.ones(2, 4, device=world.device)).sum().backward()
        assert counted(fully_shard.engine.traffic(log)) == expected_counts(
            reshard_after_forward, switched, last, kept, mesh.ndim == 2, inside
        ), (microbatch, log)
        kept = set() if reshard_after_backward or last else set(switched)


def counted(traffic):
    """Return how many gathers and reductions of which kind there were, and nothing else."""
    assert traffic.others == ()
    kinds = ("all_reduce" if entry.op == "all_reduce" else "reduce_scatter" for entry in traffic.reductions)
    return Counter(kinds) + Counter("backward" if e.in_backward else "forward" for e in traffic.gathers)
