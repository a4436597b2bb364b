"""Recomputation under activation checkpointing: cast as the first forward was, with the same numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close, named_gradients
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Precision
from lockstep.recorders import ForwardDtypes

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BOTH_KINDS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
MIXED = Precision(BF16, F32, F16, cast_forward_inputs=True)
WITHOUT_BUFFERS = Precision(BF16, F32, cast_forward_inputs=True)

# What is checkpointed is a part of a unit, a unit, or holds units.
SETTINGS = {"units": [(), ("inner",), ("inner.first", "inner.second")], "use_orig_params": [False, True]}


class Shifted(nn.Linear):
    """A linear layer with a buffer that is added."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("shift", torch.full((8,), 1 / 3))

    def forward(self, x):
        y = super().forward(x)
        return y + self.shift.to(y.dtype)


class Inner(nn.Module):
    """Two layers, and between them a factor that the caller gives."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Shifted(), Shifted()

    def forward(self, x, factor):
        x = self.first(x).tanh()
        return self.second(x * factor.to(x.dtype))


class Autocast(Inner):
    """The same under an autocast of its own."""

    def forward(self, x, factor):
        with torch.autocast(x.device.type, BF16):
            return super().forward(x, factor)


class Recomputed(nn.Module):
    """A layer, and `inner`, which backward computes a second time; not if `use_reentrant` is None."""

    def __init__(self, use_reentrant, inner=Inner):
        super().__init__()
        self.before, self.inner, self.use_reentrant = nn.Linear(8, 8), inner(), use_reentrant

    def forward(self, x):
        arguments = self.before(x), torch.linspace(0.5, 1.5, 8, device=x.device)
        if self.use_reentrant is None:
            return self.inner(*arguments)
        return checkpoint(self.inner, *arguments, use_reentrant=self.use_reentrant)


def loss_of(world, model, autocast=False):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(world.rank)).to(world.device)
    with torch.autocast(world.device.type, BF16, enabled=autocast):
        output = model(x)
    return output.float().square().sum()


@pytest.fixture
def passes(world, engine, shard):
    """Return the calls of modules in forward and those in backward, by name."""

    def passes(bare, autocast=False, **spec):
        log = ForwardDtypes(bare)
        model = shard(bare, **spec)
        with log:
            engine.backward(model, loss_of(world, model, autocast))
        return [{c.module: c for c in log if c.in_backward == again} for again in (False, True)]

    return passes


def assert_same_dtypes(first, again):
    """Hold what was recomputed to what was computed first."""
    assert set(again) == {"inner", "inner.first", "inner.second"}
    for name, call in again.items():
        before = first[name]
        found = call.inputs, call.parameters, call.buffers
        assert found == (before.inputs, before.parameters, before.buffers), name


@BOTH_KINDS
def test_recomputation_casts_as_the_first_forward_did(passes, run_subtests, strategy, use_reentrant):
    """pytorch#148831: casts were lost when activation checkpointing recomputed."""

    def check(units, precision, **settings):
        bare = Recomputed(use_reentrant)
        first, again = passes(bare, strategy=strategy, units=units, precision=precision, **settings)
        assert_same_dtypes(first, again)
        # The factor is made between units: a unit casts it, the root does not.
        assert again["inner"].inputs == {"0": BF16, "1": BF16 if "inner" in units else F32}
        for layer in ("inner.first", "inner.second"):
            assert again[layer].inputs == {"0": BF16}
            assert again[layer].parameters.items() >= {"weight": BF16, "bias": BF16}.items()
            assert again[layer].buffers == {"shift": precision.buffer_dtype or F32}

    run_subtests({**SETTINGS, "precision": [MIXED, WITHOUT_BUFFERS]}, check)


@BOTH_KINDS
@pytest.mark.parametrize("inner", [Inner, Autocast], ids=["around", "inside"])
def test_recomputation_is_under_autocast_as_the_first_forward(
    passes, run_subtests, strategy, use_reentrant, inner
):
    """pytorch#148831: so was autocast."""

    def check(**settings):
        bare, around = Recomputed(use_reentrant, inner), inner is Inner
        first, again = passes(bare, around, strategy=strategy, **settings)
        assert_same_dtypes(first, again)
        assert again["inner.first"].inputs == {"0": BF16 if around else F32}
        assert again["inner.second"].inputs == {"0": BF16}
        assert again["inner.second"].parameters.items() >= {"weight": F32, "bias": F32}.items()

    run_subtests(SETTINGS, check)


@BOTH_KINDS
@pytest.mark.filterwarnings("ignore:(?s).*BatchNorm1d:UserWarning")
def test_a_norm_in_full_precision_is_recomputed_like_that(passes, strategy, use_reentrant):
    bare = Recomputed(use_reentrant)
    bare.inner.first = nn.BatchNorm1d(8)
    first, again = passes(bare, strategy=strategy, units=("inner",), precision=MIXED)
    assert_same_dtypes(first, again)
    norm = again["inner.first"]
    found = norm.inputs["0"], norm.parameters["weight"], norm.buffers["running_mean"]
    assert (found, again["inner.second"].inputs) == ((F32, F32, F32), {"0": BF16})


def expected_gradients(world, bare, precision, autocast):
    """Return the mean over ranks of what an unsharded model with the same casts gives, in fp32."""
    cast = {name: p.to(precision.param_dtype or F32) for name, p in bare.named_parameters()}
    cast |= {name: b.to(precision.buffer_dtype or F32) for name, b in bare.named_buffers()}

    def reference(x):
        return functional_call(bare, cast, x.to(precision.param_dtype or F32))

    loss_of(world, reference, autocast).backward()
    of_ranks = world.gather(named_gradients(bare))
    return {name: sum(gradients[name] for gradients in of_ranks) / len(of_ranks) for name in of_ranks[0]}


@pytest.mark.parametrize("casts", ["mixed", "without_buffers", "autocast", "autocast_inside"])
def test_recomputation_changes_no_bit_of_a_gradient(world, engine, shard, run_subtests, strategy, casts):
    inner = Autocast if casts == "autocast_inside" else Inner
    precision = {"mixed": MIXED, "without_buffers": WITHOUT_BUFFERS}.get(casts, Precision())
    bare = Recomputed(None, inner).to(world.device)
    expected = expected_gradients(world, copy.deepcopy(bare), precision, casts == "autocast")

    def check(**settings):
        found = []
        for use_reentrant in (None, False, True):
            bare.use_reentrant = use_reentrant
            model = shard(copy.deepcopy(bare), strategy, precision=precision, **settings)
            engine.backward(model, loss_of(world, model, casts == "autocast"))
            found.append(engine.full_gradients(model))
        assert_named_close(found[0], expected, BF16)
        assert_named_close(found[1], found[0], EXACT)
        assert_named_close(found[2], found[0], EXACT)

    run_subtests(SETTINGS, check)
