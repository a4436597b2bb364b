"""Agreement of ranks on a step: all or none, wherever an inf lies and whichever ranks hold a gradient."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.assertions import local_part
from lockstep.conformance import Capability, offers, require
from lockstep.conformance.models import KnownGradient
from lockstep.conformance.models.nested import pause

pytestmark = pytest.mark.ranks(2, 3)

INF, NAN = float("inf"), float("nan")
EVERY_BAD = pytest.mark.parametrize("bad", [INF, NAN])
EVERY_WAY = {"use_orig_params": [False, True], "unscale_first": [False, True]}


class Two(nn.Sequential):
    """Two weights in one group, of a number of elements each; forward is given the gradient of each."""

    def __init__(self, num):
        super().__init__(KnownGradient(num), KnownGradient(num))

    def forward(self, *gradients):
        return torch.stack([weight(g) for weight, g in zip(self, gradients, strict=True)]).sum()


def known(world, bad, holder):
    """Return a gradient of two elements for each rank's shard, with `bad` in the shard of `holder`."""
    gradient = torch.ones(2 * world.size)
    gradient[2 * holder] = bad
    return gradient


@EVERY_BAD
@pytest.mark.basic(8)
def test_a_bad_gradient_in_any_one_shard_stops_all_ranks(world, trained, run_subtests, bad):
    def check(holder, unscale_first, **spec):
        run = trained(KnownGradient(2 * world.size), **spec)
        run.step(known(world, bad, holder), unscale_first=unscale_first)
        assert run.finite() == [run.in_shards and rank != holder for rank in range(world.size)]
        assert (run.weights(), run.scales()) == ([[0.0] * 2 * world.size], [4.0] * world.size)
        run.step(known(world, 1.0, holder), unscale_first=unscale_first)
        assert (run.weights(), run.scales()) == ([[-1.0] * 2 * world.size], [4.0] * world.size)

    run_subtests({"holder": [0, world.size - 1], **EVERY_WAY}, check)


def test_torchs_scaler_lets_ranks_diverge_and_this_one_does_not(world, engine, trained):
    """Without agreement the rank whose shard has the inf stays behind, and its scale alone backs off."""
    require(engine, Capability.SHARDING)
    require(engine, Capability.PLAIN_PARAMETERS)  # DTensors make any scaler agree
    apart, together = (trained(KnownGradient(2 * world.size)) for _ in range(2))
    apart.scaler = torch.amp.GradScaler(world.device.type, init_scale=8.0)
    for run in (apart, together):
        run.step(known(world, INF, holder=0))
    others = world.size - 1
    assert (apart.weights(), apart.scales()) == ([[0.0] * 2 + [-1.0] * 2 * others], [4.0] + [8.0] * others)
    assert (together.weights(), together.scales()) == ([[0.0] * 2 * world.size], [4.0] * world.size)


def test_a_step_waits_for_the_flag_of_a_late_rank(world, trained, use_orig_params):
    """pytorch#115710: found_inf was read before its all-reduce was over."""
    run = trained(KnownGradient(2 * world.size), use_orig_params=use_orig_params)
    late = world.size - 1
    run.backward(known(world, INF, holder=late))
    if world.rank == late:
        pause(world.device, 20)
    run.finish()
    assert (run.weights(), run.scales()) == ([[0.0] * 2 * world.size], [4.0] * world.size)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_rank_that_holds_no_element_takes_part(world, trained, run_subtests, shape):
    """pytorch#99174: a rank with only empty shards did not join."""

    def check(unscale_first, **spec):
        run = trained(KnownGradient(*shape), **spec)
        for gradient, weight, scale in ((3.0, -3.0, 8.0), (INF, -3.0, 4.0), (2.0, -5.0, 4.0)):
            run.step(gradient, unscale_first=unscale_first)
            assert run.weights() == [weight if shape == () else [weight]]
            assert run.scales() == [scale] * world.size

    run_subtests({"strategy": ["FULL_SHARD", "NO_SHARD"], **EVERY_WAY}, check)


