"""Integer inputs, which are never cast: a transformer with a tied embedding learns in mixed precision.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, the tests of embeddings.
"""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from lockstep.assertions import Tolerance, Training, assert_parity, train, unsharded_with_casts
from lockstep.conformance import Capability, Precision, ShardSpec, offers, trainee
from lockstep.conformance.models import TransformerWithSharedParams
from lockstep.recorders import ForwardDtypes

F16, F32, I64 = torch.float16, torch.float32, torch.int64
STEPS = 6
# The row of fp16, but for its atol: an engine that rounds what each rank sends is off by a unit of the terms,
# 3e-5 at 0.05, where the gradients of ranks cancel. Where they do depends on the CPU.
CLOSE = Tolerance(1e-4, 1e-3)


def loss_of(model, batch):
    return TransformerWithSharedParams.loss(model(*batch), batch[1])


def check_training(world, engine, batches, collectives, precision, units):
    bare = TransformerWithSharedParams().to(world.device)
    training = Training(batches(TransformerWithSharedParams.batch), loss_of, STEPS, tolerance=CLOSE)
    casts = precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype
    # Where units are chosen at all, batch norm becomes one in full precision, if the engine has such.
    precise = (nn.BatchNorm1d,) if units and offers(engine, Capability.NORM_UNITS) else ()
    learned = train(unsharded_with_casts(copy.deepcopy(bare), *casts, precise), training)
    log, begin = ForwardDtypes(bare), len(collectives)
    model = engine.shard(bare, ShardSpec(units=units, precision=precision))
    computed = precision.param_dtype or F32

    def backward(model, loss):
        assert loss.dtype == computed
        engine.backward(model, loss)

    with log:
        candidate = trainee(engine, model, backward=backward)
        assert_parity(learned, candidate, training)
    check_dtypes(log, computed)
    if offers(engine, Capability.GROUPS) and offers(engine, Capability.TRAFFIC):
        reductions = engine.traffic(collectives.entries[begin:]).reductions
        check_wire(engine.groups(model), reductions, precision.reduce_dtype or computed)


def check_dtypes(log, computed):
    for name, num_inputs in (("", 2), ("embed_tokens", 1)):
        for call in log.calls(name):
            assert list(call.inputs.values()) == [I64] * num_inputs
    assert log.parameters("embed_tokens") == log.inputs("output_proj") == {computed}
    assert {call.buffers["long_buffer"] for call in log.calls("")} == {I64}


def check_wire(groups, reductions, wire):
    """Check that each group was reduced once a step: the batch norm, as a unit, in full precision."""
    expected = {(F32 if group.name == "bn" else wire, (group.full_numel,)): STEPS for group in groups}
    assert Counter((entry.dtype, entry.shape) for entry in reductions) == expected


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:(?s).*BatchNorm1d:UserWarning")
class TestFSDPMixedPrecisionSharded:
    def test_mp_embedding_reduce(self, check_both_ways):
        check_both_ways(Precision(reduce_dtype=F16))

    def test_mp_embedding_only_params_and_bufs(self, check_both_ways):
        check_both_ways(Precision(F16, buffer_dtype=F16))

    def test_mp_embedding_default(self, check_both_ways):
        check_both_ways(Precision(F16, F16, F16))

    def test_mp_embedding_params_and_reduce_diff(self, check_both_ways):
        check_both_ways(Precision(F16, F32, F16))

    @pytest.fixture
    def check_both_ways(self, world, engine, batches, collectives, run_subtests):
        """Train with all parameters in one group, and with layers that are units."""

        def check(precision):
            settings = {"units": [(), TransformerWithSharedParams.units]}
            run_subtests(settings, check_training, world, engine, batches, collectives, precision)

        return check
