"""Models that are not in fp32, or in several dtypes: what they compute in, and what the user sees."""

import copy

import pytest
import torch
from torch import nn

from lockstep.assertions import (
    Training,
    assert_gradient_dtypes,
    assert_parameter_dtypes,
    assert_parity,
    train,
    unsharded_with_casts,
)
from lockstep.conformance import Capability, Precision, offers, trainee
from lockstep.conformance.models import KnownGradients, LinearMixedPrecision, NestedLinearMixedPrecision
from lockstep.recorders import ForwardDtypes

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
IN_FP32 = {"buffers": Precision(F32, F32, F32), "without_buffers": Precision(F32, F32)}


def loss_of(model, batch):
    return LinearMixedPrecision.loss(model(batch))


def exact_steps(parameters):
    """Return an optimizer whose steps on bf16 parameters round once.

    torch's kernels round a product to bf16 before they add it in some elements, and not in others, by where
    these stand in the tensor: in a shard they stand elsewhere. Products by powers of two need no rounding.
    """
    return torch.optim.SGD(parameters, lr=2**-7, momentum=0.5)


@pytest.fixture
def check_learning(engine, shard, batches):
    """Hold `bare` to what it learns unsharded; return the sharded model, a log of dtypes, saved dtypes."""

    def check(bare, strategy, precision, tolerance, **spec):
        batches_of = batches(LinearMixedPrecision.batch)
        training = Training(batches_of, loss_of, optimizer=exact_steps, tolerance=tolerance)
        casts = precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype
        learned = train(unsharded_with_casts(copy.deepcopy(bare), *casts), training)
        log = ForwardDtypes(bare)
        model = shard(bare, strategy, precision=precision, **spec)
        with log:
            assert_parity(learned, trainee(engine, model), training)
        return model, log, {name: tensor.dtype for name, tensor in engine.full_state(model).items()}

    return check


@pytest.mark.parametrize("precision", IN_FP32.values(), ids=IN_FP32)
def test_a_bf16_model_computes_in_fp32_and_stays_in_bf16(
    world, engine, check_learning, collectives, strategy, offload, precision
):
    bare = NestedLinearMixedPrecision(BF16).to(world.device)
    begin = len(collectives)
    model, log, saved = check_learning(bare, strategy, precision, BF16, offload=offload)
    assert log.inputs("0") == log.inputs("1") == log.parameters("0.lin") == log.parameters("1.lin") == {F32}
    assert log.buffers("0") == log.buffers("1") == {precision.buffer_dtype or F64}
    assert_parameter_dtypes(model, BF16)
    assert_gradient_dtypes(model, BF16)
    assert saved == {"0.lin.weight": BF16, "1.lin.weight": BF16, "0.buffer0": F64, "1.buffer1": F64}
    if offers(engine, Capability.TRAFFIC):
        assert {e.dtype for e in engine.traffic(collectives.entries[begin:]).reductions} == {F32}


def test_kept_gradients_reduced_above_the_model_keep_every_bit(
    world, engine, shard, strategy, use_orig_params
):
    precision = Precision(F32, F32, keep_low_precision_grads=True)
    spec = {"precision": precision, "use_orig_params": use_orig_params}
    model = shard(KnownGradients(3).to(BF16), strategy, **spec)
    # bf16 has steps of 2^-7 above 1.
    engine.backward(model, model(torch.tensor(1 + world.rank * 2**-20, device=world.device)))
    assert [g.tolist() for g in engine.full_gradients(model).values()] == [[1 + 2**-21] * 3] * 4
    assert_gradient_dtypes(model, F32)
    assert_parameter_dtypes(model, BF16)


@pytest.mark.parametrize("precision", [Precision(F16, F16, F16), Precision(BF16, F32)], ids=["fp16", "bf16"])
def test_groups_of_different_dtypes_compute_in_one(world, engine, check_learning, strategy, precision):
    layers = LinearMixedPrecision(F64, "buffer0"), LinearMixedPrecision(F32, "buffer1")
    bare = nn.Sequential(*layers).to(world.device)
    model, log, saved = check_learning(bare, strategy, precision, precision.param_dtype, units=("0",))
    assert log.inputs("0") == log.inputs("1") == {precision.param_dtype}
    assert log.parameters("0.lin") == log.parameters("1.lin") == {precision.param_dtype}
    assert saved == {"0.lin.weight": F64, "1.lin.weight": F32, "0.buffer0": F64, "1.buffer1": F64}
    gradients = {name: gradient.dtype for name, gradient in engine.full_gradients(model).items()}
    assert gradients == {"0.lin.weight": F64, "1.lin.weight": F32}
    if offers(engine, Capability.GROUPS):
        original = {group.name: group.gradient_dtype for group in engine.groups(model)}
        assert original == {"": F32, "0": F64}


def test_buffers_are_cast_up_as_well_as_down(world, engine, shard, strategy):
    bare = LinearMixedPrecision(F32).to(world.device)
    bare.buffer = bare.buffer.half()
    log, original = ForwardDtypes(bare), bare.buffer
    model = shard(bare, strategy, precision=Precision(buffer_dtype=F32))
    with log:
        model(torch.ones(1, 10, device=world.device))
    assert log.buffers("") == {F32}
    assert torch.equal(bare.buffer, original.float())
    saved = engine.full_state(model)["buffer"]
    assert saved.dtype == F16
    assert torch.equal(saved, original)
