"""Which dtypes parameters, buffers and arguments have: inside forward, between steps, and in saved state."""

import dataclasses

import pytest
import torch
from torch import nn

from harness.adapters import Precision, ShardSpec
from harness.assertions import assert_buffer_dtypes, assert_gradient_dtypes, assert_parameter_dtypes
from harness.recorders import ForwardDtypes
from harness.zoo import KnownGradient

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
MIXED = Precision(BF16, buffer_dtype=F16)


class Shifted(nn.Linear):
    """A linear layer with a buffer that is added, one of integers, and one that is not saved."""

    def __init__(self, shift=F32):
        super().__init__(8, 8)
        self.register_buffer("shift", torch.full((8,), 1 / 3, dtype=shift))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.shift.to(x.dtype)


class Layers(nn.Sequential):
    """A unit, a layer of the root between, and a unit again; they start with buffers of different dtypes."""

    units = ("0", "2")

    def __init__(self):
        super().__init__(Shifted(F32), Shifted(F64), Shifted(F32))


def shard(world, engine, bare, strategy="FULL_SHARD", **more):
    units = more.pop("units", getattr(bare, "units", ()))
    return engine.shard(bare.to(world.device), ShardSpec(strategy, units=units, **more))


def batch(world):
    return torch.randn(4, 8, device=world.device) + world.rank


def dtypes_of(tensors):
    return {name: tensor.dtype for name, tensor in tensors.items()}


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_every_module_computes_in_the_configured_dtypes(world, engine, strategy, use_orig_params, train):
    """pytorch#143900: buffer_dtype had no effect."""
    bare = Layers()
    log = ForwardDtypes(bare)
    model = shard(world, engine, bare, strategy, precision=MIXED, use_orig_params=use_orig_params)
    with log:
        model.train(train)(batch(world)).sum().backward()
    for layer in ("0", "1", "2"):
        assert (log.inputs(layer), log.parameters(layer), log.buffers(layer)) == ({BF16}, {BF16}, {F16})
    assert_parameter_dtypes(model, F32)
    assert_gradient_dtypes(model, F32)
    assert_buffer_dtypes(model, F16)


@dataclasses.dataclass
class Request:
    """An argument that has tensors deep inside."""

    values: dict[str, list[torch.Tensor]]
    name: str = "request"


@pytest.mark.parametrize("units", [(), ("below",)], ids=["root", "below"])
def test_floating_point_arguments_are_cast_wherever_they_lie(world, engine, units):
    class Reading(nn.Linear):
        def forward(self, request, *, mask):
            return super().forward(request.values["at"][0]) * mask[0]

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.below = Reading(8, 8)

        def forward(self, request, mask):
            return self.below(request, mask=mask)

    bare = Root()
    log = ForwardDtypes(bare)
    precision = Precision(BF16, cast_forward_inputs=bool(units), cast_root_forward_inputs=not units)
    model = shard(world, engine, bare, units=units, precision=precision)
    request = Request({"at": [batch(world), torch.ones(2, dtype=torch.int64)]})
    with log:
        model(request, (batch(world).double(),)).sum().backward()
    (call,) = log.calls("below")
    assert call.inputs == {"0.values.at.0": BF16, "0.values.at.1": torch.int64, "mask.0": BF16}


@EVERY_STRATEGY
def test_only_floating_point_buffers_are_cast_and_only_if_told(world, engine, strategy):
    bare = Layers()
    log = ForwardDtypes(bare)
    model = shard(world, engine, bare, strategy, precision=Precision(BF16))
    with log:
        model(batch(world))
    assert [log.buffers(layer) for layer in ("0", "1", "2")] == [{F32}, {F32, F64}, {F32}]
    assert {call.buffers["steps"] for layer in ("0", "1", "2") for call in log.calls(layer)} == {torch.int64}


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_ignored_modules_keep_parameters_and_buffers_as_they_are(world, engine, strategy, use_orig_params):
    """pytorch#77439: the buffers of ignored modules were cast."""
    bare = Layers()
    ignored = bare[1]
    log = ForwardDtypes(bare)
    more = {"precision": MIXED, "use_orig_params": use_orig_params, "sync_module_states": True}
    ignored.shift.fill_(world.rank)
    model = shard(world, engine, bare, strategy, ignored=("1",), units=("0",), **more)
    with log, pytest.raises(RuntimeError, match="dtype"):
        model(batch(world))
    assert (log.parameters("1"), log.buffers("1")) == ({F32}, {F32, F64})
    assert (ignored.weight.shape, ignored.shift[0].item()) == ((8, 8), world.rank)
    assert not any(name.startswith("1.") for group in engine.groups(model) for name in group.parameters)


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_saved_state_has_original_dtypes_and_the_parameters_every_bit(
    world, engine, strategy, use_orig_params, offload
):
    """fairscale#704: buffers were saved in half precision."""
    bare = Layers()
    expected = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    model = shard(
        world, engine, bare, strategy, precision=MIXED, use_orig_params=use_orig_params, offload=offload
    )
    model(batch(world)).sum().backward()
    saved = model.state_dict()
    assert dtypes_of(saved) == dtypes_of(expected)
    for name in expected:
        if name.endswith(("weight", "bias")):
            assert torch.equal(saved[name].cpu(), expected[name]), name
    assert_buffer_dtypes(model, F16)


@pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [("FULL_SHARD", False), ("SHARD_GRAD_OP", True), ("NO_SHARD", False)]
)
def test_steps_below_the_resolution_of_the_compute_dtype_add_up(world, engine, strategy, use_orig_params):
    """accelerate#3979: the optimizer worked on bf16 although fp32 was asked for."""
    bare = KnownGradient(3)
    bare.weight.data.fill_(1)
    model = shard(world, engine, bare, strategy, precision=Precision(BF16), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-14)  # bf16 has steps of 2^-8 below 1
    for _ in range(1000):
        model(torch.tensor(2.0 * world.rank, device=world.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.full_parameters(model)["weight"].tolist() == [1 - 1000 * 2**-14] * 3


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_optimizers_state_is_in_full_precision(world, engine, strategy, use_orig_params):
    model = shard(world, engine, Layers(), strategy, precision=MIXED, use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(batch(world)).sum().backward()
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in held} == {F32}