@EVERY_BAD
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("only_second", [False, True], ids=["all", "only_second"])
def test_a_bad_gradient_of_a_parameter_with_empty_shards(world, trained, bad, unscale_first, only_second):
    """An optimizer of that parameter alone finds no gradient on the rank."""
    run = trained(Two(3), use_orig_params=True)
    if only_second:
        run.optimizers = [run.optimizer_of(run.engine.unwrapped(run.model)[1])]
    first = 0.0 if only_second else -1.0
    if run.in_shards and offers(run.engine, Capability.ONE_PADDING):
        held = world.gather(run.engine.unwrapped(run.model)[1].weight.numel())
        assert held == ([0, 3] if world.size == 2 else [0, 1, 2])
    for gradient, weights, scale in (
        (1.0, [first, -1.0], 8.0),
        (bad, [first, -1.0], 4.0),
        (2.0, [2 * first, -3.0], 4.0),
    ):
        run.step(1.0, gradient, unscale_first=unscale_first)
        assert run.weights() == [[weight] * 3 for weight in weights]
        assert run.scales() == [scale] * world.size


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("holder", [0, 1])
def test_ranks_without_gradients_follow_the_one_that_has_some(world, engine, trained, unscale_first, holder):
    require(engine, Capability.SHARDING)  # of replicas, one cannot step alone
    run = trained(KnownGradient(2 * world.size))
    stepped = [-1.0 if index // 2 == holder else 0.0 for index in range(2 * world.size)]
    for bad, scale in ((1.0, 8.0), (INF, 4.0)):
        run.model.zero_grad()
        run.backward(known(world, bad, holder))
        if world.rank != holder:
            run.model.zero_grad()
        run.finish(unscale_first)
        assert (run.weights(), run.scales()) == ([stepped], [scale] * world.size)


def test_of_two_optimizers_only_the_overflowing_one_skips(world, trained):
    run = trained(Two(3), units=("0", "1"), use_orig_params=True)
    run.optimizers = [run.optimizer_of(child) for child in run.engine.unwrapped(run.model)]
    for gradients, weights, scale in (
        ((1.0, INF), (-1.0, 0.0), 4.0),
        ((NAN, 1.0), (-1.0, -1.0), 2.0),
        ((INF, INF), (-1.0, -1.0), 1.0),
        ((1.0, 1.0), (-2.0, -2.0), 1.0),
    ):
        run.step(*gradients)
        assert run.weights() == [[weight] * 3 for weight in weights]
        assert run.scales() == [scale] * world.size


@pytest.mark.ranks(4)
def test_ranks_of_other_groups_take_no_part(world, trained):
    own, all_of_them = dist.new_subgroups(2)
    try:
        run = trained(KnownGradient(4), {"process_group": own}, process_group=own)
        run.step(torch.tensor([1.0, 1.0, 1.0, INF if world.rank >= 2 else 1.0]))
        assert world.gather(run.weights()) == [[[-1.0] * 4]] * 2 + [[[0.0] * 4]] * 2
        assert run.scales() == [8.0, 8.0, 4.0, 4.0]
    finally:
        for group in all_of_them:
            dist.destroy_process_group(group)


@pytest.mark.ranks(4)
def test_an_inf_on_one_rank_of_a_hybrid_model_stops_all(world, trained, run_subtests):
    def check(holder, agreed_by):
        mesh = world.mesh(2, 2)
        axes = mesh.get_group(1), mesh.get_group(0)
        scaling = {"process_group": axes if agreed_by == "axes" else None}
        run = trained(KnownGradient(4), scaling, strategy="HYBRID_SHARD", process_group=axes)
        run.backward(1.0)
        if world.rank == holder:
            local_part(next(run.model.parameters()).grad)[0] = INF
        run.finish()
        assert (run.weights(), run.scales()) == ([[0.0] * 4], [4.0] * 4)
        run.step(1.0)
        assert (run.weights(), run.scales()) == ([[-1.0] * 4], [4.0] * 4)

    run_subtests({"holder": range(4), "agreed_by": ["default_group", "axes"]}, check)


@pytest.mark.inside
def test_ranks_send_one_number_for_each_optimizer(engine, trained, collectives, use_orig_params):
    require(engine, Capability.SHARDING)
    run = trained(KnownGradient(1), use_orig_params=use_orig_params)
    before = len(collectives)
    run.step(1.0)
    others = engine.traffic(collectives.entries[before:]).others
    assert [(entry.op, entry.nbytes) for entry in others] == [("all_reduce", 4)]


@pytest.mark.inside
def test_ranks_send_one_number_for_the_dtensors_of_a_mesh(world, engine, fully_shard, collectives):
    model = fully_shard.shard(KnownGradient(2 * world.size))
    scaler = engine.grad_scaler(model)
    engine.backward(model, scaler.scale(model(torch.ones((), device=world.device))))
    optimizer = engine.optimizer(model, partial(torch.optim.SGD, lr=1.0))
    before = len(collectives)
    scaler.unscale_(optimizer)
    assert [(entry.op, entry.nbytes) for entry in collectives.entries[before:]] == [("all_reduce", 4)]
    assert fully_shard.full_gradients(model)["weight"].tolist() == [1.0] * 2 * world.size


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_fused_optimizer_gets_what_all_ranks_found(world, trained, use_orig_params, unscale_first):
    """A fused one takes the flag off its count of steps: it must be 1, however many ranks found an inf."""
    run = trained(KnownGradient(2 * world.size), use_orig_params=use_orig_params)
    require(run.engine, Capability.OPTIMIZER_STATE)
    make = partial(torch.optim.Adam, lr=1.0, fused=True)
    (adam,) = run.optimizers = [run.engine.optimizer(run.model, make)]
    for bad in (known(world, INF, holder=0), NAN):
        run.step(bad, unscale_first=unscale_first)
    assert (run.weights(), run.scales()) == ([[0.0] * 2 * world.size], [2.0] * world.size)
    run.step(known(world, 4.0, holder=0), unscale_first=unscale_first)
    assert [state["step"].item() for state in adam.state.values()] == [1.0]
    moments = torch.cat([local_part(state["exp_avg"]) for state in adam.state.values()])
    whole = [0.4] + [0.1] * (2 * world.size - 1)
    own = whole[2 * world.rank :][:2] if run.in_shards else whole
    assert moments.tolist() == pytest.approx(own)
    assert (run.weights(), run.scales()) == ([pytest.approx([-1.0] * 2 * world.size)], [2.0] * world.size)


@pytest.mark.inside
def test_a_disabled_scaler_always_steps_and_sends_nothing(world, engine, trained, collectives):
    run = trained(KnownGradient(2 * world.size), {"enabled": False})
    before = len(collectives)
    run.step(known(world, 3.0, holder=0), unscale_first=True)
    assert engine.traffic(collectives.entries[before:]).others == ()
    assert run.weights() == [[-3.0, -1.0] + [-1.0] * 2 * (world.size - 1)]
    assert (run.scales(), run.scaler.is_enabled()) == ([1.0] * world.size, False)
    run.step(known(world, INF, holder=0))
    assert run.weights()[0][0] == -INF
