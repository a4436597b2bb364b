"""Modules, outputs and parameters while a sharded model is trained, seen from outside and inside.

After PyTorch's test/distributed/fsdp/test_fsdp_core.py, all classes but TestParityWithDDP.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from lockstep.assertions import assert_named_close, named_gradients
from lockstep.assertions.parity import sgd_with_momentum
from lockstep.conformance import Capability, Precision, ShardSpec, require
from lockstep.conformance.models import NestedWrappedModule, TransformerWithSharedParams

pytestmark = pytest.mark.ranks(2)

HALF = torch.float16
IN_HALF = Precision(HALF, HALF, HALF)
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
PRODUCT = {"strategy": STRATEGIES, "use_orig_params": [False, True]}

# With fp16, batch norm becomes a unit of its own in full precision, and the engine says so.
batch_norm_warns = pytest.mark.filterwarnings("ignore:(?s).*BatchNorm1d:UserWarning")


def sharded_transformer(world, engine, device_first=True, **settings):
    torch.manual_seed(world.seed)
    bare = TransformerWithSharedParams()
    spec = ShardSpec(units=bare.units, **settings)
    if device_first:
        return engine.shard(bare.to(world.device), spec)
    return engine.shard(bare, spec).to(world.device)


def own_batch(world, model):
    """Return a batch of this rank's own, on its device; always the same."""
    batch = model.batch(torch.Generator().manual_seed(world.rank))
    return batch.to(world.device) if isinstance(batch, Tensor) else tuple(t.to(world.device) for t in batch)


def train_transformer(world, engine, model, steps):
    optimizer = engine.optimizer(model, sgd_with_momentum)
    src, tgt = own_batch(world, TransformerWithSharedParams)
    for _ in range(steps):
        optimizer.zero_grad()
        engine.backward(model, TransformerWithSharedParams.loss(model(src, tgt), tgt))
        optimizer.step()


class TestParamInit:
    @pytest.mark.parametrize("precision", [None, Precision(), IN_HALF], ids=["none", "default", "half"])
    def test_param_change_after_init(self, world, engine, run_subtests, precision):
        run_subtests(PRODUCT, self.check, world, engine, precision)

    def check(self, world, engine, precision, **settings):
        bare = NestedWrappedModule().to(world.device)
        x = own_batch(world, bare)
        model = engine.shard(
            copy.deepcopy(bare), ShardSpec(units=bare.units, precision=precision, **settings)
        )
        model(x)
        changed = first_group_names(engine, model, bare)
        with torch.no_grad():
            next(model.parameters()).fill_(0.5)
            for name in changed:
                bare.get_parameter(name).fill_(0.5)
        expected = bare.half()(x.half()) if precision == IN_HALF else bare(x)
        assert torch.equal(model(x), expected)


def first_group_names(engine, model, bare):
    """Return the names of the parameters that the first visible parameter consists of."""
    first, _ = next(engine.unwrapped(model).named_parameters())
    if first in dict(bare.named_parameters()):
        return [first]
    return engine.groups(model)[0].parameters


@pytest.mark.inside
class TestHooks:
    @pytest.mark.parametrize("device_first", [False, True])
    def test_pre_backward_hook_registration(self, world, engine, run_subtests, device_first):
        def check(**settings):
            assert_one_pre_backward_hook(
                world, engine, sharded_transformer(world, engine, device_first, **settings)
            )

        run_subtests(PRODUCT, check)

    def test_pre_backward_hook_registration_after_state_dict(self, world, engine, run_subtests):
        def check(**settings):
            model = sharded_transformer(world, engine, **settings)
            train_transformer(world, engine, model, steps=2)
            model.load_state_dict(model.state_dict())
            assert_one_pre_backward_hook(world, engine, model)

        run_subtests(PRODUCT, check)

    @pytest.mark.parametrize("device_first", [False, True])
    @pytest.mark.parametrize("precision", [None, IN_HALF], ids=["none", "half"])
    def test_register_functions_called(self, world, engine, run_subtests, device_first, precision):
        run_subtests(PRODUCT, self.check_registration, world, engine, device_first, precision)

    def check_registration(self, world, engine, device_first, precision, **settings):
        bare = NestedWrappedModule().to(world.device) if device_first else NestedWrappedModule()
        outputs = last_outputs(bare)
        spec = ShardSpec(units=bare.units, precision=precision, **settings)
        model = engine.shard(bare, spec).to(world.device)
        assert [group.post_backward_hooks for group in engine.groups(model)] == [()] * 4
        for _ in range(2):
            model(own_batch(world, bare))
            found = {name: engine.pre_backward_hooks(output) for name, output in outputs.items()}
            assert found == {name: int(name != "module.0") for name in outputs}
            for group in engine.groups(model):
                assert group.post_backward_hooks == (1,) * len(group.parameters), group.name


