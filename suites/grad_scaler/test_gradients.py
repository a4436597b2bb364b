"""Unscaled gradients: their dtype and layout, their sum over microbatches, and their norm."""

import pytest
import torch
from torch import nn

from lockstep.conformance import Precision
from lockstep.conformance.models import KnownGradient

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


def gradient_of(run):
    """Return the elements of the only weight's gradient, and its dtype."""
    (gradient,) = run.engine.full_gradients(run.model).values()
    return gradient.tolist(), gradient.dtype


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_gradients_of_every_dtype_are_unscaled(world, trained, use_orig_params, dtype):
    """fairscale#834: fp16 gradients were refused."""
    run = trained(KnownGradient(3).to(dtype), use_orig_params=use_orig_params)
    run.backward(1.5)
    assert gradient_of(run) == ([12.0] * 3, dtype)
    run.scaler.unscale_(run.optimizers[0])
    assert gradient_of(run) == ([1.5] * 3, dtype)
    run.finish()
    assert (run.weights(), run.scales()) == ([[-1.5] * 3], [8.0] * world.size)
    run.step(torch.tensor([1.0, 1.0, INF]))
    assert (run.weights(), run.scales()) == ([[-1.5] * 3], [4.0] * world.size)


def test_low_precision_gradients_of_fp32_parameters_are_unscaled(trained):
    precision = Precision(F16, keep_low_precision_grads=True)
    run = trained(KnownGradient(3), use_orig_params=True, precision=precision)
    run.backward(1.5)
    run.scaler.unscale_(run.optimizers[0])
    assert gradient_of(run) == ([1.5] * 3, F16)


def test_an_fp16_gradient_that_overflows_unscaled_stops_the_step(world, trained):
    """Below a scale of 1 a gradient grows when it is unscaled: here to 80,000, and fp16 ends at 65,504."""
    run = trained(KnownGradient(3).to(F16), {"init_scale": 2.0**-4})
    for _ in range(2):
        run.backward(40000.0)
    assert gradient_of(run) == ([5000.0] * 3, F16)
    run.finish()
    assert (run.weights(), run.scales()) == ([[0.0] * 3], [2.0**-5] * world.size)


def test_an_fp16_loss_stays_fp16_with_a_scale_beyond_its_range(world, trained):
    run = trained(KnownGradient(3), {"init_scale": 2.0**17})
    losses = torch.tensor([0.25, 0.125], dtype=F16, device=world.device)
    scaled = run.scaler.scale(losses)
    assert (scaled.dtype, scaled.tolist()) == (F16, [2.0**15, 2.0**14])


@pytest.mark.parametrize("bad", [INF, NAN])
def test_the_norm_is_of_unscaled_gradients_around_an_overflow(world, trained, use_orig_params, bad):
    """DeepSpeed#2695: it was computed with the scale that the overflow had led to."""
    run = trained(KnownGradient(3), use_orig_params=use_orig_params)
    norms = []
    for gradient in (1.5, bad, 1.5, bad, 3.0):
        run.model.zero_grad()
        run.backward(gradient)
        run.scaler.unscale_(run.optimizers[0])
        norms.append(run.engine.clip_grad_norm_(run.model, 1e4).item())
        run.finish()
    root = 3**0.5
    assert norms == pytest.approx([1.5 * root, bad, 1.5 * root, bad, 3 * root], nan_ok=True)
    assert (run.weights(), run.scales()) == ([[-6.0] * 3], [2.0] * world.size)


def test_the_norm_is_right_at_the_scale_that_just_fits(world, trained):
    """A gradient of 1 overflows fp16 by the scale alone, until that is half of what it was."""
    run = trained(KnownGradient(3), {"init_scale": 2.0**17}, precision=Precision(F16))
    norms = []
    for _ in range(4):
        run.model.zero_grad()
        run.backward(1.0)
        run.scaler.unscale_(run.optimizers[0])
        norms.append(run.engine.clip_grad_norm_(run.model, 0.5).item())
        run.finish()
    assert norms == pytest.approx([INF, INF, 3**0.5, 3**0.5])
    assert run.scales() == [2.0**15] * world.size
    assert run.weights() == [pytest.approx([-1.0 / 3**0.5] * 3, rel=1e-5)]


def test_microbatches_add_up_and_an_inf_in_one_stops_the_step(world, trained, use_orig_params, offload):
    run = trained(KnownGradient(2 * world.size), use_orig_params=use_orig_params, offload=offload)
    overflowing = torch.ones(2 * world.size)
    overflowing[-1] = INF
    for unsynced, weight, scale in ((1.0, -3.0, 8.0), (overflowing, -3.0, 4.0), (3.0, -8.0, 4.0)):
        run.model.zero_grad()
        with run.engine.no_sync(run.model):
            run.backward(unsynced)
        run.backward(2.0)
        run.finish()
        assert (run.weights(), run.scales()) == ([[weight] * 2 * world.size], [scale] * world.size)


class Words(nn.Module):
    """A weight, and an embedding that reads one word twice and has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.known = KnownGradient(4)
        self.embedding = nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(self.embedding.weight)

    def forward(self, gradient, of_embedding):
        words = self.embedding(torch.tensor([2, 0, 2], device=gradient.device))
        return self.known(gradient) + (words * of_embedding).sum()


@pytest.mark.ranks(2, 3)
def test_an_unsharded_sparse_gradient_unscales_and_stops_all(world, trained):
    run = trained(Words(), ignored=("embedding",))
    run.step(1.0, 4.0)
    embedding = run.engine.unwrapped(run.model).embedding.weight
    own = 4.0 * run.spread
    assert run.weights()[0] == [-1.0] * 4
    assert embedding.flatten().tolist() == [-own, 0.0, -2 * own]
    before = embedding.detach().clone()
    run.step(1.0, INF if world.rank == 0 else 1.0)
    assert (run.weights()[0], run.scales()) == ([-1.0] * 4, [4.0] * world.size)
    assert torch.equal(embedding, before)
