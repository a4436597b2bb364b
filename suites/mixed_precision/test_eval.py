"""Eval in full precision of a model that trains in low precision, set by an argument or the environment.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_gradient_dtypes
from lockstep.conformance import Precision
from lockstep.conformance.models import TransformerWithSharedParams
from lockstep.recorders import CollectivesLog, ForwardDtypes

pytestmark = pytest.mark.ranks(2)

F16, F32 = torch.float16, torch.float32
THIRD = 1 / 3

batch_norm_warns = pytest.mark.filterwarnings("ignore:(?s).*BatchNorm1d:UserWarning")


class Holding(nn.Module):
    """A root without parameters of its own."""

    units = ("below",)

    def __init__(self):
        super().__init__()
        self.below = nn.Linear(8, 8)

    def forward(self, x):
        return self.below(x)


@pytest.fixture(params=["environment", "argument"])
def setting(request, monkeypatch):
    """Request full precision in eval, or not, and return the argument; it overrides the environment."""

    def setting(wanted):
        by_argument = request.param == "argument"
        monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", str(int(wanted != by_argument)))
        return wanted if by_argument else None

    return setting


@pytest.fixture
def ids(batches):
    """Return the batch of the transformer for a step, 0 if none is given."""
    return batches(TransformerWithSharedParams.batch)


def loss_of(model, src_and_tgt):
    return TransformerWithSharedParams.loss(model(*src_and_tgt), src_and_tgt[1])


class TestFSDPMixedPrecisionSharded:
    @pytest.mark.parametrize("full", [True, False])
    @pytest.mark.inside
    def test_eval_root_cast_inputs(self, world, engine, shard, setting, full):
        bare = Holding()
        log = ForwardDtypes(bare)
        model = shard(bare, precision=Precision(F16, F16, F16), full_precision_in_eval=setting(full)).eval()
        with log:
            engine.backward(model, model(torch.ones(4, 8, device=world.device)).sum())
        assert [group.name for group in engine.groups(model)] == ["below"]
        expected = {F32} if full else {F16}
        assert log.inputs("") == log.inputs("below") == log.parameters("below") == expected

    @batch_norm_warns
    @pytest.mark.parametrize("full", [True, False])
    @pytest.mark.parametrize("cast_forward_inputs", [True, False])
    def test_full_precision_in_eval(self, engine, shard, setting, ids, full, cast_forward_inputs):
        bare = TransformerWithSharedParams()
        log = ForwardDtypes(bare)
        precision = Precision(F16, F16, F16, cast_forward_inputs=cast_forward_inputs)
        model = shard(bare, precision=precision, full_precision_in_eval=setting(full))
        trained = loss_of(model, ids())
        engine.backward(model, trained)
        assert trained.dtype == F16
        assert_gradient_dtypes(model, F32)
        with log:
            evaluated = loss_of(model.eval(), ids())
        expected = F32 if full else F16
        assert evaluated.dtype == expected
        for name in ("embed_tokens", "transformer.encoder.layers.0.linear1", "output_proj"):
            assert log.parameters(name) == {expected}
        assert log.inputs("output_proj") == {expected}

    @batch_norm_warns
    @pytest.mark.parametrize("full", [True, False])
    @pytest.mark.parametrize("cast_forward_inputs", [True, False])
    def test_full_precision_in_eval_buffers(self, engine, shard, setting, ids, full, cast_forward_inputs):
        bare = TransformerWithSharedParams()
        bare.vocab_bias.fill_(THIRD)
        precision = Precision(F16, F16, F16, cast_forward_inputs=cast_forward_inputs)
        log = ForwardDtypes(bare)
        model = shard(bare, precision=precision, full_precision_in_eval=setting(full))
        expected = F32 if full else F16
        for train, dtype in ((True, F16), (False, expected), (True, F16), (False, expected)):
            with log:
                model.train(train)(*ids())
            (*_, call) = log.calls("")
            assert call.buffers == {"vocab_bias": dtype, "long_buffer": torch.int64}
            assert torch.equal(bare.vocab_bias.cpu(), torch.full((16,), THIRD).to(dtype))
            assert engine.full_state(model)["vocab_bias"].dtype == F32

    @batch_norm_warns
    @pytest.mark.parametrize("full", [True, False])
    @pytest.mark.parametrize("cast_forward_inputs", [True, False])
    @pytest.mark.inside
    def test_full_precision_in_eval_comm(self, engine, shard, setting, ids, full, cast_forward_inputs):
        precision = Precision(F32, F16, F32, cast_forward_inputs=cast_forward_inputs)
        model = shard(
            TransformerWithSharedParams(), precision=precision, full_precision_in_eval=setting(full)
        )
        # The batch norm is a fourth group, which is in full precision always.
        low, high = Counter({F16: 3, F32: 1}), Counter({F32: 4})
        for train, expected in ((True, low), (False, high if full else low), (True, low)):
            with CollectivesLog() as log:
                engine.backward(model, loss_of(model.train(train), ids()))
            assert Counter(entry.dtype for entry in engine.traffic(log).reductions) == expected