def last_outputs(bare):
    """Return a mapping that will hold what each module returned last.

    Of the nested model's, only that of module.0 is no unit's output: module.1.1 and module.3 end one.
    """
    outputs = {}
    for name, module in bare.named_modules():
        module.register_forward_hook(lambda _, args, output, name=name: outputs.update({name: output}))
    return outputs


def assert_one_pre_backward_hook(world, engine, model):
    optimizer = engine.optimizer(model, sgd_with_momentum)
    src, tgt = own_batch(world, TransformerWithSharedParams)
    output = model(src, tgt)
    assert engine.pre_backward_hooks(output) == 1
    engine.backward(model, TransformerWithSharedParams.loss(output, tgt))
    assert engine.pre_backward_hooks(output) == 1
    optimizer.step()
    assert engine.pre_backward_hooks(output) == 1


class TestNoGrad:
    @batch_norm_warns
    @pytest.mark.parametrize("precision", [None, IN_HALF], ids=["none", "half"])
    def test_transformer_no_grad(self, world, engine, run_subtests, precision):
        run_subtests(PRODUCT, self.check, world, engine, precision)

    def check(self, world, engine, precision, **settings):
        model = sharded_transformer(world, engine, precision=precision, **settings)
        train_transformer(world, engine, model, steps=1)
        model.eval()
        batch = own_batch(world, TransformerWithSharedParams)
        expected = model(*batch)
        with torch.no_grad():
            assert torch.equal(model(*batch), expected)


class Watched(nn.Linear):
    """A layer that records the parameters that its forward and its backward find."""

    def __init__(self):
        super().__init__(4, 4)
        self.found = []

    def forward(self, x):
        self.look("forward")
        y = super().forward(x)
        # After what announces backward of the output, before the gradients of this layer's parameters.
        y.register_hook(lambda _: self.look("backward"))
        return y.tanh()

    def look(self, when):
        weight, bias = self.weight, self.bias
        one_storage = weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
        for tensor in (weight, bias):
            self.found.append((when, type(tensor), tuple(tensor.shape), tensor.requires_grad, one_storage))


AS_VIEWS = [(when, Tensor, shape, True, True) for when in ("forward", "backward") for shape in ((4, 4), (4,))]


@pytest.mark.inside
class TestAutograd:
    def test_unshard_params_as_tensors(self, world, engine, run_subtests):
        settings = {
            "strategy": ["FULL_SHARD", "SHARD_GRAD_OP"],
            "use_orig_params": [False, True],
            "forward_prefetch": [False, True],
            "backward_prefetch": [None, "BACKWARD_PRE", "BACKWARD_POST"],
        }
        run_subtests(settings, self.check, world, engine)

    def check(self, world, engine, **settings):
        require(engine, Capability.PLAIN_PARAMETERS)
        layers = [Watched() for _ in range(5)]
        bare = nn.Sequential(*layers).to(world.device)
        reference = copy.deepcopy(bare)
        model = engine.shard(bare, ShardSpec(units=(Watched,), **settings))
        # Prefetch follows an order that the first step shows.
        for _ in range(2):
            x = torch.randn(2, 4, device=world.device)
            engine.backward(model, model(x).sum())
            reference(x).sum().backward()
            assert_named_close(engine.full_gradients(model), named_gradients(reference))
        assert [layer.found for layer in layers] == [AS_VIEWS * 2] * 5
