"""Training and evaluation in turn, of an averaged copy of the weights that is updated in between.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, class TestFSDPTrainEval.
"""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.assertions import assert_named_close
from lockstep.conformance import Precision, ShardSpec

F16 = torch.float16
WIDTH = 16
ROUNDS = 3


class TransformerWithEMA(nn.Module):
    """A transformer that is trained, and a running average of it that is evaluated."""

    units = (nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

    def __init__(self):
        super().__init__()
        self.module = transformer()
        self.ema_module = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    def forward(self, src, tgt):
        return self.module(src, tgt) if self.training else self.ema_module(src, tgt)


def transformer():
    # The encoder it would make warns that nested tensors are off in this order of dimensions.
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=8)
    encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    return nn.Transformer(WIDTH, nhead=2, num_decoder_layers=1, dim_feedforward=8, custom_encoder=encoder)


def src_and_tgt(generator):
    return tuple(torch.randn(length, 2, WIDTH, generator=generator) for length in (5, 4))


class Unsharded:
    """The flow with full parameters on every rank, cast and reduced by hand."""

    def __init__(self, world, bare):
        self.world, self.bare, self.model = world, bare, bare
        self.optimizer = adam(bare.module.parameters())

    def __call__(self, batch):
        halves = {name: parameter.half() for name, parameter in self.bare.named_parameters()}
        return functional_call(self.bare, halves, tuple(tensor.half() for tensor in batch))

    def train(self, batch):
        computed = self(batch)
        computed.sum().backward()
        for parameter in self.bare.module.parameters():
            of_ranks = self.world.gather(parameter.grad.half().float())
            parameter.grad = (sum(of_ranks) / len(of_ranks)).half().float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.bare.ema_module.update_parameters(self.bare.module)

    def parameters(self):
        return dict(self.bare.named_parameters())


class Sharded:
    """The flow as a user of the engine writes it."""

    def __init__(self, world, engine, bare, **settings):
        spec = ShardSpec(units=bare.units, precision=Precision(F16), device=world.device, **settings)
        self.bare, self.engine, self.model = bare, engine, engine.shard(bare, spec)
        self.optimizer = engine.optimizer(self.model, adam)

    def __call__(self, batch):
        return self.model(*batch)

    def train(self, batch):
        self.engine.backward(self.model, self(batch).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        with self.engine.summon(self.model, writeback=True):
            self.bare.ema_module.update_parameters(self.bare.module)

    def parameters(self):
        return self.engine.full_parameters(self.model)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def evaluations(batch, flow):
    """Return what the averaged copy computes after each round, and in the end all parameters."""
    found = {}
    for number in range(ROUNDS):
        flow.model.train()
        torch.manual_seed(number)  # of dropout
        flow.train(batch(number))
        flow.model.eval()
        with torch.no_grad():
            found[f"output {number}"] = flow(batch(ROUNDS))
    return found | flow.parameters()


@pytest.mark.ranks(2)
class TestFSDPTrainEval:
    def test_train_ema_eval_flow(self, world, engine, batches, run_subtests, strategy):
        bare = TransformerWithEMA().to(world.device)
        batch = batches(src_and_tgt)
        expected = evaluations(batch, Unsharded(world, copy.deepcopy(bare)))
        outputs = [expected[f"output {number}"] for number in range(ROUNDS)]
        assert not any(map(torch.equal, outputs, outputs[1:]))

        def check(**settings):
            flow = Sharded(world, engine, copy.deepcopy(bare), strategy=strategy, **settings)
            assert_named_close(evaluations(batch, flow), expected, F16)

        run_subtests({"use_orig_params": [False, True], "offload": [False, True]}, check)
