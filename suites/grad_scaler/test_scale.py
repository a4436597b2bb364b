"""The scale: it grows, backs off, is set and saved, and stays finite and above zero."""

import pytest
import torch

from lockstep.conformance.models import KnownGradient

pytestmark = pytest.mark.ranks(2, 3)

INF = float("inf")


def scales_of(run, gradients):
    """Return the scale after a step with each of the gradients, which is the same on all ranks."""
    found = []
    for gradient in gradients:
        run.step(gradient)
        of_ranks = run.scales()
        assert of_ranks == of_ranks[:1] * len(of_ranks)
        found.append(of_ranks[0])
    return found


def test_it_grows_after_so_many_clean_steps_in_a_row(trained):
    run = trained(KnownGradient(3), {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25})
    assert scales_of(run, [1.0] * 5) == [8.0, 8.0, 32.0, 32.0, 32.0]
    # The inf ends the row.
    assert scales_of(run, [INF] + [1.0] * 4) == [8.0, 8.0, 8.0, 32.0, 32.0]
    assert run.weights() == [[-9.0] * 3]


@pytest.mark.parametrize("factor", [1.5, 2.0, 2.0**40])
def test_it_never_grows_to_inf(trained, factor):
    """torch's sharded one does on CPU, and every step after that is skipped."""
    scaling = {"init_scale": 2.0**120, "growth_factor": factor, "growth_interval": 1}
    run = trained(KnownGradient(3), scaling)
    scales = scales_of(run, [2.0**-10] * 20)
    largest = torch.finfo(torch.float32).max
    assert scales[-1] <= largest < scales[-1] * factor
    assert run.weights() == [[pytest.approx(-20 * 2.0**-10)] * 3]


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0**-40])
def test_it_never_backs_off_to_zero(trained, factor):
    """The reciprocal of 0 is inf, and no step would ever be clean again."""
    run = trained(KnownGradient(3), {"init_scale": 2.0**-120, "backoff_factor": factor})
    scales = scales_of(run, [INF] * 10)
    assert scales[-1] == torch.finfo(torch.float32).tiny
    run.step(4.0)
    assert run.weights() == [[-4.0] * 3]


def test_after_an_inf_it_grows_again_from_where_it_backed_off_to(trained):
    run = trained(KnownGradient(3), {"growth_interval": 1})
    assert scales_of(run, [INF, INF, INF, 1.0, 1.0, INF, 1.0]) == [4.0, 2.0, 1.0, 2.0, 4.0, 2.0, 4.0]
    assert run.weights() == [[-3.0] * 3]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_it_can_be_set(world, trained, as_tensor):
    run = trained(KnownGradient(3))
    run.step(1.0)
    run.scaler.update(torch.tensor(32.0, device=world.device) if as_tensor else 32.0)
    assert run.scales() == [32.0] * world.size
    run.step(1.0)
    assert (run.weights(), run.scales()) == ([[-2.0] * 3], [32.0] * world.size)


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_state_dict_carries_scale_settings_and_clean_steps(world, trained, used):
    scaling = {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    first, second = trained(KnownGradient(3), scaling), trained(KnownGradient(3))
    assert scales_of(first, [INF, 1.0, 1.0]) == [2.0] * 3
    if used:
        second.step(1.0)
    world.assert_same(first.scaler.state_dict())
    second.scaler.load_state_dict(first.scaler.state_dict())
    assert second.scaler.state_dict() == first.scaler.state_dict()
    for run in (first, second):
        assert scales_of(run, [1.0, INF]) == [8.0, 2.0]
